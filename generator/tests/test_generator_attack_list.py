"""An attacker without the run's token at the actor's and at vLLM's port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from aiohttp import web
from attack_list import PATHS, admitted

from scalerl_api import endpoints
from scalerl_generator.actor_api import actor_app, actor_runner
from scalerl_generator.server.require_token import RequireToken

OPEN_PATHS = ("/health", "/metrics")
TOKEN = "the run's token"
VLLM_PATHS = (
    *(
        "/inference/v1/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/docs",
    ),
    *("/collective_rpc", "/init_weight_transfer_engine", "/update_weights", "/start_weight_update"),
    *("/finish_weight_update", "/weight_info", "/pause", "/resume", "/openapi.json", "/version", "/load"),
    *(
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/health/x",
        "/metrics/x",
        "/healthz",
        "/ping",
        "/invocations",
    ),
)
"""What vLLM serves; the guard knows none of them."""


async def test_actor_answers_probes_only() -> None:
    calls: list[Any] = []

    async def control(message: Any) -> Any:
        calls.append(message)

    stand_in = SimpleNamespace(join=control, receive=control, probe=control)
    app = actor_app(cast(Any, stand_in), cast(Any, SimpleNamespace(text=lambda: b"")), TOKEN, lambda: None)
    runner = actor_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    served = {endpoints.WEIGHTS_JOIN, endpoints.WEIGHTS_RECEIVE, endpoints.WEIGHTS_PROBE}
    try:
        assert await admitted(f"http://{host}:{port}", TOKEN, of_server=served) == []
    finally:
        await runner.cleanup()
    assert calls == []


@asynccontextmanager
async def vllm() -> AsyncIterator[str]:
    """vLLM's guard in front of an application that answers 200 to everything, in vLLM's HTTP server."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        cast(Any, RequireToken(cast(Any, app), TOKEN)),
        host="127.0.0.1",
        port=0,
        lifespan="off",
        log_level="error",
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    for _ in range(12000):
        if server.started:
            break
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def test_vllm_answers_health_and_metrics_only() -> None:
    served = {*VLLM_PATHS, *PATHS} - set(OPEN_PATHS)
    async with vllm() as url:
        assert await admitted(url, TOKEN, of_server=served, open_paths=OPEN_PATHS) == []
