"""Budget: when a run has used what its spec allows, and when its coordinator is sent a stop request. Pure.

``maxSteps`` is not here: the coordinator stops issuing slots there, exactly.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from scalerl_api.spec import BudgetSpec
from scalerl_api.wire import INTERRUPTED, Status

MAX_SECONDS: Final = "maxSeconds"
MAX_DEVICE_HOURS: Final = "maxDeviceHours"
REVOCABLE: Final = (INTERRUPTED, MAX_SECONDS, MAX_DEVICE_HOURS)
"""Reasons that are cancelled when the operator no longer wants them."""


def limit_reached(budget: BudgetSpec, status: Status) -> str:
    """The field of the first limit that the run has reached; empty while it has reached none."""
    if budget.max_seconds is not None and status.wall_seconds >= budget.max_seconds:
        return MAX_SECONDS
    if budget.max_device_hours is not None and status.device_seconds >= float(budget.max_device_hours) * 3600:
        return MAX_DEVICE_HOURS
    return ""


def must_notify(wanted: str, given: str, revocable: Collection[str] = REVOCABLE) -> bool:
    """Whether the coordinator, which stops for the reason ``given``, is to be sent the reason ``wanted``.

    A stop outlives the command that asked for it: what no longer holds (resumed, more budget) is taken back, but not
    what the coordinator found by itself. A person's interrupt goes before any other reason: it ends the run without a
    last evaluation.

    revocable: reasons that can be cancelled.

    >>> must_notify("maxSeconds", ""), must_notify("", "maxSeconds"), must_notify("", "maxSteps")
    (True, True, False)
    >>> must_notify(INTERRUPTED, "maxSteps"), must_notify("maxSeconds", "maxSteps")
    (True, False)
    >>> must_notify("", "forecast"), must_notify("", "forecast", ("forecast",))  # completed, suspended
    (False, True)
    """
    if wanted == given:
        return False
    return wanted == INTERRUPTED or not given or (not wanted and given in revocable)
