"""Coordinators on one volume, of which any may stop at any system call for any time, as on a lost node, and go on later."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinator_client import Client, ErrorAnswer, make_group

from scalerl_api import process, wire
from scalerl_api.attempts import Attempt, AttemptSuperseded
from scalerl_api.process import SUPERSEDED_EXIT_CODE
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.fence import Fence, current_folder
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal, JournalFailed, JournalRefused

CALLS = ("rename", "open", "unlink", "write", "ftruncate", "mkdir", "rmdir", "listdir", "scandir", "stat")
SYNCS = ("fsync", "fdatasync")
RECORDS = 5
WAIT_SECONDS = 120.0
ENDS = (AttemptSuperseded, JournalFailed, JournalRefused, FileNotFoundError)
"""How one ends that was replaced: it finds that, or the folder that it writes is gone."""

running: dict[str, Coordinator] = {}
"""By the name of its threads."""


class Coordinator:
    """Writes records to the journal, in threads that stop at the system call after which none is left to it."""

    def __init__(
        self, root: Path, attempt: int, pod: str, calls: int = 10**9, *, crashes: bool = False
    ) -> None:
        self.root, self.attempt, self.pod, self.crashes = root, Attempt(1, attempt), pod, crashes
        self.recovered: list[str] | None = None
        self.acknowledged: list[str] = []
        self.problem: BaseException | None = None
        self.ended = False
        self._left = calls
        self._may_go, self._stopped = threading.Condition(), threading.Event()
        running[pod] = self
        self._thread = threading.Thread(target=self._run, name=f"{pod}_", daemon=True)
        self._thread.start()

    def at_call(self) -> None:
        with self._may_go:
            while self._left == 0:
                self._stopped.set()
                self._may_go.wait()
            self._left -= 1

    def wait(self) -> bool:
        """Wait until it has stopped; returns whether it has ended."""
        assert self._stopped.wait(WAIT_SECONDS)
        return self.ended

    def go_on(self, calls: int = 10**9) -> bool:
        with self._may_go:
            self._left = calls
            if not self.ended:
                self._stopped.clear()
            self._may_go.notify_all()
        return self.wait()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except ENDS as problem:
            self.problem = problem
        except BaseException as problem:
            self.problem = problem
            raise
        finally:
            self.ended = True
            self._stopped.set()

    def _recover(self, journal: Journal) -> list[str]:
        recovery = journal.recover()
        records: list[str] = [] if recovery.snapshot is None else json.loads(recovery.snapshot)
        for header, at in recovery:
            name = bytes(header).decode()
            records.append(name)
            recovery.blobs[name] = at
        recovery.retain(recovery.blobs)
        return records

    async def _serve(self) -> None:
        fence = Fence.begin(self.root, self.attempt, self.pod)
        journal = Journal(fence.folder, fence=fence)
        journal._thread = ThreadPoolExecutor(1, thread_name_prefix=self.pod)
        try:
            records = self._recover(journal)
        except (OSError, CorruptJournal):
            fence.check()  # the process ends; what it has read was removed by the next one
            raise
        self.recovered = list(records)
        await journal.start()
        for at in range(RECORDS):
            name = f"{self.pod}{at}"
            journal.append(name.encode(), name, bytes(40))
            records.append(name)
            if at == 2:
                journal.blobs.forget(list(journal.blobs.copy())[:-1])
                journal.rotate(json.dumps(records).encode())
            await journal.durable()
            self.acknowledged.append(name)
        assert [len(blob) for blob in journal.blobs.read([name])] == [40]
        if self.crashes:
            assert journal._writer is not None
            journal._writer.cancel()
            journal._thread.shutdown()
            journal._files.close()
        else:
            await journal.close()


@pytest.fixture(autouse=True)
def stopping_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def stops(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*of: Any, **more: Any) -> Any:
            of_coordinator = running.get(threading.current_thread().name.rpartition("_")[0])
            if of_coordinator is not None:
                of_coordinator.at_call()
            return call(*of, **more)

        return wrapped

    for name in CALLS:
        monkeypatch.setattr(os, name, stops(getattr(os, name)))
    for name in SYNCS:  # no power fails here, so none needs time
        monkeypatch.setattr(os, name, stops(lambda fd: None))
    yield
    running.clear()


def complete(root: Path, attempt: int, pod: str, **how: Any) -> Coordinator:
    made = Coordinator(root, attempt, pod, **how)
    made.wait()
    made._thread.join(WAIT_SECONDS)
    if made.problem is not None:
        raise made.problem
    return made


def check(last: Coordinator, *others: Coordinator) -> None:
    """Nothing that was acknowledged is lost, doubled or reordered for the last coordinator."""
    found = last.recovered
    assert found is not None
    assert len(set(found)) == len(found)
    for one in others:
        own = [name for name in found if name.startswith(one.pod)]
        assert own[: len(one.acknowledged)] == one.acknowledged, (one.pod, found)
        assert own == sorted(own)


@pytest.mark.parametrize(
    ("attempts", "crashes"),
    [
        ((2, 3, 4), False),
        ((2, 2, 2), True),
        pytest.param((2, 3, 4), True, marks=pytest.mark.full),
        pytest.param((2, 2, 2), False, marks=pytest.mark.full),
    ],
)
def test_nothing_acknowledged_is_lost_wherever_the_earlier_one_stops(
    tmp_path: Path, attempts: tuple[int, int, int], crashes: bool
) -> None:
    """attempts: equal ones where the pod was deleted by hand, by force."""
    calls = 0
    while True:
        root = tmp_path / str(calls)
        complete(root, 1, "first", crashes=crashes)
        old = Coordinator(root, attempts[0], "old", calls)
        if ended := old.wait():
            break
        begun = any(root.glob("owner-*-old"))
        acknowledged = set(old.acknowledged)
        new = complete(root, attempts[1], "new", crashes=crashes)
        assert new.recovered is not None
        assert acknowledged <= set(new.recovered)
        old.go_on()
        old._thread.join(WAIT_SECONDS)
        if begun or attempts[0] < attempts[1]:
            complete_before = old.problem is None and acknowledged == {f"old{at}" for at in range(RECORDS)}
            assert complete_before or isinstance(old.problem, ENDS), (calls, old.problem)
            assert set(old.acknowledged) <= set(new.recovered), "acknowledged, and unknown to the next"
            last = complete(root, attempts[2], "last")
            assert last.recovered == new.recovered + new.acknowledged, "a late write was read"
        else:  # it has begun after the other: it is the new one
            assert old.problem is None
            last = complete(root, attempts[2], "last")
        check(last, old, new)
        calls += 1
    assert ended
    assert calls > 60, "the coordinator was to stop at each of its calls"


@pytest.mark.parametrize("seed", range(12))
def test_several_that_begin_and_stop_at_random(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    pods = [Coordinator(tmp_path, chance.randint(1, 3), f"p{at}x", 0) for at in range(4)]
    left = list(pods)
    for _ in range(400):
        if not left:
            break
        one = chance.choice(left)
        if one.go_on(chance.choice((1, 2, 5, 20, 60))):
            left.remove(one)
    for one in left:
        one.go_on()
    for one in pods:
        one._thread.join(WAIT_SECONDS)
        assert one.problem is None or isinstance(one.problem, ENDS), one.problem
    check(complete(tmp_path, 9, "last"), *pods)


def test_lower_attempt_or_a_replaced_pod_does_not_begin(tmp_path: Path) -> None:
    complete(tmp_path, 2, "a", crashes=True)
    complete(tmp_path, 2, "b", crashes=True)
    with pytest.raises(AttemptSuperseded, match="has taken its right"):
        Fence.begin(tmp_path, Attempt(1, 2), "a")
    with pytest.raises(AttemptSuperseded, match=r"is later"):
        Fence.begin(tmp_path, Attempt(1, 1), "c")
    again = complete(tmp_path, 2, "b")
    assert again.recovered is not None
    assert set(again.acknowledged) <= set(again.recovered), "its own earlier process"


def test_only_a_pod_that_may_still_write_costs_a_copy(tmp_path: Path) -> None:
    def folder() -> str:
        return current_folder(tmp_path).name

    complete(tmp_path, 1, "a", crashes=True)
    assert folder() == "journal-00000001"
    complete(tmp_path, 1, "a")
    complete(tmp_path, 1, "b")
    assert folder() == "journal-00000001", "the same pod, or one that has ended: no space is needed"
    complete(tmp_path, 1, "c", crashes=True)
    complete(tmp_path, 2, "d")
    assert folder() == "journal-00000002"
    assert sorted(p.name for p in tmp_path.glob("*") if not p.name.startswith("owner")) == [
        "journal-00000002"
    ]


async def test_journal_of_one_machine_and_of_a_cluster_continue_each_other(tmp_path: Path) -> None:
    async def on_one_machine(name: str) -> list[str]:
        journal = Journal(current_folder(tmp_path))
        recovery = journal.recover()
        found = [] if recovery.snapshot is None else json.loads(recovery.snapshot)
        found += [bytes(header).decode() for header, _ in recovery]
        recovery.retain([])
        await journal.start()
        journal.append(name.encode())
        await journal.durable()
        await journal.close()
        return found

    assert await on_one_machine("laptop") == []
    first = await asyncio.to_thread(complete, tmp_path, 1, "pod")
    assert first.recovered == ["laptop"]
    assert await on_one_machine("again") == ["laptop", *first.acknowledged]
    second = await asyncio.to_thread(complete, tmp_path, 1, "pod")
    assert second.recovered == ["laptop", *first.acknowledged, "again"]


async def test_volume_that_cannot_be_written_acknowledges_nothing(tmp_path: Path) -> None:
    """The rename fails for another reason than another coordinator."""
    fence = Fence.begin(tmp_path, Attempt(1, 1), "a")
    journal = Journal(fence.folder, fence=fence)
    list(journal.recover())
    await journal.start()
    check, fails = fence.check, True

    def failing() -> None:
        if fails:
            raise OSError(5, "Input/output error")
        check()

    fence.check = failing  # type: ignore[method-assign]
    journal.on_refusal = lambda: [*journal.recover()].clear()
    journal.append(b"r")
    with pytest.raises(JournalRefused):
        await journal.durable()
    fails = False
    async with asyncio.timeout(120):
        while journal.refusing is not None:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.05)
    journal.append(b"s")
    await journal.durable()
    await journal.close()
    again = Journal(fence.folder, disk=Disk())
    assert [bytes(header) for header, _ in again.recover()] == [b"s"]


async def test_idle_coordinator_notices_that_it_was_replaced(tmp_path: Path) -> None:
    fence = Fence.begin(tmp_path, Attempt(1, 1), "a")
    journal, failed = Journal(fence.folder, fence=fence), asyncio.Event()
    journal.on_failure = lambda problem: failed.set()
    list(journal.recover())
    await journal.start()
    Fence.begin(tmp_path, Attempt(1, 2), "b")
    await asyncio.wait_for(failed.wait(), 120)
    await journal.close()


async def test_replaced_coordinator_does_not_start(tmp_path: Path) -> None:
    fence = Fence.begin(tmp_path, Attempt(1, 1), "a")
    journal = Journal(fence.folder, fence=fence)
    list(journal.recover())
    Fence.begin(tmp_path, Attempt(1, 2), "b")
    with pytest.raises(AttemptSuperseded):
        await journal.start()
    await journal.close()


async def test_processes_on_one_volume(make_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is stopped, as on a node that is cut off; the second one serves, and the first one answers once more."""

    def start(attempt: int, pod: str, *, ready: bool = True) -> Any:
        monkeypatch.setenv(process.ATTEMPT, f"5.{attempt}")
        monkeypatch.setenv(process.POD, pod)
        made = make_process()
        made.start(ready=ready)
        return made

    first = start(1, "a")
    async with aiohttp.ClientSession() as session:
        old = Client(session, first.url)
        member = await old.register("g", first.digest)
        await old.hello("t")
        await old.publish("t", 0)
        await old.heartbeat(member, 0)
        train = [
            lease for lease in (await old.lease(member, 0, 64)).leases if lease.split is wire.Split.TRAIN
        ]
        assert (await old.push(member, [make_group(train[0])])).results == ["accepted"]
        first.process.send_signal(signal.SIGSTOP)
        second = start(2, "b")
        new = Client(session, second.url)
        member = await new.register("g", second.digest, [lease.lease_id for lease in train[1:]])
        assert (await new.push(member, [make_group(train[0])])).results == ["duplicate"]
        assert (await new.push(member, [make_group(train[1])])).results == ["accepted"]
        acknowledged = (await new.status()).counts.acknowledged
        first.process.send_signal(signal.SIGCONT)
        with pytest.raises((ErrorAnswer, aiohttp.ClientError)):
            await old.push(member, [make_group(train[2])])
        assert await asyncio.to_thread(first.process.wait, 120) == SUPERSEDED_EXIT_CODE
        assert "acknowledges nothing more" in first.log()
        assert "Traceback" not in first.log()
        third = start(1, "c", ready=False)
        assert await asyncio.to_thread(third.process.wait, 120) == SUPERSEDED_EXIT_CODE
        assert (await new.status()).counts.acknowledged == acknowledged


def test_rename_whose_answer_was_lost_ends_nobody(tmp_path: Path) -> None:
    """The server has done it; the process holds the right under the other name."""
    fence = Fence.begin(tmp_path, Attempt(1, 1), "a")
    (owner,) = tmp_path.glob("owner-*")
    (held,) = owner.iterdir()
    held.rename(owner / ({"held", "held~"} - {held.name}).pop())
    fence.check()
    fence.check()
    Fence.begin(tmp_path, Attempt(1, 2), "b")
    with pytest.raises(AttemptSuperseded):
        fence.check()


def test_takeover_without_space_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fence.begin(tmp_path, Attempt(1, 1), "a")

    def full(source: Path, target: Path) -> bool:
        (target / "segment-0").write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scalerl_coordinator.fence._copy", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            Fence.begin(tmp_path, Attempt(1, 2), "b")
        assert not list(tmp_path.glob(".tmp-*"))
