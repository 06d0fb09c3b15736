"""The problems of a run that its coordinator's status shows: the volume, what the run needs, and faults despite which it continues.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from scalerl_api.reasons import Reason
from scalerl_api.status import FaultStatus
from scalerl_api.wire import Status
from scalerl_lifecycle.lifecycle_types import Problem
from scalerl_lifecycle.status_fields import rfc3339, seconds

QUIET_SECONDS: Final = 600.0
"""Time without another skipped step, ungraded completion or slot given up after which a run is no longer degraded by them."""
_NEEDED: Final = {
    "reward_problem": Reason.REWARD_SERVICE_UNAVAILABLE,
    "environment_problem": Reason.ENVIRONMENT_FAILING,
    "teacher_problem": Reason.TEACHER_UNAVAILABLE,
    "checkpoint_problem": Reason.CHECKPOINT_FAILED,
}
_LEARNING: Final = {"logprob_problem": Reason.LOGPROBS_NOT_FINITE, "learning_problem": Reason.NOT_LEARNING}
"""Fields of the coordinator's status with a problem, and the reason of each."""
_COUNTED: Final = {
    "skipped_steps": ("last_skipped_step_time", Reason.STEP_SKIPPED),
    "grading_errors": ("last_grading_error_time", Reason.GRADING_FAILED),
    "given_up_rollouts": ("last_given_up_time", Reason.SLOTS_GIVEN_UP),
}
"""Fields of :class:`FaultStatus`: a count, the time of its last increase, and the reason of a run that it degrades."""


def journal_problem(coordinator: Status | None) -> Problem | None:
    """Why the run's volume cannot be written."""
    error = "" if coordinator is None else coordinator.journal_error
    text = f"the run's volume cannot be written: {error}"
    return Problem(Reason.VOLUME_NOT_WRITABLE, text) if error else None


def unsaved_problem(coordinator: Status | None) -> Problem | None:
    """Why the last version of a run that has ended training is in no checkpoint."""
    if coordinator is None or coordinator.unsaved_version < 0:
        return None
    text = f"version {coordinator.unsaved_version} is in no checkpoint: {coordinator.checkpoint_problem}. {Reason.UNSAVED_WEIGHTS.text}"
    return Problem(Reason.UNSAVED_WEIGHTS, text)


def problem_of_running(
    coordinator: Status | None, faults: FaultStatus, unix_seconds: float
) -> Problem | None:
    """The first problem despite which a run continues: of what it needs, of its faults, of what it learns, of its copies."""
    return (
        _first(coordinator, _NEEDED)
        or _fault(faults, unix_seconds)
        or _first(coordinator, _LEARNING)
        or _copy_or_tracker_problem(coordinator)
    )


def _first(coordinator: Status | None, fields: Mapping[str, Reason]) -> Problem | None:
    texts = ((reason, getattr(coordinator, name, "")) for name, reason in fields.items())
    return next((Problem(reason, text) for reason, text in texts if text), None)


def _copy_or_tracker_problem(coordinator: Status | None) -> Problem | None:
    if coordinator is None:
        return None
    if coordinator.uploads is not None and coordinator.uploads.problem:
        return Problem(Reason.UPLOAD_FAILED, coordinator.uploads.problem)
    if coordinator.exports is not None and coordinator.exports.problem:
        return Problem(Reason.EXPORT_FAILED, "")
    failing = [f"{tracker.name}: {tracker.problem}" for tracker in coordinator.trackers if tracker.problem]
    return Problem(Reason.TRACKER_FAILED, "; ".join(failing)) if failing else None


def update_faults(before: FaultStatus, coordinator: Status, unix_seconds: float) -> FaultStatus:
    """The faults of a run after the coordinator's last status.

    Counts are of the whole run, so a run is degraded for a time after a count has increased, not by the count. The first status
    has no increases. If a checkpoint failed and another was written since the last status, their order is not known, and the
    later one counts as written: if it was not, the next failure shows it.
    """
    update: dict[str, Any] = {
        "skipped_steps": coordinator.skipped_steps,
        "grading_errors": coordinator.grading_errors,
        "given_up_rollouts": coordinator.counts.given_up + coordinator.counts.held_out_given_up,
        "checkpoint_failures": coordinator.checkpoint_failures,
        "checkpoint_version": coordinator.checkpoint_version,
    }
    unsaved, saved = before.unsaved_since, before.checkpoint_version
    if saved is not None and saved < coordinator.forked_step:
        saved = None  # the counts of a fork begin with those of its source
    if saved is not None:
        rose = {name for name, count in update.items() if count > getattr(before, name)}
        update |= {last: rfc3339(unix_seconds) for name, (last, _) in _COUNTED.items() if name in rose}
        unsaved = saved if "checkpoint_failures" in rose and unsaved is None else unsaved
    if unsaved is not None:
        # A lower version is that of a trainer that returned to an earlier checkpoint.
        unsaved = None if coordinator.checkpoint_version > unsaved else coordinator.checkpoint_version
    return before.model_copy(update=update | {"unsaved_since": unsaved})


def _fault(faults: FaultStatus, unix_seconds: float) -> Problem | None:
    """The current fault. The message has no counts, which would change it at every increase."""
    if faults.unsaved_since is not None:
        return Problem(Reason.CHECKPOINT_FAILED, "")
    for name, reason in _COUNTED.values():
        last = getattr(faults, name)
        if last is not None and unix_seconds - seconds(last) < QUIET_SECONDS:
            return Problem(reason, "")
    return None
