"""Checkpoints of all ranks: loading, and slow disks."""

from __future__ import annotations

import pickle
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints import write
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.load import CheckpointLoader, NoUsableCheckpoint
from scalerl_trainer.checkpoints.random_state import RandomStateError, load_random_state, save_random_state
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import Checkpointer
from scalerl_trainer.engine import EngineSettings


class OnlyRank:
    rank, world, is_leader = 0, 1, True

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds

    def broadcast(self, value: Any, kind: Any) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)

    def all_gather(self, value: Any, kind: Any) -> list[Any]:
        return [self.broadcast(value, kind)]


class Weights:
    """An engine of one file."""

    settings = EngineSettings()
    loaded: bytes | None = None

    def save(self, directory: Path) -> None:
        (directory / "weights").write_bytes(b"weights")

    def copy_state(self) -> Any:
        """As the engine's: written on another thread."""

        def write(directory: Path, progress: Any) -> list[Path]:
            self.save(directory)
            return [directory / "weights"]

        return SimpleNamespace(write=write)

    def load(self, directory: Path) -> None:
        self.loaded = (directory / "weights").read_bytes()


class SlowDisk(Disk):
    """Reads files only once ``released`` is set."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def sha256(self, path: Path, progress: Any = None) -> str:
        self.asked.set()
        self.released.wait(120)
        return super().sha256(path, progress)


class Clock:
    """The writer's: each look at it takes ``tick`` seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = time.monotonic(), tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now


def checkpointer(root: Path, timeout_seconds: float = 60.0, disk: Disk | None = None) -> Checkpointer:
    ranks: Any = OnlyRank(timeout_seconds)
    engine: Any = Weights()
    return Checkpointer(CheckpointStore(RunPaths(root), 2, disk), ranks, engine)


def load(root: Path) -> int | None:
    ranks: Any = OnlyRank(60.0)
    engine: Any = Weights()
    return CheckpointLoader(CheckpointStore(RunPaths(root), 2), ranks, engine).load()


def save(root: Path, step: int) -> None:
    one = checkpointer(root)
    assert one.start(step, b"snapshot") is None
    assert one.finish().error is None


def damage(root: Path, step: int) -> None:
    (RunPaths(root).checkpoint(step) / "weights").write_bytes(b"wrong!!")


def test_load_finds_saved_step(tmp_path: Path) -> None:
    assert load(tmp_path) is None, "no checkpoint at all is a new run"
    save(tmp_path, 3)
    assert load(tmp_path) == 3
    assert CheckpointStore(RunPaths(tmp_path), 2).snapshot(3) == b"snapshot"


def test_load_all_damaged_raises(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
        damage(tmp_path, step)
    for _ in range(3):
        with pytest.raises(
            NoUsableCheckpoint, match=r"damaged-step-00000002-.*damaged-step-00000004-.*good copy"
        ):
            load(tmp_path)
    save(tmp_path, 6)  # a good copy was put in place
    assert load(tmp_path) == 6


def test_finish_slow_disk_fails_checkpoint_before_collective_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_seconds = 6.0
    disk = SlowDisk()
    one = checkpointer(tmp_path, timeout_seconds, disk)
    monkeypatch.setattr(write, "time", clock := Clock(tick=0.75))
    begun = clock.now
    assert one.start(1, b"") is None
    assert disk.asked.wait(120)
    saved = one.finish()
    assert clock.now - begun < timeout_seconds
    assert saved.error == "rank 0: the write made no progress for 3 s"
    assert one.last_step is None
    assert CheckpointStore(RunPaths(tmp_path), 2).steps() == []
    assert "the write before this one still hangs" in str(one.start(2, b"")), "its buffers are in use"
    disk.released.set()
    assert one._writer is not None
    one._writer.join(120)
    assert CheckpointStore(RunPaths(tmp_path), 2).steps() == [], "it changes nothing any more"
    assert one.start(2, b"") is None
    assert one.finish().error is None


def test_hung_write_is_noticed_from_its_last_progress_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the next checkpoint on: training went on meanwhile."""
    disk = SlowDisk()
    one = checkpointer(tmp_path, 3.0, disk)
    monkeypatch.setattr(write, "time", clock := Clock())
    assert one.start(1, b"") is None
    clock.now += 1.0
    assert not one.flushed  # which the ranks exchange before each step
    clock.now += 1.0
    assert one.flushed
    assert one.finish().error == "rank 0: the write made no progress for 1.5 s", "and the clock stands still"
    disk.released.set()
    assert one._writer is not None
    one._writer.join(120)


def test_finish_waits_for_a_write_that_progresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a write without progress may take, and than a collective."""
    one = checkpointer(tmp_path, timeout_seconds := 2.4)
    monkeypatch.setattr(write, "time", clock := Clock())
    begun, started = clock.now, threading.Event()

    def copy_state() -> Any:
        def write(directory: Path, progress: Any) -> list[Path]:
            assert started.wait(120)
            for _ in range(12):
                time.sleep(0.4)  # finish looks every 0.3 s
                clock.now += 1.0
                progress(1)
            (directory / "weights").write_bytes(b"weights")
            return [directory / "weights"]

        return SimpleNamespace(write=write)

    one._engine.copy_state = copy_state  # type: ignore[method-assign]
    assert one.start(1, b"") is None
    assert not one.flushed, "training goes on"
    started.set()
    assert one.finish().error is None
    assert clock.now - begun > timeout_seconds
    assert one.flushed is False, "nothing is pending"


def test_full_disk_fails_the_write_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path, 3)
    one = checkpointer(tmp_path)

    def full(directory: Path) -> None:
        (directory / "weights").write_bytes(b"wei")
        raise OSError(28, "No space left on device")

    one._engine.save = full  # type: ignore[method-assign]
    assert one.start(4, b"") is None
    saved = one.finish()
    assert (saved.step, one.last_step) == (4, None)
    assert "rank 0: OSError: [Errno 28] No space left on device" in str(saved.error)
    assert [p.name for p in RunPaths(tmp_path).checkpoints.iterdir()] == ["step-00000003"]
    assert load(tmp_path) == 3


def test_load_other_shape(tmp_path: Path) -> None:
    one = checkpointer(tmp_path)
    one._shape = {"ranks": "8", "zeroStage": "3", "dtype": "bfloat16"}
    assert one.start(3, b"") is None
    assert one.finish().error is None
    assert load(tmp_path) == 3


def test_load_new_rank_gets_own_random_state(tmp_path: Path) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seen = []
    for rank in range(2):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        save_random_state(tmp_path, rank)
        seen.append(draws())
    after = []
    for rank in (0, 1, 2, 3, 2):
        load_random_state(tmp_path, rank)
        after.append(draws())
    assert after[:2] == seen, "those that were there continue"
    assert after[4] == after[2], "the same at every load"
    assert all(len({a[i] for a in after[:4]}) == 4 for i in range(3))


class _Code:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_load_without_random_states_takes_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes are right: another program wrote it. All ranks agree before the engine loads."""
    save(tmp_path, 2)
    monkeypatch.setattr(
        write,
        "random_state",
        lambda: b"?",
    )
    save(tmp_path, 4)
    assert load(tmp_path) == 2
    (name,) = CheckpointStore(RunPaths(tmp_path), 2).quarantined()
    assert name.startswith("damaged-step-00000004-")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("random-rank00000.pickle", pickle.dumps({"python": _Code()})),
        ("random-rank00000.msgpack", pickle.dumps(_Code())),
        ("random-rank00000.msgpack", b"\x91" * 100_000),
        ("random-rank00001.msgpack", b""),
    ],
)
def test_random_state_executes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RandomStateError, match="random-rank00000"):
        load_random_state(tmp_path, 0)
    assert "executed" not in capsys.readouterr().out
