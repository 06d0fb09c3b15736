"""Unfinished completions that other actors continue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np
import pytest
from actor_stand_ins import CoordinatorStandIn, Generator, TrainerSide, until, write_run
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_vllm import counted, counted_length

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_api.wire import MASKED, Lease, MessageSpan, Partial, PartialGroup, PromptRef, Split, VersionSpan
from scalerl_coordinator.partials import PartialStore
from scalerl_generator.rollouts import partial_reports
from scalerl_generator.rollouts.completion_streams import CompletionStreams
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.partial_reports import UnusablePartials, _report, read_partials
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.vllm_replies import Part, Span
from scalerl_tasks.sources import open_task

MAX_TOKENS = 1100
PROMPT = EncodedPrompt([5, 6], np.array([5, 6], "<i4").tobytes())
KEY = (Split.TRAIN, 0, -1)


def lease(number: int = 0, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "lease_id": f"l{number}",
        "prompt": PromptRef(0, changes.pop("split", Split.TRAIN), 0),
        "slot": 0,
        "prompt_id": "p",
        "completions": 1,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "remaining_seconds": 60.0,
        "policy_version": 5,
    }
    return Lease(**fields | changes)


def streams(of: Lease, completions: list[PartialCompletion] | None = None) -> CompletionStreams:
    nothing = cast(Any, None)
    return CompletionStreams(
        *(nothing, nothing, nothing, nothing, of, PROMPT),
        stop_token_ids=[1],
        max_sequences=1,
        on_tokens=lambda _: None,
        completions=completions,
    )


def logprobs_of(token_ids: Any) -> Any:
    """The log-probability that a token must keep."""
    return -np.asarray(token_ids, np.float32) / 64


def part(start: int, tokens: int) -> Part:
    ids = np.arange(start, start + tokens, dtype=np.int32) % 50
    return Part(ids, logprobs_of(ids), np.zeros(tokens, np.bool_))


def read(group: PartialGroup, of: Lease, k: int = 2) -> list[PartialCompletion]:
    return read_partials(group, of, PROMPT, vocabulary_size=50, max_staleness_steps=k)


def given_group(**changes: Any) -> PartialGroup:
    """Three tokens of versions 4 and 5, the second masked."""
    ids = np.array([7, 8, 9], "<i4")
    fields: dict[str, Any] = {
        "start": 0,
        "token_ids": ids.tobytes(),
        "logprobs": np.array([-1, 0, -3], "<f4").tobytes(),
        "versions": [VersionSpan(4, 0), VersionSpan(MASKED, 1), VersionSpan(5, 2)],
    }
    prompt = changes.pop("prompt", PROMPT.wire)
    number = changes.pop("number", 1)
    return PartialGroup(
        lease_id="l0",
        prompt=PromptRef(0, Split.TRAIN, 0),
        slot=0,
        temperature=1.0,
        prompt_token_ids=prompt,
        completions=[Partial(**fields | changes)] * number,
    )


def test_read_completions_are_those_given() -> None:
    (completion,) = read(given_group(), lease())
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.weight_versions == (Span(4, 0, 1), Span(MASKED, 1, 2), Span(5, 2, 3))
    assert (completion.tokens, completion.reported, completion.finish_reason) == (3, 3, None)
    completion.finish_reason = "stop"
    assert completion.logprobs.tolist() == [-1, 0, -3]
    (ended,) = read(given_group(finish_reason="stop"), lease())
    assert ended.finish_reason == "stop"
    (cut,) = read(given_group(finish_reason="length"), lease(max_tokens=3))
    assert cut.finish_reason == "length"
    (cut,) = read(given_group(finish_reason="length", turns=[MessageSpan(1, 2)]), lease())
    assert (cut.finish_reason, cut.turns) == ("length", [MessageSpan(1, 2)]), (
        "an episode, at the length of a turn"
    )
    # Training went back to a checkpoint, or a generator with older weights continues.
    (older,) = read(given_group(versions=[VersionSpan(5, 0), VersionSpan(4, 1)]), lease(policy_version=4))
    assert older.weight_versions == (Span(5, 0, 1), Span(4, 1, 3))
    (empty,) = read(given_group(token_ids=b"", logprobs=b"", versions=[]), lease())
    assert empty.tokens == 0


@pytest.mark.parametrize(
    ("changes", "of", "reason"),
    [
        ({"prompt": b"another."}, {}, "prompt"),
        ({"number": 2}, {}, "lengths"),
        ({"start": 1}, {}, "lengths"),
        ({"token_ids": b"abc"}, {}, "lengths"),
        ({"logprobs": b"abcd"}, {}, "lengths"),
        ({}, {"max_tokens": 2}, "lengths"),
        ({}, {"max_tokens": 3}, "lengths"),  # cut, and not said to be
        ({"token_ids": np.array([7, 50, 9], "<i4").tobytes()}, {}, "tokens"),
        ({"token_ids": np.array([7, -1, 9], "<i4").tobytes()}, {}, "tokens"),
        ({"logprobs": np.array([-1, np.nan, -3], "<f4").tobytes()}, {}, "logprobs"),
        ({"logprobs": np.array([-1, -np.inf, -3], "<f4").tobytes()}, {}, "logprobs"),
        ({"logprobs": np.array([-1, 0.1, -3], "<f4").tobytes()}, {}, "logprobs"),
        ({"versions": []}, {}, "versions"),
        ({"versions": [VersionSpan(4, 1)]}, {}, "versions"),
        ({"versions": [VersionSpan(4, 0), VersionSpan(5, 3)]}, {}, "versions"),
        ({"versions": [VersionSpan(-2, 0)]}, {}, "versions"),
        ({}, {"policy_version": 7}, "versions"),  # version 4 is too old
        ({}, {"lost_version": 4, "split": Split.HELD_OUT}, "versions"),
    ],
)
def test_unusable_completions_are_refused(changes: dict[str, Any], of: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusablePartials, match=reason):
        read(given_group(**changes), lease(**of))


EVENTS = ["tokens", "tokens", "tokens", "update", "answer", "fail", "report", "report", "kill", "release"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), max_size=60))
def test_completions_continue_over_kills_and_hand_overs(events: list[tuple[str, int]]) -> None:
    """One slot over actors that are killed or release it; every token knows what sampled it."""
    store, truth = PartialStore(), list[int]()
    number, version, at_request, since = 0, 0, 0, 0
    held = streams(lease(0, policy_version=0))
    (completion,) = held.completions
    reported: list[int] = []

    def report() -> None:
        sent = _report(held)
        assert store.put(KEY, sent) == "stored"
        completion.reported = sent.completions[0].start + sent.completions[0].tokens
        reported[:] = truth

    for event, size in events:
        match event:
            case "tokens":
                completion.append(part(completion.tokens, size), at_request)
                truth += [version] * size
            case "update":
                version += 1
            case "answer":
                sampled = truth[since:]
                completion.settle(since, [Span(v, i, i + 1) for i, v in enumerate(sampled)])
                since, at_request = completion.tokens, version
            case "fail":  # an answer whose versions are not those of its tokens
                completion.truncate(since)
                del truth[since:]
                at_request = version
            case "report":
                report()
            case "kill" | "release":
                if event == "release":
                    report()
                number += 1
                taken = lease(number, policy_version=version)
                group = store.take(KEY, taken, range(taken.policy_version + 1), 1 << 20)
                # Dropped if two holders in a row added nothing, or never reported.
                held = streams(taken, None if group is None else read(group, taken, k=99))
                (completion,) = held.completions
                if group is None:
                    reported.clear()
                truth[:] = reported
                assert completion.tokens == completion.reported == len(reported)
                since, at_request = completion.tokens, version
        named = [s.version for s in completion.weight_versions for _ in range(s.start, s.end)]
        assert completion.token_ids.tolist() == (np.arange(len(truth)) % 50).tolist()
        assert len(named) == len(truth)
        assert all(a <= b for a, b in zip(named, truth, strict=True)), "a token is called newer than it is"
        assert named == sorted(named)
    completion.finish_reason = "stop"
    sampled_whole = completion
    assert sampled_whole.logprobs.tolist() == logprobs_of(sampled_whole.token_ids).tolist()


# --- actors -----------------------------------------------------------------------------------------


class Scene:
    """A coordinator, and two generators that get work one after the other."""

    def __init__(self, directory: Path, session: aiohttp.ClientSession) -> None:
        prompts = [letter + "{" for letter in "fghijklm"]  # 270 tokens and more
        write_run(directory, prompts, model__contextTokens=2048)
        self.session = session
        self.coordinator = CoordinatorStandIn()
        self.first = Generator(directory, self.coordinator.url, seconds_per_token=0.01, name="generator-0")
        self.second = Generator(directory, self.coordinator.url, name="generator-1")
        train = open_task(load_run(directory / "run.yaml").spec.task).train
        self.prompt_id = train[0].id

    async def start(self, generator: Generator, version: int) -> None:
        await generator.start_server()
        await generator.start_actor()
        await until(lambda: any(m.name == generator.name for m in self.coordinator.members.values()))
        await TrainerSide(self.session, generator.control_url).publish(version)

    async def hold(self, tokens: int) -> None:
        """No request to the first generator's server gets beyond so many tokens."""
        async with self.session.post(self.first.server_url + "/stand-in", json={"hold": tokens}):
            pass

    def offer(self, max_tokens: int = MAX_TOKENS) -> None:
        changes = {"max_tokens": max_tokens, "policy_version": 1}
        self.coordinator.offer(1, [self.prompt_id], **changes)

    async def metrics(self, generator: Generator) -> str:
        async with self.session.get(generator.control_url + endpoints.METRICS) as response:
            return await response.text()

    async def asked(self, generator: Generator) -> list[int]:
        async with self.session.get(generator.server_url + "/stand-in") as response:
            return [request["max_tokens"] for request in (await response.json())["requests"]]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with aiohttp.ClientSession() as session:
        scene = Scene(tmp_path, session)
        await scene.coordinator.start()
        try:
            yield scene
        finally:
            await scene.first.end()
            await scene.second.end()
            await scene.coordinator.kill()


def decoded(data: bytes) -> list[int]:
    return [int(i) for i in np.frombuffer(data, "<i4")]


@pytest.mark.parametrize("end", ["killed", "terminated"])
async def test_another_actor_continues(scene: Scene, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if end == "terminated":
        monkeypatch.setattr(partial_reports, "REPORT_HEARTBEATS", 3600)
    await scene.start(scene.first, 0)
    await scene.hold(200)
    scene.offer()
    if end == "killed":
        await until(lambda: scene.coordinator.partials.nbytes >= 8 * 4 * 65)
        await scene.first.kill_actor()
    else:
        await until(lambda: any(n >= 4 * 65 for n in scene.coordinator.beats[-1].progress.values()))
        assert not scene.coordinator.reports
        scene.first.terminate()
        assert await scene.first.exit_code() == 0
        assert scene.coordinator.reports, "it reports with the release"
    saved = scene.coordinator.partials.nbytes // 8
    scene.coordinator.reassign()
    await scene.start(scene.second, 1)
    await until(lambda: scene.coordinator.groups)
    (group,) = scene.coordinator.groups.values()
    prompt = decoded(group.prompt_token_ids)
    asked = await scene.asked(scene.second)
    assert sum(MAX_TOKENS - rest for rest in asked) == saved
    for completion in group.completions:
        assert decoded(completion.token_ids) == counted(counted_length(prompt))
        assert np.frombuffer(completion.logprobs, "<f4").tolist() == [-0.25] * completion.tokens
        (first, second) = completion.versions
        assert (first, second.version) == (VersionSpan(0, 0), 1)
        assert MAX_TOKENS - second.start in asked
    text = await scene.metrics(scene.second)
    assert f"scalerl_actor_handed_over_tokens_total {saved}.0" in text
    assert "scalerl_actor_resumed_tokens_total 0.0" in text
    tokens = 4 * counted_length(prompt)
    assert f'scalerl_actor_tokens_total{{split="train"}} {tokens}.0' in text


async def test_reports_have_only_new_tokens(scene: Scene) -> None:
    await scene.start(scene.first, 0)
    scene.offer()
    await until(lambda: scene.coordinator.groups)
    reported = [p for r in scene.coordinator.reports for g in r.groups for p in g.completions]
    starts = [sum(p.start for p in g.completions) for r in scene.coordinator.reports for g in r.groups]
    assert len(starts) >= 2
    assert starts[0] == 0 < starts[-1]
    (group,) = scene.coordinator.groups.values()
    assert sum(p.tokens for p in reported) <= sum(c.tokens for c in group.completions)


async def test_coordinator_that_lost_tokens_gets_them_again(scene: Scene) -> None:
    await scene.start(scene.first, 0)
    await scene.hold(100)
    scene.offer()
    await until(lambda: scene.coordinator.partials.nbytes)
    scene.coordinator.partials, known = PartialStore(), len(scene.coordinator.reports)
    await scene.hold(200)
    await until(lambda: scene.coordinator.partials.nbytes)
    again = [report.groups[0].completions[0].start for report in scene.coordinator.reports[known:]]
    assert 0 in again


async def test_without_room_completions_are_seldom_reported(scene: Scene) -> None:
    scene.coordinator.partials = PartialStore(max_bytes=0)
    scene.first.seconds_per_token = 0.05  # with room more than ten reports
    await scene.start(scene.first, 0)
    scene.offer()
    await until(lambda: scene.coordinator.groups)
    assert 1 <= len(scene.coordinator.reports) <= 5
    refused = f"scalerl_actor_refused_partials_total {len(scene.coordinator.reports)}.0"
    assert refused in await scene.metrics(scene.first)


async def test_refused_reports_end_neither_actor_nor_release(scene: Scene) -> None:
    def refuse(*_: Any) -> bool:
        raise web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2)

    scene.coordinator.partials.put = refuse  # type: ignore[method-assign]
    await scene.start(scene.first, 0)
    await scene.hold(100)
    scene.offer()
    await until(lambda: scene.coordinator.reports)
    scene.first.terminate()
    assert await scene.first.exit_code() == 0
    assert len(scene.coordinator.reports) >= 2
    assert [len(release.lease_ids) for release in scene.coordinator.releases] == [1]


async def test_unusable_completions_are_counted_and_sampled_anew(scene: Scene) -> None:
    await scene.start(scene.first, 0)
    await scene.hold(100)
    scene.offer()
    await until(lambda: scene.coordinator.partials.nbytes)
    await scene.first.kill_actor()
    take = scene.coordinator.partials.take

    def spoiled(*arguments: Any) -> PartialGroup | None:
        group = take(*arguments)
        return group and msgspec.structs.replace(group, prompt_token_ids=b"another.")

    scene.coordinator.partials.take = spoiled  # type: ignore[method-assign]
    scene.coordinator.reassign()
    await scene.start(scene.second, 1)
    await until(lambda: scene.coordinator.groups)
    assert await scene.asked(scene.second) == [MAX_TOKENS] * 4
    (group,) = scene.coordinator.groups.values()
    assert all(c.versions == [VersionSpan(1, 0)] for c in group.completions)
    text = await scene.metrics(scene.second)
    assert 'scalerl_actor_dropped_partials_total{reason="prompt"} 1.0' in text


async def test_short_completions_are_not_reported(scene: Scene) -> None:
    await scene.start(scene.first, 0)
    scene.offer(1024)
    await until(lambda: scene.coordinator.groups)
    assert not scene.coordinator.reports


async def test_tokens_of_undetected_server_restart_are_not_handed_on(scene: Scene) -> None:
    await scene.start(scene.first, 0)
    await scene.hold(100)
    scene.offer()
    await until(lambda: scene.coordinator.partials.nbytes)
    await scene.first.kill_server()
    await scene.first.start_server()  # before the actor's next check: without published weights
    await until(lambda: not scene.coordinator.partials.nbytes)
    assert not scene.coordinator.groups
