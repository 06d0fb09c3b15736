"""The client of the curve-fit sidecar."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from scalerl_api.answers import IDENTITY, BadAnswer, decode_json, read_answer
from scalerl_api.forecast import FORECAST, ErrorAnswer, ForecastAnswer, ForecastRequest

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
MAX_REASON: Final = 500
"""Of the reason of a refusal, in characters."""
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
        self._headers = {"content-type": "application/json", **IDENTITY}
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
                aiohttp.ClientSession(
                    timeout=timeout,
                    headers=self._headers,
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                ) as session,
            ):
                for attempt in range(self._attempts):
                    if attempt:
                        pause = self._backoff_seconds * 2.0 ** (attempt - 1)
                        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                    try:
                        return await _attempt(session, url, body)
                    except TimeoutError:
                        failure = f"no answer in {self._timeout_seconds:g} s"
                    except (BadAnswer, aiohttp.ClientConnectorError) as error:
                        failure = str(error)
                    except (
                        aiohttp.ClientError,
                        ValueError,
                    ) as error:  # of the protocol: they quote the answer
                        failure = type(error).__name__
        except TimeoutError:
            raise SidecarError(f"{NO_ANSWER} within {BOUND_SECONDS:.0f} s") from None
        raise SidecarError(f"{NO_ANSWER}: {url}: {failure}, after {self._attempts} attempts")


async def _attempt(session: aiohttp.ClientSession, url: str, body: bytes) -> ForecastAnswer:
    """One attempt. Raises BadAnswer for an answer that is worth another attempt."""
    async with session.post(url, data=io.BytesIO(body), allow_redirects=False) as response:
        content = await read_answer(response, MAX_ANSWER_BYTES)
    if 400 <= response.status < 500:
        raise SidecarError(f"the forecast was refused: {_refusal(response.status, content)}")
    if response.status != 200:
        raise BadAnswer(f"answered {response.status}")
    return await asyncio.to_thread(decode_json, content, ForecastAnswer)


def _refusal(status: int, content: bytearray) -> str:
    """The sidecar's reason. It is a part of this release, so its message is quoted, but nothing that another server answers."""
    try:
        error = decode_json(content, ErrorAnswer)
    except BadAnswer:
        return f"HTTP {status}"
    return f"{error.code[:64]}: {error.message[:MAX_REASON]}"
