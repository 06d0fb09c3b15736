"""``scalerl report``: how responses change from epoch to epoch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scalerl_api.history import HistoryLine
from scalerl_cli.main import main


def line(prompt: int, tokens: int, previous: int, visit: int = 1, **more: Any) -> HistoryLine:
    common = {"task": 0, "version": 9, "previous_version": 1, "responses": 2, "previous_responses": 2}
    return HistoryLine(**common, prompt=prompt, visit=visit, tokens=tokens, previous_tokens=previous, **more)


def run_directory(folder: Path, *lines: HistoryLine, rest: bytes = b"") -> Path:
    folder.mkdir()
    text = b"".join(msgspec.json.encode(one) + b"\n" for one in lines)
    (folder / "history.jsonl").write_bytes(text + rest)
    return folder


def test_report_has_a_row_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = {"compared_tokens": 10, "reused_tokens": 4}
    same = [line(prompt, 10 + prompt, 20 + prompt, **compared) for prompt in range(20)]
    # The longest prompt becomes the shortest, so that each of the others moves up by one rank of twenty.
    moved = [line(prompt, 10 + prompt if prompt < 19 else 1, 10 + prompt, 2) for prompt in range(20)]
    run = run_directory(tmp_path / "a", *same, *moved, rest=b'{"task":0,"pro')
    assert main(["report", str(run)]) == 0
    with (run / "report-history.csv").open() as file:
        second, third = csv.DictReader(file)
    assert [(row["epoch"], row["prompts"]) for row in (second, third)] == [("2", "20"), ("3", "20")]
    assert (second["reuse"], float(second["rank_correlation"]), second["moved"]) == (
        "0.4",
        pytest.approx(1),
        "0.0",
    )
    assert (float(second["mean_tokens"]), float(second["previous_tokens"])) == (9.75, 14.75)
    # 1 - 6 (19 · 1² + 19²) / (20 · (20² - 1))
    assert float(third["rank_correlation"]) == pytest.approx(1 - 6 * 380 / 7980)
    assert (third["reuse"], third["moved"], third["accepted"]) == ("", "0.05", "")
    assert "| 2 | 20 | 40.0% | 9.8 | 14.8 | 1.000 | 0.0% |" in (run / "report.md").read_text()
    printed = capsys.readouterr().out
    assert "rank correlation" in printed
    assert "accepted" not in printed


def test_report_of_drafts_and_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a prompt that was sampled twice in an epoch, as after a return to a checkpoint, the newest line counts."""
    drafts = {"drafted_tokens": 8, "accepted_tokens": 6}
    one = run_directory(tmp_path / "a", line(0, 4, 4), line(0, 20, 4, **drafts), line(1, 2, 2))
    two = run_directory(tmp_path / "b", line(0, 5, 5))
    assert main(["report", str(one), f"other={two}", "--to", str(tmp_path / "out")]) == 0
    with (tmp_path / "out/report-history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["prompts"], row["accepted"]) for row in rows] == [
        ("a", "2", "0.75"),
        ("other", "1", ""),
    ]
    assert rows[1]["rank_correlation"] == ""
    assert "75.0%" in capsys.readouterr().out


def test_report_of_drafts_by_position_and_difficulty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Easy prompts: 9 of 12 drafted tokens, and 20 tokens in 11 verifications. A prompt without a difficulty is in no part, and a
    group without a report of its drafts does not change the figures of drafts."""
    easy = {"drafted_tokens": 12, "accepted_tokens": 9, "drafted_by_position": [8, 4], "difficulty": 2.0}
    hard = {"drafted_tokens": 8, "accepted_tokens": 2, "drafted_by_position": [8], "difficulty": 10.0}
    run = run_directory(
        tmp_path / "a",
        line(0, 20, 4, accepted_by_position=[6, 3], **easy),
        line(1, 20, 4, accepted_by_position=[2], **hard),
        line(2, 20, 4),
        line(0, 20, 20, 2, difficulty=2.0),
    )
    assert main(["report", str(run)]) == 0
    with (run / "report-history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["difficulty"], row["prompts"]) for row in rows] == [
        ("2", "", "3"),
        ("2", "2", "1"),
        ("2", "10", "1"),
        ("3", "", "1"),
        ("3", "2", "1"),
    ]
    assert [(row["drafted_by_position"], row["accepted_by_position"]) for row in rows[:3]] == [
        ("16 4", "8 3"),
        ("8 4", "6 3"),
        ("8", "2"),
    ]
    assert float(rows[1]["acceptance_length"]) == pytest.approx(20 / 11)
    report = (run / "report.md").read_text()
    assert "| 2 | 2 | 1 |  | 10.0 | 2.0 |  | 0.0% | 1.82 | 1.09 | 75.0% | 75.0% | 75.0% |" in report
    assert "| 2 |  | 3 |  | 10.0 | 2.0 |  | 0.0% | 1.38 | 0.69 | 55.0% | 50.0% | 75.0% |" in report
    assert "| 3 |  | 1 |  | 10.0 | 10.0 |  | 0.0% |  |  |  |  |  |" in report
    assert "at 2" in capsys.readouterr().out


def test_report_where_no_draft_pays(tmp_path: Path) -> None:
    """Nothing is drafted, and a verification yields one token."""
    run = run_directory(tmp_path / "a", line(0, 20, 4, drafted_tokens=0, accepted_tokens=0))
    assert main(["report", str(run)]) == 0
    assert "0.0% | 1.00 | 0.00 |  |" in (run / "report.md").read_text()
