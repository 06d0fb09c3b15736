"""Learns what a step of the server costs, and from it which drafted tokens pay.

Near the batch of the moment, the seconds of a step are taken as linear::

    seconds = a + b rows + c drafted

A drafted token costs ``c`` seconds and brings one token with probability ``p``, that it and all before it are accepted. It raises
the tokens per second if ``p / c`` is more than these are now (Dinkelbach's condition for the maximum of a ratio), so a draft goes on
while ``p`` is at least ``c`` times the tokens per second. With few rows a step waits for memory, ``c`` is small and drafts are
long; with a full batch ``c`` is as much as a row, and nothing is drafted.
"""

from __future__ import annotations

import numpy as np

_FORGETTING = 0.99
"""Of earlier steps, at each: the batch changes, and the model is linear only near one."""
_MIN_OBSERVATIONS = 16
_UNKNOWN_THRESHOLD = 0.5
_MIN_THRESHOLD = 0.05
_RIDGE = 1e-6
_OUTLIER = 4.0
"""Steps that take this many times as long as expected waited for something else, such as a request."""
_MAX_OUTLIERS = 8
"""After so many in a row all is learned anew."""
_PROBE_STEPS = 32


class DraftThreshold:
    """The least probability at which a drafted token pays.

    While nothing is drafted, every 32nd step is a probe with the threshold of a run's beginning: what a drafted token costs, and
    whether it is accepted, would not be known otherwise.

    >>> threshold = DraftThreshold()
    >>> for drafted in [0, 40, 8, 24] * 16:
    ...     threshold.observe(seconds=0.01 + 0.0001 * drafted, rows=8, drafted=drafted, sampled=8 + drafted // 2)
    >>> round(threshold.value(rows=8), 2)  # .0001 s a token, 17 tokens in .0118 s
    0.14
    """

    def __init__(self) -> None:
        self._steps_without = 0
        self._forget()

    def _forget(self) -> None:
        self._moments = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._cost = np.zeros(3)
        self._rows = self._sampled = self._drafted = 0.0
        self._observations = self._outliers = 0

    def observe(self, *, seconds: float, rows: int, drafted: int, sampled: int) -> None:
        """A step of ``rows`` sequences verified ``drafted`` tokens, and ``sampled`` tokens came of it."""
        if drafted:
            self._steps_without = 0
        if self._observations >= _MIN_OBSERVATIONS:
            if seconds > _OUTLIER * float(self._cost @ (1.0, rows, drafted)):
                self._outliers += 1
                if self._outliers == _MAX_OUTLIERS:
                    self._forget()
                return
            self._outliers = 0
        self._observations += 1
        # Divided by the seconds: errors count relative to the step, or full batches alone would decide.
        features = np.array([1.0, rows, drafted]) / seconds
        self._moments = _FORGETTING * self._moments + np.outer(features, features)
        self._products = _FORGETTING * self._products + features
        self._rows = _FORGETTING * self._rows + rows
        self._sampled = _FORGETTING * self._sampled + sampled
        self._drafted = _FORGETTING * self._drafted + drafted
        scale = np.sqrt(np.diag(self._moments)) + 1e-12
        scaled = self._moments / np.outer(scale, scale) + _RIDGE * np.eye(3)
        self._cost = np.maximum(np.linalg.solve(scaled, self._products / scale) / scale, 0.0)

    def value(self, rows: int) -> float:
        """The threshold for the next step of ``rows`` sequences, at most 1: nothing is drafted."""
        self._steps_without += 1
        if self._observations < _MIN_OBSERVATIONS or self._steps_without >= _PROBE_STEPS:
            return _UNKNOWN_THRESHOLD
        seconds = float(self._cost @ (1.0, rows, rows * self._drafted / self._rows))
        per_second = rows * self._sampled / self._rows / max(seconds, 1e-9)
        return float(np.clip(self._cost[2] * per_second, _MIN_THRESHOLD, 1.0))
