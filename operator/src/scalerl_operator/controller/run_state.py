"""What the operator remembers of a run between two reconciles. All of it can be lost: it saves calls, and keeps them rare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from scalerl_operator.controller.autoscaler import ClusterAutoscaler
from scalerl_operator.controller.observe import Problem
from scalerl_operator.kube.types import Object
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

    autoscaler: ClusterAutoscaler | None = None

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
