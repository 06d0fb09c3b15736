"""``scalerl compare`` of curve files: which of two recipes is better, and when that cannot be decided."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from curve_files import EXAMPLES, ink, write_plain, write_run

from scalerl_cli.main import main


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Compares files; returns what is printed."""

    def compare(*words: str | Path) -> str:
        assert main(["compare", *map(str, words), "--dir", str(tmp_path / "compare")]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return compare


def second(tmp_path: Path) -> dict[str, str]:
    with (tmp_path / "compare/comparison.csv").open() as file:
        return list(csv.DictReader(file))[1]


def test_recipes_are_distinguished_by_a(tmp_path: Path, compared) -> None:
    ppg, ppo = EXAMPLES / "ppg_leaper.csv", EXAMPLES / "ppo_leaper.csv"
    assert (
        "ppg_leaper.csv against ppo_leaper.csv: does not separate, the fits are in doubt (better, A "
        in compared(ppo, ppg)
    )
    row = second(tmp_path)
    assert (row["better"], row["by"], row["separates"]) == ("this", "A", "False")
    assert float(row["probability"]) > 0.9
    assert (
        "ppo_leaper.csv against ppg_leaper.csv: does not separate, the fits are in doubt (worse, A "
        in compared(ppg, ppo)
    )
    assert second(tmp_path)["better"] == "base"


def test_recipes_of_one_asymptote_are_distinguished_by_b(tmp_path: Path, compared) -> None:
    one = write_plain(tmp_path / "one.csv", reach=8, n=60, seed=1)
    two = write_plain(tmp_path / "two.csv", reach=8, n=60, seed=1, cmid=2600.0)
    said = compared(one, two)
    assert "two.csv against one.csv: does not separate, not settled (" in said
    assert " at A = ." in said
    assert second(tmp_path)["by"] == "B"
    assert ink(tmp_path / "compare/comparison.png") > 0.01


def test_early_comparison_is_reported_as_undecided(tmp_path: Path, compared) -> None:
    early, late = write_plain(tmp_path / "early.csv", reach=0.6), write_plain(tmp_path / "late.csv")
    said = compared(early, late)
    assert "early.csv: 90 %" in said
    assert "late.csv: 90 %" not in said
    assert "undecided, a run is below its own midpoint" in said
    row = second(tmp_path)
    assert (row["better"], row["separates"]) == ("undecided", "False")


def test_broken_run_is_compared_without_a_decision(tmp_path: Path, compared) -> None:
    well, ill = write_run(tmp_path / "well.csv"), write_run(tmp_path / "ill.csv", collapse=0.06)
    said = compared(well, ill)
    assert "undecided, a run is BROKEN" in said
    assert "ill.csv: the mean of the last 3 evaluations" in said
    assert second(tmp_path)["better"] == "undecided"
    assert ink(tmp_path / "compare/comparison.png") > 0.01


def test_file_against_itself_is_a_tie(tmp_path: Path, compared) -> None:
    one = write_plain(tmp_path / "one.csv")
    assert "no difference" in compared(one, one)
    row = second(tmp_path)
    assert (row["better"], float(row["probability"])) == ("tie", 0.5)


def test_asymptote_at_its_bound_is_a_doubt(tmp_path: Path, compared) -> None:
    straight = tmp_path / "straight.csv"
    straight.write_text("compute,reward\n" + "".join(f"{c},{0.2 + 0.01 * c}\n" for c in range(1, 41)))
    said = compared(straight, write_plain(tmp_path / "well.csv"))
    assert "straight.csv: A is at its high bound, 1, with probability " in said
    rows = [line.split(",") for line in straight.read_text().splitlines()[1:]]
    straight.write_text("compute,reward\n" + "".join(f"{c},{100 * float(r)}\n" for c, r in rows))
    said = compared(straight, straight, "--scale=0,100")
    assert "A is at its high bound, 100, with probability " in said
    assert main(["fit", str(straight), "--scale=0,100"]) == 0


def test_columns_of_the_files_are_named(tmp_path: Path, compared) -> None:
    path = write_plain(tmp_path / "steps.csv")
    path.write_text(path.read_text().replace("compute,reward", "step,val/acc"))
    said = compared(path, path, "--x", "step", "--y", "val/acc")
    assert f"{path}: compute is column step, reward is column val/acc." in said
