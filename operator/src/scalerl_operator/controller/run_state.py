"""What the operator remembers of a run between two reconciles. All of it can be lost: it saves calls, and keeps them rare."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from scalerl_operator.autoscaling.loop import AutoscalerLoop
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

REPAIR_SECONDS: Final = 2.0
"""The first repair of an object comes at once, the next after this pause, each further one after twice the pause before."""
LONGEST_REPAIR_SECONDS: Final = 300.0

ObjectName = tuple[str, str]
"""(kind, name)."""


@dataclass(frozen=True)
class Repair:
    """count: repairs in a row. last: when the latest was made, Unix seconds. due: when a withheld one may be made."""

    count: int
    last: float
    due: float = 0.0


@dataclass(frozen=True)
class Settled:
    """An object after our last write. rendered: hash of what was applied. content: hash of what the object then held."""

    rendered: str
    content: int


@dataclass
class RunState:
    """The memory of one run, by uid in the reconciler; dropped when the run is gone or another process leads."""

    status_written: float = 0.0
    """When the status was written last, Unix seconds, as all times here."""
    fingerprint: int | None = None
    """Of the run's objects, when all were as rendered."""
    spec_hashes: tuple[int, dict[Role, str]] | None = None
    """metadata.generation, and by role the hash that the Jobs of that spec carry."""
    blocked: Problem | None = None
    """Why an object of the run could not be made at the last reconcile."""

    token: str = ""
    token_checked: float = 0.0
    token_doubted: bool = False
    """A pod did not find the Secret, which cannot be watched."""
    pod_searched: float = 0.0
    """When the coordinator's pod was looked for by name."""

    settled: dict[ObjectName, Settled] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    """uids of objects whose fields we hold by apply, not by having created them."""
    repairs: dict[ObjectName, Repair] = field(default_factory=dict)
    size_refused: tuple[Any, float, Problem] | None = None
    """Size of the claim that the API server refused, when, and why."""

    claim_asked: tuple[float, Object | None] = (0.0, None)
    events_asked: tuple[float, Problem | None] = (0.0, None)
    queue_asked: tuple[float, str] = (0.0, "")

    autoscaler: AutoscalerLoop | None = None

    def may_repair(self, what: ObjectName, now: float) -> bool:
        """Whether an object that somebody else changed may be repaired now; if so, the repair is counted."""
        before = self.repairs.get(what)
        if before is None or not _is_recent(before, now):
            self.repairs[what] = Repair(1, now)
            return True
        pause = min(REPAIR_SECONDS * 2.0 ** min(before.count - 1, 16), LONGEST_REPAIR_SECONDS)
        if 0 <= now - before.last < pause:
            self.repairs[what] = Repair(before.count, before.last, before.last + pause)
            return False
        self.repairs[what] = Repair(before.count + 1, now)
        return True

    def next_repair_seconds(self, now: float) -> float | None:
        """In how many seconds a withheld repair is due; None: none is withheld."""
        waits = (repair.due - now for repair in self.repairs.values())
        return min((wait for wait in waits if 0 < wait <= LONGEST_REPAIR_SECONDS), default=None)

    def repaired_lately(self, now: float) -> bool:
        """Whether somebody else changed an object of the run a short while ago."""
        return any(_is_recent(repair, now) for repair in self.repairs.values())


def _is_recent(repair: Repair, now: float) -> bool:
    return now - repair.last <= 2 * LONGEST_REPAIR_SECONDS


class KnownRuns:
    """The state of each run by its uid, and which run has which name now. forget: called with the uid of a run that is gone."""

    def __init__(self, forget: Callable[[str], Awaitable[None]]) -> None:
        self._forget = forget
        self._uids: dict[Key, str] = {}
        self._keys: dict[str, Key] = {}
        self._states: dict[str, RunState] = {}

    def key(self, uid: str) -> Key | None:
        """The run with that uid."""
        return self._keys.get(uid)

    async def state(self, key: Key, uid: str | None) -> RunState | None:
        """The state of the run that has the name now; None where there is none. One that had it before is forgotten."""
        before = self._uids.get(key)
        if before is not None and before != uid:
            await self.forget(before)
        if uid is None:
            return None
        self._uids[key], self._keys[uid] = uid, key
        return self._states.setdefault(uid, RunState())

    async def forget(self, uid: str) -> None:
        """Forgets a run for which nothing is left to do; it may exist for long, held by another's finalizer."""
        key = self._keys.pop(uid, None)
        if key is not None and self._uids.get(key) == uid:
            del self._uids[key]
        state = self._states.pop(uid, None)
        if state is not None and state.autoscaler is not None:
            state.autoscaler.close()
        await self._forget(uid)

    async def forget_all(self) -> None:
        for uid in list(self._states):
            await self.forget(uid)
