"""The time to the first lease, and what a run has waited for until then."""

from __future__ import annotations

from coordinator_statuses import status

from scalerl_api.wire import INTERRUPTED, Phase
from scalerl_local.reports import StartupMeter


def test_waits_have_one_name_each() -> None:
    meter = StartupMeter(0.0)
    saved = {"supervised_steps": 40, "waiting_for": "the end of mid-training, which has done 40 steps"}
    meter.note([], status([], phase=Phase.WAITING, **saved), 5.0)
    meter.note([], status([], phase=Phase.WAITING, checkpoint_version=0, **saved), 6.0)
    assert meter.startup.waited_seconds == {"the end of mid-training": 6.0}


def test_an_earlier_stop_that_is_not_yet_taken_back_is_no_lease() -> None:
    meter, before = StartupMeter(0.0), {"step": 55, "wall_seconds": 84.0, "checkpoint_version": 55}
    meter.note([], status([], phase=Phase.FINISHING, stop_reason=INTERRUPTED, **before), 6.0)
    meter.note([], status([], phase=Phase.WAITING, waiting_for="a generator to register", **before), 36.0)
    assert meter.startup.first_lease_seconds is None
    meter.note([], status([], phase=Phase.RUNNING, **before), 37.0)
    assert meter.startup.first_lease_seconds == 37.0
