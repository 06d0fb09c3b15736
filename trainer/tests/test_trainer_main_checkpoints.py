"""Whole runs with lost, damaged, unacknowledged or unwritable checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer_run import until

from scalerl_trainer.fence import STAGED

pytestmark = pytest.mark.slow


def unsaved(run: Any) -> int | None:
    status = run.status()
    return None if status is None else status.unsaved_version


def problem(run: Any) -> str:
    """Why the last checkpoint failed."""
    status = run.status()
    return "" if status is None else status.checkpoint_problem


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
    generator = run.start(seconds_per_group=0.05, slots=20)
    until(lambda: run.step() >= 1)
    aside = run.paths.metrics.with_name("aside")
    run.paths.metrics.rename(aside)
    run.paths.metrics.mkdir()
    run.permit(generator, 32)
    until(lambda: "did not acknowledge it" in run.log("trainer-0"), what="a refused commit")
    refused_at = run.step()
    run.permit(generator)
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
    run.retry_seconds = 2
    run.start()
    until(lambda: unsaved(run) == 5, what="the hold")
    assert all(process.is_alive() for process in run.ranks), "they keep the weights"
    # On a slow machine a write may first wait for the one before.
    until(lambda: "File too large" in problem(run), what="the reason")
    assert run.status().waiting_for.startswith("the trainer's last checkpoint: rank")
    os.kill(run.ranks[1 - rank].pid, signal.SIGTERM)
    assert run.wait_trainer() == [1, 0], "all steps are trained, but their result could not be saved"
    assert run.step() == 5
    # That of version 4 fails beside the last step.
    failures = run.log("trainer-0").count("failed, keeping the last one")
    assert 1 <= run.rows()[-1]["checkpoint_failures"] <= failures
    assert "version 5 could not be saved, all updates are lost" in run.log("trainer-0")
    assert run.paths.checkpoints.is_dir()
    left = [p.name for p in run.paths.checkpoints.glob("step-*")]
    left += [p.name for p in run.paths.checkpoints.rglob(f"{STAGED}*")]
    assert left == [], "neither a checkpoint nor a part of one"
    status = run.status()
    assert status is not None
    if rank == 0:  # which exports
        until(lambda: run.status().exports is not None, what="the exports")  # a tick behind the volume
        until(lambda: run.status().exports.failures >= 3, what="all attempts to export")
        exports = run.status().exports
        assert exports.last is None
        assert "File too large" in exports.problem


@contextlib.contextmanager
def small_volume(path: Path, size: str) -> Iterator[None]:
    """A volume of ``size`` at ``path``. Mounting takes root, which CI has."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> Path:
    """Fill what is free of the volume at ``path``; returns the file to remove, which a later call extends."""
    ballast = path / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def test_full_checkpoint_volume_holds_the_last_weights(new_run: Any) -> None:
    """Mid-run the failure is only visible; at the end, the trainer keeps its weights until there is space."""
    run = new_run(budget__maxSteps=5, trainer__export={"enabled": False})
    run.retry_seconds = 2
    with small_volume(run.paths.checkpoints, "2m"):
        ballast = fill(run.paths.checkpoints)
        generator = run.start(slots=16)
        until(lambda: "No space left" in problem(run), what="a failed checkpoint")
        until(lambda: run.step() == 4, what="training")
        assert unsaved(run) == -1
        run.permit(generator)
        until(lambda: unsaved(run) == 5, what="the hold")
        os.kill(run.coordinator.pid, signal.SIGKILL)  # it learns of the hold again
        run.coordinator.join()
        run.start_coordinator()
        until(lambda: unsaved(run) == 5, what="the hold")
        (folder,) = set(run.paths.checkpoints.iterdir()) - {ballast}
        assert not [p for p in folder.rglob("*") if p.is_file()], "no part of a checkpoint fills the volume"
        ballast.unlink()
        assert run.wait_trainer() == [0, 0]
        assert run.checkpoints() == [5]
        status = run.status()
        assert (status.phase, status.checkpoint_version, status.unsaved_version) == ("finished", 5, -1)
        assert status.checkpoint_problem == ""
        assert [row["step"] for row in run.rows()] == list(range(5))
        counts = status.counts
        assert counts.trained + counts.filtered == 5 * 4 * 3
        assert run.log("trainer-0").count("registered: ") == 1, "no step was trained twice"


def test_full_volume_holds_the_weights_of_mid_training(new_run: Any) -> None:
    run = new_run(
        budget__maxSteps=1, warmStart__steps=5, warmStart__batchSize=4, trainer__export={"enabled": False}
    )
    run.retry_seconds = 2
    folder = run.paths.mid_training.root
    with small_volume(folder, "2m"):
        ballast = fill(folder)
        run.start()
        until(lambda: unsaved(run) == 0, what="the hold")
        until(lambda: "No space left" in problem(run), what="the reason")
        assert run.status().waiting_for.startswith("the trainer's last checkpoint: ")
        assert "Each of the 2 ranks has a part of them" in run.log("trainer-0")
        for rank in run.ranks:
            os.kill(rank.pid, signal.SIGTERM)
        assert run.wait_trainer() == [1, 1]
        assert "mid-training step 5 could not be saved, all its steps are lost: " in run.log("trainer-0")
        run.start_trainer()
        until(lambda: run.log("trainer-0").count("mid-training has ended, and its weights") == 2)
        os.kill(run.coordinator.pid, signal.SIGKILL)  # it learns of the hold again
        run.coordinator.join()
        run.start_coordinator()
        until(lambda: unsaved(run) == 0, what="the hold")
        ballast.unlink()
        assert run.wait_trainer() == [0, 0]
    assert (run.step(), run.checkpoints()) == (1, [1]) or run.checkpoints() == [0, 1]
    assert run.log("trainer-0").count("mid-training: 5 steps") == 1
    assert "continues after step" not in run.log("trainer-0"), "the second trainer lost nothing"
    assert problem(run) == ""


def test_full_run_volume_pauses_the_run(new_run: Any, tmp_path: Path) -> None:
    """The journal is on the same volume: the trainer waits for it, the coordinator restarts on the full volume."""
    with small_volume(tmp_path / "volume", "24m"):
        run = new_run(root=tmp_path / "volume", budget__maxSteps=10)
        generator = run.start(seconds_per_group=0.1, slots=16)
        until(lambda: run.step() >= 2)
        fill(tmp_path / "volume")
        run.permit(generator)

        def journal_refuses() -> bool:
            # Again: what is deleted frees its space, a checkpoint that failed or, at a start, files that were being written.
            fill(tmp_path / "volume")
            status = run.status()
            return status is not None and bool(status.journal_error)

        until(journal_refuses, what="a journal that refuses")
        ballast = fill(tmp_path / "volume")
        held = run.status()
        os.kill(run.coordinator.pid, signal.SIGKILL)
        run.coordinator.join()
        run.start_coordinator()
        until(journal_refuses, what="a coordinator that refuses")
        assert held.step <= run.status().step < 10
        assert run.status().counts.acknowledged >= held.counts.acknowledged
        assert all(process.is_alive() for process in run.ranks)
        ballast.unlink()
        assert run.wait_trainer() == [0, 0]
        assert run.step() == 10
        assert run.log("trainer-0").count("registered: ") == 1
        assert [row["step"] for row in run.rows()] == list(range(10))
        counts = run.status().counts
        assert counts.trained + counts.filtered == 10 * 4 * 3


def test_damaged_checkpoint_is_quarantined(new_run: Any) -> None:
    run = new_run(budget__maxSteps=8)
    generator = run.start(seconds_per_group=0.1, slots=28)
    until(lambda: run.step() >= 3)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    run.permit(generator)
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


def test_deleted_checkpoints_stop_no_training(new_run: Any, tmp_path: Path) -> None:
    """Their folder cannot be used for a while, and is deleted later: the trainer goes on, and what it writes next is whole."""
    run = new_run(budget__maxSteps=12)
    run.retry_seconds = 2
    generator = run.start(seconds_per_group=0.05, slots=20)
    until(lambda: run.checkpoints() and run.step() >= 4, what="a checkpoint")
    folder, aside = run.paths.checkpoints, tmp_path / "aside"
    folder.rename(aside)
    folder.touch()
    run.permit(generator, 32)
    until(lambda: "Not a directory" in run.log("trainer-0"), what="a checkpoint that fails")
    folder.unlink()
    aside.rename(folder)
    until(lambda: run.checkpoints()[-1] >= 6, what="a checkpoint")
    folder.rename(tmp_path / "deleted")  # at once, while files are written in it
    run.permit(generator)
    assert run.wait_trainer() == [0, 0]
    assert run.checkpoints()[-1] == 12
    assert run.log("trainer-0").count("registered: ") == 1
    until(lambda: run.exported() == 12, what="an export")
