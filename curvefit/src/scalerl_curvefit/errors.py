"""Every way a curve or a request can be wrong, each with its own type.

```
CurveError (ValueError)
├── InputError                what the caller measured cannot be fitted as it stands
│   ├── ShapeError            columns of different length, or not one-dimensional
│   ├── NonFiniteError        NaN or infinity
│   ├── NegativeComputeError  compute below zero
│   ├── UnsortedComputeError  compute goes back
│   ├── DuplicateComputeError two points at the same compute
│   ├── RewardRangeError      rewards outside [0, 1] and no scale stated
│   ├── SamplesError          evaluation samples that are no positive counts
│   ├── TooFewPointsError     not enough points left to fit
│   ├── ConstantRewardError   all rewards equal: there is no curve in them
│   └── MixedSegmentsError    the recipe or the evaluation set changed midway
├── SettingsError             a setting outside its range
└── RequestError              a forecast that cannot be asked for (compute ≤ 0, no draws, ...)
```

Messages say what was wrong, at which point (0-based index), and what to do.
"""

from __future__ import annotations


class CurveError(ValueError):
    """Base of everything this package refuses."""


class InputError(CurveError):
    """The points cannot be fitted as they stand."""


class ShapeError(InputError):
    """Columns differ in length or are not one-dimensional."""


class NonFiniteError(InputError):
    """A value is NaN or infinite."""


class NegativeComputeError(InputError):
    """A compute value is below zero."""


class UnsortedComputeError(InputError):
    """Compute goes back from one point to the next."""


class DuplicateComputeError(InputError):
    """Two points stand at the same compute."""


class RewardRangeError(InputError):
    """A reward lies outside [0, 1] (or outside the stated scale)."""


class SamplesError(InputError):
    """An evaluation sample count is not positive."""


class TooFewPointsError(InputError):
    """Fewer points than a four-parameter curve needs."""


class ConstantRewardError(InputError):
    """All rewards are equal, so that no curve can be told from any other."""


class MixedSegmentsError(InputError):
    """The recipe or the evaluation version changes within the points."""


class SettingsError(CurveError):
    """A fit setting is outside its range."""


class RequestError(CurveError):
    """A forecast cannot be made as asked."""
