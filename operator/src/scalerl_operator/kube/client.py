"""Client of the Kubernetes API server: plain dicts, typed errors, a timeout on every call.

Connections, TLS and credentials are those of ``kubernetes.aio``'s REST client. Its generated classes are not used: they take
many times the memory of the JSON of a thousand runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self

import aiohttp
import msgspec
from kubernetes.aio.client.configuration import Configuration

from scalerl_operator.kube import errors
from scalerl_operator.kube.kinds import Kind, kind_of
from scalerl_operator.kube.transport import JSON, Call, OnCall, Transport, translated
from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER

Objects = list[Object]
Raws = list[msgspec.Raw]
Propagation = Literal["Foreground", "Background", "Orphan"]
EventType = Literal["Normal", "Warning"]

EVENT_NOTE_BYTES: Final = 1024
"""The API server's limit of an Event's message."""

_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

log = logging.getLogger(__name__)


class WatchEvent(msgspec.Struct):
    """ADDED, MODIFIED, DELETED or BOOKMARK, and the object as JSON."""

    type: str
    object: msgspec.Raw


class _PageHead(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    more: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _PageHead
    items: list[msgspec.Raw] | None = None


class _Name(msgspec.Struct):
    name: str


class _Named(msgspec.Struct):
    metadata: _Name


_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_NAMED: Final = msgspec.json.Decoder(_Named)
_PAGE: Final = msgspec.json.Decoder(_Page)
_EVENT: Final = msgspec.json.Decoder(WatchEvent)


class KubeApi:
    """A client of one API server; an async context manager. All calls raise :class:`~.errors.ApiError` only.

    Args:
        timeout: of a call with its retries, in seconds.
        fence: called before each write, except of kinds in :data:`.kinds.UNFENCED`; if it returns False, the call raises
            :class:`~.errors.Fenced`.
        instance: the reporter of Events.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout: float = 15.0,
        fence: Callable[[], bool] | None = None,
        on_call: OnCall = lambda verb, kind, code, seconds: None,
        instance: str = FIELD_OWNER,
    ) -> None:
        self._transport = Transport(configuration, timeout=timeout, fence=fence, on_call=on_call)
        self._instance = instance

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._transport.close()

    def must_lead(self, what: str) -> None:
        """Raises :class:`~.errors.Fenced` if this process may not do ``what`` now: the fence of requests to other servers."""
        self._transport.must_lead(what)

    async def get(
        self, kind: str, namespace: str | None, name: str, *, recent: bool = False
    ) -> Object | None:
        """The object; None if it, its namespace or its kind does not exist.

        Args:
            recent: from the API server's cache, which may be out of date by moments and costs a third of a read of its store.
        """
        query = {"resourceVersion": "0"} if recent else {}
        current = kind_of(kind)
        for version in (current.api_version, *current.earlier):
            with contextlib.suppress(errors.NotFound):
                served = dataclasses.replace(current, api_version=version)
                return await self._request(Call("get", served, namespace, name, query=query))
        return None

    async def list(
        self, kind: str, namespace: str | None = None, *, field_selector: str | None = None
    ) -> Objects:
        """All objects of a kind in one namespace; None: in all."""
        return (await self.list_at(kind, namespace, field_selector=field_selector))[0]

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
        """As :meth:`list`, in pages of ``limit``, with the version of the list.

        The event loop runs other tasks between pages. If the first page's version expires before the last page is read, the
        list starts over, once.
        """
        served = kind_of(kind)
        # The items of a list have neither.
        type_meta = {"kind": served.name, "apiVersion": served.api_version}
        for last_try in (False, True):
            objects: Objects = []
            version = ""
            try:
                async for page, version in self.pages(  # noqa: B007 the last page's is returned
                    kind,
                    namespace,
                    label_selector=label_selector,
                    field_selector=field_selector,
                    limit=limit,
                    accept=_METADATA_LIST if metadata_only else JSON,
                ):
                    with translated(Call("list", served, namespace), ""):
                        objects += [_OBJECT.decode(raw) | type_meta for raw in page]
                    await asyncio.sleep(0)
                return objects, version
            except errors.Expired:
                if last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    async def pages(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        limit: int = 250,
        accept: str = JSON,
    ) -> AsyncIterator[tuple[Raws, str]]:
        """All objects of a kind as JSON, page by page, each with the version of the list.

        Raises:
            Expired: the version of the first page; the caller starts over.
        """
        query = {"limit": str(limit)} | ({"labelSelector": label_selector} if label_selector else {})
        query |= {"fieldSelector": field_selector} if field_selector else {}
        while True:
            call = Call("list", kind_of(kind), namespace, query=query, accept=accept)
            data = await self._transport.request(call)
            with translated(call, ""):
                page = _PAGE.decode(data)
            yield page.items or [], page.metadata.resource_version
            if not page.metadata.more:
                return
            query["continue"] = page.metadata.more

    async def names(
        self, kind: str, namespace: str, label_selector: str, most_bytes: int
    ) -> frozenset[str] | None:
        """Names of objects, from the API server's cache as :meth:`get` with ``recent``; None: their list has more than ``most_bytes``."""
        query = {"labelSelector": label_selector, "resourceVersion": "0"}
        call = Call(
            "list", kind_of(kind), namespace, query=query, accept=_METADATA_LIST, most_bytes=most_bytes
        )
        try:
            data = await self._transport.request(call)
        except errors.TooLong:
            return None
        with translated(call, ""):
            items = _PAGE.decode(data).items or ()
            return frozenset(_NAMED.decode(item).metadata.name for item in items)

    async def watch(
        self,
        kind: str,
        namespace: str | None,
        *,
        since: str,
        label_selector: str | None = None,
        seconds: int = 120,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Events of objects of a kind after the version ``since``, with bookmarks; the server ends it after ``seconds``.

        Raises:
            Expired: the version is too old; list again.
            Unreachable: also if the server has not ended the watch in time, since it may be gone.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query |= {"resourceVersion": since} | ({"labelSelector": label_selector} if label_selector else {})
        call = Call("watch", kind_of(kind), namespace, query=query)
        limit = seconds + self._transport.timeout
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._transport.timeout, sock_read=limit)
        response = await self._transport.send(call, limits)
        try:
            with translated(call, f"no event for {limit:.0f} s"):
                async for line in response.content:
                    event = _EVENT.decode(line)
                    if event.type == "ERROR":
                        status = errors.decode(bytes(event.object))
                        code = int(status.get("code") or 500)
                        raise errors.from_status(code, status, what=call.what, retry_after=None)
                    yield event
        finally:
            # close() alone begins a TLS shutdown, and waits 30 s for a server that does not respond.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    async def apply(self, obj: Object, *, uid: str | None = None) -> Object:
        """Forced server-side apply as ``scalerl-operator``; returns the object after it.

        Raises:
            Invalid: also for an unknown field.
            Conflict: the object with that ``uid`` is gone.
        """
        kind, namespace, name = _address(obj)
        if uid is not None:
            obj = {**obj, "metadata": {**obj["metadata"], "uid": uid}}
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict", "force": "true"}
        try:
            return await self._request(Call("apply", kind, namespace, name, body=obj, query=query))
        except errors.Invalid as error:
            if uid is None or error.field != "metadata.uid":
                raise
            # Another object has the name: the API server reports a change of an immutable field.
            raise errors.Conflict(error.message, code=409, reason="Conflict", what=error.what) from error

    async def create(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Create; see :mod:`.objects` before an object that was created is applied.

        Raises:
            AlreadyExists: the name is taken.
            Invalid: also for an unknown field.
        """
        kind, namespace, _ = _address(obj)
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        return await self._request(Call("create", kind, namespace, body=obj, query=query))

    async def replace(self, obj: Object) -> Object:
        """PUT of the whole object; :class:`~.errors.Conflict` when its ``resourceVersion`` is not the current one."""
        kind, namespace, name = _address(obj)
        query = {"fieldManager": FIELD_OWNER}
        return await self._request(Call("replace", kind, namespace, name, body=obj, query=query))

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: Mapping[str, Any],
        subresource: str | None = None,
        *,
        resource_version: str | None = None,
        manager: str = FIELD_OWNER,
    ) -> Object:
        """Merge patch (RFC 7386) of an object, or of its ``status`` or ``scale``, as the field manager ``manager``.

        Raises:
            Conflict: ``resource_version`` is not the object's current one.
        """
        body = dict(patch)
        if resource_version is not None:
            body["metadata"] = {**body.get("metadata", {}), "resourceVersion": resource_version}
        query = {"fieldManager": manager, "fieldValidation": "Strict"}
        return await self._request(Call("patch", kind_of(kind), namespace, name, subresource, body, query))

    async def delete(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        propagation: Propagation = "Background",
        grace_seconds: int | None = None,
    ) -> bool:
        """Begins a deletion. False: there is no such object (with ``uid``: the object of that name is another)."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._request(Call("delete", kind_of(kind), namespace, name, body=body))
        except errors.NotFound:
            return False
        except errors.Conflict:
            if uid is None:
                raise
            return False
        return True

    async def event(self, regarding: Object, type: EventType, reason: str, message: str) -> None:
        """Writes an Event about ``regarding``; a repeated one raises the count of the first. A failure is only logged."""
        try:
            await self._event(regarding, type, reason, message)
        except errors.ApiError as error:
            log.warning("event %s %r was not written: %s", reason, message, error)

    async def _event(self, regarding: Object, type: EventType, reason: str, message: str) -> None:
        meta = regarding["metadata"]
        note = message.encode()[:EVENT_NOTE_BYTES].decode(errors="ignore")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        digest = hashlib.sha256("\0".join((meta["uid"], type, reason, note)).encode()).hexdigest()[:16]
        name = f"{meta['name'][:230].rstrip('.-')}.{digest}"
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
            # By a list: the operator's role does not permit `get` of Events.
            for first in await self.list("Event", namespace, field_selector=f"metadata.name={name}"):
                patch = {"count": int(first.get("count") or 1) + 1, "lastTimestamp": now}
                await self.patch("Event", namespace, name, patch)

    async def _request(self, call: Call) -> Object:
        return errors.decode(await self._transport.request(call))


def _address(obj: Object) -> tuple[Kind, str | None, str]:
    """Kind, namespace and name of an object; ValueError where one is missing or not the operator's version."""
    kind = kind_of(obj["kind"])
    if obj.get("apiVersion") != kind.api_version:
        raise ValueError(f"{kind.name} is written as {kind.api_version}, not {obj.get('apiVersion')!r}")
    metadata = obj["metadata"]
    if kind.namespaced and not metadata.get("namespace"):
        raise ValueError(f"{kind.name} {metadata.get('name')!r} has no namespace")
    return kind, metadata.get("namespace"), metadata["name"]
