"""Weights through files: what the writer wrote, the generators' reader reads bit by bit, or refuses."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.attempts import Attempt
from scalerl_api.weight_files import COUNTS, LENGTH, WeightFileError, base_name, delta_name
from scalerl_generator.weights import weight_files as reading
from scalerl_generator.weights.weight_files import SharedBuckets, WeightReader, apply_changes
from scalerl_trainer import background
from scalerl_trainer.background import LimitedCalls
from scalerl_trainer.checkpoints.disk import Disk
from scalerl_trainer.errors import AttemptSuperseded
from scalerl_trainer.fence import Fence
from scalerl_trainer.publish import weight_writer
from scalerl_trainer.publish.actor_control import ActorControl, Answer
from scalerl_trainer.publish.file_publisher import MAX_UNREAD, FilePublisher
from scalerl_trainer.publish.published_weights import SourceError, WeightSource, tensor_spec
from scalerl_trainer.publish.weight_folders import VolumeFolder, begin_attempt
from scalerl_trainer.publish.weight_writer import WeightWriter, encode_changes

BUCKET_BYTES = 3000
SHAPES = {"embed": (67, 40), "layer.0.w": (33, 9), "layer.0.norm": (9,), "scale": (), "head": (50, 70)}


class Training:
    """Weights whose versions differ in about one element of a hundred."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors = {n: torch.randn(s, generator=self._generator).to(dtype) for n, s in SHAPES.items()}
        self.manifest = [tensor_spec(n, t) for n, t in self.tensors.items()]

    def update(self, share: float = 0.01) -> None:
        for tensor in self.tensors.values():
            changed = torch.rand(tensor.shape, generator=self._generator) < share
            tensor += changed * torch.randn(tensor.shape, generator=self._generator) * tensor.abs() * 2**-7

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def write(self, writer: WeightWriter, version: int) -> wire.WeightFiles:
        return writer.write(version, self.manifest, self.stream).files

    def read(self, reader: WeightReader, version: int, files: wire.WeightFiles) -> int:
        """Read a version, which must be the present weights; returns the bytes read."""
        size = reader.read(version, self.manifest, BUCKET_BYTES, files)
        self.assert_copied(reader)
        return size

    def assert_copied(self, reader: WeightReader) -> None:
        assert reader.copy is not None
        found = {}
        for bucket, memory in zip(reader.copy.buckets, reader.copy.of_bucket, strict=True):
            for slot in bucket.slots:
                own = self.tensors[slot.tensor.name]
                found[slot.tensor.name] = (
                    memory[slot.offset : slot.offset + own.nbytes].view(own.dtype).view(own.shape)
                )
        assert found.keys() == self.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(
                found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            ), name


def make_writer(root: Path, name: str = "0.1-a") -> WeightWriter:
    return WeightWriter(VolumeFolder(root / name), BUCKET_BYTES, lambda: None)


def path_of(writer: WeightWriter) -> Path:
    return Path(str(writer.folder))


# --- changes ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    words=st.integers(0, 3000),
    share=st.sampled_from([0.0, 1e-3, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_changes_are_exact(words: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, words, dtype=np.uint16)
    new = np.where(random.random(words) < share, random.integers(0, 1 << 16, words, dtype=np.uint16), old)
    found = old.copy()
    apply_changes(found, encode_changes(old, new))
    assert np.array_equal(found, new)


@pytest.mark.parametrize("changed", [[0], [253], [254], [255], [256], [510], [511], [0, 255, 510, 2999], []])
def test_changes_at_the_limits_of_a_gap(changed: list[int]) -> None:
    old = np.zeros(3000, np.uint16)
    new = old.copy()
    new[changed] = 0x8001
    found = old.copy()
    apply_changes(found, encode_changes(old, new))
    assert np.flatnonzero(found).tolist() == changed
    assert np.array_equal(found, new)


def test_changes_have_the_bytes_of_the_format() -> None:
    """The streams, not their compressed bytes, which depend on the build of zlib; and those of another build are read."""
    old = np.full(1000, 0x3F80, np.uint16)
    new = old.copy()
    new[[0, 3, 260, 999]] += np.array([1, -1, 0x0101, 0x8000]).astype(np.uint16)
    streams = bytes.fromhex("0002ff01ffffe4"), bytes.fromhex("020102ff"), bytes.fromhex("000002ff")
    encoded = encode_changes(old, new)
    changed, gaps, compressed = COUNTS.unpack_from(encoded)
    low_at = COUNTS.size + compressed + LENGTH.size
    (low,) = LENGTH.unpack_from(encoded, low_at - LENGTH.size)
    parts = (
        encoded[COUNTS.size : low_at - LENGTH.size],
        encoded[low_at : low_at + low],
        encoded[low_at + low :],
    )
    assert (changed, gaps) == (4, 7)
    assert tuple(map(zlib.decompress, parts)) == streams
    first, second, third = (zlib.compress(stream, 9) for stream in streams)
    apply_changes(old, COUNTS.pack(4, 7, len(first)) + first + LENGTH.pack(len(second)) + second + third)
    assert np.array_equal(old, new)


@settings(deadline=None)
@given(garbage=st.binary(max_size=200), at=st.integers(0, 150), cut=st.integers(0, 200))
def test_changes_of_garbage_are_refused(garbage: bytes, at: int, cut: int) -> None:
    """A WeightFileError, or a result, which the checksum in the trailer then refuses; nothing else."""
    old = np.arange(500, dtype=np.uint16)
    good = encode_changes(old, old[::-1].copy())
    for data in (garbage, good[:at] + garbage + good[at:], good[:cut]):
        try:
            apply_changes(old.copy(), data)
        except WeightFileError:
            continue


# --- chains ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_readers_that_miss_versions_are_exact(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("weights")
    training, writer = Training(), make_writer(root)
    readers = [WeightReader(root) for _ in range(3)]
    version = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_writer, "BASE_EVERY", 4)
        for _ in range(25):
            version += data.draw(st.integers(1, 3), label="versions that are not published")
            training.update(data.draw(st.sampled_from([0.0, 0.01, 0.01, 1.0]), label="share of changes"))
            files = training.write(writer, version)
            assert training.write(writer, version) == files, "sent again"
            for reader in readers:
                if data.draw(st.integers(0, 3), label="reads") == 0:
                    training.read(reader, version, files)
            names = {path.name for path in path_of(writer).iterdir()}
            deltas = set(map(delta_name, files.versions[1:]))
            assert names - {delta_name(files.versions[0])} == {base_name(files.base)} | deltas, "and no more"
            assert len(deltas) <= 2 * 4
            whole = sum(t.nbytes for t in training.tensors.values())
            assert sum(path.stat().st_size for path in path_of(writer).iterdir()) < 3.2 * whole + 6000
    training.read(WeightReader(root), version, files)


def test_a_delta_has_few_bytes_and_is_all_that_is_read(tmp_path: Path) -> None:
    training, writer, reader = Training(), make_writer(tmp_path), WeightReader(tmp_path)
    whole = training.read(reader, 0, training.write(writer, 0))
    sizes = []
    for version in range(1, 100):
        training.update(0.005)
        written = writer.write(version, training.manifest, training.stream)
        sizes.append(training.read(reader, version, written.files))
        assert sizes[-1] == written.bytes
    assert max(sizes) < whole / 4, "also beside a base"
    late = WeightReader(tmp_path)
    assert training.read(late, 99, written.files) < 1.6 * whole


def test_a_read_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a later request, which waits for it: so a volume that is slow differs from one that hangs."""
    training, goes_on, checked = Training(), threading.Semaphore(0), []
    check = reading.check_trailer

    def slow(*args: Any) -> None:
        checked.append(args)
        assert goes_on.acquire(timeout=120)
        check(*args)

    monkeypatch.setattr(reading, "check_trailer", slow)
    files = training.write(make_writer(tmp_path), 0)
    request = wire.WeightReceive(
        epoch=0,
        version=0,
        tensors=training.manifest,
        bucket_bytes=BUCKET_BYTES,
        timeout_seconds=1.0,
        files=files,
    )
    fetcher = reading.WeightFetcher(tmp_path)
    assert fetcher.reader.bytes_read == 0
    found = []
    for buckets in (1, 2):
        fetcher.start(request)
        while len(checked) < buckets:
            time.sleep(0.001)
        report = fetcher.report(0)
        assert report.problem is None
        found.append(report.bytes)
        goes_on.release()
    assert 0 < found[0] < found[1]
    goes_on.release(100)
    while fetcher.report(0).problem is None:
        time.sleep(0.001)
    assert fetcher.report(0).problem == ""


def test_other_workers_map_what_the_first_one_reads(tmp_path: Path) -> None:
    """Also after a restart of the trainer: the path must not be that of other memory."""
    training, first, second = Training(), make_writer(tmp_path), make_writer(tmp_path, "0.2-b")
    reader, mapped = WeightReader(tmp_path), WeightReader(tmp_path)
    training.read(reader, 0, training.write(first, 0))
    assert reader.copy is not None
    mapped.copy = SharedBuckets(reader.copy.buckets, reader.copy.path)
    training.assert_copied(mapped)
    training.update()
    training.read(reader, 0, training.write(second, 0))
    assert reader.copy.path == mapped.copy.path
    training.assert_copied(mapped)


def test_float32_is_written_whole(tmp_path: Path) -> None:
    training, writer, reader = Training(dtype=torch.float32), make_writer(tmp_path), WeightReader(tmp_path)
    for version in range(3):
        training.update()
        training.read(reader, version, training.write(writer, version))
        assert [path.name for path in path_of(writer).iterdir()] == [base_name(version)]


def test_another_layout_begins_with_a_base(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path), WeightReader(tmp_path)
    first, second = Training(), Training()
    second.tensors.pop("head")
    second.manifest.pop()
    first.read(reader, 0, first.write(writer, 0))
    files = second.write(writer, 1)
    assert files.versions == [1]
    second.read(reader, 1, files)


def test_another_stream_is_refused_and_read_to_its_end(tmp_path: Path) -> None:
    training, writer = Training(), make_writer(tmp_path)
    training.write(writer, 0)
    rest: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in reversed(training.tensors.items()):
            yield name, tensor
            rest.append(name)

    with pytest.raises(SourceError):
        writer.write(1, training.manifest, stream)
    assert len(rest) == len(training.tensors)
    training.read(WeightReader(tmp_path), 2, training.write(writer, 2))


# --- damage ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def kill_at(patched: pytest.MonkeyPatch, call: int) -> None:
    """Die at the ``call``-th of the writer's calls that read weights or change the folder."""
    calls = iter(range(call + 1))

    def count(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) == call:
                raise Killed
            return original(*args, **kwargs)

        return counted

    patched.setattr(weight_writer, "fill", count(weight_writer.fill))
    patched.setattr(weight_writer, "encode_end", count(weight_writer.encode_end))
    patched.setattr(os, "fsync", count(os.fsync))
    patched.setattr(Path, "rename", count(Path.rename))
    patched.setattr(Path, "unlink", count(Path.unlink))


@pytest.mark.parametrize("version", [1, 3])  # a delta; a delta and a base, after which files are deleted
def test_killed_while_writing_leaves_the_version_before(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 3)
    died = 0
    for call in range(100):
        root = tmp_path / str(call)
        training, writer = Training(), make_writer(root)
        for earlier in range(version):
            training.update()
            files = training.write(writer, earlier)
        reader = WeightReader(root)
        training.read(reader, version - 1, files)
        before = {n: t.clone() for n, t in training.tensors.items()}
        training.update()
        try:
            with pytest.MonkeyPatch.context() as patched:
                kill_at(patched, call)
                training.write(writer, version)
            break
        except Killed:
            died += 1
        after, training.tensors = training.tensors, before
        if (
            path_of(writer) / base_name(files.base)
        ).exists():  # else the new one is complete, and was to be sent
            training.read(WeightReader(root), version - 1, files)
        else:
            training.tensors = after
            complete = wire.WeightFiles(folder=files.folder, base=version, versions=[version])
            training.read(WeightReader(root), version, complete)
        # The next attempt of the trainer has another folder.
        training.tensors = after
        again = make_writer(root, "0.2-b")
        training.read(reader, version, training.write(again, version))
    assert died >= 6


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    match random.integers(3):
        case 0:
            return content[: random.integers(len(content))]
        case 1:
            at = random.integers(len(content))
            return content[:at] + bytes([content[at] ^ (1 << random.integers(8))]) + content[at + 1 :]
        case _:
            return random.bytes(random.integers(200))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), which=st.integers(0, 3))
def test_damaged_files_are_refused_or_read_exactly(
    seed: int, which: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A reader never has a wrong version. The base that is written after a refusal makes all of them whole."""
    root, random = tmp_path_factory.mktemp("weights"), np.random.default_rng(seed)
    training, writer, reader, late = Training(), make_writer(root), WeightReader(root), WeightReader(root)
    versions = []
    for version in range(4):
        training.update()
        files = training.write(writer, version)
        versions.append({n: t.clone() for n, t in training.tensors.items()})
        if version == 1:
            training.read(reader, version, files)
    path = sorted(path_of(writer).iterdir())[which]
    path.write_bytes(damaged(path.read_bytes(), random))
    for one in (reader, late):
        try:
            training.read(one, version, files)
        except WeightFileError as error:
            problem, held = str(error), one.version
        else:
            continue
        assert problem.startswith(f"{path}: ")
        assert held != version
        if held is not None:
            training.tensors = versions[held]
            training.assert_copied(one)
            training.tensors = versions[version]
    writer.refuse()
    files = training.write(writer, version)
    assert files.versions == [version]
    for one in (reader, late, WeightReader(root)):
        training.read(one, version, files)
    training.update()
    version += 1
    files = training.write(writer, version)
    assert files.versions == [version - 1, version], "a delta again"
    for one in (reader, late, WeightReader(root)):
        training.read(one, version, files)


def test_files_of_another_attempt_or_version_are_refused(tmp_path: Path) -> None:
    training, ours, theirs = Training(), make_writer(tmp_path), make_writer(tmp_path, "0.1-b")
    files = training.write(ours, 0)
    training.write(theirs, 0)
    shutil.copy(path_of(theirs) / base_name(0), path_of(ours) / base_name(0))
    with pytest.raises(WeightFileError, match=r"base-00000000: it has version 0 after None of 0\.1-b"):
        training.read(WeightReader(tmp_path), 0, files)
    with pytest.raises(WeightFileError, match="is not what the files"):
        training.read(WeightReader(tmp_path), 1, files)
    for folder in ("", "..", "../runs", "/tmp"):
        with pytest.raises(WeightFileError, match="no name of a folder"):
            training.read(WeightReader(tmp_path), 0, wire.WeightFiles(folder=folder, base=0, versions=[0]))
    with pytest.raises(WeightFileError, match="No such file"):
        training.read(WeightReader(tmp_path / "elsewhere"), 0, files)


def test_a_later_attempt_removes_the_files_of_earlier_ones(tmp_path: Path) -> None:
    checkpoints, weights = tmp_path / "checkpoints", tmp_path / "weights"
    training = Training()

    def begin(number: int) -> WeightWriter:
        fence = Fence.begin(checkpoints, Attempt(1, number), Disk())
        folder = VolumeFolder(weights / fence.folder.name)
        return WeightWriter(folder, BUCKET_BYTES, begin_attempt(folder, fence))

    first = begin(1)
    training.write(first, 0)
    late = begin(2)
    second = begin(3)
    training.write(second, 0)
    assert [path.name for path in weights.iterdir()] == [second.folder.name]
    with pytest.raises(AttemptSuperseded):
        training.write(first, 1)
    with pytest.raises(AttemptSuperseded):
        training.write(late, 0)
    assert [path.name for path in weights.iterdir()] == [second.folder.name]


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    training, writer, reader = (
        Training(),
        make_writer(tmp_path / "weights"),
        WeightReader(tmp_path / "weights"),
    )
    training.read(reader, 0, training.write(writer, 0))
    shutil.rmtree(tmp_path / "weights")
    training.update()
    files = training.write(writer, 1)
    assert files.versions == [1]
    training.read(reader, 1, files)


# --- the protocol ----------------------------------------------------------------------------------------


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files end at 10,000 bytes, as on a volume that is full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def publisher_of(writer: WeightWriter, timeout_seconds: float = 60.0) -> FilePublisher:
    return FilePublisher(
        *(writer, ActorControl("secret")),
        bucket_bytes=BUCKET_BYTES,
        timeout_seconds=timeout_seconds,
        retry_seconds=0.0,
    )


def test_a_full_volume_fails_no_member(tmp_path: Path, small_files: None) -> None:
    training, writer = Training(), make_writer(tmp_path)
    weights = WeightSource(training.manifest, training.stream)
    member = wire.Member(member_id="g", name="g", control_url="http://127.0.0.1:9", weight_version=-1)
    read: list[bool] = []
    publisher = publisher_of(writer)
    outcome = publisher.publish(0, weights, [member], lambda: read.append(True))
    assert (outcome.updated, outcome.failed, read) == ([], [], [True])
    assert "version 0 cannot be written" in outcome.error
    assert "File too large" in outcome.error
    assert list(path_of(writer).iterdir()) == [], "what is left of it makes room"
    (path_of(writer) / "base-00000000").touch()  # of no version that is sent
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
    assert publisher.publish(1, weights, [member]).failed == ["g"], "it does not answer"
    training.read(WeightReader(tmp_path), 1, training.write(writer, 1))
    assert [path.name for path in path_of(writer).iterdir()] == ["base-00000001"]


def test_after_a_failed_write_comes_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta that failed is of no file. What no request names makes room before the base is written."""
    training, writer, reader = Training(), make_writer(tmp_path), WeightReader(tmp_path)
    for version in (0, 1):
        training.update()
        training.read(reader, version, training.write(writer, version))
    training.update()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            training.write(writer, 2)
    assert {path.name for path in path_of(writer).iterdir()} == {base_name(0), delta_name(1)}
    found: list[set[str]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        found.append({path.name for path in path_of(writer).iterdir()})
        yield from training.tensors.items()

    files = writer.write(2, training.manifest, stream).files
    assert found == [{f".{base_name(2)}"}]
    assert files.versions == [2]
    training.read(reader, 2, files)
    training.update()
    training.read(reader, 3, training.write(writer, 3))


def test_a_base_that_does_not_fit_leaves_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 2)
    training, writer, reader = Training(), make_writer(tmp_path), WeightReader(tmp_path)
    training.read(reader, 0, training.write(writer, 0))
    for version in range(1, 6):
        training.update(0.001)
        with pytest.MonkeyPatch.context() as patched:
            if version < 4:
                patched.setattr(
                    WeightWriter, "_write_base", lambda *_: (_ for _ in ()).throw(OSError("full"))
                )
            files = training.write(writer, version)
        training.read(reader, version, files)
        training.read(WeightReader(tmp_path), version, files)
        assert files.base == (0 if version < 4 else 4)


def test_a_base_that_takes_too_long_is_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every version waits for another one, and the file of the abandoned call is deleted once it is there."""
    monkeypatch.setattr(weight_writer, "BASE_EVERY", 3)
    training, writer, reader = Training(), make_writer(tmp_path), WeightReader(tmp_path)
    training.read(reader, 0, training.write(writer, 0))
    answers, hangs, complete, late = (
        threading.Event(),
        threading.Event(),
        weight_writer._complete,
        list[str](),
    )

    def slow(file: Any, end: bytes) -> int:
        name = file._path.name
        if name.startswith("base") and not answers.is_set():
            late.append(name)
            hangs.set()
            assert answers.wait(120)
        return complete(file, end)

    def wait_for(results: list[Future[Any]], seconds: float) -> Any:
        """The limit is over as soon as a call hangs, and for no other one."""
        while not results[0].done() and not hangs.is_set():
            time.sleep(0.001)
        hangs.clear()
        return wait(results, 0)

    monkeypatch.setattr(weight_writer, "_complete", slow)
    monkeypatch.setattr(background, "wait", wait_for)
    for version in range(1, 9):
        training.update(0.001)
        if version == 7:
            answers.set()
            for thread in threading.enumerate():
                if thread.name == "volume":
                    thread.join(120)
        # The first is still writing to a file without a name, which is deleted; the second one's gets its name.
        files = writer.write(version, training.manifest, training.stream, 0.5).files
        training.read(reader, version, files)
        training.read(WeightReader(tmp_path), version, files)
    assert late == [base_name(3), base_name(6)]
    assert {path.name for path in path_of(writer).iterdir()} == {base_name(0), *map(delta_name, range(1, 9))}
    training.update(0.001)
    assert training.write(writer, 9).base == 9


class CallClock:
    """Seconds that calls of a volume take; those of this machine do not count."""

    now = begun = 0.0

    def take(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        self.begun = self.now
        return self.now

    def wait(self, results: list[Future[Any]], seconds: float) -> Any:
        wait(results, 120)
        return SimpleNamespace(done=self.now - self.begun <= seconds)


def test_each_call_has_a_limit_and_so_have_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose bytes take longer than a call may is written, as long as they move; also those that a sync moves."""
    monkeypatch.setattr(weight_writer, "SYNC_BYTES", 2 * BUCKET_BYTES)
    training, writer = Training(), make_writer(tmp_path)
    whole = sum(tensor.nbytes for tensor in training.tensors.values())
    synced = 0
    clock = CallClock()
    monkeypatch.setattr(background, "time", clock)
    monkeypatch.setattr(background, "wait", clock.wait)

    def slow(fd: int) -> None:
        nonlocal synced
        size = os.fstat(fd).st_size
        clock.take(1.5 * (size - synced) / whole)
        synced = size

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", slow)
        written = writer.write(0, training.manifest, training.stream, 1.3)
    training.read(WeightReader(tmp_path), 0, written.files)
    calls = LimitedCalls(10.0, 0.5)
    calls(partial(clock.take, 0.3))
    with pytest.raises(TimeoutError, match=r"the volume is slow: 0\.5 s have passed"):
        calls(partial(clock.take, 0.3))


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "iterdir"])
def test_a_volume_that_hangs_is_given_up(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three timeouts, with one attempt, and nothing of it harms what is written later, also when the call goes on."""
    training, writer, reader = Training(), make_writer(tmp_path), WeightReader(tmp_path)
    weights = WeightSource(training.manifest, training.stream)
    member = wire.Member(member_id="g", name="g", control_url="http://127.0.0.1:9", weight_version=-1)
    publisher = publisher_of(writer, timeout_seconds=0.2)
    if call == "iterdir":
        path_of(writer).mkdir()
    answers, owner = threading.Event(), os if call == "fsync" else Path
    original = getattr(owner, call)

    def hang(*args: Any, **kwargs: Any) -> Any:
        assert answers.wait(120)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, call, hang)
        started = time.monotonic()
        outcome = publisher.publish(0, weights, [member])
        assert time.monotonic() - started < 100
    assert (outcome.updated, outcome.failed, outcome.kept) == ([], [], [])
    assert "version 0 cannot be written" in outcome.error
    assert "the volume does not answer: a call has taken 0.6 s" in outcome.error
    assert "raise weightSync.timeoutSeconds" in outcome.error
    training.read(reader, 1, training.write(writer, 1))
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "volume":
            thread.join(120)
    training.update()
    training.read(reader, 2, training.write(writer, 2))
    training.read(WeightReader(tmp_path), 2, training.write(writer, 2))
    answers.clear()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: answers.wait(120))
    started = time.monotonic()
    publisher.close()
    assert time.monotonic() - started < 100
    answers.set()


class Unreachable(ActorControl):
    """Each member cannot reach the store."""

    def start(self, *_: Any) -> Any:
        return self

    def wait(self) -> dict[str, Answer]:
        return {"g": Answer(error="503 SlowDown", problem="fetch-unreachable")}


def test_a_member_that_cannot_reach_the_store_costs_no_base(tmp_path: Path) -> None:
    training, writer = Training(), make_writer(tmp_path)
    publisher = FilePublisher(
        *(writer, Unreachable("secret")), bucket_bytes=BUCKET_BYTES, timeout_seconds=60, retry_seconds=0
    )
    member = wire.Member(member_id="g", name="g", control_url="http://127.0.0.1:9", weight_version=-1)
    whole = sum(tensor.nbytes for tensor in training.tensors.values())
    for version in range(MAX_UNREAD + 1):
        training.update()
        outcome = publisher.publish(version, WeightSource(training.manifest, training.stream), [member])
        left_out = version == MAX_UNREAD
        assert (outcome.kept, outcome.failed) == (([], ["g"]) if left_out else (["g"], []))
        assert (outcome.stats["publish_bytes"] > whole) == (version == 0)


def test_members_are_independent(processes: Any, tmp_path: Path) -> None:
    """No member joins a group: these die if they are asked to."""
    members = []
    for name, faults in (
        ("good", []),
        ("refuses", [{"at": "receive", "how": "fetch-failed"}]),
        ("slow", [{"at": "receive", "how": "fetch-continues"}]),
        ("hangs", [{"at": "receive", "how": "fetch-stalled"}]),
        ("dies", [{"at": "receive", "how": "kill"}]),
    ):
        (tmp_path / name).mkdir()
        faults = [*faults, {"at": "join", "how": "kill"}]
        given = {
            "directory": tmp_path / name,
            "token": "secret",
            "faults": faults,
            "weights": tmp_path / "weights",
        }
        processes.run("actor_process.py", ACTOR=given)
        port = tmp_path / name / "port"
        while not port.exists():
            signal.sigtimedwait([], 0.01)
        url = f"http://127.0.0.1:{port.read_text()}"
        members.append(wire.Member(member_id=name, name=name, control_url=url, weight_version=-1))
    training, writer = Training(), make_writer(tmp_path / "weights")
    weights = WeightSource(training.manifest, training.stream)
    publisher = publisher_of(writer)
    for version in range(MAX_UNREAD + 2):
        training.update()
        outcome = publisher.publish(version, weights, members)
        left_out = version >= MAX_UNREAD
        assert outcome.updated == ["good"]
        assert set(outcome.kept) == ({"slow"} if left_out else {"refuses", "slow", "hangs"})
        assert outcome.slow
        assert set(outcome.failed) == ({"refuses", "hangs", "dies"} if left_out else {"dies"})
        taken = torch.load(tmp_path / f"good/v{version}.pt")
        assert all(
            torch.equal(taken[n].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
            for n, t in training.tensors.items()
        )
        whole = sum(t.nbytes for t in training.tensors.values())
        assert (outcome.stats["publish_bytes"] > whole) == (version <= MAX_UNREAD), (
            "a base for it, but not for ever"
        )
    again = [msgspec.structs.replace(m, member_id=f"{m.name}-2") for m in members if m.name != "dies"]
    for version in range(MAX_UNREAD + 2, MAX_UNREAD + 4):
        training.update()
        outcome = publisher.publish(version, weights, again)
        assert set(outcome.kept) == {"refuses-2", "slow-2", "hangs-2"}, "it has registered again"
    assert outcome.stats["publish_bytes"] > whole, "a base for it"
    publisher.close()
    assert list((tmp_path / "weights").iterdir()) == []
