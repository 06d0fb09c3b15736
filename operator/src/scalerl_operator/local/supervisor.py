"""The local runtime: runs a plan as child processes of this machine, on loopback."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from scalerl_api import process as api
from scalerl_operator.local import devices
from scalerl_operator.local.ports import HOST, Ports
from scalerl_operator.local.run_directory import RunDirectory
from scalerl_operator.local.unit import Event, Failure, Member, Unit, UnitStatus
from scalerl_operator.policy.restarts import RestartPolicy
from scalerl_operator.workloads import (
    ADDRESS,
    BIND,
    Container,
    Lifetime,
    Plan,
    Role,
    Workload,
    expand,
    port_variable,
)
from scalerl_processes.child import Command, environment

_LOOPBACK: Final = {
    # Without these, libraries choose an interface by the host's name or its default route.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": HOST,
}


@dataclass(frozen=True)
class LocalSettings:
    """How this machine runs a plan.

    pin: CPUs by role; other roles may use all. Benchmarks give each role its own cores, as it would have its own devices.
    grace_seconds: from a stop to SIGKILL.
    orphan_grace_seconds: the same after this process was killed.
    """

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    pin: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
    grace_seconds: float = 30.0
    orphan_grace_seconds: float = 5.0


class LocalRuntime:
    """Runs a plan until it is complete, a unit fails for good, or it is stopped.

    directory: locked by this process.
    may_exit, needed: see :class:`.Unit`.
    on_event: called for each restart, failure and unanswered probe.

    Raises:
        NotEnoughDevices: nothing was started.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        *,
        settings: LocalSettings | None = None,
        may_exit: Callable[[Lifetime], Awaitable[bool]],
        needed: Callable[[Role], bool] = lambda role: True,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._settings = settings or LocalSettings()
        self._may_exit = may_exit
        self._needed = needed
        self._on_event = on_event
        self._ports = Ports()
        self._devices = devices.Pool(plan)
        self._incarnation = uuid.uuid4().hex[:12]
        self._base = environment()
        self._coordinator_port = self._ports.take()
        self._master_ports: dict[Role, tuple[int, int]] = {}  # (start, port)
        self._is_stopping = False
        self._tasks: dict[asyncio.Task[Failure | None], Unit] = {}
        self._ended: asyncio.Queue[asyncio.Task[Failure | None] | None] = asyncio.Queue()
        self._replicas = {workload.role: workload.replicas for workload in plan.workloads}
        self.units = [unit for w in plan.workloads for unit in self._units(w, range(w.replicas))]

    @property
    def coordinator_url(self) -> str:
        return f"http://{HOST}:{self._coordinator_port}"

    def statuses(self) -> list[UnitStatus]:
        return [unit.status for unit in self.units]

    async def run(self) -> Failure | None:
        """Runs the plan. Returns None when it is complete or stopped, else the failure. No process is left afterwards."""
        try:
            for unit in [unit for unit in self.units if unit.lifetime is Lifetime.ONCE]:
                failed = await self._supervise([unit])
                if failed is not None or self._is_stopping:
                    return failed
            return await self._supervise([unit for unit in self.units if unit.lifetime is not Lifetime.ONCE])
        finally:
            self._is_stopping = True
            await self._tear_down()
            self._ports.close()

    def url(self, role: Role) -> str:
        """The URL of the first replica of a role."""
        unit = next(u for u in self.units if u.status.role is role and u.index == 0)
        return f"http://{HOST}:{unit.ports['http']}"

    def replicas(self, role: Role) -> int:
        """The requested number of replicas."""
        return self._replicas[role]

    def max_replicas(self, role: Role) -> int | None:
        """The number of replicas for which this machine has devices; None for a role without devices."""
        each = sum(c.resources.devices for c in self._plan.workload(role).containers)
        return self._replicas[role] + self._devices.free // each if each else None

    def draining(self, role: Role) -> bool:
        """Whether replicas that were scaled down are still running."""
        return any(u.status.role is role and u.index >= self._replicas[role] for u in self.units)

    def scale(self, role: Role, replicas: int) -> None:
        """Sets the number of replicas of a service: starts new ones, or stops the newest.

        Call while :meth:`run` supervises services and :meth:`draining` is false. Has no effect once the run is ending.

        Raises:
            NotEnoughDevices, OSError: nothing was changed.
        """
        if self._is_stopping:
            return
        workload = self._plan.workload(role)
        if workload.lifetime is not Lifetime.SERVICE:
            raise ValueError(f"{role} is no service: its replicas start and end together")
        if self.draining(role):
            raise RuntimeError(f"a {role} is still draining; its name is not free yet")
        new: list[Unit] = []
        added = range(self._replicas[role], replicas)
        try:
            for index in added:
                new += self._units(workload, [index])
            self._devices.take(workload, added)
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

    def stop(self) -> None:
        """Makes :meth:`run` stop all processes (SIGTERM, the grace, SIGKILL) and return."""
        self._is_stopping = True
        self._ended.put_nowait(None)

    def kill(self) -> None:
        """Makes :meth:`run` kill all processes and return."""
        self.stop()
        for unit in self.units:
            unit.kill()

    async def _supervise(self, units: list[Unit]) -> Failure | None:
        """Runs ``units`` until one fails, only services are left, or a stop is requested."""
        for unit in units:
            self._start(unit)
        while not self._is_stopping:
            task = await self._ended.get()
            failed = None if task is None else self._on_end(task)
            running = {unit.lifetime for task, unit in self._tasks.items() if not task.done()}
            if failed is not None or running <= {Lifetime.SERVICE}:
                return failed
        return None

    def _start(self, unit: Unit) -> None:
        task = asyncio.create_task(unit.run(), name=unit.name)
        self._tasks[task] = unit
        task.add_done_callback(self._ended.put_nowait)

    def _on_end(self, task: asyncio.Task[Failure | None]) -> Failure | None:
        """The failure if the unit's end ends the run. Removes a unit that was scaled down."""
        unit, failed = self._tasks[task], task.result()
        role, index = unit.status.role, unit.index
        if index >= self._replicas[role]:
            del self._tasks[task]
            self.units.remove(unit)
            if not any(u.status.role is role and u.index == index for u in self.units):
                self._devices.give_back(self._plan.workload(role).replica_name(index))
            return None
        if failed is not None and not unit.essential:
            self._on_event(Event(unit.name, f"the run continues without it: {failed.reason}", True))
            return None
        return failed

    async def _tear_down(self) -> None:
        """Stops all units, the coordinator last, since the others report to it. A cancellation kills them."""
        try:
            for last in (False, True):
                tasks = [t for t, u in self._tasks.items() if (u.status.role is Role.COORDINATOR) is last]
                for task in tasks:
                    self._tasks[task].stop()
                if tasks:
                    await asyncio.wait(tasks)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait(self._tasks)
            raise

    def _units(self, workload: Workload, indices: Iterable[int]) -> list[Unit]:
        """One unit for each container of these replicas of a service, or one for all ranks of a gang."""
        members = [(i, member) for i in indices for member in self._members(workload, i)]
        grouped = [(member.name, i, [member]) for i, member in members]
        if workload.lifetime is Lifetime.GANG:
            grouped = [(str(workload.role), 0, [member for _, member in members])]
        policy, on_event, may_exit = self._settings.restart, self._on_event, self._may_exit
        return [
            Unit(
                name,
                workload,
                index,
                of_unit,
                policy,
                on_event=on_event,
                may_exit=may_exit,
                needed=self._needed,
            )
            for name, index, of_unit in grouped
        ]

    def _members(self, workload: Workload, index: int) -> list[Member]:
        """The processes of one replica."""
        replica = workload.replica_name(index)
        # All processes get the coordinator's address in their environment, so its port is chosen before all others.
        of_coordinator = workload.role is Role.COORDINATOR
        ports = {
            name: self._coordinator_port if of_coordinator and name == "http" else self._ports.take()
            for container in workload.containers
            for name in container.ports
        }
        members = []
        for container in workload.containers:
            name = replica if len(workload.containers) == 1 else f"{replica}-{container.name}"
            name = str(workload.role) if workload.lifetime is Lifetime.ONCE else name
            command = partial(self._command, workload, index, container, name, ports)
            members.append(Member(name, container, ports, command))
        return members

    def _master_port(self, role: Role, start: int) -> int:
        """The rendezvous port of a gang, a new one for each start, so that no late message of an earlier start reaches it."""
        known, port = self._master_ports.get(role, (0, 0))
        if known != start:
            before, port = port, self._ports.take()
            if known:
                self._ports.give_back(before)
            self._master_ports[role] = (start, port)
        return port

    def _command(
        self,
        workload: Workload,
        index: int,
        container: Container,
        name: str,
        ports: dict[str, int],
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
                # Each rank has only its own device visible, which is the first.
                "LOCAL_RANK": "0",
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(self._master_port(workload.role, start)),
            }
        return Command(
            argv=[expand(word, variables) for word in container.argv],
            env={
                **self._base,
                **_LOOPBACK,
                devices.VISIBLE: ",".join(self._devices.of(workload.replica_name(index), container.name)),
                **self._threads(workload, container),
                **variables,
                **{key: expand(value, variables) for key, value in container.env.items()},
            },
            log=paths.logs / f"{name}.log",
            mark=f"{self._incarnation}/{name}/{start}",
            grace_seconds=self._settings.grace_seconds,
            orphan_grace_seconds=self._settings.orphan_grace_seconds,
            cpus=self._settings.pin.get(workload.role),
            held=(self._directory.lock_fd,),
        )

    def _threads(self, workload: Workload, container: Container) -> dict[str, str]:
        """``OMP_NUM_THREADS``: from the spec; else, for a gang, the cores divided by its ranks and the generators; else unset."""
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
