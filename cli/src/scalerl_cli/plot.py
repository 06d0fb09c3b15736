"""``scalerl plot``: ``curve.png`` of a run, the picture of its fit, or of the points alone while they cannot be fitted."""

from __future__ import annotations

import argparse
import importlib.util

from scalerl_api.load import load_accepted_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo

NO_MATPLOTLIB = "pictures need matplotlib, which is not installed here: pip install 'matplotlib>=3.10'"
"""Only the operator's image lacks matplotlib; commands that print work there."""


def plot(arguments: argparse.Namespace) -> int:
    """Draw ``curve.png`` from ``curve.csv``; works during the run too."""
    paths = RunPaths(arguments.dir)
    draw_run(paths, load_accepted_run(paths.run_file))
    echo(str(paths.curve_picture))
    return DONE


def draw_run(paths: RunPaths, run: ScaleRLRun) -> None:
    """Draw ``curve.png`` from ``curve.csv``.

    Raises:
        CurveProblem: there are no points, or the picture cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CurveProblem(f"{paths.curve_picture}: {NO_MATPLOTLIB}")
    from scalerl_cli.curves.analysis import analyse
    from scalerl_cli.curves.pictures import draw_fit, draw_unfitted
    from scalerl_cli.curves.source import read_curve

    file = read_curve(paths.curve)
    version = file.version
    most, done = run.spec.budget.max_steps, 0 if version is None else int(version[-1])
    budget = budget_compute(float(file.curve.compute[-1]), done, most)
    try:
        made = analyse(file)
    except CurveProblem as problem:
        why = str(problem).removeprefix(f"{file.path}: ")
        draw_unfitted(file, paths.curve_picture, title=run.metadata.name, why=why, budget=budget)
    else:
        draw_fit(made, paths.curve_picture, title=run.metadata.name, budget=budget)


def budget_compute(compute: float, done: int, most: int | None) -> float | None:
    """Compute at step ``most``, the budget's limit, extrapolated from ``compute`` after ``done`` steps; None without either.

    >>> budget_compute(5000.0, 25, 100)
    20000.0
    """
    return None if most is None or done == 0 else compute * max(most, done) / done
