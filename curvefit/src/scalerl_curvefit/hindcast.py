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

from collections.abc import Mapping, Sequence
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


def look_backs(compute: FloatArray, reward: FloatArray, settings: FitSettings) -> list[int]:
    """How many points, at compute > 0, had been measured at the past moments worth a forecast."""
    counts = [int(np.searchsorted(compute, compute[-1] / back, side="right")) for back in settings.look_back]
    return [n for n in counts if n >= MIN_POINTS and n < compute.size and np.ptp(reward[:n]) > 0.0]


def hindcasts(
    compute: FloatArray, reward: FloatArray, settings: FitSettings, pasts: Mapping[int, Nodes]
) -> tuple[Hindcast, ...]:
    """Check the forecasts of past moments. pasts: the posterior of the first n points, for all `look_backs`."""
    made = []
    for count in look_backs(compute, reward, settings):
        then = float(compute[count - 1])
        after = slice(count, int(np.searchsorted(compute, 2.0 * then, side="right")))
        if after.start >= after.stop:
            continue
        nodes = pasts[count]
        mixture = _Mixture(nodes)
        departure, sd = _departure(mixture, then, compute[after], reward[after])
        ahead = float(nodes.weight_js[:, nodes.ln_cmid_s > np.log(then)].sum())
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
    mean_c, variance_c = mixture.reward(mixture.share(compute))
    sd_c = np.sqrt(variance_c + mixture.noise_variance())
    return list(zip(mean_c.tolist(), sd_c.tolist(), strict=True))


class _Mixture:
    """R as the nodes have it. A counts from the middle of each node's cells, in steps, so that all sums over it
    are products with fixed vectors, taken once.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        cells = len(nodes.a_js)
        steps_j = np.arange(cells) - 0.5 * (cells - 1)
        powers_3j = np.stack([np.ones(cells), steps_j, steps_j * steps_j])
        self._middle_s = 0.5 * (nodes.a_js[0] + nodes.a_js[-1])
        weight_s, first_s, second_s = powers_3j @ nodes.weight_js
        self._weight_s = weight_s
        self._first_s, self._second_s = first_s * nodes.a_step_s, second_s * nodes.a_step_s**2
        spread_s = (nodes.weight_js * nodes.spread_js).sum(axis=0)
        self._innovation_s = spread_s / max(nodes.dof - 2.0, 1.0)

    def share(self, compute_c: FloatArray) -> FloatArray:
        """(c, s) of the gain reached at each compute."""
        nodes = self.nodes
        return gain_share(nodes.family, np.log(compute_c)[:, None], nodes.ln_cmid_s, nodes.ln_b_s)

    def reward(self, share_cs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(c,) means and variances of R where each node has reached `share_cs` of its gain."""
        nodes, rest_cs = self.nodes, 1.0 - share_cs
        slope_cs = share_cs - nodes.r0_slope_s * rest_cs
        level_cs = nodes.r0_at_zero_s * rest_cs + slope_cs * self._middle_s
        mean_c = level_cs @ self._weight_s + slope_cs @ self._first_s
        off_cs = level_cs - mean_c[:, None]
        between_c = (off_cs * off_cs) @ self._weight_s + (2.0 * off_cs * slope_cs) @ self._first_s
        between_c += (slope_cs * slope_cs) @ self._second_s
        within_c = (rest_cs * rest_cs) @ (self._innovation_s / nodes.precision_s)
        return mean_c, np.maximum(between_c, 0.0) + within_c

    def noise_variance(self) -> float:
        """Of one evaluation."""
        return float((self._innovation_s / (1.0 - self.nodes.rho_s**2)).sum())

    def long_run_variance(self) -> float:
        """n times the variance of the mean of n → ∞ neighbouring evaluations: (1 + ρ)/(1 − ρ) of one's own."""
        return float((self._innovation_s / (1.0 - self.nodes.rho_s) ** 2).sum())


def _flatness(mixture: _Mixture, now: float, settings: FitSettings) -> float:
    (before, after), _ = mixture.reward(mixture.share(np.array([now / 2.0, now])))
    if after - before >= settings.flat_gain:
        return 1.0
    return max(float(after - before) / settings.flat_gain, settings.flat_share)


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
    (mean,), (variance,) = mixture.reward((pull_b @ share_bs)[None] / total)
    noise = float((pull_b * pull_b / count_b).sum()) * mixture.long_run_variance()
    departure = float(pull_b @ reward_b) - total * float(mean)
    return departure, float(np.sqrt(total * total * variance + noise))


def _binned(ln_compute: FloatArray, reward: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Means of ln C and reward over at most BINS runs of neighbouring points, and their counts."""
    n = ln_compute.size
    if n <= BINS:
        return ln_compute, reward, np.ones(n)
    starts = np.linspace(0, n, BINS, endpoint=False).astype(np.intp)
    count = np.diff(np.append(starts, n)).astype(np.float64)
    return np.add.reduceat(ln_compute, starts) / count, np.add.reduceat(reward, starts) / count, count
