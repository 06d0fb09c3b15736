"""What a runtime reports of a run, for views and summaries."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from scalerl_api.wire import Status
from scalerl_autoscaling.models import Decision
from scalerl_lifecycle.budget import Rates
from scalerl_lifecycle.lifecycle_types import ContainerExit, RunOutcome
from scalerl_lifecycle.workloads import Role


class UnitState(enum.StrEnum):
    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    BACK_OFF = "back-off"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Event:
    """An event of a unit, for users."""

    unit: str
    text: str
    is_problem: bool = False


@dataclass(frozen=True)
class Failure:
    """An end of a unit that its own restarts cannot fix.

    Attributes:
        line: the last line of its log.
        log: the path of its log; empty without one.
    """

    unit: str
    role: Role
    reason: str
    bad_input: bool = False
    exit_code: int | None = None
    log: str = ""
    line: str = ""

    @property
    def end(self) -> ContainerExit:
        """The same, for the lifecycle."""
        code = 1 if self.exit_code is None else self.exit_code
        # A signal, which `subprocess` reports as a negative number, is 128 and more of a container.
        return ContainerExit(code if code >= 0 else 128 - code, self.line or self.reason)


@dataclass
class UnitStatus:
    """The status of a unit for a view; times are of ``time.monotonic()``."""

    name: str
    role: Role
    state: UnitState = UnitState.PENDING
    restarts: int = 0
    since: float = field(default_factory=time.monotonic)
    first_ready: float | None = None
    last_error: str = ""
    """How the last start failed, with the last line of its log; empty once the unit is ready."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        elapsed_seconds: since this command started.
        status: the coordinator's last; None before the first.
        stopping: the reason of the stop; empty without one.
        eta_seconds: until the budget is used; None while unknown.
        decision: the autoscaler's last; None without one.
    """

    elapsed_seconds: float
    status: Status | None
    units: tuple[UnitStatus, ...]
    rates: Rates
    stopping: str
    eta_seconds: float | None
    decision: Decision | None = None


@dataclass
class Startup:
    """The time to the first lease.

    Attributes:
        first_lease_seconds: since the start of this command; None if there was none.
        ready_seconds: by unit, until it was first ready (``prepare``: done).
        waited_seconds: by the cause of the wait.
    """

    first_lease_seconds: float | None = None
    ready_seconds: dict[str, float] = field(default_factory=dict)
    waited_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """How the run ended.

    Attributes:
        failure: the unit that failed for good; None if none did.
        status: the coordinator's last.
        decision: the autoscaler's last; None without one.
        outcome: of the lifecycle; None if the run is suspended.
    """

    failure: Failure | None
    interrupted: bool
    status: Status | None
    startup: Startup
    peak_memory_bytes: int
    restarts: dict[str, int]
    decision: Decision | None = None
    outcome: RunOutcome | None = None
