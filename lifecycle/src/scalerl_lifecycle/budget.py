"""When a run has reached its budget, how much of it is used, how long it will train until then, and when its coordinator is sent a stop
request. Pure.

The coordinator itself enforces ``maxSteps``: it issues no slots beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
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
INTERVALS: Final = 3
"""Most intervals between evaluations over which :func:`recent_rates` averages."""


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


@dataclass(frozen=True)
class Rates:
    """Present rates; None while unknown."""

    generated_tokens_per_second: float | None = None
    trained_tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    compute_tokens_per_second: float | None = None
    """Counted as ``budget.maxComputeTokens``; None if it did not increase."""


def recent_rates(status: Status, token_cost: float) -> Rates:
    """Rates over the last intervals between evaluations; before the second evaluation, since the first lease.

    From the coordinator's totals alone, so that they are the same after a restart of the operator. Between evaluations, because
    an evaluation ends some steps after its version was trained.

    Args:
        token_cost: of a completion token, see :func:`scalerl_api.compute.rl_token_cost`.
    """
    window = status.points[-1 - INTERVALS :]
    if window:
        first, last = window[0], window[-1]
        steps, seconds = last.version - first.version, last.wall_seconds - first.wall_seconds
        if steps > 0 and seconds > 0:
            tokens = last.work_tokens - first.work_tokens
            return Rates(
                trained_tokens_per_second=tokens / seconds,
                seconds_per_step=seconds / steps,
                compute_tokens_per_second=tokens * token_cost / seconds if tokens > 0 else None,
            )
    seconds = status.wall_seconds
    if seconds <= 0:
        return Rates()
    # Mid-training is not of the pace of the steps that follow.
    steps = 0 if status.supervised_steps else status.step
    return Rates(
        trained_tokens_per_second=status.tokens_trained / seconds,
        seconds_per_step=seconds / steps if steps > 0 else None,
        compute_tokens_per_second=status.compute_tokens / seconds if status.compute_tokens > 0 else None,
    )


def eta_seconds(budget: BudgetSpec, status: Status, rates: Rates) -> float | None:
    """Seconds until the first limit of the budget is reached, at the present rates."""
    times: list[float] = []
    if budget.max_steps is not None:
        if rates.seconds_per_step is None:
            return None  # this limit may be the first
        times.append((budget.max_steps - status.step) * rates.seconds_per_step)
    if budget.max_seconds is not None:
        times.append(budget.max_seconds - elapsed_seconds(status))
    seconds, device_seconds = status.own_seconds, status.own_device_seconds
    if budget.max_device_hours is not None and seconds > 0 and device_seconds > 0:
        times.append(float(budget.max_device_hours) * 3600 * seconds / device_seconds - seconds)
    if budget.max_compute_tokens is not None:
        if rates.compute_tokens_per_second is None:
            return None
        times.append((budget.max_compute_tokens - status.compute_tokens) / rates.compute_tokens_per_second)
    return max(0.0, min(times)) if times else None


def coarse(seconds: float) -> str:
    """A duration to read at a glance, at most an eighth too long, or five minutes, so that it changes rarely.

    >>> [coarse(s) for s in (20, 400, 5_000, 20_000, 100_000, 300_000)]
    ['1m', '7m', '1h25m', '5h45m', '28h', '3d12h']
    """
    minutes = max(1, math.ceil(seconds / 60))
    if minutes > 10:
        step = 5 if minutes <= 120 else 15 if minutes <= 360 else 30 if minutes <= 720 else 60
        minutes = step * math.ceil(minutes / step)
    hours, rest = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24}h" if hours % 24 else f"{hours // 24}d"
    if hours == 0:
        return f"{rest}m"
    return f"{hours}h{rest}m" if rest else f"{hours}h"
