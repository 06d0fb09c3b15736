"""What the journal is made of: one record for every change that must survive.

A record says what was decided, with everything the decision drew from outside (time, choice, measurement);
what follows from it is worked out by :meth:`scalerl_coordinator.state.State.apply`, live and in replay alike.
Fields may be added at the end of a record, with a default; anything else is a new record.
"""

from __future__ import annotations

import enum

import msgspec

from scalerl_api.wire import Split
from scalerl_coordinator.settings import Identity


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all records."""


class Started(Record, frozen=True, array_like=True, tag="started"):
    """A coordinator process began to work on this journal."""

    identity: Identity
    nonce: str
    """Unique to the process; part of every lease id it gives out, so that none is ever given twice."""


class Issue(msgspec.Struct, frozen=True, array_like=True):
    """One slot or evaluation prompt of a :class:`LeasesIssued`."""

    number: int
    split: Split
    slot: int
    prompt_index: int
    policy_version: int


class LeasesIssued(Record, frozen=True, array_like=True, tag="issued"):
    holder: str
    """Name of the member, not its incarnation: a member that only re-registers keeps its work."""
    issues: list[Issue]
    held_back: list[tuple[int, int]] = []
    """Slots passed over, which wait for younger weights, each with its prompt: they are issued later."""


class Why(enum.StrEnum):
    """Why a lease ended without a group; decides which counter moves."""

    EXPIRED = "expired"
    """Its holder lost, unhealthy or replaced. In journals of before: or its deadline over."""
    TIMED_OUT = "timed-out"
    """Deadline over: its holder was there, and came no further with it."""
    RELEASED = "released"
    STALE = "stale"
    INVALID = "invalid"


class LeaseClosed(Record, frozen=True, array_like=True, tag="closed"):
    lease_id: str
    why: Why
    rollouts: int
    """Completions that came and were dropped (stale, invalid); else 0."""


class GroupAccepted(Record, frozen=True, array_like=True, tag="group"):
    """A training group. Its tokens travel beside the record, as the frame's blob, and are never decoded here."""

    lease_id: str
    slot: int
    prompt_tokens: int
    lengths: list[int]
    """Completion tokens of each completion."""
    scores: list[float]
    truncated: int
    oldest_version: int
    """Of any token of the group."""
    version_tokens: int
    """Sum over completion tokens of the version that sampled each."""
    grading_errors: int = 0
    """Completions whose verifier failed."""
    ungraded: list[int] = []
    """Which: not trained on. Empty in a journal from before they were left out: those were trained on, as 0."""
    masked_tokens: list[int] = []
    """Of each completion, how many of its tokens are masked; empty: none of any."""


class GivenUpFor(enum.StrEnum):
    """Why a place is not tried any more."""

    FAILED = "failed"
    TOO_LONG = "too_long"


class GivenUp(Record, frozen=True, array_like=True, tag="given-up"):
    """A place that waits to be issued again is not: it has no completions. A held-out prompt counts 0."""

    split: Split
    slot: int
    version: int
    """The version being measured; training: -1."""
    why: GivenUpFor
    reason: str


class EvaluationStarted(Record, frozen=True, array_like=True, tag="evaluation"):
    version: int
    prompts: int


class EvaluationReleased(Record, frozen=True, array_like=True, tag="evaluation-released"):
    """The hold is over: whoever is there may finish this evaluation, with newer weights."""

    version: int


class EvaluationAccepted(Record, frozen=True, array_like=True, tag="evaluation-group"):
    lease_id: str
    scores: list[float]
    tokens: int
    truncated: int
    mixed: bool
    """A token came from another version than the one being measured."""
    grading_errors: int = 0


class Dropped(Record, frozen=True, array_like=True, tag="dropped"):
    """Training rollouts that came and were dropped without touching a lease."""

    late: int
    duplicate: int


class TrainerJoined(Record, frozen=True, array_like=True, tag="trainer"):
    incarnation: str
    version: int


class Restored(Record, frozen=True, array_like=True, tag="restored"):
    """The journal was empty: the state starts from the snapshot that the trainer's checkpoint carried."""

    snapshot: bytes


class StepTrained(Record, frozen=True, array_like=True, tag="step"):
    step: int
    stats: dict[str, float]
    busy_seconds: float
    trained_tokens: int


class StepSkipped(Record, frozen=True, array_like=True, tag="skipped"):
    """A step was consumed without an update: its version has the weights of the one before."""

    step: int
    reason: str
    slots: list[int]
    """Whose rollouts were not trained on: those of the step that were not filtered."""
    stats: dict[str, float]
    busy_seconds: float


class Published(Record, frozen=True, array_like=True, tag="published"):
    version: int
    stats: dict[str, float]
    digest: str = ""
    """Of the whole commit: the same one again is the repetition of a call whose answer was lost."""


class CheckpointCommitted(Record, frozen=True, array_like=True, tag="checkpoint"):
    step: int
    kept_steps: list[int]


class StopRequested(Record, frozen=True, array_like=True, tag="stop"):
    reason: str
    """Empty takes an earlier stop back."""


class FinishGiven(Record, frozen=True, array_like=True, tag="finish"):
    reason: str


class UsageAdded(Record, frozen=True, array_like=True, tag="usage"):
    """What was used since the last such record."""

    wall_seconds: float
    device_seconds: float
    generator_alive_seconds: float
    generator_busy_seconds: float
    generated_tokens: int


AnyRecord = (
    Started
    | LeasesIssued
    | LeaseClosed
    | GroupAccepted
    | GivenUp
    | EvaluationStarted
    | EvaluationReleased
    | EvaluationAccepted
    | Dropped
    | TrainerJoined
    | Restored
    | StepTrained
    | StepSkipped
    | Published
    | CheckpointCommitted
    | StopRequested
    | FinishGiven
    | UsageAdded
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyRecord).decode
