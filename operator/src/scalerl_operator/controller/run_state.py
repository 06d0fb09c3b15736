"""The state of runs between their reconciles (:class:`RunState`), which saves calls to the API server and may be lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from scalerl_autoscaling.autoscaler import Autoscaler
from scalerl_lifecycle.lifecycle_types import Problem
from scalerl_operator.kube.types import Key, Object

REPAIR_SECONDS: Final = 2.0
"""Between the first and the second repair of an object; the pause doubles with each further one."""
MAX_REPAIR_SECONDS: Final = 300.0

ObjectName = tuple[str, str]
"""(kind, name)."""


@dataclass(frozen=True)
class Repair:
    """Consecutive repairs of an object.

    Attributes:
        last: when the last one was made, Unix seconds.
        due: when the next one may be made, if it has been put off.
    """

    count: int
    last: float
    due: float = 0.0


@dataclass
class RunState:
    """The state of one run between reconciles; dropped when the run is gone or this process no longer leads. Times are Unix
    seconds."""

    status_written: float = 0.0
    """When the status was last written."""
    pruned: tuple[Object, Object] | None = None
    """That status as sent and as stored, where an older CRD drops fields."""
    fingerprint: int | None = None
    """Of the run's objects, when all were applied."""
    blocked: Problem | None = None
    """Why an object of the run could not be created at the last reconcile."""

    token: str = ""
    token_checked: float = 0.0
    """When the Secret was last read."""
    token_unverified: bool = False
    """A pod did not find the Secret, which cannot be watched."""
    pod_searched: float = 0.0
    """When the coordinator's pod was last searched by name."""
    terminating: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By uid of each pod that is being deleted: its deletionTimestamp, and when it was first seen with that, by a monotonic clock."""

    applied_hashes: dict[ObjectName, tuple[str, int]] = field(default_factory=dict)
    """Hashes of each object as rendered, and of its content after it was applied."""
    applied: set[str] = field(default_factory=set)
    """uids of objects whose fields the operator owns by apply, not by creation."""
    repairs: dict[ObjectName, Repair] = field(default_factory=dict)
    refused: dict[ObjectName, Problem] = field(default_factory=dict)
    """Why the API server refused the last repair of an object, until one succeeds or the object needs none."""
    size_refused: tuple[Any, float, Problem] | None = None
    """Size of the claim that the API server refused, when, and why."""

    claim_read: tuple[float, Object | None] = (0.0, None)
    """When the claim was last read, and the claim."""
    events_read: tuple[float, Problem | None] = (0.0, None)
    """When the Events of a pod were last read, and the problem."""
    placement: tuple[tuple[str, str], str] = (("", ""), "")
    """uid and admission of the run's Workload, and :attr:`.Gang.placement`."""
    unread_flavors: str = ""
    """A message if the operator may not read the ResourceFlavors of that admission."""
    priority_read: tuple[float, str, int | None] = (0.0, "", None)
    """When the class of the run's priority was last read, its name, and its value."""
    workload_refusal: str = ""
    """Why the API server refused the operator's status of the run's Workload."""
    queue_read: tuple[float, str] = (0.0, "")
    """When the run's queue was last read, and the problem."""

    record_tried: float | None = None
    """When the record of a deleted run was first tried to be written."""

    autoscaler: Autoscaler | None = None

    def terminating_seconds(self, objects: Iterable[Object], now: float) -> dict[str, float]:
        """For how long each pod has been seen to be deleted, by uid. An object's own times are those of another clock.

        Args:
            now: by a monotonic clock, since a corrected one would make pods count as lost that are ending.
        """
        before, self.terminating = self.terminating, {}
        for obj in objects:
            metadata = obj["metadata"]
            if obj["kind"] == "Pod" and (deleted := metadata.get("deletionTimestamp")) is not None:
                known, since = before.get(metadata["uid"], (deleted, now))
                # A deletion with a shorter grace period begins again.
                self.terminating[metadata["uid"]] = (deleted, since if known == deleted else now)
        return {uid: now - since for uid, (_, since) in self.terminating.items()}

    def may_repair(self, key: ObjectName, now: float) -> bool:
        """Whether an object that another writer has changed may be repaired now; if so, counts the repair."""
        before = self.repairs.get(key)
        if before is None or not _is_recent(before, now):
            self.repairs[key] = Repair(1, now)
            return True
        pause = min(REPAIR_SECONDS * 2.0 ** min(before.count - 1, 16), MAX_REPAIR_SECONDS)
        if 0 <= now - before.last < pause:
            self.repairs[key] = Repair(before.count, before.last, before.last + pause)
            return False
        self.repairs[key] = Repair(before.count + 1, now)
        return True

    def next_repair_seconds(self, now: float) -> float | None:
        """Seconds until a repair that was put off is due; None: there is none."""
        waits = (repair.due - now for repair in self.repairs.values())
        return min((wait for wait in waits if 0 < wait <= MAX_REPAIR_SECONDS), default=None)

    def repaired_lately(self, now: float) -> bool:
        """Whether an object of the run was repaired within twice :data:`MAX_REPAIR_SECONDS`."""
        return any(_is_recent(repair, now) for repair in self.repairs.values())


def _is_recent(repair: Repair, now: float) -> bool:
    return now - repair.last <= 2 * MAX_REPAIR_SECONDS


class KnownRuns:
    """The uid and the state of each run. forget: called with the key of a run that is gone."""

    def __init__(self, forget: Callable[[Key], Awaitable[None]]) -> None:
        self._forget = forget
        self._runs: dict[Key, tuple[str, RunState]] = {}

    async def state(self, key: Key, uid: str | None) -> RunState | None:
        """The state of the run with that uid; None: there is no run. Forgets an earlier run of the same name."""
        known = self._runs.get(key)
        if known is not None and known[0] != uid:
            await self.forget(key)
        return None if uid is None else self._runs.setdefault(key, (uid, RunState()))[1]

    async def forget(self, key: Key) -> None:
        """Forgets a run that is deleted, or that only another finalizer keeps."""
        _, state = self._runs.pop(key, ("", RunState()))
        if state.autoscaler is not None:
            state.autoscaler.close()
        await self._forget(key)

    async def forget_all(self) -> None:
        for key in list(self._runs):
            await self.forget(key)
