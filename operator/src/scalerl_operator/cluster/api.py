"""The only caller of the Kubernetes API server: plain dicts in and out, typed errors, a time-out on every call.

It stands on ``kubernetes.aio``'s REST client for connections, TLS and credentials, and uses none of its generated
classes: a thousand runs are a few megabytes of JSON, not of model objects. Watching is kopf's part (:mod:`.handlers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, Self

Object = dict[str, Any]
FIELD_OWNER: Final = "scalerl-operator"

Propagation = Literal["Foreground", "Background", "Orphan"]


class ApiObserver(Protocol):
    """What the client tells its metrics."""

    def called(self, verb: str, kind: str, code: int, seconds: float) -> None:
        """One request ended with HTTP ``code`` (0: no answer)."""


class KubeApi:
    """A client of one API server; an async context manager.

    ``fence`` is asked before every write (create, apply, patch, replace, delete, events); False raises
    :class:`Fenced` and nothing is sent. Leases are not fenced. Calls time out after ``timeout`` seconds.
    """

    def __init__(
        self,
        *,
        timeout: float = 15.0,
        fence: Callable[[], bool] | None = None,
        observer: ApiObserver | None = None,
        instance: str = "",
    ) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        raise NotImplementedError

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object, or None where there is none (nor its kind)."""
        raise NotImplementedError

    async def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        metadata_only: bool = False,
        limit: int = 250,
    ) -> list[Object]:
        """All objects of a kind, in one namespace or (None) in all, fetched in pages of ``limit``."""
        raise NotImplementedError

    async def apply(self, obj: Object, *, force: bool = True, dry_run: bool = False) -> Object:
        """Server-side apply as ``scalerl-operator``; returns the object as it now is.

        Unknown fields are an error (:class:`Invalid`), never dropped. Without ``force`` a field that another
        manager owns with another value raises :class:`Conflict`.
        """
        raise NotImplementedError

    async def create(self, obj: Object) -> Object:
        """Create; :class:`AlreadyExists` when the name is taken."""
        raise NotImplementedError

    async def replace(self, obj: Object) -> Object:
        """PUT: the whole object; :class:`Conflict` when ``metadata.resourceVersion`` is not the current one."""
        raise NotImplementedError

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: Object,
        subresource: str | None = None,
        *,
        resource_version: str | None = None,
    ) -> Object:
        """Merge patch (RFC 7386) of an object or its ``status``/``scale``.

        With ``resource_version``: only if that is still the object's version, else :class:`Conflict`.
        """
        raise NotImplementedError

    async def delete(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        propagation: Propagation = "Background",
    ) -> bool:
        """Begin a deletion. False when there was nothing to delete (or, with ``uid``, another object of that name)."""
        raise NotImplementedError

    async def event(
        self, regarding: Object, type: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Tell ``regarding``'s readers (``kubectl describe``); the same event again raises a counter.

        Never raises: an event that cannot be written is logged and counted, and stops nothing.
        """
        raise NotImplementedError
