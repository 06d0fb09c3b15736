"""Common parts of the pictures: style, colours, axes, points, bands, legend, and atomic saving."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from scalerl_analysis import formatting
from scalerl_analysis.curve_file import CurveFile
from scalerl_analysis.fitted_curve import FittedCurve, State
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.reward_scale import RewardScale
from scalerl_curvefit import Curve, Estimate
from scalerl_curvefit.curve import FloatArray

NO_MATPLOTLIB: Final = "pictures need matplotlib, which is not installed here: pip install 'matplotlib>=3.10'"
"""Only the operator's image lacks matplotlib; commands that print work there."""

BLUE: Final = "#0072B2"
VERMILLION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#8A4F7D"
INK: Final = "#222222"
FAINT: Final = "#777777"
"""Okabe–Ito colours, which colour-blind readers can distinguish; the purple is darker, so that text in it is readable."""

COLOURS: Final = (BLUE, VERMILLION, GREEN, PURPLE, "#E69F00", "#56B4E9", INK)
MARKERS: Final = "os^Dv"
COLUMN: Final = (7.6, 5.2)
"""Width and height in inches of a picture as wide as a column of a page."""
FORMATS: Final = (".png", ".pdf", ".svg")
DPI: Final = 300
GRID: Final = 300
"""Number of computes at which a band is evaluated."""
MAX_BARS: Final = 400
"""More points than this are drawn as small dots without error bars."""
Z90: Final = 1.645
UNIT: Final = RewardScale(0.0, 1.0)
_DASHED: Final = (0, (4, 3))
_DOTTED: Final = (0, (1, 2))

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
    """Raise AnalysisProblem unless a picture can be written to ``path``; called before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise AnalysisProblem(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
    if path.is_dir():
        raise AnalysisProblem(f"{path}: a directory; name a file in it")
    if not path.parent.is_dir():
        raise AnalysisProblem(f"{path}: no such directory {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise AnalysisProblem(f"{path}: {NO_MATPLOTLIB}")


def style() -> AbstractContextManager[None]:
    """Context manager that applies the style of the pictures, independently of the user's matplotlib settings."""
    import matplotlib

    context: AbstractContextManager[None] = matplotlib.rc_context(
        {**matplotlib.rcParamsDefault, **_STYLE, "backend": "agg"}
    )
    return context


@contextmanager
def picture(
    path: str | Path, size: tuple[float, float] = COLUMN, panels: tuple[int, int] = (1, 1), **options: Any
) -> Iterator[Any]:
    """The array of the panels of a figure; at the end, the legend of the first one is drawn, and the figure is saved.

    Raises:
        AnalysisProblem: it cannot be written, or matplotlib is not installed.
    """
    path = Path(path)
    check_target(path)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(*panels, squeeze=False, **options)
        yield grid
        # Below the whole figure, where it does not cover anything.
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, columnspacing=1.6)
        save(figure, path)


def pen(number: int) -> tuple[str, str]:
    """Colour and marker of a recipe or run; those of the eighth on differ by their marker."""
    return COLOURS[number % len(COLOURS)], MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]


def save(figure: Any, path: Path) -> None:
    """Write a picture atomically, through a temporary file in the same directory.

    Raises:
        AnalysisProblem: the picture cannot be written.
    """
    staging = path.with_name(f".{path.stem}.new{path.suffix.lower()}")
    # No date and no version in the file: the same points give the same picture.
    metadata: dict[str, None] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(
        path.suffix.lower(), {}
    )
    try:
        small = {"pil_kwargs": {"optimize": True}} if staging.suffix == ".png" else {}
        figure.savefig(staging, dpi=DPI, metadata=metadata, **small)
        os.replace(staging, path)
    except OSError as error:
        raise AnalysisProblem(f"{path}: {error.strerror}") from error
    finally:
        staging.unlink(missing_ok=True)


def compute_axis(axes: Any, unit: str, low: float, high: float, *, log: bool = False) -> None:
    """Set scale, limits, tick labels and label of the compute axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(lambda value, _: formatting.amount(float(value)))
    of = ", ".join(filter(None, (unit, "logarithmic" if log else "")))
    axes.set_xlabel(f"compute ({of})" if of else "compute")


def reward_axis(axes: Any, values: Sequence[float], scale: RewardScale = UNIT) -> None:
    """Set limits around ``values`` within the scale, tick labels with enough digits to differ, and the label of the axis."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(values), max(values)
    pad, rim = 0.06 * max(high - low, 0.05 * scale.size), 0.005 * scale.size
    axes.set_ylim(max(low - pad, scale.low - rim), min(high + pad, scale.high + rim))
    locator = MaxNLocator(nbins=7, steps=[1, 2, 5, 10])
    step = float(np.diff(locator.tick_values(*axes.get_ylim()))[0])
    digits = max(scale.digits(2), int(np.ceil(-np.log10(step) - 1e-9)))
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(lambda value, _: formatting.reward(float(value), digits))
    axes.set_ylabel(f"mean evaluation reward ({scale.low:g} to {scale.high:g})")


def mark_compute(axes: Any, compute: float, colour: str, label: str) -> None:
    """Draw a vertical line that the legend names."""
    axes.axvline(compute, color=colour, lw=0.9, ls=_DASHED, zorder=1, label=label)


def mark_reward(axes: Any, reward: float, colour: str, label: str) -> None:
    """Draw a horizontal line that the legend names."""
    axes.axhline(reward, color=colour, lw=0.9, ls=_DOTTED, zorder=1, label=label)


def edge_bar(axes: Any, shown: formatting.Interval, colour: str, *, upper: bool, at: float = 1.008) -> None:
    """Draw an interval as a bar on the ``upper`` edge, or beside the right one, as far as it lies within the axes."""
    limits = axes.get_xlim() if upper else axes.get_ylim()
    ends, place = np.clip([shown.low, shown.high], *limits), [at, at]
    axes.plot(
        *((ends, place) if upper else (place, ends)),
        transform=axes.get_xaxis_transform() if upper else axes.get_yaxis_transform(),
        color=colour,
        lw=3.0,
        clip_on=False,
        solid_capstyle="butt",
        zorder=2.5,
    )


def wilson(reward: FloatArray, samples: FloatArray) -> tuple[FloatArray, FloatArray]:
    """90 % Wilson intervals (low, high) of pass rates, all (n,); their width is positive at 0 and 1 too."""
    share = Z90**2 / samples
    centre = (reward + share / 2.0) / (1.0 + share)
    half = Z90 * np.sqrt(reward * (1.0 - reward) / samples + share / (4.0 * samples)) / (1.0 + share)
    return np.minimum(centre - half, reward), np.maximum(centre + half, reward)


def draw_points(
    axes: Any,
    curve: Curve,
    scale: RewardScale,
    start: float,
    colour: str,
    label: str | None,
    marker: str = "o",
    burn_in: int = 0,
    burn_in_label: str | None = None,
    *,
    bars: bool = True,
) -> None:
    """Draw the evaluations, with binomial error bars where the number of samples is known.

    Args:
        start: compute that is added to the compute of the curve.
        burn_in: number of first points at compute > 0 that are the burn-in of the fit; they are hollow.
    """
    compute, reward = curve.compute + start, scale.level(curve.reward)
    if len(curve) > MAX_BARS:
        # Behind the curve, which the dots would hide.
        axes.plot(compute, reward, ".", color=colour, ms=2, alpha=0.15, mew=0, zorder=1.4, rasterized=True)
        axes.plot([], [], ".", color=colour, ms=5, mew=0, label=label)
        return
    errors = None
    if bars and curve.samples is not None:
        low, high = wilson(curve.reward, curve.samples)
        errors = scale.change(np.stack([curve.reward - low, high - curve.reward]))
    hollow = slice(curve.first_trained, curve.first_trained + burn_in)
    filled = np.ones(len(curve), dtype=bool)
    filled[hollow] = False
    marks: list[tuple[Any, dict[str, Any]]] = [(filled, {"mew": 0, "label": label})]
    if burn_in:
        marks.append((~filled, {"mew": 0.9, "mfc": "white", "mec": colour, "label": burn_in_label}))
    for shown, mark in marks:
        axes.errorbar(
            compute[shown],
            reward[shown],
            yerr=None if errors is None else errors[:, shown],
            fmt=marker,
            ms=3.6,
            color=colour,
            ecolor=colour,
            elinewidth=0.8,
            capsize=0,
            alpha=0.85,
            zorder=3,
            **mark,
        )


def draw_earlier(axes: Any, file: CurveFile, label: str | None) -> None:
    """Draw the points before the last segment, which are not fitted."""
    before = file.curve.head(len(file.curve) - len(file.segment.curve))
    rewards = RewardScale(*file.curve.scale).level(before.reward)
    axes.plot(before.compute, rewards, "o", ms=3, mew=0, color=FAINT, alpha=0.5, label=label)


def draw_fitted_curve(axes: Any, made: FittedCurve, grid: FloatArray) -> list[float]:
    """Draw points, bands at compute (c,), late rises and what is not fitted; returns rewards for the limits of the axis."""
    scale, curve, burn_in = made.scale, made.file.segment.curve, made.fitted.burn_in_points
    bands = scale.level(made.bands(grid))
    draw_bands(axes, grid, bands, BLUE, "median: fitted curve, then forecast")
    if made.state is not State.BROKEN:
        draw_late_rises(axes, made, grid)
    if made.file.segments > 1:
        draw_earlier(axes, made.file, "earlier recipe or evaluation, not fitted")
    label = f"{len(curve):,} evaluations{samples_text(curve)}"
    hollow = f"the first {burn_in:,}: burn-in"
    draw_points(axes, curve, scale, made.start, INK, label, burn_in=burn_in, burn_in_label=hollow)
    if made.fallen:
        axes.plot(
            curve.compute[-made.fallen :] + made.start,
            scale.level(curve.reward[-made.fallen :]),
            "x",
            ms=6,
            color=VERMILLION,
            label=f"the last {made.fallen:,}, after the fall: not fitted",
            zorder=3.5,
        )
    return [*scale.level(made.file.curve.reward), *extent(curve, scale), *bands.ravel()]


def draw_forecasts(
    axes: Any, compute: Sequence[float], drawn: Sequence[Estimate], label: str, marker: str = "D"
) -> list[float]:
    """Draw forecasts of an evaluation, including its noise, as they are printed; returns rewards for the limits of the axis."""
    median = np.array([point.median for point in drawn])
    below = median - np.array([point.low for point in drawn])
    above = np.array([point.high for point in drawn]) - median
    axes.errorbar(
        compute,
        median,
        yerr=np.stack([below, above]),
        fmt=marker,
        ms=5,
        color=VERMILLION,
        mfc="white",
        mew=1.3,
        capsize=3,
        elinewidth=1.3,
        zorder=4,
        label=label,
    )
    return [end for point in drawn for end in (point.low, point.high)]


def samples_text(curve: Curve) -> str:
    """Description of the error bars for the legend; empty without error bars."""
    if curve.samples is None or len(curve) > MAX_BARS:
        return ""
    low, high = int(curve.samples.min()), int(curve.samples.max())
    count = formatting.amount(low) if low == high else f"{formatting.amount(low)}–{formatting.amount(high)}"
    return f", 90 % binomial bars ({count} samples each)"


def extent(curve: Curve, scale: RewardScale) -> list[float]:
    """Lowest and highest reward of the drawn points, including their error bars."""
    if curve.samples is None or len(curve) > MAX_BARS:
        low, high = curve.reward, curve.reward
    else:
        low, high = wilson(curve.reward, curve.samples)
    return [scale.level(float(low.min())), scale.level(float(high.max()))]


def draw_bands(
    axes: Any,
    compute: FloatArray,
    bands: FloatArray,
    colour: str,
    median: str | None = None,
    *,
    inner: bool = True,
) -> None:
    """Draw median, 90 % band and, if ``inner``, the 50 % band; they are in the legend only if ``median`` names them."""
    named = median is not None
    drawn = [(0, 4, 0.15 if inner else 0.1, "90 % interval of the curve")]
    drawn += [(1, 3, 0.28, "50 % interval")] if inner else []
    for low, high, alpha, name in drawn:
        label = name if named else None
        axes.fill_between(
            compute, bands[low], bands[high], color=colour, alpha=alpha, lw=0, label=label, zorder=1.5
        )
    axes.plot(compute, bands[2], color=colour, lw=1.6, label=median, zorder=2)


def draw_late_rises(axes: Any, made: FittedCurve, compute: FloatArray) -> None:
    """Draw where runs that rise late go beyond now; it does not enlarge the axes."""
    ahead = compute[compute > made.now]
    low, high = made.scale.level(made.after_late_rise(ahead))
    rate = formatting.reward(made.fitted.pool.mean_late_rise, 3)
    axes.fill_between(
        ahead,
        low,
        high,
        facecolor="none",
        edgecolor=PURPLE,
        hatch="....",
        alpha=0.25,
        lw=0,
        label=f"after a late rise (probability {rate} a doubling), 90 %",
        zorder=1.2,
    )
