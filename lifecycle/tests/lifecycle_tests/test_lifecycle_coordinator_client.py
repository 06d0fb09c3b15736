from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from coordinator_statuses import status as status_of

from scalerl_api.spec import BudgetSpec
from scalerl_api.wire import WIRE_VERSION, Ack, Problem, Status, Stop
from scalerl_lifecycle.budget import Rates, eta_seconds
from scalerl_lifecycle.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnreachable


def status(**changes: Any) -> Status:
    return status_of([], **changes)


@asynccontextmanager
async def coordinator(answer: Any) -> AsyncIterator[tuple[str, list[web.Request]]]:
    requests: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        requests.append(request)
        return await answer() if callable(answer) else answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        yield f"http://127.0.0.1:{port}", requests
    finally:
        await runner.cleanup()


async def test_status_and_stop_carry_token_and_wire_version() -> None:
    sent = status(step=7)
    async with (
        coordinator(lambda: _ok(sent)) as (url, requests),
        aclosing(CoordinatorClient(url, "secret")) as client,
    ):
        assert await client.status() == sent
    assert requests[0].headers["authorization"] == "Bearer secret"
    assert requests[0].headers["x-scalerl-wire"] == str(WIRE_VERSION)
    async with (
        coordinator(lambda: _ok(Ack())) as (url, requests),
        aclosing(CoordinatorClient(url, "secret")) as client,
    ):
        await client.stop("enough")
    assert requests[0].path == "/v1/stop"
    assert msgspec.msgpack.decode(await requests[0].read(), type=Stop) == Stop(reason="enough")


async def _ok(body: Any) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    ("code", "body", "error", "words"),
    [
        (401, Problem(error="unauthorized", message="no"), CoordinatorRefused, "HTTP 401 unauthorized$"),
        (
            426,
            Problem(error="wire-version", message="no"),
            CoordinatorRefused,
            f"does not accept wire version {WIRE_VERSION}",
        ),
        (503, Problem(error="not-ready", message="wait"), CoordinatorUnreachable, "HTTP 503 not-ready$"),
        (403, Problem(error="unknown", message="no"), CoordinatorRefused, "HTTP 403$"),
        (500, {"other": 1}, CoordinatorUnreachable, "HTTP 500$"),
        (200, {"garbage": True}, CoordinatorUnreachable, "not a Status"),
    ],
)
async def test_bad_answers(code: int, body: Any, error: type[Exception], words: str) -> None:
    async def answer() -> web.Response:
        return web.Response(status=code, body=msgspec.msgpack.encode(body))

    async with coordinator(answer) as (url, _), aclosing(CoordinatorClient(url, "t")) as client:
        with pytest.raises(error, match=words):
            await client.status()


async def test_no_answer_and_a_slow_answer_are_unreachable() -> None:
    async def slow() -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    async with (
        coordinator(slow) as (url, _),
        aclosing(CoordinatorClient(url, "t", timeout_seconds=0.2)) as client,
    ):
        with pytest.raises(CoordinatorUnreachable):
            await client.status()
    async with aclosing(CoordinatorClient(url, "t")) as client:
        with pytest.raises(CoordinatorUnreachable):
            await client.status()


@pytest.mark.parametrize(
    ("budget", "rate", "expected"),
    [
        ({"max_compute_tokens": 1000}, 10.0, 60.0),
        ({"max_compute_tokens": 1000}, None, None),
        ({"max_compute_tokens": 1000, "max_seconds": 20}, None, None),
        ({"max_compute_tokens": 1000, "max_seconds": 20}, 10.0, 12.0),
        ({"max_compute_tokens": 300}, 10.0, 0.0),
    ],
)
def test_eta_of_compute(budget: dict[str, Any], rate: float | None, expected: float | None) -> None:
    now = status(step=1, wall_seconds=8.0, compute_tokens=400.0)
    rates = Rates(compute_tokens_per_second=rate)
    assert eta_seconds(BudgetSpec.model_validate(budget), now, rates) == expected


@pytest.mark.parametrize(
    ("budget", "step", "per_step", "wall", "devices", "expected"),
    [
        ({"max_steps": 10}, 4, 2.0, 8.0, 2, 12.0),
        ({"max_steps": 10}, 0, None, 8.0, 2, None),
        ({"max_steps": 10, "max_seconds": 9}, 4, 2.0, 8.0, 2, 1.0),
        ({"max_seconds": 9}, 4, None, 10.0, 2, 0.0),
        ({"max_device_hours": "1"}, 4, None, 600.0, 2, 1200.0),
        ({"max_device_hours": "1"}, 0, None, 0.0, 0, None),
    ],
)
def test_eta(
    budget: dict[str, Any],
    step: int,
    per_step: float | None,
    wall: float,
    devices: int,
    expected: float | None,
) -> None:
    now = status(step=step, wall_seconds=wall, device_seconds=wall * devices)
    rates = Rates(seconds_per_step=per_step)
    assert eta_seconds(BudgetSpec.model_validate(budget), now, rates) == expected
