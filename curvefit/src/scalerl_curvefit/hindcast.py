"""How well this run's own past forecasts came true, and what that says of the next one.

No run follows the equation exactly. The forecast therefore departs from it by τ·log2(C/C_now)·N(0, 1)
beyond now, and τ is learned from the run: the points up to C_now/2 and C_now/4 are fitted as they stood
then, each fit forecasts twice its compute, and what was seen there weighs a grid of τ,

    p(τ | seen) ∝ p(τ) Π_h N(seen_h − predicted_h; 0, sd_h² + σ_h² + τ² log2(C_h'/C_h)²).

A run that keeps to its curve earns narrow forecasts; one that broke them gets wide ones.
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

MIN_POINTS: Final = 8
"""Points that a past moment needs to be worth a forecast."""
NEIGHBOURS: Final = 3
"""Points nearest to the forecast compute whose mean counts as what was seen there."""


@dataclass(frozen=True, slots=True)
class Hindcast:
    """A forecast made with the points up to compute `made_at` for compute `at`, and what was seen there.

    predicted, sd: the curve's reward, mean and sd, without discrepancy. noise: sd of one evaluation.
    """

    made_at: float
    at: float
    predicted: float
    sd: float
    noise: float
    seen: float

    @property
    def error(self) -> float:
        """seen − predicted."""
        return self.seen - self.predicted


def hindcasts(
    compute: FloatArray, reward: FloatArray, look_back: Sequence[float], fit_head: Callable[[int], Nodes]
) -> tuple[Hindcast, ...]:
    """Forecasts to twice the compute from the past moments that have enough points.

    look_back: the moments, as C_now divided by these. fit_head: gives the posterior of the first so many points.
    """
    made = []
    for back in look_back:
        count = int(np.searchsorted(compute, compute[-1] / back, side="right"))
        if count < MIN_POINTS or np.ptp(reward[:count]) == 0.0:
            continue
        target = 2.0 * compute[count - 1]
        nearest = np.argsort(np.abs(np.log(compute / target)), kind="stable")[:NEIGHBOURS]
        nearest = nearest[nearest >= count]
        if nearest.size == 0:
            continue
        at = float(np.exp(np.log(compute[nearest]).mean()))
        predicted, sd, noise = predict(fit_head(count), float(np.log(at)))
        made.append(
            Hindcast(float(compute[count - 1]), at, predicted, sd, noise, float(reward[nearest].mean()))
        )
    return tuple(made)


def discrepancy_weights(made: Sequence[Hindcast], settings: FitSettings) -> FloatArray:
    """(t,) posterior of τ over `settings.discrepancy`."""
    tau = np.array(settings.discrepancy)
    ln_weight = np.log(np.array(settings.discrepancy_weights))
    for past in made:
        variance = past.sd**2 + past.noise**2 + (tau * np.log2(past.at / past.made_at)) ** 2
        ln_weight = ln_weight - 0.5 * np.log(variance) - 0.5 * past.error**2 / variance
    weight = np.exp(ln_weight - ln_weight.max())
    return np.asarray(weight / weight.sum())


def predict(nodes: Nodes, ln_compute: float) -> tuple[float, float, float]:
    """Mean and sd of R at one compute, and the sd of an evaluation, straight from the nodes."""
    share = gain_share(nodes.family, np.array(ln_compute), nodes.ln_cmid_s, nodes.ln_b_s)
    rest = 1.0 - share
    at_zero, slope = nodes.r0_at_zero_s * rest, share - nodes.r0_slope_s * rest
    reward_sj = at_zero[:, None] + slope[:, None] * nodes.a_sj
    variance_sj = nodes.spread_sj / max(nodes.dof - 2.0, 1.0)
    within_sj = variance_sj * (rest * rest / nodes.precision_s)[:, None]
    weight = nodes.weight_sj
    mean = float((weight * reward_sj).sum())
    spread = float((weight * ((reward_sj - mean) ** 2 + within_sj)).sum())
    noise = float((weight * variance_sj / (1.0 - nodes.rho_s**2)[:, None]).sum())
    return mean, float(np.sqrt(spread)), float(np.sqrt(noise))
