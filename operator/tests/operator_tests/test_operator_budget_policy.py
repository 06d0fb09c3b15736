from __future__ import annotations

import pytest

from scalerl_api.spec import BudgetSpec
from scalerl_operator.policy.budget import Stop, Usage, decide


@pytest.mark.parametrize(
    ("budget", "wall_seconds", "device_seconds", "expected"),
    [
        ({"max_steps": 5}, 1e9, 1e9, None),  # the coordinator's to enforce
        ({"max_seconds": 60}, 59.9, 0, None),
        ({"max_seconds": 60}, 60, 0, "maxSeconds"),
        ({"max_device_hours": "0.5"}, 1e9, 1799.9, None),
        ({"max_device_hours": "0.5"}, 0, 1800, "maxDeviceHours"),
        ({"max_device_hours": "1e-3", "max_seconds": 60}, 61, 4, "maxSeconds"),
        ({"max_device_hours": "1e-3", "max_seconds": 60}, 10, 4, "maxDeviceHours"),
        ({"max_device_hours": "1", "max_seconds": 60}, 0, 0, None),
    ],
)
def test_table(
    budget: dict[str, int | str], wall_seconds: float, device_seconds: float, expected: str | None
) -> None:
    decision = decide(BudgetSpec.model_validate(budget), Usage(wall_seconds, device_seconds))
    assert decision == (None if expected is None else Stop(expected))
