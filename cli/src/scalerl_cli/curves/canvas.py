"""What all pictures share: paper, pens, labels that keep out of each other's way, and saving as a whole."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_cli.curves import words
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.picture import NO_MATPLOTLIB
from scalerl_curvefit import Curve
from scalerl_curvefit.curve import FloatArray

BLUE: Final = "#0072B2"
VERMILLION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#8A4F7D"
INK: Final = "#222222"
FAINT: Final = "#777777"
"""Okabe–Ito colours, told apart by colour-blind readers too; the purple a shade darker, to be read as text."""

FORMATS: Final = (".png", ".pdf", ".svg")
DPI: Final = 300
GRID: Final = 300
"""Computes that a band is drawn through."""
MOST_BARS: Final = 400
"""More points than this are drawn as a cloud without error bars."""
Z90: Final = 1.645
_RAISED: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
UNWIELDY: Final = 1e15
"""Compute from which on an axis is in powers of ten: FLOPs, most often."""

_STYLE: Final = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.labelsize": 10.0,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "svg.hashsalt": "scalerl",
    "figure.facecolor": "white",
    # Fonts as TrueType: several venues refuse a paper with Type 3 fonts, which are matplotlib's default.
    "pdf.fonttype": 42,
}


def check_target(path: Path | None) -> None:
    """Raise CurveProblem unless a picture can be put there; called before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise CurveProblem(f"--plot {path}: a picture's name ends in {', '.join(FORMATS)}")
    if path.is_dir():
        raise CurveProblem(f"--plot {path}: a directory; name a file in it")
    if not path.parent.is_dir():
        raise CurveProblem(f"--plot {path}: no such directory {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise CurveProblem(f"--plot {path}: {NO_MATPLOTLIB}")


def style() -> AbstractContextManager[None]:
    """The look of our pictures, for the length of a ``with``, whatever the user's own settings are."""
    import matplotlib

    context: AbstractContextManager[None] = matplotlib.rc_context(
        {**matplotlib.rcParamsDefault, **_STYLE, "backend": "agg"}
    )
    return context


def save(figure: Any, path: Path) -> None:
    """Write beside, then put in place, so that a picture is there as a whole or not at all.

    Raises:
        CurveProblem: if it cannot be written.
    """
    aside = path.with_name(f".{path.stem}.new{path.suffix.lower()}")
    # No date and no version in the file: the same points give the same picture.
    metadata: dict[str, None] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(
        path.suffix.lower(), {}
    )
    try:
        small = {"pil_kwargs": {"optimize": True}} if aside.suffix == ".png" else {}
        figure.savefig(aside, dpi=DPI, metadata=metadata, **small)
        os.replace(aside, path)
    except OSError as error:
        raise CurveProblem(f"--plot {path}: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)


def wilson(reward: FloatArray, samples: FloatArray) -> tuple[FloatArray, FloatArray]:
    """90 % Wilson intervals (low, high) of pass rates, all (n,); at 0 and 1 they keep a width."""
    share = Z90**2 / samples
    centre = (reward + share / 2.0) / (1.0 + share)
    half = Z90 * np.sqrt(reward * (1.0 - reward) / samples + share / (4.0 * samples)) / (1.0 + share)
    return np.minimum(centre - half, reward), np.maximum(centre + half, reward)


def draw_points(axes: Any, curve: Curve, start: float, colour: str, label: str, marker: str = "o") -> None:
    """The evaluations, with binomial error bars where the samples behind them are known."""
    compute = curve.compute + start
    if len(curve) > MOST_BARS:
        # Behind the curve, which it would hide.
        axes.plot(
            compute, curve.reward, ".", color=colour, ms=2, alpha=0.15, mew=0, zorder=1.4, rasterized=True
        )
        axes.plot([], [], ".", color=colour, ms=5, mew=0, label=label)
        return
    bars = None
    if curve.samples is not None:
        low, high = wilson(curve.reward, curve.samples)
        bars = np.stack([curve.reward - low, high - curve.reward])
    axes.errorbar(
        compute,
        curve.reward,
        yerr=bars,
        fmt=marker,
        ms=3.6,
        mew=0,
        color=colour,
        ecolor=colour,
        elinewidth=0.8,
        capsize=0,
        alpha=0.85,
        label=label,
        zorder=3,
    )


def samples_words(curve: Curve) -> str:
    """What the error bars are, for the legend; empty where there are none."""
    if curve.samples is None or len(curve) > MOST_BARS:
        return ""
    low, high = int(curve.samples.min()), int(curve.samples.max())
    count = words.amount(low) if low == high else f"{words.amount(low)}–{words.amount(high)}"
    return f", 90 % binomial bars ({count} samples each)"


def compute_axis(axes: Any, unit: str, low: float, high: float, *, log: bool = False) -> None:
    """Scale, limits, numbers and unit of the compute axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)
    power = int(np.floor(np.log10(high))) if high >= UNWIELDY and not log else 0
    number = (
        words.amount
        if high >= UNWIELDY and log
        else lambda value: tick(value / 10.0**power, high / 10.0**power)
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(float(value))))
    said = [
        f"10{str(power).translate(_RAISED)} {unit}".rstrip() if power else unit,
        "logarithmic" if log else "",
    ]
    of = ", ".join(word for word in said if word)
    axes.set_xlabel(f"compute ({of})" if of else "compute")


def tick(value: float, high: float) -> str:
    """``20k``, ``1.5M``: a number short enough for an axis that ends at ``high``, all of one unit."""
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
    return f"{value / size:.4g}{letter if value else ''}"


def reward_axis(axes: Any, values: Sequence[float]) -> None:
    """Limits around ``values`` within [0, 1], numbers with the digits that tell one from the next, and what is measured."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = min(values), max(values)
    pad = 0.06 * max(high - low, 0.05)
    axes.set_ylim(max(low - pad, -0.005), min(high + pad, 1.005))
    locator = MaxNLocator(nbins=7, steps=[1, 2, 5, 10])
    step = float(np.diff(locator.tick_values(*axes.get_ylim()))[0])
    digits = max(2, int(np.ceil(-np.log10(step) - 1e-9)))
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.reward(float(value), digits)))
    axes.set_ylabel("mean evaluation reward (0 to 1)")


def mark_computes(axes: Any, marks: Sequence[tuple[float, str, str]]) -> int:
    """Upright lines with their names above the axes: (compute, name, colour), raised where they would collide.

    Returns how many rows of names stand there.
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


def mark_asymptote(axes: Any, median: float, low: float, high: float, text: str, colour: str) -> None:
    """The level A across the axes, its 90 % interval as a bar on the right edge, its value beside."""
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
    """The 90 % interval of Cmid as a bar on the upper edge, as far as the axis reaches."""
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
    """A name on the left above a level line, to be read also where other lines cross it."""
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


def legend(figure: Any, axes: Any) -> None:
    """Of ``axes``, under all of the figure, where it can hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, columnspacing=1.6)


def extent(curve: Curve) -> list[float]:
    """Rewards between which everything that is drawn of the points lies."""
    if curve.samples is None or len(curve) > MOST_BARS:
        return [float(curve.reward.min()), float(curve.reward.max())]
    low, high = wilson(curve.reward, curve.samples)
    return [float(low.min()), float(high.max())]


def draw_bands(
    axes: Any,
    compute: FloatArray,
    bands: FloatArray,
    colour: str,
    median: str | None = None,
    of: str = "the curve",
) -> None:
    """Median, 50 % and 90 % bands; in the legend only if the median is given a name."""
    named = median is not None
    axes.fill_between(
        compute,
        bands[0],
        bands[4],
        color=colour,
        alpha=0.15,
        lw=0,
        label=f"90 % interval of {of}" if named else None,
        zorder=1.5,
    )
    axes.fill_between(
        compute,
        bands[1],
        bands[3],
        color=colour,
        alpha=0.28,
        lw=0,
        label="50 % interval" if named else None,
        zorder=1.6,
    )
    axes.plot(compute, bands[2], color=colour, lw=1.6, label=median, zorder=2)
