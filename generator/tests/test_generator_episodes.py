"""Episodes of several turns: their tokens, masks and turns, and episodes that others continue."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import stand_in_vllm
from actor_stand_ins import (
    CHARACTERS,
    END,
    TOKEN,
    CoordinatorStandIn,
    Generator,
    TrainerSide,
    until,
    write_run,
    write_tokenizer,
)
from aiohttp import web
from test_generator_streams import Bench

from scalerl_api.load import load_run
from scalerl_api.spec import PromptSpec
from scalerl_api.wire import MASKED, MessageSpan, Partial, PartialGroup, VersionSpan
from scalerl_coordinator.group_checks import InvalidGroup, check_partials
from scalerl_coordinator.partials import PartialStore
from scalerl_generator.rollouts.completion_streams import CompletionStreams
from scalerl_generator.rollouts.episodes import EpisodeSampler
from scalerl_generator.rollouts.occupancy import MIN_OCCUPANCY, Occupancy
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.partial_reports import (
    KeptCompletions,
    UnusablePartials,
    _report,
    read_partials,
)
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt, PromptCodec
from scalerl_generator.server_state import BusyClock
from scalerl_generator.vllm_replies import Part
from scalerl_tasks import Graded, Prompt, Verdict
from scalerl_tasks.environments import gate
from scalerl_tasks.environments.gate import EnvironmentGate
from scalerl_tasks.environments.protocol import Message
from scalerl_tasks.sources import open_task

PROMPT_IDS = [5, 6, 7]
PROMPT = Prompt("p", "345", "")
MAX_TOKENS = 120
LETTERS = range(2, 2 + len(CHARACTERS))


def next_token(prefix: Sequence[int]) -> tuple[int, float]:
    """A language model: the next token and its log-probability, which depend on all tokens before it."""
    draw = random.Random(repr([int(token) for token in prefix]))
    return (END if draw.random() < 0.15 else draw.choice(LETTERS)), -draw.randrange(1, 64) / 64


class Reply(list[int]):
    logprobs: list[float]


class ModelServer(stand_in_vllm.Server):
    """Samples from :func:`next_token`."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params, prompt = body["sampling_params"], body["token_ids"]
        self.requests.append(params)
        reply = Reply()
        reply.logprobs = []
        while len(reply) < params["max_tokens"] and (not reply or reply[-1] != END):
            token, logprob = next_token([*prompt, *reply])
            reply.append(token)
            reply.logprobs.append(logprob)
        texts: list[list[int]] = [reply] * params["n"]
        if body.get("stream"):
            return await self.stream(request, texts, params)
        return web.json_response({"choices": self.choices(texts, params, await self.decode(0, len(reply)))})

    def choices(self, texts: list[Any], params: dict[str, Any], versions: list[str]) -> list[dict[str, Any]]:
        choices = super().choices(texts, params, versions)
        for choice, text in zip(choices, texts, strict=True):
            for entry, logprob in zip(choice["logprobs"]["content"], text.logprobs, strict=False):
                entry["logprob"] = logprob
        return choices


class Echo:
    """An environment: it repeats the end of the reply, and ends with the fourth, or with one that ends in a digit."""

    def __init__(self) -> None:
        self.steps_made = 0
        self.waits = 0.0

    async def steps(
        self,
        prompt: Prompt,
        episodes: Sequence[Sequence[str]],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None],
    ) -> list[Graded]:
        await asyncio.sleep(self.waits)
        for _ in episodes:
            on_graded()
        self.steps_made += len(episodes)
        return [self.step(replies) for replies in episodes]

    @staticmethod
    def step(replies: Sequence[str]) -> Graded:
        reward = Verdict(len("".join(replies)) % 8 / 8)
        if len(replies) == 4 or replies[-1][-1:].isdigit():
            return Graded(reward)
        message = Message(f"no, {len(replies)}: {replies[-1][-3:]}")
        return Graded(reward, messages=(message,), turn_reward=len(replies) / 8)


class Slow(Echo):
    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def steps(self, *given: Any, **named: Any) -> list[Graded]:
        self.asked.set()
        await asyncio.sleep(3600)
        return []


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.server = ModelServer(TOKEN, 0.0)
    await bench.start()
    yield bench
    await bench.end()


@pytest.fixture
def codec(tmp_path: Path) -> PromptCodec:
    write_tokenizer(tmp_path)
    return PromptCodec(tmp_path, PromptSpec(template="{prompt}="), context_tokens=4096)


def sampler(bench: Bench, codec: PromptCodec, environment: Any, **changes: Any) -> EpisodeSampler:
    made = EpisodeSampler(
        EnvironmentGate(environment, "e"), codec, 8, None, ThreadPoolExecutor(1), bench.metrics, BusyClock()
    )
    return replace(made, **changes)


def check_episode(completion: PartialCompletion, codec: PromptCodec, prompt_ids: Sequence[int]) -> None:
    """Every sampled token has the probability that the model gives it after all tokens before it; the others are masked."""
    ids = completion.token_ids.tolist()
    of_messages = {at for turn in completion.turns for at in range(turn.start, turn.end)}
    for at, (token, logprob) in enumerate(zip(ids, completion.logprobs.tolist(), strict=True)):
        expected = (token, 0.0) if at in of_messages else next_token([*prompt_ids, *ids[:at]])
        assert (token, logprob) == expected, at
    versions = {
        at
        for span, end in zip(
            completion.version_spans,
            [*(s.start for s in completion.version_spans[1:]), len(ids)],
            strict=True,
        )
        for at in range(span.start, end)
        if span.version == MASKED
    }
    assert versions == of_messages
    replies, start = [], 0
    for turn in completion.turns:
        assert ids[turn.start - 1] == END, "an environment answers complete replies"
        replies += codec.texts([completion.token_ids[start : turn.start]])
        (message,) = Echo.step(replies).messages
        assert ids[turn.start : turn.end] == codec.messages([message]).tolist()
        assert codec.tokenizer.texts([ids[turn.start : turn.end]]) == [message.content + "="]
        start = turn.end
    replies += codec.texts([completion.token_ids[start:]])
    assert completion.outcome == replace(Echo.step(replies), messages=(), turn_reward=0.0)


async def test_tokens_are_sampled_from_those_recorded(bench: Bench, codec: PromptCodec) -> None:
    turns, reasons = set(), set()
    for number in range(60):
        environment = Echo()
        ids = [*PROMPT_IDS, 2 + number % 40]
        streams = bench.streams(ids, 1, max_tokens=MAX_TOKENS)
        limit = None if number < 40 else 5
        await sampler(bench, codec, environment, max_tokens_per_turn=limit).sample(streams, PROMPT)
        (completion,) = streams.completions
        check_episode(completion, codec, ids)
        assert [turn.reward for turn in completion.turns] == [
            n / 8 for n in range(1, len(completion.turns) + 1)
        ]
        assert environment.steps_made == len(completion.turns) + 1
        turns.add(len(completion.turns) + 1)
        reasons.add(completion.finish_reason)
    assert turns == {1, 2, 3, 4}
    assert reasons == {"stop", "length"}


async def test_group_has_one_first_request_and_one_first_step(bench: Bench, codec: PromptCodec) -> None:
    class Once(Echo):
        calls = 0

        async def steps(self, *given: Any, **named: Any) -> list[Graded]:
            self.calls += 1
            return [replace(step, messages=()) for step in await super().steps(*given, **named)]

    environment, streams = Once(), bench.streams(PROMPT_IDS, 4, max_tokens=MAX_TOKENS)
    await sampler(bench, codec, environment).sample(streams, PROMPT)
    assert [request["n"] for request in bench.server.requests] == [4]
    assert environment.calls == 1


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 1}, 1), ({"max_turns": 2}, 2)])
async def test_turns_are_limited(bench: Bench, codec: PromptCodec, limits: Any, turns: int) -> None:
    class Endless(Echo):
        @staticmethod
        def step(replies: Sequence[str]) -> Graded:
            return Graded(Verdict(0.25), messages=(Message("go on"),))

    streams = bench.streams(PROMPT_IDS, 2, max_tokens=MAX_TOKENS)
    await sampler(bench, codec, Endless(), **limits).sample(streams, PROMPT)
    for completion in streams.completions:
        assert len(completion.turns) + 1 == turns
        assert completion.outcome == Graded(Verdict(0.25))


async def test_episode_ends_where_message_leaves_no_token(bench: Bench, codec: PromptCodec) -> None:
    class Talkative(Echo):
        @staticmethod
        def step(replies: Sequence[str]) -> Graded:
            return Graded(Verdict(0.5), messages=(Message("a" * 200),))

    streams = bench.streams(PROMPT_IDS, 1, max_tokens=MAX_TOKENS)
    await sampler(bench, codec, Talkative()).sample(streams, PROMPT)
    (completion,) = streams.completions
    assert (completion.turns, completion.outcome) == ([], Graded(Verdict(0.5)))


async def test_environment_that_fails_ends_its_episode(bench: Bench, codec: PromptCodec) -> None:
    class Failing(Echo):
        @staticmethod
        def step(replies: Sequence[str]) -> Graded:
            return Graded(None, "it raised") if len(replies) == 2 else Echo.step(replies[:1])

    streams = bench.streams([5, 6, 9], 1, max_tokens=MAX_TOKENS)
    await sampler(bench, codec, Failing()).sample(streams, PROMPT)
    (completion,) = streams.completions
    assert completion.outcome in (Graded(None, "it raised"), *(Graded(Verdict(n / 8)) for n in range(8)))


async def test_message_without_tokens_ends_its_episode_alone(bench: Bench, tmp_path: Path) -> None:
    class Silent(Echo):
        @staticmethod
        def step(replies: Sequence[str]) -> Graded:
            return Graded(Verdict(0.5), messages=(Message(""),))

    write_tokenizer(tmp_path)
    codec = PromptCodec(tmp_path, PromptSpec(), context_tokens=4096)
    streams = bench.streams(PROMPT_IDS, 1, max_tokens=MAX_TOKENS)
    await sampler(bench, codec, Silent()).sample(streams, PROMPT)
    (completion,) = streams.completions
    assert completion.turns == []
    assert "messages have no tokens" in ((completion.outcome and completion.outcome.error) or "")


async def test_each_step_and_each_reply_is_progress(bench: Bench, codec: PromptCodec) -> None:
    """Also of replies so short that they are not streamed."""
    inside, graded = [0], [0]

    class Watched(Echo):
        async def steps(self, *given: Any, **named: Any) -> list[Graded]:
            assert inside == [1]
            return await super().steps(*given, **named)

    @contextmanager
    def grading() -> Iterator[Callable[[], None]]:
        inside[0] += 1
        yield lambda: graded.__setitem__(0, graded[0] + 1)
        inside[0] -= 1

    environment, streams = Watched(), bench.streams(PROMPT_IDS, 1, max_tokens=MAX_TOKENS)
    await sampler(bench, codec, environment, max_tokens_per_turn=60).sample(streams, PROMPT, grading)
    (completion,) = streams.completions
    assert completion.turns
    assert graded == [environment.steps_made] == [len(completion.turns) + 1]
    assert bench.tokens == completion.tokens - sum(turn.end - turn.start for turn in completion.turns)


async def test_episode_that_waits_is_no_load_of_the_server(bench: Bench, codec: PromptCodec) -> None:
    busy, waiting = BusyClock(), 0

    class Waiting(Echo):
        async def steps(self, *given: Any, **named: Any) -> list[Graded]:
            nonlocal waiting
            waiting += 1
            assert busy.in_flight <= 4 - waiting
            made = await super().steps(*given, **named)
            assert busy.in_flight <= 4 - waiting
            waiting -= 1
            return made

    environment, streams = Waiting(), bench.streams(PROMPT_IDS, 4, max_tokens=MAX_TOKENS)
    environment.waits = 0.2
    started = time.monotonic()
    await sampler(bench, codec, environment, busy=busy).sample(streams, PROMPT)
    seconds, of = time.monotonic() - started, streams.completions
    steps = [len(one.turns) + 1 for one in of]
    assert [one.environment_seconds >= 0.2 * n for one, n in zip(of, steps, strict=True)] == [True] * 4
    assert busy.seconds > 0
    assert [one.sampling_seconds + one.environment_seconds <= seconds + 0.01 for one in of] == [True] * 4
    occupancy = Occupancy(smoothing=1.0)
    occupancy.observe([one.sampling_seconds for one in of], seconds)
    assert occupancy.fraction <= max(MIN_OCCUPANCY, 1 - (0.2 * sum(steps) / 4 - 0.01) / seconds)
    messages = sum(turn.end - turn.start for one in of for turn in one.turns)
    sides = {
        side: bench.metrics.registry.get_sample_value("scalerl_actor_episode_tokens_total", {"side": side})
        for side in ("model", "environment")
    }
    assert sides == {"model": streams.tokens - messages, "environment": messages}


async def test_successes_open_the_gate(bench: Bench, codec: PromptCodec) -> None:
    """Episodes that end with a verdict are noted one by one, also of a group whose other members wait at the gate."""

    class Failing(Echo):
        fails = True

        async def steps(
            self, prompt: Prompt, episodes: Sequence[Sequence[str]], **given: Any
        ) -> list[Graded]:
            if self.fails and prompt.text == "bad":
                return [Graded(None, "KeyError: 'db'")] * len(episodes)
            return await super().steps(prompt, episodes, **given)

    environment = Failing()
    made = sampler(bench, codec, environment, grader=EnvironmentGate(environment, "e", delays=(0.02, 0.02)))
    for count in range(gate.EPISODES // 4 - 1):
        streams = bench.streams([*PROMPT_IDS, 2 + count], 4, max_tokens=MAX_TOKENS)
        await made.sample(streams, Prompt("b", "bad", ""))
        assert {one.outcome for one in streams.completions} == {Graded(None, "KeyError: 'db'")}
    assert (made.grader.problem, made.grader._ended) == ("", 0), "a failure is no success"
    held = bench.streams(PROMPT_IDS, 4, max_tokens=MAX_TOKENS)
    waiting = asyncio.create_task(made.sample(held, Prompt("b", "bad", "")))
    await until(lambda: made.grader.problem)
    for count in range(gate.MAX_FAILURES // 4):
        assert made.grader.problem
        streams = bench.streams([*PROMPT_IDS, 2 + count], 4, max_tokens=MAX_TOKENS)
        await made.sample(streams, PROMPT)
        assert made.grader._ended == 4 * (count + 1), "an episode counts once, whatever its turns"
    assert made.grader.problem == ""
    await waiting
    assert made.grader._ended == gate.MAX_FAILURES


async def test_episodes_that_others_began_are_counted_once(bench: Bench, codec: PromptCodec) -> None:
    def counted() -> tuple[float, float, float]:
        value = bench.metrics.registry.get_sample_value
        return (
            value("scalerl_actor_episode_turns_total") or 0,
            value("scalerl_actor_episode_tokens_total", {"side": "model"}) or 0,
            value("scalerl_actor_episode_tokens_total", {"side": "environment"}) or 0,
        )

    def counts(one: PartialCompletion) -> tuple[int, int, int]:
        messages = sum(turn.end - turn.start for turn in one.turns)
        return len(one.turns) + 1, one.tokens - messages, messages

    tried = set()
    for letter in range(2, 12):
        ids = [*PROMPT_IDS, letter]
        whole = bench.streams(ids, 1, max_tokens=MAX_TOKENS)
        before = counted()
        await sampler(bench, codec, Echo()).sample(whole, PROMPT)
        (expected,) = whole.completions
        tried.add(len(expected.turns))
        once = tuple(now - then for now, then in zip(counted(), before, strict=True))
        assert once == counts(expected)
        for tokens in {1, *(turn.start for turn in expected.turns), *(turn.end for turn in expected.turns)}:
            streams, before = bench.streams(ids, 1, max_tokens=MAX_TOKENS), counted()
            streams.completions = handed_over(expected, tokens, whole)
            slow = Slow()
            task = asyncio.create_task(sampler(bench, codec, slow).sample(streams, PROMPT))
            await slow.asked.wait()
            task.cancel()  # this generator is drained, and the next one ends the episode
            await asyncio.wait([task])
            assert counted() == before
            await sampler(bench, codec, Echo()).sample(streams, PROMPT)
            assert tuple(now - then for now, then in zip(counted(), before, strict=True)) == once
    assert tried >= {0, 2, 3}


# --- others continue ------------------------------------------------------------------------------


async def test_episode_continues_from_any_token(bench: Bench, codec: PromptCodec) -> None:
    """Wherever the report of an actor ends, the next actor's episode is the same, over the coordinator's store."""
    tried = 0
    for letter in range(2, 12):
        ids = [*PROMPT_IDS, letter]
        whole = bench.streams(ids, 1, max_tokens=MAX_TOKENS)
        await sampler(bench, codec, Echo()).sample(whole, PROMPT)
        (expected,) = whole.completions
        for tokens in range(1, expected.tokens + 1):
            if any(turn.start < tokens < turn.end for turn in expected.turns):
                continue  # a message is appended at once
            begun = handed_over(expected, tokens, whole)
            assert [completion.tokens for completion in begun] == [tokens]
            streams, environment = bench.streams(ids, 1, max_tokens=MAX_TOKENS), Echo()
            streams.completions = begun
            await sampler(bench, codec, environment).sample(streams, PROMPT)
            (completion,) = streams.completions
            check_episode(completion, codec, ids)
            assert completion.token_ids.tolist() == expected.token_ids.tolist()
            assert (completion.turns, completion.outcome) == (expected.turns, expected.outcome)
            assert environment.steps_made <= len(expected.turns) + 1
            tried += 1
    assert tried > 100


def handed_over(
    expected: PartialCompletion, tokens: int, streams: CompletionStreams
) -> list[PartialCompletion]:
    """The first tokens of an episode, after two reports of one actor, as another reads them."""
    store, key = PartialStore(), (streams.lease.prompt.split, 0, -1)
    held = PartialCompletion()
    half = next((t.start for t in expected.turns if t.start < tokens // 2 < t.end), tokens // 2)
    reporting = CompletionStreams(
        *(None, None, None, None, streams.lease, streams.prompt),  # type: ignore[arg-type]
        stop_token_ids=[END],
        max_sequences=1,
        on_tokens=lambda _: None,
        completions=[held],
    )
    for end in (half, tokens):
        for at in range(held.tokens, end):
            masked = any(turn.start <= at < turn.end for turn in expected.turns)
            one = Part(expected.token_ids[at : at + 1], expected.logprobs[at : at + 1], np.zeros(1, np.bool_))
            held.append(one, MASKED if masked else 0)
        held.turns = [turn for turn in expected.turns if turn.end <= end]
        replied = end and expected.token_ids[end - 1] == END and not any(t.end == end for t in held.turns)
        held.finish_reason = "stop" if replied else "length" if end == MAX_TOKENS else None
        group = _report(reporting)
        check_partials(group, 1, MAX_TOKENS, 0)
        assert store.put(key, group) == "stored"
        held.reported = held.tokens
    taken = store.take(key, streams.lease, range(1), 1 << 20)
    assert taken is not None
    return read_partials(taken, streams.lease, streams.prompt, vocabulary_size=100, max_staleness_steps=2)


@pytest.mark.parametrize(
    "turns", [[(0, 2)], [(1, 1)], [(2, 1)], [(1, 4)], [(1, 2), (2, 3)], [(1, 3), (2, 3)], [(-1, 2)]]
)
def test_impossible_turns_are_refused(turns: list[tuple[int, int]]) -> None:
    lease = Bench().streams(PROMPT_IDS, 1).lease
    spans = [MessageSpan(*turn) for turn in turns]
    values = np.array([3, 3, 3], "<i4").tobytes(), np.zeros(3, "<f4").tobytes(), [VersionSpan(0, 0)]
    partial = Partial(start=0, token_ids=values[0], logprobs=values[1], versions=values[2], turns=spans)
    group = PartialGroup(
        lease_id="l",
        prompt=lease.prompt,
        slot=0,
        temperature=1.0,
        prompt_token_ids=b"",
        completions=[partial],
    )
    with pytest.raises(InvalidGroup, match="messages are not ascending inside its 3 tokens"):
        check_partials(group, 1, 10, 0)
    with pytest.raises(UnusablePartials):
        read_partials(group, lease, EncodedPrompt(PROMPT_IDS, b""), vocabulary_size=9, max_staleness_steps=2)


async def test_lost_server_and_weight_update_keep_episodes(bench: Bench, codec: PromptCodec) -> None:
    """The server breaks connections and gets new weights while episodes wait: no token is lost, none has too new a version."""
    environment = Echo()
    environment.waits = 0.01
    bench.server.seconds_per_token = 0.0005
    kept, done = KeptCompletions(max_sequences=64, max_staleness_steps=9), 0
    for letter in range(2, 8):
        ids, begun = [*PROMPT_IDS, letter], None
        while True:
            streams = bench.streams(ids, 4, max_tokens=MAX_TOKENS)
            streams.completions = begun or streams.completions
            task = asyncio.create_task(sampler(bench, codec, environment).sample(streams, PROMPT))
            made = streams.completions
            await until(lambda t=task, made=made: t.done() or any(c.tokens for c in made))
            if task.done() or begun is not None:
                await task
                break
            task.cancel()  # as if the server were lost
            await asyncio.wait([task])
            kept.put(streams.lease, streams.completions)
            bench.publish(bench.state.version + 1)
            begun = kept.take(streams.lease)
            assert begun is not None
        for completion in streams.completions:
            check_episode(completion, codec, ids)
            versions = [span.version for span in completion.weight_versions if span.version != MASKED]
            assert versions == sorted(versions)
            done += len(set(versions)) > 1
    assert done, "no episode has tokens of two versions"


# --- actors ---------------------------------------------------------------------------------------


async def test_another_actor_continues_episodes(tmp_path: Path) -> None:
    """The first actor is killed between two turns; the second replays the replies that it gets, and goes on."""
    said, turns, most = "no. try again.", 4, 1100
    environment = {"name": "retry", "maxTurns": turns, "parameters": {"wrong": said, "unanswered": said}}
    prompts = [f"say {i}}}" for i in range(8)]
    write_run(tmp_path, prompts, model__contextTokens=2048, task__environment=environment)
    train = open_task(load_run(tmp_path / "run.yaml").spec.task).train
    coordinator = CoordinatorStandIn()
    await coordinator.start()
    first = Generator(tmp_path, coordinator.url, seconds_per_token=0.01, name="generator-0")
    second = Generator(tmp_path, coordinator.url, name="generator-1")
    async with aiohttp.ClientSession() as session:

        async def start(generator: Generator, version: int) -> None:
            await generator.start_server()
            await generator.start_actor()
            await until(lambda: any(m.name == generator.name for m in coordinator.members.values()))
            await TrainerSide(session, generator.control_url).publish(version)

        try:
            await start(first, 0)
            coordinator.offer(1, [train[0].id], max_tokens=most, policy_version=1)
            await until(
                lambda: any(p.turns for r in coordinator.reports for g in r.groups for p in g.completions)
            )
            coordinator.members.clear()  # a killed process releases nothing
            await first.kill_actor()
            (store,) = coordinator.partials._groups.values()
            before = [(bytes(c.token_ids), c.turns) for c in store.completions]
            coordinator.reassign()
            await start(second, 1)
            await until(lambda: coordinator.groups)
        finally:
            await first.end()
            await second.end()
            await coordinator.kill()
    (group,) = coordinator.groups.values()
    message = [CHARACTERS.index(c) + 2 for c in said]
    assert group.verdicts.scores == [0.0] * 4
    assert group.verdicts.errors == {}
    for completion, (tokens, earlier) in zip(group.completions, before, strict=True):
        assert completion.token_ids.startswith(tokens)
        assert completion.turns[: len(earlier)] == earlier
        ids = np.frombuffer(completion.token_ids, "<i4").tolist()
        full = completion.finish_reason == "length" or len(ids) + len(message) >= most
        assert full or len(completion.turns) == turns - 1
        for turn in completion.turns:
            assert ids[turn.start : turn.end] == message
            assert ids[turn.start - 1] == END
        assert ids.count(END) == len(completion.turns) + (completion.finish_reason == "stop")
        masked = [span.start for span in completion.versions if span.version == MASKED]
        assert masked == [turn.start for turn in completion.turns]
