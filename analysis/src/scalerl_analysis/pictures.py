"""The pictures of fits, plans, comparisons, labels and runs."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from scalerl_analysis import formatting, plotting
from scalerl_analysis.curve_file import CurveFile, read_curve
from scalerl_analysis.fitted_curve import FittedCurve, State, fit_curve
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.reward_scale import RewardScale
from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun

if TYPE_CHECKING:
    from scalerl_analysis.comparison import Comparison, Recipe
    from scalerl_analysis.plans import Plan

_DETAILED: Final = 2
"""Limit on the recipes that are drawn with error bars and both bands of their fits; of more, only the 90 % band is drawn, lighter."""
_SHAPES: Final = "Dsv^<>ph"
"""Markers of the options of a plan."""


def draw_fit(
    made: FittedCurve,
    path: str | Path,
    *,
    title: str = "",
    budget: float | None = None,
    target: float | None = None,
    log: bool = False,
) -> None:
    """Draw points, median, bands, asymptote, Cmid, now and budget into ``path``.

    Args:
        title: the file's name if empty.

    Raises:
        AnalysisProblem: the picture cannot be written.
    """
    fitted, scale, broken = made.fitted, made.scale, made.state is State.BROKEN
    beyond = [made.now if broken else made.twice, budget or 0.0, *(point.compute for point in made.forecasts)]
    low, high = (made.first / 1.15 if log else 0.0), max(beyond) * (1.15 if log else 1.04)
    begin, end = max(made.start + (made.first - made.start) / 4.0, low), made.now if broken else high
    grid = (np.geomspace if log else np.linspace)(begin, end, plotting.GRID)
    with plotting.picture(path) as ((axes,),):
        shown = plotting.draw_fitted_curve(axes, made, grid)
        if made.forecasts:
            drawn = [scale.levels(point) for point in made.forecasts]
            label = f"forecast of an evaluation, 90 %; at 2×: {scale.rewards(made.forecasts[0])}"
            shown += plotting.draw_forecasts(axes, [point.compute for point in made.forecasts], drawn, label)
        asymptote = scale.levels(fitted.A)
        if not broken:
            shown += [asymptote.low, asymptote.high]
            plotting.mark_reward(axes, asymptote.median, plotting.BLUE, f"A {scale.rewards(fitted.A)}")
        if target is not None:
            shown.append(target)
            name = f"target {scale.reward(scale.rate(target))}"
            plotting.mark_reward(axes, target, plotting.GREEN, name)
        plotting.compute_axis(axes, made.file.unit, low, high, log=log)
        plotting.reward_axis(axes, shown, scale)
        _mark_computes(axes, made.now, budget)
        cmid = formatting.amounts(fitted.Cmid)
        if fitted.Cmid.median + made.start <= high:
            name = f"Cmid {f'{formatting.amount(made.start)} + ' if made.start else ''}{cmid}"
            plotting.mark_compute(axes, fitted.Cmid.median + made.start, plotting.PURPLE, name)
            plotting.edge_bar(axes, made.on_axis(fitted.Cmid), plotting.PURPLE, upper=True, at=1.0)
        if not broken:
            plotting.edge_bar(axes, asymptote, plotting.BLUE, upper=False)
        second = f"R0 {scale.rewards(fitted.R0)}   B {formatting.amounts(fitted.B)}   Cmid {cmid}"
        state = "" if made.state is State.OK else ": asymptote not identifiable yet"
        if broken:
            state = ": BROKEN, no forecast\n" + textwrap.fill("; ".join(made.collapse_check.reasons), 88)
        axes.set_title(f"{title or made.file.path.stem}{state}\n{second}", loc="left")


def draw_unfitted(
    file: CurveFile, path: str | Path, *, title: str, why: str, budget: float | None = None
) -> None:
    """Draw the points of a curve that cannot be fitted yet, with the reason ``why`` in the title.

    Raises:
        AnalysisProblem: the picture cannot be written.
    """
    curve, scale = file.curve, RewardScale(*file.curve.scale)
    now = float(curve.compute[-1])
    with plotting.picture(path) as ((axes,),):
        label = f"{len(curve):,} evaluations{plotting.samples_text(curve)}"
        plotting.draw_points(axes, curve, scale, 0.0, plotting.INK, label)
        plotting.compute_axis(axes, file.unit, 0.0, max(now, budget or 0.0, 1.0) * 1.04)
        plotting.reward_axis(axes, plotting.extent(curve, scale), scale)
        _mark_computes(axes, now, budget)
        axes.set_title(f"{title}: no fit\n{textwrap.fill(why, 88)}", loc="left")


def draw_run(paths: RunPaths, run: ScaleRLRun) -> None:
    """Draw ``curve.png`` of a run from its ``curve.csv``: its fit, or the points alone while they cannot be fitted.

    Raises:
        AnalysisProblem: there are no points, or the picture cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise AnalysisProblem(f"{paths.curve_picture}: {plotting.NO_MATPLOTLIB}")
    file = read_curve(paths.curve)
    version = file.version
    most, done = run.spec.budget.max_steps, 0 if version is None else int(version[-1])
    budget = budget_compute(float(file.curve.compute[-1]), done, most)
    try:
        made = fit_curve(file)
    except AnalysisProblem as problem:
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


def _mark_computes(axes: Any, now: float, budget: float | None) -> None:
    plotting.mark_compute(axes, now, plotting.INK, f"now, {formatting.amount(now)}")
    if budget is not None:
        plotting.mark_compute(axes, budget, plotting.VERMILLION, f"budget {formatting.amount(budget)}")


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw the options on the curve, with their costs where known; their dates are in the table.

    Raises:
        AnalysisProblem: the picture cannot be written.
    """
    made, scale, broken = plan.made, plan.made.scale, plan.made.state is State.BROKEN
    last = made.now if broken else max(option.compute for option in plan.options)
    begin, end = made.start + (made.first - made.start) / 4.0, last * (1.0 if broken else 1.03)
    with plotting.picture(path) as ((axes,),):
        shown = plotting.draw_fitted_curve(axes, made, np.linspace(begin, end, plotting.GRID))
        going = [option for option in plan.options if option.more > 0]
        for number, option in enumerate(going):
            name = f"{option.name}: {scale.rewards(option.forecast)}"
            name += "" if option.cost is None else f", cost {formatting.amount(option.cost)}"
            drawn, shape = [scale.levels(option.forecast)], _SHAPES[number % len(_SHAPES)]
            shown += plotting.draw_forecasts(axes, [option.compute], drawn, name, shape)
        plotting.compute_axis(axes, made.file.unit, 0.0, last * 1.05)
        plotting.reward_axis(axes, shown, scale)
        plotting.mark_compute(axes, made.now, plotting.INK, "stop now")
        block, rate = plan.block, plan.pace.rate
        # The best block of a run whose asymptote is not identifiable is no basis for a decision.
        if block is not None and rate is not None and block.compute > 0 and made.state is State.OK:
            hours = formatting.amount(float(f"{block.compute / rate:.2g}"))
            name = f"pays best: +{hours} h"
            plotting.mark_compute(axes, made.now + block.compute, plotting.GREEN, name)
        state = {
            State.BROKEN: " (BROKEN: no plan)",
            State.INSUFFICIENT: " (asymptote not identifiable yet)",
            State.OK: "",
        }[made.state]
        axes.set_title(f"{made.file.path.stem}: what each choice gives{state}", loc="left")


def draw_comparison(table: Comparison, path: str | Path) -> None:
    """Draw every curve and its fit into ``path``, on a linear and on a logarithmic axis.

    Raises:
        AnalysisProblem: the picture cannot be written.
    """
    size = (10.4, 5.2 + 0.11 * len(table.recipes))
    curves = [file.curve for file in table.files]
    high = max(float(curve.compute[-1]) for curve in curves)
    low = min(float(curve.compute[curve.compute > 0][0]) for curve in curves if curve.compute[-1] > 0)
    burnt = any(made.fitted.burn_in_points for recipe in table.recipes for made in recipe.made)
    with plotting.picture(path, size, (1, 2), sharey=True) as ((linear, log),):
        for axes in (linear, log):
            shown = [
                reward
                for number, recipe in enumerate(table.recipes)
                for reward in _draw_recipe(axes, recipe, table, *plotting.pen(number))
            ]
            if burnt:
                axes.plot([], [], "o", ms=3.6, mfc="white", color=plotting.FAINT, label="hollow: burn-in")
            plotting.reward_axis(axes, shown, table.scale)
        plotting.compute_axis(linear, table.unit, 0.0, high * 1.03)
        plotting.compute_axis(log, table.unit, low / 1.15, high * 1.1, log=True)
        log.set_ylabel("")
        for number, recipe in enumerate(table.recipes):
            if (a := recipe.parameter("A")) is not None:
                colour, at = plotting.pen(number)[0], 1.015 + 0.018 * number
                plotting.edge_bar(log, table.scale.levels(a), colour, upper=False, at=at)
        shaded = "50 % and 90 %" if len(table.recipes) <= _DETAILED else "90 %"
        text = f"shaded: {shaded} of the fit; beside the axes: A, 90 %"
        log.set_title(text, loc="right", fontsize=9, color=plotting.FAINT)


def _draw_recipe(axes: Any, recipe: Recipe, table: Comparison, colour: str, marker: str) -> list[float]:
    """Draw the runs of a recipe; returns rewards for the limits of the axis."""
    detailed, scale = len(table.recipes) <= _DETAILED, table.scale
    burn_in = {made.file: made.fitted.burn_in_points for made in recipe.made}
    a, b = recipe.parameter("A"), recipe.parameter("B")
    fit = "no fit" if a is None or b is None else f"A {scale.rewards(a)}, B {formatting.amounts(b)}"
    shown: list[float] = []
    for number, file in enumerate(recipe.files):
        curve = file.segment.curve
        bars = plotting.samples_text(curve) if detailed else ""
        plotting.draw_points(
            axes,
            curve,
            scale,
            file.segment.start,
            colour,
            None if number else f"{recipe.label}: {fit}{bars}",
            marker,
            burn_in.get(file, 0),
            bars=detailed,
        )
        if file.segments > 1:
            plotting.draw_earlier(axes, file, None)
        shown += [*scale.level(file.curve.reward), *(plotting.extent(curve, scale) if detailed else ())]
    for made in recipe.made:
        # The curve is drawn up to the last point only; beyond it, it would be a forecast.
        grid = np.linspace(made.first, made.start + made.fitted.now * (1.0 - 1e-6), plotting.GRID)
        bands = scale.level(made.bands(grid))
        plotting.draw_bands(axes, grid, bands, colour, inner=detailed)
        shown += [float(bands[2].min()), float(bands[2].max())]
    return shown


def draw_labels(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the newest rewards, the first ones and pass@k of the largest k, a panel per evaluation set and label.

    Raises:
        AnalysisProblem: the picture cannot be written, or matplotlib is not installed.
    """
    panels = list(dict.fromkeys((row["set"], row["label"]) for row in rows))
    names = list(dict.fromkeys(row["run"] for row in rows))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    size = (5.2 * columns, 3.4 * lines + 0.4 + 0.11 * len(names))
    with plotting.picture(path, size, (lines, columns)) as grid:
        several_sets = len({of for of, _ in panels}) > 1
        for axes, (of, label) in zip(grid.flat, panels, strict=False):
            _draw_label(axes, [row for row in rows if (row["set"], row["label"]) == (of, label)], names)
            axes.set_xlabel(f"{label} ({of})" if several_sets else label)
            axes.set_ylabel("reward")
        for axes in grid.flat:
            axes.set_visible(axes.has_data())


def _draw_label(axes: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    values = list(dict.fromkeys(row["value"] for row in rows))
    axes.set_xticks(range(len(values)), values, rotation=30 if max(map(len, values)) > 6 else 0)
    passed = max(
        (name for name in rows[0] if name.startswith("pass_at_")), key=lambda n: int(n[8:]), default=""
    )
    for number, name in enumerate(names):
        own = [row for row in rows if row["run"] == name]
        x = [values.index(row["value"]) for row in own]
        colour, marker = plotting.pen(number)
        mark = {"color": colour, "marker": marker, "ms": 4.5}
        axes.plot(x, [row["last_reward"] for row in own], **mark, lw=1.6, label=f"{name}: reward, last")
        axes.plot(
            x, [row["first_reward"] for row in own], color=colour, lw=0.8, ls=":", label=f"{name}: first"
        )
        if any(row.get(passed) is not None for row in own):
            dashed = {"mfc": "white", "lw": 1.0, "ls": "--", "label": f"{name}: pass@{passed[8:]}, last"}
            axes.plot(x, [np.nan if row[passed] is None else row[passed] for row in own], **mark, **dashed)
    axes.set_ylim(-0.03, 1.03)
