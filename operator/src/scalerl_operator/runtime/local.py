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
from scalerl_operator.plan import (
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
from scalerl_operator.policy.failure import RestartPolicy
from scalerl_operator.runtime import devices
from scalerl_operator.runtime.directory import RunDirectory
from scalerl_operator.runtime.ports import Ports
from scalerl_operator.runtime.process import Command, environment
from scalerl_operator.runtime.unit import Event, Failure, Member, Unit, UnitStatus

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
        self._assigned = (
            devices.assign(plan, devices.machine_devices()) if plan.devices() else devices.assign(plan, ())
        )
        self._incarnation = uuid.uuid4().hex[:12]
        self._base = environment()
        self._coordinator_port = self._ports.take()
        self._stopping = asyncio.Event()
        self._tasks: dict[asyncio.Task[Failure | None], Unit] = {}
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
            await self._tear_down()
            self._ports.close()

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
        tasks = {asyncio.create_task(unit.run(), name=unit.name): unit for unit in units}
        self._tasks |= tasks
        stop = asyncio.create_task(self._stopping.wait())
        waiting: set[asyncio.Task[Failure | None]] = set(tasks)
        try:
            while True:
                done, _ = await asyncio.wait({*waiting, stop}, return_when=asyncio.FIRST_COMPLETED)
                for task in [t for t in waiting if t in done]:
                    failed = task.result()
                    if failed is not None:
                        return failed
                waiting -= done
                left = {tasks[task].lifetime for task in waiting}
                if stop in done or not left - {Lifetime.SERVICE}:
                    return None
        finally:
            stop.cancel()

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
        shared = {} if workload.lifetime is not Lifetime.GANG else {MASTER_PORT: self._ports.take()}
        groups: list[tuple[str, list[Member]]] = []
        for index in range(workload.replicas):
            replica = workload.replica_name(index)
            names = [name for container in workload.containers for name in container.ports]
            ports = {name: self._port(workload.role, name) for name in names}
            for container in workload.containers:
                name = replica if len(workload.containers) == 1 else f"{replica}-{container.name}"
                name = str(workload.role) if workload.lifetime is Lifetime.ONCE else name
                command = partial(self._command, workload, index, container, name, ports, shared)
                groups.append((name, [Member(name, container, HOST, ports, command)]))
        on_start: Callable[[int], None] = lambda start: None  # noqa: E731
        if workload.lifetime is Lifetime.GANG:
            groups = [(str(workload.role), [member for _, members in groups for member in members])]
            on_start = partial(self._new_master_port, shared)
        return [
            Unit(
                name,
                workload.role,
                workload.lifetime,
                members,
                self._settings.restart,
                on_event=self._on_event,
                may_leave=self._may_leave,
                on_start=on_start,
            )
            for name, members in groups
        ]

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
        visible = ",".join(self._assigned[workload.replica_name(index), container.name])
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
