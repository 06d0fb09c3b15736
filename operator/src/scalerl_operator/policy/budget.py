"""Budget: end the run when it has used what its spec allows.

``maxSteps`` is not here: the coordinator stops issuing slots there, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scalerl_api.spec import BudgetSpec

MAX_SECONDS: Final = "maxSeconds"
MAX_DEVICE_HOURS: Final = "maxDeviceHours"
REASONS: Final = (MAX_SECONDS, MAX_DEVICE_HOURS)
"""What :func:`decide` may give as a reason: field names of the spec's budget."""


@dataclass(frozen=True)
class Usage:
    """What a run has used, over all its incarnations, since its first lease."""

    wall_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class Stop:
    """End the run in order; ``reason`` goes into its summary."""

    reason: str


def decide(budget: BudgetSpec, usage: Usage) -> Stop | None:
    """Stop at the first limit reached, else None.

    >>> decide(BudgetSpec(max_seconds=60), Usage(60.0, 120.0))
    Stop(reason='maxSeconds')
    """
    if budget.max_seconds is not None and usage.wall_seconds >= budget.max_seconds:
        return Stop(MAX_SECONDS)
    if budget.max_device_hours is not None and usage.device_seconds >= float(budget.max_device_hours) * 3600:
        return Stop(MAX_DEVICE_HOURS)
    return None
