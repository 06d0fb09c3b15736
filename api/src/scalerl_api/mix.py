"""``spec.task``: one training task, or a mix of several."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from scalerl_api.dataset_source import ShareDecimal
from scalerl_api.fields import InRange, Matches, Rule, Unique, exactly_one
from scalerl_api.source import (
    HELD_OUT_RULES,
    SCORED_BY,
    SOURCES,
    VERIFIER_RULES,
    HeldOutSpec,
    PromptSpec,
    ScoringSpec,
    TaskSpec,
    scored_by,
)
from scalerl_api.wire.prompts import MAIN_TASK, MEAN_SET

MAX_MIXED_TASKS: Final = 16
PlainName = Annotated[
    str,
    Field(max_length=63),
    AfterValidator(
        Matches(
            r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            "must be lower-case letters, digits and '-', with a letter or a digit at both ends, like hard-10",
        )
    ),
]
"""A name that can be part of a file name and the value of a metrics label."""


class MixedTaskSpec(TaskSpec):
    """A task of a mix."""

    name: PlainName
    """Name of the task, in the label ``task`` of metrics; also the name of its evaluation set, unless ``evaluation.sets`` are
    given."""
    weight: Annotated[ShareDecimal, AfterValidator(InRange(above=0.0))]
    """Share of the training prompts. The weights of a mix sum to 1."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Maximum length of this task's completions, in training and on its held-out prompts; default:
    ``recipe.maxCompletionTokens``, which it may not exceed."""

    rules = (
        *TaskSpec.rules,
        Rule(
            f"self.name != '{MEAN_SET}'",
            f"{MEAN_SET} is the mean of all tasks in evaluation.forecastSet; choose another name",
            "name",
            lambda task: task.name != MEAN_SET,
        ),
    )


@dataclass(frozen=True)
class TrainingTask:
    """A training task of a run: a task of the mix, or the only task."""

    name: str
    """Name in the mix; :data:`MAIN_TASK` for the only task."""
    field: str
    """Path of its section, without ``spec``."""
    section: TaskSpec
    """Source, verifier, prompt format and held-out prompts."""
    weight: Fraction = Fraction(1)
    """Share of the training prompts."""
    max_completion_tokens: int | None = None
    """Maximum completion length; None: the recipe's."""


class RunTaskSpec(ScoringSpec):
    """Training data: one task, or several tasks in fixed proportions."""

    mix: (
        Annotated[
            list[MixedTaskSpec],
            Field(min_length=2, max_length=MAX_MIXED_TASKS),
            AfterValidator(Unique("name")),
        ]
        | None
    ) = None
    """Several tasks, each with its own source, verifier, held-out prompts and prompt format; give this or one source."""
    prompt: PromptSpec = PromptSpec()
    """How the text of a problem becomes a prompt; in a mix, set it in each task."""
    held_out: HeldOutSpec = HeldOutSpec()
    """Prompts excluded from training; their mean score is the curve. In a mix, set it in each task."""

    rules = (
        exactly_one(*SOURCES, "mix"),
        Rule(
            f"[has(self.mix), {SCORED_BY}].exists_one(given, given) && !(has(self.mix) && has(self.environment))",
            "give verifier or verifiers, or an environment in place of them (retry, tools: beside them), or with mix, each of its tasks its "
            "own verifier",
            "verifier",
            lambda task: (
                scored_by(task) == (task.mix is None) and (task.mix is None or task.environment is None)
            ),
        ),
        Rule(
            # The API server applies defaults before it checks rules.
            "!has(self.mix) || (self.heldOut.size == 1000 && self.prompt.format == 'Raw' && "
            "self.prompt.template == '{prompt}' && !has(self.prompt.system) && !has(self.prompt.chatTemplate))",
            "prompt and heldOut are each task's own: move them into the tasks of mix",
            "mix",
            lambda task: task.mix is None or (task.prompt, task.held_out) == (PromptSpec(), HeldOutSpec()),
        ),
        Rule(
            "!has(self.mix) || (self.mix.map(t, double(string(t.weight))).sum() > 0.9999999995 && "
            "self.mix.map(t, double(string(t.weight))).sum() < 1.0000000005)",
            "the weights of the tasks of mix must sum to 1: change one of them",
            "mix",
            lambda task: task.mix is None or sum(Fraction(t.weight) for t in task.mix) == 1,
        ),
        *HELD_OUT_RULES,
        *VERIFIER_RULES,
    )

    @property
    def tasks(self) -> list[TrainingTask]:
        """The tasks: those of the mix, or the only one."""
        if self.mix is None:
            of_one = {name: getattr(self, name) for name in TaskSpec.model_fields}
            return [TrainingTask(MAIN_TASK, "task", TaskSpec.model_construct(**of_one))]
        return [
            TrainingTask(t.name, f"task.mix.{at}", t, Fraction(t.weight), t.max_completion_tokens)
            for at, t in enumerate(self.mix)
        ]
