"""Copies of checkpoints that are damaged or cannot be read, in a bucket of a real S3 server on loopback."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import obstore
import pytest
from checkpoint_copies import RUN, Trainer, complete, empty
from s3_server import BUCKET, S3Server

from scalerl_api.object_store import ObjectStore, StoreError
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.load import NoUsableCheckpoint
from scalerl_trainer.checkpoints.manifest import MANIFEST, CheckpointError, FileRecord, Manifest
from scalerl_trainer.checkpoints.object_store import CheckpointCopies

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uploads_end")]
RETRIED = "another attempt follows"


def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store cannot be reached, and no pause is waited for."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("scalerl_api.object_store._RETRIES", {"max_retries": 0})
    monkeypatch.setattr("scalerl_trainer.checkpoints.object_store.time.sleep", lambda seconds: None)


def on_volume(root: Path) -> list[str]:
    return sorted(path.name for path in RunPaths(root).checkpoints.iterdir())


def replace(store: ObjectStore, step: int, name: str, content: bytes) -> None:
    """A file, and its record in the manifest."""
    path = f"step-{step:08d}/{MANIFEST}"
    manifest = Manifest.decode(store.read(path) or b"")
    record = FileRecord(name, len(content), hashlib.sha256(content).hexdigest())
    files = [record if r.path == name else r for r in manifest.files]
    store.put(f"step-{step:08d}/{name}", content)
    store.put(path, msgspec.structs.replace(manifest, files=files).encode())


@pytest.mark.parametrize(
    "how", ["changed", "shorter", "longer", "empty", "missing", "manifest", "other", "outside", "unreadable"]
)
def test_damaged_copy_falls_back(
    tmp_path: Path,
    s3: S3Server,
    to: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Trainer(tmp_path, to)
    for step in (2, 4):
        one.save(step)
        one.upload()
    store = ObjectStore(to)
    folder = "step-00000004"
    if how == "missing":
        store.delete([f"{folder}/weights"])
    elif how == "manifest":
        store.put(f"{folder}/{MANIFEST}", b"{}")
    elif how == "other":
        store.put(f"{folder}/{MANIFEST}", store.read(f"step-00000002/{MANIFEST}") or b"")
    elif how == "outside":
        record = FileRecord("../../../weights", 9, "0" * 64)
        store.put(f"{folder}/{MANIFEST}", Manifest(2, 4, {}, [record]).encode())
    elif how == "unreadable":
        replace(store, 4, "random-rank00000.msgpack", b"?")
    else:
        torn = {"changed": b"weights X", "shorter": b"weights", "longer": b"weights 44", "empty": b""}
        store.put(f"{folder}/weights", torn[how])
    for writer in "bc":
        empty(tmp_path)
        caplog.clear()
        again = Trainer(tmp_path, to, writer=writer)
        assert again.version == 2
        assert "checkpoint 4" in caplog.text
        assert "damaged" in caplog.text
        assert RETRIED not in caplog.text
        assert on_volume(tmp_path) == ["step-00000002"]
    again.save(4)
    again.upload()
    assert complete(s3, to) == [2, 4]
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="d").version == 4, "the damaged one is replaced"

    store.put("step-00000002/weights", b"weights X")
    store.put("step-00000004/weights", b"weights X")
    empty(tmp_path)
    with pytest.raises(NoUsableCheckpoint, match=r"all checkpoints are damaged: \[2, 4\]"):
        Trainer(tmp_path, to, writer="e")


def test_copy_damaged_on_its_way_is_read_again(
    tmp_path: Path, s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Trainer(tmp_path, to)
    for step in (2, 4):
        one.save(step)
        one.upload()
    get_range, damaged = obstore.get_range, list[str]()

    def once(store: Any, path: str, **given: Any) -> bytes:
        part = bytes(get_range(store, path, **given))
        if path.endswith("4/weights") and not damaged:
            damaged.append(path)
            return part[:-1]
        return part

    monkeypatch.setattr(obstore, "get_range", once)
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="b").version == 4
    assert damaged


def test_store_that_fails_within_a_fetch(
    tmp_path: Path, s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Trainer(tmp_path, to)
    for step in (2, 4):
        one.save(step)
        one.upload()
    path, paused = f"{to.removeprefix(f's3://{BUCKET}/')}/step-00000004", list[list[str]]()
    get_range = obstore.get_range

    def then_refused(store: Any, path: str, **given: Any) -> Any:
        part = get_range(store, path, **given)
        if not paused:
            s3.refuse(0)
        return part

    def pause(seconds: float) -> None:
        paused.append(on_volume(tmp_path))
        s3.refuse(float("inf"))

    monkeypatch.setattr(obstore, "get_range", then_refused)
    monkeypatch.setattr("scalerl_trainer.checkpoints.object_store.READERS", 1)
    monkeypatch.setattr("scalerl_trainer.checkpoints.object_store.time.sleep", pause)
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="b").version == 4
    assert len(paused) == 1
    assert s3.read(f"{path}/coordinator.snapshot") == 1, "what is there is not read again"
    assert on_volume(tmp_path) == ["step-00000004"]


def test_copy_without_space_is_not_begun(
    tmp_path: Path,
    s3: S3Server,
    to: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing older is continued from, which would lose steps for a full disk."""
    one = Trainer(tmp_path, to)
    for step in (2, 4):
        one.save(step)
        one.upload()
    shutil.rmtree(RunPaths(tmp_path).checkpoint(4))
    size = sum(r.bytes for r in CheckpointCopies(ObjectStore(to), RUN, "x").manifest(4).files)
    full = SimpleNamespace(f_bavail=(size - 1) // 10, f_frsize=10, f_flag=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: full)
        message = f"checkpoint 4 needs {size:,} bytes and {(size - 1) // 10 * 10:,} are free: .* or enlarge the volume: '{tmp_path}/checkpoints'"
        with pytest.raises(CheckpointError, match=message):
            Trainer(tmp_path, to, writer="b")
    assert s3.read(f"{to.removeprefix(f's3://{BUCKET}/')}/step-00000004/weights") == 0
    assert RETRIED not in caplog.text
    assert Trainer(tmp_path, to, writer="c").version == 4
    assert on_volume(tmp_path) == ["step-00000002", "step-00000004"]


def test_disk_that_fails_within_a_fetch_is_no_failure_of_the_store(
    tmp_path: Path, s3: S3Server, to: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a quota that statvfs does not show."""
    one = Trainer(tmp_path, to)
    for step, size in ((2, 0), (4, 4 << 20)):
        one.save(step, size)
        one.upload()
    shutil.rmtree(RunPaths(tmp_path).checkpoint(4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            Trainer(tmp_path, to, writer="b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert on_volume(tmp_path) == ["step-00000002"], "what was read is removed"
    assert RETRIED not in caplog.text
    assert Trainer(tmp_path, to, writer="c").version == 4


@pytest.mark.parametrize("how", ["changed", "shorter", "missing", "index", "half"])
def test_damaged_weights_after_a_warm_start_are_left_out(
    tmp_path: Path, s3: S3Server, to: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only recipe.kl needs them, and says that they are missing."""
    weights = RunPaths(tmp_path).warm_started_weights
    weights.write_bytes(b"warm")
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    store, path, index = ObjectStore(to), f"warm-started/{weights.name}", "warm-started/files.json"
    match how:
        case "missing":
            store.delete([path])
        case "index":
            store.put(index, b'{"files": [')
        case "half":  # killed before the index
            store.delete([index])
        case _:
            store.put(path, {"changed": b"wirm", "shorter": b"war"}[how])
    before = s3.objects()
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="b").version == 2
    assert not weights.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]
    assert ("the weights after the warm start are not read" in caplog.text) == (how != "half")
    after = s3.objects()
    assert {p for p in before if before[p] != after.get(p)} == {
        f"{to.removeprefix(f's3://{BUCKET}/')}/writer.json"
    }, "nothing is removed"

    weights.write_bytes(b"cold")  # put back by hand, of the same size
    back = Trainer(tmp_path, to, writer="c")
    back.save(4)
    back.upload()
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="d").version == 4
    assert weights.read_bytes() == b"cold"


def test_damaged_checkpoint_whose_copy_cannot_be_read_ends_the_start(
    tmp_path: Path, s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one on the volume would train steps of a copy again."""
    one = Trainer(tmp_path, to)
    for step in (2, 4):
        one.save(step)
        one.upload()
    (RunPaths(tmp_path).checkpoint(4) / "weights").write_bytes(b"weights X")
    with monkeypatch.context() as gone:
        away(gone)
        for writer in "bc":  # the second one finds the folder that the first one has renamed
            with pytest.raises(
                StoreError,
                match=rf"checkpoint 4 in {tmp_path}/checkpoints is damaged, .* cannot be read.* from checkpoint 2 .* "
                rf"remove damaged-step-00000004-\w+\. {to}: GenericError",
            ):
                Trainer(tmp_path, to, writer=writer)
    again = Trainer(tmp_path, to, writer="d")
    assert again.version == 4
    assert not again.uploader.busy
    with monkeypatch.context() as gone:
        away(gone)
        assert Trainer(tmp_path, to, writer="e").version == 4, "the damaged one is not newer"
        shutil.rmtree(RunPaths(tmp_path).checkpoint(4))
        with pytest.raises(StoreError, match="from checkpoint 2"):
            Trainer(tmp_path, to, writer="f")
        for path in RunPaths(tmp_path).checkpoints.glob("damaged-*"):
            shutil.rmtree(path)
        assert Trainer(tmp_path, to, writer="g").version == 2, "as the message says"


def test_store_unreachable_at_start(
    tmp_path: Path, s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    with monkeypatch.context() as gone:
        away(gone)
        again = Trainer(tmp_path, to, writer="b")
        assert again.version == 2, "the volume has it"
        with pytest.raises(StoreError, match=f"no valid checkpoint, and {to}: GenericError"):
            Trainer(tmp_path / "empty", to, writer="c")
    back = Trainer(tmp_path, to, writer="d")
    back.uploader._opened = False
    back.uploader.offer(2, -1)  # as after a start without the store
    back.upload()
    assert complete(s3, to) == [2], "its copies are kept"
