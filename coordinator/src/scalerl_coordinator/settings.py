"""The settings of a run that the coordinator reads from its spec, once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from scalerl_api.recipe import CurriculumSpec, LengthSpec, RecipeSpec
from scalerl_api.spec import EvaluationSetSpec, ScaleRLRun
from scalerl_api.wire import HELD_OUT_SET, MAIN_TASK, PromptRef, Split

_COMPLETION_SLACK_BYTES = 2**14
"""Bound on names, version spans, a grading error's text, and MessagePack overhead."""


class EvaluationSet(msgspec.Struct, frozen=True, array_like=True):
    """A fixed set of prompts that versions are evaluated on."""

    name: str
    digest: str
    """Of its prompts."""
    prompts: int
    samples: int
    """Completions per prompt."""
    k: int = 0
    """Largest k of pass@k; 0: the samples."""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The settings that records depend on. Those not in :attr:`fixed` may change between processes."""

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
    max_tries: int = 1
    """Prompts that are tried for a slot until one has rewards that differ; 1: no refill."""
    tasks: tuple[str, ...] = (MAIN_TASK,)
    """Names, by :attr:`~scalerl_api.wire.PromptRef.task`. The digests above are of the first."""

    sets: tuple[EvaluationSet, ...] = ()
    """Further evaluation sets; the n-th (from 1) is :attr:`~scalerl_api.wire.PromptRef.task` n of its held-out prompts."""
    reference: bool = False
    """The reference policy of ``recipe.kl.penalty`` scores the completions."""
    held_out_name: str = HELD_OUT_SET
    """Of the evaluation set of the task's held-out prompts; empty: they are not evaluated."""
    held_out_k: int = 0
    """Its :attr:`EvaluationSet.k`."""

    def evaluation_set(self, task: int) -> EvaluationSet:
        """The evaluation set of ``task``; of 0, the held-out prompts of the run's task."""
        if task:
            return self.sets[task - 1]
        return EvaluationSet(
            self.held_out_name,
            self.held_out_digest,
            self.held_out_prompts,
            self.evaluation_samples,
            self.held_out_k,
        )

    @property
    def set_tasks(self) -> range:
        """The tasks of all evaluation sets."""
        return range(0 if self.held_out_name else 1, len(self.sets) + 1)

    def completions(self, prompt: PromptRef) -> int:
        """Completions of a group of ``prompt``."""
        if prompt.split is Split.TRAIN:
            return self.completions_per_prompt
        return self.evaluation_set(prompt.task).samples

    def measured(self, task: int) -> str:
        """Digest of what a point of the task's set measures: the prompts, and whatever else changes the expected reward of a
        version.

        Points with different digests do not belong to one curve. The number of samples only changes the error.
        """
        parts = (self.evaluation_set(task).digest, self.evaluation_temperature, self.max_completion_tokens)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def fixed(self) -> dict[str, object]:
        """What may not change between processes: it defines which prompt an index is."""
        return {name: getattr(self, name) for name in _FIXED} | {
            "sets": tuple((one.name, one.digest, one.prompts) for one in self.sets)
        }


_FIXED: Final = ("seed", "train_digest", "held_out_digest", "held_out_prompts", "held_out_name", "tasks")


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
    set_every: tuple[int, ...] = ()
    """``everySteps`` of each of :attr:`Identity.sets`."""
    forecast_task: int = 0
    """The task whose evaluation set has the run's curve."""
    length: LengthSpec = RecipeSpec().length
    curriculum: CurriculumSpec = RecipeSpec().curriculum
    teacher: bool = False
    """Training groups have log-probabilities of ``recipe.distillation``'s teacher."""
    max_compute_tokens: int | None = None
    heartbeat_seconds: float = 2.0
    context_tokens: int = 2**20
    """Maximum length of prompt and completion together."""

    def every_steps(self, task: int) -> int:
        """Steps between evaluations on the set of ``task``."""
        return self.set_every[task - 1] if task else self.evaluation_every

    @property
    def max_group_bytes(self) -> int:
        """Upper bound on the size of a group of this run on the wire: 4 bytes a token id, 4 a log-probability, 4 a teacher's."""
        identity = self.identity
        completions = max(
            identity.completions_per_prompt, identity.evaluation_samples, *(s.samples for s in identity.sets)
        )
        longest = (12 if self.teacher else 8) * identity.max_completion_tokens + _COMPLETION_SLACK_BYTES
        return completions * longest + 4 * self.context_tokens + _COMPLETION_SLACK_BYTES

    @classmethod
    def of_run(
        cls,
        run: ScaleRLRun,
        *,
        train_digest: str,
        held_out_digest: str,
        held_out_prompts: int,
        sets: Sequence[tuple[str, int]] = (),
    ) -> Settings:
        """The settings of ``run`` and of its task. sets: digest and number of prompts of each evaluation set with a task."""
        spec, recipe, evaluation = run.spec, run.spec.recipe, run.spec.evaluation
        held_out = next((one for one in evaluation.all_sets if one.task is None), None)
        others = [one for one in evaluation.all_sets if one.task is not None]
        names = [held_out.name if held_out is not None else "", *(one.name for one in others)]

        def samples(given: EvaluationSetSpec | None) -> int:
            return (given.samples_per_prompt if given is not None else None) or evaluation.samples_per_prompt

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
                evaluation_samples=samples(held_out),
                evaluation_temperature=float(evaluation.temperature),
                steps_per_batch=recipe.off_policy.ppo.steps_per_batch if recipe.off_policy.ppo else 0,
                max_tries=recipe.refill.max_tries if recipe.refill else 1,
                reference=recipe.kl.penalty is not None,
                held_out_name=names[0],
                held_out_k=(held_out.k if held_out is not None else None) or 0,
                sets=tuple(
                    EvaluationSet(one.name, digest, prompts, samples(one), one.k or 0)
                    for one, (digest, prompts) in zip(others, sets, strict=True)
                ),
            ),
            temperature=float(recipe.temperature),
            evaluation_every=(held_out.every_steps if held_out is not None else None)
            or evaluation.every_steps,
            set_every=tuple(one.every_steps or evaluation.every_steps for one in others),
            forecast_task=names.index(evaluation.forecast_name),
            hold_seconds=float(evaluation.hold_seconds),
            lease_seconds=float(spec.generator.lease_seconds),
            max_steps=spec.budget.max_steps,
            max_compute_tokens=spec.budget.max_compute_tokens,
            length=recipe.length,
            curriculum=recipe.curriculum,
            teacher=recipe.distillation is not None,
            generator_devices=max(1, spec.generator.devices),
            context_tokens=spec.model.context_tokens,
            trainer_devices=spec.trainer.ranks,
        )
