"""``scalerl rollouts``: filters, order, what a terminal is sent, and directories that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_rollouts import ROW, record

from scalerl_api.rollouts import TOKEN_COLUMNS
from scalerl_cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record(
        tmp_path,
        [{"step": 0}, {"step": 0, "sample": 1, "reward": 0.0, "completion": "five", "advantage": -0.5}],
    )
    record(
        tmp_path,
        [
            {
                "step": 1,
                "prompt_id": "p1",
                "finish_reason": "length",
                "tokens": 9,
                "completion": "so (4.) so",
            },
            {
                "step": 1,
                "prompt_id": "p1",
                "sample": 1,
                "reward": 0.5,
                "labels": [("hard", "yes"), ("kind", "a")],
            },
            {
                "step": 1,
                "prompt_id": "p0",
                "sample": 2,
                "reward": None,
                "advantage": None,
                "excluded": "ungraded",
            },
        ],
    )
    record(
        tmp_path,
        [
            {"step": 8, "split": "held_out", "sample": at, "reward": at / 4, "advantage": None, "age": None}
            for at in range(5)
        ],
    )
    return tmp_path


def found(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> list[tuple[int, int]]:
    """Step and sample of the rows."""
    assert main(["rollouts", str(run), "--json", *arguments]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(row["step"], row["sample"]) for row in rows]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--step", "0"), [(0, 0), (0, 1)]),
        (("--step", "1:2", "--reward", "0.5:1"), [(1, 0), (1, 1)]),
        (("--reward", ":0"), [(0, 1), (8, 0)]),
        (("--step", "last", "--sort", "reward", "--limit", "2"), [(8, 0), (8, 1)]),
        (("--step", "last", "--split", "train", "--limit", "1"), [(1, 0)]),
        (("--split", "held-out", "--sort", "reward", "--descending", "--limit", "2"), [(8, 4), (8, 3)]),
        (("--sort", "advantage", "--split", "train", "--limit", "1"), [(0, 1)]),
        (("--label", "hard=yes", "--label", "kind=a"), [(1, 1)]),
        (("--label", "hard=yes", "--label", "kind=b"), []),
        (("--truncated",), [(1, 0)]),
        (("--contains", "(4.)"), [(1, 0)]),
        (("--contains", "it is", "--contains", "five"), []),
        (("--excluded",), [(1, 2)]),
        (("--excluded", "zero-variance"), []),
        (("--prompt", "p1"), [(1, 0), (1, 1)]),
        (("--task", "other"), []),
        (("--prompt", "p0", "--split", "train", "--limit", "0"), [(0, 0), (0, 1), (1, 2)]),
    ],
)
def test_filters(
    capsys: pytest.CaptureFixture[str], run: Path, arguments: tuple[str, ...], expected: object
) -> None:
    assert found(capsys, run, *arguments) == expected


def test_json_has_every_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path, [{"step": 0, "logprob_difference_max": float("nan")}])
    assert main(["rollouts", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (row["labels"], row["parts"], row["logprob_difference_max"]) == (
        {"hard": "no"},
        {"format": 1.0},
        None,
    )


def test_json_has_columns_of_tokens_in_full_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path, [{"step": 0, "token_logprob_differences": [0.5, float("nan"), -2.0]}])
    assert main(["rollouts", str(tmp_path), "--json"]) == 0
    assert not set(TOKEN_COLUMNS) & json.loads(capsys.readouterr().out).keys()
    assert main(["rollouts", str(tmp_path), "--json", "--full"]) == 0
    row = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (row["token_ends"], row["token_versions"]) == ([3, 6, 7], [0, 1, 1])
    assert row["token_logprob_differences"] == [0.5, None, -2.0]


def test_text(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    assert main(["rollouts", str(run), "--step", "0:1", "--limit", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("5 of 10 recorded rollouts match; the first 3 (--limit)\n")
    assert (
        "=== step 0 · train main · prompt p0 · completion 0 · reward 1 · format 1 · advantage +0.500 · 3 tokens · "
        "versions 0 to 1, age 1 · log-probability difference 0.01, at most 0.2 · hard no\n"
        "[prompt]\n2 + 2 =\n[completion]\nit is 4\n[reference] 4\n" in text
    )
    assert text.count("[prompt]") == 1  # the same prompt is printed once
    assert main(["rollouts", str(run), "--excluded"]) == 0
    assert "not trained on: ungraded" in capsys.readouterr().out


def test_hostile_text_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hostile = "a\x1b]0;title\x07\r\x9b2J\u202eright\u2066 שלום"
    names = ("completion", "prompt", "prompt_id", "task", "reference", "error", "excluded")
    record(tmp_path, [{"step": 0, "labels": [(hostile, hostile)]} | dict.fromkeys(names, hostile)])
    assert main(["rollouts", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert not set(text) & set("\x1b\x07\r\x9b\u202e\u2066")
    assert text.count("a\\x1b]0;title\\x07\\r\\x9b2J\\u202eright\\u2066 שלום") == 9


def test_json_on_a_terminal_is_ascii(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, [{"step": 0, "completion": "\x9b2J\u202e"}])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["rollouts", str(tmp_path), "--json"]) == 0
    assert "\\u009b2J\\u202e" in capsys.readouterr().out


def test_long_text_is_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path, [{"step": 0, "completion": "word " * 100_000}])
    assert main(["rollouts", str(tmp_path)]) == 0
    assert "… 496,000 characters (--full) …" in capsys.readouterr().out
    assert main(["rollouts", str(tmp_path), "--full"]) == 0
    assert capsys.readouterr().out.count("word ") == 100_000


def test_slot_without_completions_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nothing = dict.fromkeys(
        set(ROW) - {"split", "task", "prompt_index", "slot", "sample", "tokens", "labels", "parts"}
    )
    record(tmp_path, [nothing | {"step": 0, "excluded": "given-up", "tokens": 0, "labels": [], "parts": []}])
    assert main(["rollouts", str(tmp_path)]) == 0
    assert "prompt 0 · completion 0 · 0 tokens · not trained on: given-up" in capsys.readouterr().out


def test_torn_file_is_left_out(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    whole = sorted((run / "rollouts").iterdir())[0]
    (run / "rollouts" / "train-00000002-00000002-00000009.parquet").write_bytes(whole.read_bytes()[:200])
    (run / "rollouts" / "train-00000003-00000003-00000010.parquet").write_bytes(b"")
    (run / "rollouts" / ".train-00000004-00000004-00000011.parquet").write_bytes(b"incomplete")
    assert main(["rollouts", str(run), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 10
    assert [line.count("left out, not a complete Parquet file") for line in captured.err.splitlines()] == [
        1,
        1,
    ]


def test_damaged_file_is_left_out(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    path = record(run, [{"step": 9, "completion": "word " * 100}])
    whole = bytearray(path.read_bytes())
    whole[4:40] = bytes(36)  # the head of the first page
    path.write_bytes(whole)
    assert main(["rollouts", str(run), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 10
    assert captured.err.startswith(f"{path}: left out, damaged: ")
    assert captured.err.count("\n") == 1


def test_merged_file_replaces_its_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = record(tmp_path, [{"step": 0}])
    record(tmp_path, [{"step": 0}, {"step": 1}], replaces=source.name)
    assert found(capsys, tmp_path) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such directory"),
        ([], "is not the directory of a run"),
        (["run.yaml"], "has no rollouts: its coordinator did not start"),
        (["run.yaml", "rollouts/"], "has no rollouts yet"),
    ],
)
def test_directory_without_rollouts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, files: list[str] | None, message: str
) -> None:
    directory = tmp_path / "run"
    if files is not None:
        directory.mkdir()
        for name in files:
            (directory / name).mkdir() if name.endswith("/") else (directory / name).touch()
    assert main(["rollouts", str(directory)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--step", "x"),
        ("--step", "3:1"),
        ("--reward", ""),
        ("--reward", "nan"),
        ("--contains", "\udcff"),
        ("--limit", "-1"),
    ],
)
def test_bad_argument(capsys: pytest.CaptureFixture[str], run: Path, arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rollouts", str(run), *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
