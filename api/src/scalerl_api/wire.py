"""What the processes of one run say to each other: msgspec structs, sent as MessagePack.

Every request to the coordinator carries the run's bearer token and the header
``x-scalerl-wire: <WIRE_VERSION>``; another version is refused with 426 and both numbers.
Token ids travel as little-endian int32 bytes and log-probabilities as little-endian float32
bytes, so that nobody decodes them who does not need them.

Vocabulary
    slot      position in the run's one sequence of training prompts; step ``t`` consumes slots
              ``[t·B, (t+1)·B)`` with ``B = promptsPerStep``, so a batch's prompts never depend on timing.
    version   number of optimizer updates the weights have seen; step ``t`` turns version ``t`` into ``t+1``.
    lease     one slot (or one evaluation prompt) handed to one generator until its deadline.
    group     all completions of one lease. A rollout is one completion.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

WIRE_VERSION = 1
WIRE_HEADER = "x-scalerl-wire"
CONTENT_TYPE = "application/msgpack"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message."""


# --- membership (actor → coordinator) ----------------------------------------------------------


class Register(Struct, frozen=True, kw_only=True):
    """``POST /v1/members``: a generator that is up. It leases nothing before it holds weights."""

    name: str
    """Stable name of the replica, e.g. ``generator-0``; a newer registration replaces an older one."""
    control_url: str
    """Where the trainer reaches this actor's weight control."""
    task_digest: str
    """Digest of the actor's own training split; the coordinator refuses another one."""
    held_leases: list[str] = []
    """Leases this actor still works on, when it registers again: they stay its own. Others of its name are given away."""


class Registered(Struct, frozen=True, kw_only=True):
    member_id: str
    """Names this incarnation; every later call carries it."""
    heartbeat_seconds: float
    """Send a heartbeat this often; after four missed ones the member's leases are given away."""


class Heartbeat(Struct, frozen=True, kw_only=True):
    """``POST /v1/members/heartbeat``. Totals count since the member registered."""

    member_id: str
    weight_version: int
    """Version the server holds; -1 before the first weights."""
    healthy: bool
    """The vLLM server answers. An unhealthy member is not published to and its leases are given away."""
    busy_seconds: float
    generated_tokens: int
    held_leases: list[str] | None = None
    """Leases this actor works on, up to the acknowledged push. Given, older leases of its own that are not among
    them are given away: their answer never arrived. None says nothing."""


# --- leases (actor → coordinator) --------------------------------------------------------------


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/lease``: long poll for work; answered with an empty list after ``wait_seconds``."""

    member_id: str
    weight_version: int
    max_groups: int
    wait_seconds: float


class Split(enum.StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


class Lease(Struct, frozen=True, kw_only=True):
    lease_id: str
    split: Split
    slot: int
    """Training: the slot. Evaluation: position in the held-out set."""
    prompt_index: int
    """Index into the split of the prompt source."""
    prompt_id: str
    completions: int
    max_tokens: int
    temperature: float
    remaining_seconds: float
    """Deliver within this time, or the group is someone else's."""
    policy_version: int
    """Evaluation: the version being measured. Training: the version the lease was given at."""


class Leases(Struct, frozen=True, kw_only=True):
    leases: list[Lease]
    stop: bool = False
    """The run is over; the actor may leave."""


class VersionSpan(Struct, frozen=True, array_like=True):
    """Tokens from ``start`` to the next span's start were sampled by ``version``."""

    version: int
    start: int


class Completion(Struct, frozen=True, kw_only=True):
    token_ids: bytes
    logprobs: bytes
    """Of the sampled tokens, under the distribution they were sampled from."""
    versions: list[VersionSpan]
    finish_reason: Literal["stop", "length"]
    score: float
    """Verifier's verdict in [0, 1]."""
    grading_error: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


class Group(Struct, frozen=True, kw_only=True):
    lease_id: str
    split: Split
    slot: int
    prompt_index: int
    prompt_id: str
    prompt_token_ids: bytes
    completions: list[Completion]
    generation_seconds: float


class Push(Struct, frozen=True, kw_only=True):
    """``POST /v1/groups``. Idempotent: pushing a group twice counts once."""

    member_id: str
    groups: list[Group]


class PushResult(enum.StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Accepted before; nothing changed."""
    LATE = "late"
    """The lease had expired and the work was given away; dropped and counted."""
    STALE = "stale"
    """A token older than maxStalenessSteps at its step; dropped and counted, the slot is issued again."""
    INVALID = "invalid"
    """Does not match the lease (count, lengths, non-finite log-probabilities); dropped, counted, issued again: at
    once the first time, then after ever longer waits."""


class PushReply(Struct, frozen=True, kw_only=True):
    results: list[PushResult]
    reasons: list[str | None]


class Release(Struct, frozen=True, kw_only=True):
    """``POST /v1/release``: leases an actor cannot serve; issued again, first."""

    member_id: str
    lease_ids: list[str]
    reason: str


# --- training (trainer → coordinator) ----------------------------------------------------------


class TrainerHello(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/hello``: rank 0, after loading its checkpoint (or none: ``version`` 0)."""

    incarnation: str
    version: int
    world_size: int
    snapshot: bytes | None
    """The coordinator state saved with that checkpoint; used only if the coordinator has no journal."""


class TrainerWelcome(Struct, frozen=True, kw_only=True):
    next_step: int
    """Equals the hello's ``version``: steps from here are served again from the journal, or made anew."""
    published_version: int


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


class ShardRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/shard``: each rank fetches its part of a closed step; may be repeated."""

    incarnation: str
    step: int
    rank: int
    world_size: int


class GroupMeta(Struct, frozen=True, kw_only=True):
    """What every rank needs of every group of the step."""

    slot: int
    scores: list[float]
    completion_tokens: list[int]
    filtered: bool
    """Zero variance: takes no part in the gradient, is not refilled."""


class Sequence(Struct, frozen=True, kw_only=True):
    group: int
    """Index into :attr:`Shard.groups`."""
    sample: int
    """Index of the completion in its group."""
    prompt_token_ids: bytes
    token_ids: bytes
    logprobs: bytes
    versions: list[VersionSpan]


class Shard(Struct, frozen=True, kw_only=True):
    step: int
    groups: list[GroupMeta]
    sequences: list[Sequence]
    """This rank's sequences of unfiltered groups, balanced over ranks by tokens."""


class StepReport(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/step``: step ``step`` has been applied; the trainer now holds ``step + 1``."""

    incarnation: str
    step: int
    stats: dict[str, float]
    """Finite scalars for metrics.jsonl: loss, grad_norm, entropy, seconds by phase, … Two of them are read here:
    ``mismatch_kl``, the KL estimate (k3) over the step's tokens that its own version sampled (absent when it has
    none), and ``checkpoint_failures``, how many checkpoints this incarnation could not write so far."""
    busy_seconds: float
    """Seconds of this step in which the ranks computed (mean over ranks)."""
    trained_tokens: int


class PublishBegin(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/publish/begin``: long poll; answered once the version may go out."""

    incarnation: str
    version: int
    wait_seconds: float


class Member(Struct, frozen=True, kw_only=True):
    member_id: str
    name: str
    control_url: str
    weight_version: int


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


class CheckpointCommit(Struct, frozen=True, kw_only=True):
    """``POST /v1/trainer/checkpoint/commit``: the checkpoint is on disk; the journal before the oldest kept one may go."""

    incarnation: str
    step: int
    kept_steps: list[int]


class Ack(Struct, frozen=True, kw_only=True):
    ok: bool = True


# --- watching (anyone with the token) ----------------------------------------------------------


INTERRUPTED = "interrupted"
"""The reason of a stop by somebody who waits for the end: the last version is saved, and not measured."""


class Stop(Struct, frozen=True, kw_only=True):
    """``POST /v1/stop``: end the run in order. The trainer finishes its step, its last version is measured (unless the
    reason is :data:`INTERRUPTED`), it checkpoints and leaves.

    A stop is journaled and outlives restarts; whoever resumes a stopped run takes it back first.
    """

    reason: str
    """Empty: take an earlier stop back."""


class EvaluationPoint(Struct, frozen=True, kw_only=True):
    """One point of the curve."""

    version: int
    work_tokens: int
    """Completion tokens of all steps before ``version`` (the compute axis: useful work, not wall time)."""
    reward: float
    standard_error: float
    """Of the mean over prompts."""
    samples: int
    prompts: int
    set_digest: str
    mixed_versions: bool
    truncated_fraction: float
    mean_tokens: float
    wall_seconds: float
    """Since the first lease."""
    device_seconds: float


class Counts(Struct, frozen=True, kw_only=True):
    """Training rollouts by fate. ``acknowledged = trained + filtered + queued`` always; the rest was never accepted."""

    acknowledged: int
    trained: int
    filtered: int
    queued: int
    leased: int
    late: int
    stale: int
    invalid: int
    duplicate: int
    expired_leases: int
    held_out_invalid: int = 0
    """Evaluation rollouts refused as invalid; in no other count."""


class Phase(enum.StrEnum):
    WAITING = "waiting"
    """No generator holds weights yet."""
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    """The trainer has written its last checkpoint and left."""


class Status(Struct, frozen=True, kw_only=True):
    """``GET /v1/status``."""

    phase: Phase
    waiting_for: str
    """In words; empty when nothing is awaited."""
    step: int
    """Steps trained."""
    published_version: int
    stop_reason: str
    """Why the run ends or has ended: the budget's field that is used up (``maxSteps``), or the reason of a stop."""
    counts: Counts
    members: list[Member]
    points: list[EvaluationPoint]
    last_step_stats: dict[str, float]
    wall_seconds: float
    """Since the first lease, over all incarnations of the run."""
    device_seconds: float
    tokens_generated: int
    tokens_trained: int
    generator_busy_fraction: float
    trainer_busy_fraction: float
    max_staleness_steps: int
    mean_staleness_steps: float
    mismatch_kl: float | None
    """KL estimate (k3) between trainer and generators at the same weight version: the mean over publishes that
    measured it; before any did, over steps."""
    grading_errors: int = 0
    """Accepted rollouts, evaluation's too, whose verifier failed: their score says nothing about them."""
    checkpoint_failures: int = 0
    """Checkpoints that could not be written, over all incarnations of the trainer; told with each step."""


# --- weight control (trainer → actor) ----------------------------------------------------------


class GroupJoin(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/join``: become ``rank`` of a new process group; leaves any older one."""

    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_seconds: float


class TensorSpec(Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[int]


class WeightReceive(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/receive``: pause, take version ``version`` over the group, resume."""

    epoch: int
    version: int
    tensors: list[TensorSpec]
    bucket_bytes: int
    timeout_seconds: float


class WeightReceived(Struct, frozen=True, kw_only=True):
    """Seconds by phase, as measured at the generator."""

    version: int
    pause_seconds: float
    transfer_seconds: float
    load_seconds: float
    resume_seconds: float


class Probe(Struct, frozen=True, kw_only=True):
    """``POST /v1/weights/probe``: score these sequences under the weights held now."""

    version: int
    sequences: list[bytes]
    prompt_tokens: list[int]


class Probed(Struct, frozen=True, kw_only=True):
    version: int
    logprobs: list[bytes]
    """Float32, of the tokens after each prompt."""


class Problem(Struct, frozen=True, kw_only=True):
    """Body of every answer that is not 2xx."""

    error: str
    """Short constant, e.g. ``wire-version``, ``unauthorized``, ``unknown-member``, ``superseded``, ``not-ready``."""
    message: str
