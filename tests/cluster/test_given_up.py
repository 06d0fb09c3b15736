"""Slots given up: one event and one condition, however many there are."""

from __future__ import annotations

import pytest
from stage import Stage, condition, tiny

from scalerl_operator.controller.coordinator_problems import QUIET_SECONDS

pytestmark = pytest.mark.cluster


async def test_five_hundred_lost_slots_are_one_event(there: Stage) -> None:
    await there.start(tiny())
    for _ in range(5):
        there.coordinator.given_up += 100
        there.now += 60.0
        run = await there.reconcile_until(lambda r: condition(r, "Degraded") == "SlotsGivenUp", times=2)
    said = next(c["message"] for c in run["status"]["conditions"] if c["type"] == "Degraded")
    assert "status.faults.givenUpRollouts" in said
    assert run["status"]["faults"]["givenUpRollouts"] == 500
    assert [reason for reason, _ in await there.events()].count("SlotsGivenUp") == 1
    there.now += QUIET_SECONDS + 1.0
    await there.reconcile_until(lambda r: condition(r, "Degraded") == "Healthy", times=2)
