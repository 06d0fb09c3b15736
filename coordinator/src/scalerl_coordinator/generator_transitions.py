"""State transitions of the generators' records: leases, groups, evaluations. Called by :func:`.transitions.apply` only."""

from __future__ import annotations

import bisect

from scalerl_api.wire import Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.accepted_group import Accepted, Try
from scalerl_coordinator.evaluation import Evaluation, PromptResult, summarize
from scalerl_coordinator.state import CoordinatorState, OpenLease


def issued(state: CoordinatorState, record: r.LeasesIssued) -> None:
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


def lease_closed(state: CoordinatorState, record: r.LeaseClosed) -> None:
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


def group_accepted(state: CoordinatorState, record: r.GroupAccepted) -> None:
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


def given_up(state: CoordinatorState, record: r.GivenUp) -> None:
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


def dropped(state: CoordinatorState, record: r.Dropped) -> None:
    state.counts.late += record.late
    state.counts.duplicate += record.duplicate


def evaluation_started(state: CoordinatorState, record: r.EvaluationStarted) -> None:
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


def evaluation_released(state: CoordinatorState, record: r.EvaluationReleased) -> None:
    state.evaluations[record.version, record.task].released = True


def evaluation_accepted(state: CoordinatorState, record: r.EvaluationAccepted) -> None:
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
