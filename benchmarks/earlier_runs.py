"""What a prior of one's own earlier runs is worth: forecasts at twice the compute, without and with it.

- populations: 48 simulated tasks of six runs each, 40 evaluations a run, with noise of sd .0075 and autocorrelation .3.
  A task is one of four shapes (sigmoid, stretched exponential, power law, two rises in a row); its runs differ in A by an
  sd of .01, .03 or .05, in ln Cmid and ln B by five and 2.5 times that. Each run is forecast with the five others.
- games: the Procgen curves of `curvefit/data`, six of an environment: two more seeds of the same algorithm and three of
  the other one serve as earlier runs.
- language models: the curves of `curvefit/data` that have others of their task beside them, each with all of those:
  GSM8K (five sets of training prompts), Countdown on Llama (six pretrained variants) and on Qwen (five).
- another task: populations and games, each with the runs of the next task in order.

Printed are coverage of the 90 and 50 % interval, median width, median |error|, CRPS and RMSE against persistence;
ratio: median of each forecast's width with the prior, by that without; at 90 %: the same with either's widths scaled so that
they hold 90 % of what came. Speed: one fit with 50 earlier runs that are known.

    OMP_NUM_THREADS=1 python benchmarks/earlier_runs.py [--quick] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from support.llm_curves import LLMCurve, llm_curves
from support.scoring import Row, Target, row_of, scores, targets

import scalerl_curvefit as cf
from scalerl_curvefit.simulate import ar1_noise

PROCGEN = Path(__file__).parents[1] / "curvefit" / "data" / "procgen_curves.json"
SHAPES = ("sigmoid", "stretched", "power law", "two rises")
BETWEEN = (0.01, 0.03, 0.05)
RUNS, EVALUATIONS = 6, 40
SIGMA, RHO = 0.0075, 0.3
EVERY = 4
"""Each so many cuts of a long record one forecast."""
LLM_TASKS = {
    "GSM8K": "cfw_gsm8k",
    "Countdown, Llama": "kanishk_llama",
    "Countdown, Qwen": "kanishk_qwen",
}


@dataclass(frozen=True, eq=False)
class Case:
    """One forecast to make. earlier: the runs beside it, those most like it first."""

    group: str
    target: Target
    earlier: tuple[cf.SummarizedRun, ...]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the simulated tasks, one shape each"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes for the fits")
    arguments = parser.parse_args()
    cases = list(all_cases(arguments.quick))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(both, cases, chunksize=16))
    figures: dict[str, float] = {}
    print(
        f"{'':<34}{'n':>5}{'in 90 %':>9}{'in 50 %':>9}{'width':>8}{'|error|':>9}{'CRPS':>8}{'RMSE':>7}{'ratio':>7}{'at 90 %':>9}"
    )
    for group in dict.fromkeys(case.group for case in cases):
        of = [row for case, row in zip(cases, rows, strict=True) if case.group == group]
        ratio = float(np.median([informed.width / alone.width for alone, informed in of]))
        alone, informed = ([row[i] for row in of] for i in (0, 1))
        scaled = ratio * stretch(informed) / stretch(alone)
        for label, column in (("without", alone), ("with", informed)):
            s = scores(column)
            tail = f"{ratio:>7.2f}{scaled:>9.2f}" if label == "with" else ""
            print(
                f"{group + ', ' + label:<34}{s.n:>5}{s.coverage_90:>9.2f}{s.coverage_50:>9.2f}{s.width:>8.3f}"
                f"{s.median_error:>9.4f}{s.crps:>8.4f}{-s.rmse_gain:>+7.2f}{tail}"
            )
            figures[f"{group}, {label}: coverage"] = round(s.coverage_90, 3)
            figures[f"{group}, {label}: crps"] = round(s.crps, 4)
        figures[f"{group}: width ratio"] = round(ratio, 2)
        figures[f"{group}: width ratio at 90 %"] = round(scaled, 2)
    figures |= speed()
    print(json.dumps({"benchmark": "earlier_runs", "figures": figures}))


def all_cases(quick: bool) -> list[Case]:
    tasks = {between: simulated_tasks(between, 1 if quick else 4) for between in BETWEEN}
    games = game_tasks()
    cases = [
        case
        for between, runs in tasks.items()
        for task in runs
        for case in cases_of(f"simulated, sd of A {between:g}", task, task)
    ]
    cases += [case for task in games for case in cases_of("games", task, task)]
    curves = llm_curves()
    for name, start in LLM_TASKS.items():
        task = [c for c in curves if c.name.startswith(start)]
        cases += cases_of(name, task, task)
    strangers = tasks[BETWEEN[0]]
    for label, several in (("simulated, another task", strangers), ("games, another task", games)):
        for i, task in enumerate(several):
            cases += cases_of(label, task, several[(i + 1) % len(several)])
    return cases


def cases_of(group: str, task: Sequence[LLMCurve], others: Sequence[LLMCurve]) -> list[Case]:
    """All targets of a task's runs, each with the other task's runs but itself, those of the same recipe first."""
    cases = []
    for run in task:
        recipe = run.name.split("-run")[0]
        beside = sorted((o for o in others if o is not run), key=lambda o: o.name.split("-run")[0] != recipe)
        every = EVERY if len(run.curve) > 30 else 1
        cases += [Case(group, target, tuple(map(summary_of, beside))) for target in targets([run])[::every]]
    return cases


@cache
def summary_of(run: LLMCurve) -> cf.SummarizedRun:
    return cf.summarize_run(cf.EarlierRun(run.name, run.curve), settings_of(run))


def settings_of(run: LLMCurve) -> cf.FitSettings:
    return cf.BY_RISES[cf.LateRises.GAMES if run.source == "procgen" else cf.LateRises.LANGUAGE_MODELS]


def both(case: Case) -> tuple[Row, Row]:
    """Scores without and with the earlier runs."""
    at = np.array([case.target.at])
    settings = settings_of(case.target.origin)
    alone, informed = (cf.fit(case.target.head, settings, runs) for runs in ([], case.earlier))
    return (
        row_of(case.target, cf.forecast_pool(alone).evaluation(at)[:, 0]),
        row_of(case.target, cf.forecast_pool(informed).evaluation(at)[:, 0]),
    )


def stretch(rows: Sequence[Row]) -> float:
    """What widths are to be multiplied by, for 90 % of what came to lie within half of one from the median."""
    return float(np.quantile([abs(row.error) / (row.width / 2) for row in rows], 0.9))


def simulated_tasks(between: float, each: int) -> list[list[LLMCurve]]:
    """Tasks of every shape, `each` of them."""
    tasks = []
    for i, shape in enumerate(shape for shape in SHAPES for _ in range(each)):
        random = np.random.default_rng([i, round(1000 * between)])
        start, middle, exponent = (
            random.uniform(0.05, 0.4),
            random.uniform(0.06, 0.4),
            random.uniform(1.2, 2.4),
        )
        asymptote = start + random.uniform(0.15, 0.5)
        runs = []
        for number in range(RUNS):
            a, r0, m, b = random.standard_normal(4) * between
            u = np.arange(1, EVALUATIONS + 1) / EVALUATIONS
            share = share_of(shape, u, middle * np.exp(5 * m), exponent * np.exp(2.5 * b))
            low = start + r0 / 2
            clean = low + (np.clip(asymptote + a, 0, 1) - low) * share
            noisy = np.clip(clean + ar1_noise(EVALUATIONS, SIGMA, RHO, random), 0, 1)
            name = f"{shape} {i} {number}"
            runs.append(LLMCurve(name, shape, "", "", cf.Curve(100 * u, noisy)))
        tasks.append(runs)
    return tasks


def share_of(shape: str, u: np.ndarray, middle: float, exponent: float) -> np.ndarray:
    """Of the gain, over the share u of the plan."""
    if shape == "sigmoid":
        return 1 / (1 + (middle / u) ** exponent)
    if shape == "stretched":
        return 1 - np.exp(-((u / middle) ** (0.35 * exponent)))
    if shape == "power law":
        return 1 - (1 + u / (0.3 * middle)) ** (-0.4 * exponent)
    late = 0.25 + middle
    return 0.6 / (1 + (0.4 * middle / u) ** exponent) + 0.4 / (1 + (late / u) ** 5)


def game_tasks() -> list[list[LLMCurve]]:
    tasks: dict[str, list[LLMCurve]] = {}
    for name, entry in json.loads(PROCGEN.read_text())["curves"].items():
        run = LLMCurve(name, "procgen", "MIT", "", cf.Curve(entry["compute"], entry["reward"]))
        tasks.setdefault(name.split("_")[1], []).append(run)
    return list(tasks.values())


def speed() -> dict[str, float]:
    """Milliseconds of CPU of a fit at 40 points, with 50 earlier runs that were given before."""
    tasks = simulated_tasks(0.01, 4)
    earlier = [summary_of(run) for task in tasks for run in task][:50]
    heads = [run.curve.head(20 + i % 20) for i, run in enumerate(run for task in tasks for run in task)]
    cf.fit(heads[0], earlier=earlier)
    took = {}
    for label, runs in (("without", []), ("with 50 earlier runs", earlier)):
        begun = time.process_time()
        for head in heads:
            cf.fit(head, earlier=runs)
        took[f"ms a fit, {label}"] = round(1000 * (time.process_time() - begun) / len(heads), 2)
        print(f"{label}: {took[f'ms a fit, {label}']} ms of CPU a fit")
    return took


if __name__ == "__main__":
    main()
