"""Everything that must survive, as a state machine with one door: :meth:`State.apply`.

Pure: no I/O, no clock, no chance, no settings but the journaled :class:`Identity`. The same records give the
same state, live or in replay, and a prefix of the records gives a state the run really was in.

Life of a training slot, and which pile its rollouts are on::

    fresh ─issued→ leased ─accepted→ waiting for its step ─step closes→ filtered
                     │ ↑                 (queued)             └───────→ (queued) ─step trained→ trained
             closed  ↓ │ issued again, same prompt                           ↑←─ trainer went back ─┘
                    reissue
"""

from __future__ import annotations

import bisect
import zlib
from typing import Any

import msgspec

from scalerl_api.wire import EvaluationPoint, Split
from scalerl_coordinator import records as r
from scalerl_coordinator.accounting import Accepted, Fates, Line, Usage, extend, sum_step
from scalerl_coordinator.batcher import zero_variance
from scalerl_coordinator.evaluation import Evaluation, PromptResult, summarize
from scalerl_coordinator.settings import Identity
from scalerl_coordinator.slots import slots_of, step_of


class OpenLease(msgspec.Struct, frozen=True, array_like=True):
    """A slot or evaluation prompt that somebody works on. Its deadline is not here: it dies with the process."""

    split: Split
    slot: int
    prompt_index: int
    policy_version: int
    holder: str


class State(msgspec.Struct):
    """See the module; every field follows from the records."""

    identity: Identity | None = None
    nonce: str = ""
    next_lease: int = 0
    leased: bool = False
    """A lease was ever given: the run's time counts."""

    next_slot: int = 0
    """Slots below were issued at least once."""
    reissue: list[int] = []
    """Slots to be issued again, ascending; served before fresh ones."""
    lapsed: dict[int, str] = {}
    """Of slots in ``reissue``: the lease that expired. Its group is still welcome while nobody else has the slot."""
    prompts: dict[int, int] = {}
    """Prompt of every issued slot that is not forgotten."""
    leases: dict[str, OpenLease] = {}
    groups: dict[int, Accepted] = {}
    """By slot, from ``first_kept_step`` on."""
    filled: dict[int, int] = {}
    """Groups there are for each step; a step with all of them is closed."""
    first_kept_step: int = 0
    """Groups of steps below are forgotten: no kept checkpoint is older."""

    incarnation: str = ""
    """Of the trainer; empty before any has said hello."""
    world_size: int = 0
    version: int = 0
    """Steps trained on the present line; what the trainer holds."""
    published: int = -1
    newest: int = 0
    """Highest version that any weights ever had, on this line or one that was lost."""
    line: Line = Line()
    marks: dict[int, Line] = {}
    """The line as it was at each version that the trainer may come back to."""
    rows: dict[int, dict[str, float]] = {}
    """Lines of metrics.jsonl by step, as long as they may have to be written again."""
    last_row: dict[str, float] = {}
    publish_stats: dict[str, float] = {}
    publish_mismatch_sum: float = 0.0
    publish_mismatches: int = 0
    checkpoint: int = -1
    """Newest committed."""

    fates: Fates = msgspec.field(default_factory=Fates)
    usage: Usage = msgspec.field(default_factory=Usage)
    evaluations: dict[int, Evaluation] = {}
    """Incomplete ones, by version."""
    points: list[EvaluationPoint] = []

    stop_reason: str = ""
    finish_reason: str = ""
    """Not empty once the trainer was told to leave."""

    # --- questions ------------------------------------------------------------------------------

    @property
    def fresh(self) -> bool:
        """No trainer has ever spoken to this journal: a checkpoint's snapshot may take its place."""
        return not self.incarnation

    @property
    def finished(self) -> bool:
        """The trainer was told to leave and its last version is safe."""
        return bool(self.finish_reason) and self.checkpoint == self.version

    @property
    def mismatch_kl(self) -> float | None:
        """Mean of what the publishes measured; before any did, of what the steps reported."""
        if self.publish_mismatches:
            return self.publish_mismatch_sum / self.publish_mismatches
        return self.line.mismatch_sum / self.line.mismatch_steps if self.line.mismatch_steps else None

    def closed(self, step: int) -> bool:
        return self.filled.get(step, 0) == self._identity.prompts_per_step

    def step_groups(self, step: int) -> list[Accepted]:
        """Groups of a closed, kept step, in slot order."""
        return [self.groups[slot] for slot in slots_of(step, self._identity.prompts_per_step)]

    def next_reissue(self, evaluation: int | None = None) -> int | None:
        """Lowest training slot to be issued again (or position, of the evaluation of that version)."""
        queue = self.reissue if evaluation is None else self.evaluations[evaluation].todo
        return queue[0] if queue else None

    @property
    def _identity(self) -> Identity:
        if self.identity is None:
            raise AssertionError("the first record of a journal is Started")
        return self.identity

    # --- snapshot -------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """All of it; :meth:`decode` gives an equal state."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> State:
        """Raises msgspec.DecodeError (or its subclass ValidationError) on anything else than :meth:`encode`'s."""
        return msgspec.msgpack.decode(data, type=State)

    def detached(self) -> State:
        """A copy for a place without this journal: what rests on journaled tokens becomes work to do again.

        Slots that are not trained yet lose their groups and are issued again with the same prompts; their
        rollouts were never acknowledged there.
        """
        copy = State.decode(self.encode())
        start = self.version * self._identity.prompts_per_step
        copy.leases, copy.lapsed, copy.groups, copy.filled, copy.rows = {}, {}, {}, {}, {}
        copy.prompts = {slot: index for slot, index in self.prompts.items() if slot >= start}
        copy.reissue = sorted(copy.prompts)
        copy.first_kept_step = self.version
        copy.marks = {self.version: self.line}
        copy.checkpoint = self.version
        fates = copy.fates
        for slot, group in self.groups.items():
            if slot < start:
                continue
            fates.acknowledged -= group.rollouts
            if group.filtered:
                fates.filtered -= group.rollouts
            else:
                fates.queued -= group.rollouts
        for evaluation in copy.evaluations.values():
            evaluation.todo = [p for p in range(evaluation.prompts) if p not in evaluation.results]
        copy.stop_reason = copy.finish_reason = ""
        return copy

    # --- the door -------------------------------------------------------------------------------

    def apply(self, record: r.AnyRecord) -> None:
        """Take one record in. Records come from :mod:`.core`, which has checked them: a misfit is a bug."""
        _APPLY[type(record)](self, record)

    def _started(self, record: r.Started) -> None:
        if self.identity is not None and self.identity != record.identity:
            raise AssertionError("the identity of a journal never changes")
        self.identity = record.identity
        self.nonce, self.next_lease = record.nonce, 0

    def _issued(self, record: r.LeasesIssued) -> None:
        self.leased = True
        for issue in record.issues:
            if issue.split is Split.HELD_OUT:
                _remove(self.evaluations[issue.policy_version].todo, issue.slot)
            elif issue.slot == self.next_slot:
                self.next_slot += 1
                self.prompts[issue.slot] = issue.prompt_index
            else:
                _remove(self.reissue, issue.slot)
                self.lapsed.pop(issue.slot, None)
            lease_id = self.lease_id(issue.number)
            self.leases[lease_id] = OpenLease(
                issue.split, issue.slot, issue.prompt_index, issue.policy_version, record.holder
            )
            self.next_lease = issue.number + 1

    def lease_id(self, number: int) -> str:
        return f"{self.nonce}-{number}"

    def _lease_closed(self, record: r.LeaseClosed) -> None:
        lease = self.leases.pop(record.lease_id)
        if lease.split is Split.HELD_OUT:
            evaluation = self.evaluations.get(lease.policy_version)
            if evaluation is not None:
                bisect.insort(evaluation.todo, lease.slot)
            return
        bisect.insort(self.reissue, lease.slot)
        if record.why is r.Why.EXPIRED:
            self.fates.expired_leases += 1
            self.lapsed[lease.slot] = record.lease_id
        elif record.why is r.Why.STALE:
            self.fates.stale += record.rollouts
        elif record.why is r.Why.INVALID:
            self.fates.invalid += record.rollouts

    def _group_accepted(self, record: r.GroupAccepted) -> None:
        if self.leases.pop(record.lease_id, None) is None:
            del self.lapsed[record.slot]
            _remove(self.reissue, record.slot)
        group = Accepted(
            lease_id=record.lease_id,
            prompt_tokens=record.prompt_tokens,
            lengths=record.lengths,
            scores=record.scores,
            truncated=record.truncated,
            oldest_version=record.oldest_version,
            version_tokens=record.version_tokens,
        )
        self.groups[record.slot] = group
        self.fates.acknowledged += group.rollouts
        self.fates.queued += group.rollouts
        step = step_of(record.slot, self._identity.prompts_per_step)
        self.filled[step] = self.filled.get(step, 0) + 1
        if self.closed(step) and self._identity.zero_variance_filter:
            for member in self.step_groups(step):
                if zero_variance(member.scores):
                    member.filtered = True
                    self.fates.queued -= member.rollouts
                    self.fates.filtered += member.rollouts

    def _dropped(self, record: r.Dropped) -> None:
        self.fates.late += record.late
        self.fates.duplicate += record.duplicate

    def _evaluation_started(self, record: r.EvaluationStarted) -> None:
        line = self.line if record.version == self.version else self.marks.get(record.version, self.line)
        self.evaluations[record.version] = Evaluation(
            record.version, line.work_tokens, list(range(record.prompts)), {}, record.prompts
        )

    def _evaluation_released(self, record: r.EvaluationReleased) -> None:
        self.evaluations[record.version].released = True

    def _evaluation_accepted(self, record: r.EvaluationAccepted) -> None:
        lease = self.leases.pop(record.lease_id)
        evaluation = self.evaluations[lease.policy_version]
        evaluation.results[lease.slot] = PromptResult(
            record.lease_id,
            sum(record.scores),
            len(record.scores),
            record.tokens,
            record.truncated,
            record.mixed,
        )
        if evaluation.complete:
            del self.evaluations[evaluation.version]
            point = summarize(
                evaluation,
                self._identity.held_out_digest,
                self.usage.wall_seconds,
                self.usage.device_seconds,
            )
            bisect.insort(self.points, point, key=lambda p: p.version)

    def _trainer_joined(self, record: r.TrainerJoined) -> None:
        self.incarnation, self.world_size = record.incarnation, record.world_size
        self.finish_reason = ""  # whoever says hello has not left; a stop still stands
        for step in range(self.version, record.version):
            # A checkpoint from ahead, after a trainer that could not load it went further back: the batches of
            # these steps are the ones it has trained on; only their reports are gone.
            self._advance(step, {}, 0)
        if record.version == self.version:
            return
        if record.version < self.first_kept_step:
            self._begin_again()
            return
        for step in range(record.version, self.version):
            for group in self.step_groups(step):
                if not group.filtered:
                    self.fates.trained -= group.rollouts
                    self.fates.queued += group.rollouts
            self.rows.pop(step)
        self.line = self.marks[record.version]
        self.marks = {v: line for v, line in self.marks.items() if v < record.version}
        self.version = record.version
        self.last_row = self.rows.get(record.version - 1, {})

    def _begin_again(self) -> None:
        """Every checkpoint is lost, and the tokens of the first steps with the journal's old segments."""
        self.next_slot, self.first_kept_step, self.version, self.published = 0, 0, 0, -1
        self.reissue, self.lapsed, self.prompts, self.groups, self.filled = [], {}, {}, {}, {}
        self.leases, self.evaluations = {}, {}
        self.line, self.marks, self.rows, self.last_row = Line(), {}, {}, {}
        self.points = [p for p in self.points if p.version == 0]
        self.checkpoint = -1
        fates = self.fates
        fates.acknowledged = fates.trained = fates.filtered = fates.queued = 0

    def _restored(self, record: r.Restored) -> None:
        identity, nonce, number = self.identity, self.nonce, self.next_lease
        restored = State.decode(record.snapshot)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(restored, name))
        self.identity, self.nonce, self.next_lease = identity, nonce, number

    def _step_trained(self, record: r.StepTrained) -> None:
        self.usage.trainer_busy_seconds += record.busy_seconds
        self._advance(
            record.step, {**record.stats, "busy_seconds": record.busy_seconds}, record.trained_tokens
        )

    def _advance(self, step: int, stats: dict[str, float], trained_tokens: int) -> None:
        """The line grows by ``step``, which is closed."""
        slots = slots_of(step, self._identity.prompts_per_step)
        sums = sum_step(step, self.step_groups(step))
        self.marks[step] = self.line
        self.line = extend(self.line, sums, trained_tokens, stats.get("mismatch_kl"))
        self.version = step + 1
        self.newest = max(self.newest, self.version)
        self.fates.trained += sums.trained_rollouts
        self.fates.queued -= sums.trained_rollouts
        row: dict[str, float] = {
            "step": step,
            "version": self.version,
            "wall_seconds": self.usage.wall_seconds,
            "device_seconds": self.usage.device_seconds,
            "work_tokens": self.line.work_tokens,
            "reward": sums.score_sum / sums.rollouts,
            "groups": sums.groups,
            "filtered_groups": sums.filtered_groups,
            "rollouts": sums.rollouts,
            "completion_tokens": sums.work_tokens,
            "mean_completion_tokens": sums.work_tokens / sums.rollouts,
            "truncated_fraction": sums.truncated / sums.rollouts,
            "staleness_mean": sums.staleness_sum / sums.staleness_tokens if sums.staleness_tokens else 0.0,
            "staleness_max": sums.staleness_max,
            "generated_tokens": self.usage.generated_tokens,
            "trained_tokens": trained_tokens,
            "prompts_crc32": zlib.crc32(repr([self.prompts[slot] for slot in slots]).encode()),
        }
        self.rows[step] = self.last_row = {**stats, **self.publish_stats, **row}
        self.publish_stats = {}

    def _published(self, record: r.Published) -> None:
        if record.version < self.published:
            # Nobody holds the later versions of the lost line any more: what they had begun is measured anew.
            self.evaluations = {v: e for v, e in self.evaluations.items() if v <= record.version}
            for lease_id in [
                i
                for i, lease in self.leases.items()
                if lease.split is Split.HELD_OUT and lease.policy_version > record.version
            ]:
                del self.leases[lease_id]
        self.published = record.version
        self.newest = max(self.newest, record.version)
        self.publish_stats = {**self.publish_stats, **record.stats}
        mismatch = record.stats.get("mismatch_kl")
        if mismatch is not None:
            self.publish_mismatch_sum += mismatch
            self.publish_mismatches += 1

    def _checkpoint_committed(self, record: r.CheckpointCommitted) -> None:
        self.checkpoint = record.step
        first = max(self.first_kept_step, min([record.step, *record.kept_steps]))
        size = self._identity.prompts_per_step
        for step in range(self.first_kept_step, first):
            for slot in slots_of(step, size):
                del self.groups[slot], self.prompts[slot]
            del self.filled[step], self.marks[step], self.rows[step]
        self.first_kept_step = first

    def _stop_requested(self, record: r.StopRequested) -> None:
        self.stop_reason = record.reason
        if not record.reason:
            self.finish_reason = ""

    def _finish_given(self, record: r.FinishGiven) -> None:
        self.finish_reason = record.reason

    def _usage_added(self, record: r.UsageAdded) -> None:
        usage = self.usage
        usage.wall_seconds += record.wall_seconds
        usage.device_seconds += record.device_seconds
        usage.generator_alive_seconds += record.generator_alive_seconds
        usage.generator_busy_seconds += record.generator_busy_seconds
        usage.generated_tokens += record.generated_tokens


def _remove(ordered: list[int], value: int) -> None:
    at = bisect.bisect_left(ordered, value)
    if at == len(ordered) or ordered[at] != value:
        raise AssertionError(f"{value} is not waiting to be issued")
    del ordered[at]


_APPLY: dict[type, Any] = {
    r.Started: State._started,
    r.LeasesIssued: State._issued,
    r.LeaseClosed: State._lease_closed,
    r.GroupAccepted: State._group_accepted,
    r.Dropped: State._dropped,
    r.EvaluationStarted: State._evaluation_started,
    r.EvaluationReleased: State._evaluation_released,
    r.EvaluationAccepted: State._evaluation_accepted,
    r.TrainerJoined: State._trainer_joined,
    r.Restored: State._restored,
    r.StepTrained: State._step_trained,
    r.Published: State._published,
    r.CheckpointCommitted: State._checkpoint_committed,
    r.StopRequested: State._stop_requested,
    r.FinishGiven: State._finish_given,
    r.UsageAdded: State._usage_added,
}
