"""Rates from successive statuses, for a view."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from scalerl_api.wire import Status
from scalerl_lifecycle.budget import Rates

_WINDOW_SECONDS = 30.0


@dataclass
class RateMeter:
    """Rates from successive statuses."""

    _statuses: deque[tuple[float, Status]] = field(default_factory=deque)

    def add(self, status: Status, now: float | None = None) -> Rates:
        now = time.monotonic() if now is None else now
        known = self._statuses
        # Totals decrease when a trainer restarts from a checkpoint; a rate across that is meaningless.
        if known and status.step < known[-1][1].step:
            known.clear()
        known.append((now, status))
        # The window always has a step, however slow.
        while len(known) > 2 and now - known[1][0] >= _WINDOW_SECONDS and status.step > known[1][1].step:
            known.popleft()
        then, first = known[0]
        seconds = now - then
        if seconds <= 0:
            return Rates()
        steps = status.step - first.step
        compute = status.compute_tokens - first.compute_tokens
        return Rates(
            (status.tokens_generated - first.tokens_generated) / seconds,
            (status.tokens_trained - first.tokens_trained) / seconds,
            seconds / steps if steps > 0 else None,
            compute / seconds if compute > 0 else None,
        )
