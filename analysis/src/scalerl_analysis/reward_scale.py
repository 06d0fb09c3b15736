"""Conversion between pass rates from 0 to 1, which are fitted, and rewards on the scale of the file, which are shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from scalerl_analysis import formatting
from scalerl_curvefit import Estimate
from scalerl_curvefit.curve import FloatArray

Values = TypeVar("Values", float, FloatArray)


@dataclass(frozen=True, slots=True)
class RewardScale:
    """The lowest and the highest possible reward of a file."""

    low: float
    high: float

    @property
    def size(self) -> float:
        """Difference between the highest and the lowest reward."""
        return self.high - self.low

    @property
    def is_unit(self) -> bool:
        """Whether the rewards in the file are pass rates."""
        return (self.low, self.high) == (0.0, 1.0)

    def level(self, rate: Values) -> Values:
        """A reward of the file from a pass rate."""
        return rate * self.size + self.low

    def change(self, rate: Values) -> Values:
        """A difference of rewards of the file from one of pass rates."""
        return rate * self.size

    def rate(self, reward: float) -> float:
        """A pass rate from a reward of the file."""
        return (reward - self.low) / self.size

    def levels(self, interval: formatting.Interval) -> Estimate:
        """Median and bounds of a reward of the file."""
        return Estimate(*(self.level(v) for v in (interval.median, interval.low, interval.high)))

    def changes(self, interval: formatting.Interval) -> Estimate:
        """Median and bounds of a difference of rewards of the file."""
        return Estimate(*(self.change(v) for v in (interval.median, interval.low, interval.high)))

    def digits(self, of_rate: int = 2) -> int:
        """Decimals of a reward of the file with the same precision as ``of_rate`` decimals of a pass rate."""
        return max(of_rate - math.floor(math.log10(self.size)), 0)

    def reward(self, rate: float, digits: int = 2) -> str:
        """``.62``, or ``62`` on a scale of 100; ``digits`` are those of the pass rate."""
        return formatting.reward(self.level(rate), self.digits(digits))

    def difference(self, rate: float, digits: int = 3) -> str:
        """A difference: ``.037``, or ``3.7`` on a scale of 100."""
        return formatting.reward(self.change(rate), self.digits(digits))

    def rewards(self, interval: formatting.Interval) -> str:
        """``.62 (.60–.64)``, or ``62 (60–64)`` on a scale of 100."""
        n = self.digits(formatting.digits(interval.low, interval.high))
        return formatting.rewards(self.levels(interval), n)

    def differences(self, interval: formatting.Interval) -> str:
        """A difference with its interval: ``.02 (.00–.05)``."""
        n = self.digits(formatting.digits(interval.low, interval.high))
        return formatting.rewards(self.changes(interval), n)

    def gains(self, interval: formatting.Interval) -> str:
        """A signed difference with its interval: ``+.02 (.00–.05)``."""
        return ("+" if interval.median >= 0 else "") + self.differences(interval)

    def width(self, interval: formatting.Interval) -> str:
        """Width of an interval of rewards, with the digits of the printed interval."""
        return self.difference(interval.high - interval.low, formatting.digits(interval.low, interval.high))
