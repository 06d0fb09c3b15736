"""Whole runs: two real ranks, a real coordinator, fake generators that receive real weights."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
import torch
from engines_and_stages import Stage, trainer_of
from safetensors.torch import load_file, save_file
from test_trainer_metrics_fields import FIELDS, OF_OTHER_RUNS, without_range
from trainer_run import http, model_state, until

from scalerl_api import endpoints, wire

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [1, 3, "FSDP2"])
def test_whole_run(new_run: Any, stage: Stage) -> None:
    run = new_run(**{f"trainer__{name}": value for name, value in trainer_of(stage).items()})
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.phase, status.step, status.published_version) == (wire.Phase.FINISHED, 6, 6)
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert run.checkpoints() == [4, 6]
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(6))
    written = {without_range(name) for row in rows for name in row}
    assert (written - FIELDS, FIELDS - written) == (set(), OF_OTHER_RUNS)
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert [row.get("start_kl", 0.0) > 0 for row in rows] == [
        version % 4 == 0 < version for version in range(6)
    ]
    versions = sorted(int(p.stem[1:]) for p in directory.glob("v*.pt"))
    assert versions == list(range(7)), "every version was published"
    last = torch.load(directory / "v6.pt")
    trained = model_state(run.paths.checkpoint(6))
    assert all(torch.equal(last[name], trained[name]) for name in last)
    until(lambda: run.exported() == 6)  # the status is a tick behind the volume
    status = run.status()
    assert status is not None
    exports = status.exports
    assert exports is not None
    assert exports.last is not None
    assert (exports.failures, exports.problem) == (0, "")
    exported = load_file(run.paths.root / exports.last.path / "model.safetensors")
    assert exported.keys() == last.keys()
    assert all(torch.equal(last[name], exported[name]) for name in last)
    shapes = {name: tuple(tensor.shape) for name, tensor in last.items()}
    first = torch.load(directory / "v0.pt")
    assert shapes == {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert not torch.equal(last["model.embed_tokens.weight"], first["model.embed_tokens.weight"])


def test_ppo_off_policy_publishes_between_batches(new_run: Any) -> None:
    """Of six steps in batches of four: the first weights, those after four, and the last, which are evaluated."""
    run = new_run(recipe__offPolicy={"ppo": {"stepsPerBatch": 4}}, recipe__length={"overlong": {}})
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    assert sorted(int(p.stem[1:]) for p in directory.glob("v*.pt")) == [0, 4, 6]
    assert [row["staleness_max"] for row in run.rows()] == [0, 1, 2, 3, 0, 1]


def test_zero_stages_publish_the_same_weights(new_run: Any) -> None:
    """One update from the same data: ZeRO-3's gathered weights are ZeRO-1's."""
    taken = []
    for zero_stage in (1, 3):
        run = new_run(
            trainer__zeroStage=zero_stage,
            budget__maxSteps=1,
            recipe__offPolicy={"pipeline": {"maxStalenessSteps": 0}},
        )
        directory = run.start()
        assert run.wait_trainer() == [0, 0]
        status = run.status()
        assert status is not None
        assert status.mismatch_kl("sampled") is not None
        taken.append(torch.load(directory / "v1.pt"))
    assert taken[0].keys() == taken[1].keys()
    for name in taken[0]:
        torch.testing.assert_close(taken[0][name], taken[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_publish_beside_a_step_is_of_one_version(new_run: Any, zero_stage: int) -> None:
    """Three publishes take longer than a forward and backward pass; what the generator has is bit for bit the checkpoint's."""
    run = new_run(trainer__zeroStage=zero_stage, checkpoint__everySteps=1, checkpoint__keep=8)
    run.start_coordinator()
    wait = {"at": "receive", "how": "wait", "seconds": 1.7, "bucket": 1}
    directory = run.start_generator(*(wait | {"version": version} for version in (2, 3, 4)))
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    beside = [row["publish_wait_seconds"] > 0.2 for row in run.rows()]
    assert any(beside), "no update waited for a publish"
    for version in range(1, 7):
        taken, trained = torch.load(directory / f"v{version}.pt"), model_state(run.paths.checkpoint(version))
        assert all(torch.equal(taken[name], trained[name]) for name in taken), version


def test_interrupted_run_checkpoints_before_evaluation(new_run: Any) -> None:
    run = new_run(evaluation__everySteps=1, evaluation__holdSeconds=300, checkpoint__everySteps=100)
    run.start(skip_held_out=True)
    until(lambda: run.step() >= 1)
    run.stop("interrupted")
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.phase, status.published_version) == (wire.Phase.FINISHED, 0)
    assert run.checkpoints() == [status.step] == [1]


def test_stopped_run_exports_last_model(new_run: Any) -> None:
    run = new_run(checkpoint__everySteps=100, budget__maxSteps=1000)
    directory = run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 2)
    run.stop("enough")
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert 2 <= status.step < 1000
    assert status.points[-1].version == status.step
    until(lambda: run.exported() == status.step)  # the status is a tick behind the volume
    status = run.status()
    assert status is not None
    assert status.exports is not None
    assert status.exports.last is not None
    exported = load_file(run.paths.root / status.exports.last.path / "model.safetensors")
    last = torch.load(directory / f"v{status.step}.pt")
    assert all(torch.equal(last[name], exported[name]) for name in last)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_evaluation_that_holds_a_publish_holds_no_step(new_run: Any, zero_stage: int) -> None:
    """One generator evaluates version 0 and does not end. The steps that k = 2 permits are trained; one that joins goes on with
    the newest weights and yields the points of later versions."""
    run = new_run(trainer__zeroStage=zero_stage, evaluation__everySteps=4, evaluation__holdSeconds=3600)
    run.start_coordinator()
    held = run.start_generator(skip_held_out=True)
    run.start_trainer()
    until(lambda: run.step() == 3, what="version 3")
    status = run.status()
    assert status is not None
    assert status.published_version == 0
    joined = run.start_generator()
    until(lambda: (joined / "v6.pt").exists(), what="version 6")
    os.kill(run.generators[0].pid, signal.SIGKILL)
    assert run.wait_trainer() == [0, 0]
    assert sorted(int(p.stem[1:]) for p in held.glob("v*.pt")) == [0]
    assert sorted(int(p.stem[1:]) for p in joined.glob("v*.pt")) == [3, 4, 5, 6]
    status = run.status()
    assert status is not None
    assert status.step == 6
    assert [(p.version, p.mixed_versions) for p in status.points] == [(4, False), (6, False)]
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert all(row["staleness_max"] <= 2 for row in run.rows())


def test_unfinished_evaluation_is_not_polled_every_round(new_run: Any) -> None:
    run = new_run(evaluation__holdSeconds=1)
    run.start(skip_held_out=True)
    until(lambda: run.paths.metrics.exists() and len(run.rows()) == 6, what="the last step")
    metrics = http.get(f"http://127.0.0.1:{run.port}{endpoints.METRICS}").text
    asked = re.search(r'requests_total\{code="200",path="/v1/status"\} (\S+)', metrics)
    assert asked is not None
    assert float(asked[1]) <= 3, "for each version that is exported, and once more when nothing is known"
    assert run.exported() is None, "no evaluation, so neither best nor last"


def test_bad_batch_is_skipped(new_run: Any) -> None:
    run = new_run()
    directory = run.start(bad_slots=(8, 9, 10, 11))
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.step, status.skipped_steps) == (6, 1)
    assert "100.0 % of tokens have a ratio beyond 10" in status.last_skip_reason
    counts = status.counts
    assert counts.acknowledged == counts.trained + counts.filtered + counts.skipped + counts.queued
    assert counts.skipped == 4 * 3
    assert [row["skipped"] for row in run.rows()] == [0, 0, 1, 0, 0, 0]
    assert run.rows()[2]["trained_tokens"] == 0
    assert "skipped step 2, weights and optimizer are unchanged: " in run.log("trainer-0")
    before, skipped, after = (torch.load(directory / f"v{version}.pt") for version in (2, 3, 4))
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert any(not torch.equal(skipped[name], after[name]) for name in before)


def test_three_consecutive_skipped_steps_diverge(new_run: Any) -> None:
    """The generator's log-probabilities are of no policy the trainer knows. The count survives a restart of the trainer."""
    run = new_run(checkpoint__everySteps=1)
    run.start(logprob=-60.0)
    assert run.wait_trainer() == [3, 3]
    assert "BROKEN: 3 consecutive steps were skipped, the last one (step 2) because 100.0 %" in run.log(
        "trainer-0"
    )
    assert run.step() == 3
    assert run.checkpoints()[-1] < 3
    run.start_trainer()
    assert run.wait_trainer() == [3, 3]
    assert run.step() == 3, "one more in that row is enough"
    status = run.status()
    assert status is not None
    assert (status.counts.trained, status.counts.skipped) == (0, 3 * 4 * 3)


def test_generators_without_finite_logprobs_diverge_at_once(new_run: Any) -> None:
    """All tokens are masked, so every step would be empty and the run would end as a success without an update."""
    run = new_run(budget__maxSteps=2)
    run.start(unusable=True)
    assert run.wait_trainer() == [3, 3]
    log = run.log("trainer-0")
    assert re.search(
        r"BROKEN: the generators' log-probabilities of (\d+) of the \1 tokens of step 0 are not finite", log
    )
    assert run.step() == 0


def test_trainer_without_finite_logprobs_diverges_at_once(new_run: Any) -> None:
    """A weight of the trainer is not a number; the generator's log-probabilities are."""
    run = new_run(budget__maxSteps=2)
    file = run.paths.base_model / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    file.unlink()  # another link to it may exist
    save_file(tensors, file, {"format": "pt"})
    run.start()
    assert run.wait_trainer() == [3, 3]
    assert "BROKEN: step 0 was skipped because the loss is nan" in run.log("trainer-0")
    assert "the trainer's log-probabilities of 100% of its tokens are not numbers" in run.log("trainer-0")
    status = run.status()
    assert status is not None
    assert (status.step, status.skipped_steps) == (1, 1)


def test_bad_input_exits_with_2(new_run: Any) -> None:
    """A task that changes after it was checked: a solution that fits no micro-batch."""
    run = new_run(warmStart__steps=3, warmStart__batchSize=60, trainer__microBatchTokens=64)
    rows = [{"prompt": f"{i}+{i}=", "answer": "1", "solution": "1 2 3 " * 30} for i in range(60)]
    (run.paths.root / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.start_coordinator()
    run.start_trainer()
    assert run.wait_trainer() == [2, 2]
    assert "warmStart: " in run.log("trainer-0")
    assert "microBatchTokens" in run.log("trainer-0")
