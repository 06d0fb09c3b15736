"""What the settings of the forecast's pool would be if they were learned, each source of curves left out in turn.

Every setting of a grid forecasts the language models' curves at 2× (`support/scoring.py`); each curve counts once. What
is learned without a source is the mean of all settings whose mean CRPS on the other sources is within 2 % of the best,
and is scored on the source left out. Printed beside it: the settings in use, which stand nearer to equal weights
because four sources are few. Fits are made once, for the pool is drawn from them.

    OMP_NUM_THREADS=1 python benchmarks/pool_settings.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
from support.llm_curves import llm_curves
from support.scoring import crps, targets

import scalerl_curvefit as cf
from scalerl_curvefit.pooling import sample_forecast_pool

DRAWS = 400
NEAR_BEST = 1.02
POOLS = [
    (sigmoid, power_law, round(1.0 - sigmoid - power_law, 2))
    for sigmoid in (0.15, 0.3, 0.45, 0.6, 0.75)
    for power_law in (0.1, 0.25, 0.4)
    if sigmoid + power_law <= 0.9
]
GRID = [
    {"pool": pool, "trend_damping": damping, "departure_headroom": departure, "pool_spread": spread}
    for pool, damping, departure, spread in product(POOLS, (0.1, 0.25, 0.4), (0.015, 0.03), (0.25, 0.5, 1.0))
]


def main() -> None:
    made = targets(llm_curves())
    fits = [cf.fit(target.head) for target in made]
    actual = np.array([target.actual for target in made])
    sources = np.array([target.origin.source for target in made])
    _, curve, count = np.unique(
        [target.origin.name for target in made], return_inverse=True, return_counts=True
    )
    weight = 1.0 / count[curve]

    def scored(changes: dict[str, object]) -> np.ndarray:
        settings = replace(cf.FitSettings(), **changes)
        draws = np.empty((len(made), DRAWS))
        for i, (target, fitted) in enumerate(zip(made, fits, strict=True)):
            random = np.random.default_rng(i)
            drawn = sample_forecast_pool(fitted.nodes, fitted.trend, fitted.now, settings, DRAWS, random)
            draws[i] = drawn.evaluation(np.array([target.at]))[:, 0]
        return crps(draws, actual)

    scores = np.array([scored(changes) for changes in GRID])
    learned = np.empty(len(made))
    for source in sorted(set(sources)):
        out = sources == source
        means = (scores[:, ~out] * weight[~out]).sum(axis=1) / weight[~out].sum()
        near = [c for c, mean in zip(GRID, means, strict=True) if mean <= NEAR_BEST * means.min()]
        chosen = {name: np.mean([np.array(c[name]) for c in near], axis=0) for name in GRID[0]}
        chosen["pool"] = tuple(chosen["pool"].tolist())
        learned[out] = scored(chosen)[out]
        pool = ", ".join(f"{w:.2f}" for w in chosen["pool"])
        rest = ", ".join(f"{name} {chosen[name]:.3f}" for name in list(GRID[0])[1:])
        print(
            f"without {source:<30} n={out.sum():3d}  pool {pool}; {rest}; CRPS on it {learned[out].mean():.4f}"
        )
    in_use = scored({})
    print(f"mean CRPS: learned {learned.mean():.4f}, in use {in_use.mean():.4f}")
    figures = {"learned_crps": float(learned.mean()), "in_use_crps": float(in_use.mean())}
    print(json.dumps({"benchmark": "pool_settings", "figures": figures}))


if __name__ == "__main__":
    main()
