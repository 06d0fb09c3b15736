"""Which versions are evaluated on which sets, when an evaluation starts, and when the run no longer waits for its last one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from scalerl_api.wire import Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core
from scalerl_coordinator.evaluation import due as is_due
from scalerl_coordinator.leases import MAX_FINAL_ATTEMPTS

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EvaluationSchedule:
    """The evaluations of a :class:`~.core.Core`."""

    core: Core
    stalled_since: float | None = None
    """Since when no member has been able to serve the final evaluation; None while one can."""

    def has_evaluation(self, version: int) -> bool:
        """Whether the trainer's current ``version`` has or will have a point on the curve; a run's last version always does,
        unless the run is interrupted."""
        core = self.core
        return not core.interrupted and (
            bool(core.end_reason)
            or all(self.due(version, t) for t in core.settings.identity.set_tasks if core.settings.follows(t))
        )

    def due(self, version: int, task: int) -> bool:
        """Whether ``version`` is to be evaluated on a set."""
        settings = self.core.settings
        every = settings.identity.steps_per_batch or 1
        return is_due(version, settings.every_steps(task), settings.max_steps, every)

    def has_point(self, version: int, task: int) -> bool:
        return any((p.version, p.task) == (version, task) for p in self.core.state.points)

    def has_points(self, version: int) -> bool:
        """Whether ``version`` has a point of every evaluation set."""
        return all(self.has_point(version, task) for task in self.core.settings.identity.set_tasks)

    def start(self, version: int, task: int) -> None:
        prompts = self.core.settings.identity.evaluation_set(task).prompts
        self.core.commit(r.EvaluationStarted(version, prompts, task))

    def start_if_due(self) -> None:
        """Start the evaluations of the published version."""
        core, state = self.core, self.core.state
        version = state.published
        if version != state.version:
            return
        for task in core.settings.identity.set_tasks:
            if not self.due(version, task) or self.has_point(version, task):
                continue
            in_progress = [e.version for e in state.evaluations.values() if e.task == task]
            if not in_progress or (core.settings.follows(task) and version not in in_progress):
                self.start(version, task)
            elif version not in in_progress:
                # The generators cannot keep up with this set: a queue of evaluations would delay every later point more.
                log.warning(
                    "version %d gets no point of evaluation set %s: the evaluation of version %d is not complete",
                    *(version, core.settings.identity.evaluation_set(task).name, in_progress[0]),
                )

    def final_stalled(self, version: int, now: float) -> bool:
        """Whether no member has held the final version for so long that its point is skipped.

        A run that used up its budget waits as long as an evaluation may hold a publish; a stopped run, only as long as a
        member's heartbeats may be missing.
        """
        core = self.core
        if any(m.healthy and m.version == version for m in core.membership.members.values()):
            self.stalled_since = None
            return False
        if self.stalled_since is None:
            self.stalled_since = now
        timeout = core.membership.timeout_seconds if core.state.stop_reason else core.settings.hold_seconds
        if now - self.stalled_since < timeout:
            return False
        problem = f"; the last publish failed: {core.publish_problem}" if core.publish_problem else ""
        log.error(
            "skipped the final evaluation (version %d): no generator holds that version%s", version, problem
        )
        return True

    def out_of_attempts(self, version: int) -> bool:
        """Whether every remaining prompt of the final evaluation has failed ``MAX_FINAL_ATTEMPTS`` times."""
        evaluations = [e for e in self.core.state.evaluations.values() if e.version == version]
        remaining = [
            (e.task, Split.HELD_OUT, p) for e in evaluations for p in range(e.prompts) if p not in e.results
        ]
        book = self.core.book
        if not remaining or any(book.attempts(key) < MAX_FINAL_ATTEMPTS for key in remaining):
            return False
        log.error(
            "skipped the final evaluation (version %d): %d of its prompts failed %d times or more, last reason: "
            "%s",
            *(version, len(remaining), MAX_FINAL_ATTEMPTS, book.retries[remaining[0]].reason),
        )
        return True
