"""Two attempts on one volume: the later one fences the earlier one out, however their system calls interleave."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.attempts import Attempt
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.manifest import CheckpointError
from scalerl_trainer.checkpoints.volume import CheckpointStore, files_in
from scalerl_trainer.errors import AttemptSuperseded
from scalerl_trainer.fence import FOLDER, Fence

FIRST, SECOND = Attempt(1_795_000_000, 1), Attempt(1_795_000_000, 2)


class Quick(Disk):
    """Without flushes: a crash is not the subject here."""

    def sync(self, path: Path) -> None:
        pass


class Stepped(Quick):
    """Before each system call, waits until it may go on."""

    def __init__(self) -> None:
        self.reached, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.free = False

    def _call(self, effect: Callable[[], Any]) -> Any:
        if not self.free:
            self.reached.release()
            self._go.acquire()
        return effect()

    def go(self) -> None:
        self._go.release()

    def make_directory(self, path: Path) -> None:
        self._call(lambda: super(Stepped, self).make_directory(path))

    def write(self, path: Path, data: bytes) -> None:
        self._call(lambda: super(Stepped, self).write(path, data))

    def rename(self, source: Path, target: Path) -> None:
        self._call(lambda: super(Stepped, self).rename(source, target))

    def remove(self, path: Path) -> None:
        self._call(lambda: super(Stepped, self).remove(path))

    def sync(self, path: Path) -> None:
        self._call(lambda: None)


class Actor:
    """A thread that runs a task one system call at a time."""

    def __init__(self, task: Callable[[Disk], Any]) -> None:
        self._disk = Stepped()
        self.result: Any = None
        self.done = False
        self._thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._thread.start()
        self._disk.reached.acquire()

    def _run(self, task: Callable[[Disk], Any]) -> None:
        try:
            self.result = task(self._disk)
        except (OSError, CheckpointError, AttemptSuperseded) as error:
            self.result = error
        self.done = True
        self._disk.reached.release()

    def step(self) -> None:
        """Up to the next system call, or to the end."""
        if not self.done:
            self._disk.go()
            self._disk.reached.acquire()

    def finish(self) -> Any:
        while not self.done:
            self.step()
        self._thread.join()
        return self.result


def save(store: CheckpointStore, step: int, by: str) -> list[int]:
    staged = store.stage(step)
    (staged.directory / "state").write_text(f"{by} {step}")
    records = store.flush_and_hash(staged, files_in(staged.directory))
    return store.commit(staged, by.encode(), records, {})


def loaded(store: CheckpointStore) -> tuple[int, str]:
    """The newest valid checkpoint and who wrote it, as a trainer finds them: damaged ones are set aside."""
    for step in store.steps():
        try:
            store.verify(store.manifest(step))
        except CheckpointError as error:
            store.quarantine(step, str(error))
            continue
        by = store.snapshot(step).decode()
        assert (store.directory(step) / "state").read_text() == f"{by} {step}"
        return step, by
    raise AssertionError("no checkpoint is left")


def prepared(root: Path, *, again: bool) -> tuple[RunPaths, Fence]:
    """Checkpoints 10 and 20 of the first attempt, which goes on. again: 30 exists too, and is damaged, and could not be set aside."""
    paths = RunPaths(root)
    fence = Fence.begin(paths.checkpoints, FIRST, Quick())
    store = CheckpointStore(paths, 2, Quick(), fence)
    for step in (10, 20):
        save(store, step, "first")
    if again:
        save(CheckpointStore(paths, 9, Quick(), fence), 30, "lost")
        (store.directory(30) / "state").write_text("damage")
    return paths, fence


def play(root: Path, turns: Iterator[str], *, again: bool) -> tuple[int, int]:
    """The first attempt saves 30 while the second one begins, loads, and saves 30 and 40. Returns the system calls of each."""
    paths, fence = prepared(root, again=again)

    def first(disk: Disk) -> list[int]:
        return save(CheckpointStore(paths, 2, disk, Fence(fence.folder, disk)), 30, "first")

    def second(disk: Disk) -> tuple[int, str]:
        store = CheckpointStore(paths, 2, disk, Fence.begin(paths.checkpoints, SECOND, disk))
        store.remove_staged()
        found = loaded(store)
        for step in range(found[0] + 10, 50, 10):
            save(store, step, "second")
        return found

    actors = {"a": Actor(first), "b": Actor(second)}
    counts = {"a": 0, "b": 0}
    for turn in turns:
        counts[turn] += not actors[turn].done
        actors[turn].step()
    saved, found = actors["a"].finish(), actors["b"].finish()
    assert isinstance(found, tuple), f"the second attempt must not be disturbed: {found!r}"
    assert found in ((20, "first"), (30, "first"))
    if isinstance(saved, list):
        assert found[0] == 30, "a checkpoint that was acknowledged is continued"
    else:
        assert isinstance(saved, AttemptSuperseded | FileNotFoundError), repr(saved)
    after = CheckpointStore(paths, 2)
    assert after.steps()[:2] == [40, 30]
    assert loaded(after) == (40, "second")
    assert after.snapshot(30).decode() == ("first" if found[0] == 30 else "second"), "of one lineage"
    after.verify(after.manifest(30))
    (folder,) = paths.checkpoints.glob(f"{FOLDER}*")
    assert Attempt.parse(folder.name.removeprefix(FOLDER)) == SECOND
    store = CheckpointStore(paths, 2, Quick(), fence)
    with pytest.raises(AttemptSuperseded, match="a later attempt"):
        save(store, 50, "first")
    assert after.steps()[:2] == [40, 30]
    shutil.rmtree(root)
    return counts["a"], counts["b"]


@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_late_save_of_earlier_attempt_is_in_no_other_lineage(tmp_path: Path, again: bool) -> None:
    """The first attempt is interrupted once anywhere, or twice while the second one begins."""
    calls_a, _ = play(tmp_path / "count", iter("a" * 99), again=again)
    _, calls_b = play(tmp_path / "count", iter("b" * 99), again=again)
    assert calls_a > 8
    assert calls_b > 20
    for i, j in itertools.product(range(calls_a + 1), range(calls_b + 1)):
        play(tmp_path / f"{i}-{j}", itertools.chain("a" * i, "b" * j, "a" * calls_a), again=again)
        if j < 8:
            play(tmp_path / f"{i}-{j}", itertools.chain("a" * i, "b" * j, "aa", "b"), again=again)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_every_interleaving_of_a_save_and_a_takeover(tmp_path: Path, again: bool) -> None:
    """Of the calls until the second attempt has loaded; what it saves later is in the other test."""
    calls_a, _ = play(tmp_path / "count", iter("a" * 99), again=again)
    for n, places in enumerate(itertools.combinations_with_replacement(range(calls_a + 1), 6)):
        turns: list[str] = []
        at = 0
        for place in places:
            turns += ["a"] * (place - at) + ["b"]
            at = place
        play(tmp_path / str(n), iter(turns), again=again)


def begin(root: Path, attempt: Attempt | None) -> Fence:
    return Fence.begin(root, attempt, Quick())


def test_numbers_only_rise(tmp_path: Path) -> None:
    """Also over runs of one name on one volume, and where the runtime gives none."""
    first = begin(tmp_path, FIRST)
    second = begin(tmp_path, SECOND)
    with pytest.raises(
        AttemptSuperseded,
        match=rf"1795000000\.1 begins after attempt 1795000000\.2, whose folder is {second.folder}\. Once no .* remove that",
    ):
        begin(tmp_path, FIRST)
    second.check()
    with pytest.raises(AttemptSuperseded):
        first.check()
    again = begin(tmp_path, SECOND)
    with pytest.raises(AttemptSuperseded):
        second.check()
    next_run = begin(tmp_path, Attempt(1_796_000_000, 1))
    local = begin(tmp_path, None)
    assert "1796000000.2-" in local.folder.name
    for other in (again, next_run):
        with pytest.raises(AttemptSuperseded):
            other.check()
    local.check()
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    begin(tmp_path, FIRST).check()
    with pytest.raises(AttemptSuperseded):
        local.check()


def test_of_attempts_that_begin_at_once_the_latest_has_the_right(tmp_path: Path) -> None:
    """Three attempts, one of which was there before; every order of their first seven system calls."""
    for n, order in enumerate(itertools.product("bc", repeat=7)):
        root = tmp_path / str(n)
        earlier = begin(root, FIRST)
        third_attempt = Attempt(FIRST.run_created, 3)
        actors = {
            "b": Actor(partial(Fence.begin, root, SECOND)),
            "c": Actor(partial(Fence.begin, root, third_attempt)),
        }
        for turn in order:
            actors[turn].step()
        second, third = actors["b"].finish(), actors["c"].finish()
        assert isinstance(third, Fence), repr(third)
        third.check()
        with pytest.raises(AttemptSuperseded):
            earlier.check()
        if isinstance(second, Fence):
            with pytest.raises(AttemptSuperseded):
                second.check()
        shutil.rmtree(root)


def test_what_an_earlier_attempt_set_aside_stays(tmp_path: Path) -> None:
    """It may be whole: the lost node could not read it."""
    paths, fence = prepared(tmp_path, again=False)

    class Cut(Quick):
        calls = 0

        def rename(self, source: Path, target: Path) -> None:
            self.calls += 1
            if self.calls == 2:
                raise OSError("lost")
            super().rename(source, target)

    CheckpointStore(paths, 2, Cut(), fence).quarantine(20, "unreadable")
    later = CheckpointStore(paths, 2, Quick(), begin(paths.checkpoints, SECOND))
    assert loaded(later) == (10, "first")
    (name,) = later.quarantined()
    (paths.checkpoints / name).rename(paths.checkpoint(20))
    assert loaded(later) == (20, "first")


def test_checkpoint_that_is_damaged_twice_keeps_no_attempt_from_beginning(tmp_path: Path) -> None:
    """The copy from the object store that replaces it is damaged too."""
    paths, fence = prepared(tmp_path, again=False)
    store = CheckpointStore(paths, 2, Quick(), fence)
    copy = shutil.copytree(store.directory(20), tmp_path / "copy")
    for _ in range(2):
        store.quarantine(20, "damaged")
        shutil.copytree(copy, store.directory(20))
    assert not [*fence.folder.glob("damaged*")]
    assert len(store.quarantined()) == 2
    # One in the attempt's folder whose name is taken.
    (name, _) = store.quarantined()
    shutil.copytree(paths.checkpoints / name, fence.folder / name)
    later = begin(paths.checkpoints, SECOND)
    assert len(store.quarantined()) == 3
    assert not [*later.folder.iterdir()]
    store = CheckpointStore(paths, 2, Quick(), later)
    save(store, 15, "later")
    assert len(store.quarantined()) == 0, "20 is committed"
    assert not [*later.folder.iterdir()]


def test_checkpoint_set_aside_that_cannot_be_moved_stays(tmp_path: Path) -> None:
    first = begin(tmp_path, FIRST)
    (first.folder / "damaged-step-00000020-a").mkdir()

    class Stuck(Quick):
        def rename(self, source: Path, target: Path) -> None:
            if source.name.startswith("damaged-"):
                raise OSError("stuck")
            super().rename(source, target)

    second = Fence.begin(tmp_path, SECOND, Stuck())
    second.check()
    assert [path.name for path in second.folder.iterdir()] == ["damaged-step-00000020-a"]
    begin(tmp_path, Attempt(FIRST.run_created, 3))
    assert (tmp_path / "damaged-step-00000020-a").is_dir()


def test_copy_takes_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    """As a checkpoint that could not be set aside; and of a superseded attempt it does not."""
    paths, fence = prepared(tmp_path, again=False)
    synced: list[str] = []

    class Seen(Quick):
        def sync(self, path: Path) -> None:
            synced.append(path.name)

    store = CheckpointStore(paths, 2, Seen(), fence)
    manifest = store.manifest(20)

    def copy() -> None:
        staged = store.stage_copy(manifest)
        for record in manifest.files:
            shutil.copy(store.directory(20) / record.path, staged.directory / record.path)
        store.commit_copy(staged, manifest)

    copy()
    store.verify(store.manifest(20))
    assert {"state", "manifest.json", "checkpoints"} <= set(synced)
    begin(paths.checkpoints, SECOND)
    with pytest.raises((AttemptSuperseded, OSError)):
        copy()


def test_staging_folders_without_a_fence_are_taken_too(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    store = CheckpointStore(paths, 2, Quick())
    save(store, 10, "old")
    staged = store.stage(20)
    (staged.directory / "state").write_text("old 20")
    records = store.flush_and_hash(staged, files_in(staged.directory))
    later = CheckpointStore(paths, 2, Quick(), begin(paths.checkpoints, FIRST))
    with pytest.raises(OSError, match="No such file"):
        store.commit(staged, b"old", records, {})
    assert loaded(later) == (10, "old")


def test_full_volume_does_not_keep_an_attempt_from_beginning(tmp_path: Path) -> None:
    class Full(Quick):
        def make_directory(self, path: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        Fence.begin(tmp_path, FIRST, Full())
    first = begin(tmp_path, FIRST)
    (first.folder / "stale").mkdir()
    second = Fence.begin(tmp_path, SECOND, Full())
    second.check()
    assert list(second.folder.iterdir()) == []


def test_folder_that_cannot_be_listed_is_no_later_attempt(tmp_path: Path) -> None:
    fence = Fence.begin(tmp_path / "checkpoints", FIRST, Quick())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "os.listdir", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
        with pytest.raises(PermissionError):
            fence.check()
    fence.check()


def test_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """Unless another attempt has one, which is there at once."""
    root = tmp_path / "checkpoints"
    fence = Fence.begin(root, FIRST, Quick())
    shutil.rmtree(root)
    fence.check()
    assert [path.name for path in root.iterdir()] == [fence.folder.name]
    later = Fence.begin(root, SECOND, Quick())
    with pytest.raises(AttemptSuperseded):
        fence.check()
    later.check()
    assert [path.name for path in root.iterdir()] == [later.folder.name]


def test_folder_is_not_made_again_in_one_that_was_removed(tmp_path: Path) -> None:
    """As a later attempt removes that of mid-training, at its end."""
    fence = Fence.begin(tmp_path / "mid-training/checkpoints", FIRST, Quick())
    shutil.rmtree(tmp_path / "mid-training")
    with pytest.raises(AttemptSuperseded):
        fence.check()
    assert not any(tmp_path.iterdir())
