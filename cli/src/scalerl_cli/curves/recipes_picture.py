"""The picture of two or more recipes: their curves on a linear and on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import axis, formatting, plotting
from scalerl_cli.curves.recipes import Recipe, Table

_DETAILED: Final = 2
"""Limit on the recipes that are drawn with error bars and both bands of their fits; of more, only the 90 % band is drawn, lighter."""


def draw_recipes(table: Table, path: Path) -> None:
    """Draw every curve and its fit into ``path``.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    size = (10.4, 5.2 + 0.11 * len(table.recipes))
    with plotting.picture(path, size, (1, 2), sharey=True) as (_, ((linear, log),)):
        _panel(linear, table, log=False)
        _panel(log, table, log=True)
        log.set_ylabel("")


def _panel(axes: Any, table: Table, *, log: bool) -> None:
    curves = [file.curve for recipe in table.recipes for file in recipe.files]
    high = max(float(curve.compute[-1]) for curve in curves)
    low = min(float(curve.compute[curve.compute > 0][0]) for curve in curves if curve.compute[-1] > 0)
    shown: list[float] = []
    for number, recipe in enumerate(table.recipes):
        shown += _draw(axes, recipe, table, *plotting.pen(number))
    if any(made.fitted.burn_in_points for recipe in table.recipes for made in recipe.made):
        axes.plot([], [], "o", ms=3.6, mfc="white", color=plotting.FAINT, label="hollow: burn-in")
    begin = low / 1.15 if log else 0.0
    axis.compute_axis(axes, table.unit, begin, high * (1.1 if log else 1.03), log=log)
    axis.reward_axis(axes, shown, table.scale)
    if log:
        _asymptotes(axes, table)


def _draw(axes: Any, recipe: Recipe, table: Table, colour: str, marker: str) -> list[float]:
    """Draw the runs of a recipe; returns rewards for the limits of the axis."""
    detailed, scale = len(table.recipes) <= _DETAILED, table.scale
    burn_in = {made.file: made.fitted.burn_in_points for made in recipe.made}
    name: str | None = _name(recipe, table)
    shown: list[float] = []
    for file in recipe.files:
        curve = file.segment.curve
        bars = plotting.samples_text(curve) if detailed and name else ""
        plotting.draw_points(
            axes,
            curve,
            scale,
            file.segment.start,
            colour,
            name and f"{name}{bars}",
            marker,
            burn_in.get(file, 0),
            bars=detailed,
        )
        if file.segments > 1:
            plotting.draw_earlier(axes, file, None)
        name = None
        shown += [*scale.level(file.curve.reward), *(plotting.extent(curve, scale) if detailed else ())]
    for made in recipe.made:
        # The curve is drawn up to the last point only; beyond it, it would be a forecast.
        grid = np.linspace(made.first, made.start + made.fitted.now * (1.0 - 1e-6), plotting.GRID)
        bands = scale.level(made.bands(grid))
        if detailed:
            plotting.draw_bands(axes, grid, bands, colour)
        else:
            axes.fill_between(grid, bands[0], bands[4], color=colour, alpha=0.1, lw=0, zorder=1.5)
            axes.plot(grid, bands[2], color=colour, lw=1.4)
        shown += [float(bands[2].min()), float(bands[2].max())]
    return shown


def _asymptotes(axes: Any, table: Table) -> None:
    """Draw A of every recipe with its 90 % interval beside the right edge, as far as it lies within the axes."""
    bottom, top = axes.get_ylim()
    edge = axes.get_yaxis_transform()
    for number, recipe in enumerate(table.recipes):
        a = recipe.parameter("A")
        if a is None:
            continue
        level, x = table.scale.levels(a), 1.015 + 0.018 * number
        ends = [min(max(end, bottom), top) for end in (level.low, level.high)]
        colour, marker = plotting.pen(number)
        axes.plot([x, x], ends, transform=edge, color=colour, lw=1.6, clip_on=False)
        if bottom <= level.median <= top:
            axes.plot([x], [level.median], marker, transform=edge, color=colour, ms=5, mew=0, clip_on=False)
    shaded = "50 % and 90 %" if len(table.recipes) <= _DETAILED else "90 %"
    axes.set_title(
        f"shaded: {shaded} of the fit; beside the axes: A, 90 %",
        loc="right",
        fontsize=9,
        color=plotting.FAINT,
    )


def _name(recipe: Recipe, table: Table) -> str:
    a, b = recipe.parameter("A"), recipe.parameter("B")
    if a is None or b is None:
        return f"{recipe.label}: no fit"
    return f"{recipe.label}: A {table.scale.rewards(a)}, B {formatting.amounts(b)}"
