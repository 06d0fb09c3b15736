"""The command lines of a plan on one machine: ports on loopback, environment, devices and cores of each process."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from scalerl_api import process as api
from scalerl_lifecycle.restarts import RestartPolicy
from scalerl_lifecycle.workloads import (
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
from scalerl_local import devices
from scalerl_local.ports import HOST, Ports
from scalerl_local.run_directory import RunDirectory
from scalerl_local.unit import Member
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

    Attributes:
        pin: CPUs by role; other roles may use all. Benchmarks give each role its own cores, as it would have its own devices.
        grace_seconds: from a stop to SIGKILL.
        orphan_grace_seconds: the same after this process was killed.
    """

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    pin: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
    grace_seconds: float = 30.0
    orphan_grace_seconds: float = 5.0


class Commands:
    """Makes the processes of a plan. Their ports and devices are reserved until they are given back.

    coordinator_port, environment_port: chosen before all others, since other processes get these addresses; 0 without such servers.

    Raises:
        NotEnoughDevices: nothing was reserved.
    """

    def __init__(self, plan: Plan, directory: RunDirectory, settings: LocalSettings) -> None:
        self._plan = plan
        self._directory = directory
        self._settings = settings
        self.ports = Ports()
        self.devices = devices.Pool(plan)
        self._incarnation = uuid.uuid4().hex[:12]
        self._base = environment()
        self.coordinator_port = self.ports.take()
        has_servers = any(workload.role is Role.ENVIRONMENT for workload in plan.workloads)
        self.environment_port = self.ports.take() if has_servers else 0
        self._master_ports: dict[Role, tuple[int, int]] = {}  # (start, port)

    @property
    def coordinator_url(self) -> str:
        return f"http://{HOST}:{self.coordinator_port}"

    def members(self, workload: Workload, index: int) -> list[Member]:
        """The processes of one replica."""
        replica = workload.replica_name(index)
        chosen = {
            (Role.COORDINATOR, "http"): self.coordinator_port,
            (Role.ENVIRONMENT, "environment"): self.environment_port,
        }
        ports = {
            name: chosen.get((workload.role, name)) or self.ports.take()
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
            before, port = port, self.ports.take()
            if known:
                self.ports.give_back(before)
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
        if self.environment_port:
            variables[api.ENVIRONMENT_URL] = f"http://{HOST}:{self.environment_port}"
        if workload.role is Role.ENVIRONMENT:
            variables = {name: variables[name] for name in (BIND, port_variable("environment"))}
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
                devices.VISIBLE: ",".join(self.devices.of(workload.replica_name(index), container.name)),
                **self._threads(workload, container),
                **variables,
                **{key: expand(value, variables) for key, value in container.env.items()},
            },
            log=paths.logs / f"{name}.log",
            mark=f"{self._incarnation}/{name}/{start}",
            grace_seconds=self._settings.grace_seconds,
            orphan_grace_seconds=self._settings.orphan_grace_seconds,
            cpus=self._settings.pin.get(workload.role),
            pass_fds=(self._directory.lock_fd,),
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
