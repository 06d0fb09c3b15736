"""The aiohttp application: fit and forecast with limits; health, metrics and the OpenAPI document.

| limit | default | when exceeded |
|---|---|---|
| body | `MAX_BODY_BYTES` | 413 |
| encoding of the body | none | 415 |
| points, forecasts, draws | `MAX_POINTS`, … | 422 `request` |
| seconds to read a body | `read_seconds` | 503 `slow_body`, connection closed |
| requests computing or waiting | `queue` | 503 `busy` |
| seconds to wait and compute | `compute_seconds` | 503 `out_of_time` |

One thread, on one core, computes all answers, so that health and metrics stay responsive. The fit of each new earlier run is a
separate task of that thread, so that a request with 50 earlier runs does not delay other requests by 50 fits.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from scalerl_api import endpoints
from scalerl_api import forecast as wire

from ..errors import CurveError
from .forecast_answers import answer_fit, error_code, forecast_steps
from .metrics import Metrics
from .openapi import document

JSON = "application/json"
RETRY_AFTER_SECONDS = 1
LINGER_SECONDS = 1.0
"""Time to drain the unread rest of a request body after the response."""

RequestT = TypeVar("RequestT", wire.FitRequest, wire.ForecastRequest)
Steps = Callable[[RequestT], Iterator[msgspec.Struct | None]]
"""Function from a request to its steps: None after each step, then the answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one replica."""

    body_bytes: int = wire.MAX_BODY_BYTES
    """Size of a request body."""
    read_seconds: float = 5.0
    """Time to read a body."""
    compute_seconds: float = 5.0
    """Time to wait and compute."""
    queue: int = 64
    """Number of requests computing or waiting."""


class Rejected(Exception):
    """A request that is answered with an error: HTTP status, stable code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def runner(application: web.Application, shutdown_seconds: float = 5.0) -> web.AppRunner:
    """A runner for ``application`` that does not decompress bodies: aiohttp would inflate a few KB to gigabytes before
    the token and the limits are checked.
    """
    return web.AppRunner(
        application,
        access_log=None,
        shutdown_timeout=shutdown_seconds,
        auto_decompress=False,
        lingering_time=LINGER_SECONDS,
    )


class Sidecar:
    """The HTTP handlers and their shared state."""

    def __init__(self, limits: Limits | None = None, token: str | None = None) -> None:
        self._limits = limits or Limits()
        self._token = token
        self._metrics = Metrics()
        self._pending = 0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fit")
        self._openapi = msgspec.json.encode(document())

    def application(self) -> web.Application:
        """A new application; it shuts the worker thread down on clean-up."""
        application = web.Application(client_max_size=self._limits.body_bytes)
        application.add_routes(
            [
                web.post(wire.FIT, self._fit),
                web.post(wire.FORECAST, self._forecast),
                web.get(endpoints.HEALTH, self._health),
                web.get(endpoints.METRICS, self._metrics_text),
                web.get(wire.OPENAPI, self._openapi_text),
            ]
        )
        application.on_cleanup.append(self._close)
        return application

    def metrics_application(self) -> web.Application:
        """Health and metrics only, for a port that Prometheus can reach."""
        application = web.Application()
        application.add_routes(
            [web.get(endpoints.HEALTH, self._health), web.get(endpoints.METRICS, self._metrics_text)]
        )
        return application

    async def _close(self, _: web.Application) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"content-type": "text/plain; version=0.0.4"})

    async def _openapi_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type=JSON)

    async def _fit(self, request: web.Request) -> web.Response:
        return await self._answer(
            request, wire.FitRequest, lambda fit_request: iter([answer_fit(fit_request)])
        )

    async def _forecast(self, request: web.Request) -> web.Response:
        return await self._answer(request, wire.ForecastRequest, forecast_steps)

    async def _answer(
        self, request: web.Request, request_type: type[RequestT], answer: Steps[RequestT]
    ) -> web.Response:
        started = time.perf_counter()
        try:
            self._authorise(request)
            body = await self._read(request)
            encoded = await self._compute(body, request_type, answer)
            response = web.Response(body=encoded, content_type=JSON)
        except Rejected as refusal:
            self._metrics.refused.labels(refusal.code).inc()
            error = wire.ErrorAnswer(code=refusal.code, message=str(refusal))
            response = web.Response(status=refusal.status, body=msgspec.json.encode(error), content_type=JSON)
            if refusal.status == 503:
                response.headers["retry-after"] = str(RETRY_AFTER_SECONDS)
            if refusal.code == "slow_body":
                response.force_close()
        self._metrics.requests.labels(request.path, str(response.status)).inc()
        self._metrics.seconds.labels(request.path).observe(time.perf_counter() - started)
        return response

    def _authorise(self, request: web.Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Rejected(401, "token", "send the sidecar's token as a bearer token")

    async def _read(self, request: web.Request) -> bytes:
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise Rejected(
                415, "content_encoding", f"send the body as it is, without the encoding {encoding!r}"
            )
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise Rejected(413, "body_size", f"the body exceeds {self._limits.body_bytes} bytes") from error
        except TimeoutError as error:
            seconds = self._limits.read_seconds
            raise Rejected(503, "slow_body", f"the body did not arrive within {seconds:g} s") from error

    async def _compute(self, body: bytes, request_type: type[RequestT], answer: Steps[RequestT]) -> bytes:
        if self._pending >= self._limits.queue:
            raise Rejected(503, "busy", f"{self._pending} requests are in progress or queued")

        def work() -> Iterator[bytes | None]:
            message = msgspec.json.decode(body, type=request_type)
            self._metrics.points.observe(len(message.points.compute))
            for step in answer(message):
                yield None if step is None else msgspec.json.encode(step)

        steps, loop = work(), asyncio.get_running_loop()
        deadline = loop.time() + self._limits.compute_seconds
        try:
            while True:
                future = loop.run_in_executor(self._worker, next, steps)
                self._count(1)
                # Counted until it is done, even after the caller's timeout, since it still occupies the thread.
                future.add_done_callback(lambda _: self._count(-1))
                async with asyncio.timeout_at(deadline):
                    encoded = await asyncio.shield(future)
                if encoded is not None:
                    return encoded
        except TimeoutError as error:
            future.cancel()
            seconds = self._limits.compute_seconds
            raise Rejected(
                503, "out_of_time", f"no answer within {seconds:g} s; send fewer points"
            ) from error
        except msgspec.ValidationError as error:
            raise Rejected(400, "request_type", str(error)) from error
        except msgspec.DecodeError as error:
            raise Rejected(400, "json", f"{error}; NaN and Infinity are no JSON") from error
        except CurveError as error:
            raise Rejected(422, error_code(error), str(error)) from error

    def _count(self, change: int) -> None:
        self._pending += change
        self._metrics.pending.set(self._pending)
