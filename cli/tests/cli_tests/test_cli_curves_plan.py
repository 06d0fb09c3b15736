"""``scalerl plan``: what each choice gives and costs, against closed forms."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from curve_files import RATE, ink, write_plain, write_run

from scalerl_analysis import plotting
from scalerl_analysis.curve_file import read_curve
from scalerl_analysis.pace import pace_of
from scalerl_cli.curves import run_plan
from scalerl_cli.main import main, parser

WHEN = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)


def arguments(*given: str) -> argparse.Namespace:
    return parser().parse_args(["plan", "--from", *given])


def plan(capsys: pytest.CaptureFixture[str], *given: str) -> Any:
    assert run_plan(arguments(*given, "--json"), WHEN) == 0
    return json.loads(capsys.readouterr().out)


def test_lines_name_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_plain(tmp_path / "c.csv"))
    assert run_plan(arguments(curve), WHEN) == 0
    assert "give --rate or --device-hours-column" in capsys.readouterr().out
    main(["compare", "--dir", str(tmp_path / "compared"), "--x", "nope", curve, curve])
    assert "name the columns by --x and --y" in capsys.readouterr().out


def test_plan_rows_are_forecasts_of_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_plain(tmp_path / "c.csv"))
    got = plan(capsys, curve)
    stop, twice, four = got["options"]
    assert [o["option"] for o in got["options"]] == ["stop now", "2× compute", "4× compute"]
    assert (stop["gain"], stop["cost"], stop["date"], got["generators"]) == (None, None, None, [])
    assert four["compute"] == pytest.approx(4 * stop["compute"])
    assert main(["fit", curve, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["forecasts"][0]
    assert {"compute": twice["compute"], **twice["reward"]} == pytest.approx(first)
    assert twice["gain"]["low"] <= twice["gain"]["median"] <= four["gain"]["median"]


def test_costs_time_and_dates_follow_from_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10M tokens at 2M a device-hour: 5 device-hours on 2 devices take 2.5 h."""
    curve = str(write_run(tmp_path / "c.csv"))
    got = plan(capsys, curve, "--price", "3", "--value-per-point", "10", "--budget", "1", "40")
    assert got["compute_per_device_hour"] == pytest.approx(RATE, rel=1e-6)
    assert got["devices"] == pytest.approx(2.0)
    rows = {o["option"]: o for o in got["options"]}
    assert [o["option"] for o in got["options"]] == [
        "stop now",
        "+1 device-hours",
        "2× compute",
        "4× compute",
        "+40 device-hours",
    ]
    twice = rows["2× compute"]
    assert twice["device_hours"] == pytest.approx(5.0)
    assert twice["cost"] == pytest.approx(15.0)
    assert twice["date"] == "2026-03-04 14:30"
    assert twice["net"] == pytest.approx(1000 * twice["mean_gain"] - 15.0)
    assert rows["+1 device-hours"]["compute"] == pytest.approx(12e6)
    assert rows["stop now"]["cost"] == 0.0
    assert "+.5 device-hours" in [o["option"] for o in plan(capsys, curve, "--budget", "0.5")["options"]]


def test_growing_changes_the_time_and_not_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two devices, one of them a generator: with three generators four devices go 2^.8 as fast."""
    curve = str(write_run(tmp_path / "c.csv"))
    got = plan(capsys, curve, "--generators", "1,3", "--elasticity", "0.8")
    one, three = got["generators"]
    assert (one["speed"], one["devices"]) == (1.0, pytest.approx(2.0))
    assert three["speed"] == pytest.approx(2**0.8)
    twice = got["options"][1]
    assert one["options"][1]["wall_hours"] == pytest.approx(twice["wall_hours"])
    assert three["options"][1]["wall_hours"] == pytest.approx(twice["wall_hours"] / 2**0.8)
    assert three["options"][1]["device_hours"] == pytest.approx(twice["device_hours"] * 2**0.2)
    assert plan(capsys, curve)["options"] == got["options"]
    paid = [curve, "--generators", "1,3", "--elasticity", "0.8", "--price", "3", "--value-per-point", "10"]
    (one, three), stays = plan(capsys, *paid)["generators"], plan(capsys, *paid)["options"][1]
    assert one["options"][1]["net"] == pytest.approx(stays["net"])
    assert three["options"][1]["cost"] == pytest.approx(stays["cost"] * 2**0.2)
    assert run_plan(arguments(*paid), WHEN) == 0
    assert capsys.readouterr().out.count("value − cost") >= 3


def test_elasticity_is_measured_where_the_devices_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = write_run(tmp_path / "grown.csv", elasticity=0.75)
    assert pace_of(read_curve(grown)).elasticity == pytest.approx(0.75)
    assert pace_of(read_curve(write_run(tmp_path / "same.csv"))).elasticity is None
    pace = pace_of(read_curve(grown))
    assert pace.devices == pytest.approx(4.0)
    assert pace.rate == pytest.approx(RATE * 2**-0.25)
    assert run_plan(arguments(str(grown), "--generators", "2,4"), WHEN) == 0
    assert "elasticity .75, as measured" in capsys.readouterr().out


def test_best_block_ends_where_the_price_bites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_run(tmp_path / "c.csv"))
    dear = plan(capsys, curve, "--price", "1000", "--value-per-point", "1")["best_block"]
    cheap = plan(capsys, curve, "--price", "0.001", "--value-per-point", "100")["best_block"]
    assert dear == {"compute": 0.0, "gain": 0.0, "net": 0.0}
    assert cheap["compute"] > 1e7
    assert run_plan(arguments(curve, "--price", "1000", "--value-per-point", "1"), WHEN) == 0
    assert "best further block: none" in capsys.readouterr().out


def test_broken_run_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve, picture = str(write_run(tmp_path / "c.csv", collapse=0.06)), tmp_path / "out.png"
    got = plan(capsys, curve, "--plot", str(picture), "--generators", "1,2", "--elasticity", "0.8")
    assert (got["state"], got["options"], got["best_block"]) == ("BROKEN", [], None)
    assert "below the best of 3 in a row" in got["doubts"][0]
    assert ink(picture) > 0.01
    assert run_plan(arguments(curve), WHEN) == 0
    assert "no plan" in capsys.readouterr().out


def test_young_run_is_planned_with_its_doubts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(arguments(str(write_plain(tmp_path / "c.csv", reach=0.6))), WHEN) == 0
    shown = capsys.readouterr().out
    assert "INSUFFICIENT" in shown
    assert "90 % interval of A" in shown


def test_young_run_has_no_spending_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_plain(tmp_path / "c.csv", reach=0.6))
    more = ["--rate", "100", "--price", "0.01", "--value-per-point", "10"]
    assert run_plan(arguments(curve, *more), WHEN) == 0
    assert "INSUFFICIENT: do not spend by it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--budget", "5"], "--rate"),
        (["--price", "5"], "--rate"),
        (["--value-per-point", "5"], "--value-per-point needs --price, the cost"),
        (["--generators", "1,2", "--elasticity", "0.8"], "--rate"),
        (["--generators", "1,2", "--elasticity", "0.8", "--rate", "100"], "--devices"),
        (["--generators", "1,2", "--rate", "100", "--devices", "2"], "--elasticity"),
        (
            ["--generators", "4,1", "--elasticity", ".8", "--rate", "100", "--devices", "3"],
            "leave 0 of the present 3 devices",
        ),
    ],
)
def test_plan_requests_missing_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    curve, picture = str(write_plain(tmp_path / "c.csv")), tmp_path / "out.png"
    assert main(["plan", "--from", curve, "--plot", str(picture), *more]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n"), picture.exists()) == ("", 1, False)
    assert words in said.err


def test_picture_is_one_panel_a_column_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = plotting.save
    monkeypatch.setattr(plotting, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    curve, picture = str(write_run(tmp_path / "c.csv")), tmp_path / "out.png"
    more = ["--price", "1", "--value-per-point", "2", "--generators", "1,2", "--elasticity", "0.8"]
    assert run_plan(arguments(curve, "--plot", str(picture), *more), WHEN) == 0
    (choices,) = figures[0].axes
    assert tuple(figures[0].get_size_inches()) == plotting.COLUMN
    assert "completion tokens" in choices.get_xlabel()
    written = " | ".join(choices.get_legend_handles_labels()[1])
    for part in ("stop now", "2× compute: .6", ", cost 5", "4× compute: .6", ", cost 15", "| pays best: +"):
        assert part in written
    assert ink(picture) > 0.02


def test_dates_beyond_the_calendar_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_plain(tmp_path / "c.csv"))
    assert run_plan(arguments(curve, "--rate", "1e-9", "--devices", "1"), WHEN) == 0
    assert "beyond 9999" in capsys.readouterr().out
