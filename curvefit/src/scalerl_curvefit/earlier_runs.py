"""A prior from earlier runs of the same task and model, on the same axis of compute.

- *Gains* (`GainPrior`): their gains over the next doublings, a fourth expert of the forecast pool. Mean and spread
  between runs, as Student's t: with n runs of total weight w, s² = (ν0·s0²·d² + Σ wᵢ(gᵢ − ḡ)²)/(ν0 + w − 1)·(1 + 1/w)
  over d doublings; ν0 and s0 are the prior for runs in general. Beyond the end of a record its own forecast is used,
  with its departure.
- *Shape* (`ShapePrior`): the distribution of their fitted A, ln B and ln Cmid, with a spread between runs of at least
  a floor. It reweights the nodes of the new run's posterior; a share of the broad prior remains for a run that differs.
- *Noise* of an evaluation, as pseudo-points.
- *Late rises*: number of their doublings with a rise after a flat one.

The weight of a run is its similarity to the new one so far: in the level at the same compute, in the path there (the level
at equal compute over the last doublings), in the gain of the last doubling, and in the noise of its evaluations. Runs of
another task have no weight: the new run is further from them than they are from one another (`_foreign`). One run of another
task that passes the same points in the same way cannot be distinguished, and does harm (docs/forecast.md); seeds of one recipe
are what a prior is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .curve import Curve, FloatArray
from .pooling import GainPrior
from .posterior import Nodes
from .run_summary import AHEAD, WINDOW, RunSummary, neighbour_scatter
from .settings import FitSettings
from .trend import Trend, smoothed

MIN_LEVEL_SPREAD: Final = 0.05
MIN_GAIN_SPREAD: Final = 0.03
"""Smallest spread between runs of one task, of the level and of a doubling's gain: the units of similarity."""
MAX_LEVEL_SPREAD: Final = 0.1
"""Largest spread between runs that counts as a unit: runs that differ by more are not of one task and model."""
PATH: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
"""Doublings before now at which paths are compared."""
PATH_WEIGHT: Final = 0.5
"""Weight of the path in the similarity, and of the level now, which is its last point."""
NOISE_FACTOR: Final = 2.0
"""Two runs' noise may differ by this factor, which few points leave open; each further factor of e^(1/3) counts as one
standard deviation."""
FOREIGN: Final = 1.5
"""A run whose mean distance from the earlier runs is this many times the largest of theirs from one another is of another task."""
MIN_FOR_FOREIGN: Final = 3
"""Fewest earlier runs whose distances from one another can be compared."""
GAIN_WEIGHT: Final = 0.25
"""Weight of the last doubling's gain in the similarity."""
REPORTED_BELOW: Final = 0.9
"""A smaller weight is reported with its reason."""
MIN_TOTAL_WEIGHT: Final = 0.1
"""With a smaller total weight there is no prior."""
SHAPE_FLOOR: Final = np.array([0.03, 0.25, 0.3])
"""Smallest spread between runs of A, ln B and ln Cmid."""
BROAD_SHARE: Final = 0.02
"""Share of the shape's peak density that is added everywhere."""
PRIOR_DOF: Final = 2.0
PRIOR_SPREAD: Final = 0.01
"""ν0, for gains and shapes, and s0: spread between runs of what a doubling gains."""
NOISE_DOF: Final = 2.0
MAX_NOISE_DOF: Final = 8.0
"""Pseudo-points for the noise, of each earlier run, and of all together at most."""
PUBLIC_DOUBLINGS: Final = 12.0
"""Weight, in doublings, of the rate of late rises in public curves."""
NOISE_SDS: Final = 2.0
"""A rise of an earlier run exceeds the smallest rise that matters by this many sds of an evaluation."""
PUBLIC_FLAT_RUNS: Final = 2.0
"""Weight, in runs, of the public probability of a first rise."""


@dataclass(frozen=True, slots=True)
class EarlierUse:
    """Weight of an earlier run.

    Attributes:
        weight: from 0 to 1.
        reason: reason for a weight below `REPORTED_BELOW`, else empty.
    """

    name: str
    weight: float
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ShapePrior:
    """Prior of A, ln B and ln Cmid of the new run: independent Student's t.

    Attributes:
        centre, spread: (3,) location and scale.
        dof: degrees of freedom.
        strength: weight of this prior against none, from 0 to 1.
    """

    centre: FloatArray
    spread: FloatArray
    dof: float
    strength: float = 1.0

    def reweight(self, nodes: Nodes) -> Nodes:
        """The nodes of a sigmoid, reweighted by this prior with `strength`."""
        a, ln_b, ln_cmid = (
            self._density(i, x) for i, x in enumerate((nodes.a_js, nodes.ln_b_s, nodes.ln_cmid_s))
        )
        weight_js = nodes.weight_js * (
            1.0 - self.strength + self.strength * (BROAD_SHARE + a * (ln_b * ln_cmid))
        )
        return replace(nodes, weight_js=weight_js / weight_js.sum())

    def _density(self, i: int, x: FloatArray) -> FloatArray:
        # The power by a logarithm takes a third of the time.
        z = (x - self.centre[i]) / self.spread[i]
        return np.asarray(np.exp(-0.5 * (self.dof + 1.0) * np.log(1.0 + z * z / self.dof)))


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRunsPrior:
    """The prior for one run; None where the earlier runs have too little weight.

    Attributes:
        uses: weight of each earlier run.
        gains: prior of the gains over the next doublings.
        shape: prior of the shape of the curve.
        noise: noise sd of an evaluation, and its weight in pseudo-points.
        late_rise: probability of a late rise per doubling.
        now: log2 compute of the new run's last point.
        summaries, weight: summary and weight of each earlier run that could be fitted.
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
        """Probability that a run which has gained less than `least` still rises by `least`.

        Args:
            public: this probability in public curves.
        """
        flat = rose = 0.0
        for weight, summary in zip(self.weight, self.summaries, strict=True):
            until = summary.doubling_k <= self.now
            # The highest of many noisy levels is biased upwards.
            rise = least + NOISE_SDS * summary.sigma
            if summary.level_k[until].max(initial=summary.level_k[0]) - summary.level_k[0] >= rise:
                continue
            after = summary.level_k[~until & (summary.doubling_k <= summary.end)]
            flat += weight
            rose += weight * (after.max(initial=0.0) - float(summary.level(np.array(self.now))) >= rise)
        return float((PUBLIC_FLAT_RUNS * public + rose) / (PUBLIC_FLAT_RUNS + flat))


def earlier_runs_prior(
    runs: Sequence[tuple[str, RunSummary | str]], curve: Curve, local: Trend, settings: FitSettings
) -> EarlierRunsPrior:
    """The prior for a run with the points `curve` and the trend `local`. Raises nothing.

    Args:
        runs: name, and summary or the reason why there is none.
    """
    summaries = [summary for _, summary in runs if isinstance(summary, RunSummary)]
    if not summaries:
        return EarlierRunsPrior(tuple(EarlierUse(name, 0.0, str(why)) for name, why in runs))
    now = float(np.log2(curve.now))
    at = curve.first_trained
    back = max(now - 1.0, float(np.log2(curve.compute[at])))
    own_back = smoothed(np.log2(curve.compute[at:]), curve.reward[at:], np.array([back]), WINDOW)
    path_k = now - PATH[now - PATH >= np.log2(curve.compute[at])]
    at_k = np.concatenate([[back, now], now + AHEAD, path_k])
    levels_ik = np.array([c.level(at_k) for c in summaries])
    back_i, level_i = levels_ik[:, 0], levels_ik[:, 1]
    ahead_ik, path_ik = np.split(levels_ik[:, 2:], [AHEAD.size], axis=1)
    begin, end = np.array([(c.doubling_k[0], c.end) for c in summaries]).T
    covered = np.clip(end - now, 0.0, 1.0) * (now >= begin)
    own_gain = local.level - float(own_back[0])
    own_k = smoothed(np.log2(curve.compute[at:]), curve.reward[at:], path_k, WINDOW)
    apart_i = np.sqrt(np.mean((path_ik - own_k) ** 2, axis=1))
    noise_i = np.log(np.array([c.scatter for c in summaries]) / neighbour_scatter(curve.reward[at:]))
    similarity, differs = _similarity(
        level_i, level_i - back_i, local.level, own_gain, apart_i, noise_i, covered > 0
    )
    foreign = _foreign(apart_i, path_ik)
    weight = np.zeros_like(similarity) if foreign else similarity * covered
    number = iter(range(len(summaries)))
    uses = tuple(
        EarlierUse(name, 0.0, found)
        if isinstance(found, str)
        else _use(name, weight[i := next(number)], covered[i], foreign or partial(differs, i), found)
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
        # The gains of the earlier runs contain their late rises.
        gains=_gains(summaries, ahead_ik - level_i[:, None], weight, now, public / watched),
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
    level: FloatArray,
    gain: FloatArray,
    own_level: float,
    own: float,
    apart: FloatArray,
    noise: FloatArray,
    counts: NDArray[np.bool_],
) -> tuple[FloatArray, Callable[[int], str]]:
    """Similarity of each earlier run to the new run so far, from 0 to 1, and the message of the largest difference of one.

    Args:
        level, gain: level of each earlier run at the new run's compute, and its gain over the last doubling up to there.
        own_level, own: level and gain of the new run.
        apart: distance of each earlier run's path from the new one's. noise: ln of the ratio of their noise.
        counts: mask of the earlier runs that determine the spread between runs.
    """
    between_level, between_gain = (x[counts].std() if counts.any() else 0.0 for x in (level, gain))
    unit = np.hypot(MIN_LEVEL_SPREAD, min(between_level, MAX_LEVEL_SPREAD))
    z_level, z_path = (distance / unit * np.sqrt(PATH_WEIGHT) for distance in (level - own_level, apart))
    z_noise = 3.0 * np.maximum(np.abs(noise) - np.log(NOISE_FACTOR), 0.0)
    z_gain = (gain - own) / np.hypot(MIN_GAIN_SPREAD, between_gain) * np.sqrt(GAIN_WEIGHT)
    z_4i = np.abs([z_level, z_gain, z_path, z_noise])

    def differs(i: int) -> str:
        texts = (
            f"it had {level[i]:.2f} at this compute, this run has {own_level:.2f}",
            f"it gained {gain[i]:.2f} over the last doubling, this run {own:.2f}",
            f"its rewards so far differ from this run's by {apart[i]:.2f} at equal compute",
            f"its evaluations scatter {np.exp(noise[i]):.2g} times as much as this run's",
        )
        return texts[int(z_4i[:, i].argmax())]

    return np.exp(-0.5 * (z_4i**2).sum(axis=0)), differs


def _foreign(apart: FloatArray, path_ik: FloatArray) -> str:
    """Why the earlier runs are of another task than the new one; empty if they may be of the same.

    Of runs of one task, each is as likely as the others to lie furthest from the rest.

    Args:
        apart: distance of each earlier run's path from the new one's. path_ik: their paths.
    """
    count = apart.size
    if count < MIN_FOR_FOREIGN:
        return ""
    path_ki = path_ik.T.copy()
    between_ij = np.sqrt(np.mean((path_ki[:, :, None] - path_ki[:, None]) ** 2, axis=0))
    theirs = float(between_ij.sum(axis=1).max()) / (count - 1)
    if apart.mean() <= FOREIGN * max(theirs, 0.5 * MIN_LEVEL_SPREAD):
        return ""
    return (
        f"this run differs from the earlier ones by {apart.mean():.2f} in the mean, they from one another by {theirs:.2f} at "
        "most: another task or model"
    )


def _use(
    name: str, weight: float, covered: float, differs: str | Callable[[], str], summary: RunSummary
) -> EarlierUse:
    """The use of one run.

    Args:
        differs: its largest difference from the new run, or a function that says it: of fifty runs few need it.
    """
    why = []
    if weight < REPORTED_BELOW * covered:
        why.append(differs if isinstance(differs, str) else differs())
    if covered < REPORTED_BELOW:
        why.append(
            f"its points cover {covered:.2f} of the next doubling"
            if covered > 0
            else "its points go no further than this run's, or begin after it: check that both use the same unit of compute"
        )
    if summary.fell is not None:
        why.append(f"it fell at compute {summary.fell:g}; only the points before are used")
    return EarlierUse(name, float(weight), "; ".join(why))


def _gains(
    summaries: Sequence[RunSummary], gain_ik: FloatArray, weight: FloatArray, now: float, late_rise: float
) -> GainPrior:
    total = float(weight.sum())
    mean_k = weight @ gain_ik / total
    dof = PRIOR_DOF + max(total - 1.0, 0.0)
    spread_k = PRIOR_DOF * (PRIOR_SPREAD * AHEAD) ** 2 + weight @ (gain_ik - mean_k) ** 2
    beyond_ik = np.maximum(now + AHEAD - np.array([[c.end] for c in summaries]), 0.0)
    departs_k = weight @ (np.array([[c.forecast_scale] for c in summaries]) * beyond_ik) ** 2 / total
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
    """Random-effects estimate: the variance between runs is their scatter minus their own uncertainty."""
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
    """Strength of the prior: 0 at `MIN_TOTAL_WEIGHT`, 1 from a total weight of 1 on, so that a forecast does not jump where the
    weight of a run vanishes.
    """
    return float(np.clip((total - MIN_TOTAL_WEIGHT) / (1.0 - MIN_TOTAL_WEIGHT), 0.0, 1.0))
