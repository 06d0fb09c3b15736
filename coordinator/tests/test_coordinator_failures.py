"""The server's behaviour on failures of the disk, the prompts, the journal, a decision."""

from __future__ import annotations

import asyncio
import errno
import json
import os

import aiohttp
import msgspec
import pytest
from coordinator_client import Client, ErrorAnswer, make_group
from coordinator_disks import FullDisk, ReadOnlyDisk

from scalerl_api import endpoints, wire
from scalerl_api.coordinator_spec import LEASE_SECONDS
from scalerl_coordinator import core as core_module
from scalerl_coordinator import generator_endpoints, journaled_core
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.journal_records import Record
from scalerl_coordinator.sampler_interface import SeededEpochs
from scalerl_coordinator.state import CoordinatorState
from scalerl_tasks import PromptError, SourceError


async def join(client: Client, digest: str = "train") -> str:
    """A trainer, and a member that holds version 0."""
    member = await client.register("g", digest)
    await client.hello("t")
    await client.publish("t", 0)
    await client.heartbeat(member, 0)
    return member


async def fill(client: Client, member: str, groups: int = 64) -> list[wire.Lease]:
    leases = (await client.lease(member, 0, groups)).leases
    for lease in leases:
        await client.push(member, [make_group(lease)])
    return leases


async def no_answer_but(status: int, error: str, call) -> str:
    with pytest.raises(ErrorAnswer) as caught:
        await call
    assert (caught.value.status, caught.value.error) == (status, error)
    return caught.value.message


async def test_server_fails_on_broken_prompt_source(local, visitor):
    member = await join(visitor)
    local.train.bad = set(range(397))
    message = await no_answer_but(500, "failed", visitor.lease(member, 0, 64))
    assert "of train cannot be made" in message
    assert isinstance(local.server.failure.exception(), SourceError)  # which the process exits 2 with
    await no_answer_but(500, "failed", visitor.lease(member, 0, 64))
    async with visitor.session.get(visitor.url + endpoints.HEALTH) as response:
        assert response.status == 503


async def test_lease_gives_up_slot_of_broken_prompt(local, visitor):
    member = await join(visitor)
    local.train.error = PromptError
    local.train.bad = {SeededEpochs(397, 0).choose(slot) for slot in (1, 2)}
    leases = (await visitor.lease(member, 0, 64)).leases
    training = [lease.slot for lease in leases if lease.split is wire.Split.TRAIN]
    assert training == [0, *range(3, len(training) + 2)]
    counts = (await visitor.status()).counts
    per_slot = leases[-1].completions
    assert (counts.given_up, counts.too_long) == (2 * per_slot, 0)
    assert not local.server.failure.done()


async def test_shard_of_damaged_group_fails_server(local, visitor):
    member = await join(visitor)
    await fill(visitor, member)
    segment = local.paths.journal / "segment-00000001"
    whole = bytearray(segment.read_bytes())
    whole[whole.rindex(b"token_ids")] ^= 1
    whole[whole.index(b"token_ids")] ^= 1
    segment.write_bytes(whole)
    message = await no_answer_but(500, "failed", visitor.shard("t", 0))
    assert "segment-00000001, offset" in message
    assert isinstance(local.server.failure.exception(), CorruptJournal)


async def test_decision_exception_is_not_journaled(serving_on, tmp_path, monkeypatch):
    async with serving_on(tmp_path) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        member = await join(client)
        lease = next(le for le in (await client.lease(member, 0, 64)).leases if le.split is wire.Split.TRAIN)
        good = core_module.apply

        def half_way(state: CoordinatorState, record: Record) -> None:
            good(state, record)
            raise KeyError("a bug")

        monkeypatch.setattr(core_module, "apply", half_way)
        assert "a bug" in await no_answer_but(500, "failed", client.push(member, [make_group(lease)]))
        monkeypatch.setattr(core_module, "apply", good)
        assert isinstance(local.server.failure.exception(), KeyError)
        await no_answer_but(500, "failed", client.push(member, [make_group(lease)]))
    async with serving_on(tmp_path, "again") as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        assert (await client.status()).counts.acknowledged == 0
        member = await client.register("g", "train", [lease.lease_id])
        assert (await client.push(member, [make_group(lease)])).results == ["accepted"]


async def test_read_only_volume_answers_507_and_counts_nothing(serving_on, tmp_path):
    disk = ReadOnlyDisk()
    async with serving_on(tmp_path, disk=disk) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        member = await join(client)
        leases = (await client.lease(member, 0, 64)).leases
        before = (await client.status()).counts
        disk.read_only = True
        async with asyncio.timeout(120):
            await no_answer_but(507, "no-space", client.push(member, [make_group(leases[5])]))
        status = await client.status()
        assert (status.counts, status.journal_error) == (before, os.strerror(errno.EROFS))
        async with session.get(local.url + endpoints.METRICS) as response:
            assert "scalerl_coordinator_journal_refusing 1.0" in await response.text()
        disk.read_only = False
        async with asyncio.timeout(120):
            while local.journal.refusing is not None:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.05)
        assert (await client.push(member, [make_group(leases[5])])).results == ["accepted"]
        assert (await client.status()).journal_error == ""


@pytest.mark.parametrize("problem", [PermissionError("the directory is gone"), ValueError("a bug")])
async def test_failed_roll_back_fails_server(serving_on, tmp_path, monkeypatch, problem):
    disk = FullDisk()
    async with serving_on(tmp_path, disk=disk) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        member = await join(client)
        leases = (await client.lease(member, 0, 64)).leases

        def unreadable(_: object) -> CoordinatorState:
            raise problem

        monkeypatch.setattr(journaled_core, "load_state", unreadable)
        disk.room = 0
        await no_answer_but(507, "no-space", client.push(member, [make_group(leases[5])]))
        async with asyncio.timeout(120):
            await asyncio.wait([local.server.failure])
        assert local.server.failure.exception() is problem


async def test_lease_omits_leases_rolled_back_by_full_disk(serving_on, tmp_path):
    """The disk refuses and has room again while the prompts are looked up."""
    disk = FullDisk()
    async with serving_on(tmp_path, disk=disk) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        member = await join(client)
        local.train.seconds = 0.15
        disk.room = 0
        asking = asyncio.create_task(client.lease(member, 0, 64))
        async with asyncio.timeout(120):
            while local.journal.refusing is None:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
            disk.room = 10**9
            while local.journal.refusing is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await no_answer_but(507, "no-space", asking)
        local.train.seconds = 0.0
        leases = (await client.lease(member, 0, 64)).leases
        reply = await client.push(member, [make_group(lease) for lease in leases])
        assert set(reply.results) == {"accepted"}


async def test_heartbeat_keeps_leases_of_unsent_answer(local, visitor):
    member = await join(visitor)
    local.train.seconds = 0.5
    asking = asyncio.create_task(visitor.lease(member, 0, 64))
    while not asking.done():
        beat = wire.Heartbeat(
            member_id=member,
            weight_version=0,
            healthy=True,
            busy_seconds=0.0,
            generated_tokens=0,
            held_leases=[],
        )
        await visitor.post(endpoints.HEARTBEAT, beat, wire.Ack)
        await asyncio.sleep(0.2)
    leases = (await asking).leases
    assert len(leases) == 15
    assert all(lease.remaining_seconds < LEASE_SECONDS - 4 for lease in leases)  # 12 · 0.5 s late
    reply = await visitor.push(member, [make_group(lease) for lease in leases])
    assert set(reply.results) == {"accepted"}


async def test_push_accepts_longest_group(local, visitor, serving_on, tmp_path, monkeypatch):
    monkeypatch.setattr(generator_endpoints, "PUSH_BODY_BYTES", 1)
    async with serving_on(tmp_path / "small") as small, aiohttp.ClientSession() as session:
        client = Client(session, small.url)
        member = await join(client)
        lease = (await client.lease(member, 0, 1)).leases[0]
        group = make_group(lease, tokens=16)
        verdicts = wire.Verdicts(scores=group.verdicts.scores, errors=dict.fromkeys(range(2), "x" * 8000))
        group = msgspec.structs.replace(
            group, verdicts=verdicts, prompt_token_ids=bytes(4 * 48), prompt_id="train/long" * 100
        )
        reply = await client.push(member, [group])
        assert reply.results == ["invalid"]  # for its prompt's name alone: it was read
        assert "prompt_id" in reply.reasons[0]
        with pytest.raises(ErrorAnswer, match="too-large"):
            await client.post(endpoints.GROUPS, bytes(200_000), wire.PushReply)


async def test_checkpoint_commit_waits_for_metrics_rows(local, visitor):
    member = await join(visitor)
    await fill(visitor, member)
    metrics = local.paths.metrics
    await visitor.report("t", 0, {"loss": 0.5})
    aside = metrics.with_name("aside")
    metrics.rename(aside)
    metrics.mkdir()
    await visitor.report("t", 1, {"loss": 0.25})
    await no_answer_but(507, "no-space", visitor.checkpoint("t", 2, [2]))
    metrics.rmdir()
    aside.rename(metrics)
    await visitor.checkpoint("t", 2, [2])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 0.5), (1, 0.25)]


async def test_curve_write_error_is_logged_once_and_retried(local, visitor, caplog):
    """It is tried at every tick; the log of the night that a disk was full stays readable."""
    curve = local.paths.curve
    curve.unlink(missing_ok=True)
    curve.mkdir()
    local.server._files._points_written = None  # as after a new point
    async with asyncio.timeout(120):
        while not any(record.levelname == "ERROR" for record in caplog.records):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.2)  # some more ticks
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    curve.rmdir()
    async with asyncio.timeout(120):
        while not curve.is_file():  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.05)


async def test_restart_preserves_state(serving_on, tmp_path):
    """From a real snapshot, over several segments: counts, shard bytes, files, and what is leased next."""
    async with serving_on(tmp_path, "p1", segment_bytes=1500) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        member = await join(client)
        await fill(client, member)
        await client.report("t", 0, {"loss": 0.5})
        await client.checkpoint("t", 1, [0, 1])
        await client.publish("t", 1)
        held = (await client.lease(member, 1, 3)).leases
        await client.push(member, [make_group(held[0])])
        release = wire.Release(member_id=member, lease_ids=[held[1].lease_id], reason="leaving")
        await client.post(endpoints.RELEASE, release, wire.Ack)
        before = await client.status()
        shards = [await client.shard("t", step) for step in (0, 1, 2)]
        rows = local.paths.metrics.read_text()
        assert local.journal.counters.rotations > 2
    assert list(local.paths.journal.glob("snapshot-*"))
    local.paths.metrics.unlink()
    async with serving_on(tmp_path, "p2", segment_bytes=1500) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        assert local.paths.metrics.read_text() == rows  # to the byte
        member = await client.register("g", "train", [held[2].lease_id])
        after = await client.status()
        assert (after.counts, after.step, after.points) == (before.counts, before.step, before.points)
        assert after.last_step_stats == before.last_step_stats
        welcome = await client.hello("t2", 1)
        assert (welcome.next_step, welcome.published_version) == (1, 1)
        assert [await client.shard("t2", step) for step in (0, 1, 2)] == shards
        await client.heartbeat(member, 1)
        assert (await client.push(member, [make_group(held[2])])).results == ["accepted"]
        following = (await client.lease(member, 1, 64)).leases
        assert [lease.slot for lease in following] == [held[1].slot, held[2].slot + 1]
        assert following[0].prompt_id == held[1].prompt_id


async def test_server_that_starts_on_a_full_disk_refuses_and_then_journals_its_start(serving_on, tmp_path):
    """A trainer and a generator of an earlier process go on; the status answers, and so does the shard of a closed step."""
    async with serving_on(tmp_path) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        member = await join(client)
        await fill(client, member)
        before = (await client.status()).counts
    disk = FullDisk()
    disk.room = 0
    async with serving_on(tmp_path, "again", disk=disk) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        assert (await client.status()).journal_error == "No space left on device"
        assert (await client.status()).counts == before
        await no_answer_but(507, "no-space", client.hello("t", 0))
        assert (await client.shard("t", 0, wait=30.0)).sequences
        message = wire.CheckpointFailed(incarnation="t", step=0, reason="full", holding=True)
        await client.post(endpoints.CHECKPOINT_FAILED, message, wire.Ack)
        assert ((await client.status()).checkpoint_problem, (await client.status()).unsaved_version) == (
            "full",
            0,
        )
        disk.room = 10**9
        for _ in range(2400):
            if not (await client.status()).journal_error:
                break
            await asyncio.sleep(0.05)
        await client.hello("t", 0)
        assert (await client.status()).checkpoint_problem == "", "a trainer that starts holds nothing"
        nonce = local.server._core.nonce
    async with serving_on(tmp_path, "third") as local:
        assert local.server._core.state.nonce != nonce
        assert (
            await asyncio.to_thread(lambda: local.server._core.state.counts.acknowledged)
        ) == before.acknowledged
