"""The state that must survive a restart, in one struct that only :func:`.transitions.apply` changes.

States of a training slot; in parentheses, the field of :class:`~.accounting.RolloutCounts` that counts its rollouts::

   open ─issued─▶ leased ─group accepted─▶ waiting for its step (queued) ─step closes─┬▶ zero variance (filtered)
                  │    ▲                                                              ▼
      lease closed│    │issued again, same prompt                                waiting (queued)
                  ▼    │                                             step trained │    ▲ trainer returned
                  open                                                            ▼    │ to a checkpoint
                  ▲├─failed too often, or prompt too long─▶ given up           (trained, skipped)
                  └┴─zero variance and tries left: another prompt (filtered, refilled)
"""

from __future__ import annotations

from typing import Final

import msgspec

from scalerl_api.wire import EvaluationPoint, PromptRef, Sample, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator import slots
from scalerl_coordinator.accepted_group import Accepted, Try
from scalerl_coordinator.accounting import Lineage, MismatchSums, RolloutCounts, Usage
from scalerl_coordinator.evaluation import Evaluation, EvaluationKey
from scalerl_coordinator.prompt_history import PromptHistory
from scalerl_coordinator.rewards import zero_variance
from scalerl_coordinator.settings import Identity
from scalerl_coordinator.slots import BatchSize
from scalerl_coordinator.step_figures import Row

FORMAT: Final = 4
"""Format of a snapshot."""


class OpenLease(msgspec.Struct, frozen=True, array_like=True):
    """A training slot or held-out prompt leased to ``holder``. Its deadline is in the :class:`~.leases.LeaseBook`."""

    prompt: PromptRef
    slot: int
    policy_version: int
    holder: str

    @property
    def split(self) -> Split:
        return self.prompt.split


class _Format(msgspec.Struct):
    format: int


class CoordinatorState(msgspec.Struct):
    """A pure function of the journal's records."""

    format: int = FORMAT
    identity: Identity | None = None
    batch_sizes: list[BatchSize] = []
    """Batch sizes by first step, from the one in force at ``first_kept_step`` on."""
    nonce: str = ""
    """Unique to the process; prefixes its lease ids."""
    next_lease: int = 0
    leased: bool = False
    """Whether a lease was ever issued: from then on the run's time counts."""

    next_slot: int = 0
    """Slots below it have a prompt."""
    open_slots: list[int] = []
    """Slots below ``next_slot`` that wait for a lease, their first or another; ascending."""
    expired_lease_of: dict[int, str] = {}
    """Expired lease of slots in ``open_slots``. Its group is still accepted until the slot is issued again."""
    prompts: dict[int, PromptRef] = {}
    """Prompt of every slot from ``first_kept_step`` on and below ``next_slot``."""
    cursors: list[int] = msgspec.field(default_factory=lambda: [0])
    """Cursor of each task's sampler after the newest slot."""
    histories: list[PromptHistory] = msgspec.field(default_factory=lambda: [PromptHistory()])
    """Prompt history of each task."""
    leases: dict[str, OpenLease] = {}
    """Open leases by id."""
    groups: dict[int, Accepted] = {}
    """Accepted groups by slot, from ``first_kept_step`` on."""
    tries: dict[int, list[Try]] = {}
    """Zero-variance groups of refilled slots, with the prompts that each slot had before its present one."""
    filled: dict[int, int] = {}
    """Number of filled slots of each step; a step is closed once all its slots are filled."""
    first_kept_step: int = 0
    """Groups of earlier steps are deleted, since no kept checkpoint is older."""

    incarnation: str = ""
    """Id of the trainer's process; empty until the first hello."""
    version: int = 0
    """Weight version that the trainer holds: steps trained on the current lineage."""
    published: int = -1
    """Last published weight version; -1 before the first publish."""
    newest: int = 0
    """Highest weight version that ever existed, lost lineages included."""
    lost: int = -1
    """Highest version of a lost lineage that generators may hold. Up to it, one version may name two sets of weights."""
    restored: int = -1
    """Version of the checkpoint whose snapshot replaced a lost journal. Later versions may have been published before."""
    forked_step: int = -1
    """Step at which the run was forked from another; -1 otherwise."""
    inherited_seconds: float = 0.0
    """``usage.wall_seconds`` of the other run at that step."""
    inherited_device_seconds: float = 0.0
    """``usage.device_seconds`` likewise."""
    lineage: Lineage = Lineage()
    progress_at: dict[int, Lineage] = {}
    """The lineage at each version that the trainer may return to."""
    rows: dict[int, Row] = {}
    """Rows of metrics.jsonl by step, kept until they need not be written again."""
    last_row: Row = {}
    usage_at_step: Usage | None = None
    """``usage`` at the last reported step."""
    publish_stats: dict[str, float] = {}
    """Statistics of the last publish, for the next row."""
    mismatches: dict[str, MismatchSums] = {}
    """Log-probability mismatches summed over all steps and publishes, lost lineages included."""
    supervised_steps: int = 0
    """Mid-training steps that are in the trainer's weights."""
    supervised_tokens: int = 0
    """Solution tokens of these steps."""
    supervised_seconds: float = 0.0
    """Seconds of mid-training, as reported by the current incarnation of the trainer."""
    unproven: dict[str, int] = {}
    """The version that a generator of this name was sent and has not been found to compute as the trainer does: its publish is
    not committed, or a probe refused it. A generator with this version counts as one without weights."""
    last_publish: str = ""
    """Digest of the last PublishCommit, which detects its retries."""
    checkpoint: int = -1
    """Newest committed checkpoint that the trainer can still read."""
    checkpoint_failures: int = 0
    """Checkpoints that could not be written, over all incarnations; reported with the steps."""
    reported_failures: int = 0
    """The part of ``checkpoint_failures`` that the current incarnation has reported."""
    skips: dict[int, str] = {}
    """Reason of each kept step that was skipped when it was last reached."""
    skipped_steps: int = 0
    """Number of skipped steps over all incarnations and lineages."""
    last_skip_reason: str = ""

    counts: RolloutCounts = msgspec.field(default_factory=RolloutCounts)
    usage: Usage = msgspec.field(default_factory=Usage)
    evaluations: dict[EvaluationKey, Evaluation] = {}
    """Incomplete evaluations."""
    points: list[EvaluationPoint] = []
    """Points of all evaluation sets, by version."""

    samples: dict[int, Sample] = {}
    """By step that is not trained yet: a completion of a group whose scores are equal."""
    sample: Sample | None = None
    """One of the last steps if they taught nothing (``lineage.flat_steps``)."""

    stop_reason: str = ""
    """Why a stop was requested; empty without a request."""
    finish_reason: str = ""
    """Why the run ended; set once the trainer was sent FINISH."""

    # --- queries --------------------------------------------------------------------------------

    @property
    def awaits_trainer(self) -> bool:
        """Whether no trainer has sent a hello to this journal yet, so that a checkpoint's snapshot may replace the state."""
        return not self.incarnation

    @property
    def finished(self) -> bool:
        """Whether the trainer was sent FINISH and has committed a checkpoint of its last version."""
        return bool(self.finish_reason) and self.checkpoint == self.version

    def curve(self, task: int) -> list[EvaluationPoint]:
        """The points of the task's evaluation set, by version."""
        return [point for point in self.points if point.task == task]

    def slots_of(self, step: int) -> range:
        return slots.slots_of(step, self.batch_sizes)

    def step_of(self, slot: int) -> int:
        return slots.step_of(slot, self.batch_sizes)

    def missing(self, step: int) -> int:
        """Number of groups that ``step`` still needs."""
        return len(self.slots_of(step)) - self.filled.get(step, 0)

    def closed(self, step: int) -> bool:
        return self.missing(step) == 0

    def step_groups(self, step: int) -> list[Accepted]:
        """Groups of a closed, kept step, in slot order."""
        return [self.groups[slot] for slot in self.slots_of(step)]

    def step_tries(self, step: int) -> list[Try]:
        """Groups of a kept step whose slots were refilled, in slot order."""
        return [one for slot in self.slots_of(step) for one in self.tries.get(slot, ())]

    def lease_id(self, number: int) -> str:
        return f"{self.nonce}-{number}"

    def fill_slot(self, slot: int) -> None:
        """Count the slot as filled. The last slot of a step closes the step, and the zero-variance filter runs."""
        step = self.step_of(slot)
        self.filled[step] = self.filled.get(step, 0) + 1
        if self.closed(step) and self.known_identity.zero_variance_filter:
            for group in self.step_groups(step):
                if not group.filtered and (
                    group.equal_turns
                    or zero_variance(
                        group.graded(group.rewards), group.graded(group.returns), self.known_identity.credit
                    )
                ):
                    group.filtered = True
                    self.counts.queued -= group.rollouts
                    self.counts.filtered += group.rollouts

    def fold_history(self) -> None:
        """Fold into the histories' columns the results that the samplers of all later slots may use."""
        identity = self.known_identity
        # A refill chooses a prompt for a slot that was issued long before: for any slot that is not trained yet.
        slot_step = self.version if identity.max_tries > 1 else self.step_of(self.next_slot)
        for history in self.histories:
            history.fold(min(slot_step - identity.max_staleness_steps, self.version))

    @property
    def known_identity(self) -> Identity:
        """The run's identity, which the journal's first record sets."""
        if self.identity is None:
            raise AssertionError("the first record of a journal must be Started")
        return self.identity

    # --- snapshot -------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The state as MessagePack, for :meth:`decode`."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> CoordinatorState:
        """The state that :meth:`encode` encoded.

        Raises:
            msgspec.DecodeError: ``data`` is no such encoding, or of another format.
        """
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found != FORMAT:
            raise msgspec.DecodeError(f"the snapshot has format {found}; this release reads {FORMAT}")
        return msgspec.msgpack.decode(data, type=CoordinatorState)

    def detached(self) -> CoordinatorState:
        """A copy for a checkpoint that can be restored without this journal.

        It drops the groups, whose tokens are only in the journal. Slots that are not trained yet are issued again with the
        same prompts, and their rollouts no longer count as acknowledged.
        """
        copy = CoordinatorState.decode(self.encode())
        start = slots.first_slot(self.version, self.batch_sizes)
        copy.leases, copy.expired_lease_of, copy.groups, copy.filled, copy.rows = {}, {}, {}, {}, {}
        copy.skips, copy.tries, copy.samples = {}, {}, {}
        copy.prompts = {slot: prompt for slot, prompt in self.prompts.items() if slot >= start}
        copy.prompts |= {slot: tries[0].prompt for slot, tries in self.tries.items() if slot >= start}
        copy.open_slots = sorted(copy.prompts)
        copy.histories = [history.before(self.version) for history in copy.histories]
        copy.first_kept_step = self.version
        copy.progress_at = {self.version: self.lineage}
        copy.checkpoint = self.version
        counts = copy.counts
        untrained = [(slot, group) for slot, group in self.groups.items() if slot >= start]
        for slot, tries in self.tries.items():
            if slot >= start:
                untrained += [(slot, one.group) for one in tries]
                counts.refilled -= sum(one.group.rollouts for one in tries)
        for _, group in untrained:
            counts.acknowledged -= group.rollouts
            counts.ungraded -= len(group.ungraded)
            counts.masked_tokens -= sum(group.masked_tokens)
            if group.given_up:
                counts.given_up -= group.given_up_rollouts
                counts.too_long -= group.given_up_rollouts * (group.given_up == r.GiveUpReason.TOO_LONG)
            elif group.filtered:
                counts.filtered -= group.rollouts
            else:
                counts.queued -= group.rollouts
        for evaluation in copy.evaluations.values():
            evaluation.todo = [p for p in range(evaluation.prompts) if p not in evaluation.results]
        copy.stop_reason = copy.finish_reason = ""
        return copy
