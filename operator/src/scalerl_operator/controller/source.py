"""The claim of the run that a run forks (``spec.from``), which only its preparation mounts.

Only of the run's own namespace: of a run that exists, of one that was deleted by its record, or without either, a claim with the
labels of a run of that name.
"""

from __future__ import annotations

import json
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_operator.build.run_record import RUN_KEY
from scalerl_operator.controller.run_context import CLAIM, RunContext, is_deleted
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.kinds import RUN as RUN_KIND
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ENDED, RUN, Names, label_value
from scalerl_operator.policy.lifecycle_types import JobState
from scalerl_operator.policy.problems import Problem

_FIELD: Final = "spec.from.run"


async def find_source(api: KubeApi, context: RunContext) -> Problem | None:
    """Sets the source's claim in ``context`` for a preparation that is about to be created; returns why there is none.

    A run that has trained has its own checkpoints, and needs the source no more.
    """
    source = context.run.spec.source
    absent = context.observed.prepare.state is JobState.ABSENT
    if source is None or context.trained or not context.decision.prepare or not absent:
        return None
    name, namespace = source.run, context.namespace
    if name == context.name:
        return Problem(
            Reason.SPEC_INVALID, f"{_FIELD}: a run cannot be a fork of itself; give it another name"
        )
    run = await api.get(RUN_KIND, namespace, name)
    recorded = run or await _recorded(api, namespace, name)
    named = None
    if recorded is not None:
        context.source_uid = str(recorded["metadata"].get("uid", ""))
        storage = (recorded.get("spec") or {}).get("storage") or {}
        named = storage.get("claimName")
        if storage.get("mountedBy") == "Coordinator":
            text = f"{_FIELD}: {name}: its checkpoints are in its bucket alone (storage.mountedBy Coordinator), and a fork reads a claim"
            return Problem(Reason.SPEC_INVALID, text)
    claim = str(named or Names(name).claim)
    live = await api.get(CLAIM, namespace, claim)
    if live is None:
        what = (
            "its claim" if recorded is not None else "there is no such run, and the claim of a deleted one,"
        )
        text = f"{_FIELD}: {name}: {what} {claim} does not exist in the namespace {namespace}"
        return Problem(Reason.REFERENCE_NOT_FOUND, text)
    if is_deleted(live):
        text = f"{_FIELD}: {name}: its claim {claim} is being deleted"
        return Problem(Reason.REFERENCE_NOT_FOUND, text)
    if named is None and (live["metadata"].get("labels") or {}).get(RUN) != label_value(name):
        text = f"{_FIELD}: {name}: PersistentVolumeClaim {claim} is not known as that of this run (label {RUN}={label_value(name)})"
        return Problem(Reason.REFERENCE_NOT_FOUND, text)
    context.source_claim = claim
    return None


async def _recorded(api: KubeApi, namespace: str, name: str) -> Object | None:
    """Metadata and spec of the last deleted run of that name, from its record; None without a readable one."""
    found, _ = await api.list_at("ConfigMap", namespace, label_selector=f"{ENDED}={label_value(name)}")
    for one in sorted(found, key=lambda o: str(o["metadata"]["creationTimestamp"]), reverse=True):
        try:
            run = json.loads(one["data"][RUN_KEY])
            if run["metadata"]["name"] == name:
                return dict(run)
        except (KeyError, TypeError, ValueError):  # users may edit records
            continue
    return None
