"""The client of the curve-fit sidecar."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from scalerl_api.forecast import FORECAST, ErrorAnswer, ForecastAnswer, ForecastRequest

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
BOUND_SECONDS: Final = 60.0
"""Timeout of one request, with all its attempts."""
AT_ONCE: Final = 8
"""Concurrent requests: with those of a thousand runs at once, all would time out."""
NO_ANSWER: Final = "no forecast"
"""Start of the message where no attempt got a valid answer."""


class SidecarError(Exception):
    """No forecast; the message says why."""


class Sidecar:
    """Client of one sidecar, shared by any number of runs.

    A failed connection, a timeout, a 5xx and an invalid answer are retried; a 4xx is not.

    url: read for each request, since a restarted sidecar may have another.
    timeout_seconds: of one attempt.
    attempts: at most, in all.
    backoff_seconds: before the second attempt; doubled before each further one, with jitter.
    """

    def __init__(
        self,
        url: Callable[[], str],
        *,
        token: str | None = None,
        timeout_seconds: float = 5.0,
        attempts: int = 3,
        backoff_seconds: float = 0.5,
    ) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"}
        self._headers |= {"authorization": f"Bearer {token}"} if token else {}
        self._timeout_seconds = timeout_seconds
        self._attempts = attempts
        self._backoff_seconds = backoff_seconds
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def forecast(self, request: ForecastRequest) -> ForecastAnswer:
        """Raises SidecarError."""
        import aiohttp  # takes half a second, by which the first child of a local run would start later

        url, body, failure = self._url().rstrip("/") + FORECAST, msgspec.json.encode(request), ""
        timeout = aiohttp.ClientTimeout(total=self._timeout_seconds)
        try:
            async with (
                self._gate,
                asyncio.timeout(BOUND_SECONDS),
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
            ):
                for attempt in range(self._attempts):
                    if attempt:
                        pause = self._backoff_seconds * 2.0 ** (attempt - 1)
                        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                    try:
                        return await _attempt(session, url, body)
                    except TimeoutError:
                        failure = f"no answer in {self._timeout_seconds:g} s"
                    except (aiohttp.ClientError, ValueError) as error:
                        failure = str(error) or type(error).__name__
        except TimeoutError:
            raise SidecarError(f"{NO_ANSWER} within {BOUND_SECONDS:.0f} s") from None
        raise SidecarError(f"{NO_ANSWER}: {url}: {failure}, after {self._attempts} attempts")


async def _attempt(session: aiohttp.ClientSession, url: str, body: bytes) -> ForecastAnswer:
    """One attempt. Raises ValueError for an answer that is worth another attempt."""
    content = bytearray()
    async with session.post(url, data=io.BytesIO(body)) as response:
        async for chunk in response.content.iter_chunked(65536):
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError(f"answered with more than {MAX_ANSWER_BYTES} bytes")
    if 400 <= response.status < 500:
        raise SidecarError(f"the forecast was refused: {_refusal(bytes(content))}")
    if response.status != 200:
        raise ValueError(f"answered {response.status}")
    try:
        return msgspec.json.decode(content, type=ForecastAnswer)
    except ValueError as error:
        raise ValueError(f"answered something else than a forecast: {error}") from error


def _refusal(content: bytes) -> str:
    try:
        error = msgspec.json.decode(content, type=ErrorAnswer)
    except ValueError:
        return f"unknown: {content[:200].decode('utf-8', 'replace')}"
    return f"{error.code}: {error.message}"
