"""Runs a plan as child processes of this machine, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_lifecycle.lifecycle_types import Job, JobState, LifecycleDecision, LifecycleInput, Service
from scalerl_lifecycle.workloads import Lifetime, Plan, Role, Workload
from scalerl_local.commands import Commands, LocalSettings
from scalerl_local.ports import HOST
from scalerl_local.run_directory import RunDirectory
from scalerl_local.run_view import Event, Failure, UnitState, UnitStatus
from scalerl_local.unit import Unit

_ENDING: Final = (Phase.FINISHING, Phase.SUSPENDING)


class Supervisor:
    """The processes of a plan: those of a decision are started, all others are ended.

    Args:
        directory: locked by this process.
        on_event: called for each restart, failure and unanswered probe.
        on_change: called when :meth:`observed` has something new.

    Raises:
        NotEnoughDevices: nothing was started.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        *,
        settings: LocalSettings | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._settings = settings or LocalSettings()
        self._on_event = on_event
        self._on_change = on_change
        self._commands = Commands(plan, directory, self._settings)
        self._is_prepared = False
        self._is_serving = False
        self._is_ending = False
        self._attempt = 0
        """Of the trainer, while its processes run or how they ended is known; else 0."""
        self._tasks: dict[Unit, asyncio.Task[None]] = {}
        self._error: BaseException | None = None
        """Of the supervision of a unit itself."""
        self._replicas = {workload.role: workload.replicas for workload in plan.workloads}
        self.units = [unit for w in plan.workloads for unit in self._units(w, range(w.replicas))]

    @property
    def coordinator_url(self) -> str:
        return self._commands.coordinator_url

    @property
    def is_idle(self) -> bool:
        """Whether no process is left."""
        return not any(self._runs(unit) for unit in self.units)

    def statuses(self) -> list[UnitStatus]:
        return [unit.status for unit in self.units]

    def observed(self, unix_seconds: float) -> LifecycleInput:
        """The part of the lifecycle's input that the processes show."""
        if self._error is not None:
            raise self._error
        return LifecycleInput(
            unix_seconds,
            prepare=self._job(Lifetime.ONCE, 0),
            trainer=self._job(Lifetime.GANG, self._attempt),
            coordinator=self._service(Role.COORDINATOR),
            generators=self._service(Role.GENERATOR),
            environment=self._service(Role.ENVIRONMENT) if self._commands.environment_port else None,
            serving=self._is_serving
            or any(self._runs(unit) for unit in self.units if unit.lifetime is Lifetime.SERVICE),
        )

    def apply(self, decision: LifecycleDecision) -> None:
        """Starts what the decision has, and begins to end what it has not: the coordinator last, since the others report to it."""
        self._is_prepared, self._is_serving = decision.wanted.prepare, decision.wanted.coordinator
        self._is_ending = decision.phase in _ENDING
        self._attempt = self._attempt if decision.wanted.trainer is None else decision.wanted.trainer
        for unit in self.units:
            self._set(unit, self._is_wanted(unit, decision))
        if decision.wanted.trainer is None and not any(
            self._runs(u) for u in self.units if u.lifetime is Lifetime.GANG
        ):
            self._attempt = 0

    def announce_restart(self, seconds: float) -> None:
        """Reports that the trainer has ended, and is started again after so many seconds."""
        for unit in self.units:
            if unit.lifetime is Lifetime.GANG:
                unit.status.state = UnitState.BACK_OFF
                unit.status.restarts += 1
                how = unit.status.last_error or "exited before the end of the run"
                self._on_event(Event(unit.name, f"{how}; restarting in {seconds:g} s", is_problem=True))

    def failure(self, role: Role | None) -> Failure | None:
        """The failure of a role, or of the first one but the trainer; None if there is none."""
        for unit in self.units:
            by_role = unit.lifetime is not Lifetime.GANG if role is None else unit.status.role is role
            if unit.failure is not None and unit.essential and by_role:
                unit.status.state = UnitState.FAILED
                return unit.failure
        return None

    def url(self, role: Role) -> str:
        """The URL of the first replica of a role."""
        unit = next(u for u in self.units if u.status.role is role and u.index == 0)
        return f"http://{HOST}:{unit.ports['http']}"

    def replicas(self, role: Role) -> int:
        """The requested number of replicas."""
        return self._replicas.get(role, 0)

    def existing_replicas(self, role: Role) -> int:
        """The number of replicas that run or wait for their next start, without those that are being stopped."""
        units = (u for u in self.units if u.status.role is role)
        return len({u.index for u in units if self._runs(u) and not u.is_stopping})

    def max_replicas(self, role: Role) -> int | None:
        """The number of replicas for which this machine has devices; None for a role without devices."""
        each = sum(c.resources.devices for c in self._plan.workload(role).containers)
        return self._replicas[role] + self._commands.devices.free // each if each else None

    def draining(self, role: Role) -> bool:
        """Whether replicas that were scaled down are still running."""
        return any(u.status.role is role and u.index >= self._replicas[role] for u in self.units)

    def scale(self, role: Role, replicas: int) -> None:
        """Sets the number of replicas of a service: starts new ones, or stops the newest.

        Call while :meth:`draining` is false. Has no effect while services do not run.

        Raises:
            NotEnoughDevices, OSError: nothing was changed.
        """
        workload = self._plan.workload(role)
        if workload.lifetime is not Lifetime.SERVICE:
            raise ValueError(f"{role} is no service: its replicas start and end together")
        if not self._is_serving:
            return
        if self.draining(role):
            raise RuntimeError(f"a {role} is still draining; its name is not free yet")
        new: list[Unit] = []
        added = range(self._replicas[role], replicas)
        try:
            for index in added:
                new += self._units(workload, [index])
            self._commands.devices.take(workload, added)
        except BaseException:
            for port in {port for unit in new for port in unit.ports.values()}:
                self._commands.ports.give_back(port)
            raise
        self._replicas[role] = replicas
        self.units += new
        for unit in [u for u in self.units if u.status.role is role]:
            self._set(unit, unit.index < replicas)

    def kill(self) -> None:
        """Kills all processes."""
        for unit in self.units:
            unit.kill()

    async def close(self) -> None:
        """Ends all processes (SIGTERM, the grace, SIGKILL), the coordinator last. A cancellation kills them."""
        self._is_serving = False
        try:
            for last in (False, True):
                units = [u for u in self.units if (u.status.role is Role.COORDINATOR) is last]
                for unit in units:
                    self._set(unit, False)
                await self._wait(units)
        except asyncio.CancelledError:
            self.kill()
            await self._wait(self.units)
            raise
        finally:
            self._commands.ports.close()

    async def _wait(self, units: Iterable[Unit]) -> None:
        if tasks := [self._tasks[unit] for unit in units if self._runs(unit)]:
            await asyncio.wait(tasks)

    def _is_wanted(self, unit: Unit, decision: LifecycleDecision) -> bool:
        if unit.lifetime is Lifetime.ONCE:
            return decision.wanted.prepare
        if unit.lifetime is Lifetime.GANG:
            return decision.wanted.trainer is not None
        if unit.status.role is Role.COORDINATOR and not decision.wanted.coordinator:
            others = (other for other in self.units if other.status.role is not Role.COORDINATOR)
            return self._runs(unit) and any(self._runs(other) for other in others)
        kept = unit.index < self._replicas[unit.status.role]
        return (
            decision.wanted.coordinator
            and kept
            and (unit.status.role is not Role.GENERATOR or decision.wanted.generators)
        )

    def _set(self, unit: Unit, wanted: bool) -> None:
        """Starts or stops a unit. One that has ended by itself stays as it is while it is wanted, and is forgotten otherwise."""
        if self._runs(unit):
            if not wanted and not unit.is_stopping:
                unit.stop()
        elif not wanted:
            if self._tasks.pop(unit, None) is not None:
                self._on_change()
        elif unit not in self._tasks or unit.is_stopping:
            unit.renew()
            self._tasks[unit] = task = asyncio.create_task(unit.run(), name=unit.name)
            task.add_done_callback(lambda task: self._on_end(unit, task))

    def _runs(self, unit: Unit) -> bool:
        return unit in self._tasks and not self._tasks[unit].done()

    def _on_end(self, unit: Unit, task: asyncio.Task[None]) -> None:
        """Removes a unit that was scaled down."""
        role, index = unit.status.role, unit.index
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
        elif index >= self._replicas[role]:
            self._tasks.pop(unit, None)
            self.units.remove(unit)
            if not any(u.status.role is role and u.index == index for u in self.units):
                self._commands.devices.give_back(self._plan.workload(role).replica_name(index))
        self._on_change()

    def _job(self, lifetime: Lifetime, attempt: int) -> Job:
        """Of the one unit with this lifetime. A plan without a preparation has nothing to wait for."""
        unit = next((u for u in self.units if u.lifetime is lifetime), None)
        if unit is None:
            return Job(JobState.COMPLETE) if lifetime is Lifetime.ONCE and self._is_prepared else Job()
        if self._runs(unit):
            state = JobState.TERMINATING if unit.is_stopping else JobState.ACTIVE
            return Job(state, attempt, ready=unit.status.state is UnitState.READY)
        if unit not in self._tasks or unit.is_stopping:
            return Job()
        if unit.failure is None:
            return Job(JobState.COMPLETE, attempt)
        return Job(JobState.FAILED, attempt, exits=(unit.failure.end,))

    def _service(self, role: Role) -> Service:
        """A replica is ready with all its containers, and has failed with any of them."""
        replicas: dict[int, list[Unit]] = {}
        for unit in self.units:
            if unit.status.role is role and unit.essential and unit.index < self._replicas[role]:
                replicas.setdefault(unit.index, []).append(unit)
        units = [unit for replica in replicas.values() for unit in replica]
        ready = sum(all(u.status.state is UnitState.READY for u in replica) for replica in replicas.values())
        failed = sum(any(u.failure is not None for u in replica) for replica in replicas.values())
        failures = [unit.failure for unit in units if unit.failure is not None]
        worst = max(units, key=lambda unit: unit.quick_restarts, default=None)
        return Service(
            ready=ready,
            starting=len(replicas) - ready - failed,
            restarts=0 if worst is None else worst.quick_restarts,
            restarted="" if worst is None else worst.name,
            bad_input=next((failure.end for failure in failures if failure.bad_input), None),
            given_up=next((failure.end for failure in failures if not failure.bad_input), None),
        )

    def _units(self, workload: Workload, indices: Iterable[int]) -> list[Unit]:
        """One unit for each container of these replicas of a service, or one for all ranks of a gang."""
        members = [(i, member) for i in indices for member in self._commands.members(workload, i)]
        grouped = [(member.name, i, [member]) for i, member in members]
        if workload.lifetime is Lifetime.GANG:
            grouped = [(str(workload.role), 0, [member for _, member in members])]
        return [
            Unit(
                name,
                workload,
                index,
                of_unit,
                self._settings.restart,
                on_event=self._on_event,
                on_change=self._on_change,
                is_ending=lambda: self._is_ending,
            )
            for name, index, of_unit in grouped
        ]
