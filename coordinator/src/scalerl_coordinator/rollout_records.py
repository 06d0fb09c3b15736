"""What generators' records do to the state: leases given and taken back, groups, evaluations.

The functions of :meth:`scalerl_coordinator.state.State.apply`, and called by it alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from scalerl_api.wire import Split
from scalerl_coordinator import records as r
from scalerl_coordinator.accounting import Accepted
from scalerl_coordinator.batcher import zero_variance
from scalerl_coordinator.evaluation import Evaluation, PromptResult, summarize

if TYPE_CHECKING:
    from scalerl_coordinator.state import State


class OpenLease(msgspec.Struct, frozen=True, array_like=True):
    """A slot or evaluation prompt that somebody works on. Its deadline is not here: it dies with the process."""

    split: Split
    slot: int
    prompt_index: int
    policy_version: int
    holder: str


def issued(state: State, record: r.LeasesIssued) -> None:
    state.leased = True
    for slot, prompt_index in record.held_back:
        state.prompts[slot] = prompt_index
        bisect.insort(state.reissue, slot)
    for issue in record.issues:
        if issue.split is Split.HELD_OUT:
            _remove(state.evaluations[issue.policy_version].todo, issue.slot)
        elif issue.slot >= state.next_slot:
            state.next_slot = issue.slot + 1
            state.prompts[issue.slot] = issue.prompt_index
        else:
            _remove(state.reissue, issue.slot)
            state.lapsed.pop(issue.slot, None)
        state.leases[state.lease_id(issue.number)] = OpenLease(
            issue.split, issue.slot, issue.prompt_index, issue.policy_version, record.holder
        )
        state.next_lease = issue.number + 1


def lease_closed(state: State, record: r.LeaseClosed) -> None:
    lease = state.leases.pop(record.lease_id)
    if lease.split is Split.HELD_OUT:
        evaluation = state.evaluations.get(lease.policy_version)
        if evaluation is not None:
            bisect.insort(evaluation.todo, lease.slot)
        if record.why is r.Why.INVALID:
            state.fates.held_out_invalid += record.rollouts
        return
    bisect.insort(state.reissue, lease.slot)
    if record.why in (r.Why.EXPIRED, r.Why.TIMED_OUT):
        state.fates.expired_leases += 1
        state.fates.timed_out_leases += record.why is r.Why.TIMED_OUT
        state.lapsed[lease.slot] = record.lease_id
    elif record.why is r.Why.STALE:
        state.fates.stale += record.rollouts
    elif record.why is r.Why.INVALID:
        state.fates.invalid += record.rollouts


def group_accepted(state: State, record: r.GroupAccepted) -> None:
    if state.leases.pop(record.lease_id, None) is None:
        del state.lapsed[record.slot]
        _remove(state.reissue, record.slot)
    group = Accepted(
        lease_id=record.lease_id,
        prompt_tokens=record.prompt_tokens,
        lengths=record.lengths,
        scores=record.scores,
        truncated=record.truncated,
        oldest_version=record.oldest_version,
        version_tokens=record.version_tokens,
        grading_errors=record.grading_errors,
        ungraded=record.ungraded,
        masked_tokens=record.masked_tokens,
    )
    fates = state.fates
    fates.acknowledged += group.rollouts
    fates.queued += group.rollouts
    fates.grading_errors += group.grading_errors
    fates.ungraded += len(group.ungraded)
    fates.masked_tokens += sum(group.masked_tokens)
    state.groups[record.slot] = group
    fill(state, record.slot)


def given_up(state: State, record: r.GivenUp) -> None:
    fates = state.fates
    if record.split is Split.HELD_OUT:
        evaluation = state.evaluations[record.version]
        _remove(evaluation.todo, record.slot)
        samples = state.settled.evaluation_samples
        fates.held_out_given_up += samples
        evaluation.results[record.slot] = PromptResult("", 0.0, samples, 0, 0, False, given_up=True)
        _finish_evaluation(state, evaluation)
        return
    _remove(state.reissue, record.slot)
    state.lapsed.pop(record.slot, None)
    rollouts = state.settled.completions_per_prompt
    fates.given_up += rollouts
    if record.why is r.GivenUpFor.TOO_LONG:
        fates.too_long += rollouts
    state.groups[record.slot] = Accepted(
        *("", 0, [], [], 0, state.newest, 0, True), given_up=record.why.value, given_up_rollouts=rollouts
    )
    fill(state, record.slot)


def fill(state: State, slot: int) -> None:
    """The slot is done; with the last one of its step, the step closes."""
    step = state.step_of(slot)
    state.filled[step] = state.filled.get(step, 0) + 1
    if state.closed(step) and state.settled.zero_variance_filter:
        for member in state.step_groups(step):
            if not member.filtered and zero_variance(member.graded_scores):
                member.filtered = True
                state.fates.queued -= member.rollouts
                state.fates.filtered += member.rollouts


def dropped(state: State, record: r.Dropped) -> None:
    state.fates.late += record.late
    state.fates.duplicate += record.duplicate


def evaluation_started(state: State, record: r.EvaluationStarted) -> None:
    line = state.line if record.version == state.version else state.marks.get(record.version, state.line)
    state.evaluations[record.version] = Evaluation(
        record.version, line.work_tokens, list(range(record.prompts)), {}, record.prompts
    )


def evaluation_released(state: State, record: r.EvaluationReleased) -> None:
    state.evaluations[record.version].released = True


def evaluation_accepted(state: State, record: r.EvaluationAccepted) -> None:
    lease = state.leases.pop(record.lease_id)
    evaluation = state.evaluations[lease.policy_version]
    evaluation.results[lease.slot] = PromptResult(
        record.lease_id,
        sum(record.scores),
        len(record.scores),
        record.tokens,
        record.truncated,
        record.mixed,
    )
    state.fates.grading_errors += record.grading_errors
    _finish_evaluation(state, evaluation)


def _finish_evaluation(state: State, evaluation: Evaluation) -> None:
    if evaluation.complete:
        del state.evaluations[evaluation.version]
        point = summarize(
            evaluation,
            state.settled.evaluation_set,
            state.usage.wall_seconds,
            state.usage.device_seconds,
        )
        bisect.insort(state.points, point, key=lambda p: p.version)


def _remove(ordered: list[int], value: int) -> None:
    at = bisect.bisect_left(ordered, value)
    if at == len(ordered) or ordered[at] != value:
        raise AssertionError(f"{value} is not waiting to be issued")
    del ordered[at]


APPLY: dict[type, Callable[[State, Any], None]] = {
    r.LeasesIssued: issued,
    r.LeaseClosed: lease_closed,
    r.GroupAccepted: group_accepted,
    r.GivenUp: given_up,
    r.Dropped: dropped,
    r.EvaluationStarted: evaluation_started,
    r.EvaluationReleased: evaluation_released,
    r.EvaluationAccepted: evaluation_accepted,
}
