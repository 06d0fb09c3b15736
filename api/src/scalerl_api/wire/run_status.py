"""Coordinator → any client with the token: the status of the run, with its curve."""

from __future__ import annotations

import enum

from scalerl_api.exports import Exports
from scalerl_api.mismatch import ALL
from scalerl_api.wire.base import Member, Struct, Uploads
from scalerl_api.wire.prompts import HELD_OUT_SET, Split


class PassAt(Struct, frozen=True, array_like=True):
    """pass@k: an estimate of the probability that at least one of k completions passes (scores 1), with its 90 % interval."""

    k: int
    mean: float
    low: float
    high: float


class LabelMean(Struct, frozen=True, array_like=True):
    """Mean reward and pass@k of the prompts of an evaluation that have one value of a label."""

    label: str
    value: str
    reward: float
    prompts: int
    pass_at: list[PassAt] = []
    """pass@k for the same k as the point."""


class EvaluationPoint(Struct, frozen=True, kw_only=True):
    """One evaluation: a point of the curve."""

    version: int
    work_tokens: int
    """Completion tokens of all steps before ``version`` (the compute axis: useful work, not wall time)."""
    reward: float
    """Mean score, in [0, 1]: over prompts of the mean over each prompt's completions."""
    standard_error: float
    """Standard error of ``reward`` as a mean over prompts."""
    samples: int
    prompts: int
    set_digest: str
    """Digest of everything besides the weights that determines the score: prompts, verifier and sampling."""
    mixed_versions: bool
    """Whether other versions sampled some tokens; sets other than the forecast's tolerate slightly newer versions."""
    truncated_fraction: float
    """Fraction of the completions truncated at their maximum length."""
    mean_tokens: float
    """Mean length of a completion, in tokens."""
    wall_seconds: float
    """Time since the first lease, in seconds."""
    device_seconds: float
    """Devices × seconds since the first lease."""
    given_up_prompts: int = 0
    """Prompts, included in ``prompts``, that could not be generated (too long for the context, or repeated failures); their
    score counts as 0."""
    task: int = 0
    """Index of the evaluation set, with ``split``: as in :class:`~.prompts.PromptRef`."""
    split: Split = Split.HELD_OUT
    parts: dict[str, float] = {}
    """Mean of each part of the verdicts, over prompts like ``reward``."""
    pass_at: list[PassAt] = []
    """pass@k for the powers of two above 1 up to the samples per prompt, and for all samples; ascending."""
    set_name: str = HELD_OUT_SET
    by_label: list[LabelMean] = []
    """Reward by label of the prompts, in the order of :func:`scalerl_api.curve.label_order`."""


class Counts(Struct, frozen=True, kw_only=True):
    """Training rollouts by outcome. Always ``acknowledged = trained + filtered + queued + skipped``; the other counts are of
    rollouts that were not accepted."""

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
    """Evaluation rollouts rejected as invalid; no other count includes them."""
    given_up: int = 0
    """Rollouts of slots that could not be served; they were never acknowledged. All slots of trained steps: ``trained +
    filtered + skipped + given_up``."""
    too_long: int = 0
    """Part of ``given_up``: the prompt leaves no room for a completion in the context."""
    ungraded: int = 0
    """Part of ``acknowledged``: rollouts without a verdict, so without a gradient."""
    masked_tokens: int = 0
    """Tokens of acknowledged rollouts that are masked individually, because their log-probability is unusable or a forced
    interruption inserted them."""
    skipped: int = 0
    """Rollouts of steps whose update was not applied, because a loss or gradient was not finite or ratios exploded."""
    held_out_given_up: int = 0
    """Evaluation rollouts that could not be generated; their score counts as 0."""
    timed_out_leases: int = 0
    """Part of ``expired_leases``: the generator was healthy, but made no progress for ``RunSpec.lease_seconds``."""
    refilled: int = 0
    """Part of ``filtered``: the slots were reissued with another prompt, so these slots count more than once."""


class Phase(enum.StrEnum):
    """Phase of a run, as the coordinator reports it."""

    WAITING = "waiting"
    """No generator holds weights yet."""
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    """The trainer has written its last checkpoint and exited."""


class Mismatch(Struct, frozen=True, kw_only=True):
    """KL estimate (k3, nats per token) between trainer and generators."""

    source: str
    """Measurement: one of :data:`scalerl_api.mismatch.SOURCES`."""
    positions: str
    """Range of token positions: one of :data:`scalerl_api.mismatch.POSITIONS`, or ``all``."""
    kl: float
    """Mean over all measured tokens of the run."""
    recent_kl: float
    """Exponentially weighted mean over the last measurements: each has half the weight of the next one."""
    tokens: int


class Tracker(Struct, frozen=True, kw_only=True):
    """State of an experiment tracker."""

    name: str
    """Its field in ``spec.trackers``."""
    step: int = -1
    """Newest step sent to it; -1: none since the start of the coordinator."""
    failures: int = 0
    """Failed attempts since the start of the coordinator."""
    problem: str = ""
    """Why the last attempt failed; empty after a success."""


class Status(Struct, frozen=True, kw_only=True):
    """``GET /v1/status``: state of the run."""

    phase: Phase
    waiting_for: str
    """Human-readable description of what the run waits for; empty if it waits for nothing."""
    step: int
    published_version: int
    """Newest published weight version; -1 before the first publish."""
    stop_reason: str
    """Why the run ends or has ended: the exhausted field of the budget (``maxSteps``), or the reason of a stop."""
    counts: Counts
    members: list[Member]
    points: list[EvaluationPoint]
    """The run's curve: the points of the forecast's evaluation set."""
    last_step_stats: dict[str, float]
    """Scalars of the last step, as in ``metrics.jsonl``."""
    wall_seconds: float
    """Time of mid-training and since the first lease, over all incarnations of the run, in seconds."""
    device_seconds: float
    """Devices × seconds over the same time."""
    tokens_generated: int
    """Completion tokens delivered by generators."""
    tokens_trained: int
    """Completion tokens of trained steps."""
    generator_busy_fraction: float
    trainer_busy_fraction: float
    max_staleness_steps: int
    mean_staleness_steps: float
    mismatch: list[Mismatch] = []
    """Measured mismatches of trainer and generators; without those that were never measured."""
    grading_errors: int = 0
    """Accepted rollouts, including those of evaluations, whose verifier failed, so that they have no score."""
    checkpoint_failures: int = 0
    """Checkpoints that could not be written, over all incarnations of the trainer; reported with each step."""
    skipped_steps: int = 0
    """Steps whose update was not applied, over all incarnations of the trainer."""
    last_skip_reason: str = ""
    """Why the newest skipped step was skipped."""
    checkpoint_version: int = -1
    """Newest checkpoint from which the trainer can continue; -1: none."""
    waiting_seconds: float = 0.0
    """Time before the first lease, over all incarnations of the coordinator, without that of mid-training, in seconds."""
    checkpoint_problem: str = ""
    """Why the last attempt to write a checkpoint failed; empty after a success."""
    uploads: Uploads | None = None
    """Copies of the checkpoints; None without ``checkpoint.to``, and until the trainer has reported."""
    unsaved_version: int = -1
    """Last version of a run that has ended training and could not write its last checkpoint: the trainer keeps the weights in
    memory and retries. -1 otherwise."""
    trainer_registered: bool = True
    """Whether a trainer has ever registered. A run that ends before has nothing to save, and does not wait for its trainer."""
    journal_error: str = ""
    """Disk error while the journal cannot be written; empty otherwise."""
    exports: Exports | None = None
    """Exported models; None: none yet."""
    trackers: list[Tracker] = []
    """Experiment trackers of ``spec.trackers``."""
    teacher_problem: str = ""
    """The first member whose groups wait for the teacher of ``recipe.distillation``, with the reason; empty if none waits."""
    reward_problem: str = ""
    """The same for a reward service of ``verifier.http``."""
    environment_problem: str = ""
    """The same for an environment, of which most episodes fail."""
    supervised_steps: int = 0
    """Steps of mid-training applied to the weights."""
    supervised_tokens: int = 0
    compute_tokens: float = 0.0
    """Compute limited by ``budget.maxComputeTokens``, in tokens of supervised training: see :mod:`scalerl_api.compute`."""
    forked_step: int = -1
    """Step at which the run was forked from another; -1 otherwise. Steps, tokens, compute and the curve count from that run's
    first step."""
    inherited_seconds: float = 0.0
    """The part of ``wall_seconds`` that the other run took."""
    inherited_device_seconds: float = 0.0
    """The part of ``device_seconds`` that the other run used."""
    learning_problem: str = ""
    """Why the last steps taught the policy nothing, with a reply, its extracted answer and the reference; empty if they did.
    It stays the same while the problem lasts."""
    logprob_problem: str = ""
    """That some of the latest tokens have no finite log-probability; empty if nearly all have."""
    health_problem: str = ""
    """What is wrong first (:mod:`scalerl_api.health`); empty if nothing is known to be. It stays the same while the problem lasts."""
    set_points: dict[str, list[EvaluationPoint]] = {}
    """Curves of the other evaluation sets, by name of the set."""

    @property
    def own_seconds(self) -> float:
        """``wall_seconds`` without those of the run from which this one was forked: what limits of time count."""
        return max(0.0, self.wall_seconds - self.inherited_seconds)

    @property
    def own_device_seconds(self) -> float:
        """``device_seconds`` without those of the run from which this one was forked: what limits of device-hours count."""
        return max(0.0, self.device_seconds - self.inherited_device_seconds)

    def mismatch_kl(self, source: str, positions: str = ALL) -> float | None:
        """Mean KL over the run, in nats per token; None if it was never measured."""
        found = (m.kl for m in self.mismatch if (m.source, m.positions) == (source, positions))
        return next(found, None)
