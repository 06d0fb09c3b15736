"""Faults that a run continues despite: since when it has one, and when it is over. Pure.

The coordinator counts over the whole run, so that a count alone would degrade a run for good. What the status keeps
beside the counts shows whether one has changed since.
"""

from __future__ import annotations

from typing import Final

from scalerl_api.conditions import Reason
from scalerl_api.status import TroubleStatus
from scalerl_api.wire import Status
from scalerl_operator.controller.observe import Problem, rfc3339, seconds

QUIET_SECONDS: Final = 600.0
"""So long without another skipped step, ungraded completion or slot given up, and a run is no longer degraded by those
before."""


def update_trouble(before: TroubleStatus, coordinator_report: Status, unix_seconds: float) -> TroubleStatus:
    """What is known of a run's trouble after the coordinator's last word.

    Of a failure and a newer checkpoint since the word before, which was first is not said. It counts as saved: if it is
    not, the next failure tells. What was counted before the first word is an earlier release's, and no news.
    """
    given_up = coordinator_report.counts.given_up + coordinator_report.counts.held_out_given_up
    graded_at, skipped_at, given_up_at, unsaved, saved = (
        before.last_grading_error_time,
        before.last_skipped_step_time,
        before.last_given_up_time,
        before.unsaved_since,
        before.checkpoint_version,
    )
    if saved is not None:
        if coordinator_report.grading_errors > before.grading_errors:
            graded_at = rfc3339(unix_seconds)
        if coordinator_report.skipped_steps > before.skipped_steps:
            skipped_at = rfc3339(unix_seconds)
        if given_up > before.given_up_rollouts:
            given_up_at = rfc3339(unix_seconds)
        if coordinator_report.checkpoint_failures > before.checkpoint_failures and unsaved is None:
            unsaved = saved
    if unsaved is not None:
        # A trainer that went further back has written nothing by that.
        unsaved = (
            None if coordinator_report.checkpoint_version > unsaved else coordinator_report.checkpoint_version
        )
    return TroubleStatus(
        grading_errors=coordinator_report.grading_errors,
        last_grading_error_time=graded_at,
        skipped_steps=coordinator_report.skipped_steps,
        last_skipped_step_time=skipped_at,
        given_up_rollouts=given_up,
        last_given_up_time=given_up_at,
        checkpoint_failures=coordinator_report.checkpoint_failures,
        unsaved_since=unsaved,
        checkpoint_version=coordinator_report.checkpoint_version,
    )


def problem(trouble: TroubleStatus, unix_seconds: float) -> Problem | None:
    """Why the run is not as it should be now; without the numbers, which move."""
    if trouble.unsaved_since is not None:
        return Problem(Reason.CHECKPOINT_FAILED, "")
    for last, reason in (
        (trouble.last_skipped_step_time, Reason.STEP_SKIPPED),
        (trouble.last_grading_error_time, Reason.GRADING_FAILED),
        (trouble.last_given_up_time, Reason.SLOTS_GIVEN_UP),
    ):
        if last is not None and unix_seconds - seconds(last) < QUIET_SECONDS:
            return Problem(reason, "")
    return None
