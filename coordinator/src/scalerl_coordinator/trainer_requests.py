"""Requests of the trainer: the next action, the shards of a step, publishing, checkpoints; its hello is in :mod:`.trainer_hello`."""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import dataclass, field

import msgspec

from scalerl_api import wire
from scalerl_api.wire import NextAction
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.evaluation_schedule import EvaluationSchedule
from scalerl_coordinator.membership import name_of
from scalerl_coordinator.publish_permits import PublishPermits
from scalerl_coordinator.shards import ShardPlan, plan_shard
from scalerl_coordinator.step_figures import Row
from scalerl_coordinator.trainer_hello import accept_trainer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainerRequests:
    """Decides the requests of the trainer on a :class:`~.core.Core`."""

    core: Core
    evaluations: EvaluationSchedule = field(init=False)
    permits: PublishPermits = field(init=False)
    _permitted: int = -1
    """The version that the trainer was last permitted to publish; it trains on meanwhile."""

    def __post_init__(self) -> None:
        self.evaluations, self.permits = EvaluationSchedule(self.core), PublishPermits(self.core)

    def tick(self, now: float) -> None:
        """Release holds that are over, and wake the trainer's polls while a hold or the final evaluation may time out."""
        if self.permits.tick(now) or self.evaluations.stalled_since is not None:
            self.core.wake.add(TRAINER)

    # --- hello ----------------------------------------------------------------------------------

    def hello(self, request: wire.TrainerHello, now: float) -> wire.TrainerWelcome:
        """Accept a trainer; it supersedes the previous one.

        Raises:
            Refusal: see :func:`.trainer_hello.accept_trainer`.
        """
        accept_trainer(self.core, request, now)
        self.permits.reset()
        self._permitted = -1
        self.evaluations.stalled_since = None
        state = self.core.state
        return wire.TrainerWelcome(
            next_step=state.version,
            published_version=state.published,
            consecutive_skipped_steps=state.lineage.consecutive_skipped_steps,
        )

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
        if version > max(state.published, self._permitted) and self.permits.publishes(version):
            due = closed and any(self.evaluations.due(version, t) for t in core.settings.identity.set_tasks)
            permit = self.permits.decide(version, now)
            if permit.to_update:
                return publish
            if due and not permit.blocking and not self.permits.in_backoff(version, now):
                return publish  # to none: no generator is there
            return None if due else train
        if train is not None and version >= state.published:
            return train
        return publish if self.permits.decide(version, now).to_update else train

    def _next_at_end(self, now: float) -> wire.Next | None:
        core, state = self.core, self.core.state
        version = state.version
        # Without weights at any generator so far, an evaluation needs one that is there and can load them.
        hopeless = not state.leased and bool(core.publish_problem or not core.membership.members)
        if core.interrupted or hopeless:
            return self._finish(now)
        permit = self.permits.decide(version, now)
        blocking, to_update = permit.blocking, permit.to_update
        unpublished = state.published != version
        if (unpublished and not blocking) or (to_update and not self.evaluations.has_points(version)):
            if core.publish_problem and self.evaluations.final_stalled(version, now):
                return self._finish(now)
            if not to_update and self.permits.in_backoff(version, now):
                return None
            return wire.Next(action=NextAction.PUBLISH, step=version, reason=core.end_reason)
        if unpublished:
            return None
        for task in core.settings.identity.set_tasks:
            if not self.evaluations.has_point(version, task) and (version, task) not in state.evaluations:
                self.evaluations.start(version, task)
        if not blocking and (
            self.evaluations.has_points(version)
            or self.evaluations.final_stalled(version, now)
            or self.evaluations.out_of_attempts(version)
        ):
            return self._finish(now)
        return None

    def _finish(self, now: float) -> wire.Next:
        core = self.core
        if not core.state.finish_reason:
            core.flush_usage(now)
            core.commit(r.FinishSent(core.end_reason))
        return wire.Next(action=NextAction.FINISH, step=core.state.version, reason=core.end_reason)

    # --- steps ----------------------------------------------------------------------------------

    def has_step(self, request: wire.ShardRequest) -> bool | None:
        """True if the step is closed, or was deleted; None while it is not. Raises Refusal."""
        self.check(request.incarnation)
        return request.step < self.core.state.first_kept_step or self.core.state.closed(request.step) or None

    def plan_shard(self, request: wire.ShardRequest) -> ShardPlan:
        """See :func:`.shards.plan_shard`."""
        self.check(request.incarnation)
        return plan_shard(self.core, request)

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
        permit = self.permits.decide(request.version, now)
        if permit.blocking and not permit.to_update:
            return None
        self._permitted = request.version
        members = [
            wire.Member(
                member_id=m.member_id, name=m.name, control_url=m.control_url, weight_version=m.version
            )
            for m in permit.to_update
        ]
        first = {m.name: request.version for m in permit.to_update if m.version < 0}
        self._set_unproven(state.unproven | first)
        members_now = self.core.membership.members.values()
        serving = [m for m in members_now if m.healthy and m.version == request.version]
        return wire.PublishPermit(
            ready=True, members=members, holders=sum(m not in permit.to_update for m in serving)
        )

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
        due = any(self.evaluations.due(request.version, task) for task in core.settings.identity.set_tasks)
        if not committed and (request.refused or due):
            self._permitted = -1  # it is published again before its next step
        if (
            committed
            and not repeated
            and (request.version >= core.state.published or core.end_reason or not ahead)
        ):
            core.commit(r.Published(request.version, request.stats, digest))
        self.evaluations.start_if_due()
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


def _check_finite(stats: dict[str, float]) -> None:
    for name, value in stats.items():
        if not math.isfinite(value):
            raise Refusal("bad-request", f"stats.{name} is {value}; metrics.jsonl takes only finite numbers")
