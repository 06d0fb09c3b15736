"""Applies the settings of a new process to the state, if they differ from those of the previous process.

Closed steps do not change. From the first step that is not closed on, slots are divided into steps by the new settings. A
slot keeps its number and its prompt, and keeps its group if that is not too stale for the slot's new step. The groups of a
step may then differ in their number of completions, which is no problem: advantages and weights are computed per group.
"""

from __future__ import annotations

import bisect

from scalerl_api.wire import Split
from scalerl_coordinator.prompt_history import PromptHistory
from scalerl_coordinator.settings import Identity
from scalerl_coordinator.slots import BatchSize, first_slot, staleness
from scalerl_coordinator.state import CoordinatorState


def change(state: CoordinatorState, identity: Identity) -> None:
    """Set the state's settings to ``identity``."""
    before, state.identity = state.identity, identity
    for _ in range(len(state.histories), len(identity.tasks)):
        state.histories.append(PromptHistory())
        state.cursors.append(0)
    if before is None:
        state.batch_sizes = [BatchSize(0, 0, identity.prompts_per_step)]
    elif identity != before:
        _end_outdated_leases(state, before, identity)
        _divide_steps(state, identity)


def _end_outdated_leases(state: CoordinatorState, before: Identity, identity: Identity) -> None:
    """End leases whose groups no longer fit the settings; restart evaluations whose set has changed."""

    def training_limits(one: Identity) -> tuple[int, int, tuple[int, ...]]:
        return one.completions_per_prompt, one.max_completion_tokens, one.task_max_tokens

    training_ended = training_limits(identity) != training_limits(before)
    tasks = identity.set_tasks  # the same as before: the sets are fixed
    changed = {task for task in tasks if identity.measured(task) != before.measured(task)}
    ended = changed | {
        t for t in tasks if identity.evaluation_set(t).samples != before.evaluation_set(t).samples
    }
    for lease_id, lease in list(state.leases.items()):
        if training_ended if lease.split is Split.TRAIN else lease.prompt.task in ended:
            del state.leases[lease_id]
            if lease.split is Split.TRAIN:
                bisect.insort(state.open_slots, lease.slot)
    for evaluation in state.evaluations.values():
        if evaluation.task in changed:
            evaluation.results = {}
        if evaluation.task in ended:
            evaluation.todo = [p for p in range(evaluation.prompts) if p not in evaluation.results]


def _divide_steps(state: CoordinatorState, identity: Identity) -> None:
    step = state.version
    while state.closed(step):
        step += 1
    first = first_slot(step, state.batch_sizes)
    state.batch_sizes = [size for size in state.batch_sizes if size.first_step < step]
    state.batch_sizes.append(BatchSize(step, first, identity.prompts_per_step))
    state.filled = {t: groups for t, groups in state.filled.items() if t < step}
    counts = state.counts
    for slot in sorted(slot for slot in state.groups if slot >= first):
        group = state.groups[slot]
        if group.given_up:
            state.fill_slot(slot)
            continue
        if group.filtered:  # its step closed before an earlier step did, and is open again now
            group.filtered = False
            counts.filtered -= group.rollouts
            counts.queued += group.rollouts
        if staleness(state.step_of(slot), group.oldest_version) > identity.max_staleness_steps:
            del state.groups[slot]
            bisect.insort(state.open_slots, slot)
            counts.acknowledged -= group.rollouts
            counts.queued -= group.rollouts
            counts.stale += group.rollouts
            counts.ungraded -= len(group.ungraded)
            counts.masked_tokens -= sum(group.masked_tokens)
        else:
            state.fill_slot(slot)
