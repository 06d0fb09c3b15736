"""When a run has reached its budget, and when its coordinator is sent a stop request. Pure.

The coordinator itself enforces ``maxSteps``: it issues no slots beyond it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from scalerl_api.spec import BudgetSpec
from scalerl_api.wire import INTERRUPTED, Status

MAX_SECONDS: Final = "maxSeconds"
MAX_DEVICE_HOURS: Final = "maxDeviceHours"
REVOCABLE: Final = (INTERRUPTED, MAX_SECONDS, MAX_DEVICE_HOURS)
"""Reasons whose stop request the operator cancels when they no longer hold."""


def limit_reached(budget: BudgetSpec, status: Status) -> str:
    """The field of a limit that the run has reached; empty if it has reached none."""
    # A run whose first weights never reach a generator ends, too.
    if budget.max_seconds is not None and elapsed_seconds(status) >= budget.max_seconds:
        return MAX_SECONDS
    if budget.max_device_hours is not None and status.device_seconds >= float(budget.max_device_hours) * 3600:
        return MAX_DEVICE_HOURS
    return ""


def elapsed_seconds(status: Status) -> float:
    """The time that ``maxSeconds`` limits."""
    return status.waiting_seconds + status.wall_seconds


def must_send_stop(wanted: str, given: str, revocable: Collection[str] = REVOCABLE) -> bool:
    """Whether to send the reason ``wanted`` to the coordinator, which stops for the reason ``given`` (empty: it does not stop).

    The coordinator keeps a stop request when the operator restarts. A request that no longer holds (resumed, more budget) is
    cancelled; a stop for the coordinator's own reason is not. An interrupt replaces any other reason: it ends the run without
    a last evaluation.

    revocable: reasons that can be cancelled.

    >>> must_send_stop("maxSeconds", ""), must_send_stop("", "maxSeconds"), must_send_stop("", "maxSteps")
    (True, True, False)
    >>> must_send_stop(INTERRUPTED, "maxSteps"), must_send_stop("maxSeconds", "maxSteps")
    (True, False)
    >>> must_send_stop("", "forecast"), must_send_stop("", "forecast", ("forecast",))  # completed, suspended
    (False, True)
    """
    if wanted == given:
        return False
    return wanted == INTERRUPTED or not given or (not wanted and given in revocable)
