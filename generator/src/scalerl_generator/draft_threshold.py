"""Learns the duration of the server's steps, and from it the least probability at which a drafted token pays.

Near the current batch size, the duration of a step is modeled as linear::

    seconds = a + b rows + c drafted

A drafted token costs ``c`` seconds. With probability ``p``, it and all before it in its draft are accepted, and it yields one
token. It raises the tokens per second if ``p / c`` exceeds their current value (Dinkelbach's condition for the maximum of a
ratio), so a draft is extended while ``p`` is at least ``c`` times the tokens per second. With few rows a step is bound by
memory bandwidth, ``c`` is small and drafts are long; with a full batch ``c`` is as large as the cost of a row, and only nearly
certain tokens are drafted.
"""

from __future__ import annotations

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

    @property
    def is_probe(self) -> bool:
        """Whether the step of the last :meth:`value` is a probe, for which drafts of a part of its rows are enough."""
        return self._steps_without >= _PROBE_STEPS

    def observe(self, *, seconds: float, rows: int, drafted: int, sampled: int) -> None:
        """Record a step: its duration, and the numbers of its sequences, drafted tokens and resulting tokens."""
        if drafted:
            self._steps_without = 0
        i = self._steps % _STEPS
        self._features[i] = 1.0, rows, drafted
        self._seconds[i], self._sampled[i] = seconds, sampled
        self._steps += 1

    def value(self, rows: int) -> float:
        """The threshold for the next step of ``rows`` sequences; at 1 nothing is drafted."""
        self._steps_without += 1
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
