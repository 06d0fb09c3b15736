"""What nodes do to the trainer of a run that works, with the real controller of Jobs: no failure of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stage import Stage, condition, tiny

pytestmark = pytest.mark.cluster

REFUSED = {
    "phase": "Failed",
    "reason": "UnexpectedAdmissionError",
    "message": "Allocate failed due to no healthy devices present",
}
PREEMPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "room",
}


def counts(run: dict[str, Any]) -> tuple[int, int, int]:
    trainer = run["status"]["trainer"]
    return trainer["consecutiveFailures"], trainer["failedStarts"], trainer["disruptions"]


async def attempt(there: Stage, number: int) -> None:
    """It is there, and the one before it is not."""
    await there.reconcile_until(lambda r: r["status"]["trainer"]["attempt"] == number)


async def test_pod_refused_by_the_kubelet_is_no_failure(there: Stage) -> None:
    await there.start(tiny(trainer={"replicas": 2, "maxRestarts": 0}))
    await there.end("trainer", 0, count=2)
    for number in range(2, 5):
        await attempt(there, number)
        (first, _) = await there.pods("trainer", 2)
        await there.edit("Pod", first["metadata"]["name"], {"status": REFUSED}, "status")
        run = await there.reconcile_until(lambda r, n=number: r["status"]["trainer"]["disruptions"] == n)
        assert counts(run) == (0, 0, number)
        assert run["status"]["phase"] == "Running"
        assert condition(run, "TrainerReady") == "RefusedByNode"
        there.now += 10.0
    assert any(
        reason == "RefusedByNode" and "no healthy devices" in text for reason, text in await there.events()
    )
    await attempt(there, 5)
    await there.begin("trainer", 2)
    await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready")


async def test_evicted_rank_is_no_failure_of_the_others(there: Stage) -> None:
    await there.start(tiny(trainer={"replicas": 2, "maxRestarts": 0}))
    (first, _) = await there.pods("trainer", 2)
    over = {"terminated": {"exitCode": 137, "reason": "Error"}}
    containers = [
        {
            "name": c["name"],
            "ready": False,
            "restartCount": 0,
            "image": c["image"],
            "imageID": "",
            "state": over,
        }
        for c in first["spec"]["containers"]
    ]
    lost = {"phase": "Failed", "conditions": [PREEMPTED], "containerStatuses": containers}
    await there.edit("Pod", first["metadata"]["name"], {"status": lost}, "status")
    run = await there.reconcile_until(lambda r: r["status"]["trainer"]["lastRecordedAttempt"] == 1)
    assert counts(run) == (0, 0, 1)
    reasons: list[str] = []
    for _ in range(1200):  # until its controller has noted it in the Job too
        (job,) = await there.all("Job", "trainer")
        reasons = [c["reason"] for c in job["status"].get("conditions", ())]
        if "PodFailurePolicy" in reasons:
            break
        await asyncio.sleep(0.1)
    assert "PodFailurePolicy" in reasons
    there.now += 10.0
    await attempt(there, 2)


async def test_rank_that_fails_by_itself_still_counts(there: Stage) -> None:
    await there.start(tiny(trainer={"replicas": 2, "maxRestarts": 0}))
    await there.end("trainer", 1, "an illegal instruction")
    run = await there.reconcile_until(lambda r: r["status"]["phase"] == "Failed")
    assert condition(run, "Failed") == "BackoffLimitExceeded"
