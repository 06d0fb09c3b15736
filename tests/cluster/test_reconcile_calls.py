"""What a look asks of the API server, and when it is due: a thousand runs are looked at by one process."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from stage import Stage, stage, tiny
from testcluster import Cluster

from scalerl_operator.cluster.reconcile import START_LOOKS

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


async def test_by_the_clock_only_what_events_alone_tell_is_looked_at(there: Stage) -> None:
    await there.create(tiny())
    await there.looks(lambda run: run.get("status", {}).get("phase") == "Preparing")
    [pod] = await there.pods("prepare")
    name = pod["metadata"]["name"]
    waiting = {"name": "prepare", "ready": False, "restartCount": 0, "image": "i", "imageID": ""}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    status = {"phase": "Pending", "containerStatuses": [waiting]}
    await there.edit("Pod", name, {"status": status}, "status")
    assert await there.look() == START_LOOKS[0], "why a volume is not mounted, only events tell"
    await there.begin("prepare")
    assert await there.look() is None, "its end is news by itself"
    writes = there.calls.writes
    assert await there.look() is None
    assert there.calls.writes == writes
