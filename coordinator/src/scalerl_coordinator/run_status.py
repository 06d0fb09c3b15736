"""The run's status, as served to the operator and the CLI."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from scalerl_api import wire
from scalerl_api.mismatch import ALL, POSITIONS, SOURCES, key
from scalerl_api.wire import Phase
from scalerl_coordinator.core import Core
from scalerl_coordinator.learning import learning_problem, logprob_problem
from scalerl_coordinator.leases import REPORTED_ATTEMPTS
from scalerl_coordinator.state import CoordinatorState

_COUNTS: Final = tuple(name for name in wire.Counts.__struct_fields__ if name != "leased")
"""Counts of the status that the state has under the same names."""


def build_status(core: Core) -> wire.Status:
    """The status. It may include records that are not on disk yet."""
    state, usage, counts, meter = core.state, core.state.usage, core.state.counts, core.meter
    members = sorted(core.membership.members.values(), key=lambda m: m.name)
    phase = _phase(core)
    return wire.Status(
        phase=phase,
        waiting_for=_waiting_for(core, phase),
        step=state.version,
        published_version=state.published,
        stop_reason=state.finish_reason or core.end_reason,
        counts=wire.Counts(
            leased=_leased_rollouts(core),
            **{name: getattr(counts, name) for name in _COUNTS},
        ),
        members=[
            wire.Member(
                member_id=m.member_id, name=m.name, control_url=m.control_url, weight_version=m.version
            )
            for m in members
        ],
        points=_newest_by_label(core.curve),
        set_points={
            core.settings.identity.evaluation_set(task).name: _newest_by_label(state.curve(task))
            for task in core.settings.identity.set_tasks
            if task != core.settings.forecast_task
        },
        last_step_stats=state.last_row,
        wall_seconds=usage.wall_seconds + meter.wall,
        waiting_seconds=usage.waiting_seconds + meter.waiting,
        device_seconds=usage.device_seconds + meter.device,
        tokens_generated=usage.generated_tokens + meter.tokens,
        tokens_trained=state.lineage.trained_tokens,
        generator_busy_fraction=usage.generator_busy_fraction,
        trainer_busy_fraction=usage.trainer_busy_fraction,
        max_staleness_steps=state.lineage.staleness_max,
        mean_staleness_steps=state.lineage.mean_staleness,
        mismatch=_mismatch(state),
        grading_errors=counts.grading_errors,
        checkpoint_failures=state.checkpoint_failures,
        skipped_steps=state.skipped_steps,
        last_skip_reason=state.last_skip_reason,
        checkpoint_version=state.checkpoint,
        checkpoint_problem="" if core.failed_checkpoint is None else core.failed_checkpoint.reason,
        uploads=core.uploads,
        unsaved_version=_unsaved_version(core),
        trainer_registered=not state.awaits_trainer,
        teacher_problem=_problem(core, "teacher"),
        reward_problem=_problem(core, "reward"),
        environment_problem=_problem(core, "environment"),
        supervised_steps=state.supervised_steps,
        supervised_tokens=state.supervised_tokens,
        compute_tokens=float(core.compute_tokens),
        forked_step=state.forked_step,
        inherited_seconds=state.inherited_seconds,
        inherited_device_seconds=state.inherited_device_seconds,
        learning_problem=learning_problem(core),
        logprob_problem=logprob_problem(core),
    )


def _newest_by_label(points: list[wire.EvaluationPoint]) -> list[wire.EvaluationPoint]:
    """``points`` with the breakdown by label of the newest only: ``labels.csv`` has all, and the status is polled often."""
    return [
        structs.replace(point, by_label=[]) if point.by_label else point for point in points[:-1]
    ] + points[-1:]


def _mismatch(state: CoordinatorState) -> list[wire.Mismatch]:
    return [
        wire.Mismatch(
            source=source,
            positions=positions,
            kl=sums.kl / sums.tokens,
            recent_kl=sums.recent_kl / sums.recent_tokens,
            tokens=int(sums.tokens),
        )
        for source in SOURCES
        for positions in (ALL, *POSITIONS)
        if (sums := state.mismatches.get(key(source, "kl", positions))) is not None
    ]


def _leased_rollouts(core: Core) -> int:
    training = sum(lease.split is wire.Split.TRAIN for lease in core.state.leases.values())
    return training * core.settings.identity.completions_per_prompt


def _phase(core: Core) -> Phase:
    if core.finished:
        return Phase.FINISHED
    if core.end_reason:
        return Phase.FINISHING
    if any(m.version >= 0 for m in core.membership.members.values()):
        return Phase.RUNNING
    return Phase.WAITING


def _waiting_for(core: Core, phase: Phase) -> str:
    state = core.state
    if phase is Phase.FINISHED:
        return ""
    if state.awaits_trainer:
        return "the trainer's first hello"
    unsaved = core.failed_checkpoint
    if unsaved is not None and unsaved.holding:
        return f"the trainer's last checkpoint: {unsaved.reason}"
    failed = f"; the last publish failed: {core.publish_problem}" if core.publish_problem else ""
    if not core.membership.members:
        return f"a generator to register{failed}"
    if phase is Phase.WAITING and state.supervised_steps and state.published < 0:
        return f"the end of mid-training, which has done {state.supervised_steps:,} steps"
    if phase is Phase.WAITING:
        return f"the first weights to reach a generator{failed}"
    if phase is Phase.FINISHING and state.finish_reason:
        return "the trainer's last checkpoint" + ("" if unsaved is None else f": {unsaved.reason}")
    for slot_key, retries in sorted(core.book.retries.items()):
        if retries.attempts >= REPORTED_ATTEMPTS:
            return f"{core.describe(slot_key)}, which failed {retries.attempts} times, last reason: {retries.reason}"
    if problem := _problem(core, "reward"):
        return f"the reward service: {problem}"
    if problem := _problem(core, "environment"):
        return f"the environment: {problem}"
    for (version, task), evaluation in sorted(state.evaluations.items()):
        what = f"{len(evaluation.results)} of {evaluation.prompts} {core.settings.identity.evaluation_set(task).name} prompts"
        if core.settings.follows(task) or core.end_reason:
            return f"the evaluation of version {version}: {what}"
    if problem := _problem(core, "teacher"):
        return f"the teacher: {problem}"
    missing = state.missing(state.version)
    return f"{missing} groups of step {state.version}{failed}" if missing else ""


def _unsaved_version(core: Core) -> int:
    failed = core.failed_checkpoint
    return failed.step if failed is not None and failed.holding and not core.finished else -1


def _problem(core: Core, of: str) -> str:
    """The first member with a problem of the teacher, the reward service or an environment, and that problem; empty without one."""
    members = sorted(core.membership.members.values(), key=lambda m: m.name)
    return next((f"{m.name}: {problem}" for m in members if (problem := getattr(m, f"{of}_problem"))), "")
