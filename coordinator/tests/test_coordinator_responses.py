"""Past responses over HTTP: what accepted groups leave in the store, and that the store cannot stop the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from coordinator_client import Client, ErrorAnswer, make_group
from coordinator_disks import FullDisk

from scalerl_api import endpoints, wire
from scalerl_coordinator.response_store import ResponseStore

HISTORY = {"speculation": {"history": {"storeSize": "64Mi"}}}


class NoSpace(FullDisk):
    room = 0


async def past(client: Client, group: wire.Group) -> list[wire.PastResponse]:
    return await client.responses(group.prompt, wire.prompt_digest(group.prompt_token_ids))


async def found_for(client: Client, groups: list[wire.Group]) -> list[list[wire.PastResponse]]:
    """What is found once all groups are: they are written, and read again, beside the requests."""
    async with asyncio.timeout(120):
        while not all(found := [await past(client, group) for group in groups]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


async def served(client: Client, digest: str) -> list[wire.Group]:
    """The groups of the first leases, pushed."""
    member = await client.register("g", digest)
    await client.hello("t")
    await client.publish("t", 0)
    await client.heartbeat(member, 0)
    groups = [make_group(lease, version=0) for lease in (await client.lease(member, 0, 16)).leases]
    reply = await client.push(member, groups)
    assert set(reply.results) == {wire.PushResult.ACCEPTED}
    assert (await client.push(member, groups[-1:])).results == [wire.PushResult.DUPLICATE]
    return groups


async def test_accepted_training_groups_are_served_by_prompt(tmp_path, serving_on):
    store = ResponseStore(tmp_path / "history", bytes(32), 2**20)
    async with aiohttp.ClientSession() as session, serving_on(tmp_path, history=store) as local:
        client = Client(session, local.url)
        groups = await served(client, local.digest)
        assert store.drain(120)
        training = [group for group in groups if group.split is wire.Split.TRAIN]
        assert len(training) < len(groups)
        for group in training:
            assert await past(client, group) == [
                wire.PastResponse(0, one.token_ids) for one in group.completions
            ]
        # The duplicate is not stored again.
        assert store.counters.stored == sum(len(group.completions) for group in training)
        assert await client.responses(training[0].prompt, wire.prompt_digest(b"else")) == []
        async with session.get(local.url + endpoints.METRICS) as response:
            text = await response.text()
        assert 'scalerl_coordinator_history_lookups_total{result="mismatch"} 1.0' in text
        assert f"scalerl_coordinator_history_prompts {len(training)}.0" in text


async def test_requests_are_checked(local, visitor):
    """Without a history, every prompt has no responses."""
    prompt = wire.PromptRef(0, wire.Split.TRAIN, 0)
    assert await visitor.responses(prompt, bytes(8)) == []
    with pytest.raises(ErrorAnswer, match="responses of evaluations are not stored") as caught:
        await visitor.responses(wire.PromptRef(0, wire.Split.HELD_OUT, 0), bytes(8))
    assert caught.value.status == 400
    visitor.headers["Authorization"] = "Bearer wrong"
    with pytest.raises(ErrorAnswer) as caught:
        await visitor.responses(prompt, bytes(8))
    assert caught.value.status == 401


async def test_run_continues_when_the_history_cannot_be_written(tmp_path, serving_on):
    store = ResponseStore(tmp_path / "history", bytes(32), 2**20, disk=NoSpace())
    async with aiohttp.ClientSession() as session, serving_on(tmp_path, history=store) as local:
        client = Client(session, local.url)
        groups = await served(client, local.digest)
        assert store.drain(120)
        assert await past(client, groups[-1]) == []
        assert store.counters.dropped["disk"] > 0
        assert (await client.next("t", 0)).action is wire.NextAction.TRAIN
        assert len((await client.shard("t", 0)).sequences) == 8


async def test_history_outlives_a_kill_of_the_process(tmp_path: Path, make_process):
    coordinator = make_process(generator=HISTORY)
    coordinator.start()
    async with aiohttp.ClientSession() as session:
        client = Client(session, coordinator.url)
        groups = [g for g in await served(client, coordinator.digest) if g.split is wire.Split.TRAIN]
        before = await found_for(client, groups)
    coordinator.kill()
    coordinator.start()
    async with aiohttp.ClientSession() as session:
        after = await found_for(Client(session, coordinator.url), groups)
        assert before == after
        assert all(after)
    assert coordinator.terminate() == 0
