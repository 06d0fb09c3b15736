"""A unit: the processes that live and die together, restarted with back-off.

A container of a service is a unit of one; the ranks of a trainer are one unit.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from scalerl_api import process as api
from scalerl_operator.local import probes
from scalerl_operator.local.process import ChildProcess, Command
from scalerl_operator.policy import restarts
from scalerl_operator.workloads import Container, Lifetime, Role

_TELLING = (api.BAD_INPUT_EXIT_CODE, api.DIVERGED_EXIT_CODE)


class State(enum.StrEnum):
    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    BACK_OFF = "back-off"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Event:
    """Something that happened to a unit, for a person."""

    unit: str
    text: str
    is_problem: bool = False


@dataclass(frozen=True)
class Failure:
    """A unit that is not started again."""

    unit: str
    role: Role
    reason: str
    bad_input: bool
    exit_code: int | None
    log: str


@dataclass(frozen=True)
class Member:
    """One process of a unit. ``command`` gets the number of the start and is asked anew for each."""

    name: str
    container: Container
    host: str
    ports: dict[str, int]
    command: Callable[[int], Command]


@dataclass
class UnitStatus:
    """What a view shows of a unit; times are ``time.monotonic()``."""

    name: str
    role: Role
    state: State = State.PENDING
    restarts: int = 0
    since: float = field(default_factory=time.monotonic)
    first_ready: float | None = None
    last_end: str = ""


class Unit:
    """Supervises its members until they are done, failed for good, or told to stop.

    index: of the replica; 0 for a gang. essential: whether the run ends when it fails for good.
    on_start: called before each start with its number (a gang takes its new rendezvous port here).
    may_leave: asked when all members have exited 0; False means that they left too early.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        lifetime: Lifetime,
        members: Sequence[Member],
        policy: restarts.RestartPolicy,
        *,
        on_event: Callable[[Event], None],
        may_leave: Callable[[Lifetime], Awaitable[bool]],
        on_start: Callable[[int], None] = lambda start: None,
        index: int = 0,
        essential: bool = True,
    ) -> None:
        self.name = name
        self.index = index
        self.essential = essential
        self.lifetime = lifetime
        self.status = UnitStatus(name, role)
        self._members = tuple(members)
        self._policy = policy
        self._on_event = on_event
        self._may_leave = may_leave
        self._on_start = on_start
        self._stopping = asyncio.Event()
        self._processes: list[ChildProcess] = []
        self._ready: dict[str, float] = {}
        self._record = restarts.Record()
        self._failed: Failure | None = None

    async def run(self) -> Failure | None:
        """Until done or stopped (None), or failed for good. Nothing of the unit runs afterwards."""
        start = 0
        while not self._stopping.is_set():
            start += 1
            try:
                end, culprit = await self._once(start)
            except OSError as error:
                self._to(State.FAILED)
                reason = f"cannot be started: {error}"
                self._event(reason, True)
                return Failure(self.name, self.status.role, reason, False, None, "")
            finally:
                await self._end_all()
            if self._stopping.is_set():
                break
            if end.exit_code == 0 and await self._has_finished():
                break
            if self._stopping.is_set():
                break
            outcome = restarts.decide(self._policy, self._record, end)
            self.status.last_end = end.describe()
            if isinstance(outcome, restarts.GiveUp):
                return self._give_up(outcome, end, culprit, start)
            self._record = outcome.record
            self.status.restarts += 1
            self._to(State.BACK_OFF)
            self._event(
                f"{culprit.name} {end.describe()}; starting again in {outcome.delay_seconds:g} s", True
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), outcome.delay_seconds)
        self._to(State.DONE)
        return None

    def stop(self) -> None:
        """Ask for an orderly end; :meth:`run` returns once everything is gone."""
        self._stopping.set()
        if self.status.state not in (State.DONE, State.FAILED):
            self._to(State.STOPPING)
        for process in self._processes:
            process.stop()

    def kill(self) -> None:
        """End everything now; :meth:`run` returns once it is gone."""
        self._stopping.set()
        for process in self._processes:
            process.kill()

    async def _has_finished(self) -> bool:
        """Was it time to leave? Asking may take long; a stop does not wait for the answer."""
        if self.lifetime is Lifetime.ONCE:
            return True
        asked = asyncio.ensure_future(self._may_leave(self.lifetime))
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({asked, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return asked.done() and asked.result()
        finally:
            for task in (asked, stopped):
                task.cancel()
            await asyncio.gather(asked, stopped, return_exceptions=True)

    async def _once(self, start: int) -> tuple[restarts.End, Member]:
        """Start all members; returns at the first end that decides the unit's fate, and whose it was."""
        self._on_start(start)
        self._ready.clear()
        self._to(State.STARTING)
        waits: dict[asyncio.Task[int | restarts.Cause], Member] = {}
        try:
            for member in self._members:
                process = ChildProcess.start(member.command(start))
                self._processes.append(process)
                waits[asyncio.create_task(process.wait())] = member
                waits[asyncio.create_task(self._probe(member))] = member
            return await self._first_end(waits)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _first_end(
        self, waits: dict[asyncio.Task[int | restarts.Cause], Member]
    ) -> tuple[restarts.End, Member]:
        pending = set(waits)
        left = {member.name for member in self._members}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # Noticed in the same moment: a code with a meaning tells more than a crash, a crash more than a
            # clean exit.
            for task in sorted(done, key=lambda t: (t.result() not in _TELLING, t.result() == 0)):
                member, result = waits[task], task.result()
                since = self._ready.get(member.name)
                ready_seconds = None if since is None else time.monotonic() - since
                if isinstance(result, restarts.Cause):
                    return restarts.End(result, None, ready_seconds), member
                left.discard(member.name)
                if result != 0 or not left:
                    return restarts.End(restarts.Cause.EXIT, result, ready_seconds), member
                # The others go on; nobody must miss the answers of one that has left in order.
                for other in [t for t in pending if waits[t] is member]:
                    other.cancel()
                    pending.discard(other)

    async def _probe(self, member: Member) -> restarts.Cause:
        def on_ready(ready: bool) -> None:
            if ready and self.lifetime is not Lifetime.ONCE:
                self._ready.setdefault(member.name, time.monotonic())
                self._update_ready()

        cause = await probes.watch(member.container, member.host, member.ports, on_ready)
        self._event(f"{member.name} does not answer its {cause}", True)
        return cause

    def _update_ready(self) -> None:
        if self._stopping.is_set() or len(self._ready) < len(self._members):
            return
        if self.status.state is not State.READY:
            self._to(State.READY)
            if self.status.first_ready is None:
                self.status.first_ready = self.status.since

    async def _end_all(self) -> None:
        """See that no process of this start is left: stop, and after the grace the subreaper kills."""
        asked_to_stop = self._stopping.is_set()
        for process in self._processes:
            if asked_to_stop:
                process.stop()
            else:
                process.kill()
        for process in self._processes:
            await process.wait()
        self._processes.clear()

    def _give_up(self, outcome: restarts.GiveUp, end: restarts.End, culprit: Member, start: int) -> Failure:
        self._to(State.FAILED)
        reason = f"{culprit.name} {end.describe()}; {outcome.reason}"
        self._event(reason, True)
        log = str(culprit.command(start).log)
        return Failure(self.name, self.status.role, reason, outcome.bad_input, end.exit_code, log)

    @property
    def ports(self) -> dict[str, int]:
        """By name; the containers of a replica share them."""
        return self._members[0].ports

    def pids(self) -> tuple[int, ...]:
        """Pids of the members' own processes, as far as known."""
        return tuple(p.pid for p in self._processes if p.pid is not None and not p.ended)

    def _to(self, state: State) -> None:
        self.status.state = state
        self.status.since = time.monotonic()

    def _event(self, text: str, is_problem: bool = False) -> None:
        self._on_event(Event(self.name, text, is_problem))
