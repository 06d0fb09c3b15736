"""The claim of the run that a run forks (``spec.from``), which only its preparation mounts.

Only of the run's own namespace: of a run that exists, of one that was deleted by its record, or without either, a claim with the
labels of a run of that name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from scalerl_api.reasons import Reason
from scalerl_lifecycle.lifecycle_types import JobState
from scalerl_lifecycle.problems import Problem
from scalerl_operator.controller.parts import CLAIM, Checks, Findings, Run
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.kinds import RUN as RUN_KIND
from scalerl_operator.kube.objects import is_deleted
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.run_record import RUN_KEY
from scalerl_operator.names import ENDED, RUN, Names, label_value

_FIELD: Final = "spec.from.run"


async def find_source(api: KubeApi, findings: Findings) -> Checks:
    """The checks with the source's claim for a preparation that is about to be created, or why there is none.

    A run that has trained has its own checkpoints, and needs the source no more.
    """
    source, checks = findings.accepted.spec.fork, findings.checks
    absent = findings.observed.prepare.state is JobState.ABSENT
    if source is None or findings.run.steps or not findings.decision.wanted.prepare or not absent:
        return checks
    claim, uid = await _claim_of(api, source.run, findings.run)
    found = replace(checks, source_uid=uid)
    if isinstance(claim, Problem):
        return replace(found, not_started=claim)
    return replace(found, source_claim=claim)


async def _claim_of(api: KubeApi, name: str, fork: Run) -> tuple[str | Problem, str]:
    """The claim of the run with that name, or why there is none; and that run's uid."""
    uid, namespace = "", fork.namespace
    if name == fork.name:
        text = f"{_FIELD}: a run cannot be a fork of itself; give it another name"
        return Problem(Reason.SPEC_INVALID, text), uid
    recorded = await api.get(RUN_KIND, namespace, name) or await _recorded(api, namespace, name)
    named = None
    if recorded is not None:
        uid = str(recorded["metadata"].get("uid", ""))
        storage = (recorded.get("spec") or {}).get("storage") or {}
        named = storage.get("claimName")
        if storage.get("mountedBy") == "Coordinator":
            text = f"{_FIELD}: {name}: its checkpoints are in its bucket alone (storage.mountedBy Coordinator), and a fork reads a claim"
            return Problem(Reason.SPEC_INVALID, text), uid
    claim = str(named or Names(name).claim)
    live = await api.get(CLAIM, namespace, claim)
    if live is None:
        known = recorded is not None
        what = "its claim" if known else "there is no such run, and the claim of a deleted one,"
        text = f"{_FIELD}: {name}: {what} {claim} does not exist in the namespace {namespace}"
        return Problem(Reason.REFERENCE_NOT_FOUND, text), uid
    if is_deleted(live):
        text = f"{_FIELD}: {name}: its claim {claim} is being deleted"
        return Problem(Reason.REFERENCE_NOT_FOUND, text), uid
    if named is None and (live["metadata"].get("labels") or {}).get(RUN) != label_value(name):
        text = f"{_FIELD}: {name}: PersistentVolumeClaim {claim} is not known as that of this run (label {RUN}={label_value(name)})"
        return Problem(Reason.REFERENCE_NOT_FOUND, text), uid
    return claim, uid


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
