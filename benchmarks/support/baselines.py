"""Simple forecasters of a curve, each with a scale that is fitted to its own errors on other curves.

A forecaster estimates the curve's present level and its future gain. The forecast is Student's t with four degrees of
freedom, location ``level + share · gain`` and scale² = floor² + (part · gain)². `floor`, `part` and, for a damped trend,
`share` minimise the mean CRPS on the curves given to `learn`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.stats import t as student

import scalerl_curvefit as cf

from .llm_curves import LLMCurve
from .scoring import Forecaster, Row, crps, leave_one_out, row_of, targets

LevelAndGain = Callable[[cf.Curve, float], tuple[float, float]]

DRAWS = 1000
STANDARD = student.ppf((np.arange(DRAWS) + 0.5) / DRAWS, 4)
"""Quantiles of Student's t with four degrees of freedom at evenly spaced levels."""
_Z = np.concatenate([-np.geomspace(400, 0.01, 300), [0.0], np.geomspace(0.01, 400, 300)])
_CRPS_OF_Z = crps(np.broadcast_to(STANDARD, (_Z.size, DRAWS)), _Z)
MIN_LOSS = 1e-3
"""Lower limit of the loss 1 − R, whose logarithm must be finite."""


def persistence(head: cf.Curve, at: float) -> tuple[float, float]:
    """The last reward, without a gain."""
    return float(head.reward[-1]), 0.0


def drift(head: cf.Curve, at: float) -> tuple[float, float]:
    """A line in ln C through the last doubling; the level is halfway between the line's end and the last reward."""
    recent = (head.compute > 0) & (head.compute >= head.now / 2)
    if recent.sum() < 3:
        recent = np.arange(len(head)) >= len(head) - 3
    slope, end = _line(np.log(head.compute[recent] / head.now), head.reward[recent])
    return (end + float(head.reward[-1])) / 2, slope * np.log(at / head.now)


def log_linear(head: cf.Curve, at: float) -> tuple[float, float]:
    """R = a + b·ln C through all points."""
    trained = head.compute > 0
    slope, level = _line(np.log(head.compute[trained] / head.now), head.reward[trained])
    return level, slope * np.log(at / head.now)


def loss_power_law(head: cf.Curve, at: float) -> tuple[float, float]:
    """ln(1 − R) = E − k·ln C through all points: the power law in test loss of arXiv 2509.25300 [S]."""
    trained = head.compute > 0
    loss = np.maximum(1 - head.reward[trained], MIN_LOSS)
    slope, level = _line(np.log(head.compute[trained] / head.now), np.log(loss))
    now = 1 - np.exp(level)
    return float(now), float(1 - np.exp(level + slope * np.log(at / head.now)) - now)


def asymptotic_power_law(head: cf.Curve, at: float) -> tuple[float, float]:
    """R = A − D/C^B by least squares."""
    now, then = cf.power_law(head).reward(np.array([head.now, at]))
    return float(now), float(then - now)


@dataclass(frozen=True)
class GridSearch:
    """The paper's grid search over A and Cmid, with B by `curve_fit`; each head of a curve is searched once.

    steps: number of values of A from .05 to 1, and of Cmid between the first compute and the last.
    found: results by head.
    """

    steps: int
    found: dict[bytes, cf.GridSearch] = field(default_factory=dict)

    def __call__(self, head: cf.Curve, at: float) -> tuple[float, float]:
        key = _key(head)
        if key not in self.found:
            self.found[key] = self.search(head)
        now, then = self.found[key].reward(np.array([head.now, at]))
        return float(now), float(then - now)

    def search(self, head: cf.Curve) -> cf.GridSearch:
        first = head.compute[head.first_trained]
        return cf.paper_grid_search(
            head, np.linspace(0.05, 1, self.steps), np.linspace(first, head.now, self.steps)
        )

    def search_all(self, heads: Sequence[cf.Curve], pool: Executor) -> None:
        """Search these heads in the processes of ``pool``."""
        # Updated after all searches, because `found` is pickled with each of them.
        searched = list(pool.map(self.search, heads, chunksize=4))
        self.found.update(zip(map(_key, heads), searched, strict=True))


def _key(head: cf.Curve) -> bytes:
    return head.compute.tobytes() + head.reward.tobytes()


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope of the least-squares line, and its value at x = 0."""
    slope, level = np.polyfit(x, y, 1)
    return float(slope), float(level)


def learn(baseline: LevelAndGain, damped: bool, curves: Sequence[LLMCurve], factor: float) -> Forecaster:
    """The forecaster with the floor, part and share of least mean CRPS on these curves, which have equal weights."""
    made = targets(curves, factor)
    level, gain = np.array([baseline(t.head, t.at) for t in made]).T
    actual = np.array([t.actual for t in made])
    names = [t.origin.name for t in made]
    weight = np.array([1 / names.count(name) for name in names])

    def settings(values: np.ndarray) -> tuple[float, float, float]:
        ln_floor, ln_part, *share = values
        return np.exp(ln_floor), np.exp(ln_part), share[0] if share else 1.0

    def loss(values: np.ndarray) -> float:
        floor, part, share = settings(values)
        sd = np.hypot(floor, part * gain)
        z = np.clip((actual - level - share * gain) / sd, _Z[0], _Z[-1])
        return float(np.average(sd * np.interp(z, _Z, _CRPS_OF_Z), weights=weight))

    start = [np.log(0.02), np.log(0.3), *([0.5] if damped else [])]
    found = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 600})
    floor, part, share = settings(found.x)

    def forecaster(head: cf.Curve, at: float) -> np.ndarray:
        level, gain = baseline(head, at)
        return np.clip(level + share * gain + np.hypot(floor, part * gain) * STANDARD, 0.0, 1.0)

    return forecaster


def rows_of(
    baseline: LevelAndGain,
    curves: Sequence[LLMCurve],
    factor: float,
    damped: bool,
    group: Callable[[LLMCurve], str],
) -> list[Row]:
    """Scored forecasts of every curve, with a scale fitted to the curves of other groups."""
    return leave_one_out(lambda others: learn(baseline, damped, others, factor), curves, factor, group)


def lcpfn_rows(python: str, network: str, curves: Sequence[LLMCurve], factor: float) -> list[Row]:
    """Scored forecasts of LC-PFN's distribution (`lcpfn_worker.py`), with one evaluation as one epoch.

    python: an interpreter that has `lcpfn`.

    Raises RuntimeError with the end of the worker's standard error if it fails.
    """
    made = targets(curves, factor)
    jobs = []
    for t in made:
        head = t.head
        trained = head.compute > 0
        epoch = float(np.median(np.diff(head.compute)))
        jobs.append(((head.compute[trained] / epoch).tolist(), head.reward[trained].tolist(), [t.at / epoch]))
    worker = Path(__file__).with_name("lcpfn_worker.py")
    done = subprocess.run(
        [python, str(worker), network], input=json.dumps(jobs), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"LC-PFN's worker failed under {python}: {done.stderr.strip()[-500:]}")
    quantiles = json.loads(done.stdout.splitlines()[-1])
    return [row_of(t, np.clip(q, 0.0, 1.0)) for t, q in zip(made, quantiles, strict=True)]
