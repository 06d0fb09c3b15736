"""Drafts from past responses in a whole run, with a schedule by length and a trace, through kills of the server and of the
coordinator."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import START_SECONDS, LocalRun, assert_counts_add_up, assert_nothing_left, small_spec, start_run

STEPS, PROMPTS, TRAIN, STALENESS = 20, 8, 16, 1

pytestmark = pytest.mark.timeout(1800)


def fed_responses(run: LocalRun) -> float:
    """Past responses that the server was given."""
    (given,) = run.actor_values("scalerl_actor_past_responses_total").values()
    return given


def traced_slots(run: LocalRun) -> set[int]:
    whole, _, _ = (run.directory / "trace.jsonl").read_text().rpartition("\n")
    return {line["slot"] for line in map(json.loads, whole.splitlines()) if line["kind"] == "group"}


def test_speculation_survives_kills_and_reports_acceptance(tmp_path: Path) -> None:
    """Ten epochs of 16 prompts."""
    sums = [
        {"prompt": f"{a}+{a + 7}=", "answer": f"{2 * a + 7:03}", "difficulty": a % 2}
        for a in range(10, 10 + TRAIN + 8)
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    spec = small_spec(
        task__jsonl__path=str(data),
        task__heldOut__size=8,
        recipe__promptsPerStep=PROMPTS,
        recipe__curriculum={"uniform": {}},
        recipe__offPolicy={"pipeline": {"maxStalenessSteps": STALENESS}},
        generator__adaptiveConcurrency=True,
        generator__speculation={"history": {}},
        schedule={"byLength": {}},
        trace=True,
        budget__maxSteps=STEPS,
    )
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 4, START_SECONDS, "four steps")
        server = run.server()
        before = fed_responses(run)
        os.kill(server.pid, signal.SIGKILL)
        run.until(lambda: run.step() >= 8, START_SECONDS, "eight steps")
        # The new server has nothing of the epochs before.
        run.until(lambda: fed_responses(run) > before, 300, "past responses for the new server")
        (coordinator,) = run.find("scalerl_coordinator.main")
        traced, step = traced_slots(run), run.step()
        os.kill(coordinator.pid, signal.SIGKILL)
        assert run.finish(900) == 0, run.tail()
        summary = run.summary()
        lines = [json.loads(line) for line in (run.directory / "history.jsonl").read_text().splitlines()]
        slots = traced_slots(run)
        argv = [sys.executable, "-m", "scalerl_cli.main", "report", str(run.directory)]
        report = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert_nothing_left(run.directory)
    assert_counts_add_up(summary, spec)
    assert {line["prompt"] for line in lines} == set(range(TRAIN))
    assert max(line["visit"] for line in lines) >= 4
    drafted = sum(line.get("drafted_tokens", 0) for line in lines)
    accepted = sum(line.get("accepted_tokens", 0) for line in lines)
    assert 0 < accepted <= drafted
    assert sum(sum(line.get("accepted_by_position", [])) for line in lines) == accepted
    assert {line["difficulty"] for line in lines} == {0, 1}
    assert {"difficulty", "drafts accepted", "at 1"} <= set(re.split(r"  +|\n", report.stdout))
    # A kill costs lines that were not written yet: of steps that could be sampled then.
    assert traced
    assert slots > traced
    lost = {slot // PROMPTS for slot in set(range(STEPS * PROMPTS)) - slots}
    assert lost <= set(range(step - 1, step + STALENESS + 3)), (lost, step)
