"""Whatever is wrong with a curve file: one line that says where and what to do, exit 2, nothing written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from curve_files import write_plain, write_run

from scalerl_analysis.curve_columns import Columns
from scalerl_analysis.curve_file import read_curve
from scalerl_api.curve import curve_csv
from scalerl_api.wire import EvaluationPoint
from scalerl_cli.main import main

GOOD = "".join(f"{c},{0.2 + 0.01 * c}\n" for c in range(1, 13))


def refused(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The complaint of ``fit``, after checking that there is nothing but the complaint."""
    picture = path.parent / "out.png"
    before = sorted(path.parent.iterdir())
    assert main(["fit", str(path), "--plot", str(picture), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert sorted(path.parent.iterdir()) == before
    return said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty", "compute,reward"]),
        ("\n\n", ["empty"]),
        ("compute,reward\n", ["no point", "wait"]),
        ("1,0.2\n2,0.3\n", ["line 1", "no column compute", "the first line names the columns"]),
        ("compute,score\n1,0.2\n", ["line 1", "no column reward", "compute,score"]),
        ("compute;reward\n1;0,2\n", ["line 2, column reward", "'0,2' is not a number", "with a point"]),
        ("compute\treward\n1\t0.2\n", ["1 points"]),
        ("compute,reward\n1,20%\n", ["'20%' is not a number", "percent sign", "--scale=0,100"]),
        ('compute,reward\n"1,000",0.2\n', ["'1,000' is not a number", "without thousands separators"]),
        ("compute,reward\n1,0.2\n2,NaN\n", ["line 3", "reward[1] is nan"]),
        ("compute,reward\n1,0.2\n2,-Infinity\n", ["line 3", "reward[1] is -inf"]),
        ("compute,reward\n1,0.2\n2,n/a\n", ["'n/a' is not a number", "remove the row"]),
        ("Compute,Reward,REWARD\n1,2,3\n", ["column reward occurs 2 times"]),
        ("compute,reward\n1,20.5\n2,31\n", ["line 2", "--scale=0,100"]),
        ("compute,reward\n1,0.2\n1_000,0.3\n", ["line 3, column compute", "not a number"]),
        ("compute,reward,samples\n1,0.2,3.5\n", ["line 2, column samples", "3.5 is not a count"]),
        (
            "compute,reward,mixed_versions\n1,0.2,yes\n",
            ["line 2, column mixed_versions", "neither true nor false"],
        ),
        ("compute,reward,mixed_versions\n1,0.2,true\n", ["the weights changed", "wait"]),
        ("compute,reward,reward\n1,2,3\n", ["reward occurs 2 times"]),
        ("compute,reward\n1,0.2\n2,x\n", ["line 3, column reward", "'x' is not a number"]),
        ("compute,reward\n1,0.2\n\n,0.3\n3,\n", ["1 points", "(2 rows are empty in compute or reward)"]),
        ("compute,reward,samples\n1,0.2,9\n2,0.3,\n", ["line 3, column samples: empty"]),
        ("compute,reward\n1,\n,2\n", ["no row has both compute and reward"]),
        ("compute,reward\n1,0.2\n1,000,0.3\n", ["line 3: 3 cells", "thousands separators"]),
        ("compute,reward\n1,0.2\n2\n", ["line 3: 1 cells"]),
        ("compute,reward\n1,0.2\n2,nan\n3,0.2\n", ["line 3", "reward[1] is nan", "drop the point"]),
        ("compute,reward\n1,0.2\ninf,0.3\n", ["line 3", "compute[1] is inf"]),
        ("compute,reward\n-1,0.2\n2,0.3\n", ["line 2", "starts at 0"]),
        ("compute,reward\n1,0.2\n\n5,0.3\n4,0.3\n", ["line 5", "compute goes back", "sort"]),
        ("compute,reward\n1,0.2\n1,0.3\n", ["line 3", "same compute", "keep one"]),
        (
            "compute,reward\n1,0.2\n2,1.5\n",
            ["line 3, column reward", "1.5 is outside [0, 1]", "--scale=-1,1"],
        ),
        ("compute,reward,samples\n1,0.2,0\n", ["line 2", "samples[0] is 0"]),
        ("compute,reward\n1,0.2\n2,0.3\n", ["2 points", "at least 4"]),
        ("compute,reward\n" + "".join(f"{c},0.5\n" for c in range(1, 20)), ["all 19 rewards are 0.5"]),
        ("compute,reward,truncated_fraction\n" + GOOD.replace("\n", ",7\n"), ["truncated_fraction", "rates"]),
        (
            "compute,reward,device_seconds\n1,.1,5\n2,.2,9\n3,.3,8\n4,.4,9\n",
            ["line 4, column device_seconds", "never decrease"],
        ),
        (
            "compute,reward,recipe\n" + "".join(f"{c},{0.01 * c},{'ab'[c > 9]}\n" for c in range(1, 12)),
            ["from line 11 on (the last recipe)", "2 points"],
        ),
    ],
)
def test_bad_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    complaint = refused(path, capsys)
    assert complaint.startswith(str(path))
    for word in words:
        assert word in complaint


def test_first_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward out of range on line 3 comes before compute that goes back on line 5."""
    path = tmp_path / "bad.csv"
    path.write_text("compute,reward\n1,0.2\n2,1.5\n5,0.3\n4,0.3\n")
    assert "line 3, column reward" in refused(path, capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("compute,reward".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("compute,récompense".encode("latin-1"), "Latin-1"),
        (b'"' + b"x" * 200_000, "CSV"),
    ],
)
def test_non_csv_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "bad.csv"
    if content is not None:
        path.write_bytes(content)
    assert words in refused(path, capsys)


def test_directory_stands_for_its_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tmp_path)]) == 2
    assert "curve.csv: No such file" in capsys.readouterr().err
    write_run(tmp_path / "curve.csv")
    assert main(["fit", str(tmp_path)]) == 0
    assert "completion tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [
        ["--at", "0"],
        ["--at", "inf"],
        ["--at", "-3"],
        ["--scale", "1,0"],
        ["--scale", "1"],
        ["--budget", "nan"],
        ["--rate", "0"],
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fit", "nowhere.csv", *more])
    assert left.value.code == 2
    assert more[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--target", "1.2"], "--target"),
        (["--device-hours-column", "hours"], "no column 'hours'"),
    ],
)
def test_questions_that_have_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert words in refused(write_plain(tmp_path / "curve.csv"), capsys, *more)


@pytest.mark.parametrize(
    ("picture", "words"),
    [("out.txt", "ends in .png"), ("no/such/out.png", "no such directory"), ("", "ends in")],
)
def test_unwritable_picture_path_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], picture: str, words: str
) -> None:
    curve = write_plain(tmp_path / "curve.csv")
    assert main(["fit", str(curve), "--plot", str(tmp_path / picture)]) == 2
    said = capsys.readouterr()
    assert (said.out, words in said.err) == ("", True)


def test_picture_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def full(self: Figure, where: Path, **_: object) -> None:
        where.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    curve, picture = write_plain(tmp_path / "curve.csv"), tmp_path / "out.png"
    picture.write_bytes(b"the old one")
    monkeypatch.setattr(Figure, "savefig", full)
    assert main(["fit", str(curve), "--plot", str(picture)]) == 2
    said = capsys.readouterr()
    assert (said.out, "No space left" in said.err) == ("", True)
    assert picture.read_bytes() == b"the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.csv", "out.png"]


def test_only_pictures_need_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the operator's image."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    curve = write_plain(tmp_path / "curve.csv")
    assert "pip install 'matplotlib" in refused(curve, capsys)
    assert main(["fit", str(curve)]) == 0


def test_stated_scales_other_encodings_and_blank_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_bytes("\ufeffCompute, Reward\r\n0,-1\r\n\r\n2,0\r\n3,1\r\n".encode())
    read = read_curve(path, Columns(scale=(-1.0, 1.0)))
    assert read.curve.compute.tolist() == [0, 2, 3]
    assert read.curve.reward.tolist() == [0, 0.5, 1]


def test_evaluations_of_mixed_weights_are_excluded_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "curve.csv")
    rows = path.read_text().splitlines()
    rows[20] = "4950000.0,0.0,1000,0.01,19,9e3,1.8e4,5.0,0.0,true"
    path.write_text("\n".join(rows))
    read = read_curve(path)
    assert (read.mixed, len(read.curve), read.truncation.size) == (1, 40, 41)  # type: ignore[union-attr]
    assert 0.0 not in read.curve.reward
    for command in (["fit", str(path)], ["plan", "--from", str(path)]):
        assert main(command) == 0
        assert "1 evaluation left out, because the weights changed" in capsys.readouterr().out


def test_fit_starts_at_the_last_change_of_the_evaluation_set(tmp_path: Path) -> None:
    """By the file that a run writes itself."""
    points = [
        EvaluationPoint(
            version=i,
            work_tokens=1000 * i,
            reward=0.01 * i,
            standard_error=0.01,
            samples=100,
            prompts=100,
            set_digest="old" if i < 6 else "new",
            mixed_versions=i == 8,
            truncated_fraction=0.0,
            mean_tokens=5.0,
            wall_seconds=float(i),
            device_seconds=float(i),
        )
        for i in range(1, 20)
    ]
    path = tmp_path / "curve.csv"
    path.write_text(curve_csv(points))
    read = read_curve(path)
    assert (read.segments, read.first_line, read.mixed, read.unit) == (2, 7, 1, "completion tokens")
    assert len(read.segment.curve) == 13


def test_pass_at_k_has_fewer_samples(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    rows = "".join(f"{c},.{c},64,.{c + 3}\n" for c in range(1, 6))
    path.write_text("compute,reward,samples,pass_at_4\n" + rows)
    assert set(read_curve(path).curve.samples) == {64.0}
    assert set(read_curve(path, columns=Columns(y="pass_at_4")).curve.samples) == {16.0}
    assert set(read_curve(path, columns=Columns(y="pass_at_4", samples="20")).curve.samples) == {20.0}


def test_100_000_points_are_fitted_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve, picture = write_plain(tmp_path / "curve.csv", n=100_000), tmp_path / "out.png"
    assert main(["fit", str(curve), "--json", "--plot", str(picture)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["A"]["low"] < 0.61 < answer["A"]["high"]
    assert picture.stat().st_size < 350_000
