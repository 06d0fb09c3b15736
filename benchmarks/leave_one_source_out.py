"""Forecasts at 2× of the language models' curves, with the settings that the other sources choose. Half a minute.

The settings in use were chosen on these curves and, for late rises and departures, on others too, so their scores here are
not those of unseen runs. The headline leaves one source out in turn. How far runs depart differs by source, and that of the
source left out is not known: its forecast is the mixture over every setting of a grid, each weighted by its likelihood on the
other sources (the log density of what came, the mean over a curve's forecasts, summed over curves). The grid has the weights,
the trend's share and the spread of the pool, late rises, and the scale and the tails of departures. What a fit
needs before (noise, burn-in, priors of the curve) is the same for all, and was chosen on all 23.

Beside it: the same without heavy tails; and the mean of the settings within 2 % of the best mean CRPS, which a miss hardly moves.
Printed for all, for the settings in use, and for the reference method (the sigmoid's grid posterior with a departure of .02 a
doubling): coverage and width by the number of points known, CRPS, and the Brier score of P(gain > minGain) against two base
rates: that of these forecasts, which no forecaster knows before, and that of the other sources. A forecast
after which the guard alarms counts too, though the autoscaler makes none. The bound of that Brier score is what the level at 2×
would give, the mean of up to four evaluations around the one that is forecast, without it.

One bad evaluation: each of 15 evaluations of 12 simulated sigmoids set to 0 in turn; how far the median at 2× moves.

    OMP_NUM_THREADS=1 python benchmarks/leave_one_source_out.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from scipy.special import logsumexp, ndtr, stdtrit
from support.llm_curves import llm_curves
from support.scoring import Target, crps, targets

import scalerl_curvefit as cf
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_curvefit.pooling import ForecastPool, p_departure_below, sample_forecast_pool
from scalerl_curvefit.simulate import ar1_noise

DRAWS = 500
NEAR_BEST = 1.02
MIN_GAIN = float(AutoscalingSpec().min_gain)
MIN_SD = 0.006
BINS = ((6, 7), (8, 11), (12, 99))
POOLS = ((0.45, 0.25, 0.3), (0.15, 0.1, 0.75), (0.3, 0.2, 0.5), (0.6, 0.25, 0.15))
REFERENCE = cf.FitSettings(
    families=(cf.Family.SIGMOID,),
    pool=(1.0, 0.0),
    late_rise=0.0,
    departure=0.02,
    departure_headroom=0.0,
    departure_dof=np.inf,
    misfit=0.0,
    noise_share=1.0,
    rho_weights=(1.0, 1.0, 1.0, 1.0),
    burn_in_sd_factor=1000.0,
)
GRID: list[dict[str, Any]] = [
    {
        "pool": pool,
        "trend_damping": damping,
        "pool_spread": spread,
        "late_rise": rise,
        "departure": floor,
        "departure_dof": dof,
    }
    for pool, damping, spread, rise, floor, dof in product(
        POOLS,
        (0.25, 0.4),
        (0.25, 0.5),
        (0.0, 0.016, 0.064),
        (0.004, 0.008, 0.016, 0.032),
        (2.5, 4.0, np.inf),
    )
]
NORMAL = np.array([np.isinf(c["departure_dof"]) for c in GRID])


def main() -> None:
    made = targets(llm_curves())
    actual, last = np.array([t.actual for t in made]), np.array([t.last for t in made])
    sources = np.array([t.origin.source for t in made])
    _, curve, count = np.unique([t.origin.name for t in made], return_inverse=True, return_counts=True)
    weight = 1.0 / count[curve]
    fits = [cf.fit(target.head) for target in made]
    drawn: dict[tuple[float, ...], list[ForecastPool]] = {
        pool: [_pool(f, pool, i) for i, f in enumerate(fits)] for pool in POOLS
    }
    seen_gnd, density_gn = _scored_grid(made, drawn)
    crps_gn = np.array([crps(seen_nd, actual) for seen_nd in seen_gnd])
    figures: dict[str, float] = {}
    rules = {
        "left out: mixture weighted by likelihood": np.full(len(GRID), True),
        "left out: the same, normal departures": NORMAL,
        "left out: mean of the best by CRPS, normal": NORMAL,
    }
    others = np.empty(len(made))
    for label, allowed in rules.items():
        draws = np.empty((len(made), DRAWS))
        for source in sorted(set(sources)):
            out = sources == source
            votes = weight[~out]
            others[out] = np.average((actual - last > MIN_GAIN)[~out], weights=votes)
            if "CRPS" in label:
                means = np.where(allowed, crps_gn[:, ~out] @ votes / votes.sum(), np.inf)
                share = (means <= NEAR_BEST * means.min()).astype(float)
            else:
                total = np.where(allowed, density_gn[:, ~out] @ votes, -np.inf)
                share = np.exp(total - total.max())
            share /= share.sum()
            print(f"without {source} (n={out.sum()}): {_means(share)}")
            if "CRPS" in label:
                chosen = {name: share @ np.array([c[name] for c in GRID]) for name in list(GRID[0])[:-1]}
                changes = {**chosen, "pool": tuple(chosen["pool"].tolist()), "departure_dof": np.inf}
                for i in np.flatnonzero(out):
                    draws[i] = _evaluation(_changed(_pool(fits[i], changes["pool"], i), changes), made[i])
            else:
                of = np.searchsorted(np.cumsum(share), (np.arange(DRAWS) + 0.5) / DRAWS)
                of = np.random.default_rng(0).permutation(of)
                draws[out] = seen_gnd[of[None], np.flatnonzero(out)[:, None], np.arange(DRAWS)]
        table(label, made, draws, others, figures)
    in_use = np.array([_evaluation(f.pool, t) for f, t in zip(fits, made, strict=True)])
    table("in use (chosen on these curves)", made, in_use, others, figures)
    reference = [cf.fit(t.head, REFERENCE) for t in made]
    # Its departure is added in full.
    of_reference = [
        _evaluation(replace(f.pool, expert_sd=0.0), t) for f, t in zip(reference, made, strict=True)
    ]
    table("reference: grid posterior, τ .02", made, np.array(of_reference), others, figures)
    level = np.array([_given_level(f, t) for f, t in zip(fits, made, strict=True)])
    gained = actual - last > MIN_GAIN
    bound = np.mean((level - gained) ** 2) / (gained.mean() * (1 - gained.mean()))
    print(f"\nwith the level at 2× known: Brier of P(gain > {MIN_GAIN}) {bound:.2f} of the base rate's")
    one_bad_evaluation(figures)
    print(json.dumps({"benchmark": "leave_one_source_out", "figures": figures}))


def _pool(fitted: cf.Fit, weights: tuple[float, ...], seed: int) -> ForecastPool:
    settings = replace(cf.FitSettings(), pool=weights)
    return sample_forecast_pool(
        fitted.nodes,
        fitted.trend,
        fitted.now,
        settings,
        DRAWS,
        np.random.default_rng(seed),
        misfit=fitted.check.misfit,
    )


def _changed(pool: ForecastPool, changes: dict[str, Any]) -> ForecastPool:
    """The pool with other settings than its weights."""
    settings = replace(pool.settings, **{k: v if k == "pool" else float(v) for k, v in changes.items()})
    rate, below = settings.late_rise, p_departure_below(pool.settings.departure_dof, pool.departure)
    with np.errstate(divide="ignore"):
        after = pool.rise_after * (np.log1p(-pool.late_rise) / np.log1p(-rate))
    departure = stdtrit(settings.departure_dof, below)
    changed = replace(pool, settings=settings, late_rise=rate, rise_after=after, departure=departure)
    return replace(changed, expert_sd=float(np.std(changed.expected(np.array([2.0 * changed.now])))))


def _scored_grid(
    made: Sequence[Target], drawn: dict[tuple[float, ...], list[ForecastPool]]
) -> tuple[np.ndarray, np.ndarray]:
    """Draws (settings, targets, draws) of evaluations, and the log density (settings, targets) of what came."""
    seen = np.empty((len(GRID), len(made), DRAWS), dtype=np.float32)
    density = np.empty((len(GRID), len(made)))
    for g, changes in enumerate(GRID):
        for i, (pool, target) in enumerate(zip(drawn[changes["pool"]], made, strict=True)):
            changed = _changed(pool, changes)
            reward = changed.reward(np.array([target.at]))[:, 0]
            sd = changed.curves.sigma
            seen[g, i] = np.clip(reward + sd * changed.noise, 0.0, 1.0)
            sd = np.maximum(sd, MIN_SD)
            density[g, i] = logsumexp(-0.5 * ((target.actual - reward) / sd) ** 2 - np.log(sd)) - np.log(
                DRAWS
            )
    return seen, density


def _means(share: np.ndarray) -> str:
    """Mean of each setting, and the shares of the degrees of freedom."""
    dof = np.array([c["departure_dof"] for c in GRID])
    means = {name: share @ np.array([c[name] for c in GRID]) for name in list(GRID[0])[:-1]}
    tails = ", ".join(f"{d:g}: {share[dof == d].sum():.2f}" for d in sorted(set(dof)))
    return ", ".join(f"{name} {np.round(value, 3)}" for name, value in means.items()) + f", dof {tails}"


def _evaluation(pool: ForecastPool, target: Target) -> np.ndarray:
    return pool.evaluation(np.array([target.at]))[:, 0]


def _given_level(fitted: cf.Fit, target: Target) -> float:
    """P(gain > minGain) from the evaluations around the target."""
    curve = target.origin.curve
    there = int(np.argmin(np.abs(curve.compute - target.at)))
    near = [i for i in range(there - 2, there + 3) if i != there and target.points <= i < len(curve)]
    level = float(np.mean(curve.reward[near])) if near else target.actual
    sd = max(fitted.sigma.median, MIN_SD) * np.sqrt(1 + 1 / max(len(near), 1))
    return float(ndtr((level - target.last - MIN_GAIN) / sd))


def table(
    label: str, made: Sequence[Target], draws: np.ndarray, others: np.ndarray, figures: dict[str, float]
) -> None:
    """others: share of the other sources' forecasts that gained, each curve counted once.

    What came is the difference of two evaluations, so the probability of a gain is that of an evaluation above the last one.
    """
    actual, last = np.array([t.actual for t in made]), np.array([t.last for t in made])
    points = np.array([t.points - t.origin.curve.first_trained for t in made])
    low, quarter, median, three, high = np.quantile(draws, [0.05, 0.25, 0.5, 0.75, 0.95], axis=1)
    in_90, in_50 = (actual >= low) & (actual <= high), (actual >= quarter) & (actual <= three)
    error = median - actual
    rmse = 1 - np.sqrt(np.mean(error**2) / np.mean((last - actual) ** 2))
    gained = actual - last > MIN_GAIN
    base = gained.mean() * (1 - gained.mean())
    chances = np.mean(draws - last[:, None] > MIN_GAIN, axis=1)
    brier, known = np.mean((chances - gained) ** 2), np.mean((others - gained) ** 2)
    mean = crps(draws, actual).mean()
    print(f"\n{label} (n={len(made)})")
    for first, final in (*BINS, (0, 99)):
        of = (points >= first) & (points <= final)
        name = (
            "all" if not first else f"{first} to {final} points" if final < 99 else f"{first} points or more"
        )
        print(
            f"  {name:<20} n={of.sum():3d}  in 90 % {in_90[of].mean():.2f}  in 50 % {in_50[of].mean():.2f}  "
            f"width {np.median((high - low)[of]):.3f}"
        )
        figures |= {
            f"{label}, {name}: in 90 %": round(float(in_90[of].mean()), 3),
            f"{label}, {name}: in 50 %": round(float(in_50[of].mean()), 3),
        }
    print(
        f"  median error {np.median(np.abs(error)):.4f}  CRPS {mean:.4f}  RMSE {-rmse:+.2f}  "
        f"Brier of P(gain > {MIN_GAIN}) {brier:.3f}, {brier / base:.2f} of the base rate's {base:.3f}, "
        f"{brier / known:.2f} of the other sources' base rate's {known:.3f}"
    )
    for low_p, high_p in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.7), (0.7, 1.001)):
        of = (chances >= low_p) & (chances < high_p)
        print(f"    P {low_p:.1f} to {min(high_p, 1):.1f}: gained in {gained[of].sum()} of {of.sum()}")
    figures |= {
        f"{label}: width": round(float(np.median(high - low)), 4),
        f"{label}: crps": round(float(mean), 4),
        f"{label}: brier of base": round(float(brier / base), 3),
        f"{label}: brier of the others' base": round(float(brier / known), 3),
    }


def one_bad_evaluation(figures: dict[str, float]) -> None:
    random, moved, wider = np.random.default_rng(0), [], []
    compute = np.arange(1.0, 16.0)
    for _ in range(12):
        a, exponent, mid = random.uniform(0.4, 0.85), random.uniform(1.2, 2.4), random.uniform(2, 6)
        clean = 0.1 + (a - 0.1) / (1 + (mid / compute) ** exponent)
        seen = np.clip(clean + ar1_noise(15, 0.008, 0.3, random), 0, 1)
        (before,) = cf.forecast(cf.fit(cf.Curve(compute, seen)), [30.0])
        for i in range(15):
            bad = seen.copy()
            bad[i] = 0.0
            (after,) = cf.forecast(cf.fit(cf.Curve(compute, bad)), [30.0])
            moved.append(abs(after.median - before.median))
            wider.append((after.high - after.low) / (before.high - before.low))
    print(
        f"\none of 15 evaluations set to 0: the median at 2× moves by {max(moved):.3f} at most (≤ .03), "
        f"the width by a factor of {max(wider):.2f} at most ({len(moved)} cases)"
    )
    figures |= {"one bad evaluation: moves": round(max(moved), 4), "wider": round(max(wider), 2)}


if __name__ == "__main__":
    main()
