"""Live copies of runs and of what belongs to them, fed by watch events: what a reconcile reads first.

Objects are kept as JSON without the fields of ``managedFields``, records of decisions without what is recorded, and decoded when
read: a tenth of the memory of live dicts, and a reader may change what it got. A write's answer goes in too
(:meth:`Cache.remember`), so that the next reconcile already sees it, and the watch event that follows it wakes no run.

Versions of one object only go up. An event older than what is kept is dropped, a deletion counts only for the object
(uid) it names, and an answer that arrives after its object's deletion does not bring it back.
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

BURIED_SECONDS: Final = 120.0
"""For how long a deletion is remembered: longer than any answer to a write can be late."""


class _Manager(msgspec.Struct, omit_defaults=True):
    """Who wrote an object, and when."""

    manager: str = ""
    operation: str = ""
    subresource: str = ""
    time: str = ""


class _Metadata(msgspec.Struct, omit_defaults=True):
    """What is kept of an object's metadata: all but the fields of ``managedFields``, which can be most of the object."""

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
    """What is kept of an object. Everything that is not used here is kept as it came, unparsed."""

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
    """(namespace, value of the run's label): whose it is."""


class Cache:
    """The objects of all runs, by kind, namespace and name.

    ``wake(key)`` is called whenever something of that run changed. All methods belong to the event loop's thread.
    """

    def __init__(self, wake: Callable[[Key], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._clock = clock
        self._entries: dict[tuple[str, str, str], _Entry] = {}
        self._groups: dict[Key, dict[tuple[str, str], _Entry]] = {}
        self._run_of: dict[Key, str] = {}
        self._buried: dict[tuple[str, str, str], tuple[int, float]] = {}

    def run(self, namespace: str, name: str) -> Object | None:
        """The run, or None. The copy is the caller's."""
        return self.get(RUN, namespace, name)

    def runs(self) -> list[Key]:
        """The keys of all runs known."""
        return [(namespace, name) for kind, namespace, name in self._entries if kind == RUN]

    def owned(self, namespace: str, run: str) -> dict[tuple[str, str], Object]:
        """Everything that carries this run's label (its pods too), by (kind, name); the copies are the caller's.

        What an earlier run of the same name left is among it: ``scalerl.dev/run-uid`` distinguishes them.
        """
        group = self._groups.get((namespace, names.label_value(run)), {})
        return {at: msgspec.json.decode(entry.data) for at, entry in group.items()}

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object, or None. The copy is the caller's."""
        entry = self._entries.get((kind, namespace, name))
        return None if entry is None else msgspec.json.decode(entry.data)

    def version(self, kind: str, namespace: str, name: str) -> int:
        """The version of what is kept (of a deletion that is remembered too), -1 when there is nothing."""
        at = (kind, namespace, name)
        entry = self._entries.get(at)
        return self._buried_at(at) if entry is None else entry.version

    def observe(self, event: str | None, obj: Object) -> None:
        """A watch event: ``ADDED``, ``MODIFIED``, ``DELETED``, or None for an object of a list.

        An object of neither kind nor label that concerns us is passed over. ``obj`` has kind and apiVersion.
        """
        self._news(event, _ITEM.decode(msgspec.json.encode(obj)))

    def observe_raw(self, event: str | None, kind: Kind, raw: bytes | msgspec.Raw) -> tuple[Key, str]:
        """As :meth:`observe`, of an object of ``kind`` as JSON, and quicker by far.

        Returns the object's (namespace, name) and its version.
        """
        item = _ITEM.decode(raw)
        item.kind, item.apiVersion = kind.name, kind.api_version  # in a list they are said once, outside
        self._news(event, item)
        return (item.metadata.namespace, item.metadata.name), item.metadata.resourceVersion

    def remember(self, obj: Object) -> None:
        """The answer to a write of ours: kept at once, wakes no run. A dry run's answer does not belong here."""
        self._store(_ITEM.decode(msgspec.json.encode(obj)))

    def forget_missing(
        self, kind: str, present: Iterable[Key], as_of: str, *, namespace: str | None = None
    ) -> int:
        """Drop what a complete list at version ``as_of`` did not hold; returns how many, and wakes their runs.

        ``present``: (namespace, name) of all the list held, of one ``namespace`` or of all. A watch that was cut off for long starts over with a
        list, and says nothing of what went in between; this finds it.
        """
        there = set(present)
        version = _version(as_of)
        gone = [
            at
            for at, entry in self._entries.items()
            if at[0] == kind
            and namespace in (None, at[1])
            and at[1:] not in there
            and entry.version <= version
        ]
        for at in gone:
            self._drop(at, version)
        return len(gone)

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """(kind, namespace, name) of everything kept."""
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def _news(self, event: str | None, item: _Item) -> None:
        if event == "DELETED":
            self._remove(item)
        elif self._store(item):
            self._wake_group(item.metadata.namespace, _label(item))

    def _store(self, item: _Item) -> bool:
        """Keep ``item`` if it is newer than what is kept; True if that changed anything."""
        metadata = item.metadata
        at = (item.kind, metadata.namespace, metadata.name)
        version = _version(metadata.resourceVersion)
        label = _label(item)
        known = self._entries.get(at)
        if not label:
            # Our label was removed: the run is reconciled, and the object is no longer listed as its own.
            if known is not None and version > known.version:
                self._drop(at, version)
            return False
        if known is not None and version <= known.version:
            return False
        if known is None and version <= self._buried_at(at):
            return False
        if (metadata.labels or {}).get(names.COMPONENT) == names.DECISIONS:
            item.data = msgspec.UNSET
        if item.kind == "Pod":  # applied by others: its writers are not read
            metadata.managedFields = None
        entry = _Entry(metadata.uid, version, msgspec.json.encode(item), (at[1], label))
        if known is not None and known.group != entry.group:
            self._leave(at, known)
            self._wake_group(*known.group)
        self._entries[at] = entry
        if at[0] == RUN:
            self._run_of[entry.group] = at[2]
        else:
            self._groups.setdefault(entry.group, {})[at[0], at[2]] = entry
        return True

    def _remove(self, item: _Item) -> None:
        metadata = item.metadata
        at = (item.kind, metadata.namespace, metadata.name)
        known = self._entries.get(at)
        if known is not None and known.uid == metadata.uid:
            self._drop(at, _version(metadata.resourceVersion))
        elif known is None:
            self._bury(at, _version(metadata.resourceVersion))

    def _drop(self, at: tuple[str, str, str], version: int) -> None:
        entry = self._entries.pop(at)
        self._bury(at, max(version, entry.version))
        if at[0] == RUN:
            del self._run_of[entry.group]
            self._wake((at[1], at[2]))
        else:
            self._leave(at, entry)
            self._wake_group(*entry.group)

    def _leave(self, at: tuple[str, str, str], entry: _Entry) -> None:
        group = self._groups[entry.group]
        del group[at[0], at[2]]
        if not group:
            del self._groups[entry.group]

    def _wake_group(self, namespace: str, label: str) -> None:
        name = self._run_of.get((namespace, label))
        if name is not None:
            self._wake((namespace, name))

    def _bury(self, at: tuple[str, str, str], version: int) -> None:
        now = self._clock()
        while self._buried and (oldest := next(iter(self._buried))) and self._buried[oldest][1] < now:
            del self._buried[oldest]
        self._buried.pop(at, None)
        self._buried[at] = (version, now + BURIED_SECONDS)

    def _buried_at(self, at: tuple[str, str, str]) -> int:
        version, until = self._buried.get(at, (-1, 0.0))
        return version if until >= self._clock() else -1


def _label(item: _Item) -> str:
    if item.kind == RUN:
        return names.label_value(item.metadata.name)
    return (item.metadata.labels or {}).get(names.RUN, "")


def _version(resource_version: str) -> int:
    """Resource versions as numbers: Kubernetes lets clients compare those of one kind."""
    return int(resource_version or 0)
