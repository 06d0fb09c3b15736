"""A fake vLLM server: the part of vLLM's HTTP API that the actor's client uses, with a fast start.

Run as ``python stand_in_vllm.py PORT TOKEN [SECONDS_PER_TOKEN]``. It is not a model: even completions echo
the prompt, odd ones say its first token three times, each ends with token 1. It does pause, resume, count
versions token by token, and can be killed. ``POST /stand-in`` sets how the next update fails.

Some prompts it cannot serve well, by a token in them: :data:`REFUSED` answers 500, :data:`CLAMPED` gives the second
token of every completion the log-probability that vLLM writes for one that is not finite, :data:`ENDLESS` never ends.
After :data:`COUNTED` a completion is its position's numbers (:func:`counted`), as long as the prompt's first token says
and the same from wherever a request continues it. After :data:`DRAWN` every token is the last with one probability.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import random
import sys
from typing import Any

import numpy as np
from aiohttp import web

END = 1
REFUSED = 50
"""Token of ``?`` in the tests' tokenizer."""
CLAMPED = 51
"""Token of ``!``."""
ENDLESS = 54
"""Token of ``|``: completions continue to ``max_tokens``."""

FETCHED = "/proc/1/fd/3"
"""Where a fetched version is mapped."""
COUNTED = 53
"""Token of ``{``."""

DRAWN = 55
"""Token of ``}``: lengths are geometric, of mean :data:`DRAWN_MEAN`."""
DRAWN_MEAN = 200


def counted(length: int) -> list[int]:
    """The completion of ``length`` tokens."""
    return [*(2 + i % 40 for i in range(length - 1)), END]


def counted_length(prompt: list[int]) -> int:
    """Tokens of the completion that :data:`COUNTED` in this prompt asks for."""
    return 10 * prompt[0]


def drawn() -> list[int]:
    """A completion; how many tokens it has already does not matter to how many follow."""
    return [*[2] * int(math.log(1 - random.random()) / math.log(1 - 1 / DRAWN_MEAN)), END]


class Server:
    def __init__(self, token: str, seconds_per_token: float) -> None:
        self.authorization = f"Bearer {token}"
        self.seconds_per_token = seconds_per_token
        self.running = asyncio.Event()
        self.running.set()
        self.version = "default"
        self.failure: dict[str, Any] = {}
        self.salts: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.report: dict[str, Any] = {"state": "whole"}
        self.group: dict[str, Any] | None = None
        self.join_problems: list[str | None] = []
        """The next answers of a join: it opens for a while."""
        self.fetches: list[dict[str, Any]] = []
        """The next answers of a fetch."""
        self.tokens = 0
        """Decoded so far, one for all completions of a request."""
        self.layers = 0
        """Of a mixture of experts whose choices are reported; 0 for none."""
        self.breaks: list[tuple[int, str]] = []
        """For the next streamed requests: after how many tokens each fails, and how (``close`` or ``error``)."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body["sampling_params"]
        self.salts.append(body.get("cache_salt"))
        prompt = body["token_ids"]
        if params.get("prompt_logprobs") is not None:
            rows = [None] + [{str(t): {"logprob": -0.5 * i}} for i, t in enumerate(prompt[1:], start=1)]
            choice = {"index": 0, "token_ids": [END], "finish_reason": "length"}
            return web.json_response({"choices": [choice], "prompt_logprobs": rows})
        params.setdefault("n", 1)
        self.requests.append(params)
        if not 0 <= params.get("routed_experts_prompt_start", 0) <= len(prompt):
            return refusal("routed_experts_prompt_start must be between 0 and the length of the prompt")
        params["prompt_tokens"] = len(prompt)
        if REFUSED in prompt:
            return refusal("the engine cannot serve this prompt")
        texts = [[*prompt, END] if i % 2 == 0 else [*prompt[:1] * 3, END] for i in range(params["n"])]
        if COUNTED in prompt:
            done = len(prompt) - prompt.index(COUNTED) - 1
            texts = [counted(counted_length(prompt))[done:] for _ in texts]
        if DRAWN in prompt:
            texts = [drawn() for _ in texts]
        if ENDLESS in prompt:
            texts = [prompt[:1] * params["max_tokens"] for _ in texts]
        if body.get("stream"):
            return await self.stream(request, texts, params)
        choices = self.choices(texts, params, await self.decode(0, max(len(t) for t in texts)))
        return web.json_response({"choices": choices})

    async def stream(
        self, request: web.Request, texts: list[list[int]], params: dict[str, Any]
    ) -> web.StreamResponse:
        """One event a completion for its first token, for every ``stream_interval``, and for its end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        longest = min(max(len(t) for t in texts), params["max_tokens"])
        versions, sent = [], 0
        fails, how = self.breaks.pop(0) if self.breaks else (longest, "")
        while sent < longest:
            end = min(longest, 1 if sent == 0 else sent + params["stream_interval"])
            versions += await self.decode(sent, min(end, fails))
            if fails < end:
                if how == "error":
                    await response.write(b'data: {"error": {"message": "the engine is ill"}}\n\n')
                elif request.transport is not None:
                    request.transport.close()
                return response
            for choice in self.choices(texts, params, versions):
                ids, content = choice["token_ids"][sent:end], choice["logprobs"]["content"][sent:end]
                if not ids:
                    continue
                last = end >= len(choice["token_ids"])
                part = {**choice, "token_ids": ids, "logprobs": {"content": content}}
                if not last:
                    part |= {"finish_reason": None, "weight_versions": None, "routed_experts": None}
                await response.write(b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n")
            sent = end
        await response.write(b"data: [DONE]\n\n")
        return response

    def choices(
        self, texts: list[list[int]], params: dict[str, Any], versions: list[str]
    ) -> list[dict[str, Any]]:
        prompt_clamped = any(CLAMPED in text for text in texts)
        choices = []
        for index, ids in enumerate(texts):
            cut = ids[: params["max_tokens"]]
            spans: list[dict[str, Any]] = []
            for i, version in enumerate(versions[: len(cut)]):
                if not spans or spans[-1]["version"] != version:
                    spans.append({"version": version, "start": i, "end": i + 1})
                spans[-1]["end"] = i + 1
            choices.append(
                {
                    "index": index,
                    "token_ids": cut,
                    "finish_reason": "stop" if cut[-1] == END else "length",
                    "logprobs": {
                        "content": [
                            {"logprob": -9999.0 if i == 1 and prompt_clamped else -0.25, "token_id": t}
                            for i, t in enumerate(cut)
                        ]
                    },
                    "weight_versions": spans,
                    "routed_experts": self.experts(params, len(cut)) if self.layers else None,
                }
            )
        return choices

    def experts(self, params: dict[str, Any], tokens: int) -> str:
        """Of the positions from the requested one to that of the last token but one; experts are position and request."""
        start = params.get("routed_experts_prompt_start", 0)
        rows = [
            [[at, 1000 + len(self.requests)]] * self.layers
            for at in range(start, params["prompt_tokens"] + tokens - 1)
        ]
        with io.BytesIO() as file:
            np.save(file, np.array(rows, np.uint16).reshape(-1, self.layers, 2))
            return base64.b64encode(file.getvalue()).decode()

    async def decode(self, begin: int, end: int) -> list[str]:
        """The versions of these tokens. With a ``hold`` among the failures, no request gets beyond so many."""
        versions: list[str] = []
        for at in range(begin, end):
            while at >= self.failure.get("hold", end):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await self.running.wait()
            versions.append(self.version)
            self.tokens += 1
            if self.seconds_per_token:
                await asyncio.sleep(self.seconds_per_token)
        return versions

    async def pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        self.running.clear()
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({})

    async def init(self, request: web.Request) -> web.Response:
        self.group = (await request.json())["init_info"]
        opening = self.failure.pop("opening", 1)
        problem = "the group did not form" if self.failure.pop("join", None) else ""
        self.join_problems = [*[None] * opening, problem]
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        assert not self.running.is_set(), "an update of a server that is not paused"
        info = (await request.json())["update_info"]
        if info.get("files"):
            assert info["path"] == FETCHED, "a version that was not fetched"
            self.report |= {"state": "whole", "error": ""}
            return web.json_response({})
        self.report["error"] = "" if self.group else "not in a process group"
        await asyncio.sleep(self.failure.pop("seconds", 0.0))
        if how := self.failure.pop("update", None):
            self.report |= {"state": how, "error": "the broadcast timed out"}
        elif self.group:
            self.report["state"] = "whole"
        return web.json_response({})

    async def finish(self, request: web.Request) -> web.Response:
        self.version = (await request.json()).get("weight_version", self.version)
        return web.json_response({})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        if call["method"] == "scalerl_join_problem":
            assert self.group is not None
            if call["args"] != [str(self.group["epoch"])]:
                return web.json_response({"results": ["left the group"]})
            return web.json_response({"results": [self.join_problems.pop(0)]})
        if call["method"] == "scalerl_fetch":
            problem = self.failure.pop("fetch", "")
            self.fetches = [{"bytes": n} for n in self.failure.pop("fetching", [])]
            done = {"problem": problem, "path": "" if problem else FETCHED, "seconds": 0.5}
            self.fetches += [{}, done | {"unreachable": self.failure.pop("unreachable", False)}]
            return web.json_response({"results": [None]})
        if call["method"] == "scalerl_fetched":
            assert self.running.is_set(), "a fetch pauses nothing"
            return web.json_response({"results": [self.fetches.pop(0)]})
        zeros = dict.fromkeys(("transfer_seconds", "verify_seconds", "load_seconds", "finish_seconds"), 0.0)
        report = {"version": None, "tensors": 1, "buckets": 1, "bytes": 8, **zeros, **self.report}
        return web.json_response({"results": [report]})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def fail(self, request: web.Request) -> web.Response:
        self.failure = await request.json()
        return web.json_response({})

    async def look(self, _: web.Request) -> web.Response:
        seen = {
            "salts": self.salts,
            "requests": self.requests,
            "running": self.running.is_set(),
            "version": self.version,
            "tokens": self.tokens,
        }
        return web.json_response(seen)


async def ok(_: web.Request) -> web.Response:
    return web.json_response({})


def refusal(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=500)


async def serve(
    port: int, token: str, seconds_per_token: float, server: Server | None = None
) -> web.AppRunner:
    server = server or Server(token, seconds_per_token)

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in ("/health", "/stand-in"):
            assert request.headers.get("Authorization") == server.authorization
        return await handler(request)

    app = web.Application(middlewares=[guard])
    app.router.add_get("/health", ok)
    app.router.add_post("/inference/v1/generate", server.generate)
    app.router.add_post("/pause", server.pause)
    app.router.add_post("/resume", server.resume)
    app.router.add_post("/init_weight_transfer_engine", server.init)
    app.router.add_post("/start_weight_update", ok)
    app.router.add_post("/update_weights", server.update)
    app.router.add_post("/finish_weight_update", server.finish)
    app.router.add_post("/collective_rpc", server.collective_rpc)
    app.router.add_get("/weight_info", server.weight_info)
    app.router.add_post("/stand-in", server.fail)
    app.router.add_get("/stand-in", server.look)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def forever(port: int, token: str, seconds_per_token: float) -> None:
    await serve(port, token, seconds_per_token)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(forever(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0))
