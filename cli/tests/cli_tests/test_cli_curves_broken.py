"""A run that fell below its best: what ``scalerl fit`` says of it, which is what the autoscaler does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from curve_files import has_colour, write_run

from scalerl_analysis import plotting
from scalerl_analysis.curve_file import read_curve
from scalerl_analysis.fitted_curve import HEALTHY_TRUNCATED, State, fit_curve
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_autoscaling import alarm
from scalerl_cli.main import main
from scalerl_curvefit.collapse import LEAST

from .fit_command import answer, text


def write_sagging(path: Path, back: float = 0.0) -> Path:
    """A run whose reward falls by .1 ten evaluations before the end and stays there."""
    lines = write_run(path).read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    for i, row in enumerate(rows):
        after = i - (len(rows) - 12)
        row[1] = str(float(row[1]) - 0.05 * min(max(after, 0), 2) + back * (after > 8))
    path.write_text("\n".join([lines[0], *(",".join(row) for row in rows)]) + "\n")
    return path


def test_alarm_lasts_until_the_run_recovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fallen, back = write_sagging(tmp_path / "c.csv"), write_sagging(tmp_path / "back.csv", 0.12)
    got = answer(capsys, str(fallen))
    assert (got["state"], got["identifiable"], got["forecasts"]) == ("BROKEN", False, [])
    assert main(["fit", str(fallen)]) == 0
    assert "below the best of 3 in a row, ." in capsys.readouterr().out
    assert fit_curve(read_curve(back)).collapse is None
    assert main(["plan", "--from", str(fallen)]) == 0
    assert "no plan: the reward fell below its best" in capsys.readouterr().out


def test_fit_of_a_broken_run_ends_before_the_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    well = answer(capsys, str(write_run(tmp_path / "well.csv")))
    ill = write_run(tmp_path / "ill.csv", collapse=0.15)
    for name in ("A", "Cmid", "B"):
        assert answer(capsys, str(ill))[name]["median"] == pytest.approx(well[name]["median"], rel=0.06)
    made = fit_curve(read_curve(ill))
    assert made.collapse is not None
    assert (made.fallen, made.collapse.points) == (3, len(made.file.segment.curve) - 3)
    assert made.now == made.file.curve.now > made.fitted.now
    assert main(["fit", str(ill), "--plot", str(tmp_path / "out.png")]) == 0
    assert "only the 37 points before the fall" in capsys.readouterr().out
    assert has_colour(tmp_path / "out.png", plotting.VERMILLION)


def test_truncation_alarm_ends_below_its_lower_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "c.csv")
    lines = path.read_text().splitlines()

    def with_last(*rates: float) -> State:
        rows = [line.split(",") for line in lines]
        for row, rate in zip(rows[-len(rates) :], rates, strict=True):
            row[8] = str(rate)
        path.write_text("\n".join(",".join(row) for row in rows) + "\n")
        return fit_curve(read_curve(path)).state

    assert with_last(0.2, 0.04) is State.OK
    assert with_last(0.2, 0.07) is State.BROKEN
    assert with_last(0.09, 0.09) is State.OK
    assert with_last(0.2) is State.BROKEN
    assert main(["fit", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "no forecast: completions are cut off at the length limit" in shown
    assert "collapsed policy" not in shown


@pytest.mark.parametrize(
    ("before", "newest", "state"), [("0.01", "0.2", State.BROKEN), ("0.2", "0.01", State.OK)]
)
def test_truncation_counts_for_mixed_weights(tmp_path: Path, before: str, newest: str, state: State) -> None:
    """The autoscaler looks at the newest evaluation's, mixed or not."""
    path = write_run(tmp_path / "c.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[-2][8], rows[-1][8], rows[-1][9] = before, newest, "true"
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")
    assert fit_curve(read_curve(path)).state is state


def test_run_that_falls_from_its_start_has_no_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few points lie before the fall, so all are fitted, and the text does not claim otherwise."""
    path = tmp_path / "c.csv"
    path.write_text("compute,reward\n" + "".join(f"{c},{0.7 - 0.3 * c / 400}\n" for c in range(10, 410, 10)))
    said = text(capsys, str(path))
    assert "the run falls from its start: all points are fitted, by a curve that cannot fall" in said
    assert "before the fall" not in said
    assert "no forecast" in said


def test_bounds_are_those_of_the_autoscaler() -> None:
    assert pytest.approx(0.25 * float(AutoscalingSpec().min_gain)) == LEAST
    assert alarm.HEALTHY_TRUNCATED == HEALTHY_TRUNCATED


def test_past_forecast_far_above_the_outcome_is_a_doubt(tmp_path: Path) -> None:
    """A slow sag that no three evaluations show: the hindcast does."""
    random = np.random.default_rng(3)
    compute = np.linspace(250.0, 10_000.0, 40)
    reward = 0.2 + 0.4 / (1 + (2000.0 / compute) ** 2.5) - 0.06 * np.clip(compute / 5000 - 1, 0, 1)
    path = tmp_path / "c.csv"
    noisy = reward + random.normal(0.0, 0.006, 40)
    path.write_text("compute,reward\n" + "".join(f"{c},{r}\n" for c, r in zip(compute, noisy, strict=True)))
    made = fit_curve(read_curve(path))
    assert (made.state, made.fitted.warnings) == (State.INSUFFICIENT, ())
    assert "lies below 99% of the forecast made at 5,000" in made.warnings[0]
