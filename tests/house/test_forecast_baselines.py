"""The simple forecasters that benchmarks score ours against."""

from __future__ import annotations

import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from scalerl_curvefit import Curve, paper_grid_search

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from support.baselines import (
    STANDARD,
    GridSearch,
    LevelAndGain,
    asymptotic_power_law,
    drift,
    lcpfn_rows,
    learn,
    log_linear,
    loss_power_law,
    persistence,
)
from support.llm_curves import LLMCurve
from support.scoring import targets

STEPS = np.arange(0.0, 41.0)
LATER = STEPS[1:]


def of(reward: np.ndarray, name: str = "made", source: str = "here") -> LLMCurve:
    return LLMCurve(name, source, "MIT", "accuracy", Curve(LATER, reward))


@pytest.mark.parametrize(
    ("baseline", "reward"),
    [
        (persistence, np.full(40, 0.3)),
        (drift, 0.2 + 0.1 * np.log(LATER)),
        (log_linear, 0.2 + 0.1 * np.log(LATER)),
        (loss_power_law, 1 - 0.8 * LATER**-0.3),
        (asymptotic_power_law, 0.7 - 0.5 * LATER**-0.5),
    ],
)
def test_baseline_is_exact_on_its_own_form(baseline: LevelAndGain, reward: np.ndarray) -> None:
    level, gain = baseline(Curve(LATER[:10], reward[:10]), 20.0)
    assert level == pytest.approx(reward[9], abs=1e-3)
    assert level + gain == pytest.approx(reward[19], abs=1e-3)


def test_drift_sees_only_the_last_doubling() -> None:
    reward = np.where(LATER < 20, 0.05 * np.minimum(LATER, 10), 0.5)
    assert drift(Curve(LATER, reward), 80.0) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-9))


def test_grid_search_is_the_papers_and_made_once() -> None:
    reward = 0.1 + 0.5 / (1 + (8 / LATER) ** 2)
    head = Curve(LATER[:20], reward[:20])
    searched = GridSearch(6)
    level, gain = searched(head, 40.0)
    theirs = paper_grid_search(head, np.linspace(0.05, 1, 6), np.linspace(1, 20, 6))
    assert level + gain == pytest.approx(float(theirs.reward(40.0)))
    (found,) = searched.found.values()
    searched(head, 30.0)
    assert list(searched.found.values()) == [found]
    with ThreadPoolExecutor(1) as pool:
        searched.search_all([head, Curve(LATER[:10], reward[:10])], pool)
    assert len(searched.found) == 2


def test_learn_finds_the_spread_and_the_share() -> None:
    """Rewards gain 60 % of .1 per doubling, ± .01 of noise in each evaluation."""
    random = np.random.default_rng(0)

    def level_and_gain(head: Curve, at: float) -> tuple[float, float]:
        return float(head.reward[-1]), 0.1

    curves = [
        of(0.2 + 0.06 * np.log2(LATER) + 0.01 * random.standard_normal(40), name=f"{i}") for i in range(20)
    ]
    forecaster = learn(level_and_gain, damped=True, curves=curves, factor=2.0)
    head = curves[0].curve.head(10)
    draws = forecaster(head, 20.0)
    assert np.median(draws) - head.reward[-1] == pytest.approx(0.06, abs=0.004)
    # Two evaluations' noise; the spread of Student's t is its interquartile range over STANDARD's.
    low, high = np.quantile(draws, [0.25, 0.75])
    assert (high - low) / (2 * 0.6745) == pytest.approx(0.01 * np.sqrt(2), rel=0.2)
    assert STANDARD.size == draws.size


def test_learn_without_a_trend_keeps_the_last_reward() -> None:
    curves = [of(0.2 + 0.001 * LATER)]
    draws = learn(persistence, damped=False, curves=curves, factor=2.0)(curves[0].curve.head(10), 20.0)
    assert np.median(draws) == pytest.approx(0.21)


def worker(tmp_path: Path, script: str) -> str:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport json, sys\njobs = json.load(sys.stdin)\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


def test_lcpfn_rows_counts_evaluations_as_epochs(tmp_path: Path) -> None:
    curve = of(0.2 + 0.001 * LATER)
    python = worker(
        tmp_path,
        "print('noise')\n"
        "assert sys.argv[2] == 'net', sys.argv\n"
        "assert all(x == [float(i + 1) for i in range(len(x))] and ahead == [2 * x[-1]] for x, y, ahead in jobs)\n"
        "print(json.dumps([[y[-1] - 2, y[-1], y[-1] + 2] for x, y, ahead in jobs]))",
    )
    rows = lcpfn_rows(python, "net", [curve], 2.0)
    assert [r.target for r in rows] == targets([curve], 2.0)
    assert [r.median for r in rows] == pytest.approx([t.last for t in targets([curve], 2.0)])
    assert rows[0].width == pytest.approx(0.9)


def test_lcpfn_rows_names_what_failed(tmp_path: Path) -> None:
    python = worker(tmp_path, "sys.exit('no module named lcpfn')")
    with pytest.raises(RuntimeError, match=f"worker failed under {python}: no module named lcpfn"):
        lcpfn_rows(python, "net", [of(0.2 + 0.001 * LATER)], 2.0)
