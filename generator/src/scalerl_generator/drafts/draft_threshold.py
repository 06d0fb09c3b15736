"""Learns the duration of the server's steps, and from it the least probability at which a drafted token pays.

Near the current batch size, the duration of a step is modeled as linear::

    seconds = a + b rows + c drafted

A drafted token costs ``c`` seconds. With probability ``p``, it and all before it in its draft are accepted, and it yields one
token. It raises the tokens per second if ``p / c`` exceeds their current value (Dinkelbach's condition for the maximum of a
ratio), so a draft is extended while ``p`` is at least ``c`` times the tokens per second. With few rows a step is bound by
memory bandwidth, ``c`` is small and drafts are long; with a full batch ``c`` is as large as the cost of a row, and only nearly
certain tokens are drafted.

The model does not know all of what drafts cost (kernels of other shapes, the draft's own time), and acceptance changes with the weights.
Therefore some steps have no drafts, as a control (:class:`Control`): where drafts lower the measured tokens per second, drafting
stops for a while.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

_STEPS = 128
"""The cost is learned from this many last steps: the batch size changes, and the model is linear only near one size."""
_MIN_STEPS = 16
_UNKNOWN_THRESHOLD = 0.5
_MIN_THRESHOLD = 0.05
_OUTLIER = 3.0
"""Steps that take this many times as long as the fit predicts are left out: they waited for something else, such as a request."""
_PROBE_STEPS = 32
"""After this many steps without drafts, a step probes the cost of drafts."""


_CONTROL_INTERVAL = 64
"""Steps with drafts from one control to the next; a draft foregone in 64 costs at most 1.6 %."""
_FIRST_CONTROL_INTERVAL = 8
"""The same while fewer than :data:`_CONTROLS` are known."""
_CONTROLS = 9
_MAX_LOSSES = 6
"""More of the last :data:`_CONTROLS` in which drafts were slower stop them; equal speeds exceed it in 9 %. Single steps vary, so
the sizes of the differences do not count."""
_CLEAR_CONTROLS, _CLEAR_LOSS = 4, 0.8
"""This many controls are enough if drafts were so much slower in all of them."""
_MIN_BESIDE, _MAX_BESIDE = 6, 16
"""Least and greatest number of steps with drafts before a control to compare it with."""
_MIN_PAUSE, _MAX_PAUSE = 512, 8192
"""Steps without drafts after they have not paid; doubled each time that they do not pay again."""


class Control:
    """Compares the tokens per second of steps with drafts to those of single steps without between them."""

    def __init__(self) -> None:
        self._beside: deque[tuple[float, int]] = deque(maxlen=_MAX_BESIDE)
        """Seconds and tokens of the last steps with drafts since a control."""
        self._gains: deque[float] = deque(maxlen=_CONTROLS)
        self._since = self._left = self._rows = 0
        self._pause = _MIN_PAUSE
        self.paused_steps = 0
        """Steps in which nothing was drafted because drafts had not paid."""

    @property
    def pausing(self) -> bool:
        """Whether nothing is drafted because drafts have not paid."""
        return self._left > 0

    @property
    def gain(self) -> float:
        """Tokens per second with drafts, in multiples of those without; 1 while unknown."""
        return median(self._gains) if len(self._gains) == _CONTROLS else 1.0

    def observe(self, *, seconds: float, drafted: int, sampled: int) -> None:
        """Record a step."""
        if self._left:
            return
        if drafted:
            self._beside.append((seconds, sampled))
            self._since += 1
            return
        if len(self._beside) >= _MIN_BESIDE:
            beside = sorted(self._beside)[:-1]  # the slowest may have waited for something else
            all_seconds, all_sampled = map(sum, zip(*beside, strict=True))
            self._gains.append(all_sampled / all_seconds * seconds / max(sampled, 1))
            self._judge()
        self._beside.clear()
        self._since = 0

    def _judge(self) -> None:
        clear = len(self._gains) == _CLEAR_CONTROLS and max(self._gains) < _CLEAR_LOSS
        if clear or sum(gain < 1.0 for gain in self._gains) > _MAX_LOSSES:
            self._left, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        elif self.gain > 1.0:  # of as many controls as count
            self._pause = _MIN_PAUSE

    def allows(self, rows: int) -> bool:
        """Whether the next step, of ``rows`` sequences, may draft. Drafts are tried again at once when half of them are left."""
        if self._left:
            self._rows = max(self._rows, rows)
            self._left = 0 if 2 * rows <= self._rows else self._left - 1
            self.paused_steps += 1
            if not self._left:
                self._gains.clear()
                self._rows = 0
            return False
        known = len(self._gains) == _CONTROLS
        return self._since < (_CONTROL_INTERVAL if known else _FIRST_CONTROL_INTERVAL)


class DraftThreshold:
    """The least probability at which a drafted token pays.

    After 32 steps without drafts, one step is a probe with the initial threshold. Otherwise the cost of a drafted token, and
    whether it is accepted, would never be measured again.

    >>> threshold = DraftThreshold()
    >>> for drafted in [0, 40, 8, 24] * 16:
    ...     threshold.observe(seconds=0.01 + 0.0001 * drafted, rows=8, drafted=drafted, sampled=8 + drafted // 2)
    >>> round(threshold.value(rows=8), 2)  # .0001 s a token, 17 tokens in .0118 s
    0.14
    """

    def __init__(self) -> None:
        self._features = np.ones((_STEPS, 3))
        self._seconds = np.ones(_STEPS)
        self._sampled = np.zeros(_STEPS)
        self._steps = self._steps_without = 0
        self.control = Control()
        self._controlled: deque[bool] = deque(maxlen=2)
        """Whether the last steps are without drafts as a control; the last is observed after the value of the next."""

    @property
    def is_probe(self) -> bool:
        """Whether the step of the last :meth:`value` is a probe, for which drafts of a part of its rows are enough."""
        return self._steps_without >= _PROBE_STEPS and not self.control.pausing

    def observe(self, *, seconds: float, rows: int, drafted: int, sampled: int) -> None:
        """Record a step: its duration, and the numbers of its sequences, drafted tokens and resulting tokens."""
        if drafted:
            self._steps_without = 0
        self.control.observe(seconds=seconds, drafted=drafted, sampled=sampled)
        if not drafted and any(self._controlled):
            return  # a control shows what drafts cost together, not what one more drafted token costs
        i = self._steps % _STEPS
        self._features[i] = 1.0, rows, drafted
        self._seconds[i], self._sampled[i] = seconds, sampled
        self._steps += 1

    def value(self, rows: int) -> float:
        """The threshold for the next step of ``rows`` sequences; at 1 nothing is drafted."""
        self._steps_without += 1
        self._controlled.append(not self.control.allows(rows))
        if self._controlled[-1]:
            return 1.0
        if self._steps < _MIN_STEPS or self.is_probe:
            return _UNKNOWN_THRESHOLD
        known = min(self._steps, _STEPS)
        features, seconds = self._features[:known], self._seconds[:known]
        if not features[:, 2].any():
            return _UNKNOWN_THRESHOLD
        cost = _fit(features, seconds)
        kept = seconds <= _OUTLIER * (features @ cost)
        cost = _fit(features[kept], seconds[kept])
        _, of_rows, of_drafts = features[kept].sum(axis=0)
        expected = cost @ (1.0, rows, rows * of_drafts / of_rows)
        per_second = rows * self._sampled[:known][kept].sum() / of_rows / max(expected, 1e-9)
        return float(np.clip(cost[2] * per_second, _MIN_THRESHOLD, 1.0))


def _fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit a, b and c, none negative, by least squares of the relative errors; absolute ones would favor full batches."""
    scale = np.abs(features).max(axis=0) + 1e-12
    relative = features / scale / seconds[:, None]
    # Ridge penalty: if rows never change, a and b are not identifiable.
    weight = 1e-4 * np.linalg.norm(relative)
    moments = relative.T @ relative + weight**2 * np.eye(3)
    fitted: NDArray[np.float64] = np.maximum(np.linalg.solve(moments, relative.sum(axis=0)) / scale, 0.0)
    return fitted
