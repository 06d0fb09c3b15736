"""A record of decisions in ConfigMaps: ``<run>-decisions``, and ``-2``, ``-3``, … when one is full.

Two operators may write at once, when one has lost its lease and does not know yet. Every write therefore says which
version of an object it follows, and only the last chunk is ever written to. Before a next one is made, the last is
closed by an annotation: from then on a write to it by somebody who has not seen that fails as well, and of two who
make the next one at once, one fails. Whoever fails reads again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from scalerl_api.spec import GROUP, ScaleRLRun
from scalerl_operator.autoscaling.log_storage import RecordError, RecordLost
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Images, Object
from scalerl_operator.names import DECISIONS, RUN_UID

KEY: Final = "decisions.jsonl"
CLOSED: Final = f"{GROUP}/closed"
"""Annotation: another chunk follows, or is about to."""
MAX_BYTES: Final = 900 * 1024
"""Of a chunk's lines: an object has to stay under 1 MiB, with room for what surrounds them."""


class ConfigMaps(Protocol):
    """What is needed of :class:`scalerl_operator.kube.client.KubeApi`."""

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None: ...

    async def create(self, obj: Object) -> Object: ...

    async def patch(
        self,
        kind: str,
        namespace: str | None,
        name: str,
        patch: dict[str, Any],
        *,
        resource_version: str | None = None,
    ) -> Object: ...


@dataclass(frozen=True)
class _Chunk:
    """As it was read or written last. version: None for one that is not there yet."""

    number: int
    content: bytes = b""
    version: str | None = None
    closed: bool = False


class ConfigMapStorage:
    """The decisions of one run; see :class:`scalerl_operator.autoscaling.log_storage.Storage`.

    A line longer than a ConfigMap can hold is refused: its decision is not acted upon.
    """

    def __init__(self, run: ScaleRLRun, uid: str, api: ConfigMaps) -> None:
        self._scope = Scope(run, uid, Images("", "", ""), "")
        self._uid = uid
        self._api = api
        self._before = 0
        """Bytes in the chunks before the last."""
        self._last = _Chunk(1)

    @property
    def name(self) -> str:
        """The first chunk's, as a person asks for it."""
        return f"ConfigMap {self._scope.namespace}/{self._scope.names.decisions()}"

    async def read(self) -> bytes:
        """All chunks."""
        contents: list[bytes] = []
        last = _Chunk(1)
        while True:
            found = await self._get(len(contents) + 1)
            if found is None:
                break
            last = found
            contents.append(found.content)
        self._last = last
        self._before = sum(map(len, contents[:-1]))
        return b"".join(contents)

    async def append(self, content: bytes, at: int) -> None:
        """Into the last chunk, or into a next one."""
        last = self._last
        if at != self._before + len(last.content):
            raise RecordError(
                f"{self._what(last.number)}: its end is no whole line; it was changed by hand: restore it, or delete the "
                "record's ConfigMaps to begin anew"
            )
        if len(content) > MAX_BYTES:
            raise RecordError(
                f"a decision of {len(content)} bytes does not fit into a ConfigMap ({MAX_BYTES}); "
                "evaluate less often, so that less is recorded with each"
            )
        if not content:
            return
        if last.version is None:
            self._last = await self._write(last.number, content)
        elif last.closed or len(last.content) + len(content) > MAX_BYTES:
            if not last.closed:
                closing = {"metadata": {"annotations": {CLOSED: "true"}}}
                self._last = await self._write(last.number, last.content, closing, last.version)
            self._last = await self._write(last.number + 1, content)
            self._before += len(last.content)
        else:
            whole = last.content + content
            self._last = await self._write(
                last.number, whole, {"data": {KEY: whole.decode()}}, version=last.version
            )

    async def set_aside(self, problem: str) -> str:
        """Not here: what somebody has changed by hand is not moved away under their hands."""
        raise RecordError(
            f"{self.name}: {problem}; it was changed by hand: restore it, or delete the record's ConfigMaps to begin anew"
        )

    def close(self) -> None:
        """Nothing is held."""

    async def _get(self, number: int) -> _Chunk | None:
        scope = self._scope
        try:
            found = await self._api.get("ConfigMap", scope.namespace, scope.names.decisions(number))
        except errors.ApiError as error:
            raise RecordError(f"{self._what(number)} cannot be read: {error}") from error
        if found is None:
            return None
        metadata = found["metadata"]
        if (metadata.get("labels") or {}).get(RUN_UID) != self._uid:
            raise RecordError(f"{self._what(number)} is not this run's: rename or delete it")
        if metadata.get("deletionTimestamp"):
            raise RecordError(f"{self._what(number)} is being deleted")
        return _chunk(number, found)

    async def _write(
        self, number: int, content: bytes, patch: dict[str, Any] | None = None, version: str | None = None
    ) -> _Chunk:
        """Create a chunk that holds ``content``, or patch the one of this version."""
        scope = self._scope
        name = scope.names.decisions(number)
        try:
            if patch is None:
                written = await self._api.create(
                    {
                        "apiVersion": "v1",
                        "kind": "ConfigMap",
                        "metadata": scope.metadata(name, DECISIONS),
                        "data": {KEY: content.decode()},
                    }
                )
            else:
                written = await self._api.patch(
                    "ConfigMap", scope.namespace, name, patch, resource_version=version
                )
        except (errors.Invalid, errors.Forbidden, errors.Unauthorized, errors.Fenced) as error:
            raise RecordError(f"{self._what(number)} cannot be written: {error}") from error
        except errors.ApiError as error:
            # Somebody else wrote (Conflict, AlreadyExists) or removed it (NotFound), or the answer was lost.
            raise RecordLost(f"{self._what(number)} could not be written: {error}") from error
        return _Chunk(number, content, written["metadata"]["resourceVersion"], closed=_closed(written))

    def _what(self, number: int) -> str:
        return f"ConfigMap {self._scope.namespace}/{self._scope.names.decisions(number)}"


def _chunk(number: int, found: Object) -> _Chunk:
    content = str((found.get("data") or {}).get(KEY, "")).encode()
    return _Chunk(number, content, found["metadata"]["resourceVersion"], _closed(found))


def _closed(found: Object) -> bool:
    return CLOSED in (found["metadata"].get("annotations") or {})
