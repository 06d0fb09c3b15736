"""One run on this machine: the loop that joins plan, policies and the local runtime.

Level-triggered: each tick polls the coordinator's status, applies the policies, sends the stop request until the status has it,
and reports a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import BROKEN, FORECAST, INTERRUPTED, Phase, Status
from scalerl_operator.autoscaling.decision_log import DecisionRecord, summary_of
from scalerl_operator.autoscaling.models import Decision
from scalerl_operator.coordinator_client import CoordinatorClient, CoordinatorUnreachable
from scalerl_operator.local.local_autoscaler import LocalAutoscaler, resumed_plan
from scalerl_operator.local.run_directory import DirectoryRuns, RunDirectory
from scalerl_operator.local.snapshot import RateMeter, Snapshot
from scalerl_operator.local.supervisor import LocalRuntime, LocalSettings
from scalerl_operator.local.unit import Event, Failure
from scalerl_operator.policy.budget import REVOCABLE, limit_reached, must_send_stop
from scalerl_operator.policy.eta import Rates, eta_seconds
from scalerl_operator.policy.lifecycle import DRAIN_SECONDS
from scalerl_operator.role_containers import forecaster
from scalerl_operator.workloads import Lifetime, Plan, Role
from scalerl_processes.process_table import tree_memory_bytes
from scalerl_processes.waiting import cancel, pause

_WARNINGS: Final = {
    "checkpoint_failures": (
        1,
        "a checkpoint could not be written ({count} so far{why}); the last good one stays",
    ),
    "skipped_steps": (1, "a step was skipped ({count} so far): {reason}"),
    "grading_errors": (2, "the verifier failed on a completion ({count} so far), which is left out"),
    "counts.given_up": (
        2,
        "{count} rollouts are given up so far: too long, or failed; the coordinator's log says which",
    ),
    "counts.timed_out_leases": (
        2,
        "{count} leases timed out so far: their generators made no progress for leaseSeconds",
    ),
}
"""Failures that do not end the run, by the name of their count in the coordinator's status: a factor, and the text of an event,
which is reported when the count exceeds the factor times the last reported count."""

_TICK_SECONDS = 1.0
_STARTING_TICK_SECONDS = 0.25
_MEMORY_PERIOD_SECONDS = 5.0
_MAX_BACK_OFF_SECONDS = 8.0
_ANSWER_SECONDS = 90.0
"""How long to wait for a restarting coordinator, which knows whether the run is complete."""


@dataclass
class Startup:
    """The time to the first lease.

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

    failure: the unit that failed for good; None if none did.
    status: the coordinator's last.
    decision: the autoscaler's last; None without one.
    """

    failure: Failure | None
    interrupted: bool
    status: Status | None
    startup: Startup
    peak_memory_bytes: int
    restarts: dict[str, int]
    decision: Decision | None = None


class LocalRun:
    """Runs ``plan`` in ``directory`` until it is complete, fails for good, or is interrupted.

    started: ``time.monotonic()`` at the start of the command.

    Raises:
        RecordError: the record of decisions cannot be read.
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
    ) -> None:
        self._run = run
        self._paths = directory.paths
        self._on_event = on_event
        self._on_snapshot = on_snapshot
        self._started = time.monotonic() if started is None else started
        known = None
        if run.spec.autoscaling.mode != "Off":
            known = summary_of(directory.paths.decisions)
            plan, message = resumed_plan(plan, run.spec, known)
            plan = replace(plan, workloads=(*plan.workloads, forecaster()))
            if message:
                on_event(Event("autoscaler", message))
        self._runtime = LocalRuntime(
            plan,
            directory,
            settings=settings,
            may_exit=self._may_exit,
            needed=self._needed,
            on_event=on_event,
        )
        self._client = CoordinatorClient(self._runtime.coordinator_url, directory.token)
        self._autoscaler = None
        if known is not None:
            self._autoscaler = LocalAutoscaler(
                run.spec,
                self._runtime,
                DecisionRecord(self._client.decisions, self._client.record_decision),
                applied=known.sequence - 1,
                token=directory.token,
                earlier=DirectoryRuns(directory.paths.root, lambda text: on_event(Event("autoscaler", text))),
                on_event=on_event,
            )
        # With onStop: Complete, a run that its forecast stopped continues only when it is resumed with a higher limit.
        final = run.spec.autoscaling.on_stop == "Complete" and not directory.raises_limit
        self._revocable = (*REVOCABLE, BROKEN) if final else (*REVOCABLE, BROKEN, FORECAST)
        self._status: Status | None = None
        self._meter = RateMeter()
        self._rates = Rates()
        self._interrupts = 0
        self._drain_until = math.inf
        self._wake = asyncio.Event()
        self._startup = Startup()
        self._is_resumed: bool | None = None
        self._last_tick = self._started
        self._peak_memory_bytes = 0
        self._reported = dict.fromkeys(_WARNINGS, 0)
        self._checkpoint_problem = ""
        """Why the last failed checkpoint failed."""
        self._unsaved_version = -1
        """The version that the trainer keeps in memory because it cannot be saved; -1 otherwise."""
        self._reported_end = False
        """Whether an end before the trainer registered is reported."""
        self._learning_problems = ("", "")
        """Those of the last status; each is reported when it begins."""

    async def run(self) -> RunResult:
        """Runs until the end. No process of the run is left afterwards."""
        runtime = asyncio.create_task(self._runtime.run(), name="runtime")
        watchers = [
            asyncio.create_task(self._observe(), name="observe"),
            asyncio.create_task(self._measure_memory(), name="memory"),
        ]
        try:
            await asyncio.wait({runtime, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            for watcher in watchers:
                if watcher.done():  # a watcher ends only by an error
                    watcher.result()
            failure = await runtime
        finally:
            if not runtime.done():
                self._runtime.kill()
                await asyncio.wait({runtime})
            await cancel(*watchers)
            if self._autoscaler is not None:
                self._autoscaler.close()
            await self._client.aclose()
        if self._unsaved_version >= 0 and self._status is not None:
            self._report_lost(self._status)
        self._report()
        self._note_ready()
        restarts = {s.name: s.restarts for s in self._runtime.statuses() if s.restarts}
        return RunResult(
            failure,
            self._interrupts > 0,
            self._status,
            self._startup,
            self._peak_memory_bytes,
            restarts,
            self._decision,
        )

    @property
    def _decision(self) -> Decision | None:
        return None if self._autoscaler is None else self._autoscaler.decision

    def interrupt(self) -> None:
        """The first call drains the run, the second kills it."""
        self._interrupts += 1
        if self._interrupts == 1:
            # A trainer that keeps unsaved weights has no more to do than to try once more.
            self._drain_until = time.monotonic() + (0.0 if self._unsaved_version >= 0 else DRAIN_SECONDS)
            self._wake.set()
        else:
            self._runtime.kill()

    async def _observe(self) -> None:
        failures = 0
        while True:
            started = self._startup.first_lease_seconds is not None
            seconds = _TICK_SECONDS if started else _STARTING_TICK_SECONDS
            if failures > 1 and self._status is not None:
                seconds = min(seconds * 2.0 ** min(failures, 10), _MAX_BACK_OFF_SECONDS)
            self._wake.clear()
            await pause(seconds, until=self._wake)
            failures = 0 if await self._poll() else failures + 1
            await self._apply()
            self._report()

    async def _poll(self) -> bool:
        """Gets a new status; False if the coordinator does not answer."""
        try:
            self._status = await self._client.status()
        except CoordinatorUnreachable:
            return False
        self._rates = self._meter.add(self._status)
        self._report_warnings(self._status)
        return True

    def _report_warnings(self, status: Status) -> None:
        self._checkpoint_problem = status.checkpoint_problem or self._checkpoint_problem
        unsaved, held = status.unsaved_version, self._unsaved_version
        if unsaved >= 0 and held < 0:
            what = f"training has ended, but version {unsaved}"
            if _in_mid_training(status):
                what = "mid-training has ended, but its last version"
            text = f"{what} cannot be saved: {status.checkpoint_problem}. The trainer keeps the "
            text += "weights in memory and retries: free space, or interrupt this command to give them up"
            self._on_event(Event("trainer", text, is_problem=True))
        elif unsaved < 0 <= held and self._paths.checkpoint(held).is_dir():
            # Without it, the coordinator has restarted, or the trainer, whose end is reported elsewhere.
            self._on_event(Event("trainer", "the last version is saved"))
        self._unsaved_version = unsaved
        problems = (status.learning_problem, status.logprob_problem)
        for problem, before in zip(problems, self._learning_problems, strict=True):
            if problem and not before:
                self._on_event(Event("run", problem, is_problem=True))
        self._learning_problems = problems
        for name, (growth, text) in _WARNINGS.items():
            count = attrgetter(name)(status)
            if count > growth * self._reported[name]:
                why = f", {self._checkpoint_problem}" if self._checkpoint_problem else ""
                text = text.format(count=count, reason=status.last_skip_reason, why=why)
                self._on_event(Event("run", text, is_problem=True))
                self._reported[name] = count

    def _report_lost(self, status: Status) -> None:
        """Report the updates that the end of this command lost."""
        version, saved = status.unsaved_version, status.checkpoint_version
        if self._paths.checkpoint(version).is_dir():
            return
        lost = f"since version {saved} " if saved > 0 else ""
        text = f"version {version} was not saved: all updates {lost}are lost ({status.checkpoint_problem})"
        if _in_mid_training(status):
            text = f"mid-training was not saved: its steps since its last checkpoint are lost ({status.checkpoint_problem})"
        self._on_event(Event("trainer", text, is_problem=True))

    async def _apply(self) -> None:
        drained = self._interrupts and (self._nothing_to_drain() or time.monotonic() > self._drain_until)
        if drained or self._status is None:
            if drained:
                self._runtime.stop()
            return
        if self._autoscaler is not None:
            self._autoscaler.update(self._status)
        wanted, given = self._stop_reason(self._status), self._status.stop_reason
        if self._unsaved_version < 0 and must_send_stop(wanted, given, self._revocable):
            # Without an answer, the next tick sends the request again.
            with contextlib.suppress(CoordinatorUnreachable):
                await self._client.stop(wanted)
                self._on_event(Event("run", f"stopping: {wanted}" if wanted else f"resumed after: {given}"))
        elif self._ended_without_trainer(self._status):
            # Only without a request that is due: an earlier limit may have ended a run that is resumed with a higher one.
            self._runtime.stop()

    def _stop_reason(self, status: Status) -> str:
        """The reason to stop the run; empty without one."""
        if self._interrupts:
            return INTERRUPTED
        limit = limit_reached(self._run.spec.budget, status)
        if limit:
            return limit
        return "" if self._autoscaler is None else self._autoscaler.stop

    def _ended_without_trainer(self, status: Status) -> bool:
        """Whether the run has ended before its trainer registered, which therefore does not exit by itself."""
        if status.phase is not Phase.FINISHED or status.trainer_registered:
            return False
        if not self._reported_end:
            self._reported_end = True
            text = f"{status.stop_reason} was reached before the trainer registered: nothing was trained. Its logs say why"
            self._on_event(Event("trainer", text, is_problem=True))
        return True

    def _nothing_to_drain(self) -> bool:
        """Whether there was no lease yet. A trainer in mid-training saves its state at a SIGTERM, without a drain."""
        waiting = self._status is None or _waits_for_lease(self._status)
        return waiting and self._startup.first_lease_seconds is None

    async def _may_exit(self, lifetime: Lifetime) -> bool:
        """Whether a unit whose processes have all exited with 0 is not to be restarted."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        pause = 0.1
        while not await self._poll():
            if time.monotonic() + pause > deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 2, _MAX_BACK_OFF_SECONDS)
        assert self._status is not None
        phase = self._status.phase
        if lifetime is Lifetime.SERVICE:
            return phase in (Phase.FINISHING, Phase.FINISHED)
        # A trainer that is interrupted in mid-training exits before the end of the run.
        return phase is Phase.FINISHED or (self._interrupts > 0 and self._status.checkpoint_version < 0)

    def _needed(self, role: Role) -> bool:
        """Whether the run needs a role now: mid-training, which ends with the first checkpoint, needs no generators."""
        if role is not Role.GENERATOR or self._run.spec.warm_start is None:
            return True
        status = self._status
        return status is not None and max(status.checkpoint_version, status.published_version) >= 0

    async def _measure_memory(self) -> None:
        while True:
            await asyncio.sleep(_STARTING_TICK_SECONDS)
            used = await asyncio.to_thread(tree_memory_bytes, os.getpid())
            self._peak_memory_bytes = max(self._peak_memory_bytes, used)
            await asyncio.sleep(_MEMORY_PERIOD_SECONDS)

    def _report(self) -> None:
        now = time.monotonic()
        self._note_startup(now)
        status = self._status
        reason = INTERRUPTED if self._interrupts else (status.stop_reason if status else "")
        eta = None if status is None else eta_seconds(self._run.spec.budget, status, self._rates)
        units = tuple(self._runtime.statuses())
        self._on_snapshot(
            Snapshot(now - self._started, status, units, self._rates, reason, eta, self._decision)
        )

    def _note_startup(self, now: float) -> None:
        since, self._last_tick = now - self._last_tick, now
        if self._startup.first_lease_seconds is not None:
            return
        self._note_ready()
        status = self._status
        if status is not None and self._is_resumed is None:
            self._is_resumed = status.wall_seconds > 0 and status.step > 0
        if status is not None:
            # The coordinator's clock starts at the run's first lease. In a resumed run, or with mid-training, it is not zero
            # before the first lease of this command.
            waits = _waits_for_lease(status)
            if self._is_resumed or status.supervised_steps:
                if not waits:
                    self._startup.first_lease_seconds = now - self._started
            elif not waits or status.own_seconds > 0:
                self._startup.first_lease_seconds = max(0.0, now - self._started - status.own_seconds)
            if self._startup.first_lease_seconds is not None:
                return
        what = self._waiting_for()
        self._startup.waited_seconds[what] = self._startup.waited_seconds.get(what, 0.0) + since

    def _note_ready(self) -> None:
        for unit in self._runtime.statuses():
            done = unit.since if unit.role is Role.PREPARE and unit.state == "done" else unit.first_ready
            if done is not None:
                self._startup.ready_seconds.setdefault(unit.name, done - self._started)

    def _waiting_for(self) -> str:
        """The cause of the wait for the first lease."""
        for unit in self._runtime.statuses():
            if unit.role is Role.PREPARE and unit.state != "done":
                return "the model and tokenizer to be prepared"
        if self._status is None:
            return "the coordinator to start"
        return self._status.waiting_for or "the first lease"


def _waits_for_lease(status: Status) -> bool:
    """Whether no lease can have been issued, also while a stop ends mid-training."""
    return status.phase is Phase.WAITING or (status.phase is Phase.FINISHING and _in_mid_training(status))


def _in_mid_training(status: Status) -> bool:
    return status.supervised_steps > 0 and status.checkpoint_version < 0
