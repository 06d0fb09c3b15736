"""The settings that the coordinator reads from the run's spec when it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import msgspec

from scalerl_api.recipe import Credit, CurriculumSpec, LengthSpec, RecipeSpec
from scalerl_api.rollouts import EVALUATION_FACTOR, RolloutsSpec, in_sample
from scalerl_api.schedule import ScheduleSpec
from scalerl_api.spec import EvaluationSetSpec, RunSpec, ScaleRLRun
from scalerl_api.speculation import HistorySpec
from scalerl_api.wire import (
    HELD_OUT_SET,
    MAIN_TASK,
    MAX_ROUTED_BYTES,
    MAX_TEXT_BYTES,
    MEAN_SET,
    PromptRef,
    Split,
)
from scalerl_coordinator.weighted_mean import MEAN_TASK

REFILL_TRIES: Final = 10
"""Prompts that a slot gets with ``recipe.refill`` until the rewards of one differ; no paper has a bound. Where nine in ten prompts
have none, a slot takes 6.5 prompts, and a third of the slots stay empty."""
_COMPLETION_SLACK_BYTES = 2**14
"""Bound on names, version spans, a grading error's text, and MessagePack overhead."""


class EvaluationSet(msgspec.Struct, frozen=True, array_like=True):
    """A fixed set of prompts on which versions are evaluated."""

    name: str
    digest: str
    """Digest of its prompts."""
    prompts: int
    """Number of prompts."""
    samples: int
    """Completions per prompt."""
    k: int = 0
    """Largest k of pass@k; 0 for ``samples``."""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The settings on which the meaning of records depends. Those not in :attr:`fixed` may change between processes."""

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
    """k of PPO-off-policy-k; 0 for PipelineRL."""
    max_tries: int = 1
    """Maximum number of prompts that a slot gets until the rewards of one differ; 1 for no refill."""
    tasks: tuple[str, ...] = (MAIN_TASK,)
    """Names of the tasks, by :attr:`~scalerl_api.wire.PromptRef.task`. ``held_out_digest`` is that of the first task,
    ``train_digest`` that of all."""

    sets: tuple[EvaluationSet, ...] = ()
    """Further evaluation sets. Prompts of the n-th (counted from 1) have :attr:`~scalerl_api.wire.PromptRef.task` n. In a mix,
    the sets of its other tasks come first. A set without a name is not evaluated."""
    reference: bool = False
    """Whether the reference policy of ``recipe.kl.penalty`` scores the completions."""
    held_out_name: str = HELD_OUT_SET
    """Name of the first task's evaluation set; empty if it is not evaluated."""
    held_out_k: int = 0
    """:attr:`EvaluationSet.k` of the first task's evaluation set."""
    task_max_tokens: tuple[int, ...] = ()
    """Maximum completion tokens of each task of a mix."""
    grading: tuple[str, ...] = ()
    """Digest of the code that scores each task, then each further evaluation set; empty for a verifier with a name."""
    credit: Credit = "Episode"
    """``recipe.advantage.credit``."""

    @classmethod
    def of_spec(
        cls, spec: RunSpec, sets: Sequence[EvaluationSet], train_digest: str, grading: Sequence[str]
    ) -> Identity:
        """The identity of a run with ``sets``, of which the first is that of the first task's held-out prompts."""
        recipe, (first, *others) = spec.recipe, sets
        return cls(
            prompts_per_step=recipe.prompts_per_step,
            completions_per_prompt=recipe.completions_per_prompt,
            max_completion_tokens=recipe.max_completion_tokens,
            max_staleness_steps=recipe.max_staleness_steps,
            zero_variance_filter=recipe.zero_variance_filter,
            seed=spec.seed,
            train_digest=train_digest,
            held_out_digest=first.digest,
            held_out_prompts=first.prompts,
            evaluation_samples=first.samples,
            evaluation_temperature=float(spec.evaluation.temperature),
            steps_per_batch=recipe.off_policy.ppo.steps_per_batch if recipe.off_policy.ppo else 0,
            max_tries=REFILL_TRIES if recipe.refill else 1,
            tasks=tuple(task.name for task in spec.task.tasks),
            reference=recipe.kl.penalty is not None,
            credit=recipe.advantage.credit,
            held_out_name=first.name,
            held_out_k=first.k,
            grading=tuple(grading) if any(grading) else (),
            sets=tuple(others),
            task_max_tokens=tuple(
                task.max_completion_tokens or recipe.max_completion_tokens for task in spec.task.mix or ()
            ),
        )

    def evaluation_set(self, task: int) -> EvaluationSet:
        """The evaluation set of ``task``; for 0, the held-out prompts of the first task."""
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
    def set_tasks(self) -> list[int]:
        """The tasks of all evaluation sets that are evaluated."""
        return [task for task in range(len(self.sets) + 1) if self.evaluation_set(task).name]

    def max_tokens(self, task: int) -> int:
        """Maximum completion tokens of a task (in training and on its held-out prompts), or of an evaluation set."""
        return self.task_max_tokens[task] if task < len(self.task_max_tokens) else self.max_completion_tokens

    def completions(self, prompt: PromptRef) -> int:
        """Number of completions of a group of ``prompt``."""
        if prompt.split is Split.TRAIN:
            return self.completions_per_prompt
        return self.evaluation_set(prompt.task).samples

    def measured(self, task: int) -> str:
        """Digest of the prompts of the task's set, of the code that scores them, and of all settings that change a version's
        expected reward on it.

        Points with different digests do not belong to the same curve. The number of samples is not part of it, because it only
        changes the error.
        """
        parts: tuple[object, ...] = (
            self.evaluation_set(task).digest,
            self.evaluation_temperature,
            self.max_tokens(task),
        )
        if task < len(self.grading) and self.grading[task]:
            parts = (*parts, self.grading[task])
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def fixed(self) -> dict[str, object]:
        """The settings that may not change between processes, because they define which prompt an index refers to."""
        return {name: getattr(self, name) for name in _FIXED} | {
            "sets": tuple((one.name, one.digest, one.prompts) for one in self.sets)
        }


_FIXED: Final = ("seed", "train_digest", "held_out_digest", "held_out_prompts", "held_out_name", "tasks")


@dataclass(frozen=True)
class Settings:
    """Settings of a run, named as the spec's fields. Devices are per replica or rank, and at least 1 (a CPU process)."""

    identity: Identity
    temperature: float
    evaluation_every: int
    hold_seconds: float
    lease_seconds: float
    max_steps: int | None
    generator_devices: int
    trainer_devices: int
    evaluation_generators: int | None = None
    """Members that keep a version under evaluation; None for all that have it."""
    set_every: tuple[int, ...] = ()
    """``everySteps`` of each of :attr:`Identity.sets`."""
    forecast_task: int = 0
    """The task whose evaluation set the forecast follows; :data:`~.weighted_mean.MEAN_TASK` for the mean over a mix."""
    weights: tuple[Fraction, ...] = (Fraction(1),)
    """Weights of the training tasks in the mix."""
    length: LengthSpec = RecipeSpec().length
    discount: float = 1.0
    """``recipe.advantage.discount``."""
    curriculum: CurriculumSpec = RecipeSpec().curriculum
    teacher: bool = False
    """Whether training groups must have log-probabilities of ``recipe.distillation``'s teacher."""
    max_compute_tokens: int | None = None
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    trace: bool = False
    heartbeat_seconds: float = 2.0
    context_tokens: int = 2**20
    """Maximum length of prompt and completion together."""
    history: HistorySpec | None = None
    """``generator.speculation.history``; None if past responses are not stored."""
    forked_step: int = -1
    """Step of the checkpoint of another run with which this one starts; -1 otherwise."""
    rollouts: RolloutsSpec | None = None
    """``rollouts``; None if none are recorded."""
    router_replay: bool = False
    """``trainer.router_replay``."""

    def records(self, prompt: PromptRef) -> bool:
        """Whether the completions of a prompt are recorded."""
        if self.rollouts is None:
            return False
        identity, wanted = self.identity, self.rollouts.per_step
        if prompt.split is Split.TRAIN:
            return in_sample(prompt, wanted / (identity.prompts_per_step * identity.completions_per_prompt))
        one = identity.evaluation_set(prompt.task)
        return in_sample(prompt, EVALUATION_FACTOR * wanted / (one.prompts * one.samples))

    def every_steps(self, task: int) -> int:
        """Number of steps between evaluations on the set of ``task``."""
        return self.set_every[task - 1] if task else self.evaluation_every

    def follows(self, task: int) -> bool:
        """Whether the forecast follows the evaluation set of ``task``, alone or as part of the weighted mean."""
        return task == self.forecast_task or (
            self.forecast_task == MEAN_TASK and 0 <= task < len(self.weights)
        )

    @property
    def max_group_bytes(self) -> int:
        """Upper bound on the size of a group of this run on the wire, in bytes.

        A token takes 4 bytes for its id, 4 for its log-probability and 4 for the teacher's, and up to 16 of text. With router
        replay, each completion also has the experts of its tokens and of the prompt's.
        """
        identity = self.identity
        completions = max(
            identity.completions_per_prompt, identity.evaluation_samples, *(s.samples for s in identity.sets)
        )
        text = 0 if self.rollouts is None else MAX_TEXT_BYTES
        longest = (12 if self.teacher else 8) + text
        longest = longest * identity.max_completion_tokens + _COMPLETION_SLACK_BYTES
        longest += MAX_ROUTED_BYTES * self.context_tokens if self.router_replay else 0
        return completions * longest + (4 + text) * self.context_tokens + _COMPLETION_SLACK_BYTES

    @classmethod
    def of_run(
        cls,
        run: ScaleRLRun,
        *,
        train_digest: str,
        held_out: Sequence[tuple[str, int]],
        sets: Sequence[tuple[str, int]] = (),
        grading: Sequence[str] = (),
        forked_step: int = -1,
    ) -> Settings:
        """The settings of ``run`` and of its tasks.

        Args:
            train_digest: digest of the training prompts of all tasks.
            held_out: digest and number of the held-out prompts of each task.
            sets: digest and number of the prompts of each evaluation set with a task of its own.
            grading: see :attr:`Identity.grading`.
            forked_step: see :attr:`forked_step`.
        """
        spec, recipe, evaluation = run.spec, run.spec.recipe, run.spec.evaluation
        all_sets, every_steps = _evaluation_sets(spec, [*held_out, *sets])
        names = [one.name for one in all_sets]
        return cls(
            identity=Identity.of_spec(spec, all_sets, train_digest, grading),
            temperature=float(recipe.temperature),
            evaluation_every=every_steps[0],
            set_every=tuple(every_steps[1:]),
            forecast_task=MEAN_TASK
            if spec.task.mix is not None and spec.forecast_set == MEAN_SET
            else names.index(spec.forecast_set),
            weights=tuple(task.weight for task in spec.task.tasks),
            hold_seconds=float(evaluation.hold_seconds),
            evaluation_generators=evaluation.generators,
            lease_seconds=float(spec.lease_seconds),
            max_steps=spec.budget.max_steps,
            max_compute_tokens=spec.budget.max_compute_tokens,
            trace=spec.trace,
            schedule=spec.schedule,
            length=recipe.length,
            discount=float(recipe.advantage.discount),
            curriculum=recipe.curriculum,
            teacher=recipe.distillation is not None,
            generator_devices=max(1, spec.generator.devices),
            context_tokens=spec.model.context_tokens,
            trainer_devices=spec.trainer.ranks,
            history=spec.generator.speculation.history if spec.generator.speculation else None,
            forked_step=forked_step,
            rollouts=spec.rollouts if spec.rollouts.per_step else None,
            router_replay=spec.trainer.router_replay,
        )


def _evaluation_sets(
    spec: RunSpec, prompts: Sequence[tuple[str, int]]
) -> tuple[list[EvaluationSet], list[int]]:
    """The evaluation sets by :attr:`~scalerl_api.wire.PromptRef.task`, and ``everySteps`` of each. Held-out prompts that are not
    evaluated have a set without a name.

    Args:
        prompts: digest and number of the prompts of each.
    """
    evaluation, all_sets = spec.evaluation, spec.evaluation_sets
    set_of_task = {one.held_out_of or MAIN_TASK: one for one in all_sets if one.task is None}
    unnamed = EvaluationSetSpec.model_construct(name="")
    specs = [set_of_task.get(task.name, unnamed) for task in spec.task.tasks]
    specs += [one for one in all_sets if one.task is not None]
    sets = [
        EvaluationSet(
            one.name, digest, number, one.samples_per_prompt or evaluation.samples_per_prompt, one.k or 0
        )
        for one, (digest, number) in zip(specs, prompts, strict=True)
    ]
    return sets, [one.every_steps or evaluation.every_steps for one in specs]
