"""The journal on a real disk: partial tails, damage, group commit, rotation, a disk that is full for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_disks import FullDisk, ReadOnlyDisk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl_coordinator import frames
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal import Journal, JournalFailed, JournalLocked, JournalRefused


async def open_journal(directory: Path, **options) -> tuple[Journal, list[bytes]]:
    """A started journal, and the records it held."""
    journal = Journal(directory, **options)
    try:
        recovery = journal.recover()
        records = []
        for header, at in recovery:
            records.append(bytes(header))
            if at.length > frames.frame_bytes(header, b""):
                recovery.blobs[bytes(header).decode()] = at
        recovery.retain(recovery.blobs)
        await journal.start()
    except BaseException:
        await journal.close()
        raise
    return journal, records


async def written(directory: Path, count: int, **options) -> None:
    """A journal of ``count`` records r0, r1, …, every second with a blob, each acknowledged by itself."""
    journal, _ = await open_journal(directory, **options)
    for at in range(count):
        name = f"r{at}"
        journal.append(name.encode(), name if at % 2 else None, bytes(100 + at) if at % 2 else b"")
        await journal.durable()
    await journal.close()


async def test_journal_recovers_durable_records_with_blobs(tmp_path):
    await written(tmp_path, 6)
    journal, records = await open_journal(tmp_path)
    assert records == [f"r{at}".encode() for at in range(6)]
    assert [len(blob) for blob in journal.blobs.read(["r5", "r1"])] == [105, 101]
    journal.append(b"more", None)
    await journal.durable()
    await journal.close()
    journal, records = await open_journal(tmp_path)
    assert records[-1] == b"more"
    await journal.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_journal_recovers_prefix_after_any_cut(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cut")

    async def run() -> None:
        await written(directory, 6)
        path = directory / "segment-00000001"
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        journal, records = await open_journal(directory)
        assert records == [f"r{at}".encode() for at in range(len(records))]
        journal.append(b"after", None)
        await journal.durable()
        await journal.close()
        journal, again = await open_journal(directory)
        assert again == [*records, b"after"]
        await journal.close()

    asyncio.run(run())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_journal_reports_damage_to_acknowledged_bytes(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("damage")

    async def run() -> None:
        await written(directory, 6)
        path = directory / "segment-00000001"
        whole = bytearray(path.read_bytes())
        offsets = [f.offset for f in frames.read_segment(memoryview(bytes(whole)), "x", 1, last=True)]
        # Damage to the last frame cannot be distinguished from a partial tail; all others are below its ``synced``.
        at = data.draw(st.integers(0, offsets[-1] - 1))
        whole[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        expected = max((o for o in [0, *offsets] if o <= at), default=0)
        with pytest.raises(CorruptJournal, match="segment-00000001, offset") as caught:
            await open_journal(directory)
        assert caught.value.offset == (expected if at >= offsets[0] else 0)

    asyncio.run(run())


async def test_journal_treats_frames_after_hole_as_partial_tail(tmp_path):
    """A power cut may keep a later page of a batch and lose an earlier one."""
    await written(tmp_path, 2)
    path = tmp_path / "segment-00000001"
    synced = path.stat().st_size
    lost, kept = (b"".join(frames.encode_frame(name, b"", synced)) for name in (b"lost", b"kept"))
    path.write_bytes(path.read_bytes() + bytes(len(lost)) + kept)
    journal, records = await open_journal(tmp_path)
    assert records == [b"r0", b"r1"]
    await journal.close()


async def test_journal_reports_damaged_or_missing_segment(tmp_path):
    journal, _ = await open_journal(tmp_path)
    for at in range(3):
        journal.append(f"r{at}".encode(), f"r{at}", bytes(50))
        journal.rotate(b"state")
        await journal.durable()
    journal.append(b"r3", None)
    await journal.durable()
    await journal.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    # Older segments stay for their blobs, the newest snapshot alone is kept.
    assert names == ["lock", *[f"segment-0000000{n}" for n in (1, 2, 3, 4)], "snapshot-00000004"]
    for victim, message in (("segment-00000004", "is missing"), ("snapshot-00000004", "damaged")):
        path = tmp_path / victim
        whole = path.read_bytes()
        path.unlink() if message == "is missing" else path.write_bytes(whole[:-1])
        with pytest.raises(CorruptJournal, match=message):
            await open_journal(tmp_path)
        path.write_bytes(whole)
    journal, records = await open_journal(tmp_path)
    assert records == [b"r3"]
    assert [len(blob) for blob in journal.blobs.read(["r0", "r1", "r2"])] == [50, 50, 50]
    recovery = journal.recover()
    (tmp_path / "segment-00000002").unlink()
    with pytest.raises(CorruptJournal, match="segment-00000002"):
        recovery.retain(["r1"])
    journal.blobs.forget(["r0", "r1"])
    journal.rotate(b"state")
    await journal.close()
    assert sorted(p.name for p in tmp_path.glob("segment*")) == ["segment-00000003", "segment-00000005"]


async def test_journal_reports_damaged_blob_on_read(tmp_path):
    journal, _ = await open_journal(tmp_path)
    journal.append(b"r", "r", bytes(1000))
    await journal.durable()
    path = tmp_path / "segment-00000001"
    whole = bytearray(path.read_bytes())
    whole[-10] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptJournal, match="offset 16"):
        journal.blobs.read(["r"])
    with pytest.raises(KeyError):
        journal.blobs.read(["never"])
    await journal.close()


async def test_journal_replays_after_crash_between_segment_and_snapshot(tmp_path):
    await written(tmp_path, 3)
    (tmp_path / "segment-00000002").write_bytes(b"")  # created, header not yet there
    (tmp_path / "snapshot-00000002.tmp").write_bytes(b"half")
    journal, records = await open_journal(tmp_path)
    assert len(records) == 3
    journal.append(b"more", None)
    await journal.durable()
    await journal.close()
    assert not list(tmp_path.glob("*.tmp"))
    journal, records = await open_journal(tmp_path)
    assert records == [b"r0", b"r1", b"r2", b"more"]
    await journal.close()


async def test_journal_locks_directory(tmp_path):
    journal, _ = await open_journal(tmp_path)
    with pytest.raises(JournalLocked, match="another coordinator"):
        Journal(tmp_path)
    await journal.close()
    journal, _ = await open_journal(tmp_path)
    await journal.close()


class SlowDisk(Disk):
    """Counts syncs, and takes its time over each."""

    syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)


async def test_journal_commits_waiting_records_in_one_sync(tmp_path):
    disk = SlowDisk()
    journal, _ = await open_journal(tmp_path, disk=disk)
    before = disk.syncs

    async def one(at: int) -> None:
        journal.append(f"r{at}".encode(), None)
        await journal.durable()

    await asyncio.gather(*(one(at) for at in range(200)))
    assert disk.syncs - before < 20
    await journal.close()


@pytest.mark.parametrize("room", [0, 1, 30, 90])
async def test_journal_full_disk_refuses_batch_and_recovers(tmp_path, room):
    disk = FullDisk()
    journal, _ = await open_journal(tmp_path, disk=disk)
    went_back = []
    journal.on_refusal = lambda: went_back.append([bytes(header) for header, _ in journal.recover()])
    journal.append(b"before", None)
    await journal.durable()
    disk.room = room
    journal.append(b"a", "a", bytes(200))
    first = asyncio.create_task(journal.durable())
    await asyncio.sleep(0)
    journal.append(b"b", None)
    with pytest.raises(JournalRefused, match="No space left"):
        await first
    assert went_back == [[b"before"]]
    with pytest.raises(JournalRefused):
        journal.check()
    assert journal.refusing is not None
    disk.room = 10**9
    async with asyncio.timeout(120):
        while journal.refusing is not None:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.05)
    assert disk.cut_and_synced, "power loss must not bring the refused frames back beside a newer segment"
    journal.append(b"after", "after", bytes(10))
    await journal.durable()
    assert journal.blobs.read(["after"]) == [bytes(10)]
    await journal.close()
    assert not list(tmp_path.glob("*.tmp"))
    journal, records = await open_journal(tmp_path)
    assert records == [b"before", b"after"]
    await journal.close()


async def test_journal_keeps_records_if_snapshot_fails(tmp_path):
    disk = FullDisk()
    journal, _ = await open_journal(tmp_path, disk=disk)
    journal.append(b"r0", None)
    await journal.durable()
    disk.room = frames.SEGMENT_HEADER.size + 5
    journal.rotate(bytes(1000))
    async with asyncio.timeout(120):
        while journal.counters.rotations == 0:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    disk.room = 10**9
    journal.append(b"r1", None)
    await journal.durable()
    await journal.close()
    assert not list(tmp_path.glob("snapshot*"))
    journal, records = await open_journal(tmp_path)
    assert records == [b"r0", b"r1"]
    await journal.close()


async def test_journal_read_only_volume_refuses_with_partial_tail(tmp_path):
    disk = ReadOnlyDisk()
    journal, _ = await open_journal(tmp_path, disk=disk)
    went_back = []
    journal.on_refusal = lambda: went_back.append([bytes(header) for header, _ in journal.recover()])
    journal.append(b"before", None)
    await journal.durable()
    disk.read_only = True
    journal.append(b"lost", None)
    async with asyncio.timeout(120):
        with pytest.raises(JournalRefused, match="Read-only file system"):
            await journal.durable()
    assert went_back == [[b"before"]]
    disk.read_only = False
    async with asyncio.timeout(120):
        while journal.refusing is not None:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.05)
    journal.append(b"after", None)
    await journal.durable()
    await journal.close()
    journal, records = await open_journal(tmp_path)
    assert records == [b"before", b"after"]
    await journal.close()


async def test_journal_roll_back_ignores_frames_of_failed_sync(tmp_path):
    """The frame is in the file, but its sync failed: it was refused, and is not to come back."""

    class FailingSync(ReadOnlyDisk):
        def write(self, fd: int, data) -> int:
            return Disk.write(self, fd, data)

    disk = FailingSync()
    journal, _ = await open_journal(tmp_path, disk=disk)
    went_back = []
    journal.on_refusal = lambda: went_back.append([bytes(header) for header, _ in journal.recover()])
    disk.read_only = True
    journal.append(b"lost", None)
    with pytest.raises(JournalRefused):
        await journal.durable()
    assert went_back == [[]]
    disk.read_only = False
    async with asyncio.timeout(120):
        while journal.refusing is not None:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.05)
    await journal.close()
    journal, records = await open_journal(tmp_path)
    assert records == []
    await journal.close()


@pytest.mark.parametrize("where", ["write", "go back"])
async def test_journal_writer_failure_is_reported_to_waiters(tmp_path, where):
    class BrokenDisk(FullDisk):
        broken = False

        def write(self, fd: int, data) -> int:
            if self.broken and where == "write":
                raise ValueError("a bug")
            return super().write(fd, data)

    def go_back() -> None:
        raise ValueError("a bug")

    disk, deaths = BrokenDisk(), []
    journal, _ = await open_journal(tmp_path, disk=disk)
    journal.on_refusal, journal.on_failure = go_back, deaths.append
    disk.broken, disk.room = True, 0
    journal.append(b"a", None)
    async with asyncio.timeout(120):
        with pytest.raises(JournalFailed if where == "write" else JournalRefused):
            await journal.durable()
        while not deaths:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.01)
        with pytest.raises(JournalFailed, match="a bug"):
            journal.check()
    assert [str(death) for death in deaths] == ["a bug"]
    await journal.close()


@pytest.mark.parametrize("records", [0, 3])
async def test_journal_that_starts_on_a_full_disk_refuses_until_there_is_space(tmp_path, records):
    if records:
        await written(tmp_path, records)
    disk = FullDisk() if not records else ReadOnlyDisk()
    disk.room, disk.read_only = 0, True
    journal, found = await open_journal(tmp_path, disk=disk)
    assert len(found) == records
    assert journal.refusing is not None
    with pytest.raises(JournalRefused):
        journal.check()
    await asyncio.sleep(1.2)
    disk.room, disk.read_only = 10**9, False
    for _ in range(2400):
        if journal.refusing is None:
            break
        await asyncio.sleep(0.05)
    journal.append(b"later", None)
    await journal.durable()
    await journal.close()
    journal, found = await open_journal(tmp_path)
    assert found == [*(f"r{at}".encode() for at in range(records)), b"later"]
    await journal.close()
