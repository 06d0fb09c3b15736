"""The actor as a process: updates of weights, and those that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from actor_scene import Scene
from actor_stand_ins import TrainerSide, until

from scalerl_api import endpoints
from scalerl_api.wire import WIRE_VERSION, Ack, Problem, PushReply, WeightFiles, WeightReceive, WeightReceived
from scalerl_generator.weights.update_client import WeightUpdateClient


async def test_update_in_flight(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    await scene.server(hold=2)
    scene.coordinator.offer(4, scene.train)
    await scene.held(4 * 2)
    await scene.trainer.publish(1)
    await scene.server(hold=99)
    scene.coordinator.offer(1, scene.train, lease_id="later")
    await until(lambda: len(scene.coordinator.groups) == 5)

    first = scene.coordinator.groups.pop("later")
    assert {span.version for c in first.completions for span in c.versions} == {1}
    for group in scene.coordinator.groups.values():
        longest = max(group.completions, key=lambda c: c.tokens)
        assert [span.version for span in longest.versions] == [0, 1]
        assert longest.versions[0].start == 0
        assert longest.versions[1].start == 2 < longest.tokens
    salts = (await scene.server())["salts"]
    assert [salt.split(".")[0] for salt in salts] == ["0"] * 4 + ["1"]
    assert {r.weight_version for r in scene.coordinator.requests} == {0, 1}


async def test_republished_version_has_new_cache_salt(scene: Scene) -> None:
    await scene.member()
    for epoch, version in enumerate((0, 1, 0)):
        await scene.trainer.join(epoch)
        assert isinstance(await scene.trainer.receive(epoch, version), WeightReceived)
        scene.coordinator.offer(1, scene.train)
        await until(lambda n=epoch: len(scene.coordinator.groups) > n)
    first, _, again = (await scene.server())["salts"]
    assert first != again


async def test_server_killed_in_an_update(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.join(1)
    await scene.server(seconds=30.0)
    receiving = asyncio.create_task(scene.trainer.receive(1, 0))
    await scene.paused()
    await scene.generator.kill_server()
    problem = await receiving
    assert isinstance(problem, Problem)
    assert problem.error == "update-failed"
    await until(lambda: not scene.coordinator.beats[-1].healthy)
    await scene.generator.start_server()
    await scene.member(known=1)
    await scene.trainer.publish(0)


@pytest.mark.parametrize("how", ["partial", "whole"])
async def test_failed_update(scene: Scene, how: str) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    await scene.server(hold=2)
    scene.coordinator.offer(2, scene.train)
    await scene.held(2 * 2)
    await scene.server(update=how, hold=2)
    assert await scene.trainer.join(7) == Ack()
    problem = await scene.trainer.receive(7, 1)
    assert isinstance(problem, Problem)
    assert problem.error == "update-failed"
    await until(lambda: scene.coordinator.beats[-1].weight_version == (-1 if how == "partial" else 0))
    assert scene.coordinator.beats[-1].healthy, "an unhealthy member would not get weights again"
    assert (await scene.server())["running"] is (how == "whole")
    again = await scene.trainer.receive(7, 1)
    assert isinstance(again, Problem)
    assert again.error == "wrong-epoch", "the group was left"

    await scene.trainer.publish(1)  # the same version once more, over a new group
    await scene.server(hold=99)
    await until(lambda: len(scene.coordinator.groups) == 2)
    versions = {
        s.version for g in scene.coordinator.groups.values() for c in g.completions for s in c.versions
    }
    assert versions == {0, 1}


async def test_update_from_files(scene: Scene) -> None:
    """Without a group; one that cannot be read pauses nothing."""
    await scene.member()
    for version in (0, 1):
        files = WeightFiles(folder="0.1-a", base=version, versions=[version])
        await scene.server(fetch="base-00000000: it is cut off, of another format, or no file with weights")
        problem = await scene.trainer.receive(0, version, files=files)
        assert isinstance(problem, Problem)
        assert (problem.error, "it is cut off" in problem.message) == ("fetch-failed", True)
        assert (await scene.server())["running"]
        received = await scene.trainer.receive(0, version, files=files)
        assert isinstance(received, WeightReceived), received
        assert received.transfer_seconds == 0.5
        assert (await scene.server())["version"] == str(version)
        await until(lambda v=version: scene.coordinator.beats[-1].weight_version == v)


async def test_a_volume_that_is_slow_differs_from_one_that_hangs_and_one_that_denies(scene: Scene) -> None:
    await scene.member()
    files = WeightFiles(folder="0.1-a", base=0, versions=[0])
    for code, fetching in (("fetch-stalled", [7] * 100), ("fetch-continues", [7] + [8] * 100)):
        await scene.server(fetching=fetching)
        problem = await scene.trainer.receive(0, 0, timeout_seconds=0.5, files=files)
        assert isinstance(problem, Problem)
        assert problem.error == code
    await scene.server(fetch="s3://b/weights: 403 Forbidden", unreachable=True)
    problem = await scene.trainer.receive(0, 0, files=files)
    assert isinstance(problem, Problem)
    assert (problem.error, "403 Forbidden" in problem.message) == ("fetch-unreachable", True)
    assert isinstance(await scene.trainer.receive(0, 0, files=files), WeightReceived)


async def test_failed_update_abandons_leases_of_removed_member(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    await scene.server(hold=2)
    scene.coordinator.offer(2, scene.train)
    await scene.held(2 * 2)
    await scene.server(update="partial", hold=2)
    await scene.trainer.join(7)
    await scene.trainer.receive(7, 1)
    scene.coordinator.members.clear()
    scene.coordinator.leased.clear()
    await scene.member(known=1)
    await until(lambda: scene.coordinator.releases)
    assert len(scene.coordinator.releases[0].lease_ids) == 2, (
        "frozen work of a member that is gone is dropped"
    )
    await scene.trainer.publish(1)
    await scene.server(hold=99)
    await asyncio.sleep(1.0)  # more than it would take to finish
    assert not scene.coordinator.pushes


async def test_update_exception_ends_update(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    await scene.trainer.join(7)

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(WeightUpdateClient, "install", broken)
        message = WeightReceive(epoch=7, version=1, tensors=[], bucket_bytes=64, timeout_seconds=5.0)
        body = msgspec.msgpack.encode(message)
        url = scene.generator.control_url + endpoints.WEIGHTS_RECEIVE
        async with scene.session.post(url, data=body, headers=scene.trainer.headers) as response:
            assert response.status == 500
    await until(lambda: scene.coordinator.beats[-1].weight_version == -1)
    await scene.shows("scalerl_actor_update_failures_total 1.0")
    scene.coordinator.offer(1, scene.train)
    await scene.trainer.publish(1)
    await until(lambda: scene.coordinator.groups)
    await until(lambda: scene.coordinator.beats[-1].busy_seconds > 0)


async def test_one_update_at_a_time(scene: Scene) -> None:
    await scene.member()
    assert await scene.trainer.join(1) == Ack()
    await scene.server(seconds=3.0)
    slow = asyncio.create_task(scene.trainer.receive(1, 0))
    await scene.paused()
    refused = await scene.trainer.receive(1, 1, timeout_seconds=0.2)
    assert isinstance(refused, Problem)
    assert refused.error == "busy"
    waited = await scene.trainer.receive(1, 1, timeout_seconds=60.0)
    assert isinstance(await slow, WeightReceived)
    assert waited.version == 1


async def test_join_ends_an_unfinished_join(scene: Scene) -> None:
    """A trainer that restarted during a join does not wait for the end of that one."""
    await scene.member()
    await scene.server(opening=10_000)
    first = asyncio.create_task(scene.trainer.join(1))
    await asyncio.sleep(0.3)
    assert not first.done()
    assert await scene.trainer.join(2) == Ack()
    problem = await first  # not of its own limit of two minutes
    assert (problem.error, "another join" in problem.message) == ("join-failed", True)
    assert isinstance(await scene.trainer.receive(2, 0), WeightReceived)


async def test_weight_control_refuses_wrong_token(scene: Scene) -> None:
    await scene.member()
    stranger = TrainerSide(scene.session, scene.generator.control_url, token="wrong")
    assert (await stranger.join(1)).error == "unauthorized"
    raw = f"POST {endpoints.WEIGHTS_JOIN} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.generator.control_port)
    writer.write(raw.encode() + b"Authorization: Bearer \xff\r\n\r\n")
    assert b" 401 " in await reader.readline(), "a byte that is no text is a wrong token, not a bug"
    writer.close()
    await writer.wait_closed()
    scene.trainer.headers["x-scalerl-wire"] = "99"
    problem = await scene.trainer.join(1)
    assert (problem.error, "99" in problem.message) == ("wire-version", True)
    scene.trainer.headers["x-scalerl-wire"] = str(WIRE_VERSION)
    wrong = await scene.trainer.post(endpoints.WEIGHTS_JOIN, PushReply(results=[], reasons=[]), Ack)
    assert wrong.error == "malformed"
    scene.trainer.headers["Content-Encoding"] = "gzip"
    assert (await scene.trainer.join(1)).error == "encoded"
    assert (await scene.get(endpoints.HEALTH))[0] == 200
