"""The completions of a group over requests that break at any token."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import stand_in_vllm
from actor_stand_ins import TOKEN, until
from free_port import free_port
from hypothesis import given
from hypothesis import strategies as st
from stand_in_vllm import COUNTED, ENDLESS, REFUSED, counted

from scalerl_api.wire import MASKED, Lease, PromptRef, Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import ServerMonitor
from scalerl_generator.rollouts.completion_streams import CompletionStreams, ServerLost, sample_plain
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.partial_reports import KeptCompletions
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import UNSTREAMED_TOKENS, VllmClient
from scalerl_generator.vllm_replies import UNVERSIONED, GenerationFailed, Part, ServerRefused, Span

LENGTH = 400
PROMPT = [LENGTH // 10, 7, COUNTED]


class Bench:
    """A fake server in this process, and what the actor knows of it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.server = stand_in_vllm.Server(TOKEN, 0.0)
        self.client = VllmClient(f"http://127.0.0.1:{self.port}", TOKEN)
        self.state = ServerState()
        self.metrics = ActorMetrics(self.state, BusyClock())
        self.monitor = ServerMonitor(self.client, self.state, self.metrics)
        self.tokens = 0

    async def start(self) -> None:
        self._runner = await stand_in_vllm.serve(self.port, TOKEN, 0.0, self.server)
        self.state.mark_up()
        self.publish(0)

    def publish(self, version: int) -> None:
        self.server.version = str(version)
        self.state.complete_update(version)

    async def end(self) -> None:
        await self.client.close()
        await self._runner.cleanup()

    def streams(self, prompt_ids: list[int], completions: int = 4, **changes: Any) -> CompletionStreams:
        lease = Lease(
            lease_id="l",
            prompt=PromptRef(0, changes.pop("split", Split.TRAIN), 0),
            slot=0,
            prompt_id="p",
            completions=completions,
            max_tokens=changes.pop("max_tokens", 2000),
            temperature=changes.pop("temperature", 1.0),
            remaining_seconds=120.0,
            policy_version=0,
        )
        prompt = EncodedPrompt(prompt_ids, b"", changes.pop("in_thought", False))
        options: dict[str, Any] = {"stop_token_ids": [stand_in_vllm.END], "max_sequences": 16}
        return CompletionStreams(
            *(self.client, self.monitor, self.state, self.metrics, lease, prompt),
            on_tokens=self.count,
            **options | changes,
        )

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"scalerl_actor_{name}_total") or 0.0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    await bench.end()


def check_counted(completion: PartialCompletion, length: int = LENGTH) -> None:
    """No token is lost or repeated, and all arrays are of one length."""
    assert completion.token_ids.tolist() == counted(length)
    assert len(completion.logprobs) == len(completion.masked) == length == completion.tokens
    assert [s.start for s in completion.weight_versions] == [
        0,
        *(s.end for s in completion.weight_versions[:-1]),
    ]
    assert completion.weight_versions[-1].end == length


@pytest.mark.parametrize("max_tokens", [2000, 450], ids=["one-by-one", "together"])
@pytest.mark.parametrize("seed", range(6))
async def test_broken_streams_lose_and_repeat_no_token(bench: Bench, seed: int, max_tokens: int) -> None:
    draw = random.Random(seed)
    bench.server.breaks = [(draw.randrange(LENGTH), draw.choice(["close", "error"])) for _ in range(9)]
    streams = bench.streams(PROMPT, max_tokens=max_tokens)
    await sample_plain(streams)
    for completion in streams.completions:
        check_counted(completion)
        assert completion.finish_reason == "stop"
        assert completion.weight_versions == (Span(0, 0, LENGTH),)
    assert bench.tokens == 4 * LENGTH, "no token is reported twice"
    # A request for the rest may end before it would have failed.
    requests = bench.server.requests
    assert [r["n"] for r in requests[:4]] == ([1] * 4 if max_tokens == 2000 else [4, 1, 1, 1])
    assert 0 < bench.metric("resubmitted_requests") <= 9


async def test_ended_completions_of_broken_answer_are_not_requested_again(bench: Bench) -> None:
    """Odd completions have four tokens, even ones echo the prompt: 101 tokens."""
    bench.server.breaks = [(70, "close")]
    streams = bench.streams([5] * 100, completions=4, max_tokens=128)
    await sample_plain(streams)
    assert [c.token_ids[:4].tolist() for c in streams.completions[1::2]] == [[5, 5, 5, stand_in_vllm.END]] * 2
    assert [r["n"] for r in bench.server.requests] == [4, 1, 1]
    assert [r["max_tokens"] for r in bench.server.requests] == [128, 63, 63]


async def test_only_broken_stream_is_requested_again(bench: Bench) -> None:
    bench.server.breaks = [(200, "close")]
    streams = bench.streams(PROMPT)
    await sample_plain(streams)
    for completion in streams.completions:
        check_counted(completion)
    # 1 + 64 + 64 + 64 tokens had arrived: the parts in full.
    assert [r["max_tokens"] for r in bench.server.requests] == [2000] * 4 + [2000 - 193]


async def test_versions_of_broken_stream_are_never_too_new(bench: Bench) -> None:
    """Weights change while it streams; where the answer breaks off, a token may only be called older than it is."""
    bench.server.seconds_per_token = 0.001
    truth: list[str] = []
    decode = bench.server.decode

    async def recorded(begin: int, end: int) -> list[str]:
        versions = []
        for at in range(begin, end):
            versions += await decode(at, at + 1)
        truth.extend(versions)
        return versions

    bench.server.decode = recorded  # type: ignore[method-assign]
    # After 257 of its tokens the first request fails, after 65 of the rest the second.
    bench.server.breaks = [(257, "close"), (65, "close")]
    streams = bench.streams(PROMPT, completions=1)
    sampling = asyncio.create_task(sample_plain(streams))
    for version in range(1, 8):
        await asyncio.sleep(0.04)
        bench.publish(version)
    await sampling
    (completion,) = streams.completions
    check_counted(completion)
    spans = completion.weight_versions
    named = np.repeat([s.version for s in spans], [s.end - s.start for s in spans])
    sampled_by = np.array([int(v) for v in truth])
    assert len(sampled_by) == LENGTH
    assert (named <= sampled_by).all()
    assert (named[322:] == sampled_by[322:]).all(), "the server names those of an answer that is complete"
    assert (np.diff(named) >= 0).all()
    assert named[-1] > 0


@pytest.mark.parametrize("split", list(Split))
async def test_parts_that_arrive_after_update_are_not_called_newer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, split: Split
) -> None:
    """All were sampled by version 0, but all after the first wait on their way through an update; then the stream breaks."""
    bench.server.breaks = [(257, "close")]
    stream = bench.client.stream

    async def late(prompt: list[int], *, on_part: Callable[[int, Part], None], **ask: Any) -> None:
        parts: list[tuple[int, Part]] = []
        try:
            await stream(prompt, on_part=lambda index, part: parts.append((index, part)), **ask)
        finally:
            for number, (index, part) in enumerate(parts):
                if number == 1 and bench.state.version == 0:
                    bench.publish(1)
                on_part(index, part)

    monkeypatch.setattr(bench.client, "stream", late)
    streams = bench.streams(PROMPT, completions=1, split=split)
    await sample_plain(streams)
    (completion,) = streams.completions
    check_counted(completion)
    # Which of them an update changed is not known, so an evaluation's are sampled again.
    boundary = 257 if split is Split.TRAIN else 1
    assert completion.weight_versions == (Span(0, 0, boundary), Span(1, boundary, LENGTH))
    assert bench.tokens == LENGTH + 257 - boundary


async def test_evaluation_keeps_parts_of_whole_answer_over_update(bench: Bench) -> None:
    bench.server.seconds_per_token = 0.001
    streams = bench.streams(PROMPT, completions=1, split=Split.HELD_OUT)
    sampling = asyncio.create_task(sample_plain(streams))
    await until(lambda: streams.completions[0].tokens)
    bench.publish(1)
    await sampling
    check_counted(streams.completions[0])
    assert [span.version for span in streams.completions[0].weight_versions] == [0, 1]
    assert len(bench.server.requests) == 1


async def test_short_completions_are_one_request(bench: Bench) -> None:
    streams = bench.streams([2, COUNTED], completions=16, max_tokens=UNSTREAMED_TOKENS)
    await sample_plain(streams)
    for completion in streams.completions:
        check_counted(completion, 20)
    assert [r["n"] for r in bench.server.requests] == [16]
    for changes in ({"max_sequences": 6}, {"temperature": 0.0}):
        bench.server.requests.clear()
        await sample_plain(bench.streams([2, COUNTED], completions=16, max_tokens=20, **changes))
        assert [r["n"] for r in bench.server.requests] in ([6, 6, 4], [1] * 16)


async def test_requests_without_progress_fail_group(bench: Bench) -> None:
    bench.server.breaks = [(0, "close"), (0, "error"), (100, "error"), (0, "close"), (0, "error")]
    streams = bench.streams(PROMPT, completions=1)
    await sample_plain(streams)  # two failures, progress, two failures
    check_counted(streams.completions[0])
    bench.server.breaks = [(0, "error")] * 3
    with pytest.raises(ServerRefused, match="the engine is ill"):
        await sample_plain(bench.streams(PROMPT, completions=1))
    with pytest.raises(ServerRefused, match="cannot serve this prompt"):
        await sample_plain(bench.streams([REFUSED], completions=1))


async def test_cut_completion_is_not_continued(bench: Bench) -> None:
    bench.server.breaks = [(150, "close")]
    streams = bench.streams([3, ENDLESS], completions=1, max_tokens=200)
    await sample_plain(streams)
    assert streams.completions[0].tokens == 200
    assert streams.completions[0].finish_reason == "length"


async def test_unnoticed_restart_is_found_before_next_request(bench: Bench) -> None:
    bench.server.breaks = [(150, "close")]
    bench.server.seconds_per_token = 0.002
    streams = bench.streams(PROMPT, completions=1)
    sampling = asyncio.create_task(sample_plain(streams))
    await until(lambda: streams.completions[0].tokens)
    bench.server.version = "default"  # as after a start
    with pytest.raises(ServerLost):
        await sampling
    assert not bench.state.up
    assert bench.state.unpublished_start == bench.state.start_count
    assert len(bench.server.requests) == 1


@pytest.mark.parametrize(("fails", "call"), [("health", 1), ("health", 3), ("weight_version", 1)])
async def test_new_start_during_check_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: str, call: int
) -> None:
    """The answer to a check of the server is of a start that was noticed meanwhile, and holds no weights yet."""
    start, calls = bench.state.start_count, itertools.count(1)

    async def restarted() -> Any:
        if next(calls) == call:
            bench.state.mark_down()
            bench.state.mark_up()
        return False if fails == "health" else UNVERSIONED

    monkeypatch.setattr(bench.client, fails, restarted)
    assert not await bench.monitor.check_same_server(start)
    assert bench.state.up
    assert not bench.state.unpublished_start
    assert not await bench.monitor.check_same_server(start), "the request's server is gone"


@pytest.mark.parametrize("max_tokens", [2000, 50])
async def test_tokens_of_unpublished_weights_lose_server(bench: Bench, max_tokens: int) -> None:
    bench.server.version = "default"
    with pytest.raises(ServerLost, match=r"weight versions \[-1\], which were not published"):
        await sample_plain(bench.streams(PROMPT, max_tokens=max_tokens))
    assert not bench.state.up
    assert bench.state.unpublished_start == bench.state.start_count


# --- kept over a restart ---------------------------------------------------------------------------


def lease(**changes: Any) -> Lease:
    prompt = PromptRef(0, changes.pop("split", Split.TRAIN), 0)
    fields: dict[str, Any] = {"prompt": prompt, "slot": 3, "prompt_id": "p", "policy_version": 5}
    return Lease(
        **fields
        | {"lease_id": "l", "completions": 1, "max_tokens": 64, "temperature": 1.0}
        | {"remaining_seconds": 1.0}
        | changes
    )


def sampled_by(*versions: int) -> list[PartialCompletion]:
    completion = PartialCompletion()
    for version in versions:
        completion.append(part(completion.tokens, 2), version)
    return [completion]


@pytest.mark.parametrize(
    ("changes", "versions", "found"),
    [
        ({"lease_id": "another"}, (4, 5), True),
        ({"policy_version": 7}, (5, MASKED, 5), True),
        ({"policy_version": 8}, (5, 7), False),  # too old a token
        ({"policy_version": 4}, (4, 5), True),  # training went back
        ({"policy_version": 6, "lost_version": 5}, (5, 6), True),  # there are two versions 5
        ({"slot": 4}, (5,), False),
        ({"prompt_id": "q"}, (5,), False),
        ({"max_tokens": 65}, (5,), False),
        ({"temperature": 0.5}, (5,), False),
        ({"split": Split.HELD_OUT}, (5,), False),
        ({"prompt": PromptRef(0, Split.TRAIN, 1)}, (5,), False),
        ({"prompt": PromptRef(1, Split.TRAIN, 0)}, (5,), False),
    ],
)
def test_kept_completions_are_of_same_work(
    changes: dict[str, Any], versions: tuple[int, ...], found: bool
) -> None:
    kept = KeptCompletions(max_sequences=8, max_staleness_steps=2)
    completions = sampled_by(*versions)
    kept.put(lease(), completions)
    assert (kept.take(lease(**changes)) is completions) == found
    if found:
        assert kept.take(lease(**changes)) is None, "they are taken once"


def test_kept_completions_of_evaluation_are_of_its_version() -> None:
    kept = KeptCompletions(max_sequences=8, max_staleness_steps=2)
    held_out = lease(split=Split.HELD_OUT)
    kept.put(held_out, sampled_by(5, 9))
    assert kept.take(lease(split=Split.HELD_OUT, policy_version=6)) is None
    assert kept.take(held_out) is not None


def test_kept_completions_of_evaluation_are_not_of_lost_lineage() -> None:
    """The trainer returned to a checkpoint and trained version 5 again."""
    kept = KeptCompletions(max_sequences=8, max_staleness_steps=2)
    kept.put(lease(split=Split.HELD_OUT), sampled_by(5))
    assert kept.take(lease(split=Split.HELD_OUT, lost_version=7)) is None


def test_kept_completions_are_bounded() -> None:
    kept = KeptCompletions(max_sequences=8, max_staleness_steps=2)
    for slot in range(20):
        kept.put(lease(slot=slot), sampled_by(5) * 2)
    assert [slot for slot in range(20) if kept.take(lease(slot=slot))] == [16, 17, 18, 19]


# --- assembly ------------------------------------------------------------------------------------


def part(start: int, length: int) -> Part:
    positions = np.arange(start, start + length, dtype=np.int32)
    return Part(positions, -positions.astype(np.float32), positions % 7 == 3)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 30), max_size=5),  # lengths of an answer's parts
            st.booleans(),  # whether it is complete
        ),
        max_size=6,
    )
)
def test_completion_is_its_parts_in_order(answers: list[tuple[list[int], bool]]) -> None:
    completion, versions = PartialCompletion(), []
    for version, (lengths, complete) in enumerate(answers):
        since = completion.tokens
        for length in lengths:
            completion.append(part(completion.tokens, length), 10 * version)
        tokens = sum(lengths)
        versions += [10 * version] * tokens
        if complete:
            spans = [Span(10 * version, 0, tokens // 2), Span(10 * version + 1, tokens // 2, tokens)]
            completion.settle(since, spans)
            versions[since + tokens // 2 :] = [10 * version + 1] * (tokens - tokens // 2)
    completion.finish_reason = "stop"
    assert completion.token_ids.tolist() == list(range(len(versions)))
    assert completion.logprobs.tolist() == [-float(i) for i in range(len(versions))]
    assert completion.masked.tolist() == [i % 7 == 3 for i in range(len(versions))]
    spans = completion.weight_versions
    assert [s.version for s in spans for _ in range(s.start, s.end)] == versions
    assert all(a.version != b.version and a.end == b.start for a, b in itertools.pairwise(spans))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 90))
def test_truncated_completion_continues(first: int, second: int, keep: int) -> None:
    completion = PartialCompletion()
    completion.append(part(0, first), 3)
    completion.append(part(first, second), 4)
    completion.truncate(keep)
    kept = min(keep, first + second)
    assert completion.tokens == kept
    completion.append(part(kept, 5), 5)
    assert completion.token_ids.tolist() == list(range(kept + 5))


def test_settle_refuses_versions_of_other_tokens() -> None:
    completion = PartialCompletion()
    completion.append(part(0, 4), 1)
    completion.append(part(4, 3), 2)
    for spans in ([], [Span(2, 0, 2)], [Span(2, 0, 4)]):
        with pytest.raises(GenerationFailed, match="lacks the weight versions"):
            completion.settle(4, spans)
    assert completion.weight_versions == (Span(1, 0, 4), Span(2, 4, 7))
