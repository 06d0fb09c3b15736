"""One request to the API server: credentials, time-outs, a 429's patience, and the answer's error by its type."""

from __future__ import annotations

import asyncio
import contextlib
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
from scalerl_operator.kube.kinds import Kind
from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER

PATIENCE_TRIES: Final = 3
"""How often one call may follow a 429 before it is the caller's turn."""
LONGEST_RETRY_AFTER_SECONDS: Final = 5.0
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
"""Called with verb, kind, HTTP code (0: no answer) and the seconds to the answer's head of each request."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as it is to be sent. ``verb``: get, list, watch, create, apply, patch, replace or delete."""

    verb: str
    kind: Kind
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None
    body: Object | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = JSON

    @property
    def what(self) -> str:
        """The call as errors name it."""
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return " ".join(part for part in (self.verb, self.kind.name, where, self.subresource) if part)

    @property
    def path(self) -> str:
        """Path and query."""
        path = self.kind.path(self.namespace, self.name, self.subresource)
        return f"{path}?{urlencode(self.query)}" if self.query else path


class Transport:
    """Sends calls. ``fence``: asked before each write of anything but a Lease; False: :class:`~.errors.Fenced`."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout: float,
        fence: Callable[[], bool] | None = None,
        on_call: OnCall = lambda verb, kind, code, seconds: None,
    ) -> None:
        self._client = ApiClient(configuration)
        self._host = configuration.host.rstrip("/")
        self.timeout = timeout
        self._fence = fence
        self._on_call = on_call

    def must_lead(self, what: str) -> None:
        """:class:`~.errors.Fenced` where this process may not do ``what`` now."""
        if self._fence is not None and not self._fence():
            raise errors.Fenced("this process may not write now: it does not lead", what=what)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def ask(self, call: Call) -> bytes:
        """The answer's body, within ``timeout`` seconds; a 429 is waited out and asked again in that time."""
        deadline = time.monotonic() + self.timeout
        for attempt in range(1, PATIENCE_TRIES + 1):
            try:
                return await self._asked(call, deadline - time.monotonic())
            except errors.Unreachable as error:
                # Only a 429 says that nothing was done and when to come back; all else is for the caller's back-off.
                pause = error.retry_after or 1.0
                late = pause > LONGEST_RETRY_AFTER_SECONDS or time.monotonic() + pause >= deadline
                if error.code != 429 or attempt == PATIENCE_TRIES or late:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _asked(self, call: Call, seconds: float) -> bytes:
        response = await self.send(call, aiohttp.ClientTimeout(total=seconds))
        with translated(call, f"no whole answer within {seconds:.0f} s"):
            return await response.read()

    async def send(self, call: Call, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Send, and wait for the head of the answer. One that is an error is read and raised."""
        if call.verb not in READS and call.kind.name != "Lease":
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
            with translated(call, f"no answer within {self.timeout:.0f} s"):
                await self._client.update_params_for_auth(headers, [], ["BearerToken"], url, method, None)
                answer = await self._client.call_api(
                    method, url, headers, body=call.body, _request_timeout=limits
                )
                response: aiohttp.ClientResponse = answer.response
                code = response.status
                refused = await response.read() if code >= 400 else b""
        finally:
            self._on_call(call.verb, call.kind.name, code, time.monotonic() - began)
        if code >= 400:
            after = _retry_after(response.headers)
            raise errors.from_status(code, decode(refused), what=call.what, retry_after=after)
        return response


@contextlib.contextmanager
def translated(call: Call, silence: str) -> Iterator[None]:
    """What the network does to a call, as :class:`~.errors.Unreachable`; ``silence``: what a time-out is called."""
    try:
        yield
    except msgspec.DecodeError as error:
        # A proxy's page, or an answer that was cut: nothing that the API server said.
        raise errors.Unreachable(f"no answer that can be read: {error}", what=call.what) from error
    except TimeoutError as error:
        raise errors.Unreachable(silence, what=call.what) from error
    except (aiohttp.ClientError, OSError) as error:
        raise errors.Unreachable(f"{type(error).__name__}: {error}", what=call.what) from error


def decode(data: bytes) -> Object:
    """The answer's object. An answer that is none (a proxy's page, a cut body) becomes a Status with its text."""
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {"message": data[:200].decode(errors="replace").strip()}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:200]}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a ``Retry-After`` header; None without one (or with a date, which the API server never sends)."""
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
