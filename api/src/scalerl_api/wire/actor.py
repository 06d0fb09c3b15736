"""Actor → coordinator: membership, leases, groups."""

from __future__ import annotations

import enum
from typing import Literal

from scalerl_api.wire.base import Struct
from scalerl_api.wire.prompts import PromptRef, Split
from scalerl_api.wire.verdicts import Verdicts

# --- membership -----------------------------------------------------------------------------------


class Register(Struct, frozen=True, kw_only=True):
    """``POST /v1/members``: registers a generator whose server responds. It leases nothing before it holds weights."""

    name: str
    """Stable name of the replica, e.g. ``generator-0``; a newer registration replaces an older one."""
    control_url: str
    """URL of this actor's weight-update endpoints, for the trainer."""
    task_digest: str
    """Digest of the actor's training split; the coordinator rejects any digest but its own."""
    grading: list[str] = []
    """Digests of the code that scores each task and evaluation set, empty for a verifier with a name; rejected likewise."""
    held_leases: list[str] = []
    """Leases that an actor which registers again still works on: it keeps them. Other leases of its name are reassigned."""


class Registered(Struct, frozen=True, kw_only=True):
    """Response to a :class:`Register`."""

    member_id: str
    """Identifier of this registration; every later request has it."""
    heartbeat_seconds: float
    """Interval of heartbeats; after four missed heartbeats the member's leases are reassigned."""


class Heartbeat(Struct, frozen=True, kw_only=True):
    """``POST /v1/members/heartbeat``. Totals are since the registration."""

    member_id: str
    weight_version: int
    """Version that the server holds; -1 before the first weights."""
    healthy: bool
    """Whether the vLLM server responds. An unhealthy member receives no weights and its leases are reassigned."""
    busy_seconds: float
    """Seconds in which the server generated."""
    generated_tokens: int
    """Completion tokens sampled."""
    held_leases: list[str] | None = None
    """Leases that this actor works on, until their push is acknowledged. The coordinator reassigns older leases of this
    actor that are not listed, because the response with them never arrived. None: not reported."""
    generated_leases: list[str] = []
    """Leases of ``held_leases`` whose completions are sampled: they wait for the verifier, the teacher or the push."""
    teacher_problem: str = ""
    """Why the member's groups wait for the teacher of ``recipe.distillation``; empty if none waits."""
    reward_problem: str = ""
    """Why they wait for a reward service of ``verifier.http`` or a server of ``environment.url``; empty if none waits."""
    environment_problem: str = ""
    """Why they wait for an environment, of which most episodes fail; empty if none waits."""
    progress: dict[str, int] = {}
    """Tokens generated so far, by id of a held lease: its own and, before its first token, those of the leases that it waited
    for. An increase restarts the time of the lease."""


# --- leases ---------------------------------------------------------------------------------------


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/lease``: long poll for work. After ``wait_seconds`` without work, the response is an empty list."""

    member_id: str
    weight_version: int
    max_groups: int
    """Maximum number of leases in the response."""
    wait_seconds: float
    """Maximum duration of the long poll, in seconds."""


MASKED = -1
"""Version of a span whose tokens are not trained on, because the policy did not sample them or their log-probability is
unusable. The log-probability of such a token is recorded as 0."""


class VersionSpan(Struct, frozen=True, array_like=True):
    """A span of tokens from ``start`` to the start of the next span."""

    version: int
    """Version that sampled the tokens, or :data:`MASKED`."""
    start: int


class MessageSpan(Struct, frozen=True, array_like=True):
    """The tokens from ``start`` to ``end`` (exclusive), which an environment wrote after a reply of the model."""

    start: int
    end: int
    reward: float = 0.0
    """The part of the episode's score that the reply before the message earned, in [-1, 1]."""


class Partial(Struct, frozen=True, kw_only=True):
    """The sampled tokens of an incomplete or complete completion, from position ``start`` on."""

    start: int
    """Number of earlier tokens, which the receiver has. These tokens replace any that it has from this position on."""
    token_ids: bytes
    """Little-endian int32."""
    logprobs: bytes
    """Log-probabilities of these tokens under the distribution they were sampled from: little-endian float32."""
    versions: list[VersionSpan]
    """Spans of these tokens, with positions relative to ``start``. The version is the one that sampled the tokens, or an
    older one if that is unknown."""
    finish_reason: Literal["stop", "length"] | None = None
    """None while the completion is incomplete."""
    turns: list[MessageSpan] = []
    """The environment's messages of an episode, from its first token on, also those before ``start``."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


class PartialGroup(Struct, frozen=True, kw_only=True):
    """The sampled tokens of the completions of a lease."""

    lease_id: str
    prompt: PromptRef
    slot: int
    temperature: float
    prompt_token_ids: bytes
    """Little-endian int32."""
    completions: list[Partial]
    """The completions, in the order of the group."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class Lease(Struct, frozen=True, kw_only=True):
    """The assignment of one slot or evaluation prompt to a generator."""

    lease_id: str
    prompt: PromptRef
    slot: int
    """Training: the slot. Evaluation: position in the evaluation set."""
    prompt_id: str
    """Id of the prompt in the coordinator's data. The prompt must have the same id in the actor's data."""
    completions: int
    max_tokens: int
    temperature: float
    remaining_seconds: float
    """Time without progress after which the slot is reassigned."""
    policy_version: int
    """Evaluation: the evaluated version. Training: the version at the time of the lease."""
    lost_version: int = -1
    """Versions up to this one may refer to two sets of weights, because the trainer returned to a checkpoint. An evaluation
    does not continue tokens of such a version that were sampled for an earlier lease. -1: none."""
    partial: PartialGroup | None = None
    """Tokens sampled under an earlier lease of the slot; the actor continues from them, or starts again."""
    record: bool = False
    """Whether the group is to carry its texts (:attr:`Group.text`), for the record of rollouts."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class Leases(Struct, frozen=True, kw_only=True):
    """Response to a :class:`LeaseRequest`."""

    leases: list[Lease]
    stop: bool = False
    """The run has ended; the actor may exit."""


MAX_ROUTED_BYTES = 2048
"""Maximum size of the experts of a token in :class:`RoutedExperts`, in bytes: layers × chosen experts, twice with more than 256 experts."""


class RoutedExperts(Struct, frozen=True, kw_only=True):
    """The experts that the generator's routers chose for tokens of prompt and completion (``trainer.routerReplay``)."""

    layers: int
    """Number of the model's layers, those without experts included, whose values mean nothing."""
    chosen: int
    """Number of experts that a layer has for a token."""
    spans: list[tuple[int, int]]
    """Positions in prompt and completion with a record, as ``(start, end)``, ascending. The last token of a completion is not among
    them: the generator computes nothing with it."""
    experts: bytes
    """Of these positions, ``[positions, layers, chosen]``: uint8, or little-endian uint16 if that is the size."""

    @property
    def positions(self) -> int:
        return sum(end - start for start, end in self.spans)


class Completion(Struct, frozen=True, kw_only=True):
    """One sampled completion."""

    token_ids: bytes
    """Little-endian int32."""
    logprobs: bytes
    """Log-probabilities of the sampled tokens under the distribution they were sampled from: little-endian float32."""
    teacher_logprobs: bytes = b""
    """Log-probabilities of the same tokens under the teacher of ``recipe.distillation``: little-endian float32, 0 for masked
    tokens. Empty without a teacher, and in evaluations."""
    versions: list[VersionSpan]
    """Weight versions by span of tokens."""
    finish_reason: Literal["stop", "length"]
    """``stop``: an end token. ``length``: truncated at the maximum length, of an episode also at that of a turn."""
    turns: list[MessageSpan] = []
    """The environment's messages of an episode, which are masked; empty for one of a single turn."""
    routed: RoutedExperts | None = None
    """None without ``trainer.routerReplay``, and in evaluations."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


class Sample(Struct, frozen=True, kw_only=True):
    """A completion of a group whose scores are all equal, to explain why nothing is learned from it. Texts are excerpts."""

    prompt_id: str
    reply: str
    answer: str
    """The part of the reply that the verifier graded."""
    reference: str
    score: float


MAX_TEXT_BYTES = 16
"""Maximum size of a text in :class:`GroupText`, in bytes of UTF-8 per token; the rest is cut."""


class GroupText(Struct, frozen=True, kw_only=True):
    """The texts of a group, for the record of rollouts. Lone surrogates are escaped."""

    prompt: str
    """What the model reads: the rendered prompt, with the tokens of its chat template."""
    reference: str
    labels: dict[str, str]
    completions: list[str]
    """The text of each completion, as the verifier graded it."""
    token_characters: list[bytes] = []
    """The number of characters that each token adds to the text of its completion, little-endian uint16; empty of a completion
    whose text is not that of its tokens, such as one that was cut."""


class Group(Struct, frozen=True, kw_only=True):
    """All completions of a lease, with their verdicts."""

    lease_id: str
    prompt: PromptRef
    slot: int
    prompt_id: str
    prompt_token_ids: bytes
    """Little-endian int32."""
    completions: list[Completion]
    verdicts: Verdicts
    generation_seconds: float
    """Time from the first request to the end of the last completion, in seconds."""
    drafted_tokens: list[int] | None = None
    """Drafted tokens that the server verified instead of sampling one by one, by position in their draft; None without
    speculative decoding."""
    accepted_tokens: list[int] | None = None
    """Drafted tokens that the policy accepted, by position in their draft."""
    unusable_tokens: int = 0
    """Tokens whose log-probability at the server is not a number or minus infinity. They are masked."""
    sample: Sample | None = None
    """One of the completions, if they have the same score and are of a training prompt."""
    text: GroupText | None = None
    """The texts, if the lease asks for them."""
    looped: int | None = None
    """Number of completions that end in a loop; None in evaluations."""
    episode_seconds: tuple[float, float] | None = None
    """Seconds of the episodes, summed over them: in requests to the model's server, and in steps of the environment; None without
    one."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class Push(Struct, frozen=True, kw_only=True):
    """``POST /v1/groups``: completed groups. Idempotent: a group that is pushed twice counts once."""

    member_id: str
    groups: list[Group]


class PushResult(enum.StrEnum):
    """The coordinator's decision on a pushed group."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The group was accepted before; nothing changed."""
    LATE = "late"
    """The lease had expired and the slot was reassigned; the group is dropped and counted."""
    STALE = "stale"
    """A token is older than recipe.offPolicy allows at its step; the group is dropped and counted, and the slot is reissued."""
    INVALID = "invalid"
    """The group does not match its lease (count, lengths), or has a log-probability or verdict that is not finite. It is
    dropped and counted, and the slot is reissued: immediately the first time, then with back-off."""


class PushReply(Struct, frozen=True, kw_only=True):
    """Response to a :class:`Push`."""

    results: list[PushResult]
    """Result of each group, in the order of the push."""
    reasons: list[str | None]
    """Why each group was dropped; None for an accepted group."""


class Partials(Struct, frozen=True, kw_only=True):
    """``POST /v1/partials``: tokens of long completions sampled since the last report, for the slots' next leases.

    The coordinator keeps them in memory, up to a limit, while the slots are open.
    """

    member_id: str
    groups: list[PartialGroup]


class PartialsReply(Struct, frozen=True, kw_only=True):
    """Response to :class:`Partials`."""

    missing: list[str]
    """Leases for which the coordinator lacks the tokens before the reported ones: report them from the first token."""
    full: list[str] = []
    """Leases whose tokens exceed the memory limit."""


class ReleaseCause(enum.StrEnum):
    """Whether the prompts of the released leases caused the release."""

    UNSERVED = "unserved"
    """No: the member could not continue."""
    FAILED = "failed"
    """Possibly: the member is healthy, but could not generate or grade this group."""
    TOO_LONG = "too_long"
    """Yes: the prompt leaves no room for a completion in the context, so no member can serve it."""


class Release(Struct, frozen=True, kw_only=True):
    """``POST /v1/release``: leases that an actor cannot serve; their slots are reissued before others.

    A slot is given up if it failed with two members or too often, and immediately if its prompt is too long.
    """

    member_id: str
    lease_ids: list[str]
    reason: str
    cause: ReleaseCause = ReleaseCause.UNSERVED
