"""The autoscaler adds a generator to a run whose trainer waits for its only one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import START_SECONDS, LocalRun, assert_counts_add_up, assert_nothing_left, small_spec, start_run

from scalerl_autoscaling.decision_log import Line
from scalerl_autoscaling.replay import verify

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

STALENESS = 4
MORE_STEPS = 6
"""Trained with two generators before the run is ended."""


def counting(path: Path) -> Path:
    """Prompts with long answers: "12-15:" is to be answered with "12 13 14 15"."""
    with path.open("w") as file:
        for first in range(10, 70):
            for last in range(first + 8, first + 25):
                answer = " ".join(str(number) for number in range(first, last))
                file.write(json.dumps({"prompt": f"{first}-{last - 1}:", "answer": answer}) + "\n")
    return path


def hungry(data: Path) -> dict[str, Any]:
    """A small model, long completions and four of them at a time, steps that publish seldom: the trainer waits."""
    return small_spec(
        model__scratch={
            "layers": 2,
            "hiddenSize": 64,
            "attentionHeads": 2,
            "intermediateSize": 192,
            "vocabularySize": 128,
        },
        model__contextTokens=160,
        task__jsonl__path=str(data),
        # Until it ends its answers; whether they are right does not matter here.
        warmStart={"steps": 150, "batchSize": 32, "learningRate": "3e-3"},
        recipe__promptsPerStep=10,
        recipe__zeroVarianceFilter=False,
        recipe__maxCompletionTokens=120,
        recipe__offPolicy__pipeline__maxStalenessSteps=STALENESS,
        generator__maxConcurrentSequences=4,
        generator__kvCache="64Mi",
        trainer__replicas=1,
        evaluation__everySteps=1000,
        checkpoint__everySteps=1000,
        budget__maxSteps=10_000,
        autoscaling={"mode": "Auto", "generators": {"min": 1, "max": 2}, "cooldownSeconds": 20},
    )


def delivered(run: LocalRun) -> dict[str, float]:
    """Groups that the coordinator took from each generator, as the generators' own metrics have it."""
    return run.actor_values('scalerl_actor_groups_total{result="accepted"}')


def grown(run: LocalRun) -> list[Line]:
    """The recorded decisions to change the number of generators."""
    record = run.directory / "decisions.jsonl"
    written = record.read_bytes() if record.exists() else b""
    lines, differences = verify(written[: written.rfind(b"\n") + 1])  # the last line may be half there
    assert differences == []
    return [line for line in lines if line.decision.action.kind == "scale"]


def pace(rows: list[dict[str, Any]], generators: int) -> float:
    """Seconds a step by the wall, from the first step with so many generators to the last; to be looked at."""
    walls = [row["wall_seconds"] for row in rows if row["publish_members"] == generators]
    return float(walls[-1] - walls[0]) / max(1, len(walls) - 1)


def test_autoscaler_adds_a_generator_for_a_waiting_trainer(tmp_path: Path) -> None:
    spec = hungry(counting(tmp_path / "counting.jsonl"))
    with start_run(tmp_path, spec) as run:
        run.until(lambda: run.step() >= 1, START_SECONDS, "a step")
        run.until(lambda: grown(run), 400, "a second generator that is wanted")
        run.until(
            lambda: len(taken := delivered(run)) == 2 and min(taken.values()) > 0,
            240,
            "groups from both generators",
        )
        both, at = delivered(run), run.step()
        run.until(lambda: run.step() >= at + MORE_STEPS, 300, "steps with two generators")
        run.process.send_signal(signal.SIGINT)
        assert run.finish(120) == 130, run.tail()
    assert_nothing_left(run.directory)

    assert both.keys() == {"generator-0", "generator-1"}
    first, *more = grown(run)
    assert (first.policy, first.decision.action.scale_to) == ("balance", 2)
    assert "1 → 2 generators: the trainer waits for rollouts" in first.decision.reasons[0]
    assert not more, [line.decision.reasons for line in more]

    rows = run.metrics()
    assert (rows[0]["publish_members"], rows[-1]["publish_members"]) == (1, 2)
    print(f"seconds a step: {pace(rows, 1):.2f} with one generator, {pace(rows, 2):.2f} with two")
    summary = run.summary()
    assert summary["max_staleness_steps"] <= STALENESS
    assert_counts_add_up(summary, spec, complete=False)
    assert [row["step"] for row in rows] == list(range(summary["steps"]))

    replayed = subprocess.run(
        [sys.executable, "-m", "scalerl_cli.main", "replay", str(run.directory)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all reproduced" in replayed.stdout
