"""A prior from one's own earlier runs of the same task and model, on the same axis of compute.

They say what no fit of the new run can: what came next from the same compute on. Four things follow:

- *Gains* (`Gains`): what they gained over the next doublings, a fourth forecast of the pool. Mean and spread between
  runs, as Student's t: with n runs of total weight w, s² = (ν0·s0²·d² + Σ wᵢ(gᵢ − ḡ)²)/(ν0 + w − 1)·(1 + 1/w) over d
  doublings, ν0 and s0 standing for what is known of runs in general. Beyond the end of a record its own forecast
  counts, with its departure.
- *Shape* (`Shape`): where their fitted A, ln B and ln Cmid lie, with a spread between runs of no less than a floor.
  It weighs the nodes of the new run's posterior; a share of the broad prior stays, for a run that is like none.
- *Noise* of an evaluation, as pseudo-points.
- *Late rises*: how many of their doublings rose after a flat one.

A run counts the more, the more alike it is to the new one so far: by the level at the same compute, and what the last
doubling gained, each in units of the spread between the earlier runs. Another task's run mostly stands elsewhere and
counts for little; one whose curve passes the same points counts, and harms (docs/forecast.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .curve import Curve, FloatArray
from .plateau import late_rises
from .pooling import ForecastPool, GainPrior, departure_sd
from .posterior import Nodes
from .settings import FitSettings
from .trend import Trend, smoothed

KNOTS_PER_DOUBLING: Final = 6
"""A doubling, at which the level of an earlier run is kept."""
MAX_KNOTS: Final = 120
WINDOW: Final = 0.1
"""Doublings over which the weight of a point for the level of an earlier run falls by e, to either side: narrower than
the trend's, for a rise to come must not raise the level of now."""
AHEAD: Final = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Doublings beyond now at which gains are taken, and beyond the end of a record at which its forecast is taken."""
MIN_LEVEL_SPREAD: Final = 0.05
MIN_GAIN_SPREAD: Final = 0.03
"""Smallest spread between runs of one task, of the level and of a doubling's gain, that likeness is measured in."""
GAIN_WEIGHT: Final = 0.25
"""Weight of the last doubling's gain in the likeness, beside the level's 1."""
REPORTED_BELOW: Final = 0.9
"""A run that counts for less is reported with the reason."""
MIN_TOTAL_WEIGHT: Final = 0.1
"""Total weight of earlier runs below which they say nothing."""
SHAPE_FLOOR: Final = np.array([0.03, 0.25, 0.3])
"""Smallest spread between runs of A, ln B and ln Cmid."""
BROAD_SHARE: Final = 0.02
"""Of the shape's peak, everywhere."""
PRIOR_DOF: Final = 2.0
PRIOR_SPREAD: Final = 0.01
"""ν0, for gains and shapes, and s0: spread between runs of what a doubling gains."""
NOISE_DOF: Final = 2.0
MAX_NOISE_DOF: Final = 8.0
"""Pseudo-points for the noise that each earlier run brings, and all together."""
PUBLIC_DOUBLINGS: Final = 12.0
"""Doublings that the rate of public curves weighs, beside those of earlier runs."""
NOISE_SDS: Final = 2.0
"""Sds of an evaluation that a rise of an earlier run has to exceed what matters by."""
PUBLIC_FLAT_RUNS: Final = 2.0
"""Runs that the public probability of a first rise weighs."""


@dataclass(frozen=True, eq=False)
class EarlierRun:
    """A finished run. curve: of one segment, in the unit, reward scale and evaluation set of the new run's."""

    name: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class EarlierUse:
    """What an earlier run counted for. weight: from 0 to 1. reason: why less than nearly all, else empty."""

    name: str
    weight: float
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RunSummary:
    """An earlier run as the prior takes it.

    doubling_k, level_k: log2 compute and smoothed reward, to its end, and by its own forecast beyond it. end: log2 compute
    of its last point. departure: sd a doubling beyond that. shape, shape_sd: (3,) A, ln B, ln Cmid. sigma: noise of an
    evaluation. late: doublings that could show a late rise, and how many did. fell: compute at which it fell; only the
    points before count.
    """

    doubling_k: FloatArray
    level_k: FloatArray
    end: float
    departure: float
    shape: FloatArray
    shape_sd: FloatArray
    sigma: float
    late: tuple[int, int]
    fell: float | None = None

    def level(self, doubling: Sequence[float]) -> FloatArray:
        """At log2 compute."""
        return np.asarray(np.interp(doubling, self.doubling_k, self.level_k))


@dataclass(frozen=True, slots=True, eq=False)
class SummarizedRun:
    """An earlier run without its points, as `fit` uses it.

    seed: hash of its points. eval_version: of its last point. summary: or the reason why there is none.
    """

    name: str
    seed: int
    eval_version: str | None
    summary: RunSummary | str


@dataclass(frozen=True, slots=True, eq=False)
class ShapePrior:
    """A, ln B, ln Cmid of the next run: Student's t with a centre and a spread each, (3,). trust: from 0 to 1."""

    centre: FloatArray
    spread: FloatArray
    dof: float
    strength: float = 1.0

    def weigh(self, nodes: Nodes) -> Nodes:
        """The nodes of a sigmoid, weighted by this prior too, as far as it is trusted."""
        a, ln_b, ln_cmid = (
            self._density(i, x) for i, x in enumerate((nodes.a_js, nodes.ln_b_s, nodes.ln_cmid_s))
        )
        weight_js = nodes.weight_js * (
            1.0 - self.strength + self.strength * (BROAD_SHARE + a * (ln_b * ln_cmid))
        )
        return replace(nodes, weight_js=weight_js / weight_js.sum())

    def _density(self, i: int, x: FloatArray) -> FloatArray:
        z = (x - self.centre[i]) / self.spread[i]
        return np.asarray((1.0 + z * z / self.dof) ** (-0.5 * (self.dof + 1.0)))


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRunsPrior:
    """What the earlier runs say of one run now. None where they say nothing.

    noise: sd of an evaluation, and its weight in pseudo-points. late_rise: probability in a doubling. now: log2 compute.
    summaries, weight: of the runs that can count.
    """

    uses: tuple[EarlierUse, ...]
    gains: GainPrior | None = None
    shape: ShapePrior | None = None
    noise: tuple[float, float] | None = None
    late_rise: float | None = None
    now: float = 0.0
    summaries: tuple[RunSummary, ...] = ()
    weight: FloatArray = field(default_factory=lambda: np.zeros(0))

    def p_first_rise(self, public: float, least: float) -> float:
        """Probability that a run which has gained less than `least` still rises by it; public: of other people's runs."""
        flat = rose = 0.0
        for weight, summary in zip(self.weight, self.summaries, strict=True):
            until = summary.doubling_k <= self.now
            # Of many levels the highest is high by chance.
            rise = least + NOISE_SDS * summary.sigma
            if summary.level_k[until].max(initial=summary.level_k[0]) - summary.level_k[0] >= rise:
                continue
            after = summary.level_k[~until & (summary.doubling_k <= summary.end)]
            flat += weight
            rose += weight * (after.max(initial=0.0) - summary.level([self.now])[0] >= rise)
        return float((PUBLIC_FLAT_RUNS * public + rose) / (PUBLIC_FLAT_RUNS + flat))


def summarize(
    curve: Curve, pool: ForecastPool, settings: FitSettings, fell: float | None = None
) -> RunSummary:
    """Of a finished run, by its points and its own forecast."""
    at = curve.first_trained
    doubling, reward = np.log2(curve.compute[at:]), curve.reward[at:]
    end = float(doubling[-1])
    count = int(np.clip(np.ceil((end - doubling[0]) * KNOTS_PER_DOUBLING), 2, MAX_KNOTS))
    knots = np.linspace(doubling[0], end, count)
    level_k = smoothed(doubling, reward, knots, WINDOW)
    ahead = pool.expected(pool.now * 2.0 ** np.concatenate([[0.0], AHEAD])).mean(axis=0)
    doublings, rises = late_rises(curve)
    drawn = pool.curves
    first = drawn.family == 0
    parameters = np.stack([drawn.A[first], np.log(drawn.B[first]), np.log(drawn.Cmid[first])])
    return RunSummary(
        doubling_k=np.concatenate([knots, end + AHEAD]),
        level_k=np.clip(np.concatenate([level_k, level_k[-1] + ahead[1:] - ahead[0]]), 0.0, 1.0),
        end=end,
        departure=departure_sd(pool.trend, settings),
        shape=np.median(parameters, axis=1),
        shape_sd=parameters.std(axis=1),
        sigma=float(np.median(drawn.sigma)),
        late=(doublings, len(rises)),
        fell=fell,
    )


def earlier_runs_prior(
    runs: Sequence[tuple[str, RunSummary | str]], curve: Curve, local: Trend, settings: FitSettings
) -> EarlierRunsPrior:
    """The prior for a run of which `curve` and its trend are known.

    runs: name and summary, or why there is none. Raises nothing: a run that cannot count is left out with a reason.
    """
    summaries = [summary for _, summary in runs if isinstance(summary, RunSummary)]
    if not summaries:
        return EarlierRunsPrior(tuple(EarlierUse(name, 0.0, str(why)) for name, why in runs))
    now = float(np.log2(curve.now))
    at = curve.first_trained
    back = max(now - 1.0, float(np.log2(curve.compute[at])))
    own_back = smoothed(np.log2(curve.compute[at:]), curve.reward[at:], np.array([back]), WINDOW)
    back_i, level_i, *ahead_i = np.array([c.level([back, now, *(now + AHEAD)]) for c in summaries]).T
    covered = np.array([np.clip(c.end - now, 0.0, 1.0) * (now >= c.doubling_k[0]) for c in summaries])
    own_gain = local.level - float(own_back[0])
    similarity, reasons = _similarity(level_i, level_i - back_i, local.level, own_gain, covered > 0)
    weight = similarity * covered
    used = iter([_use(w, c, r, k) for w, c, r, k in zip(weight, covered, reasons, summaries, strict=True)])
    uses = tuple(
        EarlierUse(name, 0.0, found) if isinstance(found, str) else EarlierUse(name, *next(used))
        for name, found in runs
    )
    total = float(weight.sum())
    if total < MIN_TOTAL_WEIGHT:
        return EarlierRunsPrior(uses)
    share = weight / total
    doublings, rises = (float(weight @ np.array([c.late[i] for c in summaries])) for i in (0, 1))
    public, watched = PUBLIC_DOUBLINGS * settings.late_rise, PUBLIC_DOUBLINGS + doublings
    return EarlierRunsPrior(
        uses,
        # What rose late in an earlier run is among its gains.
        gains=_gains(summaries, np.array(ahead_i).T - level_i[:, None], weight, now, public / watched),
        shape=_shape(summaries, weight),
        noise=(
            float(np.exp(share @ np.log([max(c.sigma, settings.noise_floor) for c in summaries]))),
            min(NOISE_DOF * total, MAX_NOISE_DOF),
        ),
        late_rise=(public + rises) / watched,
        now=now,
        summaries=tuple(summaries),
        weight=weight,
    )


def _similarity(
    level: FloatArray, gain: FloatArray, own_level: float, own: float, counts: NDArray[np.bool_]
) -> tuple[FloatArray, list[str]]:
    """How alike the earlier runs are to the run so far, from 0 to 1, and in words what differs most.

    level: of each at the compute of now. gain: over the last doubling. counts: those whose spread is that between runs.
    """
    between_level, between_gain = (x[counts].std() if counts.any() else 0.0 for x in (level, gain))
    z_level = (level - own_level) / np.hypot(MIN_LEVEL_SPREAD, between_level)
    z_gain = (gain - own) / np.hypot(MIN_GAIN_SPREAD, between_gain) * np.sqrt(GAIN_WEIGHT)
    reasons = [
        f"it had {at_level:.2f} at this compute, this run has {own_level:.2f}"
        if abs(by_level) >= abs(by_gain)
        else f"it gained {at_gain:.2f} over the last doubling, this run {own:.2f}"
        for at_level, at_gain, by_level, by_gain in zip(level, gain, z_level, z_gain, strict=True)
    ]
    return np.exp(-0.5 * (z_level**2 + z_gain**2)), reasons


def _use(weight: float, covered: float, differs: str, summary: RunSummary) -> tuple[float, str]:
    """Weight and reason of one run's `EarlierUse`."""
    why = [] if weight >= REPORTED_BELOW * covered else [differs]
    if covered < REPORTED_BELOW:
        why.append(
            f"its points cover {covered:.2f} of the next doubling"
            if covered > 0
            else "its points go no further than this run's, or begin after it: check that compute is in one unit"
        )
    if summary.fell is not None:
        why.append(f"it fell at compute {summary.fell:g}, and counts up to there")
    return float(weight), "; ".join(why)


def _gains(
    summaries: Sequence[RunSummary], gain_ik: FloatArray, weight: FloatArray, now: float, late_rise: float
) -> GainPrior:
    total = float(weight.sum())
    mean_k = weight @ gain_ik / total
    dof = PRIOR_DOF + max(total - 1.0, 0.0)
    spread_k = PRIOR_DOF * (PRIOR_SPREAD * AHEAD) ** 2 + weight @ (gain_ik - mean_k) ** 2
    beyond_ik = np.maximum(now + AHEAD - np.array([[c.end] for c in summaries]), 0.0)
    departs_k = weight @ (np.array([[c.departure] for c in summaries]) * beyond_ik) ** 2 / total
    sd_k = np.sqrt(spread_k / dof * (1.0 + 1.0 / total) + departs_k)
    start = np.zeros(1)
    return GainPrior(
        np.concatenate([start, AHEAD]),
        np.concatenate([start, mean_k]),
        np.concatenate([start, sd_k]),
        dof,
        late_rise,
        _strength(total),
    )


def _shape(summaries: Sequence[RunSummary], weight: FloatArray) -> ShapePrior:
    """Random effects: the spread between runs is what their own uncertainty leaves of their scatter."""
    shape_i3, sd_i3 = np.array([c.shape for c in summaries]), np.array([c.shape_sd for c in summaries])
    total = float(weight.sum())
    middle = weight @ shape_i3 / total
    scatter = weight @ (shape_i3 - middle) ** 2 / total - weight @ sd_i3**2 / total
    between = np.maximum(scatter, 0.0) + SHAPE_FLOOR**2
    precision_i3 = weight[:, None] / (between + sd_i3**2)
    centre = (precision_i3 * shape_i3).sum(axis=0) / precision_i3.sum(axis=0)
    spread = np.sqrt(between + 1.0 / precision_i3.sum(axis=0))
    return ShapePrior(centre, spread, PRIOR_DOF + total, _strength(total))


def _strength(total: float) -> float:
    """0 at the least total weight that says something, 1 from one whole run on: no forecast jumps where a run is just unlike."""
    return float(np.clip((total - MIN_TOTAL_WEIGHT) / (1.0 - MIN_TOTAL_WEIGHT), 0.0, 1.0))
