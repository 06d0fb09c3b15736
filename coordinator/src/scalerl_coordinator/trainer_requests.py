"""Requests of the trainer: hello, the next action, the shards of a step, publishing, checkpoints."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from scalerl_api import wire
from scalerl_api.attempts import Attempt
from scalerl_api.wire import NextAction, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.accounting import Row
from scalerl_coordinator.batcher import Item, balance
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal, check_identity
from scalerl_coordinator.evaluation import Evaluation, due
from scalerl_coordinator.leases import MAX_FINAL_ATTEMPTS
from scalerl_coordinator.membership import Member, name_of
from scalerl_coordinator.off_policy import scheme
from scalerl_coordinator.state import CoordinatorState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hold:
    """An evaluation that a publish waits for."""

    since: float
    """When the publish began to wait."""
    last_measurable: float
    """When a healthy member last held the evaluated version."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What :func:`fill_shard` needs to build a rank's shard from the groups in the journal."""

    step: int
    groups: list[wire.GroupMeta]
    """All groups of the step, in slot order."""
    lease_ids: list[str]
    """The lease of each group, which is the key of its blob; "" for a slot that was given up."""
    items: list[Item]
    """The rank's sequences."""
    ambiguous: bool
    """As in :class:`~scalerl_api.wire.Shard`."""


@dataclass(slots=True)
class TrainerRequests:
    """Decides the requests of the trainer on a :class:`~.core.Core`."""

    core: Core
    _holds: dict[int, _Hold] = field(default_factory=dict)
    """Evaluations that hold a publish, by evaluated version."""
    _stalled_since: float | None = None
    """Since when no member has been able to serve the final evaluation; None while one can."""
    _permitted: int = -1
    """The version that the trainer was last permitted to publish; it trains on meanwhile."""

    # --- hello ----------------------------------------------------------------------------------

    def hello(self, request: wire.TrainerHello, now: float) -> wire.TrainerWelcome:
        """Accept a trainer; it supersedes the previous one.

        Raises:
            Refusal: ``bad-request``, ``superseded``, ``bad-snapshot``, ``identity``, ``no-state``, ``checkpoints-lost`` or
                ``unknown-version``.
        """
        core, state = self.core, self.core.state
        if not request.incarnation:
            raise Refusal("bad-request", "incarnation is empty")
        attempt, latest = Attempt.parse(request.incarnation), Attempt.parse(state.incarnation)
        if attempt is not None and latest is not None and attempt < latest:
            raise Refusal(
                "superseded", f"attempt {latest} of the trainer has sent hello; attempt {attempt} must exit"
            )
        if state.awaits_trainer and request.snapshot is not None:
            self._restore(request.snapshot, request.version)
        elif state.awaits_trainer and core.steps_lost:
            raise Refusal(
                "checkpoints-lost",
                "the run has trained steps, but neither its volume nor checkpoint.to has a checkpoint: restore one of them, or "
                "create another run",
            )
        if not all(state.closed(step) for step in range(state.version, request.version)):
            raise Refusal(
                "no-state",
                f"the trainer's checkpoint has version {request.version}, but the journal has {state.version} steps. "
                f"Only an empty coordinator can be restored from a checkpoint: empty its directory, or start a new run",
            )
        if request.version < 0:
            raise Refusal("bad-request", f"version is {request.version}, must be at least 0")
        if request.version < state.first_kept_step:
            self._refuse_forgotten(request.version)
        if request.version < state.version:
            log.warning(
                "the trainer returns from version %d to %d; the steps between them are trained again, on the same rollouts",
                *(state.version, request.version),
            )
        core.flush_usage(now)
        core.commit(r.TrainerJoined(request.incarnation, request.version))
        core.failed_checkpoint = None
        log.info("trainer of %d ranks at version %d", request.world_size, request.version)
        self._holds.clear()
        self._permitted = -1
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
                f"the trainer has no checkpoint, but a checkpoint of version {state.checkpoint} was committed and the "
                f"batches before version {state.first_kept_step} are deleted: starting from version 0 would lose "
                f"{state.counts.acknowledged} acknowledged rollouts and {len(state.points)} evaluation points. Restore a "
                f"checkpoint, or start a new run in an empty directory",
            )
        raise Refusal(
            "unknown-version",
            f"version {version} is older than the oldest kept checkpoint ({state.first_kept_step}); "
            f"start from a kept checkpoint",
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
                "bad-snapshot",
                f"the snapshot has version {restored.version}, but its checkpoint has {version}",
            )
        forked = self.core.settings.forked_step
        # A checkpoint of the fork's own has the step in its snapshot.
        of_source = version == forked and restored.forked_step != forked
        if of_source:
            log.info("forked: continuing from the other run's checkpoint of version %d", version)
        else:
            log.warning(
                "no journal: restoring the state from the trainer's checkpoint of version %d", version
            )
        self.core.commit(r.Restored(snapshot, forked if of_source else -1))
        self.core.updated_since_restore = set()
        for member in self.core.membership.members.values():
            self.core.mark_lost(member.version)

    def check(self, incarnation: str) -> None:
        """Check that ``incarnation`` is the current trainer.

        Raises:
            Refusal: ``unknown-trainer`` or ``superseded``.
        """
        current = self.core.state.incarnation
        if not current:
            raise Refusal("unknown-trainer", "this coordinator has no trainer; send hello again")
        if incarnation != current:
            raise Refusal("superseded", "a newer trainer has sent hello; this one must exit")

    def _check_version(self, what: str, version: int) -> None:
        if version != self.core.state.version:
            raise Refusal(
                "out-of-step",
                f"{what} {version}, but {self.core.state.version} steps are trained; send hello again",
            )

    # --- the next action ------------------------------------------------------------------------

    def next(self, request: wire.NextRequest, now: float) -> wire.Next | None:
        """The next action, or None while the trainer must wait. Raises Refusal.

        While an evaluation holds the publish of a version, closed steps are trained, whose rollouts are at most k steps old by the
        leases. Versions are then skipped in publishing, but none that is due to be evaluated.
        """
        self.check(request.incarnation)
        self._check_version("the trainer holds version", request.version)
        core, state = self.core, self.core.state
        core.uploads = request.uploads
        if core.end_reason:
            return self._next_at_end(now)
        version, closed = state.version, state.closed(state.version)
        train = wire.Next(action=NextAction.TRAIN, step=version) if closed else None
        publish = wire.Next(action=NextAction.PUBLISH, step=version)
        if version > max(state.published, self._permitted) and self.publishes(version):
            due = closed and any(self._due(version, t) for t in core.settings.identity.set_tasks)
            if self._to_update(version, now) or (due and not self._held(version, now)):
                return publish
            return None if due else train
        if train is not None and version >= state.published:
            return train
        return publish if self._to_update(version, now) else train

    def _outdated(self, now: float) -> list[Member]:
        """Members that need the trainer's current weights.

        After the trainer returned to a checkpoint, members may hold newer weights of the lost lineage, up to the published
        version. They keep them until the next version is published, or until the run ends and its last version is evaluated.
        """
        version, newest = self.core.state.version, self.core.newest_possible
        unpublished = version > self.core.state.published and self.publishes(version)
        requires_version = bool(self.core.end_reason) or unpublished
        oldest = version if requires_version else scheme(self.core.settings.identity).oldest(version)
        return [
            m
            for m in self.core.membership.publishable(now)
            if m.version < oldest or m.version > newest or (requires_version and m.version != version)
        ]

    def _next_at_end(self, now: float) -> wire.Next | None:
        core, state = self.core, self.core.state
        version = state.version
        # Without weights at any generator so far, an evaluation needs one that is there and can load them.
        hopeless = not state.leased and bool(core.publish_problem or not core.membership.members)
        if core.interrupted or hopeless:
            return self._finish(now)
        held, to_update = self._held(version, now), self._to_update(version, now)
        unpublished = state.published != version
        if (unpublished and not held) or (to_update and not self._has_points(version)):
            return wire.Next(action=NextAction.PUBLISH, step=version, reason=core.end_reason)
        if unpublished:
            return None
        for task in core.settings.identity.set_tasks:
            if not self._has_point(version, task) and (version, task) not in state.evaluations:
                self._start_evaluation(version, task)
        if not held and (
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
        """Whether the trainer's current ``version`` has or will have a point on the curve; a run's last version always does,
        unless the run is interrupted."""
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
        """Whether the trainer publishes ``version`` right after the step that produced it."""
        return scheme(self.core.settings.identity).publishes(version)

    def _has_point(self, version: int, task: int) -> bool:
        return any((p.version, p.task) == (version, task) for p in self.core.state.points)

    def _has_points(self, version: int) -> bool:
        """Whether ``version`` has a point of every evaluation set."""
        return all(self._has_point(version, task) for task in self.core.settings.identity.set_tasks)

    def _final_evaluation_stalled(self, version: int, now: float) -> bool:
        """Whether no member has held the final version for so long that its point is skipped.

        A run that used up its budget waits as long as an evaluation may hold a publish; a stopped run, only as long as a
        member's heartbeats may be missing.
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
        remaining = [
            (e.task, Split.HELD_OUT, p) for e in evaluations for p in range(e.prompts) if p not in e.results
        ]
        book = self.core.book
        if not remaining or any(book.attempts(key) < MAX_FINAL_ATTEMPTS for key in remaining):
            return False
        log.error(
            "skipped the final evaluation (version %d): %d of its prompts failed %d times or more, last reason: "
            "%s",
            *(version, len(remaining), MAX_FINAL_ATTEMPTS, book.retries[remaining[0]].reason),
        )
        return True

    # --- steps ----------------------------------------------------------------------------------

    def has_step(self, request: wire.ShardRequest) -> bool | None:
        """True if the step is closed, or was deleted; None while it is not. Raises Refusal."""
        self.check(request.incarnation)
        return request.step < self.core.state.first_kept_step or self.core.state.closed(request.step) or None

    def plan_shard(self, request: wire.ShardRequest) -> ShardPlan:
        """Balance the sequences of a closed step over the ranks, by tokens; returns the plan of one rank. Raises Refusal."""
        self.check(request.incarnation)
        state = self.core.state
        if not 0 <= request.rank < request.world_size:
            raise Refusal("bad-request", f"rank {request.rank} is outside 0..{request.world_size - 1}")
        if request.step < state.first_kept_step or not state.closed(request.step):
            raise Refusal(
                "not-ready",
                f"step {request.step} is not closed yet, or was deleted (the oldest kept step is {state.first_kept_step})",
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
                unusable_tokens=g.unusable_tokens,
                returns=g.returns if state.known_identity.credit != "Episode" else [],
                recorded=self.core.settings.records(state.prompts[slot]),
            )
            for slot, g in zip(state.slots_of(request.step), groups, strict=True)
        ]
        shard = balance(items, request.world_size)[request.rank]
        lease_ids = [g.lease_id for g in groups]
        return ShardPlan(request.step, metas, lease_ids, shard, ambiguous=request.step <= state.lost)

    def step(self, report: wire.StepReport, now: float) -> Row | None:
        """Record a trained step. Returns its row of metrics.jsonl, or None if it was already recorded. Raises Refusal."""
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
            raise Refusal("out-of-step", f"the trainer reported step {report.step}; expected {state.version}")
        core.flush_usage(now)
        if report.skipped:
            groups = zip(state.slots_of(report.step), state.step_groups(report.step), strict=True)
            slots = [slot for slot, group in groups if not group.filtered]
            log.error(
                "step %d was skipped: %s; its slots %s were not trained", report.step, report.skipped, slots
            )
            core.commit(r.StepSkipped(report.step, report.skipped, slots, report.stats, report.busy_seconds))
        else:
            core.commit(r.StepTrained(report.step, report.stats, report.busy_seconds, report.trained_tokens))
        return state.rows[report.step]

    def supervised(self, report: wire.SupervisedReport, now: float) -> wire.SupervisedReported:
        """Record the progress of mid-training, whose time counts towards the run's. Raises Refusal."""
        self.check(report.incarnation)
        core, state = self.core, self.core.state
        if not (math.isfinite(report.seconds) and min(report.seconds, report.steps, report.tokens) >= 0):
            raise Refusal("bad-request", "steps, tokens and seconds must be finite and not negative")
        if state.version:
            raise Refusal(
                "out-of-step",
                "the trainer reported mid-training after the first step of RL; send hello again",
            )
        core.flush_usage(now)  # this time is no waiting time
        # Once a lease was issued, the core's meter counts this time.
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
        outdated = self._to_update(request.version, now)
        if not outdated and self._held(request.version, now):
            return None
        self._permitted = request.version
        members = [
            wire.Member(
                member_id=m.member_id, name=m.name, control_url=m.control_url, weight_version=m.version
            )
            for m in outdated
        ]
        first = {m.name: request.version for m in outdated if m.version < 0}
        self._set_unproven(state.unproven | first)
        members_now = self.core.membership.members.values()
        serving = [m for m in members_now if m.healthy and m.version == request.version]
        return wire.PublishPermit(
            ready=True, members=members, holders=sum(m not in outdated for m in serving)
        )

    def _held(self, version: int, now: float) -> set[int]:
        """Versions whose evaluation holds a publish of ``version`` now."""
        blocking = self._evaluations_in_the_way(version, {m.version for m in self._outdated(now)})
        self._holds = {v: self._holds.get(v, _Hold(now, now)) for v in blocking}
        self._release_holds(now)
        evaluations = self.core.state.evaluations.values()
        return {e.version for e in evaluations if e.version in blocking and self._holds_publish(e)}

    def _to_update(self, version: int, now: float) -> list[Member]:
        """The outdated members that may get ``version`` now: not those whose version an evaluation holds, and none at all while
        it holds one that no member has."""
        held = self._held(version, now)
        present = {m.version for m in self.core.membership.members.values() if m.healthy}
        return [m for m in self._outdated(now) if m.version not in held] if held <= present else []

    def _holds_publish(self, evaluation: Evaluation) -> bool:
        """Whether the forecast follows its evaluation set and it is not released (it has not waited too long)."""
        return self.core.settings.follows(evaluation.task) and not evaluation.released

    def _evaluations_in_the_way(self, version: int, overwritten: set[int]) -> set[int]:
        """Versions under evaluation that a publish of ``version`` must wait for.

        These are the versions in ``overwritten``, which members to update hold now, and, if ``version`` is not published yet,
        those that no healthy member holds. A publish of an already published version, to a generator that joins within a
        batch of PPO-off-policy, does not affect members that hold the batch's weights and continue its evaluation.
        """
        state = self.core.state
        held = {m.version for m in self.core.membership.members.values() if m.healthy}
        return {
            v
            for (v, _), evaluation in state.evaluations.items()
            if v < version and self._holds_publish(evaluation)
            if v in overwritten or (version > state.published and v not in held)
        }

    def _release_holds(self, now: float) -> None:
        """Release the evaluations that have held a publish for too long, or whose version no member holds any more."""
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
            waited, unserved = now - hold.since, now - hold.last_measurable
            if waited >= core.settings.hold_seconds or unserved >= core.membership.timeout_seconds:
                for evaluation in evaluations:
                    log.warning(
                        "the evaluation of version %d has %d of %d prompts after %.0f s; newer weights will complete it",
                        *(version, len(evaluation.results), evaluation.prompts, waited),
                    )
                    core.commit(r.EvaluationReleased(version, evaluation.task))
                del self._holds[version]

    def tick(self, now: float) -> None:
        """Release holds that are over, and wake the trainer's polls while a hold or the final evaluation may time out."""
        if self._holds:
            self._release_holds(now)
        if self._holds or self._stalled_since is not None:
            self.core.wake.add(TRAINER)

    def publish_commit(self, request: wire.PublishCommit, now: float) -> None:
        """Record which members hold the version now. A retry after a lost response is counted once. Raises Refusal."""
        self.check(request.incarnation)
        self._check_version("the trainer published version", request.version)
        _check_finite(request.stats)
        core, members = self.core, self.core.membership
        # By name: the coordinator may have restarted since the publish began, and its members have new ids.
        proven = {name_of(member_id) for member_id in request.updated}
        others = dict.fromkeys(map(name_of, [*request.failed, *request.refused]), request.version)
        unproven = {name: version for name, version in core.state.unproven.items() if name not in proven}
        self._set_unproven(unproven | others)
        for member_id in request.updated:
            member = members.members.get(member_id)
            if member is not None:
                members.set_version(member, request.version, now)
                if core.updated_since_restore is not None:
                    core.updated_since_restore.add(member.name)
        for member_id in [*request.failed, *request.refused]:
            member = members.remove(member_id)
            if member is not None:
                log.warning(
                    "%s cannot use version %d and must register again: %s",
                    *(member.name, request.version, request.problem),
                )
                members.failed_publish(member.name, now)
                core.reassign_leases(member.name)
        for member_id in request.kept:
            member = members.members.get(member_id)
            if member is not None:
                members.failed_publish(member.name, now)
        ahead = any(
            m.healthy and (m.version > request.version or not m.version_reported)
            for m in members.members.values()
        )
        digest = hashlib.blake2b(msgspec.msgpack.encode(request), digest_size=8).hexdigest()
        repeated = digest == core.state.last_publish
        core.publish_problem = "" if request.updated else request.problem
        # Weights that no generator computes with are not published, nor are those that none was sent or none could read.
        unread = bool(request.problem) and not request.failed
        committed = bool(request.updated) or not (request.refused or unread)
        due = any(self._due(request.version, task) for task in core.settings.identity.set_tasks)
        if not committed and (request.refused or due):
            self._permitted = -1  # it is published again before its next step
        if (
            committed
            and not repeated
            and (request.version >= core.state.published or core.end_reason or not ahead)
        ):
            core.commit(r.Published(request.version, request.stats, digest))
        self._start_evaluation_if_due()
        core.wake |= {WORK, TRAINER}

    def _set_unproven(self, unproven: dict[str, int]) -> None:
        """Change the unproven versions. Those of generators that have left go once no work is done with them any more."""
        state = self.core.state
        oldest = min(
            state.first_kept_step,
            state.version - self.core.settings.identity.max_staleness_steps - 1,
            *(version for version, _ in state.evaluations),
        )
        present = {member.name for member in self.core.membership.members.values()}
        unproven = {n: version for n, version in unproven.items() if n in present or version >= oldest}
        if unproven != self.core.state.unproven:
            self.core.commit(r.UnprovenChanged(unproven))

    def _start_evaluation_if_due(self) -> None:
        core, state = self.core, self.core.state
        version = state.published
        if version != state.version:
            return
        for task in core.settings.identity.set_tasks:
            if not self._due(version, task) or self._has_point(version, task):
                continue
            in_progress = [e.version for e in state.evaluations.values() if e.task == task]
            if not in_progress or (core.settings.follows(task) and version not in in_progress):
                self._start_evaluation(version, task)
            elif version not in in_progress:
                # The generators cannot keep up with this set: a queue of evaluations would delay every later point more.
                log.warning(
                    "version %d gets no point of evaluation set %s: the evaluation of version %d is not complete",
                    *(version, core.settings.identity.evaluation_set(task).name, in_progress[0]),
                )

    def _start_evaluation(self, version: int, task: int) -> None:
        prompts = self.core.settings.identity.evaluation_set(task).prompts
        self.core.commit(r.EvaluationStarted(version, prompts, task))

    # --- checkpoints ----------------------------------------------------------------------------

    def checkpoint_begin(self, request: wire.CheckpointBegin, now: float) -> wire.CheckpointSnapshot:
        """The snapshot of the state to store in the checkpoint, and the best version so far. Raises Refusal."""
        self.check(request.incarnation)
        self._check_version("the checkpoint has version", request.step)
        self.core.flush_usage(now)
        state = self.core.state
        comparable = (p for p in self.core.curve if not p.mixed_versions and math.isfinite(p.reward))
        best = max(comparable, key=lambda p: (p.reward, p.version), default=None)
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
                "bad-request",
                f"checkpoint {request.step}, with kept steps {request.kept_steps}: the trainer has no such version",
            )
        self.core.flush_usage(now)
        self.core.commit(r.CheckpointCommitted(request.step, request.kept_steps))
        self.core.failed_checkpoint = None

    def checkpoint_failed(self, request: wire.CheckpointFailed) -> None:
        """Note that the trainer could not write a checkpoint, for the status; without a reason, that it now could. Writes nothing.
        Raises Refusal."""
        self.check(request.incarnation)
        self.core.failed_checkpoint = request if request.reason else None


def fill_shard(plan: ShardPlan, groups: Mapping[str, r.StoredGroup]) -> wire.Shard:
    """The response to a shard request, with the sequences from ``groups``, the step's groups by lease id."""
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
                turns=completion.turns if plan.groups[item.group].returns else [],
            )
        )
    return wire.Shard(step=plan.step, groups=plan.groups, sequences=sequences, ambiguous=plan.ambiguous)


def _check_finite(stats: dict[str, float]) -> None:
    for name, value in stats.items():
        if not math.isfinite(value):
            raise Refusal("bad-request", f"stats.{name} is {value}; metrics.jsonl takes only finite numbers")
