"""Whole runs whose processes are stopped or killed: each continues from its last checkpoint and loses no step."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engines_and_stages import Stage
from torch.distributed import TCPStore
from trainer_run import answers, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("replicas", "stage"), [(2, 1), (1, "FSDP2")])
def test_sigterm_writes_checkpoint_and_next_trainer_resumes(
    new_run: Any, replicas: int, stage: Stage
) -> None:
    """Also where that has another number of ranks and another engine."""
    run = new_run(budget__maxSteps=9, checkpoint__everySteps=100)
    run.start(seconds_per_group=0.1)
    until(lambda: run.step() >= 3)
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert run.wait_trainer() == [0, 0]
    step = run.step()
    assert run.checkpoints() == [step], "of the very step it was stopped at"
    run.reshape(replicas, stage)
    run.start_trainer()
    assert run.wait_trainer() == [0] * replicas
    assert f"registered: version {step}," in run.log("trainer-0")
    assert run.step() == 9


def environ_of(pid: str) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_ranks_of_one_pod_fail_and_checkpoint_together(new_run: Any) -> None:
    """A killed rank ends the pod with its exit code; the next pod resumes; SIGTERM to the pod writes a checkpoint."""
    run = new_run(budget__maxSteps=1000, checkpoint__everySteps=2)
    run.start_coordinator()
    run.start_generator(seconds_per_group=0.1)
    run.start_pod()
    until(lambda: run.step() >= 3 and answers(run.listens[0]), what="step 3")
    children = Path(f"/proc/{run.ranks[0].pid}/task/{run.ranks[0].pid}/children").read_text().split()
    ranks = {pid: environ_of(pid)["RANK"] for pid in children if "RANK" in environ_of(pid)}
    assert sorted(ranks.values()) == ["0", "1"]
    os.kill(int(next(pid for pid, rank in ranks.items() if rank == "1")), signal.SIGKILL)
    assert run.wait_trainer() == [128 + signal.SIGKILL]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert "rank 1 was killed by SIGKILL" in run.log("trainer-pod").splitlines()[-1]

    run.start_pod()
    at = run.step()
    until(lambda: run.step() >= at + 2, what="two more steps")
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    assert run.wait_trainer() == [0]
    assert run.checkpoints()[-1] == run.step(), "of the very step at which it was stopped"
    assert re.search(r"^\[rank 0\] .* INFO scalerl_trainer", run.log("trainer-pod"), re.MULTILINE)


@pytest.mark.parametrize(
    ("joined", "signalled"),
    [({0}, 0), ({1}, 0), ({0, 2}, 0), ({0, 2}, 1)],
    ids=["0", "1", "0 of 0,2", "2 of 0,2"],
)
def test_sigterm_ends_rendezvous(new_run: Any, joined: set[int], signalled: int) -> None:
    """Rank 1, or 0 and 2, never join. One of the waiting ranks gets SIGTERM; the others exit with it."""
    run = new_run(trainer__replicas=3)
    run.start_trainer(joined)
    for rank in joined:
        until(lambda listen=run.listens[rank]: answers(listen), what=f"rank {rank}")
    if 0 in joined:  # which has the store
        until(lambda: answers(run.master), what="rank 0's store")
        limit = timedelta(seconds=120)
        store = TCPStore("127.0.0.1", run.master, is_master=False, timeout=limit, wait_for_workers=False)
        seen = {f"here/{rank}" for rank in joined}
        until(lambda: seen <= {key[-6:] for key in store.list_keys()}, what="all that join")
    os.kill(run.ranks[signalled].pid, signal.SIGTERM)
    assert run.wait_trainer() == [0] * len(joined)


def test_sigterm_without_coordinator_keeps_last_checkpoint(new_run: Any) -> None:
    """A checkpoint needs the coordinator's state; the steps since the last one are repeated."""
    run = new_run(budget__maxSteps=6)
    generator = run.start(seconds_per_group=0.1, slots=20)
    until(lambda: run.step() >= 3 and run.checkpoints(), what="a checkpoint")
    run.coordinator.kill()
    run.coordinator.join()
    saved = run.checkpoints()[-1]
    for rank in run.ranks:
        os.kill(rank.pid, signal.SIGTERM)
    run.wait_trainer()  # long before the time for which a coordinator is waited for
    assert saved in run.checkpoints()
    newest = run.checkpoints()[-1]
    run.permit(generator)
    run.start_coordinator()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {newest}," in run.log("trainer-0")
    assert [row["step"] for row in run.rows()] == list(range(6))


@pytest.mark.parametrize(("victim", "stage"), [(0, 1), (1, "FSDP2")])
def test_killed_rank_ends_others_and_training_resumes(new_run: Any, victim: int, stage: Stage) -> None:
    """A checkpoint is being written at most moments."""
    run = new_run(budget__maxSteps=8, checkpoint__everySteps=1)
    run.reshape(2, stage)
    generator = run.start(seconds_per_group=0.05, slots=28)
    until(lambda: run.step() >= 3)
    os.kill(run.ranks[victim].pid, signal.SIGKILL)
    codes = run.wait_trainer()
    run.permit(generator)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert status.step == 8
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(8))


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_generator_killed_in_publish_does_not_stop_training(new_run: Any, zero_stage: int) -> None:
    run = new_run(trainer__zeroStage=zero_stage)
    run.start_coordinator()
    survivor = run.start_generator(seconds_per_group=0.05)
    run.start_generator({"at": "receive", "how": "kill", "version": 2, "bucket": 1})
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert run.step() == 6
    assert sorted(int(p.stem[1:]) for p in survivor.glob("v*.pt")) == list(range(7))
    assert "gave up publishing version" in run.log("trainer-0")


@pytest.mark.parametrize(("victim", "zero_stage"), [("trainer-0", 1), ("trainer-1", 3), ("coordinator", 1)])
def test_trainer_killed_in_publish_loses_no_step(new_run: Any, victim: str, zero_stage: int) -> None:
    run = new_run(trainer__zeroStage=zero_stage)
    target = run.paths.root / "victim"
    run.start_coordinator()
    fault = {"at": "receive", "how": "shoot", "victim": str(target), "version": 2, "bucket": 1, "times": 1}
    directory = run.start_generator(fault, seconds_per_group=0.05)
    run.start_trainer()
    process = run.coordinator if victim == "coordinator" else run.ranks[int(victim[-1])]
    target.write_text(str(process.pid))
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    if victim == "coordinator":
        run.start_coordinator()
    else:
        assert sorted(run.wait_trainer()) == [-signal.SIGKILL, 1]
        run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert (status.step, status.published_version) == (6, 6)
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(6))
    assert all(row["staleness_max"] <= 2 for row in run.rows())
    assert (directory / "v6.pt").exists()


def test_coordinator_restart(new_run: Any) -> None:
    run = new_run()
    run.start(seconds_per_group=0.05)
    until(lambda: run.step() >= 2)
    os.kill(run.coordinator.pid, signal.SIGKILL)
    time.sleep(1)
    run.start_coordinator()
    assert run.wait_trainer() == [0, 0]
    assert run.step() == 6


def test_attempt_on_a_lost_node_is_fenced_out(new_run: Any) -> None:
    """It stops answering in the middle of training, and goes on when the next one has trained beyond it."""
    run = new_run(budget__maxSteps=12)
    run.start_coordinator()
    generator = run.start_generator(seconds_per_group=0.05, slots=20)
    run.start_trainer(SCALERL_ATTEMPT="1795000000.1")
    until(lambda: run.checkpoints() != [] and run.step() >= 3)
    lost = run.ranks
    for rank in lost:
        os.kill(rank.pid, signal.SIGSTOP)
    run.permit(generator, 44)
    run.start_trainer(SCALERL_ATTEMPT="1795000000.2")
    until(lambda: run.step() >= 6 and run.checkpoints()[-1] >= 6)
    for rank in lost:
        os.kill(rank.pid, signal.SIGCONT)
    following, run.ranks = run.ranks, lost
    codes = run.wait_trainer()
    assert codes[0] == 6
    assert codes[1] in (1, 6), "it only loses rank 0"
    assert "SUPERSEDED: " in run.log("trainer-0")
    # An attempt that was slow to start does not take the run over either.
    run.start_trainer(SCALERL_ATTEMPT="1795000000.1")
    assert run.wait_trainer()[0] == 6
    run.ranks = following
    run.permit(generator)
    assert run.wait_trainer() == [0, 0]
    status = run.status()
    assert status is not None
    assert status.step == 12
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(12))
    assert run.checkpoints()[-1] == 12
