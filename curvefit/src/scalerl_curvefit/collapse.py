"""Detects a collapse: the last evaluations lie below the best earlier ones, or too many rollouts are truncated.

An alarm needs a fall of the reward itself, not of a forecast: a slow start, a stall and a run at its best raise none.
The newest mean of 3 neighbouring evaluations is compared with the best mean that shares no evaluation with it. The fall
f = best − newest raises an alarm if it exceeds the noise of the best of many,

    f ≥ max(least, t·s),    t: Student's t with k/3 degrees of freedom at 1 − α/(k²/9),  k evaluations so far,

since by then twice (k/3)²/2 pairs of means have been compared (neighbouring means are correlated). α is the probability
that a run which never falls raises an alarm at any time; over 40 evaluations of a flat line, the hardest case, 1 % did
with independent noise, 3 % with an autocorrelation of .3.

s is the sd of the difference of two such means, estimated from the evaluations before the last three: the larger of two
robust estimates. One is from first or second differences of neighbours, whichever are smaller; the other from third
differences of means of three, which contain slow noise too and no trend. Evaluations on the same prompts vary less than
the binomial sd of their samples at the best mean, so .43 of that is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from .curve import Curve, FloatArray
from .errors import RequestError

CONSECUTIVE: Final = 3
"""Number of evaluations that are averaged."""
ERROR_RATE: Final = 0.01
"""α: probability that a run which never falls raises an alarm at any time."""
WITHIN_NOISE: Final = 1.645
"""An alarm ends once the newest mean is within this many s of the best: 5 % of a normal distribution."""
LEAST: Final = 0.01
"""Smallest fall that matters: a quarter of the default `minGain`, as for the autoscaler."""
MAX_TRUNCATION: Final = 0.10
"""A truncation rate above 10 % precedes collapse; below 5 % is healthy (ScaleRL, §A [P])."""
MIN_HISTORY: Final = 8
"""Fewest evaluations, the last three included, that determine the noise; with fewer nothing is compared."""
PAIRED: Final = 0.43
"""Smallest noise of evaluations on the same prompts in six sources, as a share of the binomial sd."""
GROWTH: Final = 1.15
"""The noise is estimated again whenever the number of evaluations has grown by this factor."""
WINDOW: Final = 400
"""The noise is estimated from this many of the newest evaluations."""
MAD_TO_SD: Final = 1.4826
CUT: Final = 2.5
"""Deviations are clipped at this many sds; CUT_TO_SD corrects the estimate for normal noise."""
CUT_TO_SD: Final = 1.03


@dataclass(frozen=True, slots=True)
class Collapse:
    """A fall of the reward below its best by more than noise.

    Attributes:
        points: number of points of the segment before the fall; the last of them was within noise of the best.
        compute: compute of the first evaluation of the fall.
        best: highest mean of three evaluations.
        best_compute: compute of the last of those three.
        newest: mean of the last three evaluations.
        noise: largest fall that noise explains.
        over: number of evaluations since the fall began.
    """

    points: int
    compute: float
    best: float
    best_compute: float
    newest: float
    noise: float
    over: int

    @property
    def depth(self) -> float:
        """How far the newest mean lies below the best."""
        return self.best - self.newest


@dataclass(frozen=True, slots=True)
class CollapseCheck:
    """Whether the run is broken, and why.

    Attributes:
        broken: an alarm is active; no forecast should be made or acted on.
        reasons: a sentence for each cause.
        checked: whether there were enough evaluations to compare (if not, only truncation was checked).
        latest: the last three evaluations, oldest first.
        floor: the mean of three evaluations that ends the alarm.
        collapse: None if the reward has not fallen.
    """

    broken: bool
    reasons: tuple[str, ...]
    checked: bool
    latest: tuple[float, ...]
    floor: float | None = None
    collapse: Collapse | None = None


def detect_collapse(
    curve: Curve,
    truncation: Sequence[float] | float | None = None,
    *,
    least: float = LEAST,
    after: float = 0.0,
    start: float = 0.0,
) -> CollapseCheck:
    """Raise an alarm if the reward fell below its best by more than noise, or 10 % or more of the rollouts are truncated.

    Args:
        truncation: share of rollouts cut off at the length limit, for each point or for the latest only.
        least: smallest fall that matters.
        after: evaluations up to this compute are acknowledged: they do not count for the best and raise no alarm.
        start: compute of earlier recipes, for the message only.

    Checks the last segment only, and is stateless: an alarm that an earlier evaluation raised stays active until a mean
    of three is within noise of the best, or an evaluation is the best so far. `Curve` refuses rewards that are not finite
    (NonFiniteError); callers treat that as broken too.
    """
    last = curve.segments()[-1].curve
    reasons = []
    latest_truncation = _latest_truncation(truncation)
    if latest_truncation is not None and latest_truncation >= MAX_TRUNCATION:
        reasons.append(f"{latest_truncation:.1%} of rollouts are truncated, {MAX_TRUNCATION:.0%} or more")
    latest = tuple(float(r) for r in last.reward[-CONSECUTIVE:])
    first = int(np.searchsorted(last.compute, after, side="right"))
    checked = len(last) - first >= MIN_HISTORY
    collapse = _current_collapse(last, first, least) if checked else None
    if collapse is None:
        return CollapseCheck(bool(reasons), tuple(reasons), checked, latest)
    reasons.insert(
        0,
        f"the mean of the last {CONSECUTIVE} evaluations, {_format_reward(collapse.newest)}, is {_format_reward(collapse.depth)} below the best "
        f"of {CONSECUTIVE} in a row, {_format_reward(collapse.best)} at compute {collapse.best_compute + start:.4g}; noise explains "
        f"{_format_reward(collapse.noise)}",
    )
    return CollapseCheck(True, tuple(reasons), True, latest, collapse.best - collapse.noise, collapse)


def _current_collapse(last: Curve, first: int, least: float) -> Collapse | None:
    """The fall that is active after the last evaluation, from the evaluations from index `first` on; None without one."""
    reward = last.reward[first:]
    count = np.arange(MIN_HISTORY, reward.size + 1)
    means = np.convolve(reward, np.full(CONSECUTIVE, 1.0 / CONSECUTIVE), "valid")
    newest = means[count - CONSECUTIVE]
    best = np.maximum.accumulate(means)[count - 2 * CONSECUTIVE]
    deep = np.flatnonzero(best - newest >= least)
    if not deep.size:
        return None
    latest, highest = reward[count - 1], np.maximum.accumulate(reward)[count - 1]
    last_three = np.sort([reward[count - 1 - i] for i in range(CONSECUTIVE)], axis=0)
    sd = _noise(last, first, count, best)
    noise = WITHIN_NOISE * sd
    stands = (best - newest > noise) & (latest < highest)
    pairs = count[deep] ** 2 / 9.0
    strict = stdtrit(count[deep] / 3.0, 1.0 - ERROR_RATE / pairs) * sd[deep]
    raised = np.zeros_like(stands)
    raised[deep] = (best - newest)[deep] >= strict
    # Two of the last three, the newest among them, are below noise: one bad evaluation is no fall.
    raised &= stands & (last_three[-1] < best) & (np.maximum(latest, last_three[1]) < best - noise)
    quiet = np.flatnonzero(~stands)
    begin = int(quiet[-1]) + 1 if quiet.size else 0
    if not raised[begin:].any():
        return None
    at = int(np.argmax(means[: count[-1] - 2 * CONSECUTIVE + 1]))
    alarm = begin + int(np.argmax(raised[begin:]))
    before = reward[: count[alarm]]
    points = first + int(np.flatnonzero(before >= best[alarm] - noise[alarm])[-1]) + 1
    return Collapse(
        points=points,
        compute=float(last.compute[points]),
        best=float(best[-1]),
        best_compute=float(last.compute[first + at + CONSECUTIVE - 1]),
        newest=float(newest[-1]),
        noise=float(noise[-1]),
        over=len(last) - points,
    )


def _noise(last: Curve, first: int, count: NDArray[np.intp], best: FloatArray) -> FloatArray:
    """s after each number `count` of evaluations from index `first` on; at least `PAIRED` of the binomial sd at `best`."""
    reward = last.reward[first:]
    known = np.maximum(count - CONSECUTIVE, MIN_HISTORY)
    steps = np.unique(
        (MIN_HISTORY * GROWTH ** np.arange(np.log(reward.size) / np.log(GROWTH))).astype(np.intp)
    )
    estimates = np.array([difference_sd(reward[max(n - WINDOW, 0) : n]) for n in steps if n <= reward.size])
    sd = estimates[np.searchsorted(steps[: estimates.size], known, side="right") - 1]
    if last.samples is None:
        return np.asarray(sd)
    rate = np.clip(best, 0.02, 0.98)
    binomial = np.sqrt(rate * (1.0 - rate) / last.samples[first:][count - 1] * 2.0 / CONSECUTIVE)
    return np.asarray(np.maximum(sd, PAIRED * binomial))


def difference_sd(reward: FloatArray, order: int = 3) -> float:
    """s: sd of the difference of two means of three evaluations, from evaluations (n,) that may follow a trend.

    Args:
        order: order of the differences for slow noise; with 2, the curvature of a trend counts as noise too.
    """
    steps = np.diff(reward)
    # Equal for independent noise; second differences contain less of a curved trend.
    fast = min(
        robust_sd(steps - median(steps)) / math.sqrt(CONSECUTIVE),
        robust_sd(np.diff(steps)) / CONSECUTIVE,
    )
    means = np.convolve(reward, np.full(CONSECUTIVE, 1.0 / CONSECUTIVE), "valid")
    # Third differences: in second differences a fast rise at the start looks like noise ten times as large.
    between = means[CONSECUTIVE:] - means[:-CONSECUTIVE]
    for _ in range(order - 1):
        between = between[CONSECUTIVE:] - between[:-CONSECUTIVE]
    if between.size < CONSECUTIVE + 1:
        return fast
    return max(fast, robust_sd(between) / math.sqrt(math.comb(2 * order, order) / 2.0))


def robust_sd(deviations: FloatArray) -> float:
    """sd of normal deviations (n,) around 0, with those beyond `CUT` sds clipped."""
    clipped = np.minimum(size := np.abs(deviations), CUT * MAD_TO_SD * median(size))
    return CUT_TO_SD * math.sqrt(float(clipped @ clipped) / size.size)


def median(values: FloatArray) -> float:
    """Median of finite values (n,): `numpy.median` takes ten times as long for a few."""
    ordered, half = np.sort(values), values.size // 2
    return float(ordered[half] if values.size % 2 else 0.5 * (ordered[half - 1] + ordered[half]))


def _format_reward(value: float) -> str:
    """``.412``."""
    text = f"{abs(value):.3f}"
    return ("−" if value < 0 else "") + (text.removeprefix("0") if value < 1 else text)


def _latest_truncation(truncation: Sequence[float] | float | None) -> float | None:
    if truncation is None:
        return None
    rates = np.atleast_1d(np.asarray(truncation, dtype=np.float64))
    if rates.size == 0 or not np.all((rates >= 0) & (rates <= 1)):
        raise RequestError("truncation must be rates between 0 and 1, one a point or the latest")
    return float(rates[-1])
