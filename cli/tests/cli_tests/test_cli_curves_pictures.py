"""What all pictures share: numbers on axes, names that keep apart, fonts that a venue takes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from scalerl_cli.curves import canvas, plan_picture
from scalerl_cli.main import main


@pytest.fixture
def axes() -> Any:
    with canvas.style():
        yield Figure(figsize=(7.6, 5.2)).add_subplot()


def texts(labels: list[Any]) -> list[str]:
    return [label.get_text() for label in labels]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.58, 0.61), (0.6, 0.601), (0.2, 0.64)])
def test_no_number_of_the_reward_axis_stands_there_twice(axes: Any, low: float, high: float) -> None:
    canvas.reward_axis(axes, [low, high])
    axes.figure.canvas.draw()
    said = texts(axes.get_yticklabels())
    assert len(said) > 3
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("high", [1e4, 3e6, 1e14, 2e15, 1e23, 2.4e25, 1e300])
def test_computes_of_any_size_are_short_and_apart(axes: Any, high: float, log: bool) -> None:
    canvas.compute_axis(axes, "FLOPs", high / 100 if log else 0.0, high, log=log)
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
    assert ("10²³" in axes.get_xlabel()) == (high == 1e23 and not log)


def test_the_unit_may_be_unknown(axes: Any) -> None:
    canvas.compute_axis(axes, "", 0.0, 100.0)
    assert axes.get_xlabel() == "compute"


def test_names_of_many_near_computes_stand_one_above_the_other(axes: Any) -> None:
    canvas.compute_axis(axes, "tokens", 0.0, 100.0)
    rows = canvas.mark_computes(axes, [(50.0 + i, f"choice number {i}", canvas.INK) for i in range(7)])
    axes.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert rows == len(boxes) == 7
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_sixteen_pens_differ() -> None:
    assert len({plan_picture.pen(i) for i in range(16)}) == 16


def test_a_pdf_has_no_type_3_fonts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{100 * i},{0.2 + 0.4 / (1 + (800 / (100 * i)) ** 2):.4f}" for i in range(1, 41)]
    (tmp_path / "curve.csv").write_text("\n".join(["compute,reward", *rows]) + "\n")
    assert main(["fit", str(tmp_path / "curve.csv"), "--plot", str(tmp_path / "fit.pdf")]) == 0
    written = (tmp_path / "fit.pdf").read_bytes()
    assert b"/TrueType" in written or b"/CIDFontType2" in written
    assert b"/Type3" not in written
