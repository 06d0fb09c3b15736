"""Anyone with the token → coordinator: how the run stands, and ending it."""

from __future__ import annotations

import enum

from scalerl_api.exports import Exports
from scalerl_api.mismatch import ALL
from scalerl_api.wire.base import Member, Struct
from scalerl_api.wire.prompts import HELD_OUT_SET, Split

INTERRUPTED = "interrupted"
"""The reason of a stop by somebody who waits for the end: the last version is saved, and not measured."""

FORECAST = "forecast"
"""The reason of a stop by the autoscaler; what the summary says of such a run."""

BROKEN = "broken"
"""The same, of a run that the autoscaler holds because its curve or its numbers went bad."""


class Stop(Struct, frozen=True, kw_only=True):
    """``POST /v1/stop``: end the run in order. The trainer finishes its step, its last version is measured (unless the
    reason is :data:`INTERRUPTED`), it checkpoints and leaves.

    A stop is journaled and outlives restarts; whoever resumes a stopped run takes it back first.
    """

    reason: str
    """Empty: take an earlier stop back."""


class DecisionLine(Struct, frozen=True, kw_only=True):
    """``POST /v1/decisions``: one line of ``decisions.jsonl``, with its newline. On disk when it is acknowledged.

    The same line at the same offset again is acknowledged and not written twice; another is refused with 409.
    """

    offset: int
    """Bytes of the log before it."""
    line: bytes


class DecisionLines(Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/decisions?offset=N``: a page of the whole lines, which may end within a line."""

    content: bytes
    """From byte ``offset`` on."""
    size: int = -1
    """Bytes of all whole lines; -1 from a coordinator that sends them all at once."""


class PassAt(Struct, frozen=True, array_like=True):
    """An estimate of the chance that at least one of k completions passes (scores 1), with its 90 % interval."""

    k: int
    mean: float
    low: float
    high: float


class LabelMean(Struct, frozen=True, array_like=True):
    """Mean reward of the prompts of an evaluation with one value of a label, and their pass@k."""

    label: str
    value: str
    reward: float
    prompts: int
    pass_at: list[PassAt] = []
    """For the k of the point's; empty in a journal of an earlier release."""


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
    given_up_prompts: int = 0
    """Of ``prompts``: could not be generated (too long for the context, or failed again and again), and count 0."""
    task: int = 0
    """With ``split``, the evaluation set: as in :class:`~.prompts.PromptRef`."""
    split: Split = Split.HELD_OUT
    parts: dict[str, float] = {}
    """Mean of each part of the verdicts, over prompts as ``reward``."""
    pass_at: list[PassAt] = []
    """pass@k for the powers of two above 1 up to the samples of a prompt, and for all of them; ascending."""
    set_name: str = HELD_OUT_SET
    """Of the evaluation set."""
    by_label: list[LabelMean] = []
    """The reward by the prompts' labels, in the order of :func:`scalerl_api.curve.label_order`."""


class Counts(Struct, frozen=True, kw_only=True):
    """Training rollouts by fate. ``acknowledged = trained + filtered + queued + skipped`` always; the rest was never
    accepted."""

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
    given_up: int = 0
    """Of slots that could not be served, never acknowledged. All slots of trained steps: ``trained + filtered +
    skipped + given_up``."""
    too_long: int = 0
    """Of ``given_up``: the prompt leaves no room for a completion in the context."""
    ungraded: int = 0
    """Of ``acknowledged``: without a verdict, so without a gradient."""
    masked_tokens: int = 0
    """Tokens of acknowledged rollouts that have no gradient of their own accord: their log-probability is of no use, or
    a forced interruption wrote them."""
    skipped: int = 0
    """Of steps that were not applied: a loss or gradient that was not finite, or ratios that exploded."""
    held_out_given_up: int = 0
    """Evaluation rollouts that could not be generated and count 0 at their point."""
    timed_out_leases: int = 0
    """Of ``expired_leases``: their holder was well, and generated nothing for ``leaseSeconds``."""
    refilled: int = 0
    """Of ``filtered``: their slots were issued again with another prompt, and so count more than once."""


class Phase(enum.StrEnum):
    WAITING = "waiting"
    """No generator holds weights yet."""
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    """The trainer has written its last checkpoint and left."""


class Mismatch(Struct, frozen=True, kw_only=True):
    """A KL estimate (k3, nats a token) of trainer against generators; names of :mod:`scalerl_api.mismatch`."""

    source: str
    positions: str
    kl: float
    """Mean over all tokens of the run that were measured."""
    recent_kl: float
    """Mean over the last measurements, each counting half as much as the one after it."""
    tokens: int


class Tracker(Struct, frozen=True, kw_only=True):
    """How an experiment tracker stands."""

    name: str
    """Its field in ``spec.trackers``."""
    step: int = -1
    """Newest step that it was given; -1: none since the coordinator began."""
    failures: int = 0
    """Attempts that failed since the coordinator began."""
    problem: str = ""
    """Why the last one did; empty once one succeeds."""


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
    """The run's curve: of the evaluation set that the forecast follows."""
    last_step_stats: dict[str, float]
    wall_seconds: float
    """Since the first lease, over all incarnations of the run, and of mid-training."""
    device_seconds: float
    tokens_generated: int
    tokens_trained: int
    generator_busy_fraction: float
    trainer_busy_fraction: float
    max_staleness_steps: int
    mean_staleness_steps: float
    mismatch: list[Mismatch] = []
    """What was measured between trainer and generators; a measurement that was never made is not there."""
    grading_errors: int = 0
    """Accepted rollouts, evaluation's too, whose verifier failed: their score says nothing about them."""
    checkpoint_failures: int = 0
    """Checkpoints that could not be written, over all incarnations of the trainer; reported with each step."""
    skipped_steps: int = 0
    """Steps that were not applied, over all incarnations of the trainer."""
    last_skip_reason: str = ""
    """Why the newest of them was not."""
    checkpoint_version: int = -1
    """Newest checkpoint that the trainer can continue from; -1: none."""
    journal_error: str = ""
    """The disk's error while the journal cannot be written; empty while it can."""
    exports: Exports | None = None
    """Models that others load; none: none yet."""
    trackers: list[Tracker] = []
    """Those of ``spec.trackers``."""
    teacher_problem: str = ""
    """The first member whose groups wait for the teacher of ``recipe.distillation``, and why; empty while none does."""
    supervised_steps: int = 0
    """Steps of mid-training that the weights have."""
    supervised_tokens: int = 0
    """Solution tokens of these steps."""
    compute_tokens: float = 0.0
    """What ``budget.maxComputeTokens`` limits: see :mod:`scalerl_api.compute`."""
    set_points: dict[str, list[EvaluationPoint]] = {}
    """The curves of the other evaluation sets, by name."""

    def mismatch_kl(self, source: str, positions: str = ALL) -> float | None:
        """Mean over the run; None when it was never measured."""
        found = (m.kl for m in self.mismatch if (m.source, m.positions) == (source, positions))
        return next(found, None)
