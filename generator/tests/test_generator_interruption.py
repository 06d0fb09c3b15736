"""Forced interruption: where thoughts are ended, by which tokens, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from actor_stand_ins import CHARACTERS, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from stand_in_vllm import COUNTED, ENDLESS, counted
from test_generator_streams import LENGTH, PROMPT, Bench

from scalerl_api.spec import PromptSpec
from scalerl_api.wire import MASKED, Lease, PromptRef, Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.interruption import Interruption, ThoughtInterrupter
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_replies import Part

PHRASE = " time is up.</think>"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    await bench.end()


@pytest.fixture
def codec(tmp_path: Path) -> PromptCodec:
    write_tokenizer(tmp_path)
    return PromptCodec(tmp_path, PromptSpec(), context_tokens=4096)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in text]


PHRASE_IDS = ids(PHRASE)
INTERRUPTION = Interruption(150, 250, PHRASE_IDS)


def interrupter(bench: Bench, codec: PromptCodec) -> ThoughtInterrupter:
    async def texts(completions: list[NDArray[np.int32]]) -> list[str]:
        return codec.texts(completions)

    return ThoughtInterrupter(INTERRUPTION, 7, texts, bench.metrics)


@pytest.mark.parametrize("breaks", [0, 9])
async def test_open_thought_is_interrupted_once(bench: Bench, codec: PromptCodec, breaks: int) -> None:
    draw = random.Random(breaks)
    bench.server.breaks = [(draw.randrange(200), draw.choice(["close", "error"])) for _ in range(breaks)]
    strategy, streams = interrupter(bench, codec), bench.streams(PROMPT, in_thought=True)
    await strategy(streams)
    phrase = ids(PHRASE)
    for sample, completion in enumerate(streams.completions):
        start = strategy.position(streams.lease, sample)
        end = start + len(phrase)
        expected = counted(LENGTH)
        expected[start:end] = phrase
        assert completion.token_ids.tolist() == expected
        assert completion.logprobs[start:end].tolist() == [0.0] * len(phrase)
        assert completion.logprobs[:start].max() < 0
        assert completion.logprobs[end:].max() < 0
        assert [(s.version, s.start) for s in completion.version_spans] == [(0, 0), (MASKED, start), (0, end)]
        assert completion.finish_reason == "stop"
        # Each request has the rest of the budget, the phrase counted.
    assert bench.metric("interrupted_rollouts") == 4
    if not breaks:
        asked = sorted(r["max_tokens"] for r in bench.server.requests)
        positions = [strategy.position(streams.lease, sample) for sample in range(4)]
        assert asked == sorted(positions + [2000 - at - len(phrase) for at in positions])


async def test_completion_that_resumes_beyond_its_position_is_left_alone(
    bench: Bench, codec: PromptCodec
) -> None:
    strategy, streams = interrupter(bench, codec), bench.streams(PROMPT, in_thought=True)
    for sample, completion in enumerate(streams.completions):
        tokens = strategy.position(streams.lease, sample) + 5
        part = Part(
            np.full(tokens, 9, np.int32), np.full(tokens, -1.0, np.float32), np.zeros(tokens, np.bool_)
        )
        completion.append(part, 0)
    await strategy(streams)
    assert not any(c.has_forced for c in streams.completions)
    assert all(c.finish_reason for c in streams.completions)


async def test_interrupted_completion_is_cut_at_budget(bench: Bench, codec: PromptCodec) -> None:
    streams = bench.streams([3, ENDLESS], in_thought=True, max_tokens=300)
    await interrupter(bench, codec)(streams)
    assert [c.tokens for c in streams.completions] == [300] * 4
    assert {c.finish_reason for c in streams.completions} == {"length"}


async def test_closed_unopened_and_short_thoughts_are_left_alone(bench: Bench, codec: PromptCodec) -> None:
    closed = bench.streams([*ids("so</think>"), *[9] * 300], in_thought=True)  # echoes its prompt
    unopened = bench.streams(PROMPT)
    short = bench.streams([14, COUNTED], in_thought=True)
    for streams in (closed, unopened, short):
        await interrupter(bench, codec)(streams)
        for completion in streams.completions:
            assert not completion.has_forced
            assert MASKED not in {s.version for s in completion.weight_versions}
    assert unopened.completions[0].token_ids.tolist() == counted(LENGTH)
    assert short.completions[0].token_ids.tolist() == counted(140)
    assert bench.metric("interrupted_rollouts") == 0


async def test_thought_that_completion_opens_is_interrupted(bench: Bench, codec: PromptCodec) -> None:
    streams = bench.streams([*ids("well, <think>"), *[9] * 300])  # echoes its prompt
    await interrupter(bench, codec)(streams)
    assert all(c.has_forced for c in streams.completions)


# --- positions ------------------------------------------------------------------------------------


def at(interruption: Interruption, seed: int, slot: int, sample: int, split: Split = Split.TRAIN) -> int:
    async def texts(_: list[NDArray[np.int32]]) -> list[str]:
        raise NotImplementedError

    metrics = ActorMetrics(ServerState(), BusyClock())
    lease = Lease(
        lease_id="any",
        prompt=PromptRef(0, split, 0),
        slot=slot,
        prompt_id="p",
        completions=4,
        max_tokens=64,
        temperature=1.0,
        remaining_seconds=1.0,
        policy_version=0,
    )
    return ThoughtInterrupter(interruption, seed, texts, metrics).position(lease, sample)


@given(st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.integers(0, 1023), st.integers(0, 5000))
def test_position_is_in_range_and_reproducible(seed: int, slot: int, sample: int, width: int) -> None:
    interruption = Interruption(10_000, 10_000 + width, PHRASE_IDS)
    position = at(interruption, seed, slot, sample)
    assert 10_000 <= position <= 10_000 + width
    assert position == at(interruption, seed, slot, sample)


def test_positions_are_uniform() -> None:
    draws = Counter(
        at(Interruption(5, 14, PHRASE_IDS), 3, slot, sample) for slot in range(200) for sample in range(16)
    )
    expected = 200 * 16 / 10
    assert sorted(draws) == list(range(5, 15))
    # 99.9 % of chi-square with nine degrees of freedom.
    assert sum((draws[i] - expected) ** 2 / expected for i in range(5, 15)) < 27.9
    others = [
        at(Interruption(5, 10_000, PHRASE_IDS), *where)
        for where in ((3, 1, 2), (4, 1, 2), (3, 2, 2), (3, 1, 1))
    ]
    assert len({*others, at(Interruption(5, 10_000, PHRASE_IDS), 3, 1, 2, Split.HELD_OUT)}) == 5
