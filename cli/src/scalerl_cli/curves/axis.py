"""Axes of the pictures: tick labels, and the labelled lines that mark computes and levels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import formatting
from scalerl_cli.curves.scale import RewardScale

_RAISED: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
UNWIELDY: Final = 1e15
"""From this compute on, an axis is in powers of ten; usually compute is in FLOPs then."""
UNIT: Final = RewardScale(0.0, 1.0)


def compute_axis(axes: Any, unit: str, low: float, high: float, *, log: bool = False) -> None:
    """Set scale, limits, tick labels and label of the compute axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)
    power = int(np.floor(np.log10(high))) if high >= UNWIELDY and not log else 0
    number = (
        formatting.amount
        if high >= UNWIELDY and log
        else lambda value: tick(value / 10.0**power, high / 10.0**power)
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(float(value))))
    qualifiers = [
        f"10{str(power).translate(_RAISED)} {unit}".rstrip() if power else unit,
        "logarithmic" if log else "",
    ]
    of = ", ".join(word for word in qualifiers if word)
    axes.set_xlabel(f"compute ({of})" if of else "compute")


def tick(value: float, high: float) -> str:
    """Short tick label such as ``20k`` or ``1.5M``; ``high``, the end of the axis, determines the unit of all its labels."""
    letter, size = next(
        (
            (c, p)
            for c, p in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
            if high >= 10 * p or value >= p > 1e3
        ),
        ("", 1.0),
    )
    if letter and 0 < value < size:
        return tick(value, value * 10.0)
    return f"{formatting.significant(value / size, 4)}{letter if value else ''}"


def reward_axis(axes: Any, values: Sequence[float], scale: RewardScale = UNIT) -> None:
    """Set limits around ``values`` within the scale, tick labels with enough digits to differ, and the label of the axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = min(values), max(values)
    pad, rim = 0.06 * max(high - low, 0.05 * scale.size), 0.005 * scale.size
    axes.set_ylim(max(low - pad, scale.low - rim), min(high + pad, scale.high + rim))
    locator = MaxNLocator(nbins=7, steps=[1, 2, 5, 10])
    step = float(np.diff(locator.tick_values(*axes.get_ylim()))[0])
    digits = max(scale.digits(2), int(np.ceil(-np.log10(step) - 1e-9)))
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatting.reward(float(value), digits)))
    axes.set_ylabel(f"mean evaluation reward ({scale.low:g} to {scale.high:g})")


def mark_computes(axes: Any, marks: Sequence[tuple[float, str, str]]) -> int:
    """Draw vertical lines with names above the axes: (compute, name, colour). Names that would collide go to a higher row.

    Returns the number of rows of names.
    """
    low, high = axes.get_xlim()
    log = axes.get_xscale() == "log"
    placed: list[tuple[int, float]] = []
    for compute, name, colour in sorted(marks):
        if not low <= compute <= high:
            continue
        place = float(np.log(compute / low) / np.log(high / low)) if log else (compute - low) / (high - low)
        half = 0.009 * len(name)
        level = next(k for k in itertools.count() if all(k != at or place - half > end for at, end in placed))
        placed.append((level, place + half))
        axes.axvline(compute, color=colour, lw=0.9, ls=(0, (4, 3)), zorder=1)
        axes.annotate(
            name,
            (compute, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3 + 12 * level),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )
    return 1 + max((level for level, _ in placed), default=-1)


def name_points(axes: Any, points: Sequence[tuple[float, float, str]], colour: str) -> None:
    """Write names of one or two lines below points: (compute, reward, name). One that would cover another goes further down."""
    low, high = axes.get_xlim()
    ends: list[float] = []
    for compute, reward, name in sorted(points):
        place = (compute - low) / (high - low)
        wide = 0.016 * max(map(len, name.splitlines()))
        right = place + wide > 1.0
        start = place - wide if right else place
        level = next(k for k, end in enumerate([*ends, -1.0]) if start > end)
        ends[level : level + 1] = [start + wide]
        axes.axvline(compute, color=colour, lw=0.9, ls=(0, (4, 3)), zorder=1)
        axes.annotate(
            name,
            (compute, reward),
            xytext=(-4 if right else 4, -5 - 26 * level),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            fontsize=9,
            color=colour,
            zorder=5,
        )


def mark_asymptote(axes: Any, median: float, low: float, high: float, text: str, colour: str) -> None:
    """Draw the level A across the axes, its 90 % interval as a bar on the right edge, and its value beside the bar."""
    axes.axhline(median, color=colour, lw=0.9, ls=(0, (1, 2)), zorder=1)
    edge = axes.get_yaxis_transform()
    axes.plot(
        [1.008, 1.008],
        [low, high],
        transform=edge,
        color=colour,
        lw=3.5,
        clip_on=False,
        solid_capstyle="butt",
    )
    axes.text(1.022, median, text, transform=edge, color=colour, fontsize=9, va="center", ha="left")


def mark_midpoint(axes: Any, low: float, high: float, colour: str) -> None:
    """Draw the 90 % interval of Cmid as a bar on the upper edge, clipped to the axis."""
    left, right = axes.get_xlim()
    ends = [max(low, left), min(high, right)]
    axes.plot(
        ends,
        [1.0, 1.0],
        transform=axes.get_xaxis_transform(),
        color=colour,
        lw=3.5,
        clip_on=False,
        solid_capstyle="butt",
        zorder=2.5,
    )


def name_level(axes: Any, level: float, text: str, colour: str) -> None:
    """Draw a name above the left end of a level line, with a white outline that keeps it readable across other lines."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        (0.005, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=9,
        color=colour,
        path_effects=[withStroke(linewidth=3.0, foreground="white")],
        zorder=5,
    )
