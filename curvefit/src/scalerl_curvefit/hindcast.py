"""How well this run's own past forecasts came true, and what that says of the next one.

No run follows the equation exactly. The forecast therefore departs from it by f·τ·log2(C/C_now)·N(0, 1)
beyond now, where f is 2.5 while the asymptote is not identifiable, at most 1 once it is, and smaller for a
curve that has become flat (`flatness`), and τ is learned from the run. The points up to C_now/2 (and
C_now/4) are fitted as they stood then; over the doubling that followed, the rewards departed from that fit
by d for each doubling of compute, d = Σ h·(seen − predicted)/Σ h² with h = log2(C/C_then). Each d weighs a
grid of τ,

    p(τ | d) ∝ p(τ) Π N(d; 0, sd² + (fτ)²),

sd being what the fit's own uncertainty and the evaluation noise explain. A run that keeps to its curve
earns narrow forecasts; one that broke them gets wide ones. While the asymptote is not identifiable half of
the prior of τ stays: on real curves two past doublings that went well said too much of the one to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import FloatArray
from .families import gain_share
from .posterior import Nodes
from .settings import FitSettings

MOST_P_BEFORE_CMID: Final = 0.2
"""With more probability than this that half of the gain lies ahead, nothing is known of the asymptote."""
MIN_POINTS: Final = 8
"""Points that a past moment needs to be worth a forecast."""
BINS: Final = 24
"""The doubling after it is looked at through at most so many means of neighbouring points."""


@dataclass(frozen=True, slots=True)
class Hindcast:
    """A forecast made with the points up to compute `made_at`, checked on the points up to `until`.

    departure: by how much, for each doubling of compute, the rewards ran above (or below) it.
    sd: how much of that the fit's uncertainty and the noise explain. scale: f at that moment.
    """

    made_at: float
    until: float
    departure: float
    sd: float
    scale: float = 1.0


def hindcasts(
    compute: FloatArray, reward: FloatArray, settings: FitSettings, fit_head: Callable[[int], Nodes]
) -> tuple[Hindcast, ...]:
    """Check the forecasts of past moments that have enough points.

    fit_head: gives the posterior of the first so many points.
    """
    made = []
    for back in settings.look_back:
        count = int(np.searchsorted(compute, compute[-1] / back, side="right"))
        if count < MIN_POINTS or np.ptp(reward[:count]) == 0.0:
            continue
        then = float(compute[count - 1])
        after = slice(count, int(np.searchsorted(compute, 2.0 * then, side="right")))
        if after.start >= after.stop:
            continue
        nodes = fit_head(count)
        mixture = _Mixture(nodes)
        departure, sd = _departure(mixture, then, compute[after], reward[after])
        ahead = float(nodes.weight_sj[nodes.ln_cmid_s > np.log(then)].sum())
        doubtful = ahead > MOST_P_BEFORE_CMID
        scale = settings.doubtful_factor if doubtful else _flatness(mixture, then, settings)
        made.append(Hindcast(then, float(compute[after][-1]), departure, sd, scale))
    return tuple(made)


def discrepancy_weights(made: Sequence[Hindcast], settings: FitSettings, doubtful: bool) -> FloatArray:
    """(t,) weights of τ over `settings.discrepancy`: its posterior, and the prior's share if doubtful."""
    tau = np.array(settings.discrepancy)
    prior = np.array(settings.discrepancy_weights) / sum(settings.discrepancy_weights)
    ln_weight = np.log(prior)
    for past in made:
        variance = past.sd**2 + (past.scale * tau) ** 2
        ln_weight = ln_weight - 0.5 * np.log(variance) - 0.5 * past.departure**2 / variance
    weight = np.exp(ln_weight - ln_weight.max())
    trust = settings.doubtful_trust if doubtful else 1.0
    return np.asarray(trust * weight / weight.sum() + (1.0 - trust) * prior)


def flatness(nodes: Nodes, now: float, settings: FitSettings) -> float:
    """f: the curve's gain over the last doubling up to `now`, as a share of `flat_gain`, within bounds."""
    return _flatness(_Mixture(nodes), now, settings)


def predict(nodes: Nodes, compute: FloatArray) -> list[tuple[float, float]]:
    """Mean and sd of an evaluation at each compute (c,), straight from the nodes."""
    mixture = _Mixture(nodes)
    noise = mixture.noise_variance()
    pairs = [mixture.reward(mixture.share(c)) for c in compute]
    return [(mean, float(np.sqrt(variance + noise))) for mean, variance in pairs]


class _Mixture:
    """R as the nodes have it. A counts from the middle of each node's cells, in steps, so that all sums over it
    are products with fixed vectors, taken once.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        cells = nodes.a_sj.shape[1]
        steps_j = np.arange(cells) - 0.5 * (cells - 1)
        powers_j3 = np.stack([np.ones(cells), steps_j, steps_j * steps_j], axis=1)
        self._middle_s = 0.5 * (nodes.a_sj[:, 0] + nodes.a_sj[:, -1])
        weight_s, first_s, second_s = (nodes.weight_sj @ powers_j3).T
        self._weight_s = weight_s
        self._first_s, self._second_s = first_s * nodes.a_step_s, second_s * nodes.a_step_s**2
        spread_s = np.einsum("sj,sj->s", nodes.weight_sj, nodes.spread_sj)
        self._innovation_s = spread_s / max(nodes.dof - 2.0, 1.0)

    def share(self, compute: float) -> FloatArray:
        """(s,) of the gain reached at one compute."""
        return gain_share(
            self.nodes.family, np.log(np.float64(compute)), self.nodes.ln_cmid_s, self.nodes.ln_b_s
        )

    def reward(self, share_s: FloatArray) -> tuple[float, float]:
        """Mean and variance of R where each node has reached `share_s` of its gain."""
        nodes, rest_s = self.nodes, 1.0 - share_s
        slope_s = share_s - nodes.r0_slope_s * rest_s
        level_s = nodes.r0_at_zero_s * rest_s + slope_s * self._middle_s
        mean = float(level_s @ self._weight_s + slope_s @ self._first_s)
        off_s = level_s - mean
        between = (off_s * off_s) @ self._weight_s + (2.0 * off_s * slope_s) @ self._first_s
        between += (slope_s * slope_s) @ self._second_s
        within = float((self._innovation_s * rest_s * rest_s / nodes.precision_s).sum())
        return mean, max(float(between), 0.0) + within

    def noise_variance(self) -> float:
        """Of one evaluation."""
        return float((self._innovation_s / (1.0 - self.nodes.rho_s**2)).sum())

    def long_run_variance(self) -> float:
        """n times the variance of the mean of n → ∞ neighbouring evaluations: (1 + ρ)/(1 − ρ) of one's own."""
        return float((self._innovation_s / (1.0 - self.nodes.rho_s) ** 2).sum())


def _flatness(mixture: _Mixture, now: float, settings: FitSettings) -> float:
    before, after = (mixture.reward(mixture.share(compute))[0] for compute in (now / 2.0, now))
    if after - before >= settings.flat_gain:
        return 1.0
    return max((after - before) / settings.flat_gain, settings.flat_share)


def _departure(
    mixture: _Mixture, then: float, compute: FloatArray, reward: FloatArray
) -> tuple[float, float]:
    """d and the sd of it that is explained."""
    nodes = mixture.nodes
    ln_compute_b, reward_b, count_b = _binned(np.log(compute), reward)
    h_b = (ln_compute_b - np.log(then)) / np.log(2.0)
    pull_b = count_b * h_b / (count_b * h_b * h_b).sum()
    share_bs = gain_share(nodes.family, ln_compute_b[:, None], nodes.ln_cmid_s, nodes.ln_b_s)
    total = float(pull_b.sum())
    # R is linear in s, so that the pulled mean of R is R at the pulled mean of s, times the total pull.
    mean, variance = mixture.reward((pull_b @ share_bs) / total)
    noise = float((pull_b * pull_b / count_b).sum()) * mixture.long_run_variance()
    return float(pull_b @ reward_b) - total * mean, float(np.sqrt(total * total * variance + noise))


def _binned(ln_compute: FloatArray, reward: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Means of ln C and reward over at most BINS runs of neighbouring points, and their counts."""
    n = ln_compute.size
    starts = np.unique(np.linspace(0, n, min(n, BINS), endpoint=False).astype(np.intp))
    count = np.diff(np.append(starts, n)).astype(np.float64)
    return np.add.reduceat(ln_compute, starts) / count, np.add.reduceat(reward, starts) / count, count
