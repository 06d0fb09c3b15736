"""``scalerl fit --compare``: which of two recipes is better, and when nobody can say."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalerl_cli.main import main

from .curve_files import EXAMPLES, answer, ink, text, write_plain, write_run


def test_recipes_are_distinguished_by_a(capsys: pytest.CaptureFixture[str]) -> None:
    ppg, ppo = str(EXAMPLES / "ppg_leaper.csv"), str(EXAMPLES / "ppo_leaper.csv")
    shown = text(capsys, ppo, "--compare", ppg)
    assert "the larger A is better" in shown
    assert "better: ppg_leaper.csv, by A" in shown
    assert "better: ppg_leaper.csv, by A" in text(capsys, ppg, "--compare", ppo)
    got = answer(capsys, ppo, "--compare", ppg)
    assert got["first"] == answer(capsys, ppo)
    assert got["second"] == answer(capsys, ppg)
    assert got["comparison"]["better"] == "second"
    assert got["comparison"]["by"] == "A"
    assert got["comparison"]["probability"] > 0.9


def test_recipes_of_one_asymptote_are_distinguished_by_b(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_plain(tmp_path / "one.csv", reach=8, n=60, seed=1)
    two = write_plain(tmp_path / "two.csv", reach=8, n=60, seed=1, cmid=2600.0)
    picture = tmp_path / "out.png"
    shown = text(capsys, str(one), "--compare", str(two), "--plot", str(picture))
    assert "fitted again at the mean A" in shown
    assert "by B" in shown
    assert "(not settled)" in shown
    assert ink(picture) > 0.01


def test_early_comparison_is_reported_as_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = write_plain(tmp_path / "early.csv", reach=0.6), write_plain(tmp_path / "late.csv")
    shown = text(capsys, str(early), "--compare", str(late))
    assert "do not rely on it yet\n  early.csv:" in shown
    assert "late.csv: 90 %" not in shown
    assert "undecided: a run is below its own midpoint" in shown
    assert "better:" not in shown
    got = answer(capsys, str(early), "--compare", str(late))["comparison"]
    assert (got["better"], got["probability"]) == ("undecided", None)


def test_broken_run_is_compared_without_a_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well, ill = write_run(tmp_path / "well.csv"), write_run(tmp_path / "ill.csv", collapse=0.06)
    shown = text(capsys, str(well), "--compare", str(ill), "--plot", str(tmp_path / "out.png"))
    assert "undecided: a run is BROKEN" in shown
    got = answer(capsys, str(well), "--compare", str(ill))
    assert got["comparison"]["better"] == "undecided"
    assert got["second"]["A"]["median"] == pytest.approx(got["first"]["A"]["median"], abs=0.02)


def test_file_against_itself_is_a_tie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(write_plain(tmp_path / "one.csv"))
    assert "no difference" in text(capsys, one, "--compare", one)
    got = answer(capsys, one, "--compare", one)["comparison"]
    assert (got["better"], got["probability"]) == ("tie", 0.5)


def test_asymptote_at_its_bound_is_a_doubt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight = tmp_path / "straight.csv"
    straight.write_text("compute,reward\n" + "".join(f"{c},{0.2 + 0.01 * c}\n" for c in range(1, 41)))
    shown = text(capsys, str(straight), "--compare", str(write_plain(tmp_path / "well.csv")))
    assert "straight.csv: A is at its high bound, 1, with probability " in shown
    rows = [line.split(",") for line in straight.read_text().splitlines()[1:]]
    straight.write_text("compute,reward\n" + "".join(f"{c},{100 * float(r)}\n" for c, r in rows))
    shown = text(capsys, str(straight), "--compare", str(straight), "--scale=0,100")
    assert "A is at its high bound, 100, with probability " in shown
    assert "prior bound met: A high (100) holds" in text(capsys, str(straight), "--scale=0,100")


def test_compare_answers_at_a_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(write_plain(tmp_path / "one.csv")), str(write_plain(tmp_path / "two.csv", seed=3))
    shown = text(capsys, one, "--compare", two, "--at", "3e4")
    assert any(line.split()[:2] == ["at", "30,000"] for line in shown.splitlines())
    refits = answer(capsys, one, "--compare", two)["comparison"]["refit_B"]
    assert refits is None or refits["first"]["low"] < refits["first"]["median"]
    for more in (["--target", "0.6"], ["--budget", "3e4"], ["--alternatives"], ["--log"]):
        assert main(["fit", one, "--compare", two, *more]) == 2
        assert f"{more[0]}: not with --compare" in capsys.readouterr().err
