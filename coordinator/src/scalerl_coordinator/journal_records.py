"""The journal's records: one for every change that must survive a restart.

A record has a decision, and every input to it from outside the state (time, choice, measurement).
:func:`scalerl_coordinator.transitions.apply` computes the consequences, live and in replay alike. Fields may be added at the
end of a record, with a default; any other change needs a new record type.
"""

from __future__ import annotations

import enum
from functools import reduce
from operator import or_

import msgspec

from scalerl_api.wire import GroupText, MessageSpan, PromptRef, RoutedExperts, Sample, Split, VersionSpan
from scalerl_coordinator.settings import Identity


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all records."""


class Started(Record, frozen=True, array_like=True, tag="started"):
    """A coordinator process started on this journal."""

    identity: Identity
    nonce: str
    """Unique to the process and part of its lease ids, so that no lease id is issued twice."""


class Issue(msgspec.Struct, frozen=True, array_like=True):
    """One slot or evaluation prompt of a :class:`LeasesIssued`."""

    number: int
    prompt: PromptRef
    slot: int
    policy_version: int


class LeasesIssued(Record, frozen=True, array_like=True, tag="leases"):
    holder: str
    """Name of the member, not its incarnation: a member that registers again keeps its leases."""
    issues: list[Issue]
    """Empty if the record only has new slots."""
    new_slots: list[tuple[int, PromptRef]] = []
    """New slots of the window with their prompts."""
    cursors: dict[int, int] = {}
    """Cursor of each task's sampler after the newest of these slots; empty without new slots."""


class CloseReason(enum.StrEnum):
    """Why a lease was closed without a group; determines which counter it adds to."""

    EXPIRED = "expired"
    """The holder was lost, unhealthy or replaced."""
    TIMED_OUT = "timed-out"
    """The deadline passed: the holder was alive but made no progress."""
    RELEASED = "released"
    STALE = "stale"
    INVALID = "invalid"


class LeaseClosed(Record, frozen=True, array_like=True, tag="closed"):
    lease_id: str
    reason: CloseReason
    rollouts: int
    """Number of completions that were received and dropped (stale, invalid); else 0."""


class GroupAccepted(Record, frozen=True, array_like=True, tag="group"):
    """An accepted training group. Its tokens are in the frame's blob, as :class:`StoredGroup`."""

    lease_id: str
    slot: int
    prompt_tokens: int
    lengths: list[int]
    """Number of tokens of each completion."""
    scores: list[float]
    """Score of each completion."""
    truncated: int
    """Number of completions that reached the maximum length."""
    oldest_version: int
    """Oldest weight version of any token of the group."""
    version_tokens: int
    """Sum of the weight versions of all tokens to be trained on."""
    grading_errors: int = 0
    """Number of completions on which the verifier failed."""
    ungraded: list[int] = []
    """Indices of those completions, which are not trained on."""
    masked_tokens: list[int] = []
    """Number of masked tokens of each completion; empty if no completion has any."""
    rewards: list[float] = []
    """Reward of each completion."""
    parts: dict[str, list[float]] = {}
    """Parts of the verdicts, by name, for each completion."""
    next_prompt: PromptRef | None = None
    """If set, the slot is issued again with this prompt, because the group's rewards are equal; None if the slot is filled."""
    unusable_tokens: int = 0
    """Tokens whose log-probability is not finite, which are masked."""
    sample: Sample | None = None
    """A completion of a group whose scores are equal."""
    looped: int = -1
    """Number of completions that end in a loop; -1: not known."""
    unanswered: int = -1
    """Number of graded completions without an answer; -1: the verifier cannot tell."""
    distinct: int = 0
    """Number of completions that differ in their tokens; 0 in old journals."""
    turns: list[int] = []
    """Number of replies of each completion; empty if each has one."""
    returns: list[list[float]] = []
    """Return of each turn of each completion; empty with ``recipe.advantage.credit`` ``Episode``."""
    message_tokens: int = 0
    """Tokens that an environment wrote."""
    episode_seconds: tuple[float, float] | None = None
    """See :attr:`~scalerl_api.wire.Group.episode_seconds`."""
    equal_turns: bool = False
    """Whether only the discount distinguishes the returns of graded episodes, if anything does."""


class StoredCompletion(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: bytes
    logprobs: bytes
    versions: list[VersionSpan]
    teacher_logprobs: bytes = b""
    finish_reason: str = ""
    turns: list[MessageSpan] = []
    routed: RoutedExperts | None = None


class StoredVerdicts(msgspec.Struct, frozen=True, kw_only=True):
    errors: dict[int, str] = {}


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a group's blob that the trainer and the record of rollouts need.

    The blob is the :class:`~scalerl_api.wire.Group` as received.
    """

    prompt_token_ids: bytes
    completions: list[StoredCompletion]
    prompt_id: str = ""
    verdicts: StoredVerdicts = StoredVerdicts()
    text: GroupText | None = None


class GiveUpReason(enum.StrEnum):
    """Why a slot is not issued again."""

    FAILED = "failed"
    TOO_LONG = "too_long"


class GivenUp(Record, frozen=True, array_like=True, tag="given-up"):
    """A slot that is not issued again and has no completions. A held-out prompt scores 0."""

    split: Split
    slot: int
    version: int
    """The version being evaluated; -1 for a training slot."""
    cause: GiveUpReason
    reason: str
    task: int = 0
    """With ``split``, the evaluation set."""
    labels: dict[str, str] = {}
    """Labels of the held-out prompt."""


class EvaluationStarted(Record, frozen=True, array_like=True, tag="evaluation"):
    version: int
    prompts: int
    task: int = 0
    """With ``split``, the evaluation set."""
    split: Split = Split.HELD_OUT


class EvaluationReleased(Record, frozen=True, array_like=True, tag="evaluation-released"):
    """An evaluation no longer holds a publish: members with newer weights may complete it."""

    version: int
    task: int = 0
    """Task of its evaluation set."""


class EvaluationAccepted(Record, frozen=True, array_like=True, tag="evaluation-group"):
    lease_id: str
    scores: list[float]
    tokens: int
    truncated: int
    mixed: bool
    """Whether weights other than the evaluated ones sampled a token (for details see ``NEWER_SHARE``)."""
    grading_errors: int = 0
    parts: dict[str, list[float]] = {}
    """Parts of the verdicts, by name, for each completion."""
    labels: dict[str, str] = {}
    """Labels of the prompt."""


class Dropped(Record, frozen=True, array_like=True, tag="dropped"):
    """Training rollouts that were received and dropped without changing a lease."""

    late: int
    duplicate: int


class TrainerJoined(Record, frozen=True, array_like=True, tag="trainer"):
    incarnation: str
    version: int


class Restored(Record, frozen=True, array_like=True, tag="restored"):
    """The journal was empty: the state is restored from the snapshot in the trainer's checkpoint."""

    snapshot: bytes
    forked_step: int = -1
    """Step of the checkpoint if it is that of another run, from which this one is forked; else -1."""


class WeightsLost(Record, frozen=True, array_like=True, tag="weights-lost"):
    """A generator holds weights that were published after the checkpoint that the state was restored from."""

    version: int


class StepTrained(Record, frozen=True, array_like=True, tag="step"):
    step: int
    stats: dict[str, float]
    busy_seconds: float
    trained_tokens: int


class StepSkipped(Record, frozen=True, array_like=True, tag="skipped"):
    """A step whose update was not applied, so that its version has the weights of the previous one."""

    step: int
    reason: str
    slots: list[int]
    """Unfiltered slots of the step, whose rollouts were not trained on."""
    stats: dict[str, float]
    busy_seconds: float


class Published(Record, frozen=True, array_like=True, tag="published"):
    version: int
    stats: dict[str, float]
    digest: str = ""
    """Digest of the request. A request with an equal digest is a retry after a lost response."""


class UnprovenChanged(Record, frozen=True, array_like=True, tag="unproven"):
    unproven: dict[str, int]
    """See :attr:`.CoordinatorState.unproven`."""


class CheckpointCommitted(Record, frozen=True, array_like=True, tag="checkpoint"):
    step: int
    kept_steps: list[int]


class StopRequested(Record, frozen=True, array_like=True, tag="stop"):
    reason: str
    """Empty cancels an earlier stop."""


class FinishSent(Record, frozen=True, array_like=True, tag="finish"):
    reason: str


class UsageAdded(Record, frozen=True, array_like=True, tag="usage"):
    """Usage since the last such record."""

    wall_seconds: float
    device_seconds: float
    generator_alive_seconds: float
    generator_busy_seconds: float
    generated_tokens: int
    waiting_seconds: float = 0.0


class SupervisedTrained(Record, frozen=True, array_like=True, tag="supervised"):
    """Progress of mid-training."""

    steps: int
    """Total of steps that the weights include."""
    tokens: int
    """Total of solution tokens of these steps."""
    seconds: float
    """Time since the last such record."""
    device_seconds: float
    """The same for devices."""


encode = msgspec.msgpack.Encoder().encode
decode_stored = msgspec.msgpack.Decoder(StoredGroup).decode
decode = msgspec.msgpack.Decoder(reduce(or_, Record.__subclasses__())).decode
"""Decodes a record. Raises ``msgspec.DecodeError`` if it is none."""
