"""The sidecar's client, in the API's types, for whoever must not hang or believe garbage."""

from __future__ import annotations

import asyncio
import io
import random
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import msgspec

from scalerl_api import forecast as wire

MAX_ANSWER_BYTES = 4 * 1024 * 1024

Answer = TypeVar("Answer", bound=msgspec.Struct)


class SidecarError(Exception):
    """Base of what the client raises."""


class SidecarRefused(SidecarError):
    """The sidecar answered that it will not (4xx): asking again changes nothing. `code` says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status, self.code = status, code


class SidecarUnavailable(SidecarError):
    """No believable answer after all attempts: down, slow, busy, or answering garbage."""


class SidecarClient:
    """`async with SidecarClient(url) as sidecar: await sidecar.forecast(request)`.

    timeout_seconds: for one attempt. attempts: how many, in all. backoff_seconds: wait before the second,
    doubled before each further one, with jitter. An attempt that fails to connect, runs out of time, is
    answered 5xx or with anything that is not the answer's type is repeated; 4xx is not.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_seconds: float = 3.0,
        attempts: int = 3,
        backoff_seconds: float = 0.2,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts is {attempts}; make at least one")
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._attempts = attempts
        self._backoff_seconds = backoff_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def fit(self, request: wire.FitRequest) -> wire.FitAnswer:
        """Raises SidecarRefused or SidecarUnavailable."""
        return await self._ask(wire.FIT, request, wire.FitAnswer)

    async def forecast(self, request: wire.ForecastRequest) -> wire.ForecastAnswer:
        """Raises SidecarRefused or SidecarUnavailable."""
        return await self._ask(wire.FORECAST, request, wire.ForecastAnswer)

    async def _ask(self, path: str, request: msgspec.Struct, answer: type[Answer]) -> Answer:
        body = msgspec.json.encode(request)
        failure = ""
        for attempt in range(self._attempts):
            if attempt:
                pause = self._backoff_seconds * 2.0 ** (attempt - 1)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            try:
                return await self._once(path, body, answer)
            except (aiohttp.ClientError, TimeoutError, _Unbelievable) as error:
                failure = str(error) or type(error).__name__
        raise SidecarUnavailable(f"{self._url}{path}: {failure}, after {self._attempts} attempts")

    async def _once(self, path: str, body: bytes, answer: type[Answer]) -> Answer:
        if self._session is None:
            raise RuntimeError("use the client as `async with SidecarClient(...)`")
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url + path, data=io.BytesIO(body), headers=headers) as response:
            content = await _read_at_most(response, MAX_ANSWER_BYTES)
            status = response.status
        if 400 <= status < 500:
            raise SidecarRefused(status, *_refusal(content))
        if status != 200:
            raise _Unbelievable(f"answered {status}")
        try:
            return msgspec.json.decode(content, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Unbelievable(f"answered something else than {answer.__name__}: {error}") from error


class _Unbelievable(Exception):
    """An answer that may be better next time."""


async def _read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        content += chunk
        if len(content) > limit:
            raise _Unbelievable(f"answered with more than {limit} bytes")
    return bytes(content)


def _refusal(content: bytes) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(content, type=wire.ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "unknown", content[:200].decode("utf-8", "replace")
    return error.code, error.message
