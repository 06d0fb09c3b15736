"""The examples of environments: a model learns a game of several turns, to call a tool, and to correct itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from runs import ROOT, assert_nothing_left, start_run

EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("name", "gain"), [("tiny-nim", 0.2), ("tiny-tools", 0.2), ("tiny-retry", 0.1)])
def test_model_learns_an_environment(tmp_path: Path, name: str, gain: float) -> None:
    example = EXAMPLES / name / "run.yaml"
    spec = yaml.safe_load(example.read_text())
    spec["spec"]["task"]["jsonl"]["path"] = str(example.with_name("data.jsonl"))
    warm = spec["spec"]["warmStart"]
    if "jsonl" in warm:
        warm["jsonl"]["path"] = str(example.with_name("warm.jsonl"))
    else:
        warm["dataset"]["files"] = [str(example.with_name("warm.jsonl.gz"))]
    with start_run(tmp_path, spec) as run:
        assert run.finish(1700) == 0, run.tail()
        curve, summary = run.curve(), run.summary()
    assert_nothing_left(run.directory)
    first, last = (float(curve[at]["reward"]) for at in (0, -1))
    assert last > first + gain, curve
    assert summary["grading_errors"] == 0
    assert summary["counts"]["masked_tokens"] > 0, "messages are masked"
