"""Checkpoints under crashes at every system call, power loss, full disks, damage and kill -9."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.engine_files import SavedState
from scalerl_trainer.checkpoints.manifest import MANIFEST, CheckpointError, Manifest
from scalerl_trainer.checkpoints.volume import STAGED, CheckpointStore, files_in

SHAPE = {"ranks": "2"}


def save(store: CheckpointStore, step: int, parts: int = 2, best: int = -1) -> list[int]:
    staged = store.stage(step)
    (staged.directory / "state").mkdir()
    for part in range(parts):
        (staged.directory / "state" / f"part{part}").write_bytes(content(step, part))
    files = list(files_in(staged.directory))
    records = [r for rank in range(2) for r in store.flush_and_hash(staged, files[rank::2])]
    return store.commit(staged, b"snapshot %d" % step, records, SHAPE, best=best)


def content(step: int, part: int) -> bytes:
    return bytes(f"{step}/{part} " * 100, "ascii")


def newest_whole(store: CheckpointStore) -> int | None:
    """The newest valid checkpoint, as a trainer finds it, with its content checked."""
    for step in store.steps():
        with contextlib.suppress(CheckpointError):
            manifest = store.manifest(step)
            store.verify(manifest)
            assert store.snapshot(step) == b"snapshot %d" % step
            for part in range(2):
                assert (store.directory(step) / "state" / f"part{part}").read_bytes() == content(step, part)
            return step
    return None


class Crash(BaseException):
    """The process dies: no handler catches it."""


class CrashingDisk(Disk):
    """Counts system calls; the ``at``-th fails, before or after it took effect, as ``error``.

    With ``power_loss`` what was not flushed is lost when it crashes: written files are cut, and names
    that a folder was not flushed after are as before.
    """

    def __init__(
        self,
        at: int | None = None,
        *,
        after: bool = False,
        error: BaseException | None = None,
        power_loss: bool = False,
    ) -> None:
        self.at, self.after, self.error, self.power_loss = at, after, error, power_loss
        self.calls = 0
        self._unflushed: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def _call(self, effect: Any) -> Any:
        self.calls += 1
        failing = self.calls - 1 == self.at
        if failing and not self.after:
            self._fail()
        result = effect()
        if failing:
            self._fail()
        return result

    def _fail(self) -> None:
        if self.power_loss:
            for source, target in reversed(self._renames):
                with contextlib.suppress(OSError):
                    target.rename(source)
            for path in self._unflushed:
                if path.exists():
                    path.write_bytes(b"")
        raise self.error or Crash

    def make_directory(self, path: Path) -> None:
        self._call(lambda: super(CrashingDisk, self).make_directory(path))

    def write(self, path: Path, data: bytes) -> None:
        def effect() -> None:
            super(CrashingDisk, self).write(path, data)
            self._unflushed.add(path)

        self._call(effect)

    def sync(self, path: Path) -> None:
        def effect() -> None:
            super(CrashingDisk, self).sync(path)
            self._unflushed.discard(path)
            self._renames = [(s, t) for s, t in self._renames if t.parent != path]

        self._call(effect)

    def rename(self, source: Path, target: Path) -> None:
        def effect() -> None:
            super(CrashingDisk, self).rename(source, target)
            self._renames.append((source, target))

        self._call(effect)

    def remove(self, path: Path) -> None:
        self._call(lambda: super(CrashingDisk, self).remove(path))


def calls_of_a_save(root: Path, prepare: Any) -> int:
    prepare(CheckpointStore(RunPaths(root), keep=2))
    disk = CrashingDisk()
    save(CheckpointStore(RunPaths(root), keep=2, disk=disk), 30)
    return disk.calls


def two_saved(store: CheckpointStore) -> None:
    save(store, 10)
    save(store, 20)


def with_damaged_newest(store: CheckpointStore) -> None:
    """The trainer has resumed from 20 and reaches 30 again, whose folder still exists."""
    two_saved(store)
    save(store, 30)
    (store.directory(30) / "state" / "part0").write_bytes(b"damage")


@pytest.mark.parametrize("prepare", [two_saved, with_damaged_newest])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("power_loss", [False, True], ids=["crash", "power-loss"])
def test_crash_at_any_call_leaves_valid_checkpoint(
    tmp_path: Path, prepare: Any, after: bool, power_loss: bool
) -> None:
    calls = calls_of_a_save(tmp_path / "count", prepare)
    assert calls >= 12
    found = set()
    for at in range(calls):
        paths = RunPaths(tmp_path / str(at))
        prepare(CheckpointStore(paths, keep=2))
        with pytest.raises(Crash):
            save(CheckpointStore(paths, 2, CrashingDisk(at, after=after, power_loss=power_loss)), 30)
        store = CheckpointStore(paths, keep=2)
        store.remove_staged()
        newest = newest_whole(store)
        assert newest in (20, 30), f"call {at}: {newest}"
        found.add(newest)
        assert not list(paths.checkpoints.glob(f"{STAGED}*"))
        # and the next one works
        save(store, 40)
        assert newest_whole(store) == 40
    assert 20 in found
    if after or not power_loss:  # until its folder is flushed, a rename may not survive a power loss
        assert 30 in found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_error_at_any_call_keeps_earlier_checkpoints(tmp_path: Path, number: int) -> None:
    calls = calls_of_a_save(tmp_path / "count", two_saved)
    for at in range(calls):
        paths = RunPaths(tmp_path / str(at))
        two_saved(CheckpointStore(paths, keep=2))
        disk = CrashingDisk(at, error=OSError(number, os.strerror(number)))
        kept = None
        with contextlib.suppress(OSError):
            kept = save(CheckpointStore(paths, 2, disk), 30)
        assert newest_whole(CheckpointStore(paths, 2)) in (20, 30)
        if kept is not None:
            assert kept == [20, 30], "only the removal of an old one failed"


def test_commit_keeps_newest_steps(tmp_path: Path) -> None:
    store = CheckpointStore(RunPaths(tmp_path), keep=2)
    assert [save(store, step) for step in (10, 20, 30, 40)] == [[10], [10, 20], [20, 30], [30, 40]]
    assert store.steps() == [40, 30]
    assert store.manifest(40).shape == SHAPE


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "state" / "part1").unlink(),
        lambda d: (d / "state" / "part1").write_bytes(b""),
        lambda d: (d / "state" / "part1").write_bytes(content(99, 1)),
        lambda d: (d / "coordinator.snapshot").write_bytes(b"snapshot 99"),
        lambda d: (d / MANIFEST).unlink(),
        lambda d: (d / MANIFEST).write_bytes(b"{"),
        lambda d: (d / MANIFEST).write_bytes(
            (d / MANIFEST).read_bytes().replace(b'"step": 20', b'"step": 21')
        ),
        lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_bytes()[:-20]),
    ],
)
def test_verify_detects_damage(tmp_path: Path, damage: Any) -> None:
    store = CheckpointStore(RunPaths(tmp_path), keep=2)
    two_saved(store)
    damage(store.directory(20))
    assert newest_whole(store) == 10
    store.quarantine(20, "test")
    assert store.steps() == [10]
    assert save(store, 15) == [10, 15]
    assert [*store.quarantined().values()] == [20]
    assert save(store, 20) == [15, 20]
    assert newest_whole(store) == 20
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000015", "step-00000020"]


def test_commit_keeps_best_step(tmp_path: Path) -> None:
    """A run that has diverged since can be rolled back to it."""
    store = CheckpointStore(RunPaths(tmp_path), keep=2)
    # The best evaluation was at 25: 20 is the newest that is not after it.
    assert [save(store, step, best=min(step, 25)) for step in (10, 20, 30, 40, 50)][2:] == [
        [20, 30],
        [30, 40],
        [40, 50],
    ]
    assert store.steps() == [50, 40, 20]
    assert store.snapshot(20) == b"snapshot 20"
    assert save(store, 60, best=55) == [50, 60], "a better one"
    assert store.steps() == [60, 50]
    save(store, 70, best=5)
    save(store, 80)
    assert store.steps() == [80, 70], "none so old, and none asked for"


def test_manifest_detects_any_changed_bit(tmp_path: Path) -> None:
    store = CheckpointStore(RunPaths(tmp_path), keep=1)
    save(store, 5)
    data = (store.directory(5) / MANIFEST).read_bytes()
    whole = Manifest.decode(data)
    generator = random.Random(0)
    for _ in range(300):
        place = generator.randrange(len(data))
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        with contextlib.suppress(CheckpointError):
            assert Manifest.decode(bytes(changed)) == whole, (
                "a change that is seen through must change nothing"
            )


def test_commit_unrecorded_file_raises(tmp_path: Path) -> None:
    store = CheckpointStore(RunPaths(tmp_path), keep=2)
    staged = store.stage(1)
    (staged.directory / "seen").write_bytes(b"1")
    records = store.flush_and_hash(staged, files_in(staged.directory))
    (staged.directory / "late").write_bytes(b"2")
    with pytest.raises(CheckpointError, match="late"):
        store.commit(staged, b"", records, SHAPE)


def test_sigkill_at_random_times_leaves_valid_checkpoint(tmp_path: Path, processes: Any) -> None:
    generator = random.Random(int(os.environ.get("PYTEST_SEED", "0")))
    paths = RunPaths(tmp_path)
    last = 0
    for _ in range(12):
        writer = processes.run("checkpoint_writer.py", WRITER={"root": tmp_path, "keep": 2})
        deadline = time.monotonic() + 120
        while not any(s > last for s in CheckpointStore(paths, 2).steps()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(generator.random() * 0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(120)
        store = CheckpointStore(paths, 2)
        store.remove_staged()
        newest = store.steps()[0]
        store.verify(store.manifest(newest))
        assert store.snapshot(newest) == b"snapshot %d" % newest
        assert newest > last
        last = newest


@pytest.mark.slow
def test_thirty_kills_during_writes_beside_training_leave_a_whole_checkpoint(
    tmp_path: Path, processes: Any
) -> None:
    """Each has the values of one step, although all change while it is written."""
    generator = random.Random(int(os.environ.get("PYTEST_SEED", "0")))
    paths, last, during = RunPaths(tmp_path), 0, 0
    for _ in range(30):
        writer = processes.run("state_writer.py", WRITER={"root": tmp_path})
        deadline = time.monotonic() + 120
        while not any(s > last for s in CheckpointStore(paths, 2).steps()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(generator.random() * 0.1)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(120)
        during += any(paths.checkpoints.glob(f".attempt-*/{STAGED}0*/*"))
        store = CheckpointStore(paths, 2)
        newest = store.steps()[0]
        store.verify(store.manifest(newest))
        assert store.snapshot(newest) == b"snapshot %d" % newest
        state = SavedState(store.directory(newest))
        assert state.header.steps_done == newest > last
        for name in state.header.parameters:
            assert set(state.whole(name).tolist()) == {newest}
        last = newest
    assert during > 5, "most kills are to come during a write"
