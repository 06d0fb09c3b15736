"""The client of the curve-fit sidecar."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from scalerl_api.forecast import FORECAST, ErrorAnswer, ForecastAnswer, ForecastRequest
from scalerl_api.http_answers import IDENTITY, BadAnswer, decode_json
from scalerl_api.http_client import Backoff, Unanswered, exchange, open_session

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

    Args:
        url: read for each request, since a restarted sidecar may have another.
        timeout_seconds: of one attempt.
        attempts: at most, in all.
        backoff_seconds: before the second attempt at most; see :class:`scalerl_api.http_client.Backoff`.
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
        backoff = Backoff(self._backoff_seconds, BOUND_SECONDS)
        try:
            async with (
                self._gate,
                asyncio.timeout(BOUND_SECONDS),
                open_session(self._headers) as session,
            ):
                for attempt in range(self._attempts):
                    if attempt:
                        await backoff.wait()
                    try:
                        return await _attempt(session, url, timeout, body)
                    except (Unanswered, BadAnswer) as error:
                        failure = str(error)
        except TimeoutError:
            raise SidecarError(f"{NO_ANSWER} within {BOUND_SECONDS:.0f} s") from None
        raise SidecarError(f"{NO_ANSWER}: {url}: {failure}, after {self._attempts} attempts")


async def _attempt(
    session: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout, body: bytes
) -> ForecastAnswer:
    """One attempt. Raises Unanswered or BadAnswer where another attempt may succeed."""
    status, content = await exchange(session, "POST", url, timeout, MAX_ANSWER_BYTES, data=io.BytesIO(body))
    if 400 <= status < 500:
        raise SidecarError(f"the forecast was refused: {_refusal(status, content)}")
    if status != 200:
        raise BadAnswer(f"answered {status}")
    return await asyncio.to_thread(decode_json, content, ForecastAnswer)


def _refusal(status: int, content: bytes) -> str:
    """The sidecar's reason. It is a part of this release, so its message is quoted, but nothing that another server answers."""
    try:
        error = decode_json(content, ErrorAnswer)
    except BadAnswer:
        return f"HTTP {status}"
    return f"{error.code[:64]}: {error.message[:MAX_REASON]}"
