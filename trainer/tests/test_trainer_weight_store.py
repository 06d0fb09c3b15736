"""Weights through a prefix of an object store: readers that have nothing but its URL get every version bit by bit, or none."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from s3_server import BUCKET, S3Server
from test_trainer_prepare import make
from test_trainer_weight_files import BUCKET_BYTES, Killed, Training, publisher_of

from scalerl_api import object_store, wire
from scalerl_api.attempts import Attempt
from scalerl_api.object_store import BucketAbsent, NewObject, ObjectAbsent, ObjectStore, StoreError
from scalerl_api.process import BAD_INPUT_EXIT_CODE
from scalerl_api.weight_files import WeightFileError, base_name, delta_name
from scalerl_generator.weights import weight_files
from scalerl_generator.weights.weight_files import StoreUnreachable, WeightFetcher, WeightReader
from scalerl_trainer import prepare
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.checkpoints.object_store import PrefixTaken, check_bucket, claim_prefix
from scalerl_trainer.errors import AttemptSuperseded
from scalerl_trainer.fence import Fence
from scalerl_trainer.publish import weight_writer
from scalerl_trainer.publish.published_weights import WeightSource
from scalerl_trainer.publish.weight_folders import StoredFolder, begin_attempt
from scalerl_trainer.publish.weight_writer import WeightWriter, Written

ELSEWHERE = Path("/nonexistent")
MEMBER = wire.Member(member_id="g", name="g", control_url="http://127.0.0.1:9", weight_version=-1)


@pytest.fixture
def to(s3: S3Server, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def make_writer(to: str, name: str = "0.1-a", begin: Callable[[], None] = lambda: None) -> WeightWriter:
    return WeightWriter(StoredFolder(ObjectStore(to), name), BUCKET_BYTES, begin)


def claiming_writer(to: str, tmp_path: Path) -> WeightWriter:
    """One that begins as a run's."""
    store = ObjectStore(to)
    claim = partial(claim_prefix, store, {"namespace": "a", "name": "one"}, "weightSync.to", "no run uses it")
    fence = Fence.begin(tmp_path / "checkpoints", Attempt(1, 1), Disk())
    folder = StoredFolder(store, fence.folder.name.removeprefix(".attempt-"))
    return WeightWriter(folder, BUCKET_BYTES, begin_attempt(folder, fence, claim))


def stored(s3: S3Server, to: str) -> dict[str, bytes]:
    """Objects by their path below ``weights/`` of the prefix."""
    prefix = f"{to.removeprefix(f's3://{BUCKET}/')}/weights/"
    return {p.removeprefix(prefix): c for p, c in s3.objects().items() if p.startswith(prefix)}


def test_fifty_versions_are_exact_for_readers_that_miss_some(
    s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 8)
    training, writer, chance = Training(), make_writer(to), random.Random(0)
    every, some = WeightReader(ELSEWHERE), WeightReader(ELSEWHERE)
    sizes = []
    for version in range(50):
        training.update(0.005)
        written = writer.write(version, training.manifest, training.stream)
        files = msgspec.json.decode(msgspec.json.encode(written.files), type=wire.WeightFiles)
        assert files.to == to
        sizes.append(training.read(every, version, files))
        assert sizes[-1] == written.bytes
        if chance.random() < 0.3:
            training.read(some, version, files)
    assert max(sizes[1:]) < sizes[0] / 4
    bases = {base_name(files.base), base_name(files.base - 8)}
    deltas = set(map(delta_name, range(files.versions[1] - 8, 50)))
    assert {path.removeprefix("0.1-a/") for path in stored(s3, to)} == bases | deltas, "and no more"
    training.read(WeightReader(ELSEWHERE), 49, files)
    writer.remove()
    assert stored(s3, to) == {}


def test_an_object_of_several_parts_is_read_in_parts(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content that changes after it was given to the client library is not what is sent."""
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 << 20)
    store, content = ObjectStore(to), bytearray(os.urandom(23 << 20))
    new, sent = store.new("large", 0), bytes(content)
    for at in range(0, len(content), 2 << 20):
        new.write(memoryview(content)[at : at + (2 << 20)])
    content[:] = bytes(len(content))
    assert new.close() == len(sent)
    with store.open("large") as file:
        assert file.seek(-10, os.SEEK_END) == len(sent) - 10
        assert file.read() == sent[-10:]
        file.seek(0)
        assert file.read(7) == sent[:7]
        rest = bytearray(len(sent))
        assert file.readinto(rest) == len(sent) - 7
        assert rest[:-7] == sent[7:]
        assert file.read() == b""


@pytest.mark.parametrize("at", [0.0, 0.4, 0.999])
def test_a_torn_object_is_refused_and_the_next_one_is_a_base(s3: S3Server, to: str, at: float) -> None:
    training, writer, reader = Training(), make_writer(to), WeightReader(ELSEWHERE)
    for version in (0, 1):
        training.update()
        files = training.write(writer, version)
        if version == 0:
            training.read(reader, version, files)
    path = f"weights/0.1-a/{delta_name(1)}"
    content = stored(s3, to)[f"0.1-a/{delta_name(1)}"]
    ObjectStore(to).put(path, content[: int(at * len(content))])
    with pytest.raises(WeightFileError) as refused:
        training.read(reader, 1, files)
    assert str(refused.value) == f"{to}/{path}: it is cut off, of another format, or no file with weights"
    writer.refuse()
    training.read(reader, 1, training.write(writer, 1))
    ObjectStore(to).delete([f"weights/0.1-a/{base_name(1)}"])
    with pytest.raises(WeightFileError, match=rf"^{to}/weights/0\.1-a/base-00000001: .*404 Not Found"):
        training.read(WeightReader(ELSEWHERE), 1, training.write(writer, 1))


def test_objects_of_another_run_are_refused(s3: S3Server, to: str, tmp_path: Path) -> None:
    """Its prefix before anything of it is deleted, its files under another run's name by their header."""
    run = {"namespace": "a", "name": "one", "seed": 0, "model": {}}
    theirs = Training(seed=1)
    claim = partial(claim_prefix, ObjectStore(to), run, "weightSync.to", "no other run uses it")
    theirs.write(make_writer(to, "0.1-b", claim), 0)
    before = stored(s3, to)

    other = run | {"name": "two", "seed": 1}
    claim_other = partial(claim_prefix, ObjectStore(to), other, "weightSync.to", "no other run uses it")
    folder = StoredFolder(ObjectStore(to), "0.1-c")
    ours = WeightWriter(
        folder, BUCKET_BYTES, begin_attempt(folder, Fence.begin(tmp_path, None, Disk()), claim_other)
    )
    training = Training()
    with pytest.raises(PrefixTaken) as taken:
        publisher_of(ours).publish(0, WeightSource(training.manifest, training.stream), [MEMBER])
    assert str(taken.value) == (
        f"{to} belongs to the run a/one; this run differs in name, seed. Give this run a prefix of its own in weightSync.to, or "
        f"remove {to}/run.json if no other run uses it"
    )
    assert stored(s3, to) == before
    files = training.write(make_writer(to, "0.1-d"), 0)
    ObjectStore(to).put(f"weights/0.1-d/{base_name(0)}", before[f"0.1-b/{base_name(0)}"])
    with pytest.raises(WeightFileError, match=r"base-00000000: it has version 0 after None of 0\.1-b"):
        training.read(WeightReader(ELSEWHERE), 0, files)


def test_a_later_attempt_removes_the_objects_of_earlier_ones(s3: S3Server, to: str, tmp_path: Path) -> None:
    """Also of one that has its directory for itself, so that its fence knows no other."""
    training = Training()

    def begin(number: int, root: Path) -> WeightWriter:
        attempt = Attempt(1, number)
        fence = Fence.begin(root, attempt, Disk())
        folder = StoredFolder(ObjectStore(to), fence.folder.name.removeprefix(".attempt-"))
        return WeightWriter(folder, BUCKET_BYTES, begin_attempt(folder, fence, attempt=attempt))

    foreign = {
        "1.0-a/notes.txt",
        "1.0-a/base-00000000.copy",
        "1.0-a/sub/base-00000000",
        "base-00000000",
        "llama/model-00001.safetensors",
        "llama/base-00000000",
        "other-run/run.json",
        "other-run/step-00000020/manifest.json",
        "other-run/weights/1.0-a/base-00000000",
    }
    for path in foreign:
        ObjectStore(to).put(f"weights/{path}", b"foreign")
    first = begin(1, tmp_path / "first")
    training.write(first, 0)
    second = begin(2, tmp_path / "second")
    training.write(second, 0)
    assert stored(s3, to).keys() - foreign == {f"{second.folder.name}/{base_name(0)}"}
    with pytest.raises(AttemptSuperseded, match=r"attempt 1\.2 publishes to .*, and this one is 1\.1\."):
        training.write(first, 1)
    assert stored(s3, to).keys() - foreign == {f"{second.folder.name}/{base_name(0)}"}
    ObjectStore(to).put("weights/1.1-late/base-00000003", b"of a call that was abandoned")
    second.remove()
    assert stored(s3, to).keys() == foreign


def test_two_trainers_of_equal_runs_do_not_delete_each_other_s_files(
    s3: S3Server, to: str, tmp_path: Path
) -> None:
    """Each in a directory of its own: the later one publishes, and the earlier one goes on once that has ended."""
    training = Training()
    first, second = claiming_writer(to, tmp_path / "first"), claiming_writer(to, tmp_path / "second")
    training.write(first, 0)
    training.write(second, 0)
    weights = WeightSource(training.manifest, training.stream)
    outcome = publisher_of(first).publish(1, weights, [MEMBER])
    assert outcome.failed == []
    assert (
        f"another trainer publishes there ({second.folder.name}), and has deleted this one's files"
        in outcome.error
    )
    training.write(second, 1)
    assert {path.split("/")[0] for path in stored(s3, to)} == {second.folder.name}
    second.remove()
    training.read(WeightReader(ELSEWHERE), 1, training.write(first, 1))


def test_a_slow_reader_keeps_its_files_until_the_base_after_the_next(
    s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is deleted is gone for who reads it, unlike a file."""
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 2)
    training, writer, late = Training(), make_writer(to), WeightReader(ELSEWHERE)
    training.read(late, 0, training.write(writer, 0))
    training.update()
    files = training.write(writer, 1)
    version_1 = {name: tensor.clone() for name, tensor in training.tensors.items()}
    for version in (2, 3):
        training.update()
        training.write(writer, version)
    assert files.versions == [0, 1], "of the base before"
    present, training.tensors = training.tensors, version_1
    training.read(late, 1, files)
    training.read(WeightReader(ELSEWHERE), 1, files)
    training.tensors = present
    training.update()
    training.write(writer, 4)
    left = {path.removeprefix("0.1-a/") for path in stored(s3, to)}
    assert left == {base_name(2), base_name(4), *map(delta_name, range(1, 5))}


def test_a_request_that_fails_is_sent_again_and_nothing_is_read_twice(
    to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each request of a delta. Without another attempt, the copy keeps its version until a bucket has changed."""
    monkeypatch.setattr(weight_files, "RETRY_SECONDS", 0.0)
    training, writer, reader = Training(), make_writer(to), WeightReader(ELSEWHERE)
    training.read(reader, 0, training.write(writer, 0))
    part, versions, kept = ObjectStore.part, iter(range(1, 100)), list[bool]()

    def read(call: int, retry_seconds: float) -> tuple[Written, str]:
        """Write and read the next version, with one request that fails; returns the error of the read."""
        requests = iter(range(1000))

        def failing(*args: Any) -> memoryview:
            if next(requests) == call:
                raise StoreError("503 SlowDown")
            return part(*args)

        training.update(0.3)
        version = next(versions)
        written = writer.write(version, training.manifest, training.stream)
        with monkeypatch.context() as patched:
            patched.setattr(object_store, "_PART_BYTES", 512)
            patched.setattr(object_store, "_CONCURRENCY", 1)
            patched.setattr(ObjectStore, "part", failing)
            try:
                size = reader.read(version, training.manifest, BUCKET_BYTES, written.files, retry_seconds)
            except StoreUnreachable as error:
                return written, str(error)
        training.assert_copied(reader)
        assert size == written.bytes
        return written, ""

    for call in itertools.count():
        assert read(call, 60.0)[1] == ""
        before = reader.version
        written, problem = read(call, 0.0)
        if not problem:
            break
        version = written.files.versions[-1]
        assert problem == f"{writer.folder}/{delta_name(version)}: 503 SlowDown"
        kept.append(reader.version == before)
        assert kept[-1] or reader.version is None
        assert (training.read(reader, version, written.files) == written.bytes) == kept[-1]
    assert kept[:2] == [True, True], "the header is read before the buckets"
    assert not kept[-1]


def test_a_listing_that_fails_makes_no_base_of_a_delta(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 3)
    training, writer, reader = Training(), make_writer(to), WeightReader(ELSEWHERE)
    training.read(reader, 0, training.write(writer, 0))
    sizes, listings = ObjectStore.sizes, 0
    for version in range(1, 12):
        listings = 0

        def failing(*args: Any, version: int = version) -> dict[str, int]:
            nonlocal listings
            listings += 1
            if listings == 1 + version % 3:
                raise StoreError("503 SlowDown")
            return sizes(*args)

        training.update()
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "sizes", failing)
            try:
                files = training.write(writer, version)
            except OSError:
                files = training.write(writer, version)
        assert len(files.versions) > 1
        assert training.read(reader, version, files) < 5000


def test_killed_at_any_call_leaves_the_version_before(
    s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta and a base are written, after which the base before the last one is deleted."""
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 2)
    died = 0
    for call in range(100):
        training, writer, reader = Training(), make_writer(to, f"0.1-{call}"), WeightReader(ELSEWHERE)
        for version in range(4):
            training.update()
            files = training.write(writer, version)
        before = {n: t.clone() for n, t in training.tensors.items()}
        training.update()
        calls = iter(range(call + 1))

        def count(original: Callable[..., Any], calls: Any = calls, call: int = call) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                if next(calls, None) == call:
                    raise Killed
                return original(*args, **kwargs)

            return counted

        with monkeypatch.context() as patched:
            for owner, name in ((ObjectStore, "new"), (NewObject, "close"), (ObjectStore, "delete")):
                patched.setattr(owner, name, count(getattr(owner, name)))
            try:
                training.write(writer, 4)
            except Killed:
                died += 1
            else:
                break
        training.tensors = before
        training.read(reader, 3, files)
    assert died == 5, "two objects begin and end, and one is deleted"


@pytest.mark.full
def test_killed_processes_leave_whole_objects_alone(
    s3: S3Server, to: str, processes: Any, tmp_path: Path
) -> None:
    """Whatever is in the store after SIGKILL can be read to its end."""
    chance, found = random.Random(0), 0
    for number in range(3):
        begun = tmp_path / f"begun-{number}"
        process = processes.run(
            Path(__file__).name, TO=to, FOLDER=f"0.{number}-a", BEGUN=str(begun), ENVIRON=s3.environ
        )
        while not begun.exists():
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(chance.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        training, reader = _large(), WeightReader(ELSEWHERE)
        versions = sorted(int(path[-8:]) for path in stored(s3, to) if path.startswith(f"0.{number}-a/delta"))
        files = wire.WeightFiles(folder=f"0.{number}-a", base=0, versions=[0, *versions], to=to)
        reader.read(files.versions[-1], training.manifest, 4 << 20, files)
        found += len(versions)
    assert found > 0


def _large() -> Training:
    training = Training()
    training.tensors = {"w": torch.randn(6 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()}
    training.manifest = [
        msgspec.structs.replace(training.manifest[0], name="w", dtype="bfloat16", shape=[6 << 20])
    ]
    return training


def test_a_denied_write_fails_no_member(s3: S3Server, to: str, tmp_path: Path) -> None:
    """One message; what generators have stays readable, and the next write is a base. Neither does a claim that is denied."""
    training, writer, reader = Training(), claiming_writer(to, tmp_path), WeightReader(ELSEWHERE)
    first = WeightSource(training.manifest, training.stream)
    for requests in (0, 1):  # the folder is listed, and the prefix claimed
        s3.refuse(requests)
        outcome = publisher_of(writer).publish(0, first, [MEMBER])
        s3.refuse(float("inf"))
        assert (outcome.updated, outcome.failed) == ([], [])
        assert "403 Forbidden" in outcome.error
    files = training.write(writer, 0)
    training.read(reader, 0, files)
    weights, read = WeightSource(training.manifest, training.stream), list[bool]()
    training.update()
    s3.refuse()
    outcome = publisher_of(writer).publish(1, weights, [MEMBER], lambda: read.append(True))
    fetcher = WeightFetcher(ELSEWHERE)
    fetcher.start(
        wire.WeightReceive(
            epoch=0,
            version=0,
            tensors=training.manifest,
            bucket_bytes=BUCKET_BYTES,
            timeout_seconds=600.0,
            files=files,
        )
    )
    while (report := fetcher.report(0)).problem is None:
        time.sleep(0.01)
    assert report.unreachable
    assert report.problem is not None
    assert report.problem.startswith(f"{writer.folder}/base-00000000: {to}: ")
    assert "403" in report.problem
    s3.refuse(float("inf"))
    assert (outcome.updated, outcome.failed, read) == ([], [], [True])
    assert outcome.error.startswith(f"version 1 cannot be written to {writer.folder}: ")
    assert "403 Forbidden" in outcome.error
    assert "\n" not in outcome.error
    assert outcome.error.endswith(
        "Check the object store, its quota and the trainer's credentials; generators keep their weights meanwhile"
    )
    files = training.write(writer, 2)
    training.read(reader, 2, files)


def test_an_absent_bucket_is_no_damaged_file(s3: S3Server, to: str, tmp_path: Path) -> None:
    """A generator whose endpoint has no such bucket: it keeps its version, asks once, and no base is written for it."""
    training, reader = Training(), WeightReader(ELSEWHERE)
    writer = make_writer(to)
    files = training.write(writer, 0)
    training.read(reader, 0, files)
    training.update()
    elsewhere = msgspec.structs.replace(training.write(writer, 1), to="s3://absent-bucket/x")
    begun = time.monotonic()
    with pytest.raises(
        StoreUnreachable, match=r"delta-00000001: s3://absent-bucket/x: there is no such bucket$"
    ):
        reader.read(1, training.manifest, BUCKET_BYTES, elsewhere, retry_seconds=300.0)
    assert time.monotonic() - begun < 200
    assert reader.version == 0
    outcome = publisher_of(claiming_writer("s3://absent-bucket/x", tmp_path)).publish(
        0, WeightSource(training.manifest, training.stream), [MEMBER]
    )
    assert (outcome.updated, outcome.failed) == ([], [])
    assert "s3://absent-bucket/x: there is no such bucket" in outcome.error


def test_an_absent_bucket_is_refused_at_start(s3: S3Server, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = s3.objects()
    check_bucket("weightSync.to", None)
    check_bucket("weightSync.to", to)
    with pytest.raises(
        BucketAbsent, match=r"^weightSync\.to: s3://absent-bucket/x: there is no such bucket, and nothing"
    ):
        check_bucket("weightSync.to", "s3://absent-bucket/x")
    for method in ("read", "open", "sizes"):
        with pytest.raises(BucketAbsent):
            getattr(ObjectStore("s3://absent-bucket/x"), method)("run.json")
    assert ObjectStore(to).read("run.json") is None
    with pytest.raises(ObjectAbsent):
        ObjectStore(to).open("run.json")
    assert s3.objects() == before
    s3.refuse()
    check_bucket("weightSync.to", to)  # the publish reports it
    s3.refuse(float("inf"))


@pytest.mark.parametrize("field", ["checkpoint", "weightSync"])
def test_preparation_refuses_an_absent_bucket(
    s3: S3Server,
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sections = {"weightSync": {"backend": "Files"}, "checkpoint": {}}
    paths, _ = make(tmp_path, **sections | {field: sections[field] | {"to": "s3://absent-bucket/run"}})
    for name, value in {
        "SCALERL_DIR": str(tmp_path),
        "SCALERL_NAME": "prepare",
        "SCALERL_COORDINATOR_URL": "http://127.0.0.1:9",
        "SCALERL_TOKEN_FILE": str(paths.token),
    }.items():
        monkeypatch.setenv(name, value)
    assert prepare.main() == BAD_INPUT_EXIT_CODE
    assert (
        f"{field}.to: s3://absent-bucket/run: there is no such bucket, and nothing is written: create it"
        in caplog.text
    )
    assert not paths.base_model.exists()


class Full(BaseHTTPRequestHandler):
    """Lists nothing, and has no room."""

    def do_GET(self) -> None:
        self._answer(200, b'<?xml version="1.0"?><ListBucketResult><Name>b</Name></ListBucketResult>')

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(507, b"<Error><Code>InsufficientStorage</Code><Message>no room</Message></Error>")

    def do_HEAD(self) -> None:
        """The first requests are too many."""
        self.server.heads = getattr(self.server, "heads", 0) + 1  # type: ignore[attr-defined]
        self._answer(503 if self.server.heads < 5 else 200, b"")  # type: ignore[attr-defined]

    do_POST = do_PUT

    def _answer(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def full_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Full)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("claims", [True, False])
def test_a_full_store_fails_no_member(
    to: str, full_store: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, claims: bool
) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", {"max_retries": 0})
    training = Training()
    writer = claiming_writer(to, tmp_path) if claims else make_writer(to)
    outcome = publisher_of(writer).publish(0, WeightSource(training.manifest, training.stream), [MEMBER])
    assert (outcome.updated, outcome.failed) == ([], [])
    assert "507 Insufficient Storage" in outcome.error
    assert "its quota" in outcome.error


def test_a_request_outlasts_a_store_that_asks_to_slow_down(to: str, full_store: None) -> None:
    with ObjectStore(to).open("busy") as file:
        assert file.read() == b""


def test_a_store_that_hangs_is_given_up(s3: S3Server, to: str) -> None:
    """By the writer after three timeouts; a reader reports that it reads nothing. Both go on once it answers."""
    training, writer = Training(), make_writer(to)
    files = training.write(writer, 0)
    weights, fetcher = WeightSource(training.manifest, training.stream), WeightFetcher(ELSEWHERE)
    request = wire.WeightReceive(
        epoch=0,
        version=0,
        tensors=training.manifest,
        bucket_bytes=BUCKET_BYTES,
        timeout_seconds=1.0,
        files=files,
    )
    os.kill(s3._process.pid, signal.SIGSTOP)
    try:
        fetcher.start(request)
        started = time.monotonic()
        outcome = publisher_of(writer, timeout_seconds=0.2).publish(1, weights, [MEMBER])
        assert time.monotonic() - started < 100
        report = fetcher.report(0)
    finally:
        os.kill(s3._process.pid, signal.SIGCONT)
    assert (report.problem, report.bytes) == (None, 0)
    assert (outcome.updated, outcome.failed, outcome.kept) == ([], [], [])
    assert "the object store does not answer: a call has taken 0.6 s" in outcome.error
    assert "raise weightSync.timeoutSeconds" in outcome.error
    while fetcher.report(0).problem is None:
        time.sleep(0.01)
    assert fetcher.report(0).problem == ""
    training.assert_copied(fetcher.reader)
    training.read(WeightReader(ELSEWHERE), 2, training.write(writer, 2))


if __name__ == "__main__":
    os.environ.update(ENVIRON)  # type: ignore[name-defined]  # noqa: F821
    training = _large()
    writer = WeightWriter(StoredFolder(ObjectStore(TO), FOLDER), 4 << 20, lambda: None)  # type: ignore[name-defined]  # noqa: F821
    for version in range(1000):
        training.write(writer, version)
        training.tensors["w"][version::97] += 1
        if version:
            Path(BEGUN).touch()  # type: ignore[name-defined]  # noqa: F821
