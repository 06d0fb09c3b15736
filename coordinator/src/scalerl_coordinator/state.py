"""Everything that must survive, as a state machine with one door: :meth:`State.apply`.

Pure: no I/O, no clock, no chance, no settings but the journaled :class:`Identity`. The same records give the
same state, live or in replay, and a prefix of the records gives a state the run really was in.

Life of a training slot, and which pile its rollouts are on::

    fresh ─issued→ leased ─accepted→ waiting for its step ─step closes→ filtered
                     │ ↑                 (queued)             └───────→ (queued) ─step trained→ trained, or skipped
             closed  ↓ │ issued again, same prompt                           ↑←─ trainer went back ─┘
                    reissue ─failed with two members, or too long→ given up (no rollouts; filtered)

What each record does is in :mod:`.rollout_records` and :mod:`.trainer_records`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from scalerl_api.wire import EvaluationPoint
from scalerl_coordinator import batch_sizes, rollout_records, slots, trainer_records
from scalerl_coordinator import records as r
from scalerl_coordinator.accounting import Accepted, Fates, Line, MismatchSums, Row, Usage
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.rollout_records import OpenLease
from scalerl_coordinator.settings import Identity
from scalerl_coordinator.slots import BatchSize


class State(msgspec.Struct):
    """See the module; every field follows from the records."""

    identity: Identity | None = None
    batch_sizes: list[BatchSize] = []
    """By first step, back to the one of ``first_kept_step``."""
    nonce: str = ""
    next_lease: int = 0
    leased: bool = False
    """A lease was ever given: the run's time counts."""

    next_slot: int = 0
    """Slots below were issued at least once, or held back."""
    reissue: list[int] = []
    """Slots to be issued again, or held back for the weights that will train them, ascending; served before new ones."""
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
    version: int = 0
    """Steps trained on the present line; what the trainer holds."""
    published: int = -1
    newest: int = 0
    """Highest version that any weights ever had, on this line or one that was lost."""
    lost: int = -1
    """Highest version that generators may have of a line that was lost. Up to it, a version may be of two weights."""
    line: Line = Line()
    marks: dict[int, Line] = {}
    """The line as it was at each version that the trainer may come back to."""
    rows: dict[int, Row] = {}
    """Lines of metrics.jsonl by step, as long as they may have to be written again."""
    last_row: Row = {}
    publish_stats: dict[str, float] = {}
    mismatches: dict[str, MismatchSums] = {}
    """Of every step and publish, also of lines that were lost: a measurement stays one."""
    last_publish: str = ""
    """Digest of the last commit of a publish."""
    checkpoint: int = -1
    """Newest committed that the trainer can still read."""
    checkpoint_failures: int = 0
    """Checkpoints that could not be written, as told with the steps, over all incarnations."""
    reported_failures: int = 0
    """Of those, what the present incarnation has told."""
    skips: dict[int, str] = {}
    """Kept steps that were skipped when they were last reached, and why."""
    skipped_steps: int = 0
    """Over all incarnations, and lines."""
    last_skip_reason: str = ""

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

    def slots_of(self, step: int) -> range:
        return slots.slots_of(step, self.batch_sizes)

    def step_of(self, slot: int) -> int:
        return slots.step_of(slot, self.batch_sizes)

    def missing(self, step: int) -> int:
        """Groups that ``step`` still needs."""
        return len(self.slots_of(step)) - self.filled.get(step, 0)

    def closed(self, step: int) -> bool:
        return self.missing(step) == 0

    def step_groups(self, step: int) -> list[Accepted]:
        """Groups of a closed, kept step, in slot order."""
        return [self.groups[slot] for slot in self.slots_of(step)]

    def lease_id(self, number: int) -> str:
        return f"{self.nonce}-{number}"

    @property
    def settled(self) -> Identity:
        """The identity, which is there from the first record on."""
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
        state = msgspec.msgpack.decode(data, type=State)
        if state.identity is not None and not state.batch_sizes:  # written when a run had one size
            state.batch_sizes = [BatchSize(0, 0, state.identity.prompts_per_step)]
        return state

    def detached(self) -> State:
        """A copy for a place without this journal: what rests on journaled tokens becomes work to do again.

        Slots that are not trained yet lose their groups and are issued again with the same prompts; their
        rollouts were never acknowledged there.
        """
        copy = State.decode(self.encode())
        start = slots.first_slot(self.version, self.batch_sizes)
        copy.leases, copy.lapsed, copy.groups, copy.filled, copy.rows = {}, {}, {}, {}, {}
        copy.skips = {}
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
            fates.ungraded -= len(group.ungraded)
            fates.masked_tokens -= sum(group.masked_tokens)
            if group.given_up:
                fates.given_up -= group.given_up_rollouts
                fates.too_long -= group.given_up_rollouts * (group.given_up == r.GivenUpFor.TOO_LONG)
            elif group.filtered:
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
        batch_sizes.change(self, record.identity)
        self.nonce, self.next_lease = record.nonce, 0

    def _restored(self, record: r.Restored) -> None:
        identity, nonce, number = self.settled, self.nonce, self.next_lease
        restored = State.decode(record.snapshot)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(restored, name))
        self.nonce, self.next_lease = nonce, number
        batch_sizes.change(self, identity)


_APPLY: dict[type, Callable[[State, Any], None]] = {
    r.Started: State._started,
    r.Restored: State._restored,
    **rollout_records.APPLY,
    **trainer_records.APPLY,
}
