"""What all pictures share: numbers on axes, names that keep apart, fonts that a venue takes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from curve_files import HEADER, write_plain, write_run
from matplotlib.figure import Figure

from scalerl_analysis import (
    AnalysisProblem,
    Columns,
    compare,
    draw_comparison,
    draw_fit,
    draw_plan,
    draw_run,
    fit_curve,
    plan,
    plotting,
    read_curve,
)
from scalerl_analysis.pictures import budget_compute
from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_curvefit import forecast_pool


@pytest.fixture
def axes() -> Any:
    with plotting.style():
        yield Figure(figsize=(7.6, 5.2)).add_subplot()


def texts(labels: list[Any]) -> list[str]:
    return [label.get_text() for label in labels]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.58, 0.61), (0.6, 0.601), (0.2, 0.64)])
def test_reward_axis_has_no_duplicate_labels(axes: Any, low: float, high: float) -> None:
    plotting.reward_axis(axes, [low, high])
    axes.figure.canvas.draw()
    said = texts(axes.get_yticklabels())
    assert len(said) > 3
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("high", [1e4, 3e6, 1e14, 2e15, 1e23, 2.4e25, 1e300])
def test_computes_of_any_size_are_short_and_apart(axes: Any, high: float, log: bool) -> None:
    plotting.compute_axis(axes, "FLOPs", high / 100 if log else 0.0, high, log=log)
    axes.figure.canvas.draw()
    left, right = axes.get_xlim()
    inside = [
        label
        for label in axes.get_xticklabels()
        if left <= label.get_position()[0] <= right and label.get_text()
    ]
    boxes = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in inside))
    assert len(boxes) > 2
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(boxes))
    assert "FLOPs" in axes.get_xlabel()


def test_unit_may_be_unknown(axes: Any) -> None:
    plotting.compute_axis(axes, "", 0.0, 100.0)
    assert axes.get_xlabel() == "compute"


def test_late_rises_are_no_step_of_the_bands(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "c.csv", n=40)
    made = fit_curve(read_curve(path), late_rises="games")
    grid = np.linspace(made.now, 4.0 * made.now, 200)
    upper = made.bands(grid)[4]
    step = np.diff(upper)
    assert step.max() < 4.0 * np.median(step) + 1e-3
    with_rises = np.quantile(forecast_pool(made.fitted).reward(grid), 0.95, axis=0)
    assert with_rises[-1] > upper[-1] + 0.05
    low, high = made.after_late_rise(grid[1:])
    assert (low > made.bands(grid[1:])[0]).all()
    assert (high > with_rises[1:] - 0.02).all()
    assert high.max() <= 1.0


def test_recipes_differ_by_colour_or_marker_and_have_intervals_of_a(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figures: list[Figure] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    paths = [write_plain(tmp_path / f"c{i}.csv", n=12 + i) for i in range(8)]
    draw_comparison(compare({path.name: [path] for path in paths}), Path("comparison.png"))
    linear, log = figures[0].axes
    drawn = zip(*linear.get_legend_handles_labels(), strict=True)
    pens = [(bars[0].get_color(), bars[0].get_marker()) for bars, name in drawn if name.startswith("c")]
    assert len(set(pens)) == len(pens) == 8
    assert len({marker for _, marker in pens[:5]}) == 5
    assert len(linear.collections) == 8
    bars = [line for line in log.lines if line.get_transform() == log.get_yaxis_transform()]
    assert len([bar for bar in bars if len(bar.get_xdata()) == 2]) == 8
    bottom, top = log.get_ylim()
    assert all(bottom <= y <= top for bar in bars for y in bar.get_ydata())


def drawn(
    monkeypatch: pytest.MonkeyPatch, what: str, path: Path, scale: tuple[float, float] = (0.0, 1.0)
) -> Figure:
    """The figure of the fit, the plan, or the comparison of a file with itself."""
    figures: list[Figure] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    columns = Columns(scale=scale)
    made, picture = fit_curve(read_curve(path, columns)), path.with_name("out.png")
    if what == "fit":
        draw_fit(made, picture)
    elif what == "plan":
        draw_plan(plan(made), picture)
    else:
        draw_comparison(compare({path.name: [path], str(path): [path]}, columns), picture)
    (figure,) = figures
    return figure


def legend(figure: Figure) -> str:
    return " | ".join(texts(figure.legends[0].get_texts()))


def hollow(figure: Figure, n: int) -> list[bool]:
    """For each panel whether it has ``n`` hollow points."""
    return [
        any(line.get_markerfacecolor() == "white" and len(line.get_xdata()) == n for line in panel.lines)
        for panel in figure.axes
    ]


def test_points_of_the_burn_in_are_hollow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the first at compute above 0, on every picture."""
    path = write_run(tmp_path / "c.csv")
    burnt = fit_curve(read_curve(path)).fitted.burn_in_points
    assert burnt > 0
    for what in ("fit", "plan"):
        figure = drawn(monkeypatch, what, path)
        assert f"the first {burnt}: burn-in" in legend(figure)
        assert hollow(figure, burnt) == [True]
        (points,) = [
            line.get_xdata() for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"
        ][:1]
        assert float(np.asarray(points)[0]) > 0.0
    both = drawn(monkeypatch, "compare", path)
    assert "hollow: burn-in" in legend(both)
    assert hollow(both, burnt) == [True, True]


def test_curve_without_a_burn_in_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_plain(tmp_path / "c.csv", n=6)
    assert fit_curve(read_curve(path)).fitted.burn_in_points == 0
    assert "burn-in" not in legend(drawn(monkeypatch, "fit", path))


@pytest.mark.parametrize(
    ("ill", "named"), [({}, False), ({"truncated": 0.25}, False), ({"collapse": 0.06}, True)]
)
def test_fall_is_labelled_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ill: dict[str, float], named: bool
) -> None:
    path = write_run(tmp_path / "c.csv", **ill)
    for what in ("fit", "plan"):
        assert ("after the fall" in legend(drawn(monkeypatch, what, path))) is named


def test_pictures_are_on_the_scale_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A percent file looks as its pass rates do, with numbers a hundred times as large."""
    rate, percent = write_plain(tmp_path / "rate.csv"), tmp_path / "percent.csv"
    rows = [line.split(",") for line in rate.read_text().splitlines()]
    percent.write_text("\n".join([",".join(rows[0]), *(f"{c},{100 * float(r)}" for c, r in rows[1:])]))
    for what in ("fit", "plan"):
        one = drawn(monkeypatch, what, rate)
        two = drawn(monkeypatch, what, percent, (0.0, 100.0))
        assert np.allclose(np.multiply(one.axes[0].get_ylim(), 100), two.axes[0].get_ylim(), atol=1.0)
        assert two.axes[0].get_ylabel() == "mean evaluation reward (0 to 100)"
        two.canvas.draw()
        assert "60" in texts(two.axes[0].get_yticklabels())
    both = drawn(monkeypatch, "compare", percent, (0.0, 100.0))
    assert both.axes[0].get_ylim()[1] > 60
    assert "percent.csv: A 6" in legend(both) or f"{percent}: A 6" in legend(both)


def test_pdf_has_no_type_3_fonts(tmp_path: Path) -> None:
    rows = [f"{100 * i},{0.2 + 0.4 / (1 + (800 / (100 * i)) ** 2):.4f}" for i in range(1, 41)]
    (tmp_path / "curve.csv").write_text("\n".join(["compute,reward", *rows]) + "\n")
    draw_fit(fit_curve(read_curve(tmp_path)), tmp_path / "fit.pdf")
    written = (tmp_path / "fit.pdf").read_bytes()
    assert b"/TrueType" in written or b"/CIDFontType2" in written
    assert b"/Type3" not in written


# --- a run ---------------------------------------------------------------------------------------

RUN = parse_run(
    """
metadata: {name: pictured}
spec:
  model: {scratch: {}}
  task: {reasoningGym: {name: chain_sum}, verifier: {name: reasoning-gym}}
  budget: {maxSteps: 100}
""",
    "test",
)


def write_curve(paths: RunPaths, points: list[tuple[float, float, int]]) -> None:
    paths.curve.write_text(
        HEADER + "".join(f"{c},{r},256,0.01,{v},1.0,3.0,5.0,0.0,False\n" for c, r, v in points)
    )


def test_plot_shows_error_bars_units_fit_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    paths = RunPaths(tmp_path)
    write_curve(paths, [(100.0 * v, 0.2 + 0.4 / (1 + (8 / (v or 0.1)) ** 2), v) for v in range(0, 60, 5)])
    draw_run(paths, RUN)
    [figure] = figures
    axes = figure.axes[0]
    labels = " | ".join(text.get_text() for text in figure.legends[0].get_texts())
    assert "90 % binomial bars" in labels
    assert "fitted curve" in labels
    assert "90 % interval" in labels
    assert "budget 10,000" in labels
    assert "completion tokens" in axes.get_xlabel()
    assert axes.get_title(loc="left").startswith(RUN.metadata.name)


def test_plot_without_matplotlib_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    paths = RunPaths(tmp_path)
    write_curve(paths, [(1.0, 0.3, 1)])
    with pytest.raises(AnalysisProblem, match=r"curve\.png: pictures need matplotlib.*pip install"):
        draw_run(paths, RUN)


def test_plot_extrapolates_the_end_of_the_budget() -> None:
    assert budget_compute(5000.0, 25, 100) == 20_000.0
    assert budget_compute(5000.0, 25, 10) == 5000.0, "more steps than the budget now allows"
    assert budget_compute(5000.0, 0, 100) is None
    assert budget_compute(5000.0, 25, None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        (HEADER, "no point below the first line"),
        (HEADER + "1,x,256,0.01,0,1,3,5,0,False\n", "line 2"),
        ("compute,reward\n1,2\n", "line 2"),
    ],
)
def test_curve_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    paths = RunPaths(tmp_path)
    if text is not None:
        paths.curve.write_text(text)
    with pytest.raises(AnalysisProblem, match=words) as problem:
        draw_run(paths, RUN)
    assert "curve.csv" in str(problem.value)
