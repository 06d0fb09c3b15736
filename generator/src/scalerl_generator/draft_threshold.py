"""Learns what a step of the server costs, and from it which drafted tokens pay.

Near the batch of the moment, the seconds of a step are taken as linear::

    seconds = a + b rows + c drafted

A drafted token costs ``c`` seconds and brings one token with probability ``p``, that it and all before it are accepted. It raises
the tokens per second if ``p / c`` is more than these are now (Dinkelbach's condition for the maximum of a ratio), so a draft is
extended while ``p`` is at least ``c`` times the tokens per second. With few rows a step waits for memory, ``c`` is small and drafts are
long; with a full batch ``c`` is as much as a row, and only what is nearly certain is drafted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEPS = 128
"""The cost is learned from so many steps, the last ones: the batch changes, and the model is linear only near one."""
_MIN_STEPS = 16
_UNKNOWN_THRESHOLD = 0.5
_MIN_THRESHOLD = 0.05
_OUTLIER = 3.0
"""Steps that take this many times as long as the fit says waited for something else, such as a request, and are left out."""
_PROBE_STEPS = 32


class DraftThreshold:
    """The least probability at which a drafted token pays.

    After 32 steps without drafts one is a probe, with the threshold of the beginning: what a drafted token costs, and whether it
    is accepted, would not be known otherwise.

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
        """The step that the last value is for is a probe: drafts for a part of its rows are enough."""
        return self._steps_without >= _PROBE_STEPS

    def observe(self, *, seconds: float, rows: int, drafted: int, sampled: int) -> None:
        """A step of ``rows`` sequences verified ``drafted`` tokens, and ``sampled`` tokens came of it."""
        if drafted:
            self._steps_without = 0
        at = self._steps % _STEPS
        self._features[at] = 1.0, rows, drafted
        self._seconds[at], self._sampled[at] = seconds, sampled
        self._steps += 1

    def value(self, rows: int) -> float:
        """The threshold for the next step of ``rows`` sequences, at most 1: nothing is drafted."""
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
    """a, b and c, none negative. Errors count relative to a step's seconds, or those of full batches alone would decide."""
    scale = np.abs(features).max(axis=0) + 1e-12
    relative = features / scale / seconds[:, None]
    weight = 1e-4 * np.linalg.norm(relative)  # where rows never change, a and b share what they cost
    moments = relative.T @ relative + weight**2 * np.eye(3)
    fitted: NDArray[np.float64] = np.maximum(np.linalg.solve(moments, relative.sum(axis=0)) / scale, 0.0)
    return fitted
