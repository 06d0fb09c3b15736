"""``scalerl get``: the runs of a cluster, or the records of those that were deleted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from scalerl_analysis.table import aligned
from scalerl_cli.clusters.runs import Run, find, plain, records
from scalerl_cli.clusters.session import Session
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo
from scalerl_operator.kube.kinds import RUN


def get(session: Session, arguments: argparse.Namespace) -> int:
    """Print the runs as a table or as JSON."""
    namespace = None if arguments.all_namespaces else session.namespace
    if arguments.name is not None and not arguments.ended:
        runs = [find(session, arguments.name)]
    elif arguments.ended:
        runs = records(session, namespace, arguments.name)
    else:
        runs = [Run(obj) for obj in session.list(RUN, namespace)]
        runs.sort(key=lambda run: (run.namespace, run.name))
    if arguments.output == "json":
        echo(json.dumps([summary(run) for run in runs], indent=2))
        return DONE
    if not runs:
        where = "any namespace" if namespace is None else f"the namespace {namespace}"
        echo(f"no {'records of deleted runs' if arguments.ended else 'runs'} in {where}", error=True)
        return DONE
    for line in _table(runs, ended=arguments.ended, namespaces=namespace is None):
        echo(line)
    return DONE


def summary(run: Run) -> dict[str, Any]:
    """A run for scripts. Fields without a value are null."""
    condition, status = run.condition or {}, run.status
    return {
        "namespace": run.namespace,
        "name": run.name,
        "uid": run.uid,
        "phase": run.phase,
        "reason": run.reason or None,
        "condition": condition.get("type"),
        "message": condition.get("message"),
        "step": status.get("step"),
        "maxSteps": (run.spec.get("budget") or {}).get("maxSteps"),
        "eta": run.eta or None,
        "reward": status.get("reward"),
        "forecast": status.get("forecast"),
        "decision": status.get("decision"),
        "created": run.obj["metadata"].get("creationTimestamp"),
        "ended": run.ended_at or None,
        "deleted": run.record is not None,
    }


def _table(runs: Sequence[Run], *, ended: bool, namespaces: bool) -> list[str]:
    head = [*(["NAMESPACE"] if namespaces else []), "NAME", "PHASE", "REASON", "STEP", "REWARD"]
    head += ["ENDED"] if ended else ["ETA", "FORECAST", "AGE"]
    rows = [head]
    for run in runs:
        cells = [*([run.namespace] if namespaces else []), run.name, run.phase, run.reason, run.steps]
        cells += [str(run.status.get("reward") or "")]
        cells += [f"{run.age} ago"] if ended else [run.eta, str(run.status.get("forecast") or ""), run.age]
        rows.append([plain(cell) or "-" for cell in cells])
    return aligned(rows, indent="")
