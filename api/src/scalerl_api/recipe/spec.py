"""``spec.recipe``: how rollouts become a gradient.

Every field may be omitted. It then has the value of ``preset`` or, if the preset does not set it, its default, which is
ScaleRL's (arXiv 2510.13786 [P]). A parsed :class:`RecipeSpec` has all values; :func:`~scalerl_api.recipe.resolve` returns the
origin of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from scalerl_api.fields import (
    DecayDecimal,
    LearningRateDecimal,
    Matches,
    Model,
    NonNegativeDecimal,
    PositiveDecimal,
    PositiveUnitDecimal,
    Rule,
    TemperatureDecimal,
    WeightDecayDecimal,
)
from scalerl_api.recipe.alternatives import OneOf
from scalerl_api.recipe.curriculum import CurriculumSpec, NoPositiveResamplingSpec
from scalerl_api.recipe.loss import CispoLoss, CorrectionSpec, LossSpec, NoCorrection, OffPolicyMaskSpec
from scalerl_api.recipe.presets import INTERRUPTION_PHRASE, completed

# --- KL penalty --------------------------------------------------------------------------------

KlEstimator = Literal["k1", "k2", "k3"]


class NoKlPenalty(Model):
    """No penalty, and no reference model in memory."""


class KlPenalty(Model):
    """The loss grows by coefficient · k of each token, under the recipe's aggregation; with d = log π − log π_ref, k1 is d,
    k2 is d² / 2, and k3 is exp(−d) − 1 + d. π_ref is the run's starting model, after the warm start if there is one."""

    coefficient: PositiveDecimal
    """β. The GRPO paper reportedly uses 0.04 [S]."""
    estimator: KlEstimator = "k3"
    """Estimator of KL(π ‖ π_ref). k3 is never negative and used by GRPO [P]; the gradients of k1 (here d ∇log π)
    and k2 are unbiased."""


class KlSpec(OneOf):
    """A penalty on the divergence from the initial model: one of these."""

    none: NoKlPenalty | None = None
    """No penalty, as in ScaleRL and DAPO [P]."""
    penalty: KlPenalty | None = None
    """Added to the loss of every token. Requires the memory of the initial model and one forward pass per step."""


# --- distillation ------------------------------------------------------------------------------


class TeacherSpec(Model):
    """A vLLM server that the run does not start, with the student's tokenizer. If it requires an API key, provide it as the
    variable ``TEACHER_API_KEY`` in ``generator.podTemplate.env``, from a Secret."""

    url: Annotated[
        str,
        Field(max_length=1024),
        AfterValidator(
            Matches(
                r"^https?://[A-Za-z0-9._:\[\]-]+(/[^@?#\s]*)?$",
                "must be http://host:port or https://host/…, without a password: that is the variable TEACHER_API_KEY",
            )
        ),
    ]
    """Address of the server for generators, without ``/v1``: ``http://teacher.team.svc:8000``."""
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the teacher on its server; default: the first model that the server lists."""


class DistillationSpec(Model):
    """On-policy distillation: each token of a completion gets the advantage coefficient · (log π_teacher − log π_gen), minus
    an estimate of the reverse KL, KL(π_gen ‖ π_teacher) (Thinking Machines [S]; GKD, arXiv 2306.13649 [P])."""

    teacher: TeacherSpec
    """The server that computes the log-probabilities of the student's tokens."""
    coefficient: PositiveDecimal = "1"
    """Weight of the teacher's term in the advantages; Thinking Machines use 1 [S]."""
    rewards: Literal["Ignored", "Added"] = "Ignored"
    """Ignored: the advantages come from the teacher alone. Added: the advantages of the rewards are added. The curve shows
    scores in both cases."""


# --- off-policy --------------------------------------------------------------------------------


class PipelineSpec(Model):
    """PipelineRL-k: weights are published after every update, and in-flight generations continue with them."""

    max_staleness_steps: Annotated[int, Field(ge=0, le=64)] = 8
    """k: maximum number of updates between sampling and training of a token [P]; 0 is synchronous."""


class PpoOffPolicySpec(Model):
    """PPO-off-policy-k: k batches are generated with the same weights, k updates follow, and the weights are
    published."""

    steps_per_batch: Annotated[int, Field(ge=1, le=64)] = 8
    """k: updates between two publishes; 1 is synchronous."""


class OffPolicySpec(OneOf):
    """How far generation may run ahead of training: one of these."""

    pipeline: PipelineSpec | None = None
    """PipelineRL-k, as in ScaleRL."""
    ppo: PpoOffPolicySpec | None = None
    """PPO-off-policy-k: generation and training alternate."""


# --- length ------------------------------------------------------------------------------------


class NoLengthControl(Model):
    """Completions end on their own or at maxCompletionTokens."""


class InterruptionSpec(Model):
    """Ends reasoning with a phrase whose tokens are masked in the loss (ScaleRL [P]). Only unfinished reasoning is
    interrupted; no effect if the tokenizer cannot encode the end of reasoning."""

    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Last possible position of the interruption; default: 6/7 of maxCompletionTokens, the paper's 12,288 of 14,336. It is
    sampled from there and the 1/7 of maxCompletionTokens before, in the paper 10,240 to 12,288."""
    phrase: Annotated[str, Field(min_length=1, max_length=4096)] = INTERRUPTION_PHRASE
    """The inserted phrase; it must end the reasoning."""

    def range(self, max_completion_tokens: int) -> tuple[int, int]:
        """First and last position at which reasoning may be interrupted, in tokens of the completion.

        >>> InterruptionSpec().range(14336), InterruptionSpec(max_tokens=4048).range(14336)
        ((10240, 12288), (2000, 4048))
        """
        last = self.max_tokens or max(1, max_completion_tokens * 6 // 7)
        return max(1, last - max_completion_tokens // 7), last


class LengthPenaltySpec(Model):
    """Penalizes long correct completions: clip((maxCompletionTokens − length) / buffer − 1, −1, 0), with a buffer of 1/7 of
    maxCompletionTokens, the paper's 2,048 of 14,336 (ScaleRL [P])."""


class OverlongSpec(Model):
    """Penalizes all long completions: 0 up to maxCompletionTokens − buffer, then linear to −1, with a buffer of 1/5 of
    maxCompletionTokens, the paper's 4,096 of 20,480 (DAPO [P])."""


class LengthSpec(OneOf):
    """Control of the completion length: one of these."""

    none: NoLengthControl | None = None
    """Only maxCompletionTokens."""
    interruption: InterruptionSpec | None = None
    """A phrase that ends the reasoning, as in ScaleRL."""
    penalty: LengthPenaltySpec | None = None
    """A reward penalty for long correct completions."""
    overlong: OverlongSpec | None = None
    """A reward penalty for all long completions, as in DAPO."""


# --- batch -------------------------------------------------------------------------------------


class RefillSpec(Model):
    """Refills the slot of a group dropped by the zero-variance filter with another prompt (DAPO's dynamic
    sampling): batches are full, but take longer to generate. After 10 prompts without differing rewards, the slot stays
    empty."""


# --- advantage, optimizer, recipe --------------------------------------------------------------


Credit = Literal["Episode", "Return", "Turn"]


class AdvantageSpec(Model):
    """How a reward becomes an advantage."""

    normalization: Literal["Batch", "Group", "None"] = "Batch"
    """The standard deviation that advantages are divided by: of the batch after the zero-variance filter, of the prompt's
    completions, or none."""
    baseline: Literal["GroupMean", "LeaveOneOut"] = "GroupMean"
    """The baseline of a reward: the mean over all completions of its prompt, or over the other ones (RLOO)."""
    credit: Credit = "Episode"
    """What a token of an episode of several turns gets the advantage of: the reward of the episode, or the return of its turn, over
    the returns of all turns (Return) or of the same turn (Turn) of the prompt's episodes."""
    discount: PositiveUnitDecimal = "1"
    """γ of Return and Turn: the weight of a reward that is a turn later."""

    rules = (
        Rule(
            "!has(self.discount) || double(string(self.discount)) == 1.0 || (has(self.credit) && self.credit != 'Episode')",
            "%(discount)s requires that %(credit)s is Return or Turn",
            "discount",
            lambda advantage: float(advantage.discount) == 1 or advantage.credit != "Episode",
        ),
    )


class OptimizerSpec(Model):
    """AdamW with a linear warm-up and a constant learning rate (ScaleRL's values [P])."""

    learning_rate: LearningRateDecimal = "5e-7"
    """Learning rate after the warm-up."""
    weight_decay: WeightDecayDecimal = "0.01"
    """Decoupled weight decay."""
    beta1: DecayDecimal = "0.9"
    """Decay rate of the first moment."""
    beta2: DecayDecimal = "0.999"
    """Decay rate of the second moment."""
    epsilon: PositiveUnitDecimal = "1e-15"
    """Added to the root of the second moment; small, because gradients of a mean over a large batch are small."""
    warmup_steps: Annotated[int, Field(ge=0, le=100_000_000)] = 100
    """Steps of the linear warm-up."""
    max_gradient_norm: NonNegativeDecimal = "1"
    """Gradient clipping norm; 0 disables clipping."""


Preset = Literal["scalerl", "grpo", "dapo", "gspo", "dr-grpo", "magistral", "minimax-m1", "ppo-off-policy"]
MAX_BATCH_COMPLETIONS: Final = 1_048_576
"""Maximum number of completions in one step: 32 times the largest batch of the paper."""


class RecipeSpec(Model):
    """How rollouts become a gradient. Omitted fields have the preset's values."""

    preset: Preset = "scalerl"
    """The published recipe that provides omitted fields; docs/recipe.md compares them."""
    loss: LossSpec = LossSpec(cispo=CispoLoss())
    """The policy-gradient objective."""
    correction: CorrectionSpec = CorrectionSpec(none=NoCorrection())
    """Importance weights that correct the mismatch of generator and trainer."""
    off_policy_mask: OffPolicyMaskSpec | None = None
    """Masks off-policy completions with a negative advantage; default: none."""
    kl: KlSpec = KlSpec(none=NoKlPenalty())
    """A penalty on the divergence from the initial model."""
    distillation: DistillationSpec | None = None
    """A teacher's log-probabilities as advantages, alone or in addition to the rewards; default: no teacher."""
    aggregation: Literal["PromptAverage", "SampleAverage", "TokenAverage", "Constant"] = "PromptAverage"
    """The unit of equal weight in the loss: every prompt, every completion, or every token of the batch. Constant
    divides the sum over tokens by completions times maxCompletionTokens (Dr. GRPO)."""
    advantage: AdvantageSpec = AdvantageSpec()
    """How a reward becomes an advantage."""
    zero_variance_filter: bool = True
    """Drops prompts whose completions all have the same reward, because they provide no gradient. False if ``distillation``
    ignores the rewards."""
    refill: RefillSpec | None = None
    """Refills slots of groups dropped by the zero-variance filter; default: they stay empty, as in ScaleRL."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65536)] = 48
    """Prompts per update; multiplied by ``completionsPerPrompt`` it is the batch size."""
    completions_per_prompt: Annotated[int, Field(ge=2, le=1024)] = 16
    """Completions per prompt; at least 2, because advantages are relative to the other completions of the prompt."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 14336
    """Maximum completion length; less than ``model.contextTokens``, which includes the prompt."""
    temperature: TemperatureDecimal = "1"
    """Sampling temperature in training."""
    length: LengthSpec = LengthSpec(interruption=InterruptionSpec())
    """Control of the completion length."""
    curriculum: CurriculumSpec = CurriculumSpec(no_positive_resampling=NoPositiveResamplingSpec())
    """Selection of prompts."""
    off_policy: OffPolicySpec = OffPolicySpec(pipeline=PipelineSpec())
    """How far generation may run ahead of training."""
    fp32_logits: Literal["Both", "Trainer", "Generator", "None"] = "Both"
    """Roles that compute logits in float32; in the paper, Both raises the asymptote from .52 to .61 [P]."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""

    @model_validator(mode="wrap")
    @classmethod
    def _completed(cls, given: Any, validate: Callable[[Any], RecipeSpec]) -> RecipeSpec:
        return validate(completed(given) if isinstance(given, Mapping) else given)

    @property
    def updates_per_sampled_weights(self) -> int:
        """Number of updates on what the same weights sampled: more than 1 with ``offPolicy.ppo`` alone."""
        return 1 if self.off_policy.ppo is None else self.off_policy.ppo.steps_per_batch

    @property
    def proximal_updates(self) -> int:
        """Number of updates for which the trainer keeps the policy before the first of them (π_prox of ``correction``); 0 if it
        needs none. REINFORCE has no ratio, so its weights are of the trained policy.

        >>> RecipeSpec(preset="grpo").proximal_updates
        0
        >>> from scalerl_api.recipe.loss import TruncatedCorrection
        >>> RecipeSpec(preset="grpo", correction=CorrectionSpec(truncated=TruncatedCorrection())).proximal_updates
        8
        """
        corrected = self.correction.truncated is not None or self.correction.masked is not None
        updates = self.updates_per_sampled_weights
        return updates if corrected and updates > 1 and self.loss.reinforce is None else 0

    @property
    def max_staleness_steps(self) -> int:
        """Maximum number of updates between sampling and training of a token."""
        if self.off_policy.ppo is not None:
            return self.off_policy.ppo.steps_per_batch - 1
        assert self.off_policy.pipeline is not None, "completed by the preset"
        return self.off_policy.pipeline.max_staleness_steps
