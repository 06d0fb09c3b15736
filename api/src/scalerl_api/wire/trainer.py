"""Trainer → coordinator: what to do, shards of a step, publishes, checkpoints."""

from __future__ import annotations

import enum

from scalerl_api.wire.actor import VersionSpan
from scalerl_api.wire.base import Member, Struct


class TrainerHello(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/hello``: rank 0, after loading its checkpoint (or none: ``version`` 0)."""

    incarnation: str
    version: int
    world_size: int
    snapshot: bytes | None
    """The coordinator state saved with that checkpoint; used only if the coordinator has no journal."""


class TrainerWelcome(Struct, frozen=True, kw_only=True):
    next_step: int
    """Equals the hello's ``version``: steps from here are served from the journal, or made again."""
    published_version: int
    consecutive_skipped_steps: int = 0
    """Steps just before ``next_step`` that were skipped, one after the other."""


class NextAction(enum.StrEnum):
    TRAIN = "train"
    PUBLISH = "publish"
    """A member holds older weights than the trainer; give it the current ones."""
    WAIT = "wait"
    FINISH = "finish"
    """Checkpoint and leave; ``reason`` says why."""


class NextRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/next``: rank 0's long poll for what to do; the trainer holds ``version``."""

    incarnation: str
    version: int
    wait_seconds: float


class Next(Struct, frozen=True, kw_only=True):
    action: NextAction
    step: int
    reason: str = ""
    """Why the run is ending; empty while it is not."""
    measured: bool = False
    """The version that the trainer holds has an evaluation, or will have: its model is worth keeping."""
    points: int | None = None
    """How many evaluations the status has; None from a coordinator that does not report it."""


class ShardRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/shard``: each rank fetches its part of a closed step; may be repeated."""

    incarnation: str
    step: int
    rank: int
    world_size: int


def trained_tokens(lengths: list[int], masked_tokens: list[int], ungraded: list[int]) -> list[int]:
    """Tokens of each completion that have a gradient, unless the whole group is filtered.

    >>> trained_tokens([5, 6, 7], [0, 2, 0], [2]), trained_tokens([5, 6], [], [])
    ([5, 4, 0], [5, 6])
    """
    masked = masked_tokens or [0] * len(lengths)
    return [0 if at in ungraded else n - m for at, (n, m) in enumerate(zip(lengths, masked, strict=True))]


class GroupMeta(Struct, frozen=True, kw_only=True):
    """What every rank needs of every group of the step."""

    slot: int
    scores: list[float]
    """The verifier's, in [0, 1]."""
    rewards: list[float]
    """What the completions are trained with: of the score and the length."""
    completion_tokens: list[int]
    filtered: bool
    """Zero variance, or given up (no completions): takes no part in the gradient. Tries before a refill are not here."""
    ungraded: list[int] = []
    """Indices of the completions without a verdict: they count in no mean, and none of their tokens is trained on."""
    masked_tokens: list[int] = []
    """Of each completion, how many of its tokens are masked; empty: none of any."""

    @property
    def trained_tokens(self) -> list[int]:
        """Of each completion, how many tokens have a gradient."""
        return trained_tokens(self.completion_tokens, self.masked_tokens, self.ungraded)


class Sequence(Struct, frozen=True, kw_only=True):
    group: int
    """Index into :attr:`Shard.groups`."""
    sample: int
    """Index of the completion in its group."""
    prompt_token_ids: bytes
    token_ids: bytes
    logprobs: bytes
    teacher_logprobs: bytes = b""
    """Empty without ``recipe.distillation``."""
    versions: list[VersionSpan]


class Shard(Struct, frozen=True, kw_only=True):
    step: int
    groups: list[GroupMeta]
    sequences: list[Sequence]
    """This rank's sequences of unfiltered groups, balanced over ranks by tokens."""
    ambiguous: bool = False
    """Other weights had this step's version before the trainer went back to a checkpoint: a token of that version may
    be theirs, so it compares nothing at equal weights."""


class StepReport(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/step``: step ``step`` is over; the trainer now holds ``step + 1``.

    A step that was skipped leaves weights and optimizer as they were, and still is one: its rollouts are used up, its
    version is published and measured as any other, and it counts against ``budget.maxSteps``.
    """

    incarnation: str
    step: int
    stats: dict[str, float]
    """Finite scalars for metrics.jsonl: loss, grad_norm, entropy, seconds by phase, … Read here are those of
    :mod:`scalerl_api.mismatch` (absent where the step has no such token), and ``checkpoint_failures``, how many
    checkpoints this incarnation could not write so far."""
    busy_seconds: float
    """Seconds of this step in which the ranks computed (mean over ranks)."""
    trained_tokens: int
    """0 of a skipped step."""
    skipped: str = ""
    """Why the step was not applied; empty where it was."""


class StepReported(Struct, frozen=True, kw_only=True):
    publish: bool
    """Whether the version that the step has made is published now (``recipe.offPolicy``)."""


class SupervisedReport(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/supervised``: progress of mid-training, before the first step. May be repeated."""

    incarnation: str
    steps: int
    """Supervised steps that the weights have."""
    tokens: int
    """Solution tokens of these steps."""
    seconds: float
    """Of supervised training in this incarnation, so far."""


class SupervisedReported(Struct, frozen=True, kw_only=True):
    stop_reason: str
    """Why the run is to end; empty while it is not."""


class PublishBegin(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/publish/begin``: long poll; answered once the version may go out."""

    incarnation: str
    version: int
    wait_seconds: float


class PublishPermit(Struct, frozen=True, kw_only=True):
    ready: bool
    """False: an evaluation of the version before is still being generated; ask again."""
    members: list[Member]
    """Whom to publish to (healthy members holding an older version)."""


class PublishCommit(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/publish/commit``. The very same message again, after a lost answer, counts once."""

    incarnation: str
    version: int
    updated: list[str]
    """Member ids that hold ``version`` now."""
    failed: list[str]
    """Member ids that did not take it; they must register again."""
    stats: dict[str, float]


class CheckpointBegin(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/checkpoint/begin``: the coordinator's state as of ``step`` (= weight version)."""

    incarnation: str
    step: int


class CheckpointSnapshot(Struct, frozen=True, kw_only=True):
    step: int
    snapshot: bytes
    best_version: int = -1
    """Version of the best evaluation so far, of several the newest; -1 with none. A run that goes bad after it can be taken back to there."""


class CheckpointCommit(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/checkpoint/commit``: the checkpoint is on disk; the journal before the oldest kept one may go."""

    incarnation: str
    step: int
    kept_steps: list[int]
