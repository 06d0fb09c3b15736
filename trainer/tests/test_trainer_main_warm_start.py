"""Whole runs that begin with mid-training, and the KL reference after a warm start."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
import yaml
from safetensors.torch import load_file
from trainer_run import Run, model_state, until

from scalerl_api import wire
from scalerl_trainer.checkpoints.manifest import MANIFEST, Manifest
from scalerl_trainer.checkpoints.volume import STAGE
from scalerl_trainer.errors import ModelError
from scalerl_trainer.reference import load_reference

pytestmark = pytest.mark.slow


def supervised(run: Run) -> list[dict[str, Any]]:
    """Rows of ``mid-training.jsonl``, without its evaluations."""
    file = run.paths.supervised_metrics
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def mix_of(task: dict[str, Any]) -> dict[str, Any]:
    """Of the same problems twice, with another prompt and other held-out ones."""
    other = {"prompt": {"template": "{prompt} "}, "heldOut": {"size": 3}}
    return {"mix": [task | {"name": "a", "weight": "0.7"}, task | other | {"name": "b", "weight": "0.3"}]}


@pytest.mark.parametrize(
    ("stage", "task"),
    # ZeRO 0 and 1 of one task: a whole run with ZeRO 3 and one of a mix with ZeRO 1 go the same way, and the engine's tests resume every stage.
    [
        pytest.param(0, dict, marks=pytest.mark.full),
        pytest.param(1, dict, marks=pytest.mark.full),
        (3, dict),
        (1, mix_of),
    ],
)
def test_killed_mid_training_resumes_as_if_undisturbed(
    new_run: Any, stage: int, task: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Weights bit for bit, and tokens: nothing is repeated, skipped or counted twice."""
    settings = {
        "task": task,
        "trainer__zeroStage": stage,
        "checkpoint__everySteps": 4,
        "warmStart__steps": 60,
        "warmStart__batchSize": 6,
        "warmStart__learningRate": "1e-2",
    }
    undisturbed, killed = new_run(**settings), new_run(**settings)
    for run in (undisturbed, killed):
        run.start_coordinator()
        if run is killed:
            at = random.randint(5, 35)
            killed.dies_at = {at % 2: at}
            killed.start_trainer()
            assert killed.wait_trainer()[at % 2] == -signal.SIGKILL
            assert killed.checkpoints() == []
            killed.dies_at = {}
        run.start_trainer()
        until(lambda: run.checkpoints() == [0], what="the end of mid-training")  # noqa: B023
        until(lambda: not run.paths.mid_training.root.exists(), what="its checkpoints removed")  # noqa: B023
    assert "mid-training continues after step" in killed.log("trainer-0")
    expected, found = (model_state(run.paths.checkpoint(0)) for run in (undisturbed, killed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    rows = [
        [(row["step"], row["loss"], row["tokens"]) for row in supervised(r)] for r in (undisturbed, killed)
    ]
    assert rows[0] == rows[1]
    assert [step for step, *_ in rows[0]] == list(range(60))
    evaluated = [json.loads(line) for line in killed.paths.supervised_metrics.read_text().splitlines()]
    before, after = (row for row in evaluated if "held_out_loss" in row)
    assert (before["step"], after["step"]) == (0, 60)
    assert after["held_out_loss"] < before["held_out_loss"]
    meters = [run.status() for run in (undisturbed, killed)]
    assert all(meter is not None for meter in meters)
    assert [(m.supervised_steps, m.supervised_tokens) for m in meters] == [(60, rows[0][-1][2])] * 2
    # The meter counts the evaluations and checkpoints between the steps, too.
    assert meters[0].wall_seconds > sum(row["seconds"] for row in supervised(undisturbed))
    assert all(m.wall_seconds > 0 and m.device_seconds == pytest.approx(2 * m.wall_seconds) for m in meters)

    for rank in killed.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert killed.wait_trainer() == [0, 0]
    killed.start_trainer()
    until(lambda: killed.log("trainer-0").count("registered: version 0") >= 2, what="the next start")
    assert killed.log("trainer-0").count("mid-training: 60 steps") == 1, "a finished one is not repeated"


def test_sigterm_in_mid_training_saves_it(new_run: Any) -> None:
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4, checkpoint__everySteps=100_000)
    run.start_coordinator()
    run.start_trainer()
    until(lambda: len(supervised(run)) >= 50, what="step 50")
    os.kill(run.ranks[1].pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    (saved,) = run.paths.mid_training.checkpoints.glob("step-*")
    assert int(saved.name[5:]) >= 50
    status = run.status()
    assert status is not None
    assert status.supervised_steps == int(saved.name[5:]), "the last report is of the state that is saved"
    assert status.supervised_tokens == supervised(run)[-1]["tokens"]
    for rank in (0, 1):
        assert "of mid-training; the next start continues there" in run.log(f"trainer-{rank}")
    assert run.checkpoints() == []


def test_split_run_has_one_meter(new_run: Any) -> None:
    """Tokens of both stages count once, also if the trainer is killed in the first, and it and the coordinator in the second."""
    run = new_run(
        warmStart__batchSize=6,
        checkpoint__everySteps=4,
        budget__maxSteps=10_000,
        budget__maxComputeTokens=1600,
        budget__split={"beta": "0.5"},
    )
    run.dies_at = {0: 15}
    run.start(seconds_per_group=0.05)
    meter: list[float] = []
    saved: list[int] = []

    def read() -> wire.Status:
        until(lambda: run.status() is not None, what="the coordinator")
        status = run.status()
        assert status is not None
        meter.append(status.wall_seconds)
        return status

    run.wait_trainer()
    run.dies_at = {}
    saved.append(supervised(run)[7]["tokens"])
    assert read().compute_tokens <= 800
    run.start_trainer()
    until(lambda: run.step() >= 5, what="step 5 of RL")
    first = read().supervised_tokens
    assert first == supervised(run)[-1]["tokens"]
    assert supervised(run)[-2]["tokens"] < 800 <= first, (
        "mid-training ends with the step that reaches its share"
    )
    assert saved[0] < first
    assert read().compute_tokens > first
    run.coordinator.kill()
    run.coordinator.join()
    os.kill(run.ranks[1].pid, signal.SIGKILL)
    run.start_coordinator()
    run.wait_trainer()  # the leader first gets an answer to the request that it repeats
    assert read().compute_tokens > first, "the journal has both stages"
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    status = read()
    assert (status.phase, status.stop_reason) == (wire.Phase.FINISHED, "maxComputeTokens")
    assert status.supervised_tokens == first, "mid-training is not repeated"
    tokens = [row["completion_tokens"] for row in run.rows()]
    assert [row["step"] for row in run.rows()] == list(range(status.step))
    assert status.compute_tokens == pytest.approx(first + 4 / 3 * sum(tokens))
    assert first + 4 / 3 * sum(tokens[:-1]) < 1600 <= status.compute_tokens
    # A coordinator that is killed loses what it has not written yet.
    assert all(later > earlier - 2 for earlier, later in pairwise(meter))
    assert meter[-1] > meter[1]


def stop_trainer(run: Run) -> None:
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]


def test_damaged_mid_training_checkpoints(new_run: Any) -> None:
    """The newest good one is used; without one, or with another model, the exit code says that a restart does not help."""
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4, checkpoint__everySteps=4)
    folder = run.paths.mid_training.checkpoints
    run.start_coordinator()
    run.start_trainer()
    until(lambda: len(supervised(run)) >= 12, what="step 12")
    stop_trainer(run)
    before, newest = sorted(folder.glob("step-*"))

    other = new_run(
        model__scratch={**run.spec.model.scratch.model_dump(by_alias=True), "intermediateSize": 64}
    )
    run.paths.base_model.rename(run.paths.root / "own-model")
    shutil.copytree(other.paths.base_model, run.paths.base_model)
    run.start_trainer()
    assert run.wait_trainer() == [2, 2]
    message = f"{newest} is of another model: "
    assert message in run.log("trainer-0")
    assert "restore model.*, or start a new run" in run.log("trainer-0")
    shutil.rmtree(run.paths.base_model)
    (run.paths.root / "own-model").rename(run.paths.base_model)

    shard = newest / "rank-00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    run.start_trainer()
    expected = f"mid-training continues after step {int(before.name[5:])},"
    until(lambda: expected in run.log("trainer-0"), what=expected)
    assert f"checkpoint {int(newest.name[5:])} is damaged and is not used: {shard} has" in run.log(
        "trainer-0"
    )
    until(lambda: len(list(folder.glob("step-*"))) == 2, what="the next checkpoint")
    stop_trainer(run)

    for good in folder.glob("step-*"):
        (good / "rank-00000.safetensors").unlink()
    for _ in range(2):
        run.start_trainer()
        assert run.wait_trainer() == [2, 2]
        last = run.log("trainer-0").splitlines()[-1]
        assert f"{folder}: all checkpoints are damaged: damaged-step-" in last
        assert f"or remove {run.paths.mid_training.root} to begin mid-training again" in last
    shutil.rmtree(run.paths.mid_training.root)
    run.start_trainer()
    until(lambda: any(folder.glob("step-*")), what="a new mid-training")
    assert supervised(run)[0]["step"] == 0


def test_mid_training_checkpoint_without_its_state(new_run: Any) -> None:
    """As of a release that kept the stage's state in another file, or otherwise."""
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4, checkpoint__everySteps=4)
    run.start_coordinator()
    run.start_trainer()
    until(lambda: len(supervised(run)) >= 5, what="step 5")
    stop_trainer(run)
    newest = max(run.paths.mid_training.checkpoints.glob("step-*"))
    manifest = Manifest.decode((newest / MANIFEST).read_bytes())
    (newest / STAGE).unlink()
    kept = [record for record in manifest.files if record.path != STAGE]
    (newest / MANIFEST).write_bytes(msgspec.structs.replace(manifest, files=kept).encode())
    run.start_trainer()
    assert run.wait_trainer() == [2, 2]
    last = run.log("trainer-0").splitlines()[-1]
    assert f"{newest / STAGE} cannot be read: " in last
    assert f"remove {run.paths.mid_training.root} to begin mid-training again" in last


def test_directory_of_release_without_mid_training_checkpoints(new_run: Any) -> None:
    """A run that has trained resumes without its files of mid-training; one that has not begins it."""
    run = new_run(budget__maxSteps=9, checkpoint__everySteps=3, warmStart__steps=3, warmStart__batchSize=4)
    generator = run.start(seconds_per_group=0.1, slots=32)
    until(lambda: run.step() >= 4, what="step 4")
    stop_trainer(run)
    run.permit(generator)
    stopped = run.step()
    run.paths.supervised_metrics.unlink()
    run.paths.warm_started_weights.unlink()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {stopped}," in run.log("trainer-0")
    assert run.step() == 9
    assert not supervised(run)

    killed = new_run(
        budget__maxSteps=1, warmStart__steps=60, warmStart__batchSize=4, checkpoint__everySteps=9
    )
    killed.dies_at = {0: 9}
    killed.start()
    killed.wait_trainer()
    killed.dies_at = {}
    shutil.rmtree(killed.paths.mid_training.root, ignore_errors=True)
    killed.paths.supervised_metrics.unlink()
    killed.start_trainer()
    assert killed.wait_trainer() == [0, 0]
    assert [row["step"] for row in supervised(killed)] == list(range(60))


def test_stop_ends_mid_training(new_run: Any) -> None:
    """The run's budget is used up by supervised steps alone: the last evaluation follows."""
    run = new_run(warmStart__steps=100_000, warmStart__batchSize=4)
    run.start()
    until(lambda: (status := run.status()) is not None and status.supervised_steps > 0, what="a report")
    run.stop("maxSeconds")
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.phase, status.step, len(status.points)) == (wire.Phase.FINISHED, 0, 1)
    assert status.points[0].device_seconds >= 2 * sum(row["seconds"] for row in supervised(run)) * 0.5


def test_warm_start_checkpointed_before_first_step(new_run: Any) -> None:
    run = new_run(budget__maxSteps=1, warmStart__steps=3, warmStart__batchSize=4)
    directory = run.start()
    assert run.wait_trainer() == [0, 0]
    assert "mid-training: 3 steps" in run.log("trainer-0")
    assert run.checkpoints() == [0, 1]
    published = torch.load(directory / "v0.pt")
    saved = model_state(run.paths.checkpoint(0))
    assert all(torch.equal(published[name], saved[name]) for name in published)


# With ZeRO 1 the edits of the coefficient below restart from the same reference.
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_kl_reference_is_the_warm_started_model(new_run: Any, stage: int) -> None:
    """Also after a restart: neither the prepared model nor the resumed weights."""
    run = new_run(
        budget__maxSteps=9,
        checkpoint__everySteps=100,
        trainer__zeroStage=stage,
        recipe__kl={"penalty": {"coefficient": "0.1"}},
        warmStart__steps=3,
        warmStart__batchSize=4,
        warmStart__learningRate="1e-2",
    )
    generator = run.start(seconds_per_group=0.1, slots=32)
    until(lambda: run.step() >= 3)
    stop_trainer(run)
    run.permit(generator)
    stopped = run.step()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    kl = [row["reference_kl"] for row in run.rows()]
    assert len(kl) == 9
    assert kl[0] == pytest.approx(0, abs=1e-9)
    # Of the resumed weights it would be 0 again, of the prepared model much more.
    assert 1e-5 < kl[stopped] < 5 * kl[stopped - 1]
    model, stream = load_reference(run.paths, run.spec)
    assert sum(1 for _ in stream.parameters(torch.device("cpu"), reads=True))
    weights = dict(model.named_parameters())
    start = load_file(run.paths.base_model / "model.safetensors")
    assert any(not torch.equal(weights[name], start[name]) for name in weights)

    run.paths.warm_started_weights.unlink()
    with pytest.raises(ModelError, match="weights after the warm start, cannot be read"):
        load_reference(run.paths, run.spec)


@pytest.mark.parametrize("before", [{"penalty": {"coefficient": "0.1"}}, {"none": {}}])
def test_edited_kl_coefficient_keeps_the_warm_started_reference(new_run: Any, before: dict[str, Any]) -> None:
    """Of a run that warm-started earlier; also where the edit adds the penalty."""
    run = new_run(
        budget__maxSteps=8,
        recipe__kl=before,
        warmStart__steps=3,
        warmStart__batchSize=4,
        warmStart__learningRate="1e-2",
    )
    generator = run.start(seconds_per_group=0.1, slots=28)
    until(lambda: run.step() >= 4)
    stop_trainer(run)
    run.permit(generator)
    stopped, reference = run.step(), run.paths.warm_started_weights.read_bytes()
    manifest = yaml.safe_load(run.paths.run_file.read_text())
    manifest["spec"]["recipe"]["kl"] = {"penalty": {"coefficient": "1000"}}
    run.paths.run_file.write_text(yaml.safe_dump(manifest))
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert run.paths.warm_started_weights.read_bytes() == reference
    assert run.log("trainer-0").count("mid-training: 3 steps") == 1
    rows = run.rows()
    assert [("reference_kl" in row) for row in rows] == [
        ("penalty" in before) or i >= stopped for i in range(8)
    ]
    after = rows[stopped]
    # Of another reference, the resumed weights, it would be 0.
    assert after["reference_kl"] > 1e-6
    assert after["loss"] == pytest.approx(1000 * after["reference_kl"], rel=0.5)


def test_kl_penalty_added_to_a_run_without_its_warm_started_weights(new_run: Any) -> None:
    """Refused, until the penalty is taken out again."""
    run = new_run(budget__maxSteps=5, warmStart__steps=3, warmStart__batchSize=4)
    generator = run.start(seconds_per_group=0.1, slots=16)
    until(lambda: run.step() >= 1, what="step 1")
    stop_trainer(run)
    run.permit(generator)
    run.paths.warm_started_weights.unlink()
    stopped, manifest = run.step(), yaml.safe_load(run.paths.run_file.read_text())

    def resume(kl: dict[str, Any]) -> list[int]:
        manifest["spec"]["recipe"]["kl"] = kl
        run.paths.run_file.write_text(yaml.safe_dump(manifest))
        run.start_trainer()
        return run.wait_trainer()

    assert resume({"penalty": {"coefficient": "0.1"}}) == [2, 2]
    last = run.log("trainer-0").splitlines()[-1]
    assert f"recipe.kl.penalty with a warmStart: {run.paths.warm_started_weights}" in last
    assert "set recipe.kl to {none: {}}" in last
    assert run.step() == stopped
    assert resume({"none": {}}) == [0, 0]
    assert run.step() == 5
