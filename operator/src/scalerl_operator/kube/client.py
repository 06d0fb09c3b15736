"""The only caller of the Kubernetes API server: plain dicts in and out, typed errors, a time-out on every call.

It stands on ``kubernetes.aio``'s REST client for connections, TLS and credentials, and uses none of its generated
classes: a thousand runs are a few megabytes of JSON, not of model objects.
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
from scalerl_operator.kube.transport import JSON, Call, OnCall, Transport, decode, translated
from scalerl_operator.kube.types import Object
from scalerl_operator.names import FIELD_OWNER

Objects = list[Object]
Raws = list[msgspec.Raw]
Propagation = Literal["Foreground", "Background", "Orphan"]
EventType = Literal["Normal", "Warning"]

EVENT_NOTE_BYTES: Final = 1024
"""What the API server takes as an event's message."""

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


_PAGE: Final = msgspec.json.Decoder(_Page)
_EVENT: Final = msgspec.json.Decoder(WatchEvent)


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
        """The fence, for what is done to others than the API server: :class:`~.errors.Fenced`, or nothing."""
        self._transport.must_lead(what)

    async def get(
        self, kind: str, namespace: str | None, name: str, *, recent: bool = False
    ) -> Object | None:
        """The object, or None where there is none (nor its namespace, nor its kind).

        ``recent``: as the API server itself remembers it, a moment ago at most, for a third of what asking its store
        costs it.
        """
        query = {"resourceVersion": "0"} if recent else {}
        served = kind_of(kind)
        for version in (served.api_version, *served.earlier):
            with contextlib.suppress(errors.NotFound):
                asked = dataclasses.replace(served, api_version=version)
                return await self._ask(Call("get", asked, namespace, name, query=query))
        return None

    async def list(
        self, kind: str, namespace: str | None = None, *, field_selector: str | None = None
    ) -> Objects:
        """All objects of a kind, in one namespace or (None) in all."""
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
        """As :meth:`list`, fetched in pages of ``limit``, with the version the list is of.

        The event loop runs other tasks between pages. When the server has forgotten the version of the first page before
        the last is read, the list starts over, once.
        """
        served = kind_of(kind)
        # A list says kind and version once; an object of ours always carries its own.
        every = {"kind": served.name, "apiVersion": served.api_version}
        for last_try in (False, True):
            found: Objects = []
            version = ""
            try:
                async for page, version in self.pages(  # noqa: B007 the last page's is wanted
                    kind,
                    namespace,
                    label_selector=label_selector,
                    field_selector=field_selector,
                    limit=limit,
                    accept=_METADATA_LIST if metadata_only else JSON,
                ):
                    found += [msgspec.json.decode(raw) | every for raw in page]
                    await asyncio.sleep(0)
                return found, version
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
        """All objects of a kind as JSON, page by page, each with the version the list is of.

        For lists too long to have in memory decoded. :class:`~.errors.Expired` when the server has forgotten the
        version of the first page; the caller starts over.
        """
        query = {"limit": str(limit)} | ({"labelSelector": label_selector} if label_selector else {})
        query |= {"fieldSelector": field_selector} if field_selector else {}
        while True:
            call = Call("list", kind_of(kind), namespace, query=query, accept=accept)
            data = await self._transport.ask(call)
            with translated(call, ""):
                page = _PAGE.decode(data)
            yield page.items or [], page.metadata.resource_version
            if not page.metadata.more:
                return
            query["continue"] = page.metadata.more

    async def watch(
        self,
        kind: str,
        namespace: str | None,
        *,
        since: str,
        label_selector: str | None = None,
        seconds: int = 120,
    ) -> AsyncGenerator[WatchEvent, None]:
        """What happens to objects of a kind after the version ``since``, bookmarks among it; ends after ``seconds``.

        :class:`~.errors.Expired`: list again. :class:`~.errors.Unreachable` also when the server should have ended it
        and did not: then it is dead, and a time-out is the only way to know.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query |= {"resourceVersion": since} | ({"labelSelector": label_selector} if label_selector else {})
        call = Call("watch", kind_of(kind), namespace, query=query)
        limit = seconds + self._transport.timeout
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._transport.timeout, sock_read=limit)
        response = await self._transport.send(call, limits)
        try:
            with translated(call, f"silent for {limit:.0f} s"):
                async for line in response.content:
                    event = _EVENT.decode(line)
                    if event.type == "ERROR":
                        status = decode(bytes(event.object))
                        code = int(status.get("code") or 500)
                        raise errors.from_status(code, status, what=call.what, retry_after=None)
                    yield event
        finally:
            # close() alone begins a TLS shutdown, for whose answer a silent server keeps the socket open for 30 s.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    async def apply(self, obj: Object, *, uid: str | None = None) -> Object:
        """Server-side apply as ``scalerl-operator``, by force; returns the object as it now is.

        An unknown field is an error (:class:`~.errors.Invalid`), never dropped. With ``uid``: only to that object, else
        (it is gone, or another has its name) :class:`~.errors.Conflict`.
        """
        kind, namespace, name = _address(obj)
        if uid is not None:
            obj = {**obj, "metadata": {**obj["metadata"], "uid": uid}}
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict", "force": "true"}
        try:
            return await self._ask(Call("apply", kind, namespace, name, body=obj, query=query))
        except errors.Invalid as error:
            if uid is None or error.field != "metadata.uid":
                raise
            # In the API server's words: we would change a field that cannot be changed.
            raise errors.Conflict(error.message, code=409, reason="Conflict", what=error.what) from error

    async def create(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Create; :class:`~.errors.AlreadyExists` when the name is taken. See :mod:`.objects` before it is applied.

        An unknown field is an error (:class:`~.errors.Invalid`), never dropped.
        """
        kind, namespace, _ = _address(obj)
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        return await self._ask(Call("create", kind, namespace, body=obj, query=query))

    async def replace(self, obj: Object) -> Object:
        """PUT of the whole object; :class:`~.errors.Conflict` when its ``resourceVersion`` is not the current one."""
        kind, namespace, name = _address(obj)
        query = {"fieldManager": FIELD_OWNER}
        return await self._ask(Call("replace", kind, namespace, name, body=obj, query=query))

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

        With ``resource_version``: only if that is still the object's, else :class:`~.errors.Conflict`.
        """
        body = dict(patch)
        if resource_version is not None:
            body["metadata"] = {**body.get("metadata", {}), "resourceVersion": resource_version}
        query = {"fieldManager": manager, "fieldValidation": "Strict"}
        return await self._ask(Call("patch", kind_of(kind), namespace, name, subresource, body, query))

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
        """Begin a deletion. False when there was nothing to delete (or, given ``uid``, another object of that name)."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._ask(Call("delete", kind_of(kind), namespace, name, body=body))
        except errors.NotFound:
            return False
        except errors.Conflict:
            if uid is None:
                raise
            return False
        return True

    async def event(self, regarding: Object, type: EventType, reason: str, message: str) -> None:
        """Writes an Event about ``regarding`` (shown by ``kubectl describe``). The same event again raises the first one's counter.

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

    async def _ask(self, call: Call) -> Object:
        return decode(await self._transport.ask(call))


def _address(obj: Object) -> tuple[Kind, str | None, str]:
    """Kind, namespace and name of an object; ValueError when it does not say."""
    kind = kind_of(obj["kind"])
    if obj.get("apiVersion") != kind.api_version:
        raise ValueError(f"{kind.name} is written as {kind.api_version}, not {obj.get('apiVersion')!r}")
    metadata = obj["metadata"]
    if kind.namespaced and not metadata.get("namespace"):
        raise ValueError(f"{kind.name} {metadata.get('name')!r} says no namespace")
    return kind, metadata.get("namespace"), metadata["name"]
