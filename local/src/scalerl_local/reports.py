"""What a local run reports of its start, and of problems that do not end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from scalerl_api.paths import RunPaths
from scalerl_api.wire import Phase, Status
from scalerl_lifecycle.workloads import Role
from scalerl_local.run_view import Event, Startup, UnitStatus

_WARNINGS: Final = {
    "checkpoint_failures": (
        1,
        "a checkpoint could not be written ({count} so far{why}); the last good one stays",
    ),
    "skipped_steps": (1, "a step was skipped ({count} so far): {reason}"),
    "grading_errors": (
        2,
        "the verifier failed on a completion ({count} so far), which is left out; the generators' logs say why",
    ),
    "counts.given_up": (
        2,
        "{count} rollouts are given up so far: too long, or failed; the coordinator's log says which",
    ),
    "counts.timed_out_leases": (
        2,
        "{count} leases timed out so far: their generators made no progress",
    ),
}
"""Failures that do not end the run, by the name of their count in the coordinator's status: a factor, and the text of an event,
which is reported when the count exceeds the factor times the last reported count."""


class Reports:
    """Events about the coordinator's statuses."""

    def __init__(self, paths: RunPaths, on_event: Callable[[Event], None]) -> None:
        self._paths = paths
        self._on_event = on_event
        self._reported = dict.fromkeys(_WARNINGS, 0)
        self._checkpoint_problem = ""
        """Why the last failed checkpoint failed."""
        self.unsaved_version = -1
        """The version that the trainer keeps in memory because it cannot be saved; -1 otherwise."""
        self._learning_problems = ("", "")
        """Those of the last status; each is reported when it begins."""

    def warnings(self, status: Status) -> None:
        """Reports problems that do not end the run, when they begin."""
        self._checkpoint_problem = status.checkpoint_problem or self._checkpoint_problem
        unsaved, held = status.unsaved_version, self.unsaved_version
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
        self.unsaved_version = unsaved
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

    def lost(self, status: Status) -> None:
        """Reports the updates that the end of this command lost."""
        version, saved = status.unsaved_version, status.checkpoint_version
        if self._paths.checkpoint(version).is_dir():
            return
        lost = f"since version {saved} " if saved > 0 else ""
        text = f"version {version} was not saved: all updates {lost}are lost ({status.checkpoint_problem})"
        if _in_mid_training(status):
            text = f"mid-training was not saved: its steps since its last checkpoint are lost ({status.checkpoint_problem})"
        self._on_event(Event("trainer", text, is_problem=True))


class StartupMeter:
    """Measures the time to the first lease. started: ``time.monotonic()`` at the start of the command."""

    def __init__(self, started: float) -> None:
        self.startup = Startup()
        self._started = started
        self._last_tick = started
        self._is_resumed: bool | None = None

    def note(self, units: Sequence[UnitStatus], status: Status | None, now: float) -> None:
        since, self._last_tick = now - self._last_tick, now
        if self.startup.first_lease_seconds is not None:
            return
        self.ready(units)
        if status is not None and self._is_resumed is None:
            self._is_resumed = status.wall_seconds > 0 and status.step > 0
        if status is not None:
            # The coordinator's clock starts at the run's first lease. In a resumed run, or with mid-training, it is not zero
            # before the first lease of this command.
            waits = _waits_for_lease(status)
            if self._is_resumed or status.supervised_steps:
                if not waits:
                    self.startup.first_lease_seconds = now - self._started
            elif not waits or status.own_seconds > 0:
                self.startup.first_lease_seconds = max(0.0, now - self._started - status.own_seconds)
            if self.startup.first_lease_seconds is not None:
                return
        what = _waiting_for(units, status)
        self.startup.waited_seconds[what] = self.startup.waited_seconds.get(what, 0.0) + since

    def ready(self, units: Sequence[UnitStatus]) -> None:
        """Notes when units were first ready."""
        for unit in units:
            done = unit.since if unit.role is Role.PREPARE and unit.state == "done" else unit.first_ready
            if done is not None:
                self.startup.ready_seconds.setdefault(unit.name, done - self._started)


def _waiting_for(units: Sequence[UnitStatus], status: Status | None) -> str:
    """The cause of the wait for the first lease."""
    for unit in units:
        if unit.role is Role.PREPARE and unit.state != "done":
            return "the model and tokenizer to be prepared"
    if status is None:
        return "the coordinator to start"
    if status.phase is Phase.WAITING and _in_mid_training(status):
        return "the end of mid-training"
    # At its end it is saved, and not published yet: its steps are no cause of their own.
    return status.waiting_for.partition(", which has done")[0] or "the first lease"


def _waits_for_lease(status: Status) -> bool:
    """Whether no lease can have been issued, also while a stop ends mid-training, or before that of an earlier command is taken back."""
    ends = status.phase is Phase.FINISHING and (_in_mid_training(status) or not status.members)
    return status.phase is Phase.WAITING or ends


def _in_mid_training(status: Status) -> bool:
    return status.supervised_steps > 0 and status.checkpoint_version < 0
