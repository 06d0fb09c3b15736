"""When a run has reached its budget, how much of it is used, and when its coordinator is sent a stop request. Pure.

The coordinator itself enforces ``maxSteps``: it issues no slots beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from scalerl_api.spec import BudgetSpec
from scalerl_api.status import RunStatus
from scalerl_api.wire import INTERRUPTED, Status

MAX_SECONDS: Final = "maxSeconds"
MAX_DEVICE_HOURS: Final = "maxDeviceHours"
MAX_STEPS: Final = "maxSteps"
MAX_COMPUTE_TOKENS: Final = "maxComputeTokens"
REVOCABLE: Final = (INTERRUPTED, MAX_SECONDS, MAX_DEVICE_HOURS)
"""Reasons whose stop request the operator cancels when they no longer hold."""


def limit_reached(budget: BudgetSpec, status: Status) -> str:
    """The field of a limit that the run has reached; empty if it has reached none."""
    # A run whose first weights never reach a generator ends, too.
    if budget.max_seconds is not None and elapsed_seconds(status) >= budget.max_seconds:
        return MAX_SECONDS
    if (
        budget.max_device_hours is not None
        and status.own_device_seconds >= float(budget.max_device_hours) * 3600
    ):
        return MAX_DEVICE_HOURS
    return ""


def elapsed_seconds(status: Status) -> float:
    """The time that ``maxSeconds`` limits."""
    return status.waiting_seconds + status.own_seconds


def used_fractions(budget: BudgetSpec, status: RunStatus) -> dict[str, float]:
    """The used fraction of each limit of the budget, by its field, without one whose use is unknown. From the status of the run,
    which every run has, not from its coordinator."""
    usage = status.usage
    limits = (
        (MAX_STEPS, budget.max_steps, status.step or 0),
        (MAX_SECONDS, budget.max_seconds, _number(usage.elapsed_seconds)),
        (MAX_DEVICE_HOURS, budget.max_device_hours, _number(usage.device_hours)),
        (MAX_COMPUTE_TOKENS, budget.max_compute_tokens, usage.compute_tokens),
    )
    return {
        name: used / float(limit) for name, limit, used in limits if limit is not None and used is not None
    }


def _number(text: str) -> float:
    """A number of the status; 0 for text that is none, which only another writer leaves."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def must_send_stop(wanted: str, given: str, revocable: Collection[str] = REVOCABLE) -> bool:
    """Whether to send the reason ``wanted`` to the coordinator, which stops for the reason ``given`` (empty: it does not stop).

    The coordinator keeps a stop request when the operator restarts. A request that no longer holds (resumed, more budget) is
    cancelled; a stop for the coordinator's own reason is not. An interrupt replaces any other reason: it ends the run without
    a last evaluation.

    Args:
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
