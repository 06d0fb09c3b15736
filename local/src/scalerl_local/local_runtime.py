"""One run on this machine: the lifecycle's runtime, and the loop that asks it.

Level-triggered: each tick observes the processes and the coordinator, decides as an operator does, records the decision, acts on
it, and reports a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.status import GeneratorsStatus
from scalerl_api.wire import INTERRUPTED, Status
from scalerl_autoscaling.decision_log import DecisionRecord, summary_of
from scalerl_lifecycle.budget import Rates, eta_seconds
from scalerl_lifecycle.coordinator_client import CoordinatorClient, CoordinatorUnreachable
from scalerl_lifecycle.lifecycle_types import (
    DRAIN_SECONDS,
    LifecycleDecision,
    LifecycleInput,
    OutcomeKind,
    PersistedState,
)
from scalerl_lifecycle.role_containers import forecaster
from scalerl_lifecycle.runtime import STOPPED_PHASES, step
from scalerl_lifecycle.workloads import Plan, Role
from scalerl_local.commands import LocalSettings
from scalerl_local.local_autoscaler import LocalAutoscaler, resumed_plan
from scalerl_local.rate_meter import RateMeter
from scalerl_local.reports import Reports, StartupMeter
from scalerl_local.run_directory import DirectoryRuns, RunDirectory
from scalerl_local.run_view import Event, Failure, RunResult, Snapshot
from scalerl_local.status_file import StatusFile
from scalerl_local.supervisor import Supervisor
from scalerl_processes.process_table import tree_memory_bytes
from scalerl_processes.waiting import cancel, pause

_TICK_SECONDS: Final = 1.0
_STARTING_TICK_SECONDS: Final = 0.25
_MEMORY_PERIOD_SECONDS: Final = 5.0
_MAX_BACK_OFF_SECONDS: Final = 8.0


class LocalRuntime:
    """Runs ``plan`` in ``directory`` until it is complete, fails for good, or is suspended: by its forecast, or interrupted.

    A resumed run is first suspended, and then continues: as on a cluster when a user does both.

    Args:
        started: ``time.monotonic()`` at the start of the command.
        clock: Unix seconds.

    Raises:
        RecordError: the record of decisions cannot be read.
        DirectoryLost: by :meth:`run`.
        DirectoryProblem: the status cannot be read.
    """

    def __init__(
        self,
        run: ScaleRLRun,
        plan: Plan,
        directory: RunDirectory,
        *,
        settings: LocalSettings | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None,
        started: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._directory = run, directory
        self._clock = clock
        self._on_event = on_event
        self._on_snapshot = on_snapshot
        self._started = time.monotonic() if started is None else started
        self._wake = asyncio.Event()
        self._file = StatusFile(directory.paths.status, run)
        self.persisted = self._file.persisted
        # A port has one process, which may have workers of its own.
        of_one = (replace(w, replicas=1) if w.role is Role.ENVIRONMENT else w for w in plan.workloads)
        plan = replace(plan, workloads=tuple(of_one))
        known = None
        if run.spec.autoscaling.mode != "Off":
            known = summary_of(directory.paths.decisions)
            plan, message = resumed_plan(plan, run.spec, known)
            plan = replace(plan, workloads=(*plan.workloads, forecaster()))
            if message:
                on_event(Event("autoscaler", message))
        self._supervisor = Supervisor(
            plan, directory, settings=settings, on_event=on_event, on_change=self._wake.set
        )
        self._client = CoordinatorClient(self._supervisor.coordinator_url, directory.token)
        self._autoscaler = None
        if known is not None:
            self._autoscaler = LocalAutoscaler(
                run.spec,
                self._supervisor,
                DecisionRecord(self._client.decisions, self._client.record_decision),
                applied=known.sequence - 1,
                token=directory.token,
                earlier=DirectoryRuns(directory.paths.root, lambda text: on_event(Event("autoscaler", text))),
                on_event=on_event,
            )
        self._status: Status | None = None
        self._silence = 0
        """Polls without an answer since the last one with one."""
        self._meter = RateMeter()
        self._rates = Rates()
        self._reports = Reports(directory.paths, on_event)
        self._startup = StartupMeter(self._started)
        self._is_resuming = directory.resumed
        self._suspend = False
        self._interrupts = 0
        self._drain_seconds = DRAIN_SECONDS
        self._unrecorded = ""
        self._is_over = False
        self._failure: Failure | None = None
        self._peak_memory_bytes = 0

    async def run(self) -> RunResult:
        """Runs until the end. No process of the run is left afterwards."""
        tasks = [
            asyncio.create_task(self._steps(), name="steps"),
            asyncio.create_task(self._measure_memory(), name="memory"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseException:
            self._supervisor.kill()
            raise
        finally:
            await cancel(*tasks)
            await self._supervisor.close()
            if self._autoscaler is not None:
                self._autoscaler.close()
            await self._client.aclose()
        if self._reports.unsaved_version >= 0 and self._status is not None:
            self._reports.lost(self._status)
        self._report()
        self._startup.ready(self._supervisor.statuses())
        return RunResult(
            self._failure,
            self._interrupts > 0,
            self._status,
            self._startup.startup,
            self._peak_memory_bytes,
            {s.name: s.restarts for s in self._supervisor.statuses() if s.restarts},
            None if self._autoscaler is None else self._autoscaler.decision,
            self.persisted.outcome,
        )

    def interrupt(self) -> None:
        """The first call suspends the run, the second kills it."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._suspend = True
            # A trainer that keeps unsaved weights has no more to do than to try once more.
            if self._reports.unsaved_version >= 0:
                self._drain_seconds = 0.0
        else:
            self._is_over = True
            self._supervisor.kill()
        self._wake.set()

    async def _steps(self) -> None:
        while not self._is_over:
            self._wake.clear()
            self._directory.check()
            before = self.persisted
            decision = await step(self, self._run.spec, before)
            self.persisted = decision.persisted
            self._note(before, decision)
            self._report()
            is_stopped = (
                decision.phase in STOPPED_PHASES and not decision.set_suspend and not self._is_resuming
            )
            if is_stopped and self._supervisor.is_idle:
                return
            self._is_resuming = False
            seconds = _STARTING_TICK_SECONDS if self._is_starting else _TICK_SECONDS
            if self._silence > 1 and self._status is not None:
                seconds = min(seconds * 2.0 ** min(self._silence, 10), _MAX_BACK_OFF_SECONDS)
            if decision.again_seconds is not None:
                seconds = min(seconds, decision.again_seconds)
            await pause(seconds, until=self._wake)

    # --- the lifecycle's runtime ------------------------------------------------------------------

    async def observe(self) -> LifecycleInput:
        """The processes, and then the coordinator's status: see :class:`.Runtime`."""
        seen = self._supervisor.observed(self._clock())
        status = await self._poll() if seen.serving else None
        if status is not None and self._autoscaler is not None:
            self._autoscaler.update(status)
        edit = self._file.edit
        if self._is_resuming:
            edit = replace(edit, fields=(*edit.fields, "suspend"))
        return replace(
            seen,
            suspend=self._suspend or self._is_resuming,
            status=status,
            stop="" if self._autoscaler is None else self._autoscaler.stop,
            steps=self._file.status.step or 0,
            started=seen.coordinator.ready > 0 and seen.generators.ready > 0,
            edit=edit,
            unproven=self._file.unproven,
            drain_seconds=self._drain_seconds,
        )

    async def record(self, decision: LifecycleDecision) -> None:
        """Writes ``status.json``. A full volume stops no run, and keeps none from being interrupted."""
        now = self._clock()
        existing = self._supervisor.existing_replicas(Role.GENERATOR)
        ready = self._supervisor.observed(now).generators.ready
        generators = GeneratorsStatus(replicas=existing, ready=ready)
        status = self._status if self._silence == 0 else None
        try:
            self._file.write(decision, status, generators, now, at_once=decision.phase in STOPPED_PHASES)
            self._unrecorded = ""
        except OSError as error:
            if self._unrecorded != (text := f"status.json cannot be written: {error.strerror}"):
                self._on_event(Event("run", text, is_problem=True))
            self._unrecorded = text

    async def apply(self, decision: LifecycleDecision) -> None:
        """Starts and stops processes, and passes on the stop request."""
        self._supervisor.apply(decision)
        self._suspend |= decision.set_suspend
        if decision.request_stop is not None and self._status is not None:
            given = self._status.stop_reason
            # Without an answer, the next tick sends the request again.
            with contextlib.suppress(CoordinatorUnreachable):
                await self._client.stop(decision.request_stop)
                wanted = decision.request_stop
                self._on_event(Event("run", f"stopping: {wanted}" if wanted else f"resumed after: {given}"))

    async def _poll(self) -> Status | None:
        """A new status; None if the coordinator does not answer."""
        try:
            self._status = await self._client.status()
        except CoordinatorUnreachable:
            self._silence += 1
            return None
        self._silence = 0
        self._rates = self._meter.add(self._status)
        self._reports.warnings(self._status)
        return self._status

    # --- reports ----------------------------------------------------------------------------------

    def _note(self, before: PersistedState, decision: LifecycleDecision) -> None:
        """Reports restarts of the trainer, and how the run ends."""
        persisted = decision.persisted
        if persisted.restarts > before.restarts:
            self._supervisor.announce_restart(max(0.0, persisted.next_at - self._clock()))
        problem, known = (
            persisted.outcome or persisted.suspending_for,
            before.outcome or before.suspending_for,
        )
        if problem is None or known is not None:
            return
        if problem.kind is OutcomeKind.COMPLETED:
            if self._status is not None and not self._status.trainer_registered:
                text = f"{self._status.stop_reason} was reached before the trainer registered: nothing was trained. Its logs say why"
                self._on_event(Event("trainer", text, is_problem=True))
            return
        by_trainer = persisted.last_recorded_attempt > before.last_recorded_attempt
        failure = self._supervisor.failure(Role.TRAINER if by_trainer else None)
        if failure is None:
            failure = Failure("run", Role.COORDINATOR, f"{problem.reason}: {problem.message}")
        elif by_trainer or problem.reason is Reason.EDIT_FAILED:  # whose message has what to revert
            why = problem.message.removeprefix("trainer: ")
            failure = replace(failure, reason=f"{failure.reason}; {why}")
        if by_trainer:
            self._on_event(Event(failure.unit, failure.reason, is_problem=True))
        self._failure = replace(failure, bad_input=failure.bad_input or problem.reason is Reason.BAD_INPUT)

    @property
    def _is_starting(self) -> bool:
        return self._startup.startup.first_lease_seconds is None

    async def _measure_memory(self) -> None:
        while True:
            await asyncio.sleep(_STARTING_TICK_SECONDS)
            used = await asyncio.to_thread(tree_memory_bytes, os.getpid())
            self._peak_memory_bytes = max(self._peak_memory_bytes, used)
            await asyncio.sleep(_MEMORY_PERIOD_SECONDS)

    def _report(self) -> None:
        now = time.monotonic()
        units, status = tuple(self._supervisor.statuses()), self._status
        self._startup.note(units, status, now)
        reason = INTERRUPTED if self._interrupts else (status.stop_reason if status else "")
        eta = None if status is None else eta_seconds(self._run.spec.budget, status, self._rates)
        decision = None if self._autoscaler is None else self._autoscaler.decision
        self._on_snapshot(Snapshot(now - self._started, status, units, self._rates, reason, eta, decision))
