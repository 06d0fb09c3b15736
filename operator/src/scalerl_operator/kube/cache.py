"""Copies of runs and their objects, from watch events; reconciles read them.

Objects are kept as JSON without the fields of ``managedFields``, and decision records without their data, and decoded when read:
that takes a tenth of the memory of dicts, and a reader may change its copy. The response to a write is stored too
(:meth:`Cache.remember`), so that the next reconcile reads it, and the watch event of the write wakes no run.

Versions of an object only increase: older events are dropped, a deletion only applies to the object with its uid, and a
response that arrives after the deletion of its object does not restore it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from scalerl_operator import names
from scalerl_operator.kube.kinds import RUN, Kind
from scalerl_operator.kube.types import Key, Object

TOMBSTONE_SECONDS: Final = 120.0
"""How long the version of a deleted object is kept: longer than a response to a write can take."""


class _Manager(msgspec.Struct, omit_defaults=True):
    manager: str = ""
    operation: str = ""
    subresource: str = ""
    time: str = ""


class _Metadata(msgspec.Struct, omit_defaults=True):
    """All metadata but the fields of ``managedFields``, which can be most of the object."""

    name: str
    resourceVersion: str
    uid: str
    namespace: str = ""
    generation: int | None = None
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None
    deletionGracePeriodSeconds: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    ownerReferences: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    managedFields: list[_Manager] | None = None


class _Item(msgspec.Struct, omit_defaults=True):
    """An object. Fields that the cache does not read stay unparsed."""

    metadata: _Metadata
    kind: str = ""
    apiVersion: str = ""
    spec: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    binaryData: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    immutable: bool | None = None


_ITEM: Final = msgspec.json.Decoder(_Item)


@dataclass(slots=True)
class _Entry:
    uid: str
    version: int
    data: bytes
    group: Key
    """(namespace, value of the run's label)."""


class Cache:
    """The objects of all runs, by kind, namespace and name. ``wake(key)`` is called when an object of that run has changed."""

    def __init__(self, wake: Callable[[Key], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._clock = clock
        self._entries: dict[tuple[str, str, str], _Entry] = {}
        self._groups: dict[Key, dict[tuple[str, str], _Entry]] = {}
        self._run_of: dict[Key, str] = {}
        self._tombstones: dict[tuple[str, str, str], tuple[int, float]] = {}

    def run(self, namespace: str, name: str) -> Object | None:
        """A copy of the run, or None."""
        return self.get(RUN, namespace, name)

    def runs(self) -> list[Key]:
        """The keys of all runs."""
        return [(namespace, name) for kind, namespace, name in self._entries if kind == RUN]

    def owned(self, namespace: str, run: str) -> dict[tuple[str, str], Object]:
        """Copies of all objects with this run's label, pods included, by (kind, name).

        They include those of an earlier run of the same name, which have another ``scalerl.dev/run-uid``.
        """
        group = self._groups.get((namespace, names.label_value(run)), {})
        return {at: msgspec.json.decode(entry.data) for at, entry in group.items()}

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """A copy of the object, or None."""
        entry = self._entries.get((kind, namespace, name))
        return None if entry is None else msgspec.json.decode(entry.data)

    def version(self, kind: str, namespace: str, name: str) -> int:
        """The version of an object, or of its deletion; -1 where neither is known."""
        at = (kind, namespace, name)
        entry = self._entries.get(at)
        return self._tombstone(at) if entry is None else entry.version

    def observe(self, event: str | None, obj: Object) -> None:
        """Stores the object of a watch event (``ADDED``, ``MODIFIED``, ``DELETED``), or of a list (None).

        ``obj`` has kind and apiVersion. An object without the label of a run is not stored.
        """
        self._observe(event, _ITEM.decode(msgspec.json.encode(obj)))

    def observe_raw(self, event: str | None, kind: Kind, raw: bytes | msgspec.Raw) -> tuple[Key, str]:
        """As :meth:`observe`, for JSON, and much faster. Returns the object's key and version."""
        item = _ITEM.decode(raw)
        item.kind, item.apiVersion = kind.name, kind.api_version  # the items of a list have neither
        self._observe(event, item)
        return (item.metadata.namespace, item.metadata.name), item.metadata.resourceVersion

    def remember(self, obj: Object) -> None:
        """Stores the response to a write (not of a dry run), without waking its run."""
        self._store(_ITEM.decode(msgspec.json.encode(obj)))

    def forget_missing(
        self, kind: str, present: Iterable[Key], as_of: str, *, namespace: str | None = None
    ) -> int:
        """Drops objects that a complete list does not contain, and wakes their runs. A watch that was interrupted for long
        resumes with a list, without events of deletions.

        present: (namespace, name) of all objects of the list.
        as_of: the version of the list.
        namespace: the namespace of the list; None: all.
        Returns: the number of objects dropped.
        """
        listed, version = set(present), _version(as_of)
        gone = [
            at
            for at, entry in self._entries.items()
            if at[0] == kind
            and namespace in (None, at[1])
            and at[1:] not in listed
            and entry.version <= version
        ]
        for at in gone:
            self._drop(at, version)
        return len(gone)

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """(kind, namespace, name) of all objects."""
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def _observe(self, event: str | None, item: _Item) -> None:
        if event != "DELETED":
            if self._store(item):
                self._wake_group(item.metadata.namespace, _label(item))
            return
        metadata = item.metadata
        at = (item.kind, metadata.namespace, metadata.name)
        known = self._entries.get(at)
        if known is None:
            self._bury(at, _version(metadata.resourceVersion))
        elif known.uid == metadata.uid:
            self._drop(at, _version(metadata.resourceVersion))

    def _store(self, item: _Item) -> bool:
        """Stores ``item`` if it is newer than the cache; False if it is not."""
        metadata = item.metadata
        at = (item.kind, metadata.namespace, metadata.name)
        version = _version(metadata.resourceVersion)
        label = _label(item)
        known = self._entries.get(at)
        if version <= (self._tombstone(at) if known is None else known.version):
            return False
        if not label:  # it was removed: the object no longer belongs to the run
            if known is not None:
                self._drop(at, version)
            return False
        if item.kind == "Pod":  # written by controllers: its field managers are not read
            metadata.managedFields = None
        entry = _Entry(metadata.uid, version, msgspec.json.encode(item), (at[1], label))
        if known is not None and known.group != entry.group:
            self._remove_from_group(at, known)
            self._wake_group(*known.group)
        self._entries[at] = entry
        if at[0] == RUN:
            self._run_of[entry.group] = at[2]
        else:
            self._groups.setdefault(entry.group, {})[at[0], at[2]] = entry
        return True

    def _drop(self, at: tuple[str, str, str], version: int) -> None:
        entry = self._entries.pop(at)
        self._bury(at, max(version, entry.version))
        if at[0] == RUN:
            del self._run_of[entry.group]
            self._wake((at[1], at[2]))
        else:
            self._remove_from_group(at, entry)
            self._wake_group(*entry.group)

    def _remove_from_group(self, at: tuple[str, str, str], entry: _Entry) -> None:
        group = self._groups[entry.group]
        del group[at[0], at[2]]
        if not group:
            del self._groups[entry.group]

    def _wake_group(self, namespace: str, label: str) -> None:
        name = self._run_of.get((namespace, label))
        if name is not None:
            self._wake((namespace, name))

    def _bury(self, at: tuple[str, str, str], version: int) -> None:
        now, tombstones = self._clock(), self._tombstones
        while tombstones and (oldest := next(iter(tombstones))) and tombstones[oldest][1] < now:
            del tombstones[oldest]
        tombstones.pop(at, None)
        tombstones[at] = (version, now + TOMBSTONE_SECONDS)

    def _tombstone(self, at: tuple[str, str, str]) -> int:
        """The version of an object's deletion; -1 without one."""
        version, until = self._tombstones.get(at, (-1, 0.0))
        return version if until >= self._clock() else -1


def _label(item: _Item) -> str:
    if item.kind == RUN:
        return names.label_value(item.metadata.name)
    return (item.metadata.labels or {}).get(names.RUN, "")


def _version(resource_version: str) -> int:
    """A resource version as a number; clients may compare those of one kind."""
    return int(resource_version or 0)
