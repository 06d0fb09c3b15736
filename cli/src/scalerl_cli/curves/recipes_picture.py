"""The picture of any number of recipes: their curves on a linear and on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import axis, formatting, plotting
from scalerl_cli.curves.recipes import Recipe, Table

COLOURS: Final = (
    plotting.BLUE,
    plotting.VERMILLION,
    plotting.GREEN,
    plotting.PURPLE,
    "#E69F00",
    "#56B4E9",
    plotting.INK,
)
"""Okabe–Ito colours; those of the eighth recipe on differ by their marker."""
MARKERS: Final = "os^Dv"
_BANDS: Final = 2
"""Limit on the recipes that are drawn with both bands of their fits; of more, only the 90 % band is drawn, lighter."""


def draw_recipes(table: Table, path: Path) -> None:
    """Draw every curve and its fit into ``path``.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    with plotting.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.4, 5.2 + 0.11 * len(table.recipes)), layout="constrained")
        linear, log = figure.subplots(1, 2, sharey=True)
        _panel(linear, table, log=False)
        _panel(log, table, log=True)
        log.set_ylabel("")
        plotting.legend(figure, linear)
        plotting.save(figure, path)


def _panel(axes: Any, table: Table, *, log: bool) -> None:
    curves = [file.curve for recipe in table.recipes for file in recipe.files]
    high = max(float(curve.compute[-1]) for curve in curves)
    low = min(float(curve.compute[curve.compute > 0][0]) for curve in curves if curve.compute[-1] > 0)
    shown: list[float] = []
    for i, recipe in enumerate(table.recipes):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]
        name: str | None = _name(recipe, table)
        for file in recipe.files:
            x, y = file.curve.compute, table.scale.level(file.curve.reward)
            trained = x > 0 if log else x >= 0
            axes.plot(x[trained], y[trained], marker, color=colour, ms=3.4, mew=0, alpha=0.8, label=name)
            name = None
            shown += [float(y.min()), float(y.max())]
        for made in recipe.made:
            first = made.file.segment.curve.compute
            # The curve is drawn up to the last point only; beyond it, it would be a forecast.
            last = made.fitted.now * (1.0 - 1e-6)
            grid = np.linspace(float(first[first > 0][0]), last, plotting.GRID) + made.start
            bands = table.scale.level(made.bands(grid))
            if len(table.recipes) <= _BANDS:
                plotting.draw_bands(axes, grid, bands, colour)
            else:
                axes.fill_between(grid, bands[0], bands[4], color=colour, alpha=0.1, lw=0, zorder=1.5)
                axes.plot(grid, bands[2], color=colour, lw=1.4)
            shown += [float(bands[2].min()), float(bands[2].max())]
    begin = low / 1.15 if log else 0.0
    axis.compute_axis(axes, table.unit, begin, high * (1.1 if log else 1.03), log=log)
    axis.reward_axis(axes, shown, table.scale)
    if log:
        _asymptotes(axes, table)


def _asymptotes(axes: Any, table: Table) -> None:
    """Draw A of every recipe with its 90 % interval beside the right edge, as far as it lies within the axes."""
    bottom, top = axes.get_ylim()
    edge = axes.get_yaxis_transform()
    for i, recipe in enumerate(table.recipes):
        a = recipe.parameter("A")
        if a is None:
            continue
        level, x = table.scale.levels(a), 1.015 + 0.018 * i
        ends = [min(max(end, bottom), top) for end in (level.low, level.high)]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]
        axes.plot([x, x], ends, transform=edge, color=colour, lw=1.6, clip_on=False)
        if bottom <= level.median <= top:
            axes.plot([x], [level.median], marker, transform=edge, color=colour, ms=5, mew=0, clip_on=False)
    shaded = "50 % and 90 %" if len(table.recipes) <= _BANDS else "90 %"
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
