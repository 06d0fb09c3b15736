"""``curve.png``: the measured points, and the curve through them where it can be told."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_MATPLOTLIB = "pictures need matplotlib, which is not installed here: pip install 'matplotlib>=3.10'"
"""Only the operator's image is without it, where the commands that print work all the same."""
_Z95 = 1.96
_GRID = 200


class PictureProblem(Exception):
    """There is nothing to draw, or it cannot be read or written."""


@dataclass(frozen=True)
class Points:
    """The columns of ``curve.csv`` that the picture needs, all (n,), in order of compute.

    compute: completion tokens of all steps before the point. samples: evaluation completions behind it.
    """

    compute: list[float]
    reward: list[float]
    standard_error: list[float]
    samples: list[float]
    version: list[int]


def read_points(paths: RunPaths) -> Points:
    """Read ``curve.csv``.

    Raises:
        PictureProblem: missing, empty, or a row that cannot be read (its line is named).
    """
    try:
        with paths.curve.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise PictureProblem(
            f"{paths.curve}: {error.strerror}; is {paths.root} a run's directory?"
        ) from error
    if not rows:
        raise PictureProblem(f"{paths.curve}: no evaluation yet")
    parsed = []
    for line, row in enumerate(rows, start=2):
        try:
            parsed.append(
                (
                    float(row["compute"]),
                    float(row["reward"]),
                    float(row["standard_error"]),
                    float(row["samples"]),
                    int(row["version"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PictureProblem(f"{paths.curve}, line {line}: {type(error).__name__}: {error}") from error
    return Points(*(list(column) for column in zip(*sorted(parsed), strict=True)))


def budget_compute(run: ScaleRLRun, points: Points) -> float | None:
    """Compute at the last step the budget allows, if the steps to come are like those so far."""
    most, done = run.spec.budget.max_steps, points.version[-1]
    if most is None or done == 0:
        return None
    return points.compute[-1] * max(most, done) / done


def draw(paths: RunPaths, run: ScaleRLRun) -> None:
    """Draw ``curve.png``.

    Raises:
        PictureProblem: no points, or the picture cannot be written.
    """
    points = read_points(paths)
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise PictureProblem(f"{paths.curve_picture}: {NO_MATPLOTLIB}") from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    try:
        end = budget_compute(run, points)
        _draw_fit(axes, points, max(points.compute[-1], end or 0.0))
        axes.errorbar(
            points.compute,
            points.reward,
            yerr=[_Z95 * error for error in points.standard_error],
            fmt="o",
            color="black",
            capsize=3,
            markersize=4,
            label="held-out reward, ±1.96 standard errors over prompts",
        )
        if end is not None:
            axes.axvline(
                end, color="tab:red", linestyle=":", label=f"budget: {run.spec.budget.max_steps} steps"
            )
        axes.set_title(run.metadata.name)
        axes.set_xlabel("compute: completion tokens of all steps so far")
        axes.set_ylabel("mean reward on held-out prompts (0 to 1)")
        axes.set_ylim(bottom=0.0, top=min(1.0, 1.25 * max(points.reward) + 0.05))
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        aside = paths.curve_picture.with_name("curve.new.png")
        figure.savefig(aside, dpi=130)
        os.replace(aside, paths.curve_picture)
    except OSError as error:
        raise PictureProblem(f"{paths.curve_picture}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _draw_fit(axes: Any, points: Points, end: float) -> None:
    """The fitted curve with its 90 % band, or a line that says why there is none."""
    import numpy as np

    from scalerl_curvefit import Curve, CurveError, fit, forecast

    grid: NDArray[np.float64] = np.linspace(
        max(points.compute[-1], end) / _GRID, max(points.compute[-1], end), _GRID
    )
    try:
        fitted = fit(Curve(points.compute, points.reward, samples=points.samples))
        ahead = forecast(fitted, at=[float(c) for c in grid])
    except CurveError as error:
        axes.plot([], [], " ", label=f"no fit: {error}")
        return
    label = f"fit: asymptote {fitted.A.median:.2f} ({fitted.A.low:.2f}–{fitted.A.high:.2f})"
    if not fitted.identifiable:
        label = "fit; its asymptote cannot be told yet"
    axes.plot(grid, [f.median for f in ahead], color="tab:blue", label=label)
    axes.fill_between(
        grid,
        [f.curve_low for f in ahead],
        [f.curve_high for f in ahead],
        color="tab:blue",
        alpha=0.2,
        label="90 % interval of the curve",
    )
