"""How the client reads a server's answers, against a small server on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from free_port import full_port

from scalerl_api.wire import TensorSpec, WeightReceive
from scalerl_generator.vllm_client import VllmClient, gather_all
from scalerl_generator.vllm_replies import (
    UNVERSIONED,
    BadReply,
    GenerationFailed,
    Part,
    Sampled,
    ServerDown,
    ServerRefused,
    Span,
    StreamedAnswer,
    VllmError,
)
from scalerl_generator.weights.update_client import WeightUpdateClient
from scalerl_generator.weights.update_reports import UpdateFailed

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[dict[str, Handler]], Awaitable[VllmClient]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []
    clients: list[VllmClient] = []

    async def start(routes: dict[str, Handler]) -> VllmClient:
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        port = runner.addresses[0][1]
        clients.append(VllmClient(f"http://127.0.0.1:{port}/", "secret"))
        return clients[-1]

    yield start
    for client in clients:
        await client.close()
    for runner in runners:
        await runner.cleanup()


def choice(index: int = 0, logprobs: tuple[float, ...] = (-0.5, -1.5), **changes: Any) -> dict[str, Any]:
    reply = {
        "index": index,
        "token_ids": [10 + index, 11],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 1, "logprob": p, "top_logprobs": []} for p in logprobs]},
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "3", "start": 1, "end": 2},
        ],
    }
    return reply | changes


def answer(*choices: dict[str, Any], **extra: Any) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return web.json_response({"choices": list(choices)} | extra)

    return handler


async def test_generate_returns_ordered_completions_with_versions(serve: Serve) -> None:
    client = await serve({"/inference/v1/generate": answer(choice(1), choice(0))})
    first, second = await client.generate([1, 2], n=2, max_tokens=2)
    assert first.token_ids.tolist() == [10, 11]
    assert second.token_ids.tolist() == [11, 11]
    assert first.token_ids.dtype == np.int32
    assert first.logprobs.dtype == np.float32
    assert first.logprobs.tolist() == [-0.5, -1.5]
    assert first.weight_versions == (Span(UNVERSIONED, 0, 1), Span(3, 1, 2))
    assert first.finish_reason == "stop"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (choice(finish_reason="abort"), "'abort'"),
        (choice(logprobs=(-0.5,)), "2 tokens, 1 log-probabilities"),
    ],
)
async def test_generate_refuses_untrainable_completions(
    serve: Serve, bad: dict[str, Any], message: str
) -> None:
    client = await serve({"/inference/v1/generate": answer(bad)})
    with pytest.raises(GenerationFailed, match=message):
        await client.generate([1, 2], n=1, max_tokens=2)


async def test_generate_refuses_missing_completions(serve: Serve) -> None:
    client = await serve({"/inference/v1/generate": answer(choice())})
    with pytest.raises(GenerationFailed, match="asked for 2"):
        await client.generate([1], n=2, max_tokens=2)


@pytest.mark.parametrize("bad", [-9999.0, None])
async def test_generate_masks_non_finite_log_probabilities(serve: Any, bad: float | None) -> None:
    client = await serve({"/inference/v1/generate": answer(choices=[choice(logprobs=(-0.5, bad))])})
    (sampled,) = await client.generate([5], n=1, max_tokens=2)
    assert sampled.logprobs.tolist() == [-0.5, 0.0]
    assert sampled.masked.tolist() == [False, True]


async def test_prompt_logprobs_are_of_given_tokens(serve: Serve) -> None:
    rows = [None, {"7": {"logprob": -2.0}}, {"4": {"logprob": -9.0}, "8": {"logprob": -0.25}}]
    client = await serve({"/inference/v1/generate": answer(prompt_logprobs=rows)})
    assert (await client.prompt_logprobs([5, 7, 8])).tolist() == [-2.0, -0.25]
    with pytest.raises(GenerationFailed, match="asked to score 2"):
        await client.prompt_logprobs([5, 7])


@pytest.mark.parametrize("bad", [-9999.0, None])
async def test_prompt_logprobs_of_broken_weights_are_no_numbers(serve: Serve, bad: float | None) -> None:
    """So that the trainer refuses the publish."""
    rows = [None, {"7": {"logprob": -2.0}}, {"8": {"logprob": bad}}]
    client = await serve({"/inference/v1/generate": answer(prompt_logprobs=rows)})
    scored = await client.prompt_logprobs([5, 7, 8])
    assert scored[0] == -2.0
    assert np.isnan(scored[1])


async def test_client_errors_are_typed(serve: Serve) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    client = await serve({"/inference/v1/generate": refuse, "/resume": hang, "/health": hang})
    with pytest.raises(ServerRefused, match="HTTP 400: too long") as refused:
        await client.generate([1], n=1, max_tokens=1)
    assert refused.value.status == 400
    assert not await client.health(timeout_seconds=0.05)
    with pytest.raises(ServerDown, match=r"no answer in 0\.05 s"):
        await client.call("POST", "/resume", {}, 0.05)
    absent = VllmClient("http://127.0.0.1:9", "secret")
    with pytest.raises(ServerDown):
        await absent.pause()
    await absent.close()


async def test_client_names_the_limit_that_passed(serve: Serve) -> None:
    """A server that accepts no connection is not one that has not answered for the limit of the answer."""
    with full_port() as port:
        unreachable = VllmClient(f"http://127.0.0.1:{port}", "secret", connect_seconds=0.2)
        with pytest.raises(ServerDown, match=r"generate: no connection in 0\.2 s$"):
            await unreachable.generate([1], n=1, max_tokens=1)
        with pytest.raises(ServerDown, match=r"generate: no connection in 0\.2 s$"):
            await unreachable.stream([1], n=1, max_tokens=1, on_part=lambda *_: None)
        await unreachable.close()

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(5)
        return response

    client = await serve({"/inference/v1/generate": silent})
    with pytest.raises(ServerDown, match=r"generate: no data for 0\.3 s$"):
        await client.stream([1], n=1, max_tokens=1, on_part=lambda *_: None, timeout_seconds=0.3)


async def test_client_refuses_malformed_answers(serve: Serve) -> None:
    """A caller that handles VllmError handles these too: no exception of msgspec escapes."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def nothing(request: web.Request) -> web.Response:
        return web.json_response({"results": []})

    client = await serve({"/inference/v1/generate": page, "/collective_rpc": nothing})
    with pytest.raises(BadReply, match="<html>"):
        await client.generate([1], n=1, max_tokens=1)
    with pytest.raises(BadReply, match="<html>"):
        await client.prompt_logprobs([1, 2])
    with pytest.raises(BadReply, match="no worker"):
        await WeightUpdateClient(client).publish_report()
    odd = choice(weight_versions=[{"version": "latest", "start": 0, "end": 2}])
    client = await serve({"/inference/v1/generate": answer(odd)})
    with pytest.raises(BadReply, match="'latest' is not a number"):
        await client.generate([1, 2], n=1, max_tokens=2)


async def test_gather_all_cancels_after_first_failure() -> None:
    ended: list[str] = []

    async def waits() -> int:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 1

    async def fails() -> int:
        await asyncio.sleep(0)
        raise ServerDown("gone") from OSError("cause")

    async def number(n: int) -> int:
        return n

    with pytest.raises(ServerDown) as failed:  # not a group of errors, and with its own cause
        await gather_all([waits(), fails(), waits()])
    assert isinstance(failed.value.__cause__, OSError)
    assert ended == ["cancelled"] * 2
    assert await gather_all(number(n) for n in (3, 1, 2)) == [3, 1, 2]


def test_client_raises_vllm_errors_only() -> None:
    kinds = (ServerDown, ServerRefused, BadReply, GenerationFailed, UpdateFailed)
    assert all(issubclass(kind, VllmError) for kind in kinds)


RECEIVE = WeightReceive(
    epoch=1, version=4, tensors=[TensorSpec("w", "float32", [2])], bucket_bytes=64, timeout_seconds=120
)


@pytest.mark.parametrize("state", ["whole", "partial"])
async def test_receive_resumes_only_complete_weights(serve: Serve, state: str) -> None:
    called: list[str] = []

    async def ok(request: web.Request) -> web.Response:
        called.append(request.path)
        return web.json_response({})

    async def fail(request: web.Request) -> web.Response:
        called.append(request.path)
        return web.json_response({"error": {"message": "peer lost"}}, status=500)

    async def report(request: web.Request) -> web.Response:
        zero = dict.fromkeys(("tensors", "buckets", "bytes"), 0)
        seconds = dict.fromkeys(("transfer_seconds", "verify_seconds", "load_seconds", "finish_seconds"), 0.0)
        return web.json_response({"results": [{"state": state, "version": 4} | zero | seconds]})

    client = await serve(
        {
            "/pause": ok,
            "/resume": ok,
            "/start_weight_update": ok,
            "/update_weights": fail,
            "/collective_rpc": report,
        }
    )
    with pytest.raises(UpdateFailed, match="peer lost") as failed:
        await WeightUpdateClient(client).install(RECEIVE)
    assert failed.value.partial == (state == "partial")
    expected = ["/pause", "/start_weight_update", "/update_weights"]
    assert called == expected + (["/resume"] if state == "whole" else [])


# --- answers that come in parts --------------------------------------------------------------------


def event(**part: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n"


SPANS = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 4}]


def in_parts(*, end: bytes = b"data: [DONE]\n\n", last: bool = True) -> bytes:
    def logprobs(*values: float) -> dict[str, Any]:
        return {"content": [{"logprob": value} for value in values]}

    parts = event(index=0, token_ids=[4], finish_reason=None, logprobs=logprobs(-0.5))
    parts += event(index=1, token_ids=[9], finish_reason=None, logprobs=logprobs(-0.5))
    parts += event(index=0, token_ids=[5, 6], finish_reason=None, logprobs=logprobs(-1.0, -9999.0))
    if last:
        ended = {"finish_reason": "stop", "weight_versions": SPANS}
        parts += event(index=0, token_ids=[7], logprobs=logprobs(-2.0), **ended)
    return parts + end


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_stream_is_joined_at_any_cut(size: int) -> None:
    whole, answer = in_parts(), StreamedAnswer("/path", 2)
    parts = [part for at in range(0, len(whole), size) for part in answer.feed(whole[at : at + size])]
    first = [part for index, part in parts if index == 0]
    assert [part.token_ids.tolist() for part in first] == [[4], [5, 6], [7]]
    assert [part.logprobs.tolist() for part in first] == [[-0.5], [-1.0, 0.0], [-2.0]]
    assert [part.masked.tolist() for part in first] == [[False], [False, True], [False]]
    last = first[-1]
    assert isinstance(last, Sampled)
    assert (last.finish_reason, last.weight_versions) == ("stop", (Span(2, 0, 1), Span(3, 1, 4)))
    assert [(index, part.token_ids.tolist()) for index, part in parts if index] == [(1, [9])]
    assert answer.unfinished == 1


async def test_stream_raises_on_broken_answer_after_its_parts(serve: Any) -> None:
    async def stream(request: web.Request) -> web.Response:
        assert (await request.json())["sampling_params"]["stream_interval"] == 64
        return web.Response(body=bodies.pop(0), content_type="text/event-stream")

    error = b'data: {"error": {"message": "the engine is dead", "code": 500}}\n\n'
    bodies = [in_parts(end=b"", last=False), in_parts(end=error, last=False), in_parts(end=b"")]
    client = await serve({"/inference/v1/generate": stream})
    tokens: list[int] = []

    def on_part(index: int, part: Part) -> None:
        if index == 0:
            tokens.extend(part.token_ids.tolist())

    ask: dict[str, Any] = {"n": 1, "max_tokens": 100, "on_part": on_part}
    with pytest.raises(ServerDown, match="response is incomplete"):
        await client.stream([5], **ask)
    assert tokens == [4, 5, 6]
    with pytest.raises(ServerRefused, match="the engine is dead"):
        await client.stream([5], **ask)
    # The last token has arrived: that the connection breaks behind it does not matter.
    await client.stream([5], **ask)
    assert tokens == [4, 5, 6, 4, 5, 6, 4, 5, 6, 7]
