"""State transitions of the trainer's records: steps, publishes, checkpoints, the end of the run, usage.

Called by :func:`.transitions.apply` only.
"""

from __future__ import annotations

import zlib

import msgspec

from scalerl_api.metrics_fields import task_key
from scalerl_api.wire import PromptRef, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.accepted_group import Accepted
from scalerl_coordinator.accounting import Usage, add_mismatches, extend
from scalerl_coordinator.prompt_history import tried
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.step_figures import Row, figures, sum_step


def trainer_joined(state: CoordinatorState, record: r.TrainerJoined) -> None:
    state.incarnation = record.incarnation
    state.reported_failures = 0
    state.supervised_seconds = 0.0
    state.finish_reason = ""  # a trainer that sends hello has not exited; a stop request stays in force
    # A trainer at version > 0 has loaded that checkpoint; one at version 0 found no later checkpoint.
    state.checkpoint = record.version or min(state.checkpoint, 0)
    for step in range(state.version, record.version):
        # An earlier incarnation trained these steps, then returned to an older checkpoint because it could not load this
        # one. Their batches are known; only their reports are missing on this lineage.
        _advance(state, step, {}, 0, skipped=step in state.skips)
    if record.version == state.version:
        return
    for step in range(record.version, state.version):
        rollouts = sum_step(step, state.step_groups(step)).trained_rollouts
        if step in state.skips:
            state.counts.skipped -= rollouts
        else:
            state.counts.trained -= rollouts
        state.counts.queued += rollouts
        state.rows.pop(step)
    state.lost = max(state.lost, state.version, state.published)
    state.lineage = state.progress_at[record.version]
    state.progress_at = {v: lineage for v, lineage in state.progress_at.items() if v < record.version}
    state.version = record.version
    state.last_row = state.rows.get(record.version - 1, {})


def weights_lost(state: CoordinatorState, record: r.WeightsLost) -> None:
    state.lost = max(state.lost, record.version)


def step_trained(state: CoordinatorState, record: r.StepTrained) -> None:
    state.skips.pop(record.step, None)
    add_mismatches(state.mismatches, record.stats)
    _advance(state, record.step, _reported(state, record), record.trained_tokens, skipped=False)


def step_skipped(state: CoordinatorState, record: r.StepSkipped) -> None:
    state.skips[record.step] = state.last_skip_reason = record.reason
    state.skipped_steps += 1
    _advance(state, record.step, _reported(state, record), 0, skipped=True)


def supervised_trained(state: CoordinatorState, record: r.SupervisedTrained) -> None:
    state.supervised_steps, state.supervised_tokens = record.steps, record.tokens
    state.supervised_seconds += record.seconds
    state.usage.wall_seconds += record.seconds
    state.usage.waiting_seconds = max(0.0, state.usage.waiting_seconds - record.seconds)
    state.usage.device_seconds += record.device_seconds
    state.usage.trainer_busy_seconds += record.seconds


def _reported(state: CoordinatorState, record: r.StepTrained | r.StepSkipped) -> dict[str, float]:
    """Add the step's usage and failures to the totals; returns the trainer's statistics for its row."""
    state.usage.trainer_busy_seconds += record.busy_seconds
    # Every incarnation of the trainer counts its failures from 0.
    failures = int(record.stats.get("checkpoint_failures", 0))
    state.checkpoint_failures += max(0, failures - state.reported_failures)
    state.reported_failures = max(failures, state.reported_failures)
    return {**record.stats, "busy_seconds": record.busy_seconds}


def _advance(
    state: CoordinatorState, step: int, stats: dict[str, float], trained_tokens: int, *, skipped: bool
) -> None:
    """Extend the lineage by the closed step ``step``, and write its row."""
    by_slot = list(zip(state.slots_of(step), state.step_groups(step), strict=True))
    tries = state.step_tries(step)
    sums = sum_step(step, [group for _, group in by_slot] + [earlier.group for earlier in tries])
    results = [(state.prompts[slot], slot, group) for slot, group in by_slot if not group.given_up]
    results += [(earlier.prompt, -1, earlier.group) for earlier in tries]
    for task, history in enumerate(state.histories):
        history.add_step(step, [tried(p.index, slot, group) for p, slot, group in results if p.task == task])
    state.progress_at[step] = state.lineage
    reference = state.known_identity.reference
    state.lineage = extend(state.lineage, sums, trained_tokens, skipped=skipped, reference=reference)
    sample = state.samples.get(step)
    state.samples = {t: other for t, other in state.samples.items() if t > step}
    state.sample = (state.sample or sample) if state.lineage.flat_steps else None
    state.version = step + 1
    state.newest = max(state.newest, state.version)
    if skipped:
        state.counts.skipped += sums.trained_rollouts
    else:
        state.counts.trained += sums.trained_rollouts
    state.counts.queued -= sums.trained_rollouts
    row: Row = {
        "step": step,
        "version": state.version,
        "wall_seconds": state.usage.wall_seconds,
        "device_seconds": state.usage.device_seconds,
        "generator_busy_fraction": state.usage.generator_busy_fraction,
        "trainer_busy_fraction": state.usage.trainer_busy_fraction,
        "work_tokens": state.lineage.work_tokens,
        **figures(sums),
        **{f"reward_part_{name}": mean for name, mean in sums.part_means.items()},
        "skipped": int(skipped),
        "refilled_groups": len(tries),
        "masked_tokens": sums.masked_tokens,
        "unusable_tokens": sums.unusable_tokens,
        "staleness_mean": sums.staleness_sum / sums.staleness_tokens if sums.staleness_tokens else 0.0,
        "staleness_max": sums.staleness_max,
        "generated_tokens": state.usage.generated_tokens,
        "trained_tokens": trained_tokens,
        "checkpoint_failures": state.checkpoint_failures,
        "prompts_crc32": _crc32([state.prompts[slot] for slot in state.slots_of(step)]),
        **_task_figures(state, step),
    }
    if stats:  # else its report is lost
        row |= _since_last_step(state, step, sums.work_tokens)
    state.rows[step] = state.last_row = {**stats, **state.publish_stats, **row}
    state.publish_stats = {}


def _since_last_step(state: CoordinatorState, step: int, tokens: int) -> Row:
    """The figures of :data:`scalerl_api.metrics_fields.STEP_FIGURES` of a reported step with ``tokens`` completion tokens."""
    now, before = state.usage, state.usage_at_step or (None if step else Usage())
    state.usage_at_step = msgspec.structs.replace(now)
    seconds = now.wall_seconds - before.wall_seconds if before else 0.0
    if before is None or seconds <= 0:
        return {}
    alive = now.generator_alive_seconds - before.generator_alive_seconds
    generating = now.generator_busy_seconds - before.generator_busy_seconds
    computing = now.trainer_busy_seconds - before.trainer_busy_seconds
    return {
        "step_seconds": seconds,
        "trainer_bubble_fraction": max(0.0, 1.0 - computing / seconds),
        **({"generator_bubble_fraction": max(0.0, 1.0 - generating / alive)} if alive > 0 else {}),
        "generated_tokens_per_second": (now.generated_tokens - before.generated_tokens) / seconds,
        "consumed_tokens_per_second": tokens / seconds,
    }


def _task_figures(state: CoordinatorState, step: int) -> Row:
    """The figures of each task of a mix in a closed step, by key of metrics.jsonl."""
    names = state.known_identity.tasks
    if len(names) == 1:
        return {}
    groups: list[list[Accepted]] = [[] for _ in names]
    for slot, group in zip(state.slots_of(step), state.step_groups(step), strict=True):
        groups[state.prompts[slot].task].append(group)
    for earlier in state.step_tries(step):
        groups[earlier.prompt.task].append(earlier.group)
    return {
        task_key(figure, name): value
        for name, task_groups in zip(names, groups, strict=True)
        for figure, value in figures(sum_step(step, task_groups)).items()
    }


def _crc32(prompts: list[PromptRef]) -> int:
    """Checksum of a step's prompts."""
    return zlib.crc32(repr([(p.task, p.index) for p in prompts]).encode())


def published(state: CoordinatorState, record: r.Published) -> None:
    if record.version < state.published:
        # No member holds the later versions of the lost lineage any more: their evaluations are dropped.
        state.evaluations = {key: e for key, e in state.evaluations.items() if e.version <= record.version}
        for lease_id in [
            i
            for i, lease in state.leases.items()
            if lease.split is Split.HELD_OUT and lease.policy_version > record.version
        ]:
            del state.leases[lease_id]
    state.published = record.version
    state.last_publish = record.digest
    state.newest = max(state.newest, record.version)
    state.publish_stats = {**state.publish_stats, **record.stats}
    add_mismatches(state.mismatches, record.stats)


def unproven_changed(state: CoordinatorState, record: r.UnprovenChanged) -> None:
    state.unproven = record.unproven


def checkpoint_committed(state: CoordinatorState, record: r.CheckpointCommitted) -> None:
    state.checkpoint = record.step
    first = max(state.first_kept_step, min([record.step, *record.kept_steps]))
    for step in range(state.first_kept_step, first):
        for slot in state.slots_of(step):
            del state.groups[slot], state.prompts[slot]
            state.tries.pop(slot, None)
        del state.filled[step], state.progress_at[step], state.rows[step]
        state.skips.pop(step, None)
    state.first_kept_step = first
    while len(state.batch_sizes) > 1 and state.batch_sizes[1].first_step <= first:
        del state.batch_sizes[0]


def stop_requested(state: CoordinatorState, record: r.StopRequested) -> None:
    state.stop_reason = record.reason
    if not record.reason:
        state.finish_reason = ""


def finish_sent(state: CoordinatorState, record: r.FinishSent) -> None:
    state.finish_reason = record.reason


def usage_added(state: CoordinatorState, record: r.UsageAdded) -> None:
    usage = state.usage
    usage.wall_seconds += record.wall_seconds
    usage.device_seconds += record.device_seconds
    usage.generator_alive_seconds += record.generator_alive_seconds
    usage.generator_busy_seconds += record.generator_busy_seconds
    usage.generated_tokens += record.generated_tokens
    usage.waiting_seconds += record.waiting_seconds
