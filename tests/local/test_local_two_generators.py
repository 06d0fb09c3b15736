"""Two generators with a schedule by length share past responses, every group is trained once, and one of them evaluates."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from runs import START_SECONDS, assert_counts_add_up, assert_nothing_left, small_spec, start_run

from scalerl_cli.page.runs import Run

PROMPTS, TRAIN, STALENESS = 8, 16, 2

sys.path.append(str(Path(__file__).parents[2] / "trainer/tests"))

pytestmark = pytest.mark.timeout(1200)


def test_two_generators_share_past_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights come through an object store."""
    from s3_server import BUCKET, S3Server

    store = S3Server(tmp_path / "s3.log")
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    try:
        _two_generators(tmp_path, f"s3://{BUCKET}/run")
        left = store.paths()
    finally:
        store.close()
    assert left == ["run/run.json"], "weights are deleted at the end"


def _two_generators(tmp_path: Path, to: str) -> None:
    """Epochs of 16 prompts. A server keeps its own responses, so those that an actor gives it are of the other.

    The run continues until both were given some, and until versions were published to one of the two while the other one kept
    the version that it evaluates: the second generator may be ready many steps after the first.
    """
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
        model__dtype="bfloat16",
        weightSync={"backend": "Files", "to": to},
        evaluation__everySteps=6,
        evaluation__samplesPerPrompt=32,
        evaluation__generators=1,
        checkpoint__everySteps=1000,
        schedule={"byLength": {}},
        trace=True,
        budget__maxSteps=10_000,
    )
    with start_run(tmp_path, spec) as run:

        def both_were_given_responses() -> bool:
            given = run.actor_values("scalerl_actor_past_responses_total")
            return len(given) == 2 and min(given.values()) > 0

        def one_kept_its_version() -> bool:
            """Both had weights, then one of them got newer ones alone, then both."""
            members = [row["publish_members"] for row in run.metrics() if "publish_members" in row]
            both = [at for at, count in enumerate(members) if count == 2]
            return bool(both) and 1 in members[both[0] : both[-1]]

        run.until(lambda: run.step() >= 1, START_SECONDS, "the first step")
        run.until(both_were_given_responses, START_SECONDS, "both generators were given past responses")
        run.until(one_kept_its_version, START_SECONDS, "one generator kept a version")
        run.process.send_signal(signal.SIGINT)
        assert run.finish(300) == 130, run.tail()
        summary = run.summary()
        trace = [json.loads(line) for line in (run.directory / "trace.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
        page = Run(run.directory)
        page.state()
        timeline = page.timeline(None, 50)
        curve = run.curve()
    assert_nothing_left(run.directory)
    assert timeline["busy"] == pytest.approx(rows[-1]["trainer_busy_fraction"], rel=0.01)
    assert_counts_add_up(summary, spec, complete=False)
    assert summary["max_staleness_steps"] <= STALENESS
    assert len(curve) >= 2
    assert "false" in {point["mixed_versions"] for point in curve[1:]}, curve
    groups = [one for one in trace if one["kind"] == "group"]
    slots = [one["slot"] for one in groups]
    assert len(slots) == len(set(slots))
    assert set(slots) >= set(range(summary["steps"] * PROMPTS))
    assert len({one["generator"] for one in groups}) == 2
    assert {one["prompt"] for one in groups} == set(range(TRAIN))
