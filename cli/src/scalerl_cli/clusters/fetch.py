"""``scalerl fetch``: curve, model or rollouts of a run, by the least rights that each needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scalerl_api.paths import RunPaths
from scalerl_cli.clusters import volume
from scalerl_cli.clusters.runs import Run, find, plain
from scalerl_cli.clusters.session import ClusterProblem, CommandFailed, Interrupted, Session, explained
from scalerl_cli.exits import BAD_INPUT, DONE, NOT_FOUND
from scalerl_cli.output import echo, replace_text
from scalerl_operator.kube import errors
from scalerl_operator.manifests.storage import CURVE_KEY, CURVE_LEFT_OUT

_PATHS: Final = RunPaths(Path())
ROLLOUTS: Final = tuple(
    str(path)
    for path in (
        *(_PATHS.journal, _PATHS.rollouts, _PATHS.history, _PATHS.history_lines, _PATHS.metrics),
        *(_PATHS.trace, _PATHS.labels, _PATHS.decisions),
    )
)
"""What ``fetch rollouts`` copies: the journal of acknowledged rollouts, past responses, and records of steps and decisions."""


def fetch(session: Session, arguments: argparse.Namespace) -> int:
    """Copy what is asked for into ``--to``, and print where it is."""
    run = find(session, arguments.name)
    to: Path = arguments.to
    if arguments.what != "model" and (arguments.last or arguments.step is not None):
        raise ClusterProblem("--last and --step select a model", BAD_INPUT)
    if to.exists() and not to.is_dir():
        raise ClusterProblem(f"{to} is not a directory", BAD_INPUT)
    try:
        to.mkdir(parents=True, exist_ok=True)
        if arguments.what == "curve":
            target = to / f"{run.name}-curve.csv"
            table, left_out = curve(session, run)
            replace_text(target, table)
            if left_out:
                echo(f"{left_out} points are left out; curve.csv on the volume has all", error=True)
        elif arguments.what == "model":
            target = _model(session, run, arguments)
        else:
            target = to / f"{run.name}-rollouts"
            missing = f"{run.name} has no rollouts yet"
            _copy(session, run, arguments, ROLLOUTS, target, missing, vanishing=True)
    except OSError as error:
        raise ClusterProblem(f"{error.filename or to}: {error.strerror or error}") from error
    echo(str(target))
    return DONE


def curve(session: Session, run: Run) -> tuple[str, int]:
    """The table of a run's curve, and the number of points that it leaves out: from its ConfigMap, which needs no right on pods;
    of a deleted run, from its record.

    Raises:
        ClusterProblem: there is none.
    """
    if run.record is not None:
        table, left_out = run.curve
    else:
        found = session.get("ConfigMap", run.namespace, run.names.curve)
        table, left_out = "", 0
        owners = () if found is None else found["metadata"].get("ownerReferences") or ()
        if found is not None and any(owner.get("uid") == run.uid for owner in owners):
            table = str((found.get("data") or {}).get(CURVE_KEY) or "")
            left_out = int((found["metadata"].get("annotations") or {}).get(CURVE_LEFT_OUT, 0))
    if not table:
        raise ClusterProblem(f"{run.namespace}/{run.name} has no evaluation yet, so no curve", NOT_FOUND)
    return table, left_out


def _model(session: Session, run: Run, arguments: argparse.Namespace) -> Path:
    if arguments.step is not None:
        path, where = str(_PATHS.exports / f"step-{arguments.step:08d}"), ""
    else:
        which = "last" if arguments.last else "best"
        exports = run.status.get("exports") or {}
        model = exports.get(which)
        if model is None:
            problem = f": {plain(exports['problem'])}" if exports.get("problem") else ""
            raise ClusterProblem(
                f"{run.namespace}/{run.name} has exported no model yet{problem}; one is written after an evaluation",
                NOT_FOUND,
            )
        path, where = str(model["path"]), str(model.get("uri") or "")
    target: Path = arguments.to / f"{run.name}-{Path(path).name}"
    copy = f"; there is a copy in {plain(where)}" if where else ""
    missing = (
        f"{path} is not on the volume: only the models of the best and the last evaluation are kept{copy}"
    )
    try:
        _copy(session, run, arguments, [path], target, missing, strip=f"{path}/")
    except errors.ApiError as error:
        refused = explained(error)
        hint = "; with spec.trainer.export.to, models are copied to a bucket or hub, which needs no right on pods"
        raise ClusterProblem(f"{refused}{copy or hint}", refused.code) from error
    return target


def _copy(
    session: Session,
    run: Run,
    arguments: argparse.Namespace,
    paths: Sequence[str],
    target: Path,
    missing: str,
    **how: Any,
) -> None:
    """Copy ``paths`` to a new directory. missing: the message if there are none; how: see :func:`.volume.copy`."""
    if target.exists():
        raise ClusterProblem(f"{target} exists: remove it, or choose another directory with -o", BAD_INPUT)
    with volume.opened(session, run, arguments.image) as opened:
        try:
            entries = opened.list(paths)
        except (CommandFailed, Interrupted) as error:
            raise ClusterProblem(f"the run directory cannot be listed: {plain(error)}") from error
        if not entries:
            raise ClusterProblem(missing, NOT_FOUND)
        volume.copy(opened, entries, target, **how)
