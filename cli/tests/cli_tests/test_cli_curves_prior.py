"""``--prior``: earlier runs count, and what cannot count is left out with its reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from curve_files import write_run

from scalerl_api.forecast import MAX_EARLIER_RUNS
from scalerl_cli.main import main
from scalerl_curvefit.simulate import Truth, simulated

from .fit_command import answer, text

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "tiny" / "run.yaml"


def write_seed(path: Path, seed: int, n: int = 40, reach: float = 6.0, asymptote: float = 0.61) -> Path:
    """A run of 2.5e5 tokens an evaluation."""
    curve = simulated(Truth(asymptote, 1.92, 1.5e6), n=40, reach=reach, seed=seed)
    rows = "".join(f"{c:.0f},{r}\n" for c, r in zip(curve.compute[:n], curve.reward[:n], strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("compute,reward\n" + rows)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The run under way, then five earlier ones."""
    now = write_seed(tmp_path / "now.csv", 0, n=14)
    return [str(now), *(str(write_seed(tmp_path / f"{seed}.csv", seed)) for seed in range(1, 6))]


def test_earlier_runs_narrow_the_forecast_and_are_named(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    now, *earlier = files
    alone = answer(capsys, now)
    got = answer(capsys, now, "--prior", *earlier)
    width, before = (a["forecasts"][0]["high"] - a["forecasts"][0]["low"] for a in (got, alone))
    assert width < 0.6 * before
    assert "prior" not in alone
    assert [use["run"] for use in got["prior"]] == earlier
    assert all(use["weight"] > 0.5 for use in got["prior"])
    said = text(capsys, now, "--prior", *earlier)
    assert f"prior: 5 earlier runs ({', '.join(earlier)})" in said


def test_invalid_points_are_excluded_with_reason(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, *earlier = files
    garbage, empty, steps = tmp_path / "garbage.csv", tmp_path / "empty", tmp_path / "other.csv"
    garbage.write_bytes(b"\x00\xff")
    empty.mkdir()
    other = write_seed(steps, 9, asymptote=0.3)
    given = [now, str(garbage), str(empty), str(tmp_path / "nowhere"), str(other), earlier[0]]
    said = text(capsys, now, "--prior", *given)
    assert f"prior: 2 earlier runs ({other}, {earlier[0]})" in said or "prior: 1 earlier run " in said
    assert f"{now} left out: the run itself" in said
    assert f"{garbage} left out: " in said
    assert f"{empty} left out: " in said
    assert f"{tmp_path / 'nowhere'} left out: " in said
    assert f"{other} " in said
    assert "at this compute, this run has" in said


def test_no_usable_earlier_run_is_an_error(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    now = files[0]
    for command in (["fit", now], ["plan", "--from", now]):
        assert main([*command, "--prior", now, f"{now}.gone"]) == 2
        said = capsys.readouterr().err
        assert "none of the 2 given runs can be used" in said
        assert f"{now}: the run itself" in said
        assert f"{now}.gone: " in said


def test_no_fittable_earlier_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another evaluation set, too few points, no point ahead: the fit finds these, not the reading."""
    now, other = write_seed(tmp_path / "now.csv", 0, n=14), write_seed(tmp_path / "other.csv", 1)
    short, behind = write_seed(tmp_path / "short.csv", 2, n=3), write_seed(tmp_path / "behind.csv", 3, n=12)
    for path, version in ((now, "v1"), (other, "v2")):
        head, *rows = path.read_text().splitlines()
        path.write_text("\n".join([f"{head},eval_version", *(f"{row},{version}" for row in rows)]) + "\n")
    earlier = [str(other), str(short), str(behind)]
    for command in (["fit", str(now)], ["fit", str(now), "--json"], ["plan", "--from", str(now)]):
        assert main([*command, "--prior", *earlier]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "none of the 3 given runs can be used" in printed.err
        assert f"{other}: its rewards are of evaluation version v2, this run's of v1" in printed.err
        assert f"{short}: 3 points" in printed.err
        assert f"{behind}: its points go no further than this run's" in printed.err


def test_other_unit_of_compute_is_excluded(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_run(tmp_path / "own.csv")
    in_steps = tmp_path / "steps.csv"
    in_steps.write_text("global_step,reward\n1,.1\n2,.2\n3,.2\n4,.3\n5,.4\n")
    assert main(["fit", str(own), "--prior", str(in_steps)]) == 2
    assert "steps.csv" in capsys.readouterr().err


def run_directory(root: Path, seed: int, n: int = 40, layers: int = 4) -> Path:
    """A run's directory with its spec and its curve."""
    root.mkdir()
    spec = EXAMPLE.read_text().replace("layers: 4", f"layers: {layers}")
    (root / "run.yaml").write_text(spec)
    write_seed(root / "curve.csv", seed, n)
    return root


def test_model_and_task_of_earlier_runs_must_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = run_directory(tmp_path / "now", 0, 14)
    seed = run_directory(tmp_path / "seed", 1)
    other = run_directory(tmp_path / "other", 2, layers=5)
    (tmp_path / "notes.txt").write_text("what I tried\n")
    shutil.copytree(seed, tmp_path / "unreadable")
    (tmp_path / "unreadable" / "run.yaml").write_text("{")
    said = text(capsys, str(now), "--prior", *map(str, sorted(tmp_path.iterdir())))
    assert f"prior: 1 earlier run ({seed})" in said
    assert f"{now} left out: the run itself" in said
    assert f"{other} left out: model.scratch.layers is 5, this run's is 4" in said
    assert f"{tmp_path / 'unreadable'} left out: " in said
    assert f"{tmp_path / 'notes.txt'} left out: " in said


def test_newest_fifty_count(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = []
    for i in range(MAX_EARLIER_RUNS + 2):
        many.append(shutil.copy(files[1], tmp_path / f"many-{i}.csv"))
        os.utime(many[-1], (1e9 + i, 1e9 + i))
    got = answer(capsys, files[0], "--prior", *map(str, many))
    left_out = [use["run"] for use in got["prior"] if use["weight"] == 0]
    assert left_out == [str(path) for path in many[:2]]


def test_plan_names_its_prior(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    now, *earlier = files
    assert main(["plan", "--from", now, "--prior", *earlier]) == 0
    assert "prior: 5 earlier runs" in capsys.readouterr().out
    assert main(["plan", "--from", now, "--prior", *earlier, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["prior"]) == 5


def test_run_counts_once_in_any_spelling(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "latest.csv"
    link.symlink_to(files[1])
    got = answer(capsys, files[0], "--prior", files[1], str(link), "--prior", files[2])
    assert [use["run"] for use in got["prior"]] == [files[1], files[2], str(link)]
    assert got["prior"][2]["reason"] == f"the same run as {files[1]}"


def test_other_start_of_compute_is_excluded(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Path(files[1]).read_text().splitlines()
    recipes = ["recipe", *["a"] * 20, *["b"] * 20]
    other = tmp_path / "switched.csv"
    other.write_text("\n".join(f"{row},{name}" for row, name in zip(rows, recipes, strict=True)) + "\n")
    got = answer(capsys, files[0], "--prior", files[2], str(other))
    assert got["prior"][1]["weight"] == 0
    assert "change of recipe" in got["prior"][1]["reason"]
