"""Actor → coordinator: membership, leases, groups."""

from __future__ import annotations

import enum
from typing import Literal

from scalerl_api.wire.base import Struct

# --- membership -----------------------------------------------------------------------------------


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
    progress: dict[str, int] = {}
    """Of leases held, by id: tokens generated so far, its own and, before its first, those it waited for. A lease
    whose number has grown has its whole time again."""


# --- leases ---------------------------------------------------------------------------------------


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


MASKED = -1
"""Version of a span whose tokens are not trained on: the policy did not choose them, or their log-probability is of
no use. It stands in its place, as 0."""


class VersionSpan(Struct, frozen=True, array_like=True):
    """Tokens from ``start`` to the next span's start were sampled by ``version``, or are :data:`MASKED`."""

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
    """Why the verifier gave no verdict. The completion is not trained on, and its group is judged without it."""

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
    """A token older than recipe.offPolicy allows at its step; dropped and counted, the slot is issued again."""
    INVALID = "invalid"
    """Does not match the lease (count, lengths, non-finite log-probabilities); dropped, counted, issued again: at
    once the first time, then after ever longer waits."""


class PushReply(Struct, frozen=True, kw_only=True):
    results: list[PushResult]
    reasons: list[str | None]


class ReleaseCause(enum.StrEnum):
    """What a release says about the prompts of its leases."""

    UNSERVED = "unserved"
    """Nothing: the member could not go on."""
    FAILED = "failed"
    """The member is well, and could not generate or grade this group."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a completion in the context: no member can serve it."""


class Release(Struct, frozen=True, kw_only=True):
    """``POST /v1/release``: leases an actor cannot serve; issued again, first.

    A slot that failed with two members, or too often, is given up, and so is at once one whose prompt is too long.
    """

    member_id: str
    lease_ids: list[str]
    reason: str
    cause: ReleaseCause = ReleaseCause.UNSERVED
