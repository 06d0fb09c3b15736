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


def draw_fit(
    made: Analysis,
    path: Path,
    *,
    title: str = "",
    budget: float | None = None,
    target: float | None = None,
    log: bool = False,
) -> None:
    """Draw points, median, bands, asymptote, Cmid, now and budget into ``path``.

    title: the file's name if empty.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    with plotting.picture(path) as (_, grid):
        _draw(grid[0, 0], made, title or made.file.path.stem, budget, target, log)


def draw_unfitted(file: CurveFile, path: Path, *, title: str, why: str, budget: float | None = None) -> None:
    """Draw the points of a curve that cannot be fitted yet, with the reason ``why`` in the title.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    curve, scale = file.curve, RewardScale(*file.curve.scale)
    now = float(curve.compute[-1])
    with plotting.picture(path) as (_, grid):
        axes = grid[0, 0]
        label = f"{len(curve):,} evaluations{plotting.samples_text(curve)}"
        plotting.draw_points(axes, curve, scale, 0.0, plotting.INK, label)
        axis.compute_axis(axes, file.unit, 0.0, max(now, budget or 0.0, 1.0) * 1.04)
        axis.reward_axis(axes, plotting.extent(curve, scale), scale)
        rows = axis.mark_computes(axes, [(now, "now", plotting.INK), *_budget(budget)])
        axes.set_title(f"{title}: no fit\n{textwrap.fill(why, 88)}", loc="left", pad=6.0 + 12.0 * rows)


def _budget(budget: float | None) -> list[tuple[float, str, str]]:
    """The mark of a budget."""
    return [] if budget is None else [(budget, f"budget {formatting.amount(budget)}", plotting.VERMILLION)]


def _draw(
    axes: Any,
    made: Analysis,
    name: str,
    budget: float | None,
    target: float | None,
    log: bool,
) -> None:
    file, fitted, scale, broken = made.file, made.fitted, made.scale, made.state is State.BROKEN
    beyond = [made.now if broken else made.twice, budget or 0.0, *(point.compute for point in made.forecasts)]
    first = made.first
    low, high = (first / 1.15 if log else 0.0), max(beyond) * (1.15 if log else 1.04)
    begin, end = max(made.start + (first - made.start) / 4.0, low), made.now if broken else high
    grid = np.geomspace(begin, end, plotting.GRID) if log else np.linspace(begin, end, plotting.GRID)
    shown = plotting.draw_analysis(axes, made, grid)
    if made.forecasts:
        drawn = [scale.levels(point) for point in made.forecasts]
        shown += [end for point in drawn for end in (point.low, point.high)]
        label = f"forecast of an evaluation, 90 %; at 2×: {scale.rewards(made.forecasts[0])}"
        plotting.draw_forecasts(axes, [point.compute for point in made.forecasts], drawn, label)
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
    cmid = fitted.Cmid.median + made.start
    marks = [
        (made.now, "now", plotting.INK),
        (cmid, f"{origin}Cmid {formatting.amounts(fitted.Cmid)}", plotting.PURPLE),
        *_budget(budget),
    ]
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
