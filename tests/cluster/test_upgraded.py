"""An operator that finds runs under way of another release."""

from __future__ import annotations

import pytest
from stage import Stage, condition, tiny

from scalerl_operator.build.scope import SPEC_HASH_VERSION
from scalerl_operator.names import SPEC_HASH

pytestmark = pytest.mark.cluster

RUN = ("ScaleRLRun", "tiny-addition")
JOBS = ("tiny-addition-prepare", "tiny-addition-trainer-1")
EDIT = {"spec": {"trainer": {"microBatchTokens": 999}}}


async def of_another_release(there: Stage) -> None:
    await there.start(tiny())
    for job in JOBS:
        await there.edit("Job", job, {"metadata": {"annotations": {SPEC_HASH: "0123456789abcdef"}}})


async def test_run_of_another_release_trains_until_edited(there: Stage) -> None:
    await of_another_release(there)
    await there.fresh_operator()
    for _ in range(2):
        await there.reconcile()
    assert there.coordinator.stop_requests == []
    for name in JOBS:
        job = await there.get("Job", name)
        assert job is not None
        assert job["metadata"]["annotations"][SPEC_HASH].startswith(f"{SPEC_HASH_VERSION}-")
    run = await there.reconcile_until(lambda r: condition(r, "TrainerReady") == "Ready", times=1)
    assert run["status"]["phase"] == "Running"
    await there.edit(*RUN, EDIT)
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing", times=3)
    assert there.coordinator.stop_requests == ["interrupted"]


async def test_run_edited_during_the_upgrade_is_drained(there: Stage) -> None:
    await of_another_release(there)
    await there.edit(*RUN, EDIT)
    await there.fresh_operator()
    await there.reconcile_until(lambda r: r["status"]["phase"] == "Preparing", times=3)
    assert there.coordinator.stop_requests == ["interrupted"]
