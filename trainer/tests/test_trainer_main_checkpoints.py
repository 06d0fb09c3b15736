"""Whole runs with lost, damaged, unacknowledged or unwritable checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest
import yaml
from trainer_run import until

pytestmark = pytest.mark.slow


def test_last_version_checkpointed_before_evaluation(new_run: Any) -> None:
    run = new_run(
        evaluation__everySteps=1,
        evaluation__holdSeconds=300,
        checkpoint__everySteps=100,
        budget__maxSteps=1,
    )
    run.start(skip_held_out=True)
    until(lambda: run.checkpoints() == [1], what="the last checkpoint")
    assert all(rank.is_alive() for rank in run.ranks), "they wait for an evaluation that does not come"


def test_best_checkpoint_kept_once_autoscaling_is_on(new_run: Any) -> None:
    """An edit of ``spec.autoscaling.mode`` restarts nothing."""
    run = new_run(evaluation__everySteps=3, checkpoint__everySteps=1, checkpoint__keep=1, budget__maxSteps=60)
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 4)
    assert len(run.checkpoints()) <= 2, "one, and what is being written"
    manifest = yaml.safe_load(run.paths.run_file.read_text())
    manifest["spec"]["autoscaling"] = {"mode": "Advisory"}
    aside = run.paths.run_file.with_suffix(".new")
    aside.write_text(yaml.safe_dump(manifest))
    aside.replace(run.paths.run_file)
    until(lambda: run.checkpoints()[-1] - run.checkpoints()[0] >= 2, what="a checkpoint of the best")


def test_lost_checkpoints_do_not_restart_run(new_run: Any) -> None:
    run = new_run()
    run.start()
    assert run.wait_trainer() == [0, 0]
    shutil.rmtree(run.paths.checkpoints)
    run.start_trainer()
    assert run.wait_trainer() == [2, 2]
    assert "checkpoints-lost" in run.log("trainer-0")
    assert run.step() == 6


def test_unacknowledged_checkpoint_does_not_stop_training(new_run: Any) -> None:
    """Its metrics.jsonl cannot be written for a while: the trainer continues, and retries the report."""
    run = new_run(budget__maxSteps=12)
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 1)
    aside = run.paths.metrics.with_name("aside")
    run.paths.metrics.rename(aside)
    run.paths.metrics.mkdir()
    until(lambda: "did not acknowledge it" in run.log("trainer-0"), what="a refused commit")
    refused_at = run.step()
    until(lambda: run.step() >= refused_at + 2, what="training")
    run.paths.metrics.rmdir()
    aside.rename(run.paths.metrics)
    assert run.wait_trainer() == [0, 0]
    assert [row["step"] for row in run.rows()] == list(range(12))
    assert run.log("trainer-0").count("registered: ") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_fails_checkpoints_only(new_run: Any, rank: int) -> None:
    """One rank cannot write files of more than 32 KiB: the other must neither hang nor keep its half."""
    run = new_run(budget__maxSteps=5)
    run.largest_file = {rank: 32 << 10}
    run.start()
    assert run.wait_trainer() == [1, 0], "all steps are trained, but their result could not be saved"
    assert run.step() == 5
    assert run.rows()[-1]["checkpoint_failures"] == 2
    assert "failed, keeping the last one" in run.log("trainer-0")
    assert run.paths.checkpoints.is_dir()
    left = [p for p in run.paths.checkpoints.iterdir() if p != run.paths.exports]
    assert left == [], "neither a checkpoint nor a part of one"
    status = run.status()
    assert status is not None
    if rank == 0:  # which exports
        assert status.exports is not None
        assert status.exports.last is None
        assert status.exports.failures >= 3
        assert "File too large" in status.exports.problem


def test_damaged_checkpoint_is_quarantined(new_run: Any) -> None:
    run = new_run(budget__maxSteps=8)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 3)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    before, newest = run.checkpoints()
    file = run.paths.checkpoint(newest) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"checkpoint {newest} is damaged" in run.log("trainer-0")
    assert f"registered: version {before}," in run.log("trainer-0")
    assert run.step() == 8
    assert [row["step"] for row in run.rows()] == list(range(8))
