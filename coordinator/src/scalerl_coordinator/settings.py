"""The settings of a run that the coordinator reads from its spec, once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from scalerl_api.recipe import CurriculumSpec, LengthSpec, RecipeSpec
from scalerl_api.spec import ScaleRLRun

_COMPLETION_SLACK_BYTES = 2**14
"""Bound on names, version spans, a grading error's text, and MessagePack overhead."""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The settings that records depend on. Those not in :data:`FIXED` may change between processes."""

    prompts_per_step: int
    completions_per_prompt: int
    max_completion_tokens: int
    max_staleness_steps: int
    zero_variance_filter: bool
    seed: int
    train_digest: str
    held_out_digest: str
    held_out_prompts: int
    evaluation_samples: int
    evaluation_temperature: float = 1.0
    steps_per_batch: int = 0
    """k of PPO-off-policy-k; 0: PipelineRL."""

    @property
    def evaluation_set(self) -> str:
        """Digest of what a point measures: the prompts, and whatever else changes the expected reward of a version.

        Points with different digests do not belong to one curve. The number of samples only changes the error.
        """
        parts = (self.held_out_digest, self.evaluation_temperature, self.max_completion_tokens)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


FIXED: Final = ("seed", "train_digest", "held_out_digest", "held_out_prompts")
"""Fields of :class:`Identity` that may not change: they define which prompt an index is."""


@dataclass(frozen=True)
class Settings:
    """Named as the spec's fields; devices are per replica or rank, at least 1 (a CPU process counts)."""

    identity: Identity
    temperature: float
    evaluation_every: int
    hold_seconds: float
    lease_seconds: float
    max_steps: int | None
    generator_devices: int
    trainer_devices: int
    length: LengthSpec = RecipeSpec().length
    curriculum: CurriculumSpec = RecipeSpec().curriculum
    heartbeat_seconds: float = 2.0
    context_tokens: int = 2**20
    """Maximum length of prompt and completion together."""

    @property
    def max_group_bytes(self) -> int:
        """Upper bound on the size of a group of this run on the wire: 4 bytes a token id, 4 a log-probability."""
        identity = self.identity
        completions = max(identity.completions_per_prompt, identity.evaluation_samples)
        longest = 8 * identity.max_completion_tokens + _COMPLETION_SLACK_BYTES
        return completions * longest + 4 * self.context_tokens + _COMPLETION_SLACK_BYTES

    @classmethod
    def of_run(
        cls, run: ScaleRLRun, *, train_digest: str, held_out_digest: str, held_out_prompts: int
    ) -> Settings:
        """The settings of ``run`` and of its task."""
        spec, recipe, evaluation = run.spec, run.spec.recipe, run.spec.evaluation
        return cls(
            identity=Identity(
                prompts_per_step=recipe.prompts_per_step,
                completions_per_prompt=recipe.completions_per_prompt,
                max_completion_tokens=recipe.max_completion_tokens,
                max_staleness_steps=recipe.max_staleness_steps,
                zero_variance_filter=recipe.zero_variance_filter,
                seed=spec.seed,
                train_digest=train_digest,
                held_out_digest=held_out_digest,
                held_out_prompts=held_out_prompts,
                evaluation_samples=evaluation.samples_per_prompt,
                evaluation_temperature=float(evaluation.temperature),
                steps_per_batch=recipe.off_policy.ppo.steps_per_batch if recipe.off_policy.ppo else 0,
            ),
            temperature=float(recipe.temperature),
            evaluation_every=evaluation.every_steps,
            hold_seconds=float(evaluation.hold_seconds),
            lease_seconds=float(spec.generator.lease_seconds),
            max_steps=spec.budget.max_steps,
            length=recipe.length,
            curriculum=recipe.curriculum,
            generator_devices=max(1, spec.generator.devices),
            context_tokens=spec.model.context_tokens,
            trainer_devices=spec.trainer.ranks,
        )
