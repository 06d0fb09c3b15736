"""Requests of the trainer: the next action, its shard of a step, publishing, checkpoints."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from scalerl_api import wire
from scalerl_api.wire import NextAction, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.accounting import Row
from scalerl_coordinator.batcher import Item, balance
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal, check_identity
from scalerl_coordinator.evaluation import Evaluation, due
from scalerl_coordinator.leases import MAX_FINAL_ATTEMPTS
from scalerl_coordinator.membership import Member
from scalerl_coordinator.off_policy import scheme
from scalerl_coordinator.state import CoordinatorState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hold:
    """A publish that waits for an evaluation."""

    since: float
    last_measurable: float
    """When a member last held the evaluated version."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A rank's shard: what to read from the journal, and how to answer with it."""

    step: int
    groups: list[wire.GroupMeta]
    lease_ids: list[str]
    """Of each group of the step, in slot order: the key of its blob; "" for a slot that was given up."""
    items: list[Item]
    ambiguous: bool
    """As in :class:`~scalerl_api.wire.Shard`."""


@dataclass(slots=True)
class TrainerRequests:
    """The trainer's endpoints, on a :class:`~.core.Core`."""

    core: Core
    _holds: dict[int, _Hold] = field(default_factory=dict)
    """By evaluated version."""
    _stalled_since: float | None = None
    """Since when no member can make the final evaluation."""

    # --- hello ----------------------------------------------------------------------------------

    def hello(self, request: wire.TrainerHello, now: float) -> wire.TrainerWelcome:
        """Accept a trainer; it supersedes the previous one.

        Raises:
            Refusal: ``bad-snapshot``, ``identity``, ``no-state``, ``checkpoints-lost`` or ``unknown-version``.
        """
        core, state = self.core, self.core.state
        if not request.incarnation:
            raise Refusal("bad-request", "incarnation is empty")
        if state.awaits_trainer and request.snapshot is not None:
            self._restore(request.snapshot, request.version)
        if not all(state.closed(step) for step in range(state.version, request.version)):
            raise Refusal(
                "no-state",
                f"the trainer's checkpoint is of version {request.version}, the journal has {state.version} steps; "
                f"a checkpoint's snapshot restores an empty coordinator only: empty its directory, or start a new run",
            )
        if request.version < 0:
            raise Refusal("bad-request", f"version is {request.version}, must be at least 0")
        if request.version < state.first_kept_step:
            self._refuse_forgotten(request.version)
        if request.version < state.version:
            log.warning(
                "the trainer returns from version %d to %d; these steps are trained again, on the same rollouts",
                *(state.version, request.version),
            )
        core.flush_usage(now)
        core.commit(r.TrainerJoined(request.incarnation, request.version))
        log.info("trainer of %d ranks at version %d", request.world_size, request.version)
        self._holds.clear()
        self._stalled_since = None
        return wire.TrainerWelcome(
            next_step=state.version,
            published_version=state.published,
            consecutive_skipped_steps=state.lineage.consecutive_skipped_steps,
        )

    def _refuse_forgotten(self, version: int) -> NoReturn:
        state = self.core.state
        if version == 0:
            raise Refusal(
                "checkpoints-lost",
                f"the trainer has no checkpoint, but one of version {state.checkpoint} was committed and the batches "
                f"before version {state.first_kept_step} are deleted: starting from version 0 would lose "
                f"{state.counts.acknowledged} acknowledged rollouts and {len(state.points)} points. Put a checkpoint "
                f"back, or start a new run in an empty directory",
            )
        raise Refusal(
            "unknown-version",
            f"version {version} is older than any kept checkpoint (oldest: {state.first_kept_step}); "
            f"start from a kept one",
        )

    def _restore(self, snapshot: bytes, version: int) -> None:
        try:
            restored = CoordinatorState.decode(snapshot)
        except msgspec.DecodeError as error:
            raise Refusal(
                "bad-snapshot", f"the checkpoint's coordinator snapshot cannot be decoded: {error}"
            ) from error
        check_identity(restored, self.core.settings)
        if restored.version != version:
            raise Refusal(
                "bad-snapshot", f"the snapshot is of version {restored.version}, the checkpoint of {version}"
            )
        log.warning("no journal: the state is restored from the trainer's checkpoint of version %d", version)
        self.core.commit(r.Restored(snapshot))
        self.core.updated_since_restore = set()
        for member in self.core.membership.members.values():
            self.core.mark_lost(member.version)

    def check(self, incarnation: str) -> None:
        """Raises Refusal unless ``incarnation`` is the present trainer."""
        current = self.core.state.incarnation
        if not current:
            raise Refusal("unknown-trainer", "this coordinator has no trainer; send hello again")
        if incarnation != current:
            raise Refusal("superseded", "a newer trainer has said hello; this one must exit")

    def _check_version(self, what: str, version: int) -> None:
        if version != self.core.state.version:
            raise Refusal(
                "out-of-step",
                f"{what} {version}, but {self.core.state.version} steps are trained; send hello again",
            )

    # --- what next ------------------------------------------------------------------------------

    def next(self, request: wire.NextRequest, now: float) -> wire.Next | None:
        """The next action, or None while there is none. Raises Refusal."""
        self.check(request.incarnation)
        self._check_version("the trainer holds version", request.version)
        core, state = self.core, self.core.state
        if core.end_reason:
            return self._next_at_end(now)
        if state.closed(state.version) and state.version >= state.published:
            return wire.Next(action=NextAction.TRAIN, step=state.version)
        if self._outdated(now):
            return wire.Next(action=NextAction.PUBLISH, step=state.version)
        if state.closed(state.version):
            return wire.Next(action=NextAction.TRAIN, step=state.version)
        return None

    def _outdated(self, now: float) -> list[Member]:
        """Members that need the present weights.

        After the trainer returns to a checkpoint, members may hold newer weights of the lost lineage, up to what was published:
        they keep them until the run ends and its last version is evaluated.
        """
        version, newest = self.core.state.version, self.core.newest_possible
        unpublished = version > self.core.state.published and self.publishes(version)
        exactly = bool(self.core.end_reason) or unpublished
        oldest = version if exactly else scheme(self.core.settings.identity).oldest(version)
        return [
            m
            for m in self.core.membership.publishable(now)
            if m.version < oldest or m.version > newest or (exactly and m.version != version)
        ]

    def _next_at_end(self, now: float) -> wire.Next | None:
        core, state = self.core, self.core.state
        version = state.version
        if core.interrupted:
            return self._finish(now)
        if state.published != version or (self._outdated(now) and not self._has_points(version)):
            return wire.Next(action=NextAction.PUBLISH, step=version, reason=core.end_reason)
        for task in core.settings.identity.set_tasks:
            if not self._has_point(version, task) and (version, task) not in state.evaluations:
                self._start_evaluation(version, task)
        if (
            self._has_points(version)
            or self._final_evaluation_stalled(version, now)
            or self._out_of_attempts(version)
        ):
            return self._finish(now)
        return None

    def _finish(self, now: float) -> wire.Next:
        core = self.core
        if not core.state.finish_reason:
            core.flush_usage(now)
            core.commit(r.FinishSent(core.end_reason))
        return wire.Next(action=NextAction.FINISH, step=core.state.version, reason=core.end_reason)

    def has_evaluation(self, version: int) -> bool:
        """Whether ``version``, which the trainer holds, has or will have a point: the last version of a run does."""
        core = self.core
        return not core.interrupted and (
            bool(core.end_reason)
            or all(
                self._due(version, t) for t in core.settings.identity.set_tasks if core.settings.follows(t)
            )
        )

    def _due(self, version: int, task: int) -> bool:
        settings = self.core.settings
        every = settings.identity.steps_per_batch or 1
        return due(version, settings.every_steps(task), settings.max_steps, every)

    def publishes(self, version: int) -> bool:
        """Whether the trainer is to publish ``version`` now that it has it."""
        return scheme(self.core.settings.identity).publishes(version)

    def _has_point(self, version: int, task: int) -> bool:
        return any((p.version, p.task) == (version, task) for p in self.core.state.points)

    def _has_points(self, version: int) -> bool:
        """Whether ``version`` has a point of every evaluation set."""
        return all(self._has_point(version, task) for task in self.core.settings.identity.set_tasks)

    def _final_evaluation_stalled(self, version: int, now: float) -> bool:
        """Whether no member has held the final version for so long that its point is skipped.

        A run that used up its budget waits as long as a publish would; a stopped one, for the timeout of a silent member.
        """
        core = self.core
        if any(m.healthy and m.version == version for m in core.membership.members.values()):
            self._stalled_since = None
            return False
        if self._stalled_since is None:
            self._stalled_since = now
        timeout = core.membership.timeout_seconds if core.state.stop_reason else core.settings.hold_seconds
        if now - self._stalled_since < timeout:
            return False
        log.error("skipped the final evaluation (version %d): no generator holds that version", version)
        return True

    def _out_of_attempts(self, version: int) -> bool:
        """Whether every remaining prompt of the final evaluation has failed ``MAX_FINAL_ATTEMPTS`` times."""
        evaluations = [e for e in self.core.state.evaluations.values() if e.version == version]
        left = [
            (e.task, Split.HELD_OUT, p) for e in evaluations for p in range(e.prompts) if p not in e.results
        ]
        book = self.core.book
        if not left or any(book.attempts(key) < MAX_FINAL_ATTEMPTS for key in left):
            return False
        log.error(
            "skipped the final evaluation (version %d): %d of its prompts failed %d times or more, last reason: "
            "%s",
            *(version, len(left), MAX_FINAL_ATTEMPTS, book.retries[left[0]].reason),
        )
        return True

    # --- a step ---------------------------------------------------------------------------------

    def plan_shard(self, request: wire.ShardRequest) -> ShardPlan:
        """Which sequences of a closed step belong to which rank. Raises Refusal."""
        self.check(request.incarnation)
        state = self.core.state
        if not 0 <= request.rank < request.world_size:
            raise Refusal("bad-request", f"rank {request.rank} is outside 0..{request.world_size - 1}")
        if request.step < state.first_kept_step or not state.closed(request.step):
            raise Refusal(
                "not-ready",
                f"step {request.step} is not closed, or deleted (kept from {state.first_kept_step})",
            )
        groups = state.step_groups(request.step)
        items = [
            Item(at, sample, group.prompt_tokens + length)
            for at, group in enumerate(groups)
            if not group.filtered
            for sample, (length, trained) in enumerate(zip(group.lengths, group.trained_tokens, strict=True))
            if trained
        ]
        metas = [
            wire.GroupMeta(
                slot=slot,
                scores=g.scores,
                rewards=g.rewards,
                completion_tokens=g.lengths,
                filtered=g.filtered,
                ungraded=g.ungraded,
                masked_tokens=g.masked_tokens,
            )
            for slot, g in zip(state.slots_of(request.step), groups, strict=True)
        ]
        shard = balance(items, request.world_size)[request.rank]
        lease_ids = [g.lease_id for g in groups]
        return ShardPlan(request.step, metas, lease_ids, shard, ambiguous=request.step <= state.lost)

    def step(self, report: wire.StepReport, now: float) -> Row | None:
        """Record a trained step: its row of metrics.jsonl, or None if it is already recorded. Raises Refusal."""
        self.check(report.incarnation)
        core, state = self.core, self.core.state
        _check_finite(report.stats)
        if not (
            math.isfinite(report.busy_seconds) and report.busy_seconds >= 0 and report.trained_tokens >= 0
        ):
            raise Refusal("bad-request", "busy_seconds and trained_tokens must be finite and not negative")
        if report.step == state.version - 1:
            return None
        if report.step != state.version or not state.closed(report.step):
            raise Refusal("out-of-step", f"step {report.step} is reported, step {state.version} is next")
        core.flush_usage(now)
        if report.skipped:
            groups = zip(state.slots_of(report.step), state.step_groups(report.step), strict=True)
            slots = [slot for slot, group in groups if not group.filtered]
            log.error("step %d was skipped: %s; not trained on: slots %s", report.step, report.skipped, slots)
            core.commit(r.StepSkipped(report.step, report.skipped, slots, report.stats, report.busy_seconds))
        else:
            core.commit(r.StepTrained(report.step, report.stats, report.busy_seconds, report.trained_tokens))
        return state.rows[report.step]

    def supervised(self, report: wire.SupervisedReport) -> wire.SupervisedReported:
        """Record the progress of mid-training: its time counts as the run's. Raises Refusal."""
        self.check(report.incarnation)
        core, state = self.core, self.core.state
        if not (math.isfinite(report.seconds) and min(report.seconds, report.steps, report.tokens) >= 0):
            raise Refusal("bad-request", "steps, tokens and seconds must be finite and not negative")
        if state.version:
            raise Refusal(
                "out-of-step", "mid-training is reported after the first step of RL; send hello again"
            )
        # Once a lease was issued, the meter runs anyway.
        seconds = 0.0 if state.leased else max(0.0, report.seconds - state.supervised_seconds)
        settings = core.settings
        devices = settings.trainer_devices + len(core.membership.members) * settings.generator_devices
        core.commit(r.SupervisedTrained(report.steps, report.tokens, seconds, seconds * devices))
        return wire.SupervisedReported(stop_reason=core.end_reason)

    # --- publishing -----------------------------------------------------------------------------

    def publish_begin(self, request: wire.PublishBegin, now: float) -> wire.PublishPermit | None:
        """The members to send the weights to, or None while an evaluation needs the previous version.

        Raises Refusal.
        """
        self.check(request.incarnation)
        self._check_version("the trainer publishes version", request.version)
        state = self.core.state
        outdated = self._outdated(now)
        blocking = self._evaluations_in_the_way(request.version, {m.version for m in outdated})
        self._holds = {v: self._holds.get(v, _Hold(now, now)) for v in blocking}
        self._release_holds(now)
        if any(e.version in blocking and self._holds_publish(e) for e in state.evaluations.values()):
            return None
        members = [
            wire.Member(
                member_id=m.member_id, name=m.name, control_url=m.control_url, weight_version=m.version
            )
            for m in outdated
        ]
        return wire.PublishPermit(ready=True, members=members)

    def _holds_publish(self, evaluation: Evaluation) -> bool:
        """Whether it is of the run's curve, and has not waited too long."""
        return self.core.settings.follows(evaluation.task) and not evaluation.released

    def _evaluations_in_the_way(self, version: int, overwritten: set[int]) -> set[int]:
        """Versions under evaluation that a publish of ``version`` would take from a generator, or that none holds any more.

        A generator that joins under PPO-off-policy gets weights while others hold those of the batch, and continue with their
        evaluation.
        """
        state = self.core.state
        present = {m.version for m in self.core.membership.members.values() if m.healthy}
        return {
            v
            for (v, _), evaluation in state.evaluations.items()
            if v < version and self._holds_publish(evaluation)
            if v in overwritten or (version > state.published and v not in present)
        }

    def _release_holds(self, now: float) -> None:
        core = self.core
        for version in list(self._holds):
            evaluations = [
                e for e in core.state.evaluations.values() if e.version == version and self._holds_publish(e)
            ]
            if not evaluations:
                del self._holds[version]
                continue
            hold = self._holds[version]
            if any(m.healthy and m.version == version for m in core.membership.members.values()):
                hold.last_measurable = now
            waited, unable = now - hold.since, now - hold.last_measurable
            if waited >= core.settings.hold_seconds or unable >= core.membership.timeout_seconds:
                for evaluation in evaluations:
                    log.warning(
                        "evaluation of version %d has %d of %d prompts after %.0f s; newer weights will finish it",
                        *(version, len(evaluation.results), evaluation.prompts, waited),
                    )
                    core.commit(r.EvaluationReleased(version, evaluation.task))
                del self._holds[version]

    def tick(self, now: float) -> None:
        """End holds and the wait for a final evaluation."""
        if self._holds:
            self._release_holds(now)
        if self._holds or self._stalled_since is not None:
            self.core.wake.add(TRAINER)

    def publish_commit(self, request: wire.PublishCommit, now: float) -> None:
        """Record which members hold the version now. A retry after a lost answer counts once. Raises Refusal."""
        self.check(request.incarnation)
        self._check_version("the trainer published version", request.version)
        _check_finite(request.stats)
        core, members = self.core, self.core.membership
        for member_id in request.updated:
            member = members.members.get(member_id)
            if member is not None:
                members.set_version(member, request.version, now)
                if core.updated_since_restore is not None:
                    core.updated_since_restore.add(member.name)
        for member_id in request.failed:
            member = members.remove(member_id)
            if member is not None:
                log.warning(
                    "%s did not receive version %d; it must register again", member.name, request.version
                )
                members.failed_publish(member.name, now)
                core.reassign_leases(member.name)
        ahead = any(
            m.healthy and (m.version > request.version or not m.version_reported)
            for m in members.members.values()
        )
        digest = hashlib.blake2b(msgspec.msgpack.encode(request), digest_size=8).hexdigest()
        repeated = digest == core.state.last_publish
        if not repeated and (request.version >= core.state.published or core.end_reason or not ahead):
            core.commit(r.Published(request.version, request.stats, digest))
        self._start_evaluation_if_due()
        core.wake |= {WORK, TRAINER}

    def _start_evaluation_if_due(self) -> None:
        core, state = self.core, self.core.state
        version = state.published
        if version != state.version:
            return
        for task in core.settings.identity.set_tasks:
            if not self._due(version, task) or self._has_point(version, task):
                continue
            begun = [e.version for e in state.evaluations.values() if e.task == task]
            if not begun or (core.settings.follows(task) and version not in begun):
                self._start_evaluation(version, task)
            elif version not in begun:
                # Its generators have no room: points that come ever later would be of no use.
                log.warning(
                    "version %d gets no point of evaluation set %s: that of version %d is not complete",
                    *(version, core.settings.identity.evaluation_set(task).name, begun[0]),
                )

    def _start_evaluation(self, version: int, task: int) -> None:
        prompts = self.core.settings.identity.evaluation_set(task).prompts
        self.core.commit(r.EvaluationStarted(version, prompts, task))

    # --- checkpoints ----------------------------------------------------------------------------

    def checkpoint_begin(self, request: wire.CheckpointBegin, now: float) -> wire.CheckpointSnapshot:
        """The state to store in the checkpoint of ``step``. Raises Refusal."""
        self.check(request.incarnation)
        self._check_version("the checkpoint is of version", request.step)
        self.core.flush_usage(now)
        state = self.core.state
        whole = (p for p in self.core.curve if not p.mixed_versions and math.isfinite(p.reward))
        best = max(whole, key=lambda p: (p.reward, p.version), default=None)
        return wire.CheckpointSnapshot(
            step=request.step,
            snapshot=state.detached().encode(),
            best_version=-1 if best is None else best.version,
        )

    def checkpoint_commit(self, request: wire.CheckpointCommit, now: float) -> None:
        """Record that the checkpoint is on disk. Raises Refusal."""
        self.check(request.incarnation)
        if not 0 <= request.step <= self.core.state.version or any(s < 0 for s in request.kept_steps):
            raise Refusal(
                "bad-request", f"checkpoint {request.step} kept with {request.kept_steps}: no such version"
            )
        self.core.flush_usage(now)
        self.core.commit(r.CheckpointCommitted(request.step, request.kept_steps))


def fill_shard(plan: ShardPlan, groups: Mapping[str, r.StoredGroup]) -> wire.Shard:
    """The answer to a shard request, from the step's groups by lease."""
    sequences = []
    for item in plan.items:
        group = groups[plan.lease_ids[item.group]]
        completion = group.completions[item.sample]
        sequences.append(
            wire.Sequence(
                group=item.group,
                sample=item.sample,
                prompt_token_ids=group.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                teacher_logprobs=completion.teacher_logprobs,
                versions=completion.versions,
            )
        )
    return wire.Shard(step=plan.step, groups=plan.groups, sequences=sequences, ambiguous=plan.ambiguous)


def _check_finite(stats: dict[str, float]) -> None:
    for name, value in stats.items():
        if not math.isfinite(value):
            raise Refusal(
                "bad-request", f"stats.{name} is {value}; only finite numbers go into metrics.jsonl"
            )
