"""Trainer → coordinator: next action, shards of a step, publishes, checkpoints."""

from __future__ import annotations

import enum

from scalerl_api.exports import Exports
from scalerl_api.wire.actor import MessageSpan, RoutedExperts, VersionSpan
from scalerl_api.wire.base import Member, Struct, Uploads


class TrainerHello(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/hello``: sent by rank 0 after it has loaded a checkpoint (without one, ``version`` is 0)."""

    incarnation: str
    """Identifier of this start of the trainer; every later request has it."""
    version: int
    """Weight version that the trainer holds."""
    world_size: int
    snapshot: bytes | None
    """Coordinator state saved with that checkpoint; used only if the coordinator has no journal."""


class TrainerWelcome(Struct, frozen=True, kw_only=True):
    """Response to a :class:`TrainerHello`."""

    next_step: int
    """``version`` of the hello: the coordinator serves steps from this one on from the journal, or generates them again."""
    published_version: int
    """Newest version that generators hold; -1 before the first publish."""
    consecutive_skipped_steps: int = 0
    """Number of consecutive skipped steps immediately before ``next_step``."""


class NextAction(enum.StrEnum):
    """The trainer's next action."""

    TRAIN = "train"
    PUBLISH = "publish"
    """Publish the current weights: a member holds older ones."""
    WAIT = "wait"
    FINISH = "finish"
    """Write a checkpoint and exit; ``reason`` has the reason."""


class NextRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/next``: rank 0's long poll for the next action; the trainer holds ``version``."""

    incarnation: str
    version: int
    wait_seconds: float
    uploads: Uploads | None = None
    """Copies of the checkpoints; None without ``checkpoint.to``."""


class Next(Struct, frozen=True, kw_only=True):
    """Response to a :class:`NextRequest`."""

    action: NextAction
    step: int
    """The step that the action refers to."""
    reason: str = ""
    """Why the run is ending; empty while it is not."""
    measured: bool = False
    """Whether the trainer's version has or will have an evaluation, so that its model is kept for export."""
    points: int | None = None
    """Number of evaluations in the status; None from a coordinator that does not report it."""


class ShardRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/shard``: each rank fetches its shard of a closed step. Idempotent."""

    incarnation: str
    step: int
    rank: int
    world_size: int
    wait_seconds: float = 0.0
    """The answer to a request for a step that is not closed waits for it this long."""


def trained_tokens(lengths: list[int], masked_tokens: list[int], ungraded: list[int]) -> list[int]:
    """Number of tokens with a gradient in each completion, unless the whole group is filtered.

    >>> trained_tokens([5, 6, 7], [0, 2, 0], [2]), trained_tokens([5, 6], [], [])
    ([5, 4, 0], [5, 6])
    """
    masked = masked_tokens or [0] * len(lengths)
    return [0 if at in ungraded else n - m for at, (n, m) in enumerate(zip(lengths, masked, strict=True))]


class GroupMeta(Struct, frozen=True, kw_only=True):
    """Figures of a group of the step; every rank receives those of all groups. Lists have one entry per completion."""

    slot: int
    scores: list[float]
    """The verifier's scores, in [0, 1]."""
    rewards: list[float]
    """Rewards for training, computed from score and length."""
    completion_tokens: list[int]
    """Length of each completion, in tokens."""
    filtered: bool
    """The group has zero variance, or was given up (no completions): it has no gradient. Groups dropped before a refill are
    not included."""
    ungraded: list[int] = []
    """Indices of the completions without a verdict: means exclude them, and their tokens are not trained on."""
    masked_tokens: list[int] = []
    """Number of masked tokens in each completion; empty if no completion has any."""
    unusable_tokens: int = 0
    """Tokens that are masked because the generator gave no finite log-probability."""
    returns: list[list[float]] = []
    """Return of each turn of each completion, if ``recipe.advantage.credit`` is not ``Episode``: ``scalerl_coordinator.rewards``.
    Empty also of a group that was accepted before it was."""
    recorded: bool = False
    """Whether the record of rollouts has the group, so that the step's report is to have its :class:`TrainedSequence`."""

    @property
    def trained_tokens(self) -> list[int]:
        """Number of tokens with a gradient in each completion."""
        return trained_tokens(self.completion_tokens, self.masked_tokens, self.ungraded)


class Sequence(Struct, frozen=True, kw_only=True):
    """A prompt and a completion. Token ids are little-endian int32, log-probabilities little-endian float32."""

    group: int
    """Index into :attr:`Shard.groups`."""
    sample: int
    """Index of the completion in its group."""
    prompt_token_ids: bytes
    token_ids: bytes
    logprobs: bytes
    """Log-probabilities of the completion's tokens, from the generator."""
    teacher_logprobs: bytes = b""
    """Log-probabilities of the same tokens under the teacher; empty without ``recipe.distillation``."""
    versions: list[VersionSpan]
    """Weight versions by span of tokens."""
    turns: list[MessageSpan] = []
    """The environment's messages, if the group has ``returns``."""
    routed: RoutedExperts | None = None
    """See :attr:`~.actor.Completion.routed`."""


class Shard(Struct, frozen=True, kw_only=True):
    """One rank's part of a step."""

    step: int
    groups: list[GroupMeta]
    sequences: list[Sequence]
    """This rank's sequences of unfiltered groups, balanced over ranks by tokens."""
    ambiguous: bool = False
    """Two sets of weights have had this step's version, because the trainer returned to a checkpoint. Tokens of that version
    may be from the other weights, so the trainer excludes them from comparisons at equal weights."""


class TrainedSequence(Struct, frozen=True, array_like=True):
    """What the trainer computed of a recorded rollout."""

    slot: int
    sample: int
    """Index of the completion in its group."""
    advantage: float
    mean_difference: float
    """Mean over the trained tokens of the absolute difference of the log-probabilities of trainer and generator, in nats."""
    max_difference: float
    differences: bytes = b""
    """log-probability of the trainer minus that of the generator, of each trained token in order, little-endian float16."""


class StepReport(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/step``: step ``step`` is complete; the trainer now holds version ``step + 1``.

    A skipped step does not change weights and optimizer, but counts as a step: its rollouts are used up, its version is
    published and evaluated like any other, and it counts against ``budget.maxSteps``.
    """

    incarnation: str
    step: int
    stats: dict[str, float]
    """Finite scalars for metrics.jsonl: loss, grad_norm, entropy, seconds by phase, … The coordinator reads those of
    :mod:`scalerl_api.mismatch` (absent if the step has no such token) and ``checkpoint_failures``, the number of checkpoints
    that this incarnation failed to write."""
    busy_seconds: float
    """Seconds of this step in which the ranks computed (mean over ranks)."""
    trained_tokens: int
    """Completion tokens with a gradient; 0 for a skipped step."""
    skipped: str = ""
    """Why the update was not applied; empty if it was."""
    sequences: list[TrainedSequence] = []
    """Of the rollouts that were trained on and are recorded."""


class StepReported(Struct, frozen=True, kw_only=True):
    """Response to a :class:`StepReport`."""

    publish: bool
    """Whether to publish the new version now (``recipe.offPolicy``)."""


class SupervisedReport(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/supervised``: progress of mid-training, before the first step. Idempotent."""

    incarnation: str
    steps: int
    """Supervised steps applied to the weights."""
    tokens: int
    seconds: float
    """Duration of supervised training in this incarnation so far, in seconds."""


class SupervisedReported(Struct, frozen=True, kw_only=True):
    """Response to a :class:`SupervisedReport`."""

    stop_reason: str
    """Why the run must end; empty while it continues."""


class PublishBegin(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/publish/begin``: long poll until at least one member may get the version, or none needs it."""

    incarnation: str
    version: int
    wait_seconds: float


class PublishPermit(Struct, frozen=True, kw_only=True):
    """Response to a :class:`PublishBegin`."""

    ready: bool
    """False: an evaluation of the previous version is in progress; repeat the request."""
    members: list[Member]
    """Members to publish to: healthy, with an older version."""
    holders: int = 0
    """Number of other members that generate with the version."""


class PublishCommit(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/publish/commit``: result of a publish. Idempotent: an identical message counts once."""

    incarnation: str
    version: int
    updated: list[str]
    """Ids of the members that now hold ``version``."""
    failed: list[str]
    """Ids of the members that did not receive it; they must register again."""
    stats: dict[str, float]
    """Finite scalars for metrics.jsonl."""
    refused: list[str] = []
    """Ids of the members that hold ``version`` but compute something else than the trainer; they get no lease with it and must
    register again."""
    problem: str = ""
    """Why members failed or were refused, or why nothing was sent; else empty."""
    kept: list[str] = []
    """Ids of the members that could not read ``version`` and generate with the one they have."""


class CheckpointBegin(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/checkpoint/begin``: requests the coordinator's state at ``step`` (= weight version)."""

    incarnation: str
    step: int


class CheckpointSnapshot(Struct, frozen=True, kw_only=True):
    """Response to a :class:`CheckpointBegin`."""

    step: int
    snapshot: bytes
    """The coordinator's state, encoded."""
    best_version: int = -1
    """Version of the best evaluation so far, the newest of equal ones; -1 without an evaluation. The trainer keeps its
    checkpoint, so that a run that breaks later can return to it."""


class CheckpointCommit(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/checkpoint/commit``: the checkpoint is on disk. The coordinator may delete its journal before the
    oldest kept checkpoint."""

    incarnation: str
    step: int
    kept_steps: list[int]
    """Steps of the checkpoints on disk."""


class CheckpointFailed(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/checkpoint/failed``: the last attempt to write a checkpoint failed. The coordinator shows it in its
    status until a checkpoint is committed, and answers also while it cannot write its own files."""

    incarnation: str
    step: int
    """Version that no checkpoint has; 0 in mid-training."""
    reason: str
    """Empty once the same could be written, where no checkpoint is committed (in mid-training)."""
    holding: bool
    """Training or mid-training has ended, and the trainer keeps the weights in memory until they are saved."""


class ExportsReport(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/exports``: the exported models, from a trainer whose directory the coordinator cannot read. Idempotent."""

    incarnation: str
    exports: Exports | None
    """None: only asks."""


class ExportsReported(Struct, frozen=True, kw_only=True):
    """Response to an :class:`ExportsReport`."""

    exports: Exports | None
    """The exported models as last reported."""
