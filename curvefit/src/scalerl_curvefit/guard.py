"""Has the run broken? A check of the last evaluations against what the ones before them promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve
from .errors import ConstantRewardError, RequestError, TooFewPointsError
from .fitting import past_posterior
from .hindcast import predict
from .settings import FitSettings

CONSECUTIVE: Final = 3
"""Evaluations in a row that must lie under the forecast."""
MOST_TRUNCATED: Final = 0.10
"""A truncation rate above 10 % precedes collapse; below 5 % is healthy (ScaleRL, §A [P])."""
QUANTILE: Final = -1.645
"""5 % of a normal distribution."""
MIN_HISTORY: Final = 8
"""Points before the checked ones without which no promise was made."""


@dataclass(frozen=True, slots=True)
class GuardResult:
    """Whether the run is broken, and why.

    broken: an alarm; no forecast should be made or acted on. reasons: in words, one each.
    checked: whether there was enough history to compare with (if not, only truncation was looked at).
    seen, floor: the last evaluations and the values they had to stay above, oldest first.
    """

    broken: bool
    reasons: tuple[str, ...]
    checked: bool
    seen: tuple[float, ...]
    floor: tuple[float, ...]


def guard(
    curve: Curve, truncation: Sequence[float] | float | None = None, settings: FitSettings | None = None
) -> GuardResult:
    """Alarm when the last 3 evaluations all lie under the 5 % quantile of a fit that has not seen them.

    truncation: share of rollouts cut off at the length limit, of each point or the latest; an alarm at
    10 % or more. Rewards that are not finite never get here: `Curve` refuses them (NonFiniteError),
    which a caller has to take for broken as well.

    Looks at the last segment only, and needs 8 points before the checked ones; with fewer, or with
    constant rewards before them, `checked` is False.
    """
    reasons = []
    latest = _latest_truncation(truncation)
    if latest is not None and latest >= MOST_TRUNCATED:
        reasons.append(f"{latest:.1%} of rollouts are truncated, {MOST_TRUNCATED:.0%} or more")
    last = curve.segments()[-1].curve
    count = int(np.count_nonzero(last.compute > 0)) - CONSECUTIVE
    seen = tuple(float(r) for r in last.reward[-CONSECUTIVE:])
    if count < MIN_HISTORY:
        return GuardResult(bool(reasons), tuple(reasons), False, seen, ())
    try:
        before = past_posterior(last, settings or FitSettings(), count)
    except (TooFewPointsError, ConstantRewardError):
        return GuardResult(bool(reasons), tuple(reasons), False, seen, ())
    # 5 % quantiles of evaluations there, the next ones after the fit: no discrepancy so close.
    floor = tuple(mean + QUANTILE * sd for mean, sd in predict(before, last.compute[-CONSECUTIVE:]))
    if all(s < f for s, f in zip(seen, floor, strict=True)):
        worst = max(f - s for s, f in zip(seen, floor, strict=True))
        reasons.append(
            f"the last {CONSECUTIVE} evaluations lie under the 5 % quantile of the forecast made before them, "
            f"by up to {worst:.3f}"
        )
    return GuardResult(bool(reasons), tuple(reasons), True, seen, floor)


def _latest_truncation(truncation: Sequence[float] | float | None) -> float | None:
    if truncation is None:
        return None
    rates = np.atleast_1d(np.asarray(truncation, dtype=np.float64))
    if rates.size == 0 or not np.all((rates >= 0) & (rates <= 1)):
        raise RequestError("truncation must be rates between 0 and 1, one a point or the latest")
    return float(rates[-1])
