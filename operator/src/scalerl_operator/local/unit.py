"""A unit: processes that start and end together, restarted with back-off.

Each container of a service is a unit; the ranks of a trainer are one unit.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api import process as api
from scalerl_operator.local import prober
from scalerl_operator.policy import restarts
from scalerl_operator.policy.problems import last_log_line
from scalerl_operator.workloads import Container, Lifetime, Role, Workload
from scalerl_processes.child import ChildProcess, Command
from scalerl_processes.waiting import cancel, first, pause

_SIGNIFICANT = (api.BAD_INPUT_EXIT_CODE, api.DIVERGED_EXIT_CODE, api.PUBLISH_REFUSED_EXIT_CODE)


UNNEEDED_SECONDS = 300.0
"""Pause after a failure for good of a unit that the run does not need yet."""
_NEED_POLL_SECONDS = 1.0
_LAST_BYTES = 4096
"""Part of a log that is read for its last line."""


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
    """The end of a unit that is not restarted."""

    unit: str
    role: Role
    reason: str
    bad_input: bool
    exit_code: int | None
    log: str


@dataclass(frozen=True)
class Member:
    """One process of a unit.

    command: takes the number of the start, from 1.
    """

    name: str
    container: Container
    ports: dict[str, int]
    command: Callable[[int], Command]


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


class Unit:
    """Supervises its members until they are done, fail, or are stopped.

    index: of the replica; 0 for a gang.
    may_exit: called when all members have exited with 0; if it returns False, they are restarted.
    needed: whether the run needs the role now. If not, a failure for good is tried again once it does, or after
        :data:`UNNEEDED_SECONDS`.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        index: int,
        members: Sequence[Member],
        policy: restarts.RestartPolicy,
        *,
        on_event: Callable[[Event], None],
        may_exit: Callable[[Lifetime], Awaitable[bool]],
        needed: Callable[[Role], bool] = lambda role: True,
    ) -> None:
        self._needed = needed
        self.name = name
        self.index = index
        self.essential = workload.essential
        self.lifetime = workload.lifetime
        self.ports = members[0].ports
        self.status = UnitStatus(name, workload.role)
        self._members = members
        self._policy = policy
        self._on_event = on_event
        self._may_exit = may_exit
        self._stopping = asyncio.Event()
        self._processes: list[ChildProcess] = []
        self._ready: dict[str, float] = {}
        self._record = restarts.Record()

    async def run(self) -> Failure | None:
        """Returns None when done or stopped, else the failure. No process of the unit is left afterwards."""
        start = 0
        while not self._stopping.is_set():
            start += 1
            try:
                end, culprit = await self._once(start)
            except OSError as error:
                return self._fail(f"cannot be started: {error}")
            finally:
                await self._end_all()
            if self._stopping.is_set() or (end.exit_code == 0 and await self._is_done()):
                break
            log = culprit.command(start).log
            line = _last_line(log)
            self.status.last_error = f"{culprit.name} {end.describe()}" + (f": {line}" if line else "")
            outcome = restarts.decide(self._policy, self._record, end)
            if isinstance(outcome, restarts.GiveUp):
                reason = f"{culprit.name} {end.describe()}; {outcome.reason}"
                if self._needed(self.status.role):
                    return self._fail(
                        reason, bad_input=outcome.bad_input, exit_code=end.exit_code, log=str(log)
                    )
                await self._wait_until_needed(reason)
                continue
            self._record = outcome.record
            self.status.restarts += 1
            self._to(UnitState.BACK_OFF)
            text = f"{self.status.last_error}; restarting in {outcome.delay_seconds:g} s"
            self._on_event(Event(self.name, text, is_problem=True))
            await pause(outcome.delay_seconds, until=self._stopping)
        self._to(UnitState.DONE)
        return None

    async def _wait_until_needed(self, reason: str) -> None:
        """Waits until the run needs the unit, which has failed, or :data:`UNNEEDED_SECONDS`; the next failures count anew."""
        self._record = restarts.Record()
        self.status.restarts += 1
        self._to(UnitState.BACK_OFF)
        text = f"{reason}; the run does not need it before mid-training ends, and then starts it again"
        self._on_event(Event(self.name, text, is_problem=True))
        end = time.monotonic() + UNNEEDED_SECONDS
        while not self._stopping.is_set() and time.monotonic() < end and not self._needed(self.status.role):
            await pause(_NEED_POLL_SECONDS, until=self._stopping)

    def stop(self) -> None:
        """Stops all processes; :meth:`run` returns once they have ended."""
        self._stopping.set()
        if self.status.state not in (UnitState.DONE, UnitState.FAILED):
            self._to(UnitState.STOPPING)
        for process in self._processes:
            process.stop()

    def kill(self) -> None:
        """Kills all processes; :meth:`run` returns once they have ended."""
        self._stopping.set()
        for process in self._processes:
            process.kill()

    async def _is_done(self) -> bool:
        """Whether the unit is not to be restarted. A stop does not wait for the answer, which may take long."""
        if self.lifetime is Lifetime.ONCE:
            return True
        return await first(self._stopping.wait(), self._may_exit(self.lifetime))

    async def _once(self, start: int) -> tuple[restarts.ProcessEnd, Member]:
        """Starts all members; returns the end that ends the unit, and its member."""
        self._ready.clear()
        self._to(UnitState.STARTING)
        tasks: dict[asyncio.Task[restarts.ProcessEnd], Member] = {}
        try:
            for member in self._members:
                process = ChildProcess.start(member.command(start))
                self._processes.append(process)
                tasks[asyncio.create_task(self._watch(member, process))] = member
            pending = set(tasks)
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # Of simultaneous ends, one with a defined exit code is most informative, one with 0 least.
                decisive = min(done, key=lambda task: _significance(task.result()))
                if decisive.result().exit_code != 0 or not pending:
                    return decisive.result(), tasks[decisive]
        finally:
            await cancel(*tasks)

    async def _watch(self, member: Member, process: ChildProcess) -> restarts.ProcessEnd:
        """Waits until a member exits or fails a probe."""
        probes = prober.watch(member.container, member.ports, lambda: self._on_ready(member))
        end: int | restarts.Cause = await first(process.wait(), probes)
        since = self._ready.get(member.name)
        ready_seconds = None if since is None else time.monotonic() - since
        if isinstance(end, int):
            return restarts.ProcessEnd(restarts.Cause.EXIT, end, ready_seconds)
        self._on_event(Event(self.name, f"{member.name} does not answer its {end}", is_problem=True))
        return restarts.ProcessEnd(end, None, ready_seconds)

    def _on_ready(self, member: Member) -> None:
        if self.lifetime is Lifetime.ONCE:
            return
        self._ready[member.name] = time.monotonic()
        if len(self._ready) == len(self._members) and self.status.state is UnitState.STARTING:
            self._to(UnitState.READY)
            self.status.last_error = ""
            if self.status.first_ready is None:
                self.status.first_ready = self.status.since

    async def _end_all(self) -> None:
        """Ends the remaining processes: stops them during a stop, else kills them."""
        for process in self._processes:
            if self._stopping.is_set():
                process.stop()
            else:
                process.kill()
        for process in self._processes:
            await process.wait()
        self._processes.clear()

    def _fail(
        self, reason: str, *, bad_input: bool = False, exit_code: int | None = None, log: str = ""
    ) -> Failure:
        self._to(UnitState.FAILED)
        self._on_event(Event(self.name, reason, is_problem=True))
        return Failure(self.name, self.status.role, reason, bad_input, exit_code, log)

    def _to(self, state: UnitState) -> None:
        self.status.state = state
        self.status.since = time.monotonic()


def _significance(end: restarts.ProcessEnd) -> tuple[bool, bool]:
    return end.exit_code not in _SIGNIFICANT, end.exit_code == 0


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            line = last_log_line(file.read().decode(errors="replace"))
            return (
                "" if line.startswith("--- ") else line
            )  # the line that marks a start: the process printed nothing
    except OSError:
        return ""
