"""``scalerl report``: rewards and pass@k by label."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from scalerl_cli.main import main

HEAD = "set,version,compute,label,value,reward,prompts,pass_at_2,pass_at_2_low,pass_at_2_high\n"


def run_directory(folder: Path, *lines: str, head: str = HEAD) -> Path:
    folder.mkdir(parents=True)
    (folder / "labels.csv").write_text(head + "".join(f"{line}\n" for line in lines))
    return folder


def test_report_has_first_and_last_reward_of_each_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = run_directory(
        tmp_path / "a",
        "held-out,0,0,difficulty,9,0.25,8,0.5,0.4,0.6",
        "held-out,0,0,difficulty,10,0.125,8,0.25,0.1,0.4",
        "held-out,4,900,difficulty,9,0.75,8,0.875,0.8,0.9",
        "held-out,4,900,difficulty,10,0.5,8,0.625,0.5,0.7",
    )
    assert main(["report", str(run)]) == 0
    with (run / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["value"], row["first_reward"], row["last_reward"], row["pass_at_2"]) for row in rows] == [
        ("9", "0.25", "0.75", "0.875"),
        ("10", "0.125", "0.5", "0.625"),
    ]
    assert "| difficulty | 9 | 8 | .250 | .750 | .875 |" in (run / "report.md").read_text()
    assert (run / "report.png").stat().st_size > 5000
    assert ".875" in capsys.readouterr().out


def test_runs_of_one_name_are_averaged(tmp_path: Path):
    one = run_directory(tmp_path / "1", "held-out,0,0,context,zoo,0.25,8,0.5,0,1")
    two = run_directory(tmp_path / "2", "held-out,0,0,context,zoo,0.75,8,1.0,0,1")
    words = [f"base={one}", f"base={two}", f"other={two}"]
    assert main(["report", *words, "--to", str(tmp_path / "out")]) == 0
    with (tmp_path / "out/report.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert (rows["base"]["runs"], rows["base"]["last_reward"], rows["base"]["pass_at_2"]) == (
        "2",
        "0.5",
        "0.75",
    )
    assert (rows["other"]["runs"], rows["other"]["last_reward"]) == ("1", "0.75")


def test_tables_without_pass_at_k_are_read(tmp_path: Path):
    head = "set,version,compute,label,value,reward,prompts\n"
    run = run_directory(tmp_path / "a", "held-out,0,0,context,zoo,0.25,8", head=head)
    assert main(["report", str(run)]) == 0
    with (run / "report.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["last_reward"] == "0.25"
    assert not any(name.startswith("pass_at") for name in row)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{none}"], "give the lines of task.jsonl a difficulty, or task.dataset columns.labels"),
        (["{bad}"], "labels.csv, line 2"),
        (["{one}", "--label", "difficulty"], "there is set held-out, label context"),
        (["x={one}", "x={fewer}"], "give them different names"),
    ],
)
def test_unreportable_run_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    paths = {
        "none": tmp_path / "none",
        "bad": run_directory(tmp_path / "bad", "held-out,zero,0,context,zoo,0.25,8"),
        "one": run_directory(tmp_path / "one", "held-out,0,0,context,zoo,0.25,8"),
        "fewer": run_directory(tmp_path / "fewer", "held-out,0,0,context,zoo,0.25,4"),
    }
    filled = [word.format(**paths) for word in words]
    assert main(["report", *filled, "--to", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_report_of_a_mix_has_its_tasks_without_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The mean over completions: 4 with reward 1 and 8 with reward 0.25 in one tenth of the steps."""
    rows = [
        {"groups": 1, "filtered_groups": 1, "rollouts": 4, "completion_tokens": 40, "reward": 1.0}
        | {"truncated_fraction": 0.5},
        {"groups": 2, "filtered_groups": 0, "rollouts": 8, "completion_tokens": 20, "reward": 0.25}
        | {"truncated_fraction": 0.0},
    ]
    other = {
        "groups": 3,
        "filtered_groups": 0,
        "rollouts": 0,
        "completion_tokens": 0,
        "truncated_fraction": 0,
    }
    lines = [
        {"step": step}
        | {f"{k}_task_a": v for k, v in row.items()}
        | {f"{k}_task_b": v for k, v in other.items()}
        for step, row in enumerate(rows)
    ]
    lines.insert(1, lines[1] | {"reward_task_a": 0.0})  # trained again after a return to a checkpoint
    # NaN, which no JSON has and the coordinator never writes; and a last line without a newline, which counts.
    texts = [json.dumps({"step": 9, "groups_task_a": math.nan}), *map(json.dumps, lines)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts))
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == f"1 line of {tmp_path / 'metrics.jsonl'} cannot be read and is left out\n"
    with (tmp_path / "report-tasks.csv").open() as file:
        a, b = csv.DictReader(file)
    assert (a["groups"], a["filtered"], a["first"], a["last"]) == ("3", "1", "1.0", "0.25")
    assert (float(a["mean_tokens"]), float(a["truncated_fraction"])) == (5.0, pytest.approx(1 / 6))
    assert (b["groups"], b["first"]) == ("6", "")
    assert "| a | 3 | 33.3% | 1 |" in (tmp_path / "report.md").read_text()
    assert "66.7%" in said.out


def test_report_of_episodes_has_their_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of the first and the last tenth of the steps, as means over completions; of the task with an environment alone."""
    first, last = (
        {
            "rollouts": 8,
            "truncated_fraction": 0.0,
            "episode_turns": turns,
            "solved_at_turn_1": one,
            "solved_at_turn_2": two,
            "solved_at_turn_3": 0.0,
            "solved_at_turn_4": 0.0,
            "environment_tokens_fraction": 0.25,
            "environment_seconds_fraction": 0.5,
        }
        for turns, one, two in ((2.0, 0.125, 0.25), (1.5, 0.5, 0.375))
    )
    for lines, task in (
        ([first] * 10 + [last] * 10, "main"),
        (
            [
                {f"{k}_task_a": v for k, v in row.items()}
                | {"rollouts_task_b": 4, "truncated_fraction_task_b": 0.0}
                for row in (first, last)
            ],
            "a",
        ),
    ):
        numbered = (json.dumps({"step": step} | line) + "\n" for step, line in enumerate(lines))
        (tmp_path / "metrics.jsonl").write_text("".join(numbered))
        assert main(["report", str(tmp_path)]) == 0
        with (tmp_path / "report-turns.csv").open() as file:
            begins, ends = csv.DictReader(file)
        assert (begins["task"], begins["turns"], begins["solved_at_turn_1"]) == (task, "2.0", "0.125")
        assert (ends["solved_at_turn_1"], ends["solved_at_turn_2"]) == ("0.5", "0.375")
        assert (ends["malformed"], ends["environment_tokens"]) == ("", "0.25")
        assert "solved at 4+" in capsys.readouterr().out
