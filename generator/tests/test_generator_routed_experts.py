"""The experts of tokens, from the server's answers to the wire, over requests that break, continue and are forced on."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stand_in_vllm import COUNTED, counted
from test_generator_streams import LENGTH, PROMPT, Bench

from scalerl_api.wire import PartialGroup, RoutedExperts, Split
from scalerl_generator.rollouts.completion_streams import sample_plain
from scalerl_generator.rollouts.group_packing import routed_experts
from scalerl_generator.rollouts.partial_completion import PartialCompletion
from scalerl_generator.rollouts.partial_reports import read_partials
from scalerl_generator.server.server_options import ServerOptions, vllm_arguments
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import BadReply, RoutedRows, read_completions

LAYERS = 3


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.server.layers = LAYERS
    bench.client.routed_experts = True
    await bench.start()
    yield bench
    await bench.end()


def recorded(
    completion: PartialCompletion, prompt: list[int] = PROMPT
) -> tuple[list[tuple[int, int]], list[int]]:
    """The spans, and by which request each position's experts were reported; the experts are checked to be of their position."""
    routed = routed_experts(completion, len(prompt))
    assert routed is not None
    assert (routed.layers, routed.chosen) == (LAYERS, 2)
    table = np.frombuffer(routed.experts, "<u2").reshape(-1, LAYERS, 2)
    positions = [at for start, end in routed.spans for at in range(start, end)]
    assert (table[..., 0] == np.array(positions)[:, None]).all()
    return routed.spans, (table[:, 0, 1] - 1000).tolist()


@pytest.mark.parametrize("limit", [60, 2000], ids=["at once", "streamed"])
async def test_whole_answer_has_the_experts_of_all_but_the_last_token(bench: Bench, limit: int) -> None:
    streams = bench.streams(PROMPT, completions=1, max_tokens=limit)
    await sample_plain(streams)
    tokens = len(PROMPT) + min(limit, LENGTH)
    assert recorded(streams.completions[0]) == ([(0, tokens - 1)], [1] * (tokens - 1))
    assert bench.server.requests[0]["routed_experts_prompt_start"] == 0


async def test_tokens_of_a_broken_answer_have_no_record(bench: Bench) -> None:
    """193 tokens of the first request arrived; the second one computes the last of them, and what follows."""
    bench.server.breaks = [(200, "close")]
    streams = bench.streams(PROMPT, completions=1)
    await sample_plain(streams)
    start = len(PROMPT) + 193 - 1
    assert bench.server.requests[1]["routed_experts_prompt_start"] == start
    end = len(PROMPT) + LENGTH - 1
    assert recorded(streams.completions[0]) == ([(start, end)], [2] * (end - start))


async def test_forced_tokens_have_the_experts_of_the_request_that_read_them(bench: Bench) -> None:
    streams = bench.streams([*PROMPT[:2], COUNTED], completions=1)
    (completion,) = streams.completions
    await streams.extend([completion], 100)
    completion.force(np.array(counted(LENGTH)[100:110], np.int32))
    await streams.extend([completion], 2000)
    first = len(PROMPT) + 99
    assert [r["routed_experts_prompt_start"] for r in bench.server.requests] == [0, first]
    spans, requests = recorded(completion)
    assert spans == [(0, first), (first, len(PROMPT) + LENGTH - 1)]
    assert requests == [1] * first + [2] * (LENGTH - 100)


async def test_tokens_of_another_generator_have_no_record(bench: Bench) -> None:
    """Reports of unfinished completions have none. What is computed again here may be of other weights: it is not asked for."""
    lost = bench.streams(PROMPT, completions=1)
    await lost.extend(lost.completions, 100)
    report = PartialGroup(
        lease_id="l",
        prompt=lost.lease.prompt,
        slot=0,
        temperature=1.0,
        prompt_token_ids=b"",
        completions=[completion.unreported() for completion in lost.completions],
    )
    streams = bench.streams(PROMPT, completions=1)
    streams.completions = read_partials(
        report, streams.lease, streams.prompt, vocabulary_size=1 << 20, max_staleness_steps=1
    )
    await sample_plain(streams)
    start, end = len(PROMPT) + 99, len(PROMPT) + LENGTH - 1
    assert bench.server.requests[1]["routed_experts_prompt_start"] == start
    assert recorded(streams.completions[0]) == ([(start, end)], [2] * (end - start))


async def test_evaluations_and_other_runs_have_no_record(bench: Bench) -> None:
    streams = bench.streams(PROMPT, completions=1, split=Split.HELD_OUT)
    await sample_plain(streams)
    assert bench.server.requests[0]["routed_experts_prompt_start"] == len(PROMPT), "least of what is not used"
    assert routed_experts(streams.completions[0], len(PROMPT)) is None
    bench.client.routed_experts = False
    bench.server.layers = 0
    streams = bench.streams(PROMPT, completions=1)
    await sample_plain(streams)
    assert "routed_experts_prompt_start" not in bench.server.requests[1]
    assert routed_experts(streams.completions[0], len(PROMPT)) is None


@pytest.mark.parametrize("more", [-1, 1, None])
async def test_answers_without_the_experts_of_their_tokens_have_no_record(
    bench: Bench, more: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    experts = bench.server.experts
    bench.server.experts = lambda params, tokens: experts(params, tokens + (more or 0))  # type: ignore[method-assign]
    if more is None:
        bench.server.layers = 0
    for _ in range(2):
        streams = bench.streams(PROMPT, completions=1, max_tokens=60)
        await sample_plain(streams)
        assert streams.completions[0].tokens == 60
        assert routed_experts(streams.completions[0], len(PROMPT)) is None
    (said,) = [record.message for record in caplog.records if "routerReplay" in record.message]
    assert f"the experts of {0 if more is None else 62 + more} tokens, not of 62" in said


def test_truncated_completion_keeps_the_experts_of_what_is_left() -> None:
    completion = PartialCompletion()
    completion.force(np.arange(10, dtype=np.int32))
    completion.add_routed(RoutedRows(-2, np.arange(22, dtype=np.uint8).reshape(11, 1, 2)))
    completion.truncate(4)
    completion.finish_reason = "stop"
    assert routed_experts(completion, 2) == RoutedExperts(
        layers=1, chosen=2, spans=[(0, 5)], experts=bytes(range(10))
    )


def answer(array: Callable[[], NDArray[Any]] | str) -> bytes:
    if not isinstance(array, str):
        with io.BytesIO() as file:
            np.save(file, array(), allow_pickle=True)
            array = base64.b64encode(file.getvalue()).decode()
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "routed_experts": array}
    return json.dumps({"choices": [choice | {"logprobs": {"content": [{"logprob": -1.0}]}}]}).encode()


def test_answer_is_read_as_vllm_writes_it() -> None:
    given = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (sampled,) = read_completions(answer(lambda: given), 1)
    assert sampled.experts is not None
    np.testing.assert_array_equal(sampled.experts, given)


@pytest.mark.parametrize(
    "garbage",
    [
        "", "%", "AAAA", base64.b64encode(b"\x93NUMPY\x01\x00").decode(),
        lambda: np.zeros((2, 3), np.uint8), lambda: np.zeros((2, 3, 4), np.int32), lambda: np.array([{}]),
    ],
)  # fmt: skip
def test_garbage_for_experts_is_refused(garbage: Any) -> None:
    with pytest.raises(BadReply, match="routed_experts is "):
        read_completions(answer(garbage), 1)


def test_server_reports_experts_and_caches_prefixes_for_them() -> None:
    options = ServerOptions(model="m", port=1, max_model_len=64, routed_experts=True)
    arguments = vllm_arguments(options, on_cpu=False)
    assert {"--enable-return-routed-experts", "--enable-prefix-caching"} <= {*arguments}
    plain = vllm_arguments(ServerOptions(model="m", port=1), on_cpu=False)
    assert "--enable-return-routed-experts" not in plain


async def test_scores_of_a_sequence_ask_for_no_experts(bench: Bench) -> None:
    client: VllmClient = bench.client
    asked: list[dict[str, Any]] = []
    call = client.call

    async def keep(method: str, path: str, body: dict[str, Any] | None, *rest: Any) -> bytes:
        asked.append(body or {})
        return await call(method, path, body, *rest)

    client.call = keep  # type: ignore[method-assign]
    await client.prompt_logprobs([5, 6, 7])
    assert asked[0]["sampling_params"]["routed_experts_prompt_start"] == 3
