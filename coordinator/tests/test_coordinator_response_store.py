"""The store of past responses: what it answers after any sequence of writes, kills, damage and full disks."""

from __future__ import annotations

import errno
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from coordinator_disks import FullDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api.wire import PastResponse, PromptRef, Split
from scalerl_coordinator.response_index import MAX_GROUPS
from scalerl_coordinator.response_segments import SEGMENT_HEADER_BYTES
from scalerl_coordinator.response_store import PastGroup, ResponseStore, history_identity

IDENTITY = bytes(32)
DIGESTS = (b"digest-a", b"digest-b")
decode = msgspec.msgpack.Decoder(list[PastResponse]).decode


@pytest.fixture(scope="module", autouse=True)
def no_wait() -> Iterator[None]:
    """The store tries a failed disk again at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalerl_coordinator.response_log._RETRY_SECONDS", 0.0)
        patch.setattr("scalerl_coordinator.response_store._RESERVE_CHECK_SECONDS", 0.05)
        yield


class SmallVolume(FullDisk):
    """A disk that may be full at any byte, on a volume with ``volume_free`` of a GiB."""

    volume_free = 2**29

    def free(self, directory: Path) -> tuple[int, int]:
        return self.volume_free, 2**30


def group(
    prompt: int, number: int, *, tokens: int = 4, responses: int = 2, digest: bytes = DIGESTS[0]
) -> PastGroup:
    """Responses that no other ``number`` has."""
    ids = [struct.pack("<i", number) * tokens + struct.pack("<i", at) for at in range(responses)]
    return PastGroup(PromptRef(0, Split.TRAIN, prompt), digest, [PastResponse(number, one) for one in ids])


class Opened:
    """A store on a directory, as one process has it."""

    def __init__(self, directory: Path, max_bytes: int = 2**20, **options: object) -> None:
        self.disk = SmallVolume()
        options = {"identity": IDENTITY, "disk": self.disk} | options
        self.store = ResponseStore(directory, max_bytes=max_bytes, **options)
        self.store.start()
        assert self.store.drain(120)

    def put(self, *groups: PastGroup) -> None:
        for one in groups:
            self.store.put(one)
        assert self.store.drain(120)

    def find(self, prompt: int, digest: bytes = DIGESTS[0], task: int = 0) -> list[PastResponse]:
        blob = self.store.lookup(PromptRef(task, Split.TRAIN, prompt), digest)
        return decode(blob) if blob else []

    def close(self) -> None:
        self.store.close()
        assert not self.store._thread.is_alive()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in segments(directory))


def test_newest_group_is_found_also_after_restart(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history")
    groups = [group(7, number) for number in range(3)]
    opened.put(*groups, group(8, 3))
    for _ in range(2):
        assert opened.find(7) == groups[2].responses
        assert opened.find(8) == group(8, 3).responses
        assert opened.find(9) == opened.find(7, task=1) == []
        opened.close()
        opened = Opened(tmp_path / "history")
    opened.close()


def test_prompt_with_other_tokens_is_a_mismatch(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history")
    opened.put(group(7, 0), group(7, 1, digest=DIGESTS[1]))
    assert opened.find(7, DIGESTS[1]) == group(7, 1).responses
    assert opened.find(7, DIGESTS[0]) == []
    opened.find(8)
    assert dict(opened.store.counters.lookups) == {"hit": 1, "mismatch": 1, "miss": 1}
    opened.close()


def test_other_identity_discards_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Opened(tmp_path / "history", 2**14)
    opened.put(*(group(prompt, prompt, tokens=60) for prompt in range(8)))
    opened.close()
    caplog.set_level("INFO")
    opened = Opened(tmp_path / "history", identity=bytes(range(32)))
    assert all(opened.find(prompt) == [] for prompt in range(8))
    assert opened.store.counters.discarded_segments > 1
    assert segments(tmp_path / "history") == []
    assert len(caplog.messages) == 1
    opened.close()


def test_segments_of_another_format_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("scalerl_coordinator.response_segments.SEGMENT_MAGIC", b"SCRLHST1")
        opened = Opened(tmp_path / "history")
        opened.put(group(0, 0))
        opened.close()
    opened = Opened(tmp_path / "history")
    assert opened.find(0) == []
    assert (opened.store.counters.discarded_segments, opened.store.counters.damaged) == (1, 0)
    assert segments(tmp_path / "history") == []
    opened.close()


def test_identity_is_of_tokenizer_and_prompts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("1")
    first = history_identity("train", tmp_path)
    (tmp_path / "model.safetensors").write_text("2")
    assert history_identity("train", tmp_path) == first
    assert history_identity("other", tmp_path) != first
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert history_identity("train", tmp_path) != first


def test_newest_groups_outlive_their_segment_while_there_is_room(tmp_path: Path) -> None:
    """One prompt is not sampled again; the others fill the store many times over."""
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(group(999, 0, tokens=60))
    opened.put(*(group(number % 20, number, tokens=60) for number in range(1, 1000)))
    assert opened.find(999) == group(999, 0, tokens=60).responses
    assert opened.store.counters.dropped["evicted"] == 0
    assert size(tmp_path / "history") <= 2**16
    opened.close()


def test_store_that_is_too_small_for_an_epoch_evicts_the_oldest(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(*(group(number % 500, number, tokens=60) for number in range(1200)))
    found = [prompt for prompt in range(500) if opened.find(prompt)]
    assert 50 < len(found) < 200
    assert opened.find(199) == group(199, 1199, tokens=60).responses
    counters = opened.store.counters
    assert counters.dropped["evicted"] == 2 * (1200 - counters.prompts) - 0
    assert counters.prompts == len(found)
    opened.close()


def test_full_queue_drops_and_does_not_wait(tmp_path: Path) -> None:
    blocked = threading.Event()

    class SlowDisk(SmallVolume):
        def write(self, fd: int, data: bytes) -> int:
            blocked.wait(120)
            return super().write(fd, data)

    opened = Opened(tmp_path / "history", disk=SlowDisk(), queue_bytes=4096)
    for number in range(100):
        opened.store.put(group(number, number))
    dropped = opened.store.counters.dropped["queue_full"]
    assert 150 < dropped < 200
    blocked.set()
    assert opened.store.drain(120)
    assert opened.store.counters.stored == 200 - dropped
    opened.close()


def test_full_disk_drops_then_stores_again(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history")
    opened.put(group(0, 0))
    opened.disk.room = 30
    opened.put(group(1, 1), group(1, 2))
    assert opened.store.counters.dropped["disk"] == 4
    assert opened.find(1) == []
    opened.disk.room = 10**6
    opened.put(group(1, 3))
    assert opened.find(1) == group(1, 3).responses
    assert size(tmp_path / "history") == opened.store.counters.nbytes
    opened.close()


def test_volume_keeps_a_reserve(tmp_path: Path) -> None:
    """The store gives up its own segments before it takes the space that journal and checkpoints need."""
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(*(group(number, number, tokens=60) for number in range(40)))
    opened.disk.volume_free = 2**30 // 20 + 2**10
    opened.put(*(group(number, number, tokens=60) for number in range(40, 50)))
    assert opened.find(0) == []
    assert opened.store.counters.dropped["no_space"] > 0
    opened.disk.volume_free = 2**29
    opened.put(group(7, 60))
    assert opened.find(7) == group(7, 60).responses
    opened.close()


def test_idle_store_yields_to_others_on_the_volume(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(*(group(number, number, tokens=60) for number in range(40)))
    opened.disk.volume_free = 2**30 // 20 - 1
    deadline = time.monotonic() + 120
    counters = opened.store.counters
    # The last segment's file is gone shortly before it is no longer counted.
    while (segments(tmp_path / "history") or counters.nbytes) and time.monotonic() < deadline:
        time.sleep(0.02)
        counters = opened.store.counters
    assert segments(tmp_path / "history") == []
    assert counters.prompts == counters.nbytes == 0
    opened.close()


def test_lookups_beside_evictions_answer_whole_groups(tmp_path: Path) -> None:
    """Readers of another thread see a group as it was put, or nothing, while its segment is written, copied or deleted."""
    opened = Opened(tmp_path / "history", 2**15)
    stop = threading.Event()
    seen: list[tuple[int, int]] = []

    def read() -> None:
        while not stop.is_set():
            for prompt in range(20):
                if responses := opened.find(prompt):
                    number = responses[0].version
                    assert responses == group(prompt, number, tokens=60).responses
                    seen.append((prompt, number))

    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(read)
        for begin in range(0, 1000, 100):
            opened.put(*(group(number**2 % 20, number, tokens=60) for number in range(begin, begin + 100)))
        stop.set()
        reader.result(20)
    assert len(seen) > 100
    assert opened.store.counters.damaged == 0
    opened.close()


@pytest.mark.parametrize("how", ["unreadable", "missing"])
def test_segment_that_cannot_be_read_loses_its_groups_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(*(group(number, number, tokens=60) for number in range(60)))
    second = segments(tmp_path / "history")[1]
    if how == "missing":
        second.unlink()
    else:
        opened.close()
        really = os.open

        def failing(path: object, *arguments: int) -> int:
            if path == second:
                raise OSError(errno.EIO, "Input/output error")
            return really(path, *arguments)

        monkeypatch.setattr(os, "open", failing)
        opened = Opened(tmp_path / "history", 2**16)
    lost = [number for number in range(60) if not opened.find(number)]
    assert 0 < lost[0] <= lost[-1] < 20
    assert lost == list(range(lost[0], lost[-1] + 1))
    opened.put(*(group(number % 20, number, tokens=60) for number in range(60, 300)))
    assert opened.find(19) == group(19, 299, tokens=60).responses
    assert size(tmp_path / "history") <= 2**16
    assert not second.exists()
    opened.close()


def test_group_that_is_too_large_is_dropped(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(group(0, 0, tokens=2**14), group(1, 1))
    assert opened.store.counters.dropped["too_large"] == 2
    assert opened.find(0) == []
    assert opened.find(1) == group(1, 1).responses
    opened.close()


def test_writer_that_fails_ends_the_history_alone(tmp_path: Path) -> None:
    class BrokenDisk(SmallVolume):
        def write(self, fd: int, data: bytes) -> int:
            raise RuntimeError("broken")

    opened = Opened(tmp_path / "history", disk=BrokenDisk())
    opened.store.put(group(0, 0))
    opened.close()
    opened.store.put(group(1, 1))
    assert opened.store.counters.dropped["failed"] == 4
    assert opened.find(0) == []


def test_index_is_bounded(tmp_path: Path) -> None:
    assert MAX_GROUPS * 200 <= 2**28
    opened = Opened(tmp_path / "history", 2**17, max_groups=100)
    for _ in range(2):
        opened.put(*(group(number, number) for number in range(400)))
        found = sum(bool(opened.find(number)) for number in range(400))
        assert 50 < found <= 100
        opened.close()
        opened = Opened(tmp_path / "history", 2**17, max_groups=100)
        assert sum(bool(opened.find(number)) for number in range(400)) <= 100
    opened.close()


def test_smaller_store_size_deletes_the_oldest(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "history", 2**16)
    opened.put(*(group(number, number, tokens=60) for number in range(60)))
    opened.close()
    opened = Opened(tmp_path / "history", 2**14)
    assert size(tmp_path / "history") == opened.store.counters.nbytes <= 2**14
    assert opened.find(0) == []
    assert opened.find(59) == group(59, 59, tokens=60).responses
    opened.close()


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_at_any_byte_loses_groups_and_invents_none(tmp_path: Path, damage: str) -> None:
    groups = [group(prompt, prompt, tokens=1, responses=1) for prompt in range(3)]
    opened = Opened(tmp_path / "whole")
    opened.put(*groups)
    opened.close()
    whole = segments(tmp_path / "whole")[0].read_bytes()
    kept = 0
    for at in range(len(whole)):
        directory = tmp_path / f"{at}"
        directory.mkdir()
        data = whole[:at] if damage == "cut" else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        (directory / "segment-00000001").write_bytes(data)
        opened = Opened(directory)
        for prompt in range(64):  # a flipped bit may name another one
            found = opened.find(prompt)
            assert found in ([], groups[prompt].responses if prompt < 3 else [])
            kept += bool(found)
        opened.close()
    frames = len(whole) - SEGMENT_HEADER_BYTES
    # Of three frames, a flip damages one, and a cut leaves one on average.
    assert kept == (2 * frames if damage == "flip" else frames)


PUT = st.tuples(
    st.just("put"),
    st.integers(0, 5),
    st.sampled_from(DIGESTS),
    st.integers(1, 3),
    st.integers(1, 400),
)
FAULT = st.one_of(
    st.tuples(st.just("restart")),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("room"), st.integers(0, 3000)),
)


@settings(max_examples=150, deadline=None)
@given(operations=st.lists(st.one_of(PUT, PUT, PUT, FAULT), max_size=40), seed=st.integers(0, 99))
def test_lookup_answers_a_whole_group_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple], seed: int
) -> None:
    """Whatever happens, an answer is a group that was put for these tokens, and the disk stays bounded."""
    directory, max_bytes, choose = tmp_path_factory.mktemp("store") / "history", 2**15, random.Random(seed)
    opened = Opened(directory, max_bytes)
    put: dict[int, list[PastGroup]] = {}
    faults = False
    for number, (operation, *arguments) in enumerate(operations):
        if operation == "put":
            prompt, digest, responses, tokens = arguments
            one = group(prompt, number, digest=digest, responses=responses, tokens=tokens)
            opened.put(one)
            put.setdefault(prompt, []).append(one)
        elif operation == "room":
            opened.disk.room = arguments[0]
            faults = True
        else:
            opened.close()
            paths = segments(directory)
            if paths and operation == "cut":
                faults = True
                with paths[-1].open("r+b") as file:
                    file.truncate(int(arguments[0] * paths[-1].stat().st_size))
            if paths and operation == "flip":
                faults = True
                path = choose.choice(paths)
                data = bytearray(path.read_bytes())
                if data:  # otherwise the disk was full when it began
                    data[int(arguments[0] * len(data))] ^= 1 << arguments[1]
                    path.write_bytes(data)
            opened = Opened(directory, max_bytes)
        assert size(directory) == opened.store.counters.nbytes <= max_bytes
        for prompt, groups in put.items():
            for digest in DIGESTS:
                wanted = [one.responses for one in groups if one.digest == digest]
                found = opened.find(prompt, digest)
                assert not found or found in wanted
                evicted = opened.store.counters.dropped["evicted"]
                if not faults and not evicted and groups[-1].digest == digest:
                    assert found == groups[-1].responses
    opened.close()
