"""Input, persisted state and result of the lifecycle (:mod:`.lifecycle`), its problems, and the times between reconciles. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.reasons import Reason
from scalerl_api.wire import Status
from scalerl_lifecycle import restarts
from scalerl_lifecycle.edits_of_run import SpecEdit

DRAIN_SECONDS: Final = 1800.0
"""Timeout of the drain of a run that is suspended or deleted: it finishes its step and writes a checkpoint."""

GATED_SECONDS: Final = 30.0
"""How long a queue may gate the trainer before generators and coordinator are deleted too: it admits most attempts within a
second."""
POLL_SECONDS: Final = 5.0
"""Between two reconciles of a run with a coordinator, whose status is polled."""
ASK_AGAIN_SECONDS: Final = 2.0
"""The same, while the next step depends on the answer."""
START_DELAY_SECONDS: Final = 300.0
"""The longest delay of the next attempt of a trainer that has been ready before. With twenty restarts, an obstacle (a detached
volume, a device plug-in) may last an hour."""


class JobState(enum.StrEnum):
    ABSENT = "absent"
    ACTIVE = "active"
    TERMINATING = "terminating"
    """Deleted; its pods are terminating."""
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True)
class ContainerExit:
    """How a container ended, with the end of its log."""

    exit_code: int
    message: str = ""


@dataclass(frozen=True)
class Job:
    """Observation of a Job.

    Attributes:
        attempt: of the trainer, from 1; 0 for ``prepare``.
        exits: of containers with an exit code other than 0.
        ready: all pods are ready.
        stale: created for an earlier spec.
        gated: a queue has not admitted it, or has requeued it.
        pods_terminating: some of its pods are being deleted.
        disrupted: it failed because its pods were evicted or preempted, or a node did not start them.
        failed_at: unix seconds; 0 if unknown.
        abandoned: the last attempt of a Job that only pods on lost nodes keep; 0 without one.
    """

    state: JobState = JobState.ABSENT
    attempt: int = 0
    exits: tuple[ContainerExit, ...] = ()
    ready: bool = False
    stale: bool = False
    gated: bool = False
    pods_terminating: bool = False
    disrupted: bool = False
    failed_at: float = 0.0
    abandoned: int = 0


@dataclass(frozen=True)
class Service:
    """Observation of the replicas of a role.

    Attributes:
        restarts: most restarts of any one container.
        restarted: that container.
        bad_input: the end of a container with wrong input, for which a restart cannot help.
        given_up: the last end of a container whose starts all fail, where its runtime says so; a cluster's tries on without end.
        lost: the greatest attempt of a coordinator on a lost node; 0 without one.
        starting: number of replicas that are not ready and had neither such end.
    """

    ready: int = 0
    starting: int = 0
    restarts: int = 0
    restarted: str = ""
    bad_input: ContainerExit | None = None
    given_up: ContainerExit | None = None
    lost: int = 0


@dataclass(frozen=True)
class LifecycleInput:
    """The observation of a run.

    Attributes:
        unix_seconds: the operator's clock, for back-off, drains and queues only.
        queued: a queue admits the run's Jobs.
        unadmitted: the queue has not admitted the run's gang, or has evicted it.
        serving: the coordinator or generators exist.
        environment: its servers; None: the run has none.
        status: of the coordinator; None while it does not answer.
        stop: the reason for which the autoscaler stops the run, ``FORECAST`` or ``BROKEN``; empty without one.
        steps: trained, as recorded in the run's status.
        started: a coordinator and a generator of the accepted spec are ready; others may still be those of an earlier spec.
        edit: of the spec, since the last reconcile.
        unproven: fields that have been edited and have not trained :data:`.failures.PROVEN_STEPS` steps yet.
        drain_seconds: timeout of a drain.
        gated_seconds: see :data:`GATED_SECONDS`.
    """

    unix_seconds: float
    deleting: bool = False
    suspend: bool = False
    queued: bool = False
    unadmitted: bool = False
    serving: bool = False
    prepare: Job = Job()
    trainer: Job = Job()
    coordinator: Service = Service()
    generators: Service = Service()
    environment: Service | None = None
    status: Status | None = None
    stop: str = ""
    steps: int = 0
    started: bool = True
    edit: SpecEdit = field(default_factory=SpecEdit)
    unproven: tuple[str, ...] = ()
    drain_seconds: float = DRAIN_SECONDS
    gated_seconds: float = GATED_SECONDS


class Suspension(enum.StrEnum):
    """Whether a run is suspended."""

    NO = ""
    REQUESTED = "Requested"
    """Stopped by the autoscaler and drained; ``spec.suspend`` is not true yet."""
    YES = "Suspended"


class OutcomeKind(enum.StrEnum):
    COMPLETED = "Completed"
    """Continues when a limit is raised."""
    FAILED = "Failed"
    """Continues when its spec is fixed."""
    SUSPENDED = "Suspended"
    """A run that has trained does not start with its present spec. It is not over: it continues when its spec is edited, or
    when a user suspends and resumes it."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended. It stays until an edit lets the run continue."""

    kind: OutcomeKind
    reason: Reason
    message: str


@dataclass(frozen=True)
class PersistedState:
    """What a reconcile keeps for the next one, in the run's status. Times are unix seconds of the operator's clock.

    Attributes:
        attempt: of the trainer, counted from 1; 0 before the first.
        last_recorded_attempt: the attempt whose end ``record`` has.
        restarts: of the trainer, in all.
        ready_since: since when all ranks of this attempt have been ready; None before.
        next_at: the next attempt is created at this time or later.
        gated_since: since when a queue has gated this attempt.
        drain_since: start of the present drain.
        unreachable_since: since when the coordinator has not answered in that drain; None while it answers.
        coordinator_attempt: of the coordinator, from 1; greater than that of each one on a lost node.
        suspension: the run is drained, and nothing exists until ``suspend`` becomes false.
        resumed: ``suspend`` became false, or an ended run continues, and the coordinator may still have the stop request.
        has_trained: steps, of RL or of mid-training.
        unproven_since: steps at the last edit, or resumption, of a run that has trained; None once it has trained
            :data:`.failures.PROVEN_STEPS` more.
        suspending_for: the failure for which the run drains, to be suspended.
        awaited_since: since when a run that ends has had no trainer that is ready; None otherwise.
    """

    attempt: int = 0
    last_recorded_attempt: int = 0
    record: restarts.Record = field(default_factory=restarts.Record)
    restarts: int = 0
    ready_since: float | None = None
    next_at: float = 0.0
    gated_since: float | None = None
    drain_since: float | None = None
    unreachable_since: float | None = None
    coordinator_attempt: int = 1
    suspension: Suspension = Suspension.NO
    resumed: bool = False
    has_trained: bool = False
    unproven_since: int | None = None
    suspending_for: RunOutcome | None = None
    awaited_since: float | None = None
    outcome: RunOutcome | None = None


@dataclass(frozen=True)
class Wanted:
    """The objects that are to exist.

    Attributes:
        prepare, coordinator, generators: whether they exist, with as many replicas as the plan says. Environment servers exist with
            the coordinator.
        trainer: the attempt that exists, from 1; None: none.
    """

    prepare: bool = False
    coordinator: bool = False
    generators: bool = False
    trainer: int | None = None


NOTHING: Final = Wanted()


@dataclass(frozen=True)
class LifecycleDecision:
    """The objects that are to exist, and the actions.

    Attributes:
        update_existing: whether existing objects follow the spec; False during a drain.
        request_stop: the reason of the stop request to the coordinator; empty cancels the request; None sends nothing.
        set_suspend: set ``spec.suspend`` to true.
        release: remove the finalizer.
        again_seconds: until the next reconcile; None: at the next change.
        waiting_for: what the run waits for, for users.
    """

    phase: Phase
    persisted: PersistedState
    wanted: Wanted = NOTHING
    update_existing: bool = True
    request_stop: str | None = None
    set_suspend: bool = False
    release: bool = False
    again_seconds: float | None = None
    waiting_for: str = ""


@dataclass(frozen=True)
class Problem:
    """Why a condition does not have its healthy value.

    Attributes:
        reason: the phase, if the phase itself is the reason.
        message: of the cluster.
    """

    reason: Reason | Phase
    message: str


def last_log_line(text: str) -> str:
    """The last line of a role's log, without the time and the name of the logger; empty without one.

    >>> last_log_line("...\\n2026-01-01 00:00:00,000 ERROR scalerl_trainer.prepare model.path: not found\\n")
    'model.path: not found'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    parts = lines[-1].split(" ", 4)
    logged = len(parts) == 5 and parts[2] in ("ERROR", "CRITICAL", "WARNING", "INFO")
    return (parts[4] if logged else lines[-1])[:1000]


def no_later(before: float | None, now: float) -> float:
    """The earlier of ``before`` and ``now``: a clock that was set back must not give a time in the future."""
    return now if before is None else min(before, now)


def is_pending(wait: float) -> bool:
    """Whether a wait of so many seconds is left. One longer than any delay is due to a clock that was set back; stored times are
    rounded up to whole seconds."""
    return 0 < wait <= START_DELAY_SECONDS + 1
