"""The example of programs: it learns, and it leaves no process and no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from runs import ROOT, assert_nothing_left, start_run

EXAMPLE = ROOT / "examples/tiny-code/run.yaml"

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def test_model_learns_to_write_programs(tmp_path: Path) -> None:
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["spec"]["task"]["jsonl"]["path"] = str(EXAMPLE.with_name("data.jsonl"))
    with start_run(tmp_path, spec) as run:
        # Found among the run's processes: those of other runs on this machine are not.
        run.until(lambda: run.find("sandbox import launcher"), 400, "a sandbox")
        assert run.finish(1700) == 0, run.tail()
        curve, summary = run.curve(), run.summary()
    assert_nothing_left(run.directory)
    first, last = (float(curve[at]["reward"]) for at in (0, -1))
    assert last > first + 0.1, curve
    assert summary["grading_errors"] == 0
    assert 0 <= float(curve[-1]["reward_part_compiled"]) <= 1
