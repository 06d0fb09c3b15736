"""Errors of this package; the sidecar sends their names as stable codes (`TooFewPointsError`: `too_few_points`).

Messages say what is wrong, at which point (0-based index), and what to do.
"""

from __future__ import annotations


class CurveError(ValueError):
    """Base of all errors of this package."""


class InputError(CurveError):
    """The points cannot be fitted."""


class ShapeError(InputError):
    """Columns differ in length or are not one-dimensional."""


class NonFiniteError(InputError):
    """A value is NaN or infinite."""


class NegativeComputeError(InputError):
    """A compute value is below zero."""


class UnsortedComputeError(InputError):
    """Compute decreases from one point to the next."""


class DuplicateComputeError(InputError):
    """Two points have the same compute."""


class RewardRangeError(InputError):
    """A reward lies outside [0, 1] (or outside the stated scale)."""


class SamplesError(InputError):
    """An evaluation sample count is not positive."""


class TooFewPointsError(InputError):
    """Fewer points than a four-parameter curve needs."""


class ComputeSpanError(InputError):
    """The compute of all points is nearly the same, as of times since another epoch."""


class ConstantRewardError(InputError):
    """All rewards are equal, so that they fit every curve."""


class MixedSegmentsError(InputError):
    """The recipe or the evaluation version changes within the points."""


class SettingsError(CurveError):
    """A fit setting is outside its range."""


class RequestError(CurveError):
    """A forecast request is invalid (compute ≤ 0, no draws, …)."""
