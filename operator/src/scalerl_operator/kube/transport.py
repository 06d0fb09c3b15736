"""Requests to the API server: credentials, timeouts, retries after a 429, and typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from scalerl_operator.kube import errors
from scalerl_operator.kube.kinds import UNFENCED, Kind
from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER

TRIES: Final = 3
"""Requests per call while the server responds with 429."""
MAX_RETRY_AFTER_SECONDS: Final = 5.0
"""A call whose 429 requests a longer wait fails."""
READS: Final = frozenset({"get", "list", "watch"})

JSON: Final = "application/json"
_CONTENT: Final = {"apply": "application/apply-patch+yaml", "patch": "application/merge-patch+json"}
_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "apply": "PATCH",
    "patch": "PATCH",
    "replace": "PUT",
    "delete": "DELETE",
}


OnCall = Callable[[str, str, int, float], None]
"""Called for each request with verb, kind, HTTP code (0: no response) and seconds to the response's headers."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. verb: get, list, watch, create, apply, patch, replace or delete. most_bytes: of the response."""

    verb: str
    kind: Kind
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None
    body: Object | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = JSON
    most_bytes: float = math.inf

    @property
    def what(self) -> str:
        """Verb, kind, namespace and name, for error messages."""
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return " ".join(part for part in (self.verb, self.kind.name, where, self.subresource) if part)

    @property
    def path(self) -> str:
        """Path and query of the URL."""
        path = self.kind.path(self.namespace, self.name, self.subresource)
        return f"{path}?{urlencode(self.query)}" if self.query else path


class Transport:
    """Sends calls; the arguments are those of :class:`.KubeApi`."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout: float,
        fence: Callable[[], bool] | None,
        on_call: OnCall,
    ) -> None:
        self._client = ApiClient(configuration)
        self._host = configuration.host.rstrip("/")
        self.timeout = timeout
        self._fence = fence
        self._on_call = on_call

    def must_lead(self, what: str) -> None:
        """Raises :class:`~.errors.Fenced` if this process may not do ``what`` now."""
        if self._fence is not None and not self._fence():
            raise errors.Fenced("this process may not write now: it does not lead", what=what)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def request(self, call: Call) -> bytes:
        """The body of the response, within ``timeout`` seconds; retries after a 429 within that time.

        Raises:
            TooLong: it has more than ``call.most_bytes``.
        """
        deadline = time.monotonic() + self.timeout
        for attempt in range(1, TRIES + 1):
            seconds = deadline - time.monotonic()
            try:
                response = await self.send(call, aiohttp.ClientTimeout(total=seconds))
                with translated(call, f"no complete response within {seconds:.0f} s"):
                    return await _body(response, call)
            except errors.Unreachable as error:
                # After a 429, nothing was done. Other errors are retried by the caller's back-off.
                pause = error.retry_after or 1.0
                late = pause > MAX_RETRY_AFTER_SECONDS or time.monotonic() + pause >= deadline
                if error.code != 429 or attempt == TRIES or late:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def send(self, call: Call, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Sends a request and waits for the headers of the response; raises the error of a response that is one."""
        if call.verb not in READS and call.kind.name not in UNFENCED:
            self.must_lead(call.what)
        method, url = _METHODS[call.verb], self._host + call.path
        headers = {
            "Accept": call.accept,
            "Content-Type": _CONTENT.get(call.verb, JSON),
            "User-Agent": FIELD_OWNER,
        }
        began = time.monotonic()
        code = 0
        try:
            with translated(call, f"no response within {limits.total or limits.sock_read:.0f} s"):
                await self._client.update_params_for_auth(headers, [], ["BearerToken"], url, method, None)
                answer = await self._client.call_api(
                    method, url, headers, body=call.body, _request_timeout=limits
                )
                response: aiohttp.ClientResponse = answer.response
                code = response.status
                body = await response.read() if code >= 400 else b""
        finally:
            self._on_call(call.verb, call.kind.name, code, time.monotonic() - began)
        if code >= 400:
            # In seconds: the API server never sends a date.
            after = response.headers.get("Retry-After", "")
            retry_after = float(after) if after.isdecimal() else None
            raise errors.from_status(code, errors.decode(body), what=call.what, retry_after=retry_after)
        return response


async def _body(response: aiohttp.ClientResponse, call: Call) -> bytes:
    if call.most_bytes == math.inf:
        return await response.read()
    body = bytearray()
    async with response:
        async for part in response.content.iter_any():
            body += part
            if len(body) > call.most_bytes:
                raise errors.TooLong(f"it has more than {call.most_bytes:.0f} bytes", what=call.what)
    return bytes(body)


@contextlib.contextmanager
def translated(call: Call, timeout_message: str) -> Iterator[None]:
    """Raises errors of the network and unreadable responses as :class:`~.errors.Unreachable`."""
    try:
        yield
    except msgspec.DecodeError as error:
        raise errors.Unreachable(f"the response cannot be read: {error}", what=call.what) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise errors.Unreachable("no connection in time", what=call.what) from error
    except TimeoutError as error:
        raise errors.Unreachable(timeout_message, what=call.what) from error
    except (aiohttp.ClientError, OSError) as error:
        raise errors.Unreachable(f"{type(error).__name__}: {error}", what=call.what) from error
