"""The actor's HTTP API: weight updates for the trainer, and health probes and metrics without authentication.

Paths are those of :mod:`scalerl_api.endpoints`. Paths below ``/v1/`` require the run's token and the wire version.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from scalerl_api import endpoints
from scalerl_api.wire import (
    CONTENT_TYPE,
    WIRE_HEADER,
    WIRE_VERSION,
    GroupJoin,
    Probe,
    Problem,
    Struct,
    WeightReceive,
)
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.weights.weight_control import ControlProblem, WeightControl

_MAX_BODY_BYTES = 256 << 20

Message = TypeVar("Message", bound=Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def actor_app(
    control: WeightControl, metrics: ActorMetrics, token: str, is_ready: Callable[[], str | None]
) -> web.Application:
    """The actor's HTTP application.

    Args:
        token: the bearer token that ``/v1/`` requests need.
        is_ready: returns why the actor is not ready, or None if it is.
    """

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = is_ready()
        return (
            web.Response(text="ready\n") if reason is None else web.Response(status=503, text=reason + "\n")
        )

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application(middlewares=[_guard(token)], client_max_size=_MAX_BODY_BYTES)
    app.router.add_get(endpoints.HEALTH, health)
    app.router.add_get(endpoints.READY, ready)
    app.router.add_get(endpoints.METRICS, exposition)
    app.router.add_post(endpoints.WEIGHTS_JOIN, _handler(GroupJoin, control.join))
    app.router.add_post(endpoints.WEIGHTS_RECEIVE, _handler(WeightReceive, control.receive))
    app.router.add_post(endpoints.WEIGHTS_PROBE, _handler(Probe, control.probe))
    return app


def actor_runner(app: web.Application) -> web.AppRunner:
    """The aiohttp runner of ``app``. It does not decompress bodies, as aiohttp would do so before the token is checked."""
    return web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)


def _handler(kind: type[Message], answer: Callable[[Message], Awaitable[Struct]]) -> Handler:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    async def handle(request: web.Request) -> web.Response:
        try:
            message = decoder.decode(await request.read())
        except msgspec.DecodeError as error:
            raise ControlProblem(400, "malformed", f"not a {kind.__name__}: {error}") from error
        return _response(200, await answer(message))

    return handle


def _guard(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith("/v1/"):
            return await handler(request)
        try:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not secrets.compare_digest(given, expected):
                raise ControlProblem(401, "unauthorized", "the run's token is missing or wrong")
            version = request.headers.get(WIRE_HEADER, "none")
            if version != str(WIRE_VERSION):
                raise ControlProblem(
                    426,
                    "wire-version",
                    f"the request has wire version {version}, the actor {WIRE_VERSION}; update the older one",
                )
            encoding = request.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise ControlProblem(415, "encoded", f"send the body without the encoding {encoding!r}")
            return await handler(request)
        except ControlProblem as problem:
            return _response(problem.status, Problem(error=problem.error, message=str(problem)))

    return guard


def _response(status: int, body: Struct) -> web.Response:
    return web.Response(status=status, body=msgspec.msgpack.encode(body), content_type=CONTENT_TYPE)
