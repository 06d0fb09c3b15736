"""``scalerl score``: a reward is written and debugged without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_cli.main import main

REWARD = """
def score(prompt, completion, answer, metadata):
    print("looking at", completion)
    if completion == "skip":
        return None
    if completion == "bad":
        raise ValueError("no")
    return 1.5 if completion == answer else metadata.get("partial", -0.5)
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [{"id": f"row-{i}", "prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    spec = {
        "apiVersion": "scalerl.dev/v1alpha1",
        "kind": "ScaleRLRun",
        "metadata": {"name": "a"},
        "spec": {
            "model": {"scratch": {}, "contextTokens": 64},
            "task": {
                "jsonl": {"path": "data.jsonl"},
                "verifier": {"python": {"path": "reward.py", "function": "score"}, "range": ["-0.5", "1.5"]},
                "heldOut": {"size": 4},
            },
            "recipe": {"maxCompletionTokens": 16},
            "budget": {"maxSteps": 1},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    return tmp_path / "run.yaml"


def scored(run_file: Path, capfd: Any, *rows: dict[str, Any]) -> tuple[int, list[dict[str, Any]], str]:
    given = run_file.parent / "completions.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main(["score", str(run_file), "--completions", str(given)])
    said = capfd.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err


def test_score_prints_scores_rewards_and_what_the_function_prints(run_file: Path, capfd: Any) -> None:
    code, lines, said = scored(
        run_file,
        capfd,
        {"id": "row-7", "completions": ["8", "9"]},
        {"prompt": "3 + 1?", "completion": "4"},
        {"answer": "x", "completion": "y", "metadata": {"partial": 0.5}},
    )
    assert code == 0, said
    assert lines == [
        {"id": "row-7", "completion": "8", "score": 1.0, "reward": 1.5},
        {"id": "row-7", "completion": "9", "score": 0.0, "reward": -0.5},
        {"id": "row-3", "completion": "4", "score": 1.0, "reward": 1.5},
        {"id": "line-3", "completion": "y", "score": 0.5, "reward": 0.5},
    ]
    assert "looking at 9" in said
    assert "4 completions of 3 groups, mean score 0.625" in said


def test_score_of_a_reward_that_does_not_apply_is_no_failure(run_file: Path, capfd: Any) -> None:
    code, lines, said = scored(run_file, capfd, {"id": "row-1", "completions": ["skip", "2"]})
    assert code == 0
    assert lines[0] == {"id": "row-1", "completion": "skip", "score": None}
    assert "2 completions of 1 groups, mean score 1, 1 to which the verifier does not apply" in said


def test_score_shows_the_line_of_an_exception(run_file: Path, capfd: Any) -> None:
    code, lines, said = scored(run_file, capfd, {"id": "row-1", "completions": ["bad", "2"]})
    assert code == 1
    assert (
        lines[0]["error"] == "reward.py:score raised ValueError: no (reward.py, line 7) for the prompt row-1"
    )
    assert lines[1]["score"] == 1.0
    assert "1 without a score" in said


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": "row-70", "completion": "x"}, "line 1: no prompt of the run has id 'row-70'"),
        ({"id": "row-7"}, "line 1: give completion or completions"),
        ({"completion": "x"}, "line 1: give completion or completions, and the prompt's id or text"),
        ({"id": "row-7", "reply": "x"}, "line 1: Object contains unknown field `reply`"),
    ],
)
def test_score_names_the_bad_line(run_file: Path, capfd: Any, row: dict[str, Any], says: str) -> None:
    code, lines, said = scored(run_file, capfd, row)
    assert (code, lines) == (2, [])
    assert says in said


def test_score_of_a_reward_that_does_not_load(run_file: Path, capfd: Any) -> None:
    (run_file.parent / "reward.py").write_text("import nopackage_at_all\n")
    code, _, said = scored(run_file, capfd, {"id": "row-7", "completion": "8"})
    assert code == 2
    assert "there is no module 'nopackage_at_all' (reward.py, line 1)" in said
