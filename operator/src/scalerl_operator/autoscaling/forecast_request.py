"""Asking the sidecar: an answer that can be believed, or the reason why there is none. Never an exception."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import UNSET

from scalerl_api.forecast import Flat, ForecastAnswer, ForecastRequest

BOUND_SECONDS: Final = 60.0
"""For all attempts of one question together."""
AT_ONCE: Final = 8
"""Questions under way at a time: a thousand runs that ask at once would time each other out."""
NO_ANSWER: Final = "no forecast"
UNBELIEVABLE: Final = "the forecast cannot be believed"
REFUSED: Final = "the forecast was refused"
"""How the reasons begin for which there is none: nobody answers as one should, or the points are the matter."""
_LONGEST: Final = 80
SAME: Final = 1e-9
"""Relative difference of two computes that are one."""


class Sidecar:
    """One curve-fit sidecar; any number of runs may ask.

    url: asked for each time, since a sidecar that was restarted may have moved.
    timeout_seconds, attempts: of :class:`scalerl_operator.autoscaling.forecast_client.SidecarClient`.
    """

    def __init__(
        self,
        url: Callable[[], str],
        *,
        token: str | None = None,
        timeout_seconds: float = 5.0,
        attempts: int = 3,
        backoff_seconds: float = 0.5,
    ) -> None:
        self._url = url
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._attempts = attempts
        self._backoff_seconds = backoff_seconds
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def forecast(self, request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
        """The answer and no words, or none and why: down, slow, refused, or not to be believed."""
        # Only now: a command line that starts processes first has no need of aiohttp. The operator has it from the start.
        from scalerl_operator.autoscaling.forecast_client import (
            SidecarClient,
            SidecarRefused,
            SidecarUnavailable,
        )

        client = SidecarClient(
            self._url(),
            token=self._token,
            timeout_seconds=self._timeout_seconds,
            attempts=self._attempts,
            backoff_seconds=self._backoff_seconds,
        )
        try:
            async with self._gate, asyncio.timeout(BOUND_SECONDS), client:
                answer = await client.forecast(request)
        except SidecarRefused as refused:
            return None, f"{REFUSED}: {refused}"
        except SidecarUnavailable as unavailable:
            return None, f"{NO_ANSWER}: {unavailable}"
        except TimeoutError:
            return None, f"{NO_ANSWER} within {BOUND_SECONDS:.0f} s"
        wrong = unbelievable(request, answer)
        return (None, f"{UNBELIEVABLE}: {wrong}") if wrong else (answer, "")


def unbelievable(request: ForecastRequest, answer: ForecastAnswer) -> str:
    """What in an answer of the right shape cannot be, or does not belong to the request; else empty."""
    fit, outlook = answer.fit, answer.outlook
    last = request.points.compute[-1]
    if abs(fit.now + fit.segment_start - last) > SAME * max(1.0, abs(last)):
        return f"it is about compute {fit.now + fit.segment_start:g}, the last point is at {last:g}"
    if not 0 < fit.points_used <= len(request.points.compute):
        return f"{fit.points_used} points used of {len(request.points.compute)}"
    for name in ("A", "B", "Cmid", "R0", "sigma"):
        interval = getattr(fit, name)
        if not interval.low <= interval.median <= interval.high:
            return f"{name} is {interval.median:g} in an interval from {interval.low:g} to {interval.high:g}"
    if not 0.0 <= fit.A.low <= fit.A.high <= 1.0:
        return f"A from {fit.A.low:g} to {fit.A.high:g} is no pass rate"
    chances = {"p_before_cmid": fit.p_before_cmid}
    if isinstance(answer.flat, Flat):
        chances |= {name: getattr(answer.flat, name) for name in ("share", "p_trend", "p_late", "p_gain")}
    if outlook is None:
        if not answer.guard.broken:
            return "no outlook for a run that is not broken"
    else:
        chances["p_gain_above_min"] = outlook.p_gain_above_min
        if request.target is not None:
            chances["p_asymptote_above_target"] = _given(outlook.p_asymptote_above_target)
            if request.max_compute is not None:
                chances["p_target_at_max_compute"] = _given(outlook.p_target_at_max_compute)
        if request.price is not None and outlook.best_block is None:
            return "no best block, which was asked for"
        if outlook.best_block is not None and outlook.best_block.compute < 0:
            return f"a block of {outlook.best_block.compute:g} tokens"
    uses = [] if answer.earlier is UNSET else answer.earlier
    named, wanted = [use.name for use in uses], [run.name for run in request.earlier]
    if named != wanted:
        return f"it weighs the earlier runs {_listed(named)}, asked with {_listed(wanted)}"
    chances |= {f"the weight of the earlier run {use.name}": use.weight for use in uses}
    for name, chance in chances.items():
        if not 0.0 <= chance <= 1.0:
            return f"{name} is {chance:g}"
    return ""


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names) or "(none)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _given(value: float | None) -> float:
    return -1.0 if value is None else value
