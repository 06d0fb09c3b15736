"""A spec that is no longer valid leaves no run unsupervised: the operator continues with the one that it accepted last."""

from __future__ import annotations

import json
from typing import Any

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_operator.kube import errors

pytestmark = pytest.mark.cluster

RUN = ("ScaleRLRun", "tiny-addition")
INVALID = {"podTemplate": {"labels": {"my team": "a"}}}
"""The API server takes it; the operator does not."""
VALID = {"podTemplate": {"labels": None}}


def accepted(run: Object) -> Object:
    return next(c for c in run["status"]["conditions"] if c["type"] == "Accepted")


async def test_run_continues_with_last_accepted_spec_until_valid(
    there: Stage,
) -> None:
    await there.start(tiny())
    await there.edit(*RUN, {"spec": INVALID | {"generator": {"replicas": 3}}})
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "SpecInvalid", times=1)
    said = accepted(run)
    assert said["status"] == "False"
    assert said["message"].startswith("spec.podTemplate.labels.my team.[key]: "), said["message"]
    assert said["message"].endswith("; the run continues with the spec accepted before")
    assert any(reason == "SpecInvalid" and "my team" in text for reason, text in await there.events())
    assert (run["status"]["phase"], condition(run, "TrainerReady")) == ("Running", "Ready")

    await there.fresh_operator()
    await there.edit("Deployment", "tiny-addition-generator", {"spec": {"replicas": 5}})
    await there.reconcile()
    deployment = await there.get("Deployment", "tiny-addition-generator")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1, "neither somebody's 5 nor the 3 of a spec that is invalid"
    await there.end("trainer", 137)
    await there.reconcile_until(lambda r: r["status"]["trainer"]["restarts"] == 1)
    there.now += 5.0
    await there.reconcile_until(lambda r: r["status"]["trainer"]["attempt"] == 2)

    await there.edit(*RUN, {"spec": VALID})
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "Accepted", times=1)
    deployment = await there.get("Deployment", "tiny-addition-generator")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 3


async def test_run_with_invalid_spec_can_be_suspended_and_deleted(there: Stage) -> None:
    await there.start(tiny())
    await there.edit(*RUN, {"spec": INVALID | {"suspend": True}})
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspending")
    assert there.coordinator.stop_requests == ["interrupted"]
    await there.end("trainer", 0, count=2)
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Suspended")
    await there.edit(*RUN, {"spec": {"suspend": False}})
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing")
    assert condition(run, "Accepted") == "SpecInvalid"
    await there.delete(*RUN)
    await there.reconcile_until(lambda r: not r)


async def test_accepted_spec_is_written_before_it_is_applied(there: Stage) -> None:
    await there.start(tiny())
    await there.edit(*RUN, {"spec": {"generator": {"replicas": 2}}})
    there.writes_left = 1
    with pytest.raises(errors.Fenced):
        await there.reconcile()
    there.writes_left = None
    deployment = await there.get("Deployment", "tiny-addition-generator")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1
    await there.edit(*RUN, {"spec": INVALID})
    await there.fresh_operator()
    await there.reconcile()
    deployment = await there.get("Deployment", "tiny-addition-generator")
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2


async def test_spec_accepted_by_an_earlier_release_is_kept(there: Stage) -> None:
    await there.start(tiny())
    run = await there.edit(*RUN, {"spec": INVALID | {"generator": {"replicas": 2}}})
    generation = run["metadata"]["generation"]
    conditions: list[Any] = [
        c | {"observedGeneration": generation} if c["type"] == "Accepted" else c
        for c in run["status"]["conditions"]
    ]
    status = {"acceptedSpec": json.dumps(run["spec"]), "conditions": conditions}
    await there.edit(*RUN, {"status": status}, "status")
    await there.fresh_operator()
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "SpecInvalid", times=1)
    assert json.loads(run["status"]["acceptedSpec"])["generator"]["replicas"] == 2
    assert there.coordinator.stop_requests == ["interrupted"], (
        "the trainer is drained for its other pods, as by any edit"
    )


async def test_nothing_is_created_for_a_never_accepted_run(there: Stage) -> None:
    run = tiny()
    run["spec"]["podTemplate"] |= INVALID["podTemplate"]
    await there.create(run)
    run = await there.reconcile_until(lambda r: bool(condition(r, "Accepted")), times=1)
    assert condition(run, "Accepted") == "SpecInvalid"
    assert "continues" not in accepted(run)["message"]
    # A controller makes that one in every namespace, sooner or later.
    assert {c["metadata"]["name"] for c in await there.all("ConfigMap")} <= {"kube-root-ca.crt"}
    assert "acceptedSpec" not in run["status"]
