"""The picture of a plan: the forecast of each choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl_cli.curves import axis, formatting, plotting
from scalerl_cli.curves.analysis import State
from scalerl_cli.curves.costs import Option

if TYPE_CHECKING:
    from scalerl_cli.curves.plan import Outlook


def draw_plan(outlook: Outlook, path: Path) -> None:
    """Draw the choices on the curve, with their costs where known; their dates are in the table.

    Raises:
        CurveProblem: the picture cannot be written.
    """
    with plotting.picture(path) as (_, grid):
        _choices(grid[0, 0], outlook)


def _choices(axes: Any, outlook: Outlook) -> None:
    made, scale = outlook.made, outlook.made.scale
    broken = made.state is State.BROKEN
    last = made.now if broken else max(option.compute for option in outlook.options)
    begin = made.start + (made.first - made.start) / 4.0
    shown = plotting.draw_analysis(
        axes, made, np.linspace(begin, last * (1.0 if broken else 1.03), plotting.GRID)
    )
    going = [option for option in outlook.options if option.more > 0]
    drawn = [scale.levels(option.forecast) for option in going]
    if going:
        plotting.draw_forecasts(
            axes, [option.compute for option in going], drawn, "choice, 90 % of an evaluation there"
        )
    axis.compute_axis(axes, made.file.unit, 0.0, last * 1.05)
    axis.reward_axis(axes, [*shown, *(end for o in drawn for end in (o.low, o.high))], scale)
    names = [
        (option.compute, level.low, _name(outlook, option))
        for option, level in zip(going, drawn, strict=True)
    ]
    axis.name_points(axes, names, plotting.VERMILLION)
    block, rate = outlook.block, outlook.pace.rate
    # The best block of a run whose asymptote is not identifiable is no basis for a decision.
    if block is not None and rate is not None and block.compute > 0 and made.state is State.OK:
        hours = formatting.amount(float(f"{block.compute / rate:.2g}"))
        axes.axvline(
            made.now + block.compute,
            color=plotting.GREEN,
            lw=0.9,
            ls=(0, (4, 3)),
            zorder=1,
            label=f"pays best: +{hours} h",
        )
    axis.mark_computes(axes, [(made.now, "stop now", plotting.INK)])
    state = {
        State.BROKEN: " (BROKEN: no plan)",
        State.INSUFFICIENT: " (asymptote not identifiable yet)",
        State.OK: "",
    }[made.state]
    axes.set_title(f"{made.file.path.stem}: what each choice gives{state}", loc="left", pad=18.0)


def _name(outlook: Outlook, option: Option) -> str:
    """``2×: .61`` and, on a second line, ``cost 1,200``."""
    name = option.name.removesuffix(" compute").replace("device-hours", "h")
    cost = "" if option.cost is None else f"\ncost {formatting.amount(option.cost)}"
    return f"{name}: {outlook.made.scale.reward(option.forecast.median)}{cost}"
