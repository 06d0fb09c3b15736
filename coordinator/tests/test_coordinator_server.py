"""The server over real HTTP: authorization, refusals, misbehaving clients."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import shutil
import threading
import time

import aiohttp
import msgspec
import pytest
from aiohttp import web
from coordinator_client import Client, ErrorAnswer, make_group

from scalerl_api import endpoints, wire
from scalerl_api.exports import ExportedModel, Exports
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.http import runner


@pytest.fixture
async def serving(local, visitor):
    """A coordinator with a trainer and a member that holds version 0."""
    member = await visitor.register("g", local.digest)
    await visitor.hello("t")
    await visitor.publish("t", 0)
    await visitor.heartbeat(member, 0)
    visitor.member = member
    return visitor


async def test_probes_and_metrics_need_no_token(local, visitor):
    for path in (endpoints.HEALTH, endpoints.READY):
        async with visitor.session.get(local.url + path) as response:
            assert response.status == 200
    async with visitor.session.get(local.url + endpoints.METRICS) as response:
        text = await response.text()
    assert 'scalerl_coordinator_rollouts{outcome="queued"} 0.0' in text
    assert 'scalerl_coordinator_phase{phase="waiting"} 1.0' in text
    assert "scalerl_coordinator_journal_refusing 0.0" in text
    assert "scalerl_coordinator_supervised_steps 0.0" in text


async def test_metrics_show_staleness_bound_and_requests(local, visitor):
    await visitor.register("g", local.digest)
    async with visitor.session.get(local.url + endpoints.METRICS) as response:
        text = await response.text()
    assert "scalerl_coordinator_staleness_bound_steps 2.0" in text
    assert f'scalerl_coordinator_request_seconds_count{{path="{endpoints.MEMBERS}"}} 1.0' in text
    # What goes back with a run to its checkpoint is no counter.
    for name in ("acknowledged_rollouts", "trained_tokens"):
        assert f"# TYPE scalerl_coordinator_{name} gauge" in text


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer wrong", "Bearer ", "secret", "Bearer s\u00e9cret"]
)
async def test_request_without_token_is_refused(local, visitor, authorization):
    headers = {wire.WIRE_HEADER: str(wire.WIRE_VERSION)}
    if authorization is not None:
        headers["Authorization"] = authorization
    for method, path in (("GET", endpoints.STATUS), ("POST", endpoints.LEASE), ("POST", endpoints.STOP)):
        async with visitor.session.request(method, local.url + path, headers=headers) as response:
            assert response.status == 401
            problem = msgspec.msgpack.decode(await response.read(), type=wire.Problem)
            assert problem.error == "unauthorized"


@pytest.mark.parametrize("version", [None, "0", "1", "one"])
async def test_request_with_other_wire_version_is_refused(local, visitor, version):
    visitor.headers.pop(wire.WIRE_HEADER)
    if version is not None:
        visitor.headers[wire.WIRE_HEADER] = version
    with pytest.raises(ErrorAnswer) as caught:
        await visitor.register("g", local.digest)
    assert (caught.value.status, caught.value.error) == (426, "wire-version")
    assert (
        f"the request has wire version {version or 'none'}, the coordinator {wire.WIRE_VERSION}"
        in caught.value.message
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Input data was truncated"),
        (b"\xc1", "malformed"),
        (b"{json}", "Expected `object`"),
        (msgspec.msgpack.encode({"member_id": 3}), r"Expected `str`, got `int` - at `\$.member_id`"),
        (msgspec.msgpack.encode({"member_id": "m"}), "missing required field `groups`"),
        (msgspec.msgpack.encode({"member_id": "m", "groups": [], "x": 1}), "unknown field `x`"),
        (
            msgspec.msgpack.encode({"member_id": "m", "groups": [{"lease_id": 1}]}),
            r"Expected `str`, got `int` - at `\$.groups\[0\].lease_id`",
        ),
    ],
)
async def test_request_with_invalid_body_is_refused(local, visitor, body, message):
    with pytest.raises(ErrorAnswer, match=message) as caught:
        await visitor.post(endpoints.GROUPS, body, wire.PushReply)
    assert (caught.value.status, caught.value.error) == (400, "bad-request")


async def test_request_with_non_finite_numbers_is_refused(serving):
    for wait in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ErrorAnswer, match="wait_seconds") as caught:
            await serving.lease(serving.member, 0, 1, wait=wait)
        assert caught.value.status == 400
    with pytest.raises(ErrorAnswer, match="max_groups is 0"):
        await serving.lease(serving.member, 0, 0)
    with pytest.raises(ErrorAnswer, match="busy_seconds nan"):
        await serving.heartbeat(serving.member, 0, busy=float("nan"))


async def test_request_body_size_is_limited(local, visitor):
    with pytest.raises(ErrorAnswer, match="the limit is 1048576") as caught:
        await visitor.post(endpoints.LEASE, bytes(2**20 + 1), wire.Leases)
    assert (caught.value.status, caught.value.error) == (413, "too-large")

    async def chunks():
        yield b"x"

    async with visitor.session.post(
        visitor.url + endpoints.LEASE, data=chunks(), headers=visitor.headers
    ) as response:
        assert response.status == 413


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_request_with_compressed_body_is_refused(local, visitor, encoding):
    """A body of a kilobyte that decompresses to a megabyte."""
    visitor.headers["Content-Encoding"] = encoding
    with pytest.raises(ErrorAnswer, match=f"without the encoding '{encoding}'") as caught:
        await visitor.post(endpoints.LEASE, gzip.compress(bytes(2**20)), wire.Leases)
    assert (caught.value.status, caught.value.error) == (415, "encoded")


async def test_runner_does_not_decompress_bodies(visitor):
    async def sent(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/", sent)
    served = runner(app, shutdown_seconds=1.0)
    await served.setup()
    await web.TCPSite(served, "127.0.0.1", 0).start()
    packed, headers = gzip.compress(bytes(2**20)), {"Content-Encoding": "gzip"}
    try:
        url = f"http://127.0.0.1:{served.addresses[0][1]}/"
        async with visitor.session.post(url, data=io.BytesIO(packed), headers=headers) as answer:
            assert await answer.read() == packed
    finally:
        await served.cleanup()


async def test_unknown_member_is_refused(serving):
    group = make_group((await serving.lease(serving.member, 0, 1)).leases[0])
    for call in (
        lambda: serving.heartbeat("g/none", 0),
        lambda: serving.lease("g/none", 0, 1),
        lambda: serving.push("g/none", []),
        lambda: serving.push("g/none", [group]),
    ):
        with pytest.raises(ErrorAnswer, match="register again") as caught:
            await call()
        assert (caught.value.status, caught.value.error) == (404, "unknown-member")


async def test_superseded_trainer_is_refused_during_poll(serving):
    waiting = asyncio.create_task(serving.next("t", 0, wait=60))
    await asyncio.sleep(0.2)
    await serving.hello("t2")
    started = time.monotonic()
    with pytest.raises(ErrorAnswer) as caught:
        await waiting
    assert (caught.value.status, caught.value.error) == (409, "superseded")
    assert time.monotonic() - started < 50


async def test_long_poll_wakes_on_event(local, serving):
    """Publishing wakes an actor that polls; the last group of a step wakes the trainer."""
    second = await serving.register("h", local.digest)
    poll = asyncio.create_task(serving.lease(second, -1, 64, wait=60))
    trainer = asyncio.create_task(serving.next("t", 0, wait=60))
    assert (await trainer).action is wire.NextAction.PUBLISH
    await serving.publish("t", 0)
    leases = (await asyncio.wait_for(poll, 50)).leases
    assert len(leases) == 3 + 12
    trainer = asyncio.create_task(serving.next("t", 0, wait=60))
    reply = await serving.push(second, [make_group(lease) for lease in leases])
    assert set(reply.results) == {wire.PushResult.ACCEPTED}
    assert (await asyncio.wait_for(trainer, 50)).action is wire.NextAction.TRAIN


async def test_long_poll_ends_with_its_client(local, serving):
    """Otherwise the next lease would be lost."""
    drain = (await serving.lease(serving.member, 0, 64)).leases
    poll = asyncio.create_task(serving.lease(serving.member, 0, 1, wait=60))
    await asyncio.sleep(0.2)
    poll.cancel()
    for _ in range(20):
        await asyncio.sleep(0.01)  # turns of the loop, in which the server sees that the client is gone
    release = wire.Release(member_id=serving.member, lease_ids=[drain[-1].lease_id], reason="test")
    await serving.post(endpoints.RELEASE, release, wire.Ack)
    again = (await serving.lease(serving.member, 0, 1)).leases
    assert [lease.slot for lease in again] == [drain[-1].slot]


async def test_slow_client_does_not_block_others(local, serving):
    """Half a push, and an answer that is not read: the others are served meanwhile."""
    port = local.port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "".join(f"{name}: {value}\r\n" for name, value in serving.headers.items())
    writer.write(
        f"POST {endpoints.GROUPS} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: 1000000\r\n\r\n".encode()
    )
    writer.write(b"x" * 1000)
    await writer.drain()
    started = time.monotonic()
    for lease in (await serving.lease(serving.member, 0, 8)).leases:
        assert (await serving.push(serving.member, [make_group(lease)])).results == ["accepted"]
    assert time.monotonic() - started < 60
    writer.close()
    await writer.wait_closed()
    assert (await serving.status()).counts.acknowledged == 2 * 5


async def test_push_counts_duplicate_and_late_groups(serving):
    leases = [
        lease
        for lease in (await serving.lease(serving.member, 0, 8)).leases
        if lease.split is wire.Split.TRAIN
    ]
    group = make_group(leases[0])
    replies = await asyncio.gather(*(serving.push(serving.member, [group, group]) for _ in range(3)))
    results = sorted(result for reply in replies for result in reply.results)
    assert results == ["accepted", *["duplicate"] * 5]
    bad = make_group(leases[1], logprob=float("nan"))
    reply = await serving.push(serving.member, [bad])
    assert reply.results == ["invalid"]
    assert "not finite" in reply.reasons[0]
    counts = (await serving.status()).counts
    assert (counts.acknowledged, counts.queued, counts.duplicate, counts.invalid) == (2, 2, 10, 2)


@pytest.mark.parametrize("wrong", [{"index": 77}, {"task": 1}, {"split": wire.Split.TRAIN}, {"slot": 1}])
async def test_push_refuses_another_prompt_or_slot_than_leased(serving, wrong):
    lease = (await serving.lease(serving.member, 0, 1)).leases[0]
    place = {"slot": wrong.pop("slot", lease.slot)}
    prompt = msgspec.structs.replace(lease.prompt, **wrong)
    group = msgspec.structs.replace(make_group(lease), prompt=prompt, **place)
    reply = await serving.push(serving.member, [group])
    assert reply.results == ["invalid"]
    assert f"leased {lease.prompt if wrong else lease.slot}" in reply.reasons[0]


async def test_push_refuses_wrong_prompt_id(serving):
    lease = (await serving.lease(serving.member, 0, 1)).leases[0]
    group = msgspec.structs.replace(make_group(lease), prompt_id="another")
    reply = await serving.push(serving.member, [group])
    assert reply.results == ["invalid"]
    assert "prompt_id is 'another'" in reply.reasons[0]


async def test_shard_returns_pushed_bytes(local, serving):
    leases = [
        le for le in (await serving.lease(serving.member, 0, 64)).leases if le.split is wire.Split.TRAIN
    ]
    groups = {lease.slot: make_group(lease, tokens=3 + lease.slot % 5) for lease in leases}
    await serving.push(serving.member, list(groups.values()))
    shards = [await serving.shard("t", 0, rank, 2) for rank in range(2)]
    assert shards[0].groups == shards[1].groups
    seen = set()
    for sequence in [s for shard in shards for s in shard.sequences]:
        slot = shards[0].groups[sequence.group].slot
        completion = groups[slot].completions[sequence.sample]
        assert (sequence.token_ids, sequence.logprobs, sequence.versions, sequence.prompt_token_ids) == (
            completion.token_ids,
            completion.logprobs,
            completion.versions,
            groups[slot].prompt_token_ids,
        )
        seen.add((slot, sequence.sample))
    assert seen == {(slot, sample) for slot in range(4) for sample in range(2)}
    with pytest.raises(ErrorAnswer, match="not closed"):
        await serving.shard("t", 3)


async def test_shard_waits_until_its_step_is_closed(serving):
    leases = [
        le for le in (await serving.lease(serving.member, 0, 64)).leases if le.split is wire.Split.TRAIN
    ]
    ahead = asyncio.create_task(serving.shard("t", 0, wait=60.0))
    await serving.push(serving.member, [make_group(lease) for lease in leases[1:]])
    await asyncio.sleep(0.1)
    assert not ahead.done()
    await serving.push(serving.member, [make_group(leases[0])])
    assert (await asyncio.wait_for(ahead, 50.0)).step == 0
    with pytest.raises(ErrorAnswer, match="not-ready"):
        await serving.shard("t", 3, wait=0.1)
    with pytest.raises(ErrorAnswer, match="superseded"):
        await serving.shard("other", 0, wait=30.0)


async def test_unauthorized_bodies_are_not_read(local):
    async with aiohttp.ClientSession() as session:
        stranger = Client(session, local.url, token="guess")
        with pytest.raises(ErrorAnswer) as caught:
            await stranger.post(endpoints.GROUPS, bytes(1000), wire.PushReply)
        assert caught.value.status == 401


async def test_status_reads_exports_in_background(serving_on, tmp_path, monkeypatch):
    reads, again, loop = 0, asyncio.Event(), asyncio.get_running_loop()
    goes_on = threading.Event()
    read = RunFiles.exports

    def count(files):
        nonlocal reads
        reads += 1
        if reads > 1:
            loop.call_soon_threadsafe(again.set)
            goes_on.wait(120)
        return read(files)

    monkeypatch.setattr(RunFiles, "exports", count)
    started = loop.time()
    async with serving_on(tmp_path, exports_seconds=1.0):
        async with asyncio.timeout(120):
            while reads == 0:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.8)
        assert reads <= 1 + (loop.time() - started)  # at the start, and then once a second
        await asyncio.wait_for(again.wait(), 120)
        (reading,) = (task for task in asyncio.all_tasks() if task.get_name() == "coordinator-exports")
        # The server ends meanwhile, and waits for the thread that reads.
        threading.Timer(0.5, goes_on.set).start()
    assert reading.done()


async def test_exports_of_a_trainer_with_its_own_directory_survive_a_restart(serving_on, tmp_path):
    model = ExportedModel(version=2, reward=0.5, path="checkpoints/hf/step-2", uri="s3://a/2", time="t")
    exports = Exports(best=model, last=model, failures=1, problem="slow")

    async def report(client: Client, incarnation: str, given: Exports | None) -> Exports | None:
        message = wire.ExportsReport(incarnation=incarnation, exports=given)
        return (await client.post(endpoints.EXPORTS, message, wire.ExportsReported)).exports

    async with serving_on(tmp_path) as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        await client.hello("t")
        assert await report(client, "t", None) is None
        with pytest.raises(ErrorAnswer, match="409"):
            await report(client, "earlier", exports)
        assert await report(client, "t", exports) == exports
        assert (await client.status()).exports == exports
    async with serving_on(tmp_path, "again") as local, aiohttp.ClientSession() as session:
        client = Client(session, local.url)
        await client.hello("u")
        assert await report(client, "u", None) == exports
        shutil.rmtree(local.paths.exports)
        local.paths.exports.touch()
        with pytest.raises(ErrorAnswer, match=r"500.*exports\.json"):
            await report(client, "u", exports)


async def test_status_does_not_wait_for_disk(serving_on, tmp_path):
    async with serving_on(tmp_path, exports_seconds=0.1) as local, aiohttp.ClientSession() as session:
        serving = Client(session, local.url)
        index = local.paths.exports / "exports.json"
        index.parent.mkdir(parents=True)
        index.write_text('{"failures": 3}')
        async with asyncio.timeout(120):
            while (exports := (await serving.status()).exports) is None:
                pass  # asks again until a tick has read the file
        assert exports.failures == 3
        index.unlink()
        os.mkfifo(index)  # a reader waits in it until the writer closes
        writer = -1
        async with asyncio.timeout(120):
            while writer < 0:
                try:
                    writer = os.open(index, os.O_WRONLY | os.O_NONBLOCK)
                except OSError:  # ENXIO: the server does not read yet
                    await asyncio.sleep(0.05)
        try:
            for _ in range(3):
                assert (await asyncio.wait_for(serving.status(), 120)).exports == exports
        finally:
            index.unlink()
            os.close(writer)
