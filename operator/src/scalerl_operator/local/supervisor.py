"""The local runtime: a plan as child processes of this machine, on loopback."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from scalerl_api import process as api
from scalerl_operator.local import devices
from scalerl_operator.local.ports import Ports
from scalerl_operator.local.process import Command, environment
from scalerl_operator.local.run_directory import RunDirectory
from scalerl_operator.local.unit import Event, Failure, Member, Unit, UnitStatus
from scalerl_operator.policy.restarts import RestartPolicy
from scalerl_operator.workloads import (
    ADDRESS,
    BIND,
    MASTER_PORT,
    Container,
    Lifetime,
    Plan,
    Role,
    Workload,
    expand,
    port_variable,
)

HOST: Final = "127.0.0.1"

_LOOPBACK: Final = {
    # Without these, libraries guess an interface from the host's name or its default route.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": HOST,
}

_LAST_TO_STOP = (Role.COORDINATOR,)
"""The others tell the coordinator that they leave."""


@dataclass(frozen=True)
class LocalSettings:
    """How this machine runs a plan.

    pin: CPUs by role; a role that is not named may run anywhere. Benchmarks give roles cores of
        their own, as on devices of their own.
    grace_seconds: from a stop to SIGKILL.
    orphan_grace_seconds: the same when this process has died.
    """

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    pin: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
    grace_seconds: float = 30.0
    orphan_grace_seconds: float = 5.0


class LocalRuntime:
    """Runs a plan until it is complete, a unit fails for good, or it is stopped.

    Parameters
    ----------
    plan : what to run.
    directory : claimed by this process.
    may_leave : asked when all processes of a unit have exited 0: was it time to (with a gang, is the
        run complete)? False: they are started again.
    on_event : told every start, end and restart, in words.

    Raises
    ------
    NotEnoughDevices : before anything is started.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        *,
        settings: LocalSettings | None = None,
        may_leave: Callable[[Lifetime], Awaitable[bool]],
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._settings = settings or LocalSettings()
        self._may_leave = may_leave
        self._on_event = on_event
        self._ports = Ports(HOST)
        self._devices = devices.Pool(plan)
        self._incarnation = uuid.uuid4().hex[:12]
        self._base = environment()
        self._coordinator_port = self._ports.take()
        self._stopping = asyncio.Event()
        self._scaled = asyncio.Event()
        self._tasks: dict[asyncio.Task[Failure | None], Unit] = {}
        self._seen_to: set[asyncio.Task[Failure | None]] = set()
        self._is_over = False
        self._replicas = {workload.role: workload.replicas for workload in plan.workloads}
        self.units: list[Unit] = [unit for workload in plan.workloads for unit in self._units(workload)]

    @property
    def coordinator_url(self) -> str:
        return f"http://{HOST}:{self._coordinator_port}"

    def statuses(self) -> list[UnitStatus]:
        return [unit.status for unit in self.units]

    async def run(self) -> Failure | None:
        """Start what the plan says and see it through. Nothing of it runs afterwards.

        Returns None when complete or stopped, else what failed for good.
        """
        try:
            for unit in self._of(Lifetime.ONCE):
                failed = await self._until_decided([unit])
                if failed is not None or self._stopping.is_set():
                    return failed
            rest = [*self._of(Lifetime.SERVICE), *self._of(Lifetime.GANG)]
            return await self._until_decided(rest)
        finally:
            self._is_over = True
            await self._tear_down()
            self._ports.close()

    def url(self, role: Role, port: str = "http") -> str:
        """Where the first replica of a role listens."""
        unit = next(u for u in self.units if u.status.role is role and u.index == 0)
        return f"http://{HOST}:{unit.ports[port]}"

    def replicas(self, role: Role) -> int:
        """How many there are to be."""
        return self._replicas[role]

    def most(self, role: Role) -> int | None:
        """How many replicas this machine's devices are enough for; None where none are asked for."""
        each = sum(c.resources.devices for c in self._plan.workload(role).containers)
        return self._replicas[role] + self._devices.free // each if each else None

    def leaving(self, role: Role) -> bool:
        """Whether some that were scaled away are still there."""
        return any(u.status.role is role and u.index >= self._replicas[role] for u in self.units)

    def scale(self, role: Role, replicas: int) -> None:
        """Have so many replicas of a service from now on: new ones are started, the newest are stopped in order.

        Call while :meth:`run` supervises services and :meth:`leaving` is false; does nothing once the run is ending.

        Raises:
            NotEnoughDevices, OSError: nothing was changed.
        """
        if self._is_over or self._stopping.is_set():
            return
        workload = self._plan.workload(role)
        if workload.lifetime is not Lifetime.SERVICE:
            raise ValueError(f"{role} is no service: its replicas live and die together")
        if self.leaving(role):
            raise RuntimeError(f"a {role} is still leaving; its name is not free yet")
        before = self._replicas[role]
        new: list[Unit] = []
        try:
            for index in range(before, replicas):
                new += self._replica_units(workload, index)
            self._devices.take(workload, range(before, replicas))
        except BaseException:
            for port in {port for unit in new for port in unit.ports.values()}:
                self._ports.give_back(port)
            raise
        self._replicas[role] = replicas
        for unit in [u for u in self.units if u.status.role is role and u.index >= replicas]:
            unit.stop()
        for unit in new:
            self.units.append(unit)
            self._start(unit)
        self._scaled.set()

    def stop(self) -> None:
        """Have :meth:`run` end everything in order (SIGTERM, the grace, SIGKILL) and return."""
        self._stopping.set()

    def kill(self) -> None:
        """Have :meth:`run` end everything at once and return."""
        self._stopping.set()
        for unit in self.units:
            unit.kill()

    async def _until_decided(self, units: list[Unit]) -> Failure | None:
        """Supervise ``units`` until one fails, all that can complete have, or a stop is asked for."""
        for unit in units:
            self._start(unit)
        stop = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                self._scaled.clear()
                scaled = asyncio.create_task(self._scaled.wait())
                # Also those that have ended already: a unit may fail before it is first waited for.
                waiting = {task for task in self._tasks if task not in self._seen_to}
                done, _ = await asyncio.wait({*waiting, stop, scaled}, return_when=asyncio.FIRST_COMPLETED)
                scaled.cancel()
                for task in [t for t in waiting if t in done]:
                    self._seen_to.add(task)
                    failed = self._ended(task)
                    if failed is not None:
                        return failed
                left = {unit.lifetime for task, unit in self._tasks.items() if not task.done()}
                if stop in done or not left - {Lifetime.SERVICE}:
                    return None
        finally:
            stop.cancel()

    def _start(self, unit: Unit) -> None:
        self._tasks[asyncio.create_task(unit.run(), name=unit.name)] = unit

    def _ended(self, task: asyncio.Task[Failure | None]) -> Failure | None:
        """What a unit's end means for the run; one that was scaled away is forgotten."""
        unit, failed = self._tasks[task], task.result()
        if unit.index >= self._replicas[unit.status.role]:
            del self._tasks[task]
            self.units.remove(unit)
            if not any(u.status.role is unit.status.role and u.index == unit.index for u in self.units):
                self._devices.give_back(self._plan.workload(unit.status.role).replica_name(unit.index))
            return None
        if failed is not None and not unit.essential:
            self._on_event(Event(unit.name, f"the run goes on without it: {failed.reason}", True))
            return None
        return failed

    async def _tear_down(self) -> None:
        """Stop all units, those that the others report to last. A cancellation kills instead."""
        try:
            for last in (False, True):
                tasks = [t for t, u in self._tasks.items() if (u.status.role in _LAST_TO_STOP) is last]
                for task in tasks:
                    self._tasks[task].stop()
                if tasks:
                    await asyncio.wait(tasks)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait(self._tasks)
            raise

    def _of(self, lifetime: Lifetime) -> list[Unit]:
        return [unit for unit in self.units if unit.lifetime is lifetime]

    def _units(self, workload: Workload) -> list[Unit]:
        """A unit for each container of a service, one for all of a gang."""
        if workload.lifetime is not Lifetime.GANG:
            return [unit for i in range(workload.replicas) for unit in self._replica_units(workload, i)]
        shared = {MASTER_PORT: self._ports.take()}
        members = [m for i in range(workload.replicas) for m in self._members(workload, i, shared)]
        return [
            self._unit(
                workload, str(workload.role), members, 0, on_start=partial(self._new_master_port, shared)
            )
        ]

    def _replica_units(self, workload: Workload, index: int) -> list[Unit]:
        return [self._unit(workload, m.name, [m], index) for m in self._members(workload, index, {})]

    def _unit(
        self,
        workload: Workload,
        name: str,
        members: list[Member],
        index: int,
        on_start: Callable[[int], None] = lambda start: None,
    ) -> Unit:
        return Unit(
            name,
            workload.role,
            workload.lifetime,
            members,
            self._settings.restart,
            on_event=self._on_event,
            may_leave=self._may_leave,
            on_start=on_start,
            index=index,
            essential=workload.essential,
        )

    def _members(self, workload: Workload, index: int, shared: dict[str, int]) -> list[Member]:
        """The processes of one replica."""
        replica = workload.replica_name(index)
        names = [name for container in workload.containers for name in container.ports]
        ports = {name: self._port(workload.role, name) for name in names}
        members = []
        for container in workload.containers:
            name = replica if len(workload.containers) == 1 else f"{replica}-{container.name}"
            name = str(workload.role) if workload.lifetime is Lifetime.ONCE else name
            command = partial(self._command, workload, index, container, name, ports, shared)
            members.append(Member(name, container, HOST, ports, command))
        return members

    def _port(self, role: Role, name: str) -> int:
        # Everyone is told the coordinator's address at start, so it is chosen before all others.
        return self._coordinator_port if role is Role.COORDINATOR and name == "http" else self._ports.take()

    def _new_master_port(self, shared: dict[str, int], start: int) -> None:
        """A late message of a gang that was killed must not reach the next one."""
        if start > 1:
            old, shared[MASTER_PORT] = shared[MASTER_PORT], self._ports.take()
            self._ports.give_back(old)

    def _command(
        self,
        workload: Workload,
        index: int,
        container: Container,
        name: str,
        ports: dict[str, int],
        shared: dict[str, int],
        start: int,
    ) -> Command:
        paths = self._directory.paths
        variables = {
            api.DIR: str(paths.root),
            api.NAME: workload.replica_name(index),
            api.COORDINATOR_URL: self.coordinator_url,
            api.TOKEN_FILE: str(paths.token),
            BIND: HOST,
            ADDRESS: HOST,
            **{port_variable(port): str(number) for port, number in ports.items()},
        }
        if workload.lifetime is Lifetime.GANG:
            variables |= {
                "RANK": str(index),
                "WORLD_SIZE": str(workload.replicas),
                # Each rank sees its own devices only, so the first it sees is the one.
                "LOCAL_RANK": "0",
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(shared[MASTER_PORT]),
            }
        own = {key: expand(value, variables) for key, value in container.env.items()}
        visible = ",".join(self._devices.of(workload.replica_name(index), container.name))
        return Command(
            argv=[expand(word, variables) for word in container.argv],
            env={
                **self._base,
                **_LOOPBACK,
                devices.VISIBLE: visible,
                **self._threads(workload, container),
                **variables,
                **own,
            },
            log=paths.logs / f"{name}.log",
            mark=f"{self._incarnation}/{name}/{start}",
            grace_seconds=self._settings.grace_seconds,
            orphan_grace_seconds=self._settings.orphan_grace_seconds,
            cpus=self._settings.pin.get(workload.role),
            held=(self._directory.lock_fd,),
        )

    def _threads(self, workload: Workload, container: Container) -> dict[str, str]:
        """``OMP_NUM_THREADS``: from the spec; ranks share the cores evenly with the generators; else unset."""
        threads = container.resources.cpu_threads
        if threads is None and workload.lifetime is Lifetime.GANG:
            pinned = self._settings.pin.get(workload.role)
            cores = len(pinned or os.sched_getaffinity(0))
            computing = sum(
                w.replicas
                for w in self._plan.workloads
                if w is workload or (w.role is Role.GENERATOR and not pinned)
            )
            threads = max(1, cores // computing)
        return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


__all__ = ["HOST", "Event", "Failure", "LocalRuntime", "LocalSettings"]
