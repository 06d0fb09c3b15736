"""Live copies of runs and of what belongs to them, fed by watch events: what a reconcile looks at first.

Objects are kept as JSON bytes without ``managedFields`` and decoded when read: a tenth of the memory of live dicts,
and a reader may change what it got. A write's answer goes in too (:meth:`Cache.remember`), so that the next look
already sees it and the watch event that follows wakes nobody.

Order: versions of one object only go up. An event older than what is kept is dropped, a deletion counts only for
the object (uid) it names, and an answer that arrives after its object's deletion does not bring it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

Object = dict[str, Any]
Key = tuple[str, str]
"""A run: (namespace, name)."""

RUN_LABEL: Final = "scalerl.dev/run"


class Cache:
    """The objects of all runs, by kind, namespace and name.

    ``wake`` is called with a run's key whenever something of that run changed. ``label_of`` gives the value of the
    label ``scalerl.dev/run`` for a run's name (names longer than a label are shortened).
    """

    def __init__(self, wake: Callable[[Key], None], label_of: Callable[[str], str]) -> None:
        raise NotImplementedError

    def run(self, namespace: str, name: str) -> Object | None:
        """The run, or None. The caller owns the copy."""
        raise NotImplementedError

    def runs(self) -> list[Key]:
        """The keys of all runs known."""
        raise NotImplementedError

    def owned(self, namespace: str, run: str) -> dict[tuple[str, str], Object]:
        """Everything labelled as this run's (pods too), by (kind, name). Also what an earlier run of that name left."""
        raise NotImplementedError

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object of a run, or None."""
        raise NotImplementedError

    def observe(self, event: str | None, obj: Object) -> None:
        """A watch event: ``ADDED``, ``MODIFIED``, ``DELETED`` or None (part of a list). ``obj`` has kind and apiVersion."""
        raise NotImplementedError

    def remember(self, obj: Object) -> None:
        """The answer to a write of ours: kept at once, wakes nobody."""
        raise NotImplementedError

    def forget_missing(self, kind: str, present: Iterable[tuple[str, str]], as_of: str) -> int:
        """Drop what a complete list at version ``as_of`` did not hold; returns how many, and wakes their runs."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """(kind, namespace, name) of everything kept."""
        raise NotImplementedError
