"""Has the run broken? A check of the last evaluations against what the ones before them promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import Curve
from .errors import RequestError
from .fitting import Fit, fit_after, past_counts, past_posteriors
from .hindcast import predict
from .posterior import Nodes
from .settings import DEFAULTS, FitSettings

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
    last, settings = curve.segments()[-1].curve, settings or DEFAULTS
    return _judged(last, truncation, past_posteriors(last, settings, _promised(last)))


def fit_and_guard(
    curve: Curve, truncation: Sequence[float] | float | None = None, settings: FitSettings | None = None
) -> tuple[Fit, GuardResult]:
    """`fit` and `guard` of one segment; the same answers, with the fits of all past moments made together."""
    settings = settings or DEFAULTS
    curve.require_one_segment()
    counts = [*past_counts(curve, settings), *_promised(curve)]
    pasts = past_posteriors(curve, settings, counts)
    return fit_after(curve, settings, pasts), _judged(curve, truncation, pasts)


def guards(curve: Curve, counts: Sequence[int], settings: FitSettings) -> list[GuardResult]:
    """What `guard` said of one segment when it had each of so many points, made together; no truncation."""
    curve.require_one_segment()
    heads = [curve.head(count) for count in counts]
    pasts = past_posteriors(curve, settings, [n for head in heads for n in _promised(head)])
    return [_judged(head, None, pasts) for head in heads]


def _promised(last: Curve) -> list[int]:
    """Of how many points at compute > 0 the promise is, if of any."""
    count = len(last) - last.first_trained - CONSECUTIVE
    if count < MIN_HISTORY or np.ptp(last.reward[last.first_trained : -CONSECUTIVE]) == 0.0:
        return []
    return [count]


def _judged(
    last: Curve, truncation: Sequence[float] | float | None, pasts: Mapping[int, Nodes]
) -> GuardResult:
    reasons = []
    latest = _latest_truncation(truncation)
    if latest is not None and latest >= MOST_TRUNCATED:
        reasons.append(f"{latest:.1%} of rollouts are truncated, {MOST_TRUNCATED:.0%} or more")
    seen = tuple(float(r) for r in last.reward[-CONSECUTIVE:])
    promised = _promised(last)
    if not promised:
        return GuardResult(bool(reasons), tuple(reasons), False, seen, ())
    # 5 % quantiles of evaluations there, the next ones after the fit: no discrepancy so close.
    ahead = predict(pasts[promised[0]], last.compute[-CONSECUTIVE:])
    floor = tuple(mean + QUANTILE * sd for mean, sd in ahead)
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
