"""Input, memory and result of the lifecycle policy (:mod:`.lifecycle`). Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scalerl_api.conditions import Phase, Reason
from scalerl_api.wire import Status
from scalerl_operator.policy import restarts


class JobState(enum.StrEnum):
    ABSENT = "absent"
    ACTIVE = "active"
    LEAVING = "leaving"
    """Deleted, but not gone: its pods still end."""
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True)
class Ended:
    """How a container ended, with the last of its log."""

    exit_code: int
    message: str = ""


@dataclass(frozen=True)
class Job:
    """ends: of containers that ended with something else than 0. ready: all its pods are. stale: of an earlier spec.
    held: a queue has not let it begin, or has put it back. ending: it has pods that are being deleted.
    disrupted: it failed because its pods' places were taken away, or a node
    did not let them begin. failed_at: when, in unix seconds; 0 if that is not known.
    """

    state: JobState = JobState.ABSENT
    attempt: int = 0
    ends: tuple[Ended, ...] = ()
    ready: bool = False
    stale: bool = False
    held: bool = False
    ending: bool = False
    disrupted: bool = False
    failed_at: float = 0.0


@dataclass(frozen=True)
class Service:
    """restarts: the most of any one container. bad_input: a container that said that starting again cannot help."""

    ready: int = 0
    restarts: int = 0
    restarted: str = ""
    bad_input: Ended | None = None


@dataclass(frozen=True)
class LifecycleInput:
    """What is observed now. unix_seconds: the operator's clock, for back-off, drains and queues only. queued: the run is to
    wait in a queue. serving: its coordinator or generators have been made. status: the coordinator's; None while it does not answer. stop: why the autoscaler wants the run to end (its forecast, or that it is broken); empty while it does not.
    """

    unix_seconds: float
    deleting: bool = False
    suspend: bool = False
    queued: bool = False
    serving: bool = False
    prepare: Job = Job()
    trainer: Job = Job()
    coordinator: Service = Service()
    status: Status | None = None
    stop: str = ""
    generators_wanted: int = 1


class Suspension(enum.StrEnum):
    """Whether a run is held back."""

    NO = ""
    ASKED = "Asked"
    """Stopped by the autoscaler and drained; ``spec.suspend`` is yet to say so."""
    YES = "Resting"


class End(enum.StrEnum):
    COMPLETED = "Completed"
    FAILED = "Failed"


@dataclass(frozen=True)
class Outcome:
    """How a run ended for good."""

    end: End
    reason: Reason
    message: str


@dataclass(frozen=True)
class Memory:
    """What one reconcile remembers for the next, in the run's status.

    attempt: the trainer's, counted from 1; 0 before the first. last_recorded_attempt: the one whose end is in ``record`` already.
    ready_since: since when all ranks of this attempt have been up; None before. next_at: not before this time is the
    next attempt made. held_since: since when a queue has been seen to hold this attempt.
    drain_since: when the drain began that is under way.
    unreachable_since: since when the coordinator has not answered in that drain; None while it answers.
    rest: drained, and nothing is to exist until ``suspend`` is taken back. resumed: taken back, and the coordinator may
    still hold the reason it had stopped for.
    """

    attempt: int = 0
    last_recorded_attempt: int = 0
    record: restarts.Record = field(default_factory=restarts.Record)
    restarts: int = 0
    ready_since: float | None = None
    next_at: float = 0.0
    held_since: float | None = None
    drain_since: float | None = None
    unreachable_since: float | None = None
    rest: Suspension = Suspension.NO
    resumed: bool = False
    outcome: Outcome | None = None


@dataclass(frozen=True)
class LifecycleDecision:
    """What is to exist, and what is to be done.

    request_stop: the reason for which the coordinator is asked to stop; empty cancels the request; None sends nothing.
    frozen: existing objects stay as they are, also where the spec has changed.
    set_suspend: ``spec.suspend`` is to become true. release: the finalizer can be removed.
    again_seconds: seconds until the next reconcile; None waits for a change.
    """

    phase: Phase
    memory: Memory
    prepare: bool = False
    coordinator: bool = False
    generators: int = 0
    trainer: int | None = None
    frozen: bool = False
    request_stop: str | None = None
    set_suspend: bool = False
    release: bool = False
    again_seconds: float | None = None
    note: str = ""
    """What the run waits for, for people."""
