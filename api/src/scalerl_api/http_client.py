"""HTTP between the processes of a run: an answer of bounded size, or the reason why there is none; pauses between attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scalerl_api.http_answers import IDENTITY, MAX_ERROR_BYTES, BadAnswer, decode_msgpack, read_body
from scalerl_api.wire import CONTENT_TYPE, WIRE_HEADER, WIRE_VERSION, Problem

if TYPE_CHECKING:
    import aiohttp


class Unanswered(Exception):
    """No usable answer; the server may have executed the request. The message quotes nothing of an answer.

    is_slow: the server was connected and did not answer in time.
    """

    def __init__(self, reason: str, *, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.is_slow = is_slow


class Backoff:
    """Pauses between attempts: doubling from ``first_seconds`` to ``last_seconds``, each shortened by up to half.

    The random part keeps many clients from calling a restarted server at the same moment.
    """

    def __init__(self, first_seconds: float = 0.1, last_seconds: float = 5.0) -> None:
        self._first, self._last = first_seconds, last_seconds
        self._next = first_seconds

    @property
    def is_reset(self) -> bool:
        """Whether no attempt has failed since the last success."""
        return self._next == self._first

    def reset(self) -> None:
        self._next = self._first

    def next_seconds(self) -> float:
        """The pause after a failed attempt."""
        seconds, self._next = self._next, min(2 * self._next, self._last)
        return seconds * random.uniform(0.5, 1.0)

    async def wait(self) -> None:
        await asyncio.sleep(self.next_seconds())


def wire_headers(token: str) -> dict[str, str]:
    """Headers of every request within a run."""
    return {
        "authorization": f"Bearer {token}",
        "content-type": CONTENT_TYPE,
        WIRE_HEADER: str(WIRE_VERSION),
        **IDENTITY,
    }


def decode_problem(content: bytes | bytearray) -> Problem:
    """The error in an answer other than 2xx, including one from a proxy."""
    try:
        return decode_msgpack(content, Problem)
    except BadAnswer:
        return Problem(error="http", message="the body is no problem of the run's protocol")


def open_session(
    headers: Mapping[str, str] | None = None, connector: aiohttp.TCPConnector | None = None
) -> aiohttp.ClientSession:
    """A session that decompresses no answer and keeps no cookies."""
    import aiohttp  # takes half a second, by which the first child of a local run would start later

    return aiohttp.ClientSession(
        headers=headers, connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    timeout: aiohttp.ClientTimeout,
    limit: int,
    *,
    data: Any = None,
    headers: Mapping[str, str] | None = None,
    chunked: bool = True,
) -> tuple[int, bytes]:
    """Status code and body of an answer of at most ``limit`` bytes, for a status other than 200 ``MAX_ERROR_BYTES``. Redirects are not
    followed.

    Args:
        chunked: see :func:`.http_answers.read_body`.

    Raises:
        Unanswered
    """
    import aiohttp

    try:
        async with session.request(
            method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            limit = limit if answer.status == 200 else MAX_ERROR_BYTES
            return answer.status, bytes(await read_body(answer, limit, chunked=chunked))
    except TimeoutError as error:
        is_slow = not isinstance(error, aiohttp.ConnectionTimeoutError)
        raise Unanswered(timeout_reason(error, timeout), is_slow=is_slow) from error
    except (BadAnswer, aiohttp.ClientConnectorError) as error:
        raise Unanswered(str(error)) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # of the protocol: they quote the answer
        raise Unanswered(type(error).__name__) from error


def timeout_reason(error: TimeoutError, limits: aiohttp.ClientTimeout) -> str:
    """What did not happen in time, with the limit that passed.

    >>> import aiohttp
    >>> limits = aiohttp.ClientTimeout(total=600, sock_connect=5)
    >>> timeout_reason(aiohttp.ConnectionTimeoutError(), limits), timeout_reason(TimeoutError(), limits)
    ('no connection in 5 s', 'no answer in 600 s')
    """
    import aiohttp

    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection in {limits.sock_connect:g} s"
    if isinstance(error, aiohttp.SocketTimeoutError) or limits.total is None:
        return f"no data for {limits.sock_read:g} s"
    return f"no answer in {limits.total:g} s"
