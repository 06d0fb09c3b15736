"""The measured points of one run, validated once on construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import (
    DuplicateComputeError,
    MixedSegmentsError,
    NegativeComputeError,
    NonFiniteError,
    RewardRangeError,
    SamplesError,
    ShapeError,
    UnsortedComputeError,
)

FloatArray = NDArray[np.float64]
Labels = str | Sequence[str] | None

UNIT_SCALE: Final = (0.0, 1.0)
"""The rewards are pass rates."""
SIGNED_SCALE: Final = (-1.0, 1.0)
"""Rewards of ±1 as in ScaleRL §A [P]: a mean r becomes the pass rate (r + 1)/2."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive points of one recipe and one evaluation version.

    Attributes:
        curve: the points; compute counts from the start of the recipe (`start`).
        start: compute spent on earlier recipes, in the curve's unit.
    """

    curve: Curve
    start: float


@dataclass(frozen=True, eq=False)
class Curve:
    """Points (compute, reward) of one run.

    Parameters
    ----------
    compute : (n,) strictly increasing, ≥ 0, in any unit of useful work (trained tokens, samples,
        or device-hours at a constant efficiency). A point at 0 is the evaluation before training.
    reward : (n,) mean validation reward, within `scale`.
    samples : (n,) or one number: evaluation samples per point; gives the binomial noise floor.
    eval_version, recipe : one label for all points, or one per point. A new segment starts where a label changes.
    scale : (lowest, highest) possible reward, mapped linearly onto [0, 1]; pass `SIGNED_SCALE` for ±1 rewards.

    Raises
    ------
    ShapeError, NonFiniteError, NegativeComputeError, UnsortedComputeError, DuplicateComputeError,
    RewardRangeError, SamplesError

    >>> Curve([1, 2, 4], [0.1, 0.2, 0.4]).now
    4.0
    """

    compute: FloatArray
    reward: FloatArray
    samples: FloatArray | None
    eval_version: tuple[str, ...] | None
    recipe: tuple[str, ...] | None
    scale: tuple[float, float] = field(default=UNIT_SCALE)

    def __init__(
        self,
        compute: ArrayLike,
        reward: ArrayLike,
        samples: ArrayLike | None = None,
        eval_version: Labels = None,
        recipe: Labels = None,
        scale: tuple[float, float] = UNIT_SCALE,
    ) -> None:
        compute_n = _column("compute", compute)
        raw_n = _column("reward", reward)
        n = compute_n.size
        if raw_n.size != n:
            raise ShapeError(f"compute has {n} values and reward {raw_n.size}; give one reward a point")
        _check_compute(compute_n)
        set_field = object.__setattr__
        set_field(self, "compute", _frozen(compute_n))
        set_field(self, "reward", _frozen(_to_unit(raw_n, scale)))
        set_field(self, "samples", _check_samples(samples, n))
        set_field(self, "eval_version", _labels("eval_version", eval_version, n))
        set_field(self, "recipe", _labels("recipe", recipe, n))
        set_field(self, "scale", (float(scale[0]), float(scale[1])))

    def __len__(self) -> int:
        return int(self.compute.size)

    @property
    def now(self) -> float:
        """Compute of the last point."""
        return float(self.compute[-1])

    @property
    def first_trained(self) -> int:
        """Index of the first point at compute > 0; the number of points if there is none."""
        return int(np.searchsorted(self.compute, 0.0, side="right"))

    def head(self, n: int) -> Curve:
        """The first `n` points, as a view."""
        if not self.compute[:n].size:
            raise ShapeError(f"the first {n} of {len(self)} points are an empty curve; take at least 1")
        taken = object.__new__(Curve)
        for name in ("compute", "reward", "samples", "eval_version", "recipe"):
            column = getattr(self, name)
            object.__setattr__(taken, name, None if column is None else column[:n])
        object.__setattr__(taken, "scale", self.scale)
        return taken

    def segments(self) -> list[Segment]:
        """Split where the recipe or the evaluation version changes, in order.

        The compute of a new recipe counts from the last point of the old one, since it starts at the reward reached by then;
        a new evaluation version alone keeps the axis.
        """
        n, changes = len(self), self._changes()
        if not changes:
            return [Segment(self, 0.0)]
        segments, start = [], 0.0
        for begin, end in zip([0, *changes], [*changes, n], strict=True):
            if begin and self.recipe is not None and self.recipe[begin] != self.recipe[begin - 1]:
                start = float(self.compute[begin - 1])
            segments.append(Segment(self._part(slice(begin, end), start), start))
        return segments

    def require_one_segment(self) -> None:
        """Raise MixedSegmentsError unless one recipe and one evaluation version cover all points."""
        for i in self._changes()[:1]:
            raise MixedSegmentsError(
                f"recipe or evaluation version changes at point {i}: {self._label(i - 1)} → "
                f"{self._label(i)}; rewards on both sides do not lie on one curve. "
                "Fit one of curve.segments(), usually the last"
            )

    def _changes(self) -> list[int]:
        """Indices of points whose label differs from that of the point before."""
        if all(labels is None or len(set(labels)) == 1 for labels in (self.recipe, self.eval_version)):
            return []
        return [i for i in range(1, len(self)) if self._label(i) != self._label(i - 1)]

    def _label(self, i: int) -> tuple[str | None, str | None]:
        return (self.recipe[i] if self.recipe else None, self.eval_version[i] if self.eval_version else None)

    def _part(self, part: slice, start: float) -> Curve:
        low, high = self.scale
        return Curve(
            self.compute[part] - start,
            self.reward[part] * (high - low) + low,
            None if self.samples is None else self.samples[part],
            None if self.eval_version is None else self.eval_version[part],
            None if self.recipe is None else self.recipe[part],
            self.scale,
        )


def _column(name: str, values: ArrayLike) -> FloatArray:
    try:
        column = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{name} is not a column of numbers: {error}") from error
    if column.ndim != 1 or column.size == 0:
        raise ShapeError(f"{name} must be one non-empty column, got shape {column.shape}")
    finite = np.isfinite(column)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise NonFiniteError(
            f"{name}[{bad[0]}] is {column[bad[0]]} ({bad.size} such); drop the point or repeat its evaluation"
        )
    return column


def _frozen(values: FloatArray) -> FloatArray:
    values.flags.writeable = False
    return values


def _check_compute(compute: FloatArray) -> None:
    step = np.diff(compute)
    if compute[0] >= 0 and step.min(initial=1.0) > 0:
        return
    if compute[compute < 0].size:
        i = int(np.argmax(compute < 0))
        raise NegativeComputeError(f"compute[{i}] is {compute[i]:g}; compute is work done and starts at 0")
    if np.any(step < 0):
        i = int(np.argmax(step < 0)) + 1
        raise UnsortedComputeError(
            f"compute goes back at point {i}: {compute[i - 1]:g} → {compute[i]:g}; "
            "sort the points, or, after a restart from a checkpoint, drop those after the checkpoint"
        )
    if np.any(step == 0):
        i = int(np.argmax(step == 0)) + 1
        raise DuplicateComputeError(
            f"points {i - 1} and {i} have the same compute {compute[i]:g}; keep one, or their mean"
        )


def _to_unit(reward: FloatArray, scale: tuple[float, float]) -> FloatArray:
    low, high = float(scale[0]), float(scale[1])
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise RewardRangeError(f"scale must be (lowest, highest) with lowest < highest, got {scale}")
    if reward.min() < low or reward.max() > high:
        outside = (reward < low) | (reward > high)
        i = int(np.argmax(outside))
        hint = "pass scale=(lowest, highest), for ±1 rewards scale=SIGNED_SCALE"
        raise RewardRangeError(f"reward[{i}] is {reward[i]:g}, outside [{low:g}, {high:g}]; {hint}")
    if (low, high) == UNIT_SCALE:
        return reward
    return np.clip((reward - low) / (high - low), 0.0, 1.0)


def _check_samples(samples: ArrayLike | None, n: int) -> FloatArray | None:
    if samples is None:
        return None
    column = (
        np.broadcast_to(np.asarray(samples, dtype=np.float64), (n,)) if np.ndim(samples) == 0 else samples
    )
    counts = _column("samples", column)
    if counts.size != n:
        raise ShapeError(
            f"samples has {counts.size} values for {n} points; give one count a point, or one number"
        )
    if np.any(counts <= 0):
        i = int(np.argmax(counts <= 0))
        raise SamplesError(f"samples[{i}] is {counts[i]:g}; an evaluation has at least one sample")
    return _frozen(counts)


def _labels(name: str, labels: Labels, n: int) -> tuple[str, ...] | None:
    if labels is None:
        return None
    if isinstance(labels, str):
        return (labels,) * n
    if len(labels) != n:
        raise ShapeError(f"{name} has {len(labels)} labels for {n} points; give one a point, or one string")
    return tuple(str(label) for label in labels)
