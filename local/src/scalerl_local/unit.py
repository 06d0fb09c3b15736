"""A unit: processes that start and end together.

It does what a kubelet does: it starts its containers, probes them, and restarts those of a service with back-off. Each container
of a service is a unit, and so are the ranks of a trainer, of which a unit makes one attempt: the lifecycle decides on the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scalerl_api import process as api
from scalerl_lifecycle import restarts
from scalerl_lifecycle.lifecycle_types import last_log_line
from scalerl_lifecycle.workloads import Container, Lifetime, Role, Workload
from scalerl_local import prober
from scalerl_local.run_view import Event, Failure, UnitState, UnitStatus
from scalerl_processes.child import ChildProcess, Command
from scalerl_processes.waiting import cancel, first, pause

_SIGNIFICANT = (api.BAD_INPUT_EXIT_CODE, api.DIVERGED_EXIT_CODE, api.PUBLISH_REFUSED_EXIT_CODE)
GIVEN_UP_SECONDS: Final = 300.0
"""Delay of the next start of a service of which no start succeeds: a kubelet's longest back-off."""
_LAST_BYTES = 4096
"""Part of a log that is read for its last line."""


@dataclass(frozen=True)
class Member:
    """One process of a unit.

    Attributes:
        command: takes the number of the start, from 1.
    """

    name: str
    container: Container
    ports: dict[str, int]
    command: Callable[[int], Command]


class Unit:
    """Supervises its members until they are done, fail, or are stopped.

    Args:
        index: of the replica; 0 for a gang.
        on_change: called when the unit is ready, or has ended.
        is_ending: whether the run ends, so that a service whose process has exited with 0 is not restarted.
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
        on_change: Callable[[], None] = lambda: None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.index = index
        self.essential = workload.essential
        self.lifetime = workload.lifetime
        self.ports = members[0].ports
        self.status = UnitStatus(name, workload.role)
        self.failure: Failure | None = None
        """The last end, if a restart cannot help; of a gang, if it has failed. None once the unit is ready."""
        self._members = members
        self._policy = policy
        self._on_event = on_event
        self._on_change = on_change
        self._is_ending = is_ending
        self._stopping = asyncio.Event()
        self._processes: list[ChildProcess] = []
        self._ready: dict[str, float] = {}
        self._record = restarts.Record()
        self._starts = 0

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def quick_restarts(self) -> int:
        """Consecutive failures of a service that is not ready."""
        return 0 if self.status.state is UnitState.READY else self._record.consecutive_failures

    def renew(self) -> None:
        """Makes the unit as new, to be run again."""
        self._stopping.clear()
        self.failure = None
        self._to(UnitState.PENDING)

    async def run(self) -> None:
        """Returns when done, failed, or stopped. No process of the unit is left afterwards."""
        while not self.is_stopping:
            self._starts += 1
            try:
                end, culprit = await self._once(self._starts)
            except OSError as error:
                self._give_up(f"cannot be started: {error}")
                delay = GIVEN_UP_SECONDS
            else:
                if self.is_stopping or (end.exit_code == 0 and await self._is_done()):
                    break
                delay = self._note(end, culprit)
            finally:
                await self._end_all()
            if self.failure is not None and self.lifetime is not Lifetime.SERVICE:
                self._to(UnitState.FAILED)
                return
            self._on_change()
            await pause(delay, until=self._stopping)
            self.status.restarts += not self.is_stopping
        self._to(UnitState.DONE)

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
        """Whether a unit whose processes have all exited with 0 has done its work: of a service, at the end of the run alone."""
        if self.lifetime is not Lifetime.SERVICE:
            return True
        self._on_change()  # the coordinator may have finished since it was last asked
        await pause(self._policy.first_delay_seconds, until=self._stopping)
        return self.is_stopping or self._is_ending()

    def _note(self, end: restarts.ProcessExit, culprit: Member) -> float:
        """Notes how a start has failed; returns the seconds until the next one."""
        log = culprit.command(self._starts).log
        line = _last_line(log)
        how = f"{culprit.name} {end.describe()}"
        self.status.last_error = how + (f": {line}" if line else "")
        if self.lifetime is Lifetime.GANG:
            bad_input = end.exit_code == api.BAD_INPUT_EXIT_CODE
            self.failure = Failure(self.name, self.status.role, how, bad_input, end.exit_code, str(log), line)
            return 0.0
        own = (
            self.status.role is Role.ENVIRONMENT
        )  # a program of the user's, whose exit codes say nothing here
        known = replace(end, exit_code=1) if own and end.exit_code else end
        outcome = restarts.decide(self._policy, self._record, known)
        if isinstance(outcome, restarts.GiveUp):
            self._give_up(f"{how}; {outcome.reason}", outcome.bad_input, end.exit_code, str(log), line)
            return GIVEN_UP_SECONDS
        self._record = outcome.record
        self._to(UnitState.BACK_OFF)
        text = f"{self.status.last_error}; restarting in {outcome.delay_seconds:g} s"
        self._on_event(Event(self.name, text, is_problem=True))
        return outcome.delay_seconds

    def _give_up(
        self,
        reason: str,
        bad_input: bool = False,
        exit_code: int | None = None,
        log: str = "",
        line: str = "",
    ) -> None:
        self._record = restarts.Record()
        self._to(UnitState.BACK_OFF)
        self.failure = Failure(self.name, self.status.role, reason, bad_input, exit_code, log, line)
        if self.lifetime is not Lifetime.GANG:  # the lifecycle may start another attempt
            text = reason if self.essential else f"the run continues without it: {reason}"
            self._on_event(Event(self.name, text, is_problem=True))

    async def _once(self, start: int) -> tuple[restarts.ProcessExit, Member]:
        """Starts all members; returns the end that ends the unit, and its member."""
        self._ready.clear()
        self._to(UnitState.STARTING)
        tasks: dict[asyncio.Task[restarts.ProcessExit], Member] = {}
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

    async def _watch(self, member: Member, process: ChildProcess) -> restarts.ProcessExit:
        """Waits until a member exits or fails a probe."""
        probes = prober.watch(member.container, member.ports, lambda: self._on_ready(member))
        end: int | restarts.Cause = await first(process.wait(), probes)
        since = self._ready.get(member.name)
        ready_seconds = None if since is None else time.monotonic() - since
        if isinstance(end, int):
            return restarts.ProcessExit(restarts.Cause.EXIT, end, ready_seconds)
        if not self.is_stopping:
            self._on_event(Event(self.name, f"{member.name} does not answer its {end}", is_problem=True))
        return restarts.ProcessExit(end, None, ready_seconds)

    def _on_ready(self, member: Member) -> None:
        if self.lifetime is Lifetime.ONCE:
            return
        self._ready[member.name] = time.monotonic()
        if len(self._ready) == len(self._members) and self.status.state is UnitState.STARTING:
            self._to(UnitState.READY)
            self.status.last_error = ""
            self.failure = None
            self._on_change()
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

    def _to(self, state: UnitState) -> None:
        self.status.state = state
        self.status.since = time.monotonic()


def _significance(end: restarts.ProcessExit) -> tuple[bool, bool]:
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
