"""The picture of a plan: what each choice is expected to give, and when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from scalerl_cli.curves import canvas, words
from scalerl_cli.curves.money import POINTS
from scalerl_cli.curves.study import State

if TYPE_CHECKING:
    from scalerl_cli.curves.plan import Outlook

COLOURS: Final = (canvas.BLUE, canvas.VERMILLION, canvas.GREEN, canvas.PURPLE)
LINES: Final = ("-", "--", "-.", ":")


def pen(i: int) -> tuple[str, str]:
    """Colour and line of the i-th of many: sixteen before one comes again."""
    return COLOURS[i % 4], LINES[(i + i // 4) % 4]


def draw_plan(outlook: Outlook, path: Path) -> None:
    """Draw the choices on the curve; beside it the time they take, and the money, where these are known.

    Raises:
        CurveProblem: if it cannot be written.
    """
    panels = [_choices]
    if outlook.growths and outlook.options:
        panels.append(_times)
    if outlook.block is not None:
        panels.append(_worth)
    with canvas.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2 if len(panels) == 1 else 5.2 * len(panels), 5.4), layout="constrained")
        for place, panel in enumerate(panels, start=1):
            panel(figure.add_subplot(1, len(panels), place), outlook)
        canvas.save(figure, path)


def _choices(axes: Any, outlook: Outlook) -> None:
    made = outlook.made
    broken = made.state is State.BROKEN
    last = made.now if broken else max(option.compute for option in outlook.options)
    curve = made.file.segment.curve
    first = float(curve.compute[curve.compute > 0][0])
    grid = np.linspace(made.start + first / 4.0, last * (1.0 if broken else 1.03), canvas.GRID)
    bands = made.bands(grid)
    canvas.draw_bands(axes, grid, bands, canvas.BLUE, "median of the fitted curve")
    canvas.draw_points(
        axes, curve, made.start, canvas.INK, f"{len(curve):,} evaluations{canvas.samples_words(curve)}"
    )
    going = [option for option in outlook.options if option.more > 0]
    if going:
        medians = np.array([option.forecast.median for option in going])
        bars = [
            medians - np.array([option.forecast.low for option in going]),
            np.array([option.forecast.high for option in going]) - medians,
        ]
        axes.errorbar(
            [option.compute for option in going],
            medians,
            yerr=np.stack(bars),
            fmt="D",
            ms=5,
            color=canvas.VERMILLION,
            mfc="white",
            mew=1.3,
            capsize=3,
            elinewidth=1.3,
            zorder=4,
            label="choice, 90 % of an evaluation there",
        )
    canvas.compute_axis(axes, made.file.unit, 0.0, last * 1.05)
    shown = [
        *canvas.extent(curve),
        *bands.ravel(),
        *(x for o in going for x in (o.forecast.low, o.forecast.high)),
    ]
    canvas.reward_axis(axes, shown)
    marks = [(made.now, "stop now", canvas.INK)]
    marks += [
        (
            o.compute,
            f"{o.name.removesuffix(' compute').replace('device-hours', 'h')}: {words.reward(o.forecast.median)}",
            canvas.VERMILLION,
        )
        for o in going
    ]
    rows = canvas.mark_computes(axes, marks)
    state = {
        State.BROKEN: " (BROKEN: no plan)",
        State.INSUFFICIENT: " (asymptote not identifiable yet)",
        State.OK: "",
    }[made.state]
    axes.set_title(f"{made.file.path.stem}: what each choice gives{state}", loc="left", pad=6.0 + 12.0 * rows)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), borderaxespad=0.0)


def _ahead(outlook: Outlook) -> tuple[Any, Any]:
    """Further compute up to the largest choice, and the bands there."""
    more = np.linspace(0.0, max(option.more for option in outlook.options), canvas.GRID)
    return more, outlook.made.bands(outlook.made.now + more)


def _times(axes: Any, outlook: Outlook) -> None:
    """The same rewards, sooner or later."""
    pace, (more, bands) = outlook.pace, _ahead(outlook)
    if pace.rate is None or pace.devices is None:
        return
    speed = [grown.speed * pace.rate * pace.devices for grown in outlook.growths]
    longest = float(more[-1]) / min(speed)
    size, unit = (
        (24.0, "days") if longest > 72.0 else (1.0, "hours") if longest > 2.0 else (1.0 / 60.0, "minutes")
    )
    for i, (grown, per_hour) in enumerate(zip(outlook.growths, speed, strict=True)):
        colour, line = pen(i)
        count = f"{grown.generators} generator{'s' if grown.generators > 1 else ''}"
        end = float(more[-1]) / per_hour
        axes.plot(
            more / per_hour / size,
            bands[2],
            color=colour,
            ls=line,
            lw=1.6,
            label=f"{count}: {words.hours(end)}, {words.amount(end * grown.devices)} device-hours",
        )
        axes.plot(end / size, bands[2, -1], "o", ms=4, color=colour)
    axes.set_xlim(left=0.0)
    axes.set_xlabel(f"{unit} from now")
    canvas.reward_axis(axes, [float(bands[2].min()), float(bands[2].max())])
    axes.set_ylabel("expected reward (median)")
    axes.set_title(f"Time to {outlook.options[-1].name}, elasticity {outlook.elasticity:.2g}", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), borderaxespad=0.0)


def _worth(axes: Any, outlook: Outlook) -> None:
    """Value of the gain less its cost."""
    money, pace, block = outlook.money, outlook.pace, outlook.block
    if money.price is None or money.value is None or pace.rate is None or block is None:
        return
    more, _ = _ahead(outlook)
    device_hours = more / pace.rate
    net = money.value * POINTS * outlook.made.gain_bands(more) - money.price * device_hours
    axes.axhline(0.0, color=canvas.FAINT, lw=0.8)
    canvas.draw_bands(axes, device_hours, net, canvas.GREEN, "median", "value − cost")
    if block.compute > 0:
        axes.plot(
            block.compute / pace.rate,
            block.net,
            "o",
            ms=6,
            color=canvas.VERMILLION,
            label=f"best expected: {words.amount(block.compute / pace.rate)} device-hours",
            zorder=4,
        )
    axes.set_xlim(0.0, float(device_hours[-1]))
    axes.set_xlabel("further device-hours")
    axes.set_ylabel("value of the gain − cost, in the price's currency")
    axes.set_title("What it is worth", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), borderaxespad=0.0)
