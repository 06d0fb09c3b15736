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
        departure, sd = _departure(nodes, then, compute[after], reward[after])
        ahead = float(nodes.weight_sj[nodes.ln_cmid_s > np.log(then)].sum())
        doubtful = ahead > MOST_P_BEFORE_CMID
        scale = settings.doubtful_factor if doubtful else flatness(nodes, then, settings)
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
    gained = predict(nodes, float(np.log(now)))[0] - predict(nodes, float(np.log(now / 2.0)))[0]
    if gained >= settings.flat_gain:
        return 1.0
    return max(gained / settings.flat_gain, settings.flat_share)


def predict(nodes: Nodes, ln_compute: float) -> tuple[float, float, float]:
    """Mean and sd of R at one compute, and the sd of an evaluation, straight from the nodes."""
    mean, variance = _mixture(
        nodes, gain_share(nodes.family, np.array(ln_compute), nodes.ln_cmid_s, nodes.ln_b_s)
    )
    return mean, float(np.sqrt(variance)), float(np.sqrt(_noise_variance(nodes)))


def _departure(nodes: Nodes, then: float, compute: FloatArray, reward: FloatArray) -> tuple[float, float]:
    """d and the sd of it that is explained."""
    ln_compute_b, reward_b, count_b = _binned(np.log(compute), reward)
    h_b = (ln_compute_b - np.log(then)) / np.log(2.0)
    pull_b = count_b * h_b / (count_b * h_b * h_b).sum()
    share_sb = gain_share(nodes.family, ln_compute_b, nodes.ln_cmid_s[:, None], nodes.ln_b_s[:, None])
    total = float(pull_b.sum())
    # R is linear in s, so that the pulled mean of R is R at the pulled mean of s, times the total pull.
    mean, variance = _mixture(nodes, (share_sb @ pull_b) / total)
    noise = float((pull_b * pull_b / count_b).sum()) * _long_run_variance(nodes)
    return float(pull_b @ reward_b) - total * mean, float(np.sqrt(total * total * variance + noise))


def _binned(ln_compute: FloatArray, reward: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Means of ln C and reward over at most BINS runs of neighbouring points, and their counts."""
    n = ln_compute.size
    starts = np.unique(np.linspace(0, n, min(n, BINS), endpoint=False).astype(np.intp))
    count = np.diff(np.append(starts, n)).astype(np.float64)
    return np.add.reduceat(ln_compute, starts) / count, np.add.reduceat(reward, starts) / count, count


def _mixture(nodes: Nodes, share_s: FloatArray) -> tuple[float, float]:
    """Mean and variance of R where each node has reached `share_s` of its gain."""
    rest_s = 1.0 - share_s
    reward_sj = (nodes.r0_at_zero_s * rest_s)[:, None] + (share_s - nodes.r0_slope_s * rest_s)[
        :, None
    ] * nodes.a_sj
    within_sj = nodes.spread_sj / max(nodes.dof - 2.0, 1.0) * (rest_s * rest_s / nodes.precision_s)[:, None]
    mean = float((nodes.weight_sj * reward_sj).sum())
    return mean, float((nodes.weight_sj * ((reward_sj - mean) ** 2 + within_sj)).sum())


def _noise_variance(nodes: Nodes) -> float:
    """Variance of one evaluation."""
    return float(_noise_s(nodes).sum())


def _long_run_variance(nodes: Nodes) -> float:
    """n times the variance of the mean of n → ∞ neighbouring evaluations: (1 + ρ)/(1 − ρ) of one's own."""
    return float((_noise_s(nodes) * (1.0 + nodes.rho_s) / (1.0 - nodes.rho_s)).sum())


def _noise_s(nodes: Nodes) -> FloatArray:
    variance_s = (nodes.weight_sj * nodes.spread_sj).sum(axis=1) / max(nodes.dof - 2.0, 1.0)
    return np.asarray(variance_s / (1.0 - nodes.rho_s**2))
