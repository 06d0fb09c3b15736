"""Checks the runs of ``invalid_specs.yaml`` that only the operator refuses: a condition has the reason, and they can be deleted."""

from __future__ import annotations

import copy
from typing import Any

from invalid_specs import Case, Object, cases
from stage import Stage

ROWS = cases("operator")
MAKING = (
    "Job",
    "StatefulSet",
    "Deployment",
    "Pod",
    "Service",
    "ConfigMap",
    "PersistentVolumeClaim",
    "Secret",
)


def said(run: Object, type_: str) -> Object:
    conditions = run.get("status", {}).get("conditions", ())
    return next((c for c in conditions if c["type"] == type_), {})


async def is_reported(cluster: Any, at: Stage, case: Case) -> Object:
    """Create the run, and wait until its condition is that of the table, with an event; returns the run."""
    if case.given:
        cluster.apply(*case.given, namespace=at.namespace)
    await at.create(copy.deepcopy(case.run))
    before = {kind: await names(at, kind) for kind in MAKING}

    def reported(run: Object) -> bool:
        at.now += 1.0  # some problems are diagnosed only after a while
        return said(run, case.condition).get("reason") == case.reason

    run = await at.reconcile_until(reported, name="invalid")
    condition = said(run, case.condition)
    assert condition["status"] == "False", condition
    assert case.says in condition["message"], condition
    assert condition["observedGeneration"] == run["metadata"]["generation"]
    assert any(reason == case.reason and case.says in text for reason, text in await at.events()), (
        await at.events()
    )
    if case.condition == "Accepted":
        assert {kind: await names(at, kind) for kind in MAKING} == before
    return run


async def names(at: Stage, kind: str) -> set[str]:
    return {o["metadata"]["name"] for o in await at.all(kind)} - {"kube-root-ca.crt"}


async def is_gone(at: Stage) -> None:
    """Check that a run that was never healthy can be deleted."""
    await at.delete("ScaleRLRun", "invalid")
    await at.reconcile_until(lambda run: not run, name="invalid")


def namespace(case: Case) -> str:
    return f"invalid-{ROWS.index(case)}"
