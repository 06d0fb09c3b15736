"""The only way to change the state: :func:`apply`, used live and in replay.

It is pure: no I/O, no clock, no randomness, and no settings except the journaled :class:`~.settings.Identity`. The same
records yield the same state, and every prefix of the records yields a state that the run was in.

Here are the changes at a start and of the generators' records; :mod:`.trainer_transitions` has those of the trainer's.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from scalerl_api.wire import Split
from scalerl_coordinator import batch_sizes
from scalerl_coordinator import journal_records as r
from scalerl_coordinator import trainer_transitions as of_trainer
from scalerl_coordinator.accepted_group import Accepted, Try
from scalerl_coordinator.evaluation import Evaluation, PromptResult, summarize
from scalerl_coordinator.state import CoordinatorState, OpenLease


def apply(state: CoordinatorState, record: r.Record) -> None:
    """Change ``state`` by one record. :mod:`.core` has checked the record, so one that does not fit the state is a bug."""
    _APPLY[type(record)](state, record)


def _started(state: CoordinatorState, record: r.Started) -> None:
    batch_sizes.change(state, record.identity)
    state.nonce, state.next_lease = record.nonce, 0


def _restored(state: CoordinatorState, record: r.Restored) -> None:
    identity, nonce, number = state.known_identity, state.nonce, state.next_lease
    restored = CoordinatorState.decode(record.snapshot)
    for name in state.__struct_fields__:
        setattr(state, name, getattr(restored, name))
    state.nonce, state.next_lease = nonce, number
    state.restored = state.version
    if record.forked_step >= 0:
        state.forked_step = record.forked_step
        state.inherited_seconds = state.usage.wall_seconds
        state.inherited_device_seconds = state.usage.device_seconds
        # As in a new run: its own time counts from its first lease.
        state.usage.waiting_seconds, state.leased = 0.0, False
        state.checkpoint_failures = state.reported_failures = 0
    batch_sizes.change(state, identity)


# --- of the generators: leases, groups, evaluations ----------------------------------------------


def _issued(state: CoordinatorState, record: r.LeasesIssued) -> None:
    state.leased = state.leased or bool(record.issues)
    for slot, prompt in record.new_slots:
        state.prompts[slot] = prompt
        bisect.insort(state.open_slots, slot)
    for issue in record.issues:
        if issue.prompt.split is Split.HELD_OUT:
            _remove(state.evaluations[issue.policy_version, issue.prompt.task].todo, issue.slot)
        elif issue.slot >= state.next_slot:
            state.next_slot = issue.slot + 1
            state.prompts[issue.slot] = issue.prompt
        else:
            _remove(state.open_slots, issue.slot)
            state.expired_lease_of.pop(issue.slot, None)
        state.leases[state.lease_id(issue.number)] = OpenLease(
            issue.prompt, issue.slot, issue.policy_version, record.holder
        )
        state.next_lease = issue.number + 1
    state.next_slot = max([state.next_slot, *(slot + 1 for slot, _ in record.new_slots)])
    for task, cursor in record.cursors.items():
        state.cursors[task] = max(state.cursors[task], cursor)
    state.fold_history()


def _lease_closed(state: CoordinatorState, record: r.LeaseClosed) -> None:
    lease = state.leases.pop(record.lease_id)
    if lease.split is Split.HELD_OUT:
        evaluation = state.evaluations.get((lease.policy_version, lease.prompt.task))
        if evaluation is not None:
            bisect.insort(evaluation.todo, lease.slot)
        if record.reason is r.CloseReason.INVALID:
            state.counts.held_out_invalid += record.rollouts
        return
    bisect.insort(state.open_slots, lease.slot)
    if record.reason in (r.CloseReason.EXPIRED, r.CloseReason.TIMED_OUT):
        state.counts.expired_leases += 1
        state.counts.timed_out_leases += record.reason is r.CloseReason.TIMED_OUT
        state.expired_lease_of[lease.slot] = record.lease_id
    elif record.reason is r.CloseReason.STALE:
        state.counts.stale += record.rollouts
    elif record.reason is r.CloseReason.INVALID:
        state.counts.invalid += record.rollouts


def _group_accepted(state: CoordinatorState, record: r.GroupAccepted) -> None:
    if state.leases.pop(record.lease_id, None) is None:
        del state.expired_lease_of[record.slot]
        _remove(state.open_slots, record.slot)
    group = Accepted.of_record(record)
    if record.sample is not None:
        state.samples.setdefault(state.step_of(record.slot), record.sample)
    counts = state.counts
    counts.acknowledged += group.rollouts
    counts.queued += group.rollouts
    counts.grading_errors += group.grading_errors
    counts.ungraded += len(group.ungraded)
    counts.masked_tokens += sum(group.masked_tokens)
    if record.next_prompt is None:
        state.groups[record.slot] = group
        state.fill_slot(record.slot)
        return
    group.filtered = True
    counts.queued -= group.rollouts
    counts.filtered += group.rollouts
    counts.refilled += group.rollouts
    state.tries.setdefault(record.slot, []).append(Try(state.prompts[record.slot], group))
    state.prompts[record.slot] = record.next_prompt
    bisect.insort(state.open_slots, record.slot)


def _given_up(state: CoordinatorState, record: r.GivenUp) -> None:
    counts = state.counts
    if record.split is Split.HELD_OUT:
        evaluation = state.evaluations[record.version, record.task]
        _remove(evaluation.todo, record.slot)
        samples = state.known_identity.evaluation_set(record.task).samples
        counts.held_out_given_up += samples
        evaluation.results[record.slot] = PromptResult(
            "", 0.0, samples, 0, 0, False, given_up=True, passed=0, labels=record.labels
        )
        _finish_evaluation(state, evaluation)
        return
    _remove(state.open_slots, record.slot)
    state.expired_lease_of.pop(record.slot, None)
    rollouts = state.known_identity.completions_per_prompt
    counts.given_up += rollouts
    if record.cause is r.GiveUpReason.TOO_LONG:
        counts.too_long += rollouts
    state.groups[record.slot] = Accepted(
        *("", 0, [], [], 0, state.newest, 0, True), given_up=record.cause.value, given_up_rollouts=rollouts
    )
    state.fill_slot(record.slot)


def _dropped(state: CoordinatorState, record: r.Dropped) -> None:
    state.counts.late += record.late
    state.counts.duplicate += record.duplicate


def _evaluation_started(state: CoordinatorState, record: r.EvaluationStarted) -> None:
    lineage = state.progress_at.get(record.version, state.lineage)
    state.evaluations[record.version, record.task] = Evaluation(
        record.version,
        lineage.work_tokens,
        list(range(record.prompts)),
        {},
        record.prompts,
        task=record.task,
        split=record.split,
    )


def _evaluation_released(state: CoordinatorState, record: r.EvaluationReleased) -> None:
    state.evaluations[record.version, record.task].released = True


def _evaluation_accepted(state: CoordinatorState, record: r.EvaluationAccepted) -> None:
    lease = state.leases.pop(record.lease_id)
    evaluation = state.evaluations[lease.policy_version, lease.prompt.task]
    evaluation.results[lease.slot] = PromptResult(
        record.lease_id,
        sum(record.scores),
        len(record.scores),
        record.tokens,
        record.truncated,
        record.mixed,
        part_sums={name: sum(values) for name, values in record.parts.items()},
        passed=sum(score >= 1.0 for score in record.scores),
        labels=record.labels,
    )
    state.counts.grading_errors += record.grading_errors
    _finish_evaluation(state, evaluation)


def _finish_evaluation(state: CoordinatorState, evaluation: Evaluation) -> None:
    if evaluation.complete:
        del state.evaluations[evaluation.version, evaluation.task]
        identity = state.known_identity
        evaluation_set = identity.evaluation_set(evaluation.task)
        point = summarize(
            evaluation,
            evaluation_set.name,
            identity.measured(evaluation.task),
            state.usage.wall_seconds,
            state.usage.device_seconds,
            evaluation_set.k,
        )
        bisect.insort(state.points, point, key=lambda p: (p.version, p.task))


def _remove(ordered: list[int], value: int) -> None:
    at = bisect.bisect_left(ordered, value)
    if at == len(ordered) or ordered[at] != value:
        raise AssertionError(f"{value} is not waiting to be issued")
    del ordered[at]


_APPLY: dict[type, Callable[[CoordinatorState, Any], None]] = {
    r.Started: _started,
    r.Restored: _restored,
    r.LeasesIssued: _issued,
    r.LeaseClosed: _lease_closed,
    r.GroupAccepted: _group_accepted,
    r.GivenUp: _given_up,
    r.Dropped: _dropped,
    r.EvaluationStarted: _evaluation_started,
    r.EvaluationReleased: _evaluation_released,
    r.EvaluationAccepted: _evaluation_accepted,
    r.TrainerJoined: of_trainer.trainer_joined,
    r.WeightsLost: of_trainer.weights_lost,
    r.StepTrained: of_trainer.step_trained,
    r.StepSkipped: of_trainer.step_skipped,
    r.SupervisedTrained: of_trainer.supervised_trained,
    r.Published: of_trainer.published,
    r.UnprovenChanged: of_trainer.unproven_changed,
    r.CheckpointCommitted: of_trainer.checkpoint_committed,
    r.StopRequested: of_trainer.stop_requested,
    r.FinishSent: of_trainer.finish_sent,
    r.UsageAdded: of_trainer.usage_added,
}
"""What each record changes."""
