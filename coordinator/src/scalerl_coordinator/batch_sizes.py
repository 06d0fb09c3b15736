"""What a journal makes of settings that differ from those of the process before.

Steps that are closed stay as they are. From the first one that is not, slots are cut into steps by the new settings.
Slots keep their number, their prompt and, where it is young enough for its new step, their group. Groups of one step
may then differ in their number of completions: advantages and weights are by group.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from scalerl_api.wire import Split
from scalerl_coordinator.rollout_records import fill
from scalerl_coordinator.settings import Identity
from scalerl_coordinator.slots import BatchSize, first_slot, staleness

if TYPE_CHECKING:
    from scalerl_coordinator.state import State


def change(state: State, identity: Identity) -> None:
    """Let ``identity`` hold from here on."""
    before, state.identity = state.identity, identity
    if before is None:
        state.batch_sizes = [BatchSize(0, 0, identity.prompts_per_step)]
    elif identity != before:
        _reclaim(state, before, identity)
        _cut(state, identity)


def _reclaim(state: State, before: Identity, identity: Identity) -> None:
    """Leases whose groups would not be what is wanted now end; evaluations of another set begin again."""
    same_set = identity.evaluation_set == before.evaluation_set
    ended = {
        Split.TRAIN: (identity.completions_per_prompt, identity.max_completion_tokens)
        != (before.completions_per_prompt, before.max_completion_tokens),
        Split.HELD_OUT: not same_set or identity.evaluation_samples != before.evaluation_samples,
    }
    for lease_id, lease in list(state.leases.items()):
        if ended[lease.split]:
            del state.leases[lease_id]
            if lease.split is Split.TRAIN:
                bisect.insort(state.reissue, lease.slot)
    for evaluation in state.evaluations.values():
        if not same_set:
            evaluation.results = {}
        if ended[Split.HELD_OUT]:
            evaluation.todo = [p for p in range(evaluation.prompts) if p not in evaluation.results]


def _cut(state: State, identity: Identity) -> None:
    step = state.version
    while state.closed(step):
        step += 1
    first = first_slot(step, state.batch_sizes)
    state.batch_sizes = [size for size in state.batch_sizes if size.first_step < step]
    state.batch_sizes.append(BatchSize(step, first, identity.prompts_per_step))
    state.filled = {t: groups for t, groups in state.filled.items() if t < step}
    fates = state.fates
    for slot in sorted(slot for slot in state.groups if slot >= first):
        group = state.groups[slot]
        if group.given_up:
            fill(state, slot)
            continue
        if group.filtered:  # its step was closed before an earlier one was, and is open again
            group.filtered = False
            fates.filtered -= group.rollouts
            fates.queued += group.rollouts
        if staleness(state.step_of(slot), group.oldest_version) > identity.max_staleness_steps:
            del state.groups[slot]
            bisect.insort(state.reissue, slot)
            fates.acknowledged -= group.rollouts
            fates.queued -= group.rollouts
            fates.stale += group.rollouts
            fates.ungraded -= len(group.ungraded)
            fates.masked_tokens -= sum(group.masked_tokens)
        else:
            fill(state, slot)
