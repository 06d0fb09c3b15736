"""Two generators with a schedule by length share past responses, and every group is trained once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import START_SECONDS, assert_counts_add_up, assert_nothing_left, small_spec, start_run

STEPS, PROMPTS, TRAIN, STALENESS = 10, 8, 16, 2

pytestmark = pytest.mark.timeout(900)


def test_two_generators_share_past_responses(tmp_path: Path) -> None:
    """Five epochs of 16 prompts. A server remembers its own responses, so those that an actor gives it are of the other."""
    sums = [{"prompt": f"{a}+{a + 7}=", "answer": f"{2 * a + 7:03}"} for a in range(10, 10 + TRAIN + 8)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    spec = small_spec(
        task__jsonl__path=str(data),
        task__heldOut__size=8,
        recipe__promptsPerStep=PROMPTS,
        recipe__curriculum={"uniform": {}},
        recipe__offPolicy__pipeline__maxStalenessSteps=STALENESS,
        generator__replicas=2,
        generator__kvCache="64Mi",
        generator__speculation={"history": {}},
        trainer__replicas=1,
        weightSync={"probeSequences": 0},
        evaluation__everySteps=STEPS,
        schedule={"byLength": {}},
        trace=True,
        budget__maxSteps=STEPS,
    )
    with start_run(tmp_path, spec) as run:

        def both_were_given_responses() -> bool:
            given = run.actor_values("scalerl_actor_past_responses_total")
            return len(given) == 2 and min(given.values()) > 0

        run.until(lambda: run.step() >= 1, START_SECONDS, "the first step")
        run.until(both_were_given_responses, 120, "both generators were given past responses")
        assert run.finish(300) == 0, run.tail()
        summary = run.summary()
        trace = [json.loads(line) for line in (run.directory / "trace.jsonl").read_text().splitlines()]
    assert_nothing_left(run.directory)
    assert_counts_add_up(summary, spec)
    assert summary["max_staleness_steps"] <= STALENESS
    groups = [one for one in trace if one["kind"] == "group"]
    assert sorted(one["slot"] for one in groups) == list(range(STEPS * PROMPTS))
    assert len({one["generator"] for one in groups}) == 2
    assert {one["prompt"] for one in groups} == set(range(TRAIN))
