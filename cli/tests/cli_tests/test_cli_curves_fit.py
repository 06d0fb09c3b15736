"""``scalerl fit``: the answer as JSON, as text and as pictures."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from curve_files import EXAMPLES, RATE, has_colour, ink, write_plain, write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl_analysis import formatting, plotting
from scalerl_cli.main import main
from scalerl_curvefit import Estimate

from .fit_command import answer, text

KEYS = ["A", "B", "Cmid", "R0", "identifiable", "state", "forecasts"]


# --- JSON ----------------------------------------------------------------------------------------


def test_fit_of_a_shipped_curve(capsys: pytest.CaptureFixture[str]) -> None:
    """Golden: PPG on heist at 100 % of its run."""
    got = answer(capsys, str(EXAMPLES / "ppg_heist.csv"), "--at", "300", "50")
    assert list(got) == KEYS
    assert (got["identifiable"], got["state"]) == (True, "OK")
    for name, wanted, tolerance in (
        ("A", (0.788, 0.746, 0.852), 0.01),
        ("B", (2.27, 1.95, 2.58), 0.1),
        ("Cmid", (55.8, 52.6, 60.7), 1.0),
        ("R0", (0.186, 0.163, 0.206), 0.01),
    ):
        assert list(got[name]) == ["median", "low", "high"]
        np.testing.assert_allclose(list(got[name].values()), wanted, atol=tolerance, err_msg=name)
    ahead = got["forecasts"]
    assert [list(point) for point in ahead] == [["compute", "median", "low", "high"]] * 3
    assert [point["compute"] for point in ahead] == [200.0, 300.0, 50.0]
    np.testing.assert_allclose(
        [ahead[0][k] for k in ("median", "low", "high")], (0.759, 0.725, 0.827), atol=0.015
    )
    assert ahead[2]["median"] == pytest.approx(0.45, abs=0.01)


def test_shipped_curves_equal_the_data_set() -> None:
    curves = json.loads((EXAMPLES.parent / "procgen_curves.json").read_text())["curves"]
    for name, key in (
        ("ppg_heist", "ppg-run2_heist"),
        ("ppg_leaper", "ppg-run0_leaper"),
        ("ppo_leaper", "ppo-run2_leaper"),
    ):
        with (EXAMPLES / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert not curves[key]["held_out"]
        for column in ("compute", "reward"):
            assert [float(row[column]) for row in rows] == curves[key][column]


def test_young_run_is_insufficient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, str(write_plain(tmp_path / "c.csv", reach=0.5, n=8)))
    assert (got["identifiable"], got["state"], len(got["forecasts"])) == (False, "INSUFFICIENT", 1)


@pytest.mark.parametrize("broken", [{"collapse": 0.06}, {"truncated": 0.25}])
def test_broken_run_gets_no_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: dict[str, float]
) -> None:
    path, picture = str(write_run(tmp_path / "c.csv", **broken)), tmp_path / "out.png"
    assert main(["fit", path, "--json", "--at", "1e7", "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    got = json.loads(said.out)
    assert list(got) == KEYS
    assert (got["identifiable"], got["state"], got["forecasts"]) == (False, "BROKEN", [])
    why = "cut off at the length limit" if "truncated" in broken else "below the best of 3 in a row"
    assert why in said.err
    assert ink(picture) > 0.01
    shown = text(capsys, path, "--target", "0.6", "--budget", "2e7")
    assert why in shown
    assert "no forecast" in shown
    assert "still to be gained" not in shown
    assert "2e7" not in shown


def test_last_recipe_is_fitted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe from compute 5,000 on is fitted from there, and forecast on the file's axis."""
    alone = write_plain(tmp_path / "alone.csv")
    rows = [line.split(",") for line in alone.read_text().splitlines()[1:]]
    old = "".join(f"{c},{0.1 + c / 1e5},old,v1\n" for c in range(500, 5001, 500))
    new = "".join(f"{float(c) + 5000},{r},new,v1\n" for c, r in rows)
    path = tmp_path / "both.csv"
    path.write_text("compute,reward,recipe,eval_version\n" + old + new)
    one, both = answer(capsys, str(alone)), answer(capsys, str(path))
    for name in ("A", "B", "R0", "Cmid"):
        assert both[name]["median"] == pytest.approx(one[name]["median"], rel=0.03)
    assert both["forecasts"][0]["compute"] == pytest.approx(one["forecasts"][0]["compute"] + 5000)
    shown = text(capsys, str(path), "--plot", str(tmp_path / "out.png"))
    assert "last of 2 segments is fitted, from line 12 on" in shown
    assert "start of this recipe at 5,000" in shown
    assert main(["fit", str(path), "--at", "4000"]) == 2
    assert "begins at 5000" in capsys.readouterr().err


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(4, 50),
    seed=st.integers(0, 10_000),
    unit=st.sampled_from([1e-6, 1.0, 1e12]),
    samples=st.sampled_from([None, 16, 4000]),
    jump=st.booleans(),
)
def test_any_valid_curve_has_ordered_intervals(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    n: int,
    seed: int,
    unit: float,
    samples: int | None,
    jump: bool,
) -> None:
    random = np.random.default_rng(seed)
    compute = np.cumsum(random.uniform(0.1, 3.0, n)) * unit
    reward = np.clip((np.arange(n) > n // 2) * 0.5 * jump + random.uniform(0, 0.4, n), 0, 1)
    rows = [f"{c},{r}" + (f",{samples}" if samples else "") for c, r in zip(compute, reward, strict=True)]
    path = tmp_path / "any.csv"
    path.write_text("\n".join(["compute,reward" + (",samples" if samples else ""), *rows]) + "\n")
    at = [f"{compute[-1] / 3}", f"{compute[-1] * 50}"]
    got = answer(capsys, str(path), "--at", *at)
    assert list(got) == KEYS
    assert got["state"] in ("INSUFFICIENT", "OK", "BROKEN")
    assert got["identifiable"] is (got["state"] == "OK")
    assert len(got["forecasts"]) == (0 if got["state"] == "BROKEN" else 3)
    for interval in [*(got[name] for name in ["A", "B", "Cmid", "R0"]), *got["forecasts"]]:
        assert interval["low"] <= interval["median"] <= interval["high"]
    assert all(point["low"] >= 0 and point["high"] <= 1 for point in got["forecasts"])
    assert main(["fit", str(path), "--target", "0.7"]) == 0
    assert "nan" not in capsys.readouterr().out


def test_json_answers_all_that_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_plain(tmp_path / "c.csv"))
    got = answer(capsys, path, "--at", "3e4", "--budget", "4e4", "--target", "0.6")
    assert [point["compute"] for point in got["forecasts"][1:]] == [3e4, 4e4]
    assert got["target"]["reward"] == 0.6
    assert 0 < got["target"]["low"] < got["target"]["median"]
    assert 0 < got["target"]["probability"] <= 1
    assert answer(capsys, path, "--target", "0.9")["target"]["median"] is None


# --- text ----------------------------------------------------------------------------------------


def test_text_matches_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_plain(tmp_path / "c.csv"))
    got, shown = answer(capsys, path), text(capsys, path, "--unit", "GPU-hours")
    first = got["forecasts"][0]
    headline = formatting.rewards(Estimate(first["median"], first["low"], first["high"]))
    assert f"reward at 2× compute: {headline}" in shown
    for name in ("A", "B", "Cmid", "R0"):
        assert any(line.split()[:1] == [name] and "(" in line for line in shown.splitlines())
    assert "GPU-hours" in shown
    assert "state: OK" in shown
    assert "per unit of compute" in shown
    assert "docs/forecast.md" in shown


@pytest.mark.parametrize(
    ("more", "per_device_hour"),
    [
        (["--target", "0.605"], True),
        (["--rate", "500"], True),
    ],
)
def test_own_run_has_its_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], per_device_hour: bool
) -> None:
    shown = text(capsys, str(write_run(tmp_path / "c.csv")), *more)
    assert ("at the margin, per device-hour" in shown) is per_device_hour
    rate = "500" if "--rate" in more else formatting.amount(RATE)
    assert f"compute per device-hour: {rate} completion tokens" in shown
    assert ("reached at all with probability" in shown) is ("--target" in more)


def test_named_column_of_device_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_plain(tmp_path / "c.csv").read_text().splitlines()
    rows = [plain[0] + ",gpu_h"] + [f"{row},{float(row.split(',')[0]) / 250}" for row in plain[1:]]
    path = tmp_path / "hours.csv"
    path.write_text("\n".join(rows))
    assert "per unit of compute" in text(capsys, str(path))
    assert "compute per device-hour: 250" in text(capsys, str(path), "--device-hours-column", "gpu_h")


def test_edges_and_scales_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.csv"
    path.write_text("compute,reward\n" + "".join(f"{c},{2 * c - 80}\n" for c in range(1, 41)))
    shown = text(capsys, str(path), "--scale=-100,100")
    assert "prior bound met: A high" in shown
    assert "rewards are on the scale of the file, -100 to 100" in shown
    assert "state: INSUFFICIENT" in shown
    assert "half of the gain still lies ahead" in shown


# --- pictures ------------------------------------------------------------------------------------


def test_plot_has_points_bands_and_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_run(tmp_path / "c.csv"))
    pictures = [tmp_path / "a.png", tmp_path / "b.png"]
    for picture in pictures:
        text(capsys, curve, "--plot", str(picture), "--budget", "1.5e7", "--target", "0.55")
    assert ink(pictures[0]) > 0.02
    for colour in (plotting.BLUE, plotting.VERMILLION, plotting.GREEN, plotting.PURPLE, plotting.INK):
        assert has_colour(pictures[0], colour), colour
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_plot_text_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels carry the numbers, the units and what each mark is."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure))
    curve = str(write_run(tmp_path / "c.csv"))
    assert main(["fit", curve, "--plot", str(tmp_path / "out.png"), "--budget", "1.5e7", "--log"]) == 0
    (figure,) = figures
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "compute (completion tokens, logarithmic)"
    assert "reward" in axes.get_ylabel()
    legend = " | ".join(label.get_text() for label in figure.legends[0].get_texts())
    for part in ("90 % interval", "50 %", "median", "evaluations, 90 % binomial bars (1,000", "at 2×: ."):
        assert part in legend
    for part in ("| A .", "| Cmid ", "| now", "| budget"):
        assert part in legend
    assert "B " in axes.get_title(loc="left")


@pytest.mark.parametrize("suffix", ["pdf", "svg"])
def test_pictures_for_print(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    picture = tmp_path / f"out.{suffix}"
    text(capsys, str(write_plain(tmp_path / "c.csv")), "--plot", str(picture))
    assert picture.stat().st_size > 5000


def test_error_bars_are_wilson_intervals() -> None:
    """8 of 10 and 0 of 10 at 90 %, against the closed form; a rate of 0 keeps a bar."""
    low, high = plotting.wilson(np.array([0.8, 0.0]), np.array([10.0, 10.0]))
    np.testing.assert_allclose(low, [0.541, 0.0], atol=2e-3)
    np.testing.assert_allclose(high, [0.931, 0.213], atol=2e-3)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1234.5, "1,234"),
        (2.5, "2.5"),
        (1e6, "1M"),
        (12_345_678, "12.35M"),
        (3.1e-7, "3.1e−7"),
        (-0.5, "−.5"),
        (0.04, ".04"),
        (10.5, "10.5"),
    ],
)
def test_amounts(value: float, shown: str) -> None:
    assert formatting.amount(value) == shown


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        ((0.62, 0.60, 0.64), ".62 (.60–.64)"),
        ((0.6123, 0.61, 0.615), ".612 (.610–.615)"),
        ((0.02, -0.05, 1.0), ".02 (−.05 to 1.00)"),
    ],
)
def test_rewards(interval: tuple[float, float, float], shown: str) -> None:
    assert formatting.rewards(Estimate(*interval)) == shown


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        ((2542.0, 2301.0, 2900.0), "2,540 (2,300–2,900)"),
        ((1.52e6, 131_264.0, 1.032e7), "1.52M (130,000–10.32M)"),
        ((0.5, 0.02, 42_000.0), ".5 (.02–42,000)"),
    ],
)
def test_intervals_of_amounts(interval: tuple[float, float, float], shown: str) -> None:
    assert formatting.amounts(Estimate(*interval)) == shown


INF = float("inf")


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        ((2542.0, 2301.0, 2900.0), "2,540 (2,300–2,900)"),
        ((20.0, 12.0, INF), "20 (12 to beyond 100× the compute so far)"),
        ((20.0, 12.0, 1e4), "20 (12 to beyond 100× the compute so far)"),
        ((INF, 42.0, INF), "not within 100× the compute so far (from 42 on with probability .05)"),
        ((INF, INF, INF), "not within 100× the compute so far"),
        ((1e9, 6e3, INF), "not within 100× the compute so far"),
    ],
)
def test_compute_that_is_further_than_the_code_looks(
    interval: tuple[float, float, float], shown: str
) -> None:
    assert formatting.reached(Estimate(*interval), 50.0) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0.23 wide, more than 0.15", ".23 wide, more than .15"),
        ("10.5, 1,000.25 and 0", "10.5, 1,000.25 and 0"),
        ("−0.4 to 0.2", "−.4 to .2"),
    ],
)
def test_numbers_below_one_have_no_zero(text: str, shown: str) -> None:
    assert formatting.plain(text) == shown


# --- scales --------------------------------------------------------------------------------------


def on_scale(path: Path, low: float, high: float) -> Path:
    rows = [line.split(",") for line in write_plain(path).read_text().splitlines()]
    mapped = (f"{c},{low + (high - low) * float(r)!r}" for c, r in rows[1:])
    path.write_text("\n".join([",".join(rows[0]), *mapped]))
    return path


@pytest.mark.parametrize(("low", "high"), [(0.0, 100.0), (-1.0, 1.0), (5.0, 5.5)])
def test_answers_are_on_the_scale_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], low: float, high: float
) -> None:
    size, scale = high - low, f"--scale={low},{high}"
    plain, mapped = str(write_plain(tmp_path / "one.csv")), str(on_scale(tmp_path / "two.csv", low, high))
    more = ["--at", "3e4", "--target"]
    one = answer(capsys, plain, *more, "0.6")
    two = answer(capsys, mapped, scale, *more, str(low + size * 0.6))
    for name in ("A", "R0"):
        wanted = [low + size * value for value in one[name].values()]
        np.testing.assert_allclose(list(two[name].values()), wanted, atol=0.01 * size)
    for name in ("B", "Cmid"):
        np.testing.assert_allclose(list(two[name].values()), list(one[name].values()), rtol=0.05)
    for first, second in zip(one["forecasts"], two["forecasts"], strict=True):
        wanted = [low + size * first[end] for end in ("median", "low", "high")]
        np.testing.assert_allclose([second[e] for e in ("median", "low", "high")], wanted, atol=0.02 * size)
    assert two["target"]["reward"] == low + size * 0.6
    assert two["target"]["probability"] == pytest.approx(one["target"]["probability"], abs=0.1)
    assert main(["plan", "--from", plain, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["options"]
    assert main(["plan", "--from", mapped, scale, "--json"]) == 0
    for first, second in zip(rows, json.loads(capsys.readouterr().out)["options"], strict=True):
        assert second["reward"]["median"] == pytest.approx(low + size * first["reward"]["median"], rel=0.01)
        if first["gain"]:
            assert second["gain"]["high"] == pytest.approx(size * first["gain"]["high"], abs=0.03 * size)


def test_text_uses_the_scale_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(on_scale(tmp_path / "c.csv", 0.0, 100.0))
    shown = text(capsys, path, "--scale=0,100", "--target", "60")
    got = answer(capsys, path, "--scale=0,100")
    a = got["A"]
    assert f"  A     {a['median']:.0f} ({a['low']:.0f}–{a['high']:.0f})" in shown
    assert "compute to a reward of 60.0" in shown
    noise = next(line for line in shown.splitlines() if "noise of one evaluation" in line)
    assert 0.2 < float(noise.split("sd ")[1].split(" ")[0]) < 2.0
    assert main(["fit", path, "--scale=0,100", "--target", "0"]) == 2
    assert "0 is not between 0 and 100, the lowest and the highest reward" in capsys.readouterr().err
    assert main(["fit", path, "--scale=0,100", "--target", "120"]) == 2
    capsys.readouterr()


def test_doubts_are_on_the_scale_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = write_plain(tmp_path / "c.csv", reach=0.6)
    rows = [line.split(",") for line in young.read_text().splitlines()]
    young.write_text("\n".join([",".join(rows[0]), *(f"{c},{100 * float(r)}" for c, r in rows[1:])]))
    shown = text(capsys, str(young), "--scale=0,100")
    warning = next(line for line in shown.splitlines() if "90 % interval of A is" in line)
    assert warning.endswith("wide, more than 15")
    assert float(warning.split(" is ")[1].split(" ")[0]) > 15


def test_broken_run_is_reported_on_the_files_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "c.csv", collapse=0.06)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for row in rows[1:]:
        row[1] = str(100 * float(row[1]))
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")
    shown = text(capsys, str(path), "--scale=0,100")
    assert "state: BROKEN" in shown
    said = next(line for line in shown.splitlines() if "below the best of 3 in a row" in line)
    newest, depth, best, noise = (
        float(re.search(pattern, said)[1])  # type: ignore[index]
        for pattern in (
            r"evaluations, ([\d.]+),",
            r"is ([\d.]+) below",
            r"row, ([\d.]+) at",
            r"explains ([\d.]+)$",
        )
    )
    assert 40 < newest < best < 62
    assert best - newest == pytest.approx(depth, abs=0.11)
    assert 0.1 < noise < depth
