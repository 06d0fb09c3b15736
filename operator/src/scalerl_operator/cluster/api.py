"""The only caller of the Kubernetes API server: plain dicts in and out, typed errors, a time-out on every call.

It stands on ``kubernetes.aio``'s REST client for connections, TLS and credentials, and uses none of its generated
classes: a thousand runs are a few megabytes of JSON, not of model objects. Watching is kopf's part (:mod:`.handlers`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol, Self
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from scalerl_operator.cluster import errors
from scalerl_operator.cluster.kinds import Kind, kind_of
from scalerl_operator.cluster.names import FIELD_OWNER
from scalerl_operator.cluster.types import Object

Objects = list[Object]
Propagation = Literal["Foreground", "Background", "Orphan"]
EventType = Literal["Normal", "Warning"]

PATIENCE_TRIES: Final = 3
"""How often one call may follow a 429 before it is the caller's turn."""
LONGEST_RETRY_AFTER_SECONDS: Final = 5.0
EVENT_NOTE_BYTES: Final = 1024
"""What the API server takes as an event's message."""

_JSON: Final = "application/json"
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

log = logging.getLogger(__name__)


class ApiObserver(Protocol):
    """What the client tells its metrics."""

    def called(self, verb: str, kind: str, code: int, seconds: float) -> None:
        """One request ended with HTTP ``code`` (0: no answer)."""


class KubeApi:
    """A client of one API server; an async context manager.

    ``fence`` is asked before every write (create, apply, patch, replace, delete, events) of anything but a Lease;
    False raises :class:`~.errors.Fenced` and nothing is sent. A call times out after ``timeout`` seconds, waits for a
    429's ``Retry-After`` included. ``instance`` is our name in events.

    Every call raises :class:`~.errors.ApiError`'s kinds and no others.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout: float = 15.0,
        fence: Callable[[], bool] | None = None,
        observer: ApiObserver | None = None,
        instance: str = FIELD_OWNER,
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = FIELD_OWNER
        self._host = configuration.host.rstrip("/")
        self._timeout = timeout
        self._fence = fence
        self._observer = observer
        self._instance = instance

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object, or None where there is none (nor its namespace, nor its kind)."""
        try:
            return await self._call("get", kind_of(kind), namespace, name)
        except errors.NotFound:
            return None

    async def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
        limit: int = 250,
    ) -> Objects:
        """All objects of a kind, in one namespace or (None) in all, fetched in pages of ``limit``."""
        found, _ = await self.list_at(
            kind,
            namespace,
            label_selector=label_selector,
            field_selector=field_selector,
            metadata_only=metadata_only,
            limit=limit,
        )
        return found

    async def list_at(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
        limit: int = 250,
    ) -> tuple[Objects, str]:
        """As :meth:`list`, with the version the list is of.

        The event loop breathes between pages. When the server has forgotten the version of the first page before
        the last is read, the list starts over, once.
        """
        query = {"limit": str(limit)}
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        accept = _METADATA_LIST if metadata_only else _JSON
        try:
            return await self._list(kind_of(kind), namespace, query, accept)
        except errors.Expired:
            return await self._list(kind_of(kind), namespace, query, accept)

    async def apply(self, obj: Object, *, force: bool = True, dry_run: bool = False) -> Object:
        """Server-side apply as ``scalerl-operator``; returns the object as it now is.

        An unknown field is an error (:class:`~.errors.Invalid`), never dropped. Without ``force`` a field that another
        manager set to another value raises :class:`~.errors.Conflict`.
        """
        kind, namespace, name = _address(obj)
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict", "force": str(force).lower()}
        if dry_run:
            query["dryRun"] = "All"
        return await self._call("apply", kind, namespace, name, body=obj, query=query)

    async def create(self, obj: Object) -> Object:
        """Create; :class:`~.errors.AlreadyExists` when the name is taken."""
        kind, namespace, _ = _address(obj)
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict"}
        return await self._call("create", kind, namespace, None, body=obj, query=query)

    async def replace(self, obj: Object) -> Object:
        """PUT of the whole object; :class:`~.errors.Conflict` when its ``resourceVersion`` is not the current one."""
        kind, namespace, name = _address(obj)
        return await self._call(
            "replace", kind, namespace, name, body=obj, query={"fieldManager": FIELD_OWNER}
        )

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: Mapping[str, Any],
        subresource: str | None = None,
        *,
        resource_version: str | None = None,
    ) -> Object:
        """Merge patch (RFC 7386) of an object, or of its ``status`` or ``scale``.

        With ``resource_version``: only if that is still the object's, else :class:`~.errors.Conflict`.
        """
        body = dict(patch)
        if resource_version is not None:
            body["metadata"] = {**body.get("metadata", {}), "resourceVersion": resource_version}
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict"}
        return await self._call(
            "patch", kind_of(kind), namespace, name, subresource=subresource, body=body, query=query
        )

    async def delete(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        propagation: Propagation = "Background",
    ) -> bool:
        """Begin a deletion. False when there was nothing to delete (or, given ``uid``, another object of that name)."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._call("delete", kind_of(kind), namespace, name, body=body)
        except errors.NotFound:
            return False
        except errors.Conflict:
            if uid is None:
                raise
            return False
        return True

    async def event(self, regarding: Object, type: EventType, reason: str, message: str) -> None:
        """Tell ``regarding``'s readers (``kubectl describe``). The same event again raises the first one's counter.

        Never raises: an event that cannot be written is logged, counted, and stops nothing.
        """
        try:
            await self._event(regarding, type, reason, message)
        except errors.ApiError as error:
            log.warning("event %s %r not written: %s", reason, message, error)

    async def _event(self, regarding: Object, type: EventType, reason: str, message: str) -> None:
        meta = regarding["metadata"]
        note = message.encode()[:EVENT_NOTE_BYTES].decode(errors="ignore")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        same = hashlib.sha256("\0".join((meta["uid"], type, reason, note)).encode()).hexdigest()[:16]
        name = f"{meta['name'][:230].rstrip('.-')}.{same}"
        namespace = meta.get("namespace", "default")
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "name": meta["name"],
                "namespace": meta.get("namespace"),
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion"),
            },
            "type": type,
            "reason": reason,
            "message": note,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": FIELD_OWNER},
            "reportingComponent": FIELD_OWNER,
            "reportingInstance": self._instance[:128],
        }
        try:
            await self.create(event)
        except errors.AlreadyExists:
            # By a list: the operator's role has no other way to read events.
            for first in await self.list("Event", namespace, field_selector=f"metadata.name={name}"):
                again = {"count": int(first.get("count") or 1) + 1, "lastTimestamp": now}
                await self.patch("Event", namespace, name, again)

    async def _list(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], accept: str
    ) -> tuple[Objects, str]:
        found: Objects = []
        token: dict[str, str] = {}
        while True:
            page = await self._call("list", kind, namespace, None, query={**query, **token}, accept=accept)
            for item in page.get("items") or ():
                # A list says kind and version once; an object of ours always carries its own.
                item["kind"], item["apiVersion"] = kind.name, kind.api_version
                found.append(item)
            more = page["metadata"].get("continue")
            if not more:
                return found, page["metadata"].get("resourceVersion", "")
            token = {"continue": more}
            await asyncio.sleep(0)

    async def _call(
        self,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str | None,
        *,
        subresource: str | None = None,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        accept: str = _JSON,
    ) -> Object:
        """One call: the fence, the request, after a 429 another (in all at most ``timeout`` seconds)."""
        what = f"{verb} {kind.name} {'/'.join(part for part in (namespace, name) if part)}".rstrip()
        if (
            verb not in ("get", "list")
            and kind.name != "Lease"
            and self._fence is not None
            and not self._fence()
        ):
            raise errors.Fenced("this process may not write now: it does not lead", what=what)
        url = self._host + kind.path(namespace, name, subresource)
        if query:
            url += "?" + urlencode(query)
        deadline = time.monotonic() + self._timeout
        fence = self._fence if verb not in ("get", "list") and kind.name != "Lease" else None
        for attempt in range(1, PATIENCE_TRIES + 1):
            if fence is not None and not fence():
                raise errors.Fenced("this process may not write now: it does not lead", what=what)
            try:
                return await self._request(
                    verb, kind.name, url, body, accept, what, deadline - time.monotonic()
                )
            except errors.Unreachable as error:
                # Only a 429 says that nothing was done and when to come back; all else is for the caller's back-off.
                pause = error.retry_after or 1.0
                out_of_time = time.monotonic() + pause >= deadline
                if (
                    error.code != 429
                    or attempt == PATIENCE_TRIES
                    or out_of_time
                    or pause > LONGEST_RETRY_AFTER_SECONDS
                ):
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _request(
        self, verb: str, kind: str, url: str, body: Object | None, accept: str, what: str, seconds: float
    ) -> Object:
        content_type = {"apply": _APPLY, "patch": _MERGE}.get(verb, _JSON)
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": self._client.user_agent}
        method = {"get": "GET", "list": "GET", "create": "POST", "replace": "PUT", "delete": "DELETE"}.get(
            verb, "PATCH"
        )
        began = time.monotonic()
        code = 0
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
            response = await self._client.call_api(
                method, url, headers, body=body, _request_timeout=aiohttp.ClientTimeout(total=seconds)
            )
            data = await response.read()  # type: ignore[no-untyped-call]
            code = response.status
        except TimeoutError as error:
            raise errors.Unreachable(f"no answer within {seconds:.0f} s", what=what) from error
        except (aiohttp.ClientError, OSError) as error:
            raise errors.Unreachable(f"{type(error).__name__}: {error}", what=what) from error
        finally:
            if self._observer is not None:
                self._observer.called(verb, kind, code, time.monotonic() - began)
        answer = _decode(data)
        if code >= 400:
            raise errors.from_status(code, answer, what=what, retry_after=_retry_after(response.headers))
        return answer


def _address(obj: Object) -> tuple[Kind, str | None, str]:
    """Kind, namespace and name of an object; ValueError when it does not say."""
    kind = kind_of(obj["kind"])
    if obj.get("apiVersion") != kind.api_version:
        raise ValueError(f"{kind.name} is written as {kind.api_version}, not {obj.get('apiVersion')!r}")
    metadata = obj["metadata"]
    if kind.namespaced and not metadata.get("namespace"):
        raise ValueError(f"{kind.name} {metadata.get('name')!r} says no namespace")
    return kind, metadata.get("namespace"), metadata["name"]


def _decode(data: bytes) -> Object:
    """The answer's object. An answer that is none (a proxy's page, a cut body) becomes a Status with its text."""
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {"message": data[:200].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:200]}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a ``Retry-After`` header; None without one (or with a date, which the API server never sends)."""
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
