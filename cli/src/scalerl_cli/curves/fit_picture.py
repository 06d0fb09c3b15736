"""The picture of one fit."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from scalerl_cli.curves import axis, formatting, plotting
from scalerl_cli.curves.analysis import Analysis, State
from scalerl_cli.curves.scale import RewardScale
from scalerl_cli.curves.source import CurveFile
from scalerl_curvefit import power_law


def draw_fit(
    made: Analysis,
    path: Path,
    *,
    title: str = "",
    budget: float | None = None,
    target: float | None = None,
    alternatives: bool = False,
    log: bool = False,
) -> None:
    """Draw points, median, bands, asymptote, Cmid, now and budget into ``path``.

    title: the file's name if empty.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    with plotting.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=plotting.COLUMN, layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, made, title or made.file.path.stem, budget, target, alternatives, log)
        plotting.legend(figure, axes)
        plotting.save(figure, path)


def draw_unfitted(file: CurveFile, path: Path, *, title: str, why: str, budget: float | None = None) -> None:
    """Draw the points of a curve that cannot be fitted yet, with the reason ``why`` in the title.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    with plotting.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=plotting.COLUMN, layout="constrained")
        axes = figure.add_subplot()
        curve, scale = file.curve, RewardScale(*file.curve.scale)
        label = f"{len(curve):,} evaluations{plotting.samples_text(curve)}"
        plotting.draw_points(axes, curve, scale, 0.0, plotting.INK, label)
        now = float(curve.compute[-1])
        axis.compute_axis(axes, file.unit, 0.0, max(now, budget or 0.0, 1.0) * 1.04)
        axis.reward_axis(axes, plotting.extent(curve, scale), scale)
        marks = [(now, "now", plotting.INK)]
        if budget is not None:
            marks.append((budget, f"budget {formatting.amount(budget)}", plotting.VERMILLION))
        rows = axis.mark_computes(axes, marks)
        axes.set_title(f"{title}: no fit\n{textwrap.fill(why, 88)}", loc="left", pad=6.0 + 12.0 * rows)
        plotting.legend(figure, axes)
        plotting.save(figure, path)


def _draw(
    axes: Any,
    made: Analysis,
    name: str,
    budget: float | None,
    target: float | None,
    alternatives: bool,
    log: bool,
) -> None:
    file, fitted = made.file, made.fitted
    broken = made.state is State.BROKEN
    beyond = [made.now if broken else made.twice, budget or 0.0, *(point.compute for point in made.forecasts)]
    cmid = fitted.Cmid.median + made.start
    trained = file.segment.curve.compute > 0
    first = float(file.segment.curve.compute[trained][0]) + made.start
    low, high = (first / 1.15 if log else 0.0), max(beyond) * (1.15 if log else 1.04)
    end = made.now if broken else high
    begin = max(made.start + (first - made.start) / 4.0, low)
    grid = np.geomspace(begin, end, plotting.GRID) if log else np.linspace(begin, end, plotting.GRID)
    scale = made.scale
    bands = scale.level(made.bands(grid))
    plotting.draw_bands(axes, grid, bands, plotting.BLUE, "median: fitted curve, then forecast")
    if not broken:
        plotting.draw_late_rises(axes, made, grid)
    if file.segments > 1:
        before = file.curve.head(len(file.curve) - len(file.segment.curve))
        axes.plot(
            before.compute,
            scale.level(before.reward),
            "o",
            ms=3,
            mew=0,
            color=plotting.FAINT,
            alpha=0.5,
            label="earlier recipe or evaluation, not fitted",
        )
    n = len(file.segment.curve)
    plotting.draw_points(
        axes,
        file.segment.curve,
        scale,
        made.start,
        plotting.INK,
        f"{n:,} evaluations{plotting.samples_text(file.segment.curve)}",
        burn_in=fitted.burn_in_points,
        burn_in_label=plotting.burn_in_text(fitted.burn_in_points),
    )
    plotting.draw_fallen(axes, file.segment.curve, scale, made.start, made.fallen)
    if made.forecasts:
        plotting.draw_forecasts(
            axes,
            [point.compute for point in made.forecasts],
            [scale.levels(point) for point in made.forecasts],
            f"forecast of an evaluation, 90 %; at 2×: {scale.rewards(made.forecasts[0])}",
        )
    shown = [
        *scale.level(file.curve.reward),
        *plotting.extent(file.segment.curve, scale),
        *bands.ravel(),
        *(scale.level(x) for p in made.forecasts for x in (p.low, p.high)),
    ]
    if alternatives and not broken:
        law = scale.level(power_law(file.segment.curve).reward(grid - made.start))
        axes.plot(grid, law, color=plotting.FAINT, lw=1.2, ls="-.", label="power law A − D/C^B", zorder=1.9)
    if not broken:
        asymptote = scale.levels(fitted.A)
        shown += [asymptote.low, asymptote.high]
        text = f"A {scale.rewards(fitted.A)}".replace(" (", "\n(")
        axis.mark_asymptote(axes, asymptote.median, asymptote.low, asymptote.high, text, plotting.BLUE)
    if target is not None:
        shown.append(target)
        axes.axhline(target, color=plotting.GREEN, lw=0.9, ls=(0, (4, 3)))
        axis.name_level(axes, target, f"target {scale.reward(scale.rate(target))}", plotting.GREEN)
    axis.compute_axis(axes, file.unit, low, high, log=log)
    axis.reward_axis(axes, shown, scale)
    origin = f"{formatting.amount(made.start)} + " if made.start else ""
    marks = [
        (made.now, "now", plotting.INK),
        (cmid, f"{origin}Cmid {formatting.amounts(fitted.Cmid)}", plotting.PURPLE),
    ]
    if budget is not None:
        marks.append((budget, f"budget {formatting.amount(budget)}", plotting.VERMILLION))
    if cmid <= high:
        axis.mark_midpoint(axes, fitted.Cmid.low + made.start, fitted.Cmid.high + made.start, plotting.PURPLE)
    rows = axis.mark_computes(axes, marks)
    axes.set_title(_title(made, name, cmid > high), loc="left", pad=6.0 + 12.0 * rows)


def _title(made: Analysis, name: str, cmid_outside: bool) -> str:
    fitted = made.fitted
    second = f"R0 {made.scale.rewards(fitted.R0)}   B {formatting.amounts(fitted.B)}"
    if cmid_outside:
        second += f"   Cmid {formatting.amounts(fitted.Cmid)}, beyond this axis"
    if made.state is State.BROKEN:
        why = textwrap.fill("; ".join(made.guarded.reasons), 88)
        return f"{name}: BROKEN, no forecast\n{why}\n{second}"
    state = "" if made.state is State.OK else ": asymptote not identifiable yet"
    return f"{name}{state}\n{second}"
