"""A fork's preparation starts once its source's claim is found, and mounts that alone; else the run waits and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from stage import Object, Stage, condition, tiny

from scalerl_operator.names import RUN, Names

pytestmark = pytest.mark.cluster
FORK = "other-addition"


def fork(run: str = "tiny-addition", **spec: object) -> Object:
    return tiny(FORK, **{"from": {"run": run}}, **spec)


def claim(name: str, **labels: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": labels},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def source_of(job: Object) -> tuple[str, Object]:
    """Claim and mount of the source in the preparation's pod."""
    pod = job["spec"]["template"]["spec"]
    (volume,) = (v for v in pod["volumes"] if v["name"] == "scalerl-source")
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "scalerl-source")
    return volume["persistentVolumeClaim"]["claimName"], mount


async def waits(there: Stage, says: str) -> None:
    """The fork is not started, and the condition has the reason."""
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "ReferenceNotFound", FORK)
    message = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Accepted")
    assert says in message
    assert run["status"]["phase"] == "Pending"
    assert await there.get("Job", Names(FORK).prepare) is None


async def prepares(there: Stage) -> Object:
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing", FORK)
    job = await there.get("Job", Names(FORK).prepare)
    assert job is not None
    return job


async def test_fork_waits_for_its_source_and_mounts_its_claim_until_it_has_trained(there: Stage) -> None:
    await there.create(fork())
    await waits(
        there,
        "spec.from.run: tiny-addition: there is no such run, and the claim of a deleted one, tiny-addition-data",
    )
    await there.create(claim("tiny-addition-data"))
    await waits(
        there,
        "PersistentVolumeClaim tiny-addition-data is not known as that of this run (label scalerl.dev/run=tiny-addition)",
    )
    await there.edit(
        "PersistentVolumeClaim", "tiny-addition-data", {"metadata": {"labels": {RUN: "tiny-addition"}}}
    )
    name, mount = source_of(await prepares(there))
    assert name == "tiny-addition-data"
    assert mount["subPath"] == "tiny-addition"
    assert mount["readOnly"] is True
    await there.end("prepare")
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Running", FORK)
    there.coordinator.step = 25
    await there.begin("coordinator")
    await there.begin("generator")
    await there.begin("trainer", 2)
    run = await there.reconcile_until(lambda r: r["status"].get("step") == 25, FORK)
    assert run["status"]["source"] == {"run": "tiny-addition", "uid": ""} or run["status"]["source"] == {
        "run": "tiny-addition"
    }
    # An edit repeats the preparation, without the source, which may be gone by then.
    await there.delete("PersistentVolumeClaim", "tiny-addition-data")
    await there.edit("ScaleRLRun", FORK, {"spec": {"checkpoint": {"everySteps": 7}}})
    await there.reconcile_until(lambda r: bool(there.coordinator.stop_requests), FORK)
    await there.end("trainer", 0, count=2)

    def again(run: Object) -> bool:
        return (run["status"]["phase"], condition(run, "Prepared")) == ("Preparing", "Preparing")

    await there.reconcile_until(again, FORK)
    for _ in range(1200):
        await there.reconcile(FORK)
        job = await there.get("Job", Names(FORK).prepare)
        if job is not None and "deletionTimestamp" not in job["metadata"]:
            break
        await asyncio.sleep(0.1)
    assert job is not None
    assert "scalerl-source" not in str(job["spec"])


def existing(there: Stage) -> Object:
    return tiny("source", storage={"claimName": "shared"}, suspend=True)


def recorded(there: Stage) -> Object:
    text = '{"metadata": {"name": "source", "uid": "%s"}, "spec": {"storage": {"claimName": "shared"}}}'
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "source-ended-0", "labels": {"scalerl.dev/ended": "source"}},
        "data": {"run.json": text % "a-uid"},
    }


@pytest.mark.parametrize("source", [existing, recorded])
async def test_source_with_a_claim_that_its_spec_names(
    there: Stage, source: Callable[[Stage], Object]
) -> None:
    """Of a run that exists, or of one that was deleted, whose record has the name."""
    await there.create(source(there), fork("source"))
    await waits(there, "spec.from.run: source: its claim shared does not exist")
    await there.create(claim("shared"))
    name, mount = source_of(await prepares(there))
    assert (name, mount["subPath"]) == ("shared", "source")
    run = await there.reconcile_until(lambda r: bool(r["status"].get("source")), FORK)
    live = await there.get("ScaleRLRun", "source")
    uid = "a-uid" if live is None else live["metadata"]["uid"]
    assert run["status"]["source"] == {"run": "source", "uid": uid}


async def test_source_whose_checkpoints_are_in_a_bucket_alone(there: Stage) -> None:
    storage = {"mountedBy": "Coordinator", "accessMode": "ReadWriteOnce"}
    whole = {"checkpoint": {"to": "s3://bucket/source"}, "trainer": {"replicas": 1}, "suspend": True}
    source = tiny("source", storage=storage, **whole)
    await there.create(source, fork("source"))
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "SpecInvalid", FORK)
    assert "its checkpoints are in its bucket alone" in run["status"]["conditions"][0]["message"]


async def test_run_is_no_fork_of_itself(there: Stage) -> None:
    await there.create(fork(FORK))
    run = await there.reconcile_until(lambda r: condition(r, "Accepted") == "SpecInvalid", FORK)
    assert "a run cannot be a fork of itself" in run["status"]["conditions"][0]["message"]
