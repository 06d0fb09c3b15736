"""The op-graph examples, shortened: problems made from a seed, mid-training on their solutions, then RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, assert_counts_add_up, assert_nothing_left, start_run

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("example", "warm_start", "budget"),
    [
        ("run.yaml", {"steps": 5}, {"maxSteps": 2}),
        ("run-split.yaml", {}, {"maxComputeTokens": 120_000, "split": {"beta": "0.2"}}),
    ],
)
def test_opgraph_example_starts(
    tmp_path: Path, example: str, warm_start: dict[str, Any], budget: dict[str, Any]
) -> None:
    spec = yaml.safe_load((ROOT / "examples/opgraph" / example).read_text())
    spec["spec"]["warmStart"] |= warm_start
    spec["spec"]["task"]["heldOut"]["size"] = 8
    spec["spec"]["budget"] = budget
    with start_run(tmp_path, spec) as run:
        assert run.finish(1000) == 0, run.tail()
        summary, rows = run.summary(), run.metrics()
    assert_nothing_left(run.directory)
    ends_between_steps = "maxSteps" in budget  # one of tokens ends inside the window
    assert_counts_add_up(summary, spec, complete=ends_between_steps)
    assert rows
