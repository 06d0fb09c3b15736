"""Actor → coordinator: membership, leases, groups."""

from __future__ import annotations

import enum
from typing import Literal

from scalerl_api.wire.base import Struct
from scalerl_api.wire.prompts import PromptRef, Split
from scalerl_api.wire.verdicts import Verdicts

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
    """Leases this actor still works on, when it registers again: they stay its own. Others of its name are reassigned."""


class Registered(Struct, frozen=True, kw_only=True):
    member_id: str
    """Names this incarnation; every later call carries it."""
    heartbeat_seconds: float
    """Send a heartbeat this often; after four missed ones the member's leases are reassigned."""


class Heartbeat(Struct, frozen=True, kw_only=True):
    """``POST /v1/members/heartbeat``. Totals count since the member registered."""

    member_id: str
    weight_version: int
    """Version the server holds; -1 before the first weights."""
    healthy: bool
    """The vLLM server answers. An unhealthy member is not published to and its leases are reassigned."""
    busy_seconds: float
    generated_tokens: int
    held_leases: list[str] | None = None
    """Leases this actor works on, up to the acknowledged push. Given, older leases of its own that are not among
    them are reassigned: their answer never arrived. None says nothing."""
    generated_leases: list[str] = []
    """Those of ``held_leases`` whose completions are sampled: they wait for the verifier, the teacher or the push."""
    teacher_problem: str = ""
    """Why the member's groups wait for the teacher of ``recipe.distillation``; empty while they do not."""
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


MASKED = -1
"""Version of a span whose tokens are not trained on: the policy did not choose them, or their log-probability is of
no use. It stands in its place, as 0."""


class VersionSpan(Struct, frozen=True, array_like=True):
    """Tokens from ``start`` to the next span's start were sampled by ``version``, or are :data:`MASKED`."""

    version: int
    start: int


class Partial(Struct, frozen=True, kw_only=True):
    """A completion as far as it is sampled: its tokens from ``start`` on."""

    start: int
    """Number of tokens before these, which the receiver has. What it has from here on is replaced."""
    token_ids: bytes
    logprobs: bytes
    versions: list[VersionSpan]
    """Counted from the first of these tokens. Each the version that sampled them, or an older one where it is not known."""
    finish_reason: Literal["stop", "length"] | None = None
    """None while it is not complete."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


class PartialGroup(Struct, frozen=True, kw_only=True):
    """The completions of a lease as far as they are sampled."""

    lease_id: str
    prompt: PromptRef
    slot: int
    temperature: float
    prompt_token_ids: bytes
    completions: list[Partial]

    @property
    def split(self) -> Split:
        return self.prompt.split


class Lease(Struct, frozen=True, kw_only=True):
    lease_id: str
    prompt: PromptRef
    slot: int
    """Training: the slot. Evaluation: position in the evaluation set."""
    prompt_id: str
    """The prompt's own id in the coordinator's data: the actor's must have the same one there."""
    completions: int
    max_tokens: int
    temperature: float
    remaining_seconds: float
    """Deliver within this time, or the group is someone else's."""
    policy_version: int
    """Evaluation: the version being measured. Training: the version the lease was given at."""
    lost_version: int = -1
    """Up to it, one version may name two sets of weights, since the trainer returned to a checkpoint: an evaluation does not
    continue tokens of such a version that were sampled for an earlier lease."""
    partial: PartialGroup | None = None
    """Where an earlier lease of the slot ended: continue from there, or start again."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class Leases(Struct, frozen=True, kw_only=True):
    leases: list[Lease]
    stop: bool = False
    """The run is over; the actor may leave."""


class Completion(Struct, frozen=True, kw_only=True):
    token_ids: bytes
    logprobs: bytes
    """Of the sampled tokens, under the distribution they were sampled from."""
    teacher_logprobs: bytes = b""
    """Of the same tokens under the teacher of ``recipe.distillation``, 0 where a token is masked; empty without one, and of
    evaluations."""
    versions: list[VersionSpan]
    finish_reason: Literal["stop", "length"]

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


class Group(Struct, frozen=True, kw_only=True):
    lease_id: str
    prompt: PromptRef
    slot: int
    prompt_id: str
    prompt_token_ids: bytes
    completions: list[Completion]
    verdicts: Verdicts
    generation_seconds: float
    drafted_tokens: list[int] | None = None
    """Tokens that the server verified instead of sampling one by one, by position in their draft; None without speculative decoding."""
    accepted_tokens: list[int] | None = None
    """Those of them that the policy sampled too."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class Push(Struct, frozen=True, kw_only=True):
    """``POST /v1/groups``. Idempotent: pushing a group twice counts once."""

    member_id: str
    groups: list[Group]


class PushResult(enum.StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Accepted before; nothing changed."""
    LATE = "late"
    """The lease had expired and the work was reassigned; dropped and counted."""
    STALE = "stale"
    """A token older than recipe.offPolicy allows at its step; dropped and counted, the slot is issued again."""
    INVALID = "invalid"
    """Does not match the lease (count, lengths), or has a number that is none (log-probabilities, verdicts); dropped, counted, issued again: at
    once the first time, then after ever longer waits."""


class PushReply(Struct, frozen=True, kw_only=True):
    results: list[PushResult]
    reasons: list[str | None]


class Partials(Struct, frozen=True, kw_only=True):
    """``POST /v1/partials``: what was sampled of long completions since the last report, for the slots' next leases.

    The coordinator keeps it in memory, within bounds, while the slots are open.
    """

    member_id: str
    groups: list[PartialGroup]


class PartialsReply(Struct, frozen=True, kw_only=True):
    missing: list[str]
    """Leases of which the tokens before the reported ones are not known here: report them from the first token."""
    full: list[str] = []
    """Leases for whose tokens there is no room."""


class ReleaseCause(enum.StrEnum):
    """What a release says about the prompts of its leases."""

    UNSERVED = "unserved"
    """Nothing: the member could not continue."""
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
