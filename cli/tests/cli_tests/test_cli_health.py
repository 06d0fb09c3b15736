"""``scalerl status``: each rule at its threshold and just below it, the order of the rules, and files that cannot be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.health import LAST, RULES, Steps, health
from scalerl_cli.main import main

ROOT = Path(__file__).parents[3]


def row(step: int, **changes: Any) -> dict[str, float]:
    healthy = {
        "step": step,
        "wall_seconds": 10.0 * step,
        "wait_seconds": 2.0,
        "skipped": 0,
        "applied": 1.0,
        "checkpoint_failures": 1,
        "grading_errors": 0,
        "rollouts": 100,
        "groups": 20,
        "given_up_groups": 0,
        "filtered_groups": 8,
        "unsolved_groups_fraction": 0.3,
        "solved_groups_fraction": 0.1,
        "reward": 0.2 + step / 200,
        "ratio_kl": 0.01,
        "grad_norm": 1.0,
        "entropy": 1.0,
        "mean_completion_tokens": 200.0,
        "truncated_fraction": 0.02,
    }
    return healthy | changes


def steps(late: Callable[[int], dict[str, Any]]) -> Steps:
    return Steps([row(n) for n in range(LAST)], [row(n, **late(n - 40)) for n in range(40, 40 + LAST)])


RULE_CASES: list[tuple[str, Callable[[int], dict[str, Any]], Callable[[int], dict[str, Any]], str]] = [
    (
        "_skipped",
        lambda n: {"skipped": int(n < 2)},
        lambda n: {"skipped": int(n < 1)},
        "2 of the last 10 updates were not applied",
    ),
    (
        "_checkpoints",
        lambda n: {"checkpoint_failures": 1 + (n > 5)},
        lambda n: {},
        "checkpoints could not be written: 1 in",
    ),
    (
        "_ungraded",
        lambda n: {"grading_errors": 2 * (n > 3)},
        lambda n: {"grading_errors": int(n > 3)},
        "the verifier failed for 1% of the completions since step 45",
    ),
    (
        "_given_up",
        lambda n: {"given_up_groups": 1},
        lambda n: {"given_up_groups": n % 2},
        "5% of the prompts got no completions",
    ),
    ("_no_reward", lambda n: {"reward": 0.0}, lambda n: {"reward": 0.0 if n else 0.01}, "no completion"),
    ("_mismatch", lambda n: {"ratio_kl": 0.06}, lambda n: {"ratio_kl": 0.05}, "by 0.06 nats"),
    (
        "_gradient",
        lambda n: {"grad_norm": 11.0},
        lambda n: {"grad_norm": 1e6 if n == 3 else 1.0},
        "from 1 to 11",
    ),
    ("_entropy", lambda n: {"entropy": 0.09}, lambda n: {"entropy": 0.1}, "from 1 to 0.09 nats"),
    (
        "_shorter",
        lambda n: {"mean_completion_tokens": 120.0},
        lambda n: {"mean_completion_tokens": 121.0},
        "completions shrank from 200 to 120 tokens",
    ),
    (
        "_truncated",
        lambda n: {"truncated_fraction": 0.14},
        lambda n: {"truncated_fraction": 0.09},
        "14% of the completions are cut off",
    ),
    (
        "_no_gradient",
        lambda n: {"filtered_groups": 16, "unsolved_groups_fraction": 0.7},
        lambda n: {"filtered_groups": 15},
        "80% of the prompts have no gradient: 70% score only 0 and 10% only 1",
    ),
    (
        "_waiting",
        lambda n: {"wait_seconds": 3.8},
        lambda n: {"wait_seconds": 2.9},
        "the trainer waits 38% of the time",
    ),
]


@pytest.mark.parametrize(("rule", "wrong", "right", "says"), RULE_CASES, ids=[case[0] for case in RULE_CASES])
def test_rule(rule: str, wrong: Any, right: Any, says: str) -> None:
    assert says in (health(steps(wrong)) or "")
    assert health(steps(right)) is None
    assert [found.__name__ for found in RULES if found(steps(wrong))] == [rule]


def test_every_rule_has_a_case_and_a_line_in_the_documentation() -> None:
    assert [rule.__name__ for rule in RULES] == [case[0] for case in RULE_CASES]
    page = (ROOT / "docs/operations.md").read_text()
    section = page.split("## Health of a run")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| [^-w]", section, re.MULTILINE)) == len(RULES)


def test_first_rule_is_said() -> None:
    assert "not applied" in (health(steps(lambda n: {"skipped": 1, "truncated_fraction": 0.5})) or "")


def test_rows_without_figures_say_nothing() -> None:
    bare = [{"step": float(n)} for n in range(LAST)]
    assert health(Steps(bare, bare)) is None


def written(directory: Path, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "run.yaml").touch()
    (directory / "metrics.jsonl").write_text(text)
    return directory


def test_status_of_a_run_in_progress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [json.dumps(row(n, truncated_fraction=0.5 * (n > 30))) for n in range(50)]
    assert main(["status", str(written(tmp_path, "\n".join(rows) + '\n{"step": 5'))]) == 0
    assert capsys.readouterr().out == (
        "step 50, reward 0.445, 200 tokens a completion\n50% of the completions are cut off at their maximum length\n"
    )
    assert main(["status", str(written(tmp_path, json.dumps(row(0)) + "\n"))]) == 0
    assert "nothing is wrong in the last 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "warned"),
    [("", ""), ('{"step"', ""), ("[1]\nnull\n\x00\n", "3 lines of "), ('{"step": "0"}\n', "1 line of ")],
)
def test_status_without_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, warned: str
) -> None:
    assert main(["status", str(written(tmp_path, text))]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("has no trained steps yet\n")
    assert said.err.startswith(warned)
    assert bool(said.err) == bool(warned)


def test_last_line_without_a_newline_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And one with a number that JSON does not have is reported, which the coordinator never writes."""
    rows = [json.dumps(row(0)), json.dumps(row(1, reward=math.nan)), json.dumps(row(2))]
    assert main(["status", str(written(tmp_path, "\n".join(rows)))]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("step 3, ")
    assert said.err == f"1 line of {tmp_path / 'metrics.jsonl'} cannot be read and is left out\n"


def test_status_of_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "run.yaml").touch()
    assert main(["status", str(tmp_path)]) == 0
    (tmp_path / "metrics.jsonl").mkdir()
    assert main(["status", str(tmp_path)]) == 2
