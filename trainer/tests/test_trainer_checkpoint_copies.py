"""Copies of checkpoints in a bucket of a real S3 server on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import obstore
import pytest
from s3_server import BUCKET, S3Server
from test_trainer_checkpointer import OnlyRank, Weights
from trainer_run import until

from scalerl_api import wire
from scalerl_api.object_store import ObjectStore, StoreError
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.load import CheckpointLoader, NoUsableCheckpoint
from scalerl_trainer.checkpoints.manifest import MANIFEST, CheckpointError, FileRecord, Manifest
from scalerl_trainer.checkpoints.object_store import (
    RUN_FILE,
    CheckpointCopies,
    PrefixTaken,
)
from scalerl_trainer.checkpoints.upload import Uploader, UploadState
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import Checkpointer, Timings
from scalerl_trainer.errors import AttemptSuperseded
from scalerl_trainer.metrics import Metrics

pytestmark = pytest.mark.slow

RETRIED = "another attempt follows"
QUICK = Timings(exchange=0.02)
RUN = {"namespace": "", "name": "run", "seed": 0, "model": {}}


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "server.log")
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for variable in [v for v in os.environ if v.startswith("AWS_") or v.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    for variable, value in s3_server.environ.items():
        monkeypatch.setenv(variable, value)
    return s3_server


@pytest.fixture
def to(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


class Relay:
    """A slow connection to the server: ``bytes_per_second`` upwards in all."""

    def __init__(self, port: int, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                if slow:
                    with self._lock:
                        time.sleep(len(data) / self.bytes_per_second)
                target.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            target.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def slow(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    relay = Relay(int(s3.url.rpartition(":")[2]), 2e6)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
    yield relay
    relay.close()


UPLOADERS: list[Uploader] = []


@pytest.fixture(autouse=True)
def uploads_end_with_their_test() -> Iterator[None]:
    """Otherwise their attempts continue, and other tests find the log lines."""
    yield
    for uploader in UPLOADERS:
        uploader._ended = True
        if uploader._current is not None:
            uploader._current.cancel()
    UPLOADERS.clear()
    for thread in threading.enumerate():
        if thread.name == "upload":
            thread.join(60)
            assert not thread.is_alive()


class Trainer:
    """One rank's checkpoints on a volume, with copies."""

    def __init__(
        self, root: Path, to: str, *, keep: int = 2, run: dict[str, Any] = RUN, writer: str = "a"
    ) -> None:
        self.volume = volume = CheckpointStore(RunPaths(root), keep)
        copies = CheckpointCopies(ObjectStore(to), run, writer)
        self.metrics = Metrics()
        self.uploader = Uploader(
            copies, volume, rank=0, world=1, keep=keep, metrics=self.metrics, pauses=(0.05,)
        )
        UPLOADERS.append(self.uploader)
        self.engine = Weights()
        ranks: Any = OnlyRank(60.0)
        engine: Any = self.engine
        self.checkpointer = Checkpointer(volume, ranks, engine, uploader=self.uploader, timings=QUICK)
        self.version = CheckpointLoader(
            volume, ranks, engine, uploader=self.uploader, exchange_seconds=QUICK.exchange
        ).load()
        self.checkpointer.continue_from(self.version)

    def save(self, step: int, size: int = 0, best: int = -1) -> None:
        self.engine.save = lambda directory: (directory / "weights").write_bytes(
            f"weights {step}".encode().ljust(size, b".")
        )
        assert self.checkpointer.start(step, f"snapshot {step}".encode(), best) is None
        assert self.checkpointer.finish().error is None

    def sync(self) -> None:
        self.uploader.advance([self.uploader.state])

    def until(self, true: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, self.uploader.problem
            self.sync()
            time.sleep(0.01)

    def upload(self) -> None:
        self.until(lambda: not self.uploader.busy)


def complete(s3: S3Server, to: str) -> list[int]:
    prefix = to.removeprefix(f"s3://{BUCKET}/") + "/step-"
    names = [p.removeprefix(prefix) for p in s3.objects() if p.startswith(prefix)]
    return sorted(int(n.split("/")[0]) for n in names if n.endswith(f"/{MANIFEST}"))


def empty(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def test_empty_volume_continues_from_store(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    assert one.version is None
    weights = RunPaths(tmp_path).warm_started_weights
    weights.write_bytes(b"warm")
    for step in (2, 4, 6, 8):
        one.save(step, best=3)
        one.upload()
        assert one.uploader.uploaded == step
    assert complete(s3, to) == [2, 6, 8], "the newest two, and the best"
    prefix = to.removeprefix(f"s3://{BUCKET}/")
    folders = {p.split("/")[1] for p in s3.objects() if p.startswith(f"{prefix}/step-")}
    assert folders == {"step-00000002", "step-00000006", "step-00000008"}
    before = {
        p.relative_to(tmp_path): p.read_bytes()
        for p in RunPaths(tmp_path).checkpoint(8).rglob("*")
        if p.is_file()
    }

    empty(tmp_path)
    again = Trainer(tmp_path, to, writer="b")
    assert again.version == 8
    assert again.engine.loaded == b"weights 8"
    assert again.volume.snapshot(8) == b"snapshot 8"
    after = {
        p.relative_to(tmp_path): p.read_bytes()
        for p in RunPaths(tmp_path).checkpoint(8).rglob("*")
        if p.is_file()
    }
    assert after == before
    assert weights.read_bytes() == b"warm"
    assert not again.uploader.busy, "what is there is not sent again"

    one.save(10)
    one.until(lambda: one.uploader.problem)
    assert "another trainer writes" in one.uploader.problem, "the earlier trainer stops"
    assert complete(s3, to) == [2, 6, 8]
    again.save(10)
    again.upload()
    assert complete(s3, to)[-1] == 10


def niceness() -> dict[str, int]:
    """Of the upload's thread and of those of the client library, by name."""
    ids = {t.name: str(t.native_id) for t in threading.enumerate() if t.name == "upload"}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            ids[(task / "comm").read_text().strip()] = task.name
    ids.pop("python", None)
    found: dict[str, int] = {}
    for name, thread in ids.items():
        with contextlib.suppress(OSError):
            found[name] = os.getpriority(os.PRIO_PROCESS, int(thread))
    return found


def test_upload_goes_after_the_compute(tmp_path: Path, s3: S3Server, slow: Relay, to: str) -> None:
    """In a process of its own, whose first request to the store starts the client library's threads."""
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_trainer_checkpoint_copies import Trainer, niceness
trainer = Trainer(Path({str(tmp_path)!r}), {to!r})
trainer.save(1, 1 << 20)
found = {{}}
while trainer.uploader.busy:
    found |= niceness()
    trainer.sync()
print(found["upload"], found["tokio-rt-worker"], trainer.uploader.uploaded)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "19 19 1\n", done.stdout + done.stderr


def test_earlier_attempt_that_thaws_does_not_keep_the_prefix(tmp_path: Path, s3: S3Server, to: str) -> None:
    """Of two attempts the later one writes, whichever claimed last."""
    earlier = CheckpointCopies(ObjectStore(to), RUN, "1795000000.1-a")
    earlier.claim()
    later = Trainer(tmp_path, to, writer="1795000000.2-b")
    for refused in (earlier.claim, earlier.check_writer):
        with pytest.raises(AttemptSuperseded, match=rf"remove {to}/writer\.json"):
            refused()
    with pytest.raises(AttemptSuperseded, match=r"attempt 1795000000\.2 writes"):
        Trainer(tmp_path / "other", to, writer="1795000000.1-a")
    ObjectStore(to).put(
        "writer.json", b'{"incarnation": "1795000000.1-a"}'
    )  # between its check and its write
    later.save(2)
    later.upload()
    assert complete(s3, to) == [2]
    assert later.uploader.problem == ""
    with pytest.raises(AttemptSuperseded):
        earlier.check_writer()


def test_newer_volume_is_uploaded(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    plain: Any = Checkpointer(CheckpointStore(RunPaths(tmp_path), 2), OnlyRank(60.0), Weights())
    assert plain.start(4, b"s") is None
    assert plain.finish().error is None
    again = Trainer(tmp_path, to, writer="b")
    assert (again.version, again.uploader.uploaded) == (4, 2)
    again.upload()
    assert complete(s3, to) == [2, 4]


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


def test_earlier_attempt_replaces_no_file_of_the_later_one(tmp_path: Path, s3: S3Server, to: str) -> None:
    """Both have a checkpoint of the same step."""
    earlier = Trainer(tmp_path / "a", to, writer="1795000000.1-a")
    for step in (2, 4):
        earlier.save(step)
        earlier.upload()
    prefix = to.removeprefix(f"s3://{BUCKET}/")
    later = Trainer(tmp_path / "b", to, writer="1795000000.2-b")
    assert later.version == 4
    RunPaths(tmp_path / "a").warm_started_weights.write_bytes(b"warm")
    earlier.uploader.copies._warm_started_sent = False
    earlier.save(6)
    earlier.until(lambda: earlier.uploader.problem)
    assert "attempt 1795000000.2 writes" in earlier.uploader.problem
    assert not earlier.uploader.busy
    copies, volume = earlier.uploader.copies, CheckpointStore(RunPaths(tmp_path / "a"), 2)
    for record in volume.manifest(6).files:
        with pytest.raises(AttemptSuperseded):
            copies.send(volume.directory(6), 6, record)
    assert not [p for p in s3.objects() if p.startswith((f"{prefix}/step-00000006", f"{prefix}/warm"))]
    later.save(6)
    later.upload()
    assert complete(s3, to) == [4, 6]


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


def test_prefix_of_another_run_is_refused(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path / "a", to)
    one.save(2)
    one.upload()
    with pytest.raises(
        PrefixTaken, match=rf"{to} belongs to the run -/run; this run differs in name, seed\. Give"
    ):
        Trainer(tmp_path / "b", to, run={**RUN, "name": "other", "seed": 1}, writer="b")
    assert complete(s3, to) == [2]
    store = ObjectStore(to)
    assert not store.create(RUN_FILE, b"{}"), "the server refuses a second creation"
    assert json.loads(store.read(RUN_FILE) or b"") == RUN


def test_failing_store_does_not_stop_checkpoints(tmp_path: Path, s3: S3Server, to: str) -> None:
    """Credentials that expire within an upload, and are renewed two checkpoints later."""
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    s3.refuse(3)
    try:
        one.save(4, size=20 << 20)  # in parts
        one.until(lambda: one.uploader.problem)
        assert "403" in one.uploader.problem
        one.save(6)
        one.save(8)
        assert one.checkpointer.committed_step == 8
        one.until(lambda: one.uploader.uploading == 8)  # the failed one is given up
        assert one.uploader.uploaded == 2
        assert one.metrics.uploads.labels("failed")._value.get() >= 1
    finally:
        s3.refuse(float("inf"))
    one.upload()
    assert (one.uploader.uploaded, one.uploader.problem) == (8, "")
    assert complete(s3, to) == [2, 8]
    prefix = to.removeprefix(f"s3://{BUCKET}/")
    assert not [p for p in s3.objects() if p.startswith(f"{prefix}/step-00000004")], "remains are removed"


def test_one_failure_does_not_give_up_an_upload(tmp_path: Path, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    one.uploader._pauses = (60.0,)
    s3.refuse(0)
    try:
        one.save(2)
        one.until(lambda: one.uploader.problem)
        one.save(4)
        one.sync()
        assert one.uploader.uploading == 2
        two, four = UploadState(error="e", failures=2), UploadState(error="e", failures=3)
        one.uploader.advance([two])
        assert one.uploader.uploading == 2
        one.uploader.advance([four])
        assert one.uploader.uploading == 4
    finally:
        s3.refuse(float("inf"))


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


def test_slow_store_skips_to_newest(tmp_path: Path, slow: Relay, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to, keep=1)
    slow.bytes_per_second = 2e4  # an upload takes minutes
    for step in (2, 4, 6):
        one.save(step, 3 << 20)
        one.sync()
    assert one.uploader.uploading == 2, "no save has waited for it"
    assert CheckpointStore(RunPaths(tmp_path), 1).steps() == [6, 2], "what is being sent stays on the volume"
    slow.bytes_per_second = 1e9
    one.upload()
    assert one.uploader.uploaded == 6
    assert s3.sent(f"{to.removeprefix(f's3://{BUCKET}/')}/step-00000004/weights") == 0
    assert complete(s3, to) == [6]
    one.save(8)
    assert CheckpointStore(RunPaths(tmp_path), 1).steps() == [8]
    one.upload()


KILLED = """
import sys, threading
from pathlib import Path
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.object_store import CheckpointCopies
from scalerl_trainer.metrics import Metrics
from scalerl_api.object_store import ObjectStore
from scalerl_trainer.checkpoints.upload import Uploader

root, to, run = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
copies, volume = CheckpointCopies(ObjectStore(to), run, "killed"), CheckpointStore(RunPaths(root), 2)
Uploader(copies, volume, rank=0, world=1, keep=2, metrics=Metrics()).resumed(4, [2], opened=False)
threading.Event().wait()
"""


def test_killed_upload_is_no_checkpoint(tmp_path: Path, slow: Relay, s3: S3Server, to: str) -> None:
    one = Trainer(tmp_path, to)
    one.save(2)
    one.upload()
    plain: Any = Checkpointer(CheckpointStore(RunPaths(tmp_path), 2), OnlyRank(60.0), Weights())
    plain._engine.save = lambda directory: (directory / "weights").write_bytes(bytes(40 << 20))
    assert plain.start(4, b"s") is None
    assert plain.finish().error is None
    argv = [sys.executable, "-c", KILLED, str(tmp_path), to, repr(RUN)]
    with subprocess.Popen(argv) as process:
        try:
            until(s3.uploading, 60, "a multipart upload")
        finally:
            process.kill()
    slow.bytes_per_second = 1e9
    assert complete(s3, to) == [2]
    empty(tmp_path)
    again = Trainer(tmp_path, to, writer="again")
    assert again.version == 2
    again.save(4, 1 << 10)
    again.upload()
    assert complete(s3, to) == [2, 4]
    empty(tmp_path)
    assert Trainer(tmp_path, to, writer="last").version == 4


class Rank:
    """A rank of two, whose thread is driven by hand."""

    def __init__(self, root: Path, to: str, rank: int) -> None:
        copies = CheckpointCopies(ObjectStore(to), RUN, "a")
        volume = CheckpointStore(RunPaths(root), 2)
        self.uploader = Uploader(
            copies, volume, rank=rank, world=2, keep=2, metrics=Metrics(), pauses=(0.05,)
        )


def test_ranks_send_their_parts(tmp_path: Path, s3: S3Server, to: str) -> None:
    plain: Any = Checkpointer(CheckpointStore(RunPaths(tmp_path), 2), OnlyRank(60.0), Weights())
    assert plain.start(2, b"s") is None
    assert plain.finish().error is None
    ranks = [Rank(tmp_path, to, rank).uploader for rank in (0, 1)]
    for uploader in ranks:
        uploader.resumed(2, [], opened=False)  # a start without the store

    def exchange() -> list[UploadState]:
        states = [uploader.state for uploader in ranks]
        for uploader in ranks:
            uploader.advance(states)
        return states

    time.sleep(0.3)
    assert not ranks[1].state.sent, "no rank writes before rank 0 has claimed the prefix"
    deadline = time.monotonic() + 60
    while ranks[0].busy:
        states = exchange()
        assert not states[0].committed or states[1].sent
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not ranks[1].busy
    assert [u.uploaded for u in ranks] == [2, 2]
    assert complete(s3, to) == [2]
    parts = [u._metrics.uploaded_bytes._value.get() for u in ranks]
    assert min(parts) > 0
    assert sum(parts) == sum(r.bytes for r in CheckpointStore(RunPaths(tmp_path), 2).manifest(2).files)


@pytest.mark.full  # on one machine; on a cluster's way test_trainer_main_own_directory.py has it in CI
def test_killed_run_continues_on_empty_volume(new_run: Any, slow: Relay, s3: S3Server, to: str) -> None:
    """All processes are killed in the middle of an upload, and the volume is lost: two real ranks, a real coordinator."""
    slow.bytes_per_second = 1e9
    run = new_run(budget__maxSteps=10, checkpoint__to=to)
    run.environ = {**s3.environ, "AWS_ENDPOINT_URL": slow.url}
    run.start(seconds_per_group=0.1)
    until(lambda: complete(s3, to), what="the first copy")
    slow.bytes_per_second = 50e3
    copied = complete(s3, to)[-1]
    until(
        lambda: run.checkpoints()[-1] >= copied + 2 and run.step() > copied + 2, what="two more checkpoints"
    )
    for process in [*run.ranks, run.coordinator]:
        process.kill()
    for process in [*run.ranks, run.coordinator]:
        process.join()
    slow.bytes_per_second = 1e9
    copied = complete(s3, to)[-1]
    assert copied < run.checkpoints()[-1], "a newer one was being copied"
    for path in (run.paths.checkpoints, run.paths.journal):
        shutil.rmtree(path)
    run.paths.metrics.unlink()
    run.paths.curve.unlink()
    run.start_coordinator()
    run.start_trainer()
    assert run.wait_trainer() == [0, 0]
    assert f"registered: version {copied}," in run.log("trainer-0")
    status = run.status()
    assert status is not None
    assert status.step == 10
    assert status.uploads == wire.Uploads(version=10)
    assert status.counts.acknowledged == status.counts.trained + status.counts.filtered + status.counts.queued
    assert [row["step"] for row in run.rows()] == list(range(copied, 10)), "earlier rows are lost"
    assert complete(s3, to)[-1] == 10
