"""The actor as a process, with a coordinator, a trainer and a server that can all fail."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import stand_in_vllm
from actor_stand_ins import (
    END,
    CoordinatorStandIn,
    Generator,
    GeneratorProcesses,
    TrainerSide,
    until,
    write_run,
)

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_api.wire import (
    MASKED,
    WIRE_VERSION,
    Ack,
    Problem,
    PushReply,
    ReleaseCause,
    Split,
    WeightFiles,
    WeightReceive,
    WeightReceived,
)
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_tasks.grading.grading_pool import Graded, GradingPool
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sources import open_task
from scalerl_tasks.verdict import Verdict

PROMPTS = [f"say {i}" for i in range(12)]


@dataclass
class Scene:
    coordinator: CoordinatorStandIn
    generator: Generator
    trainer: TrainerSide
    session: aiohttp.ClientSession
    train: list[str]
    """Ids of the training prompts, by index."""
    held_out: list[str]

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.generator.control_url + path) as response:
            return response.status, await response.text()

    async def server(self, **failure: Any) -> dict[str, Any]:
        """Set how the fake server fails next, or read its state."""
        url = self.generator.server_url + "/stand-in"
        async with self.session.request("POST" if failure else "GET", url, json=failure or None) as response:
            return dict(await response.json())

    async def member(self, known: int = 0) -> None:
        """Wait until the actor has registered more than ``known`` times and is ready."""
        await until(lambda: self.coordinator._registered > known and self.coordinator.members)


@pytest.fixture
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    options: dict[str, Any] = dict(getattr(request, "param", {}))
    seconds_per_token = options.pop("seconds_per_token", 0.0)
    prompts = options.pop("prompts", PROMPTS)
    kind = GeneratorProcesses if options.pop("processes", False) else Generator
    coordinator = CoordinatorStandIn()
    write_run(tmp_path, prompts, **options)
    task = open_task(load_run(tmp_path / "run.yaml").spec.task)
    await coordinator.start()
    generator = kind(tmp_path, coordinator.url, seconds_per_token)
    await generator.start_server()
    await generator.start_actor()
    train = [task.train[i].id for i in range(len(task.train))]
    held_out = [task.held_out[i].id for i in range(len(task.held_out))]
    try:
        async with aiohttp.ClientSession() as session:
            trainer = TrainerSide(session, generator.control_url)
            yield Scene(coordinator, generator, trainer, session, train, held_out)
    finally:
        await generator.end()
        await coordinator.kill()


def decoded(data: bytes, dtype: str = "<i4") -> list[Any]:
    return np.frombuffer(data, dtype=dtype).tolist()


async def test_lease_to_push(scene: Scene) -> None:
    await scene.member()
    assert (await scene.get(endpoints.READY))[0] == 200  # ready for weights
    scene.coordinator.offer(20, scene.train)
    await asyncio.sleep(0.3)
    assert not scene.coordinator.requests, "leased without weights"

    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 20)

    group = scene.coordinator.groups["train-0"]
    assert (group.slot, group.prompt.index, group.prompt_id) == (0, 0, scene.train[0])
    prompt = decoded(group.prompt_token_ids)
    even, odd, *_ = group.completions
    assert decoded(even.token_ids) == [*prompt, END]
    assert decoded(odd.token_ids) == [*prompt[:1] * 3, END]
    assert decoded(even.logprobs, "<f4") == [-0.25] * len(decoded(even.token_ids))
    assert group.verdicts.scores == [1.0, 0.0, 1.0, 0.0], "graded with the end token in its text"
    assert [c.finish_reason for c in group.completions] == ["stop"] * 4
    assert (group.looped, group.verdicts.unanswered) == (0, [])
    assert [(span.version, span.start) for span in even.versions] == [(0, 0)]
    (salt,) = set((await scene.server())["salts"])
    assert salt.startswith("0."), "one installation of version 0"

    _, text = await scene.get(endpoints.METRICS)
    assert 'scalerl_actor_rollouts_total{split="train"} 80.0' in text
    assert 'scalerl_actor_groups_total{result="accepted"} 20.0' in text
    tokens = sum(c.tokens for g in scene.coordinator.groups.values() for c in g.completions)
    await until(lambda: scene.coordinator.beats[-1].generated_tokens == tokens)
    assert scene.coordinator.beats[-1].busy_seconds > 0

    scene.generator.terminate()
    assert await scene.generator.exit_code() == 0
    assert not scene.coordinator.beats[-1].healthy, "a member that leaves says so"


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.05}], indirect=True)
async def test_update_in_flight(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(4, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 4)
    await asyncio.sleep(0.1)
    await scene.trainer.publish(1)
    scene.coordinator.offer(1, scene.train, lease_id="later")
    await until(lambda: len(scene.coordinator.groups) == 5)

    first = scene.coordinator.groups.pop("later")
    assert {span.version for c in first.completions for span in c.versions} == {1}
    for group in scene.coordinator.groups.values():
        longest = max(group.completions, key=lambda c: c.tokens)
        assert [span.version for span in longest.versions] == [0, 1]
        assert longest.versions[0].start == 0
        assert 0 < longest.versions[1].start < longest.tokens
    salts = (await scene.server())["salts"]
    assert [salt.split(".")[0] for salt in salts] == ["0"] * 4 + ["1"]
    assert {r.weight_version for r in scene.coordinator.requests} == {0, 1}


async def test_truncated_completions_are_marked(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, scene.train, max_tokens=4)
    await until(lambda: scene.coordinator.groups)
    (group,) = scene.coordinator.groups.values()
    # "say 1" and its end token take more than four, three repetitions and the end token just four.
    assert [c.finish_reason for c in group.completions] == ["length", "stop"] * 2


async def test_republished_version_has_new_cache_salt(scene: Scene) -> None:
    await scene.member()
    for epoch, version in enumerate((0, 1, 0)):
        await scene.trainer.join(epoch)
        assert isinstance(await scene.trainer.receive(epoch, version), WeightReceived)
        scene.coordinator.offer(1, scene.train)
        await until(lambda n=epoch: len(scene.coordinator.groups) > n)
    first, _, again = (await scene.server())["salts"]
    assert first != again


async def test_slow_prompts_do_not_block_event_loop(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    encode, texts = PromptCodec.encode, PromptCodec.texts
    turns = 0
    meanwhile: list[int] = []

    def slow(function: Any) -> Any:
        def slowly(*given: Any) -> Any:
            """As slow as the event loop: until it has turned three times, or clearly stands still."""
            begun, deadline = turns, time.monotonic() + 30
            while turns < begun + 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            meanwhile.append(turns - begun)
            return function(*given)

        return slowly

    monkeypatch.setattr(PromptCodec, "encode", slow(encode))
    monkeypatch.setattr(PromptCodec, "texts", slow(texts))
    scene.coordinator.offer(1, scene.train)
    while not scene.coordinator.groups:
        await asyncio.sleep(0.01)
        turns += 1
    assert len(meanwhile) >= 2, "both were called"
    assert min(meanwhile) > 0, "actor and test share a loop: it stood still"


async def test_grading_errors_are_logged_once_per_kind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.member()
    seconds = itertools.count(1)

    async def fails(self: GradingPool, prompt: Prompt, texts: list[str], **_: Any) -> list[Graded]:
        slow = Graded(None, f"grading took longer than {next(seconds)} s and was killed")
        return [slow, Graded(Verdict(1.0)), slow, Graded(None, "the verifier gave 7, which is not in [0, 1]")]

    monkeypatch.setattr(GradingPool, "score_group", fails)
    await scene.trainer.publish(0)
    scene.coordinator.offer(3, scene.train)
    await until(lambda: len(scene.coordinator.groups) == 3)
    told = [r.getMessage() for r in caplog.records if "could not grade" in r.getMessage()]
    assert len(told) == 2
    assert "prompt " + scene.train[0] in told[0]
    assert "longer than 1 s" in told[0]
    assert "scalerl_actor_grading_errors_total 9.0" in (await scene.get(endpoints.METRICS))[1]


async def test_evaluation_goes_first(scene: Scene) -> None:
    await scene.member()
    scene.coordinator.offer(2, scene.train)
    scene.coordinator.offer(2, scene.held_out, Split.HELD_OUT, max_tokens=31)
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 4)
    requests = (await scene.server())["requests"]
    assert [r["max_tokens"] for r in requests] == [31, 31, 32, 32]
    assert sorted(g.split for g in scene.coordinator.groups.values()) == ["held_out"] * 2 + ["train"] * 2


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.2, "processes": True}], indirect=True)
async def test_server_killed_in_mid_generation(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(4, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 4)
    await asyncio.sleep(0.2)
    await scene.generator.kill_server()

    await until(lambda: not scene.coordinator.leased)  # released, not waited out
    assert not scene.coordinator.groups
    await until(lambda: not scene.coordinator.beats[-1].healthy)
    assert scene.coordinator.beats[-1].weight_version == -1
    assert (await scene.get(endpoints.READY))[0] == 503
    problem = await scene.trainer.join(1)
    assert isinstance(problem, Problem)
    assert problem.error == "not-ready"

    scene.generator.seconds_per_token = 0.0
    await scene.generator.start_server()
    await scene.member(known=1)
    await asyncio.sleep(0.3)
    assert not scene.coordinator.groups, "generated with weights nobody published"
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 4)


@pytest.mark.parametrize("max_tokens", [600, 1100], ids=["together", "one-by-one"])
@pytest.mark.parametrize(
    "scene",
    [{"seconds_per_token": 0.01, "prompts": [*PROMPTS, "f{"], "model__contextTokens": 2048}],
    indirect=True,
)
async def test_completions_continue_on_restarted_server(scene: Scene, max_tokens: int) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, max_tokens=max_tokens, policy_version=1)
    await until(lambda: len(scene.coordinator.groups) == 12)  # all but the long one
    await until(lambda: any(n > 400 for n in scene.coordinator.beats[-1].progress.values()))
    await scene.generator.kill_server()
    await until(lambda: not scene.coordinator.leased)

    scene.generator.seconds_per_token = 0.0
    await scene.generator.start_server()
    await scene.member(known=1)
    await scene.trainer.publish(1)
    await until(lambda: len(scene.coordinator.groups) == 13)
    long = max(scene.coordinator.groups.values(), key=lambda group: len(group.completions[0].token_ids))
    length = stand_in_vllm.counted_length(decoded(long.prompt_token_ids))
    asked = [r["max_tokens"] for r in (await scene.server())["requests"]]
    for completion, rest in zip(long.completions, asked, strict=True):
        assert decoded(completion.token_ids) == stand_in_vllm.counted(length)
        assert len(completion.logprobs) == len(completion.token_ids)
        assert [(span.version, span.start) for span in completion.versions] == [
            (0, 0),
            (1, max_tokens - rest),
        ]
        assert rest <= max_tokens - 65
    text = (await scene.get(endpoints.METRICS))[1]
    assert f"scalerl_actor_resumed_tokens_total {sum(max_tokens - rest for rest in asked)}.0" in text


@pytest.mark.parametrize(
    "scene",
    [{"seconds_per_token": 0.005, "prompts": [*PROMPTS, "f{"], "model__contextTokens": 2048}],
    indirect=True,
)
async def test_tokens_at_undetected_server_restart_are_dropped(scene: Scene) -> None:
    """Some in flight may be of the restarted server, whose weights nobody published."""
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, max_tokens=600)
    await until(lambda: len(scene.coordinator.groups) == 12)
    await until(lambda: any(n > 400 for n in scene.coordinator.beats[-1].progress.values()))
    await scene.generator.kill_server()
    await scene.generator.start_server()
    await scene.member(known=1)
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 13)
    assert "scalerl_actor_resumed_tokens_total 0.0" in (await scene.get(endpoints.METRICS))[1]


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.1}], indirect=True)
async def test_undetected_server_restart_drops_group(scene: Scene) -> None:
    """It answers every health check, but its tokens are of weights that were not published to it."""
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(2, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 2)
    await scene.generator.kill_server()
    await scene.generator.start_server()
    await scene.member(known=1)
    assert not scene.coordinator.groups
    await scene.trainer.publish(0)
    await until(lambda: len(scene.coordinator.groups) == 2)


async def test_server_killed_in_an_update(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.join(1)
    await scene.server(seconds=30.0)
    receiving = asyncio.create_task(scene.trainer.receive(1, 0))
    await asyncio.sleep(0.2)
    await scene.generator.kill_server()
    problem = await receiving
    assert isinstance(problem, Problem)
    assert problem.error == "update-failed"
    await until(lambda: not scene.coordinator.beats[-1].healthy)
    await scene.generator.start_server()
    await scene.member(known=1)
    await scene.trainer.publish(0)


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.5}], indirect=True)
async def test_lease_expiry_drops_group(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, scene.train, lease_id="short", remaining_seconds=0.8)
    await until(lambda: scene.coordinator.beats[-1].held_leases == ["short"])
    await until(lambda: scene.coordinator.beats[-1].held_leases == [])
    assert not scene.coordinator.pushes
    assert 'scalerl_actor_groups_total{result="expired"} 1.0' in (await scene.get(endpoints.METRICS))[1]


@pytest.mark.parametrize(
    "scene",
    [{"seconds_per_token": 0.03, "prompts": [*PROMPTS, "go|"], "model__contextTokens": 512}],
    indirect=True,
)
async def test_lease_continues_while_tokens_grow(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, remaining_seconds=4.0, max_tokens=200)
    await until(lambda: len(scene.coordinator.groups) == 13)
    longest = max(scene.coordinator.groups.values(), key=lambda g: g.generation_seconds)
    assert longest.generation_seconds > 4.5
    assert [c.tokens for c in longest.completions] == [200] * 4
    assert {c.finish_reason for c in longest.completions} == {"length"}
    told = [
        beat.progress[longest.lease_id]
        for beat in scene.coordinator.beats
        if longest.lease_id in beat.progress
    ]
    assert told == sorted(told)
    assert len(set(told)) > 2
    await until(lambda: not scene.coordinator.beats[-1].progress)


@pytest.mark.parametrize("scene", [{"generator__maxConcurrentSequences": 3}], indirect=True)
async def test_group_larger_than_the_server(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, scene.held_out, Split.HELD_OUT, lease_id="split", completions=8)
    scene.coordinator.offer(1, scene.held_out, Split.HELD_OUT, lease_id="greedy", temperature=0.0)
    await until(lambda: len(scene.coordinator.groups) == 2)
    assert len(scene.coordinator.groups["split"].completions) == 8
    requests = [(r["temperature"], r["n"]) for r in (await scene.server())["requests"]]
    assert sorted(requests) == [(0.0, 1)] * 4 + [(1.0, 2), (1.0, 3), (1.0, 3)]


async def test_coordinator_restarts_and_loses_an_answer(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(2, scene.train)
    await until(lambda: len(scene.coordinator.groups) == 2)
    await scene.coordinator.kill()
    await asyncio.sleep(0.5)
    assert scene.generator.running

    scene.coordinator.lose_push_answers = 1
    await scene.coordinator.start()
    await scene.member(known=1)
    scene.coordinator.offer(6, scene.train)
    await until(lambda: len(scene.coordinator.groups) == 8)
    await until(lambda: _duplicates(scene) > 0)
    assert scene.coordinator.beats[-1].weight_version == 0, "weights survive a coordinator"


def _duplicates(scene: Scene) -> int:
    pushed = [group.lease_id for push in scene.coordinator.pushes for group in push.groups]
    return len(pushed) - len(set(pushed))


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.05}], indirect=True)
async def test_finished_groups_survive_coordinator_restart(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(4, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 4)
    await scene.coordinator.kill()
    await asyncio.sleep(1.0)  # generated, graded, and nobody to give it to
    await scene.coordinator.start()
    await until(lambda: len(scene.coordinator.groups) == 4)


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.1}], indirect=True)
@pytest.mark.parametrize("how", ["partial", "whole"])
async def test_failed_update(scene: Scene, how: str) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(2, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 2)
    await scene.server(update=how)
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
        await scene.server(fetch="base-00000000: it is cut off, or no file with weights")
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


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.1}], indirect=True)
async def test_failed_update_abandons_leases_of_removed_member(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(2, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 2)
    await scene.server(update="partial")
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
    await asyncio.sleep(1.2)  # what it would have taken to finish
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
    assert "scalerl_actor_update_failures_total 1.0" in (await scene.get(endpoints.METRICS))[1]
    scene.coordinator.offer(1, scene.train)
    await scene.trainer.publish(1)
    await until(lambda: scene.coordinator.groups)
    await until(lambda: scene.coordinator.beats[-1].busy_seconds > 0)


async def test_one_update_at_a_time(scene: Scene) -> None:
    await scene.member()
    assert await scene.trainer.join(1) == Ack()
    await scene.server(seconds=3.0)
    slow = asyncio.create_task(scene.trainer.receive(1, 0))
    await asyncio.sleep(0.2)
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
    problem = await first  # not of its own limit of five seconds
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


@pytest.mark.parametrize("scene", [{"seconds_per_token": 0.5, "processes": True}], indirect=True)
async def test_sigterm_releases_leases(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(3, scene.train)
    await until(lambda: len(scene.coordinator.leased) == 3)
    scene.generator.terminate()
    assert await scene.generator.exit_code() == 0
    assert len(scene.coordinator.todo) == 3
    assert isinstance(scene.generator, GeneratorProcesses)
    assert "Traceback" not in scene.generator.log


async def test_stop_drains_and_exits(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(3, scene.train)
    scene.coordinator.stop = True
    assert await scene.generator.exit_code() == 0
    assert len(scene.coordinator.groups) == 3
    assert not scene.coordinator.leased


@pytest.mark.parametrize("scene", [{"prompts": [*PROMPTS[:5], "x" * 40]}], indirect=True)
async def test_prompt_too_long(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    both = [*scene.train, *scene.held_out]
    scene.coordinator.offer(len(scene.train), scene.train)
    scene.coordinator.offer(len(scene.held_out), scene.held_out, Split.HELD_OUT)
    assert len(both) == 6
    await until(lambda: len(scene.coordinator.groups) == 5)
    await until(lambda: scene.coordinator.releases)
    (release,) = scene.coordinator.releases
    assert release.cause is ReleaseCause.TOO_LONG
    assert "has 40 tokens; with 32 for the completion it exceeds model.contextTokens (64)" in release.reason
    assert scene.generator.running
    assert "scalerl_actor_skipped_prompts_total 1.0" in (await scene.get(endpoints.METRICS))[1]


@pytest.mark.parametrize("scene", [{"prompts": [*PROMPTS, "why?", "so!"]}], indirect=True)
async def test_failed_group_does_not_stop_others(scene: Scene) -> None:
    """One prompt that the server cannot serve, one with a clamped log-probability: the others arrive as always."""
    await scene.member()
    await scene.trainer.publish(0)
    both = [(scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)]
    for ids, split in both:
        scene.coordinator.offer(len(ids), ids, split)
    await until(lambda: len(scene.coordinator.groups) == 13)
    await until(lambda: scene.coordinator.releases)
    (release,) = scene.coordinator.releases
    assert release.cause is ReleaseCause.FAILED
    assert "the engine cannot serve this prompt" in release.reason
    assert len(release.lease_ids) == 1
    assert scene.generator.running
    clamped = [
        [(span.version, span.start) for span in group.completions[0].versions]
        for group in scene.coordinator.groups.values()
        if stand_in_vllm.CLAMPED in decoded(group.prompt_token_ids)
    ]
    assert clamped == [[(0, 0), (MASKED, 1), (0, 2)]]
    assert sum(group.unusable_tokens for group in scene.coordinator.groups.values()) == 4
    text = (await scene.get(endpoints.METRICS))[1]
    assert "scalerl_actor_failed_groups_total 1.0" in text
    assert "scalerl_actor_masked_tokens_total 4.0" in text


@pytest.mark.parametrize("scene", [{"prompts": [f"{i}?" for i in range(8)]}], indirect=True)
async def test_actor_exits_if_every_group_fails(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(20, scene.train)
    assert await scene.generator.exit_code() == 1
    assert "the engine cannot serve this prompt" in caplog.text
    assert len(scene.coordinator.given_up) >= 16


@pytest.mark.parametrize(
    "scene",
    [{"prompts": ["aaa", "bbb", *PROMPTS], "task__prompt": {"template": "{prompt}<think>"}}],
    indirect=True,
)
async def test_unclosed_thought_of_template_scores_0(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split)
    await until(lambda: len(scene.coordinator.groups) == 14)
    # The odd completions of "aaa" say "aaa", which would be right if it were an answer.
    assert {score for g in scene.coordinator.groups.values() for score in g.verdicts.scores} == {0.0}


def interrupted_run(**interruption: Any) -> dict[str, Any]:
    recipe = {"maxCompletionTokens": 300, "length": {"interruption": interruption}}
    return {
        "prompts": [*PROMPTS, "go|"],
        "task__prompt": {"template": "{prompt}<think>"},
        "model__contextTokens": 512,
        "recipe": {"promptsPerStep": 4, "completionsPerPrompt": 4, **recipe},
    }


@pytest.mark.parametrize("scene", [interrupted_run(maxTokens=200, phrase=" enough.</think>")], indirect=True)
async def test_long_thoughts_are_interrupted(scene: Scene) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    for ids, split in ((scene.train, Split.TRAIN), (scene.held_out, Split.HELD_OUT)):
        scene.coordinator.offer(len(ids), ids, split, max_tokens=300)
    await until(lambda: len(scene.coordinator.groups) == 13)
    interrupted = [
        [(span.version, span.start) for span in c.versions]
        for group in scene.coordinator.groups.values()
        if stand_in_vllm.ENDLESS in decoded(group.prompt_token_ids)
        for c in group.completions
    ]
    assert len(interrupted) == 4
    for (first, _), (forced, start), (last, end) in interrupted:
        assert (first, forced, last) == (0, MASKED, 0)
        assert 200 - 300 // 7 <= start <= 200
        assert end - start == len(" enough.</think>")
    text = (await scene.get(endpoints.METRICS))[1]
    assert "scalerl_actor_interrupted_rollouts_total 4.0" in text
    assert "scalerl_actor_masked_tokens_total 0.0" in text


@pytest.mark.parametrize("scene", [interrupted_run()], indirect=True)
async def test_phrase_of_unknown_tokens_is_refused_at_start(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The tests' tokenizer has no capital letters."""
    assert await scene.generator.exit_code() == 2
    assert "recipe.length.interruption.phrase 'Okay, time is up." in caplog.text
    assert "the tokenizer of the model cannot encode it" in caplog.text


async def test_wrong_prompt(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.member()
    await scene.trainer.publish(0)
    scene.coordinator.offer(1, ["of another source"])
    assert await scene.generator.exit_code() == 2
    assert "but 'of another source' at the coordinator" in caplog.text


async def test_bad_token_file(tmp_path: Path) -> None:
    write_run(tmp_path, PROMPTS)
    (tmp_path / "token").unlink()
    generator = GeneratorProcesses(tmp_path, "http://127.0.0.1:1")
    await generator.start_actor()
    assert await generator.exit_code() == 2
    assert "SCALERL_TOKEN_FILE" in generator.log
