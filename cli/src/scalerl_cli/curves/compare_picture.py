"""The picture of two recipes: their curves on a linear and on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import axis, formatting, plotting
from scalerl_cli.curves.analysis import Analysis, State, bands
from scalerl_cli.curves.comparison import Pair, verdict
from scalerl_curvefit.compare import A_MARGIN
from scalerl_curvefit.curve import FloatArray

PENS: Final = ((plotting.BLUE, "o"), (plotting.VERMILLION, "s"))


def draw_comparison(both: Pair, path: Path) -> None:
    """Draw both curves, with the fits that the rule compares, into ``path``.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    with plotting.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.4, 5.2), layout="constrained")
        linear, log = figure.subplots(1, 2, sharey=True)
        _panel(linear, both, log=False)
        _panel(log, both, log=True)
        log.set_ylabel("")
        plotting.legend(figure, linear)
        figure.suptitle(_title(both), x=0.01, ha="left", fontsize=11)
        plotting.save(figure, path)


def _title(both: Pair) -> str:
    ruled = both.ruled
    how = (
        f"A within the margin: both drawn at the common A = {both.first.scale.reward(ruled.shared_a, 3)}"
        if ruled.shared_a is not None
        else f"A apart by more than the margin of {both.first.scale.difference(A_MARGIN, 2)}"
    )
    doubt = "; do not rely on it yet (see the doubts printed)" if both.doubts else ""
    return f"{verdict(both)}\n{how}{doubt}"


def _panel(axes: Any, both: Pair, *, log: bool) -> None:
    studies, scale = (both.first, both.second), both.first.scale
    fits = (both.ruled.first, both.ruled.second)
    firsts = [
        float(made.file.segment.curve.compute[made.file.segment.curve.compute > 0][0]) for made in studies
    ]
    ends = [made.fitted.now if made.state is State.BROKEN else 2.0 * made.fitted.now for made in studies]
    low, high = (min(firsts) / 1.15 if log else 0.0), max(ends) * (1.1 if log else 1.03)
    shown: list[float] = []
    marks: list[tuple[float, str, str]] = []
    levels = []
    for made, fitted, name, (colour, marker) in zip(studies, fits, both.names, PENS, strict=True):
        grid = _grid(made, low, high, log=log)
        shades = scale.level(bands(fitted, grid))
        plotting.draw_bands(axes, grid, shades, colour)
        curve = made.file.segment.curve
        plotting.draw_points(
            axes,
            curve,
            scale,
            0.0,
            colour,
            f"{name}{plotting.samples_text(curve)}",
            marker,
            fitted.burn_in_points,
        )
        marks.append((fitted.Cmid.median, f"Cmid {formatting.amounts(fitted.Cmid)}", colour))
        marks.append((fitted.now, "now", colour))
        asymptote = scale.levels(fitted.A)
        shown += [*plotting.extent(curve, scale), *shades.ravel(), asymptote.low, asymptote.high]
        name_a = "A" if both.ruled.shared_a is None else "common A"
        value = (
            scale.rewards(fitted.A) if both.ruled.shared_a is None else scale.reward(both.ruled.shared_a, 3)
        )
        levels.append((asymptote, f"{name_a} {value}\nB {formatting.amounts(fitted.B)}", colour))
    if not log:
        if any(fitted.burn_in_points for fitted in fits):
            axes.plot([], [], "o", ms=3.6, mfc="white", color=plotting.FAINT, label="hollow: burn-in")
        axes.plot([], [], color=plotting.FAINT, lw=1.6, label="median, up to 2× the compute so far")
        axes.fill_between(
            [],
            [],
            [],
            color=plotting.FAINT,
            alpha=0.4,
            lw=0,
            label="50 % and 90 % intervals, without late rises",
        )
    axis.compute_axis(axes, both.first.file.unit, low, high, log=log)
    axis.reward_axis(axes, shown, scale)
    axis.mark_computes(axes, marks)
    if log:
        _asymptotes(axes, levels)
    else:
        for a, _, colour in levels:
            axes.axhline(a.median, color=colour, lw=0.9, ls=(0, (1, 2)), zorder=1)


def _asymptotes(axes: Any, levels: list[Any]) -> None:
    """Draw A and B of both recipes on the right edge; the lower text is moved down where they would overlap."""
    bottom, top = axes.get_ylim()
    apart = 0.15 * (top - bottom)
    ordered = sorted(levels, key=lambda level: -level[0].median)
    upper = min(ordered[0][0].median, top - 0.05 * (top - bottom))
    places = (upper, min(ordered[1][0].median, upper - apart))
    edge = axes.get_yaxis_transform()
    for (level, text, colour), place, x in zip(ordered, places, (1.008, 1.018), strict=True):
        axes.axhline(level.median, color=colour, lw=0.9, ls=(0, (1, 2)), zorder=1)
        axes.plot(
            [x, x],
            [level.low, level.high],
            transform=edge,
            color=colour,
            lw=3,
            clip_on=False,
            solid_capstyle="butt",
        )
        axes.text(1.034, place, text, transform=edge, color=colour, fontsize=9, va="center")


def _grid(made: Analysis, low: float, high: float, *, log: bool) -> FloatArray:
    end = min(made.fitted.now if made.state is State.BROKEN else 2.0 * made.fitted.now, high)
    first = float(made.file.segment.curve.compute[made.file.segment.curve.compute > 0][0]) / 4.0
    begin = max(first, low)
    return np.geomspace(begin, end, plotting.GRID) if log else np.linspace(begin, end, plotting.GRID)
