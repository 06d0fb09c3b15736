"""What a look asks of the API server, and when it is due: a thousand runs are looked at by one process."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from stage import Stage, stage, tiny
from testcluster import Cluster

from scalerl_operator.cluster.apply import ASK_SECONDS, SILENT_SECONDS
from scalerl_operator.cluster.reconcile import START_LOOKS
from scalerl_operator.policy.lifecycle import ASK_AGAIN_SECONDS, POLL_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
async def there(control_plane: Cluster) -> AsyncIterator[Stage]:
    async with stage(control_plane, f"calls-{uuid.uuid4().hex[:8]}") as made:
        yield made


async def test_a_new_run_is_tried_with_what_a_user_wrote_of_pods_alone(there: Stage) -> None:
    await there.create(tiny())
    await there.look()
    # Claim, spec, NetworkPolicy and preparation are made; the four workloads are tried before.
    assert there.calls.counts["apply"] == 4 + 4
    # The token's, and of each object before it is tried and before it is made: one for each name.
    assert there.calls.counts["get"] <= 1 + 11 + 4, there.calls.counts
    assert there.calls.counts["patch"] == 2, "the finalizer, the status"


async def is_made_and_does_not_begin(there: Stage) -> None:
    await there.create(tiny())
    await there.looks(lambda run: run.get("status", {}).get("phase") == "Preparing")
    [pod] = await there.pods("prepare")
    waiting = {"name": "prepare", "ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    status = {"phase": "Pending", "containerStatuses": [waiting]}
    await there.edit("Pod", pod["metadata"]["name"], {"status": status}, "status")


async def test_by_the_clock_only_what_events_alone_tell_is_looked_at(there: Stage) -> None:
    await is_made_and_does_not_begin(there)
    assert await there.look() == START_LOOKS[0], "why a volume is not mounted, only events tell"
    await there.begin("prepare")
    assert await there.look() is None, "its end is news by itself"
    writes = there.calls.writes
    assert await there.look() is None
    assert there.calls.writes == writes


async def test_events_are_asked_for_after_a_while_and_now_and_then(there: Stage) -> None:
    await is_made_and_does_not_begin(there)

    async def questions(seconds_on: float) -> int:
        before = there.calls.counts["list"]
        there.now += seconds_on
        for _ in range(3):  # whatever else has it looked at
            await there.look()
        return there.calls.counts["list"] - before

    assert await questions(0.0) == 0, "most pods begin soon"
    assert await questions(SILENT_SECONDS + 1.0) == 1
    assert await questions(ASK_SECONDS / 2) == 0
    assert await questions(ASK_SECONDS / 2 + 1.0) == 1
    await there.begin("prepare")
    assert await questions(ASK_SECONDS + 1.0) == 0


async def test_a_coordinator_is_asked_once_a_look_and_sooner_again_while_its_word_is_awaited(
    there: Stage,
) -> None:
    await there.start(tiny())
    asked = there.coordinator.asked
    assert await there.look() == POLL_SECONDS
    assert there.coordinator.asked == asked + 1
    there.coordinator.silent = True
    assert await there.look() == ASK_AGAIN_SECONDS
    assert there.coordinator.asked == asked + 2, (
        "one that does not answer is not asked again in the same look"
    )
    there.coordinator.silent = False
    await there.edit("ScaleRLRun", "tiny-addition", {"spec": {"suspend": True}})
    assert await there.look() == ASK_AGAIN_SECONDS
    assert (there.coordinator.asked, there.coordinator.told) == (asked + 3, ["interrupted"])
