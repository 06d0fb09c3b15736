from __future__ import annotations

import pytest
from coordinator_statuses import status

from scalerl_api.spec import BudgetSpec
from scalerl_api.wire import Status
from scalerl_lifecycle.budget import Rates, eta_seconds, limit_reached


@pytest.mark.parametrize(
    ("budget", "wall_seconds", "device_seconds", "expected"),
    [
        ({"max_steps": 5}, 1e9, 1e9, ""),  # the coordinator's to enforce
        ({"max_seconds": 60}, 59.9, 0, ""),
        ({"max_seconds": 60}, 60, 0, "maxSeconds"),
        ({"max_device_hours": "0.5"}, 1e9, 1799.9, ""),
        ({"max_device_hours": "0.5"}, 0, 1800, "maxDeviceHours"),
        ({"max_device_hours": "1e-3", "max_seconds": 60}, 61, 4, "maxSeconds"),
        ({"max_device_hours": "1e-3", "max_seconds": 60}, 10, 4, "maxDeviceHours"),
        ({"max_device_hours": "1", "max_seconds": 60}, 0, 0, ""),
    ],
)
def test_table(
    budget: dict[str, int | str], wall_seconds: float, device_seconds: float, expected: str
) -> None:
    used = status([], wall_seconds=wall_seconds, device_seconds=device_seconds)
    assert limit_reached(BudgetSpec.model_validate(budget), used) == expected


def test_time_before_the_first_lease_counts_for_seconds_only() -> None:
    waits = status([], wall_seconds=0.0, device_seconds=0.0, waiting_seconds=60.0)
    assert limit_reached(BudgetSpec.model_validate({"max_seconds": 60}), waits) == "maxSeconds"
    assert limit_reached(BudgetSpec.model_validate({"max_seconds": 61}), waits) == ""
    assert limit_reached(BudgetSpec.model_validate({"max_device_hours": "1e-3"}), waits) == ""


FORKED: Status = status(
    [],
    wall_seconds=1030.0,
    device_seconds=5060.0,
    forked_step=7,
    inherited_seconds=1000.0,
    inherited_device_seconds=5000.0,
)
"""A fork that has used 30 s and 60 device-seconds itself."""


@pytest.mark.parametrize(
    ("budget", "expected", "eta"),
    [
        ({"max_seconds": 31}, "", 1.0),
        ({"max_seconds": 30}, "maxSeconds", 0.0),
        ({"max_device_hours": "0.02"}, "", 6.0),  # 72 device-seconds, at two devices
        ({"max_device_hours": "0.016"}, "maxDeviceHours", 0.0),
    ],
)
def test_limits_of_time_count_a_fork_s_own_use(
    budget: dict[str, int | str], expected: str, eta: float
) -> None:
    spec = BudgetSpec.model_validate(budget)
    assert limit_reached(spec, FORKED) == expected
    assert eta_seconds(spec, FORKED, Rates()) == pytest.approx(eta)
