"""Sources and prompts of ``spec.task``, and how they are scored. A mix of tasks is in :mod:`.mix`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from scalerl_api.dataset_source import DatasetSource
from scalerl_api.environment import USE_VERIFIER, EnvironmentSpec
from scalerl_api.fields import Model, OpenUnitDecimal, Rule, exactly_one
from scalerl_api.plugins import SourcePlugin
from scalerl_api.source_kind import SourceKind
from scalerl_api.verifier import VerifierList, VerifierSpec, parameter_value

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class ReasoningGymSource(SourceKind):
    """A procedurally generated reasoning-gym data set."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the data set, like ``chain_sum``."""
    parameters: Annotated[
        dict[str, Annotated[int | bool | str | list[int] | list[str], BeforeValidator(parameter_value)]],
        Field(max_length=64),
    ] = {}
    """Parameters of the task; write fractions as strings (``"0.5"``)."""
    seed: Seed = 0
    """Seed of the generated problems."""
    size: Annotated[int, Field(ge=2, le=100_000_000)] = 50_000
    """Number of problems, including the held-out ones."""


class JsonlSource(SourceKind):
    """A file with one JSON object per line: ``prompt``, ``answer``, optional ``id``, ``difficulty``, ``solution``."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path of the file: on one machine, relative to the run file; on a cluster, absolute, on a mounted volume."""

    prompts_checked = None
    answers_checked = None

    @property
    def paths(self) -> Mapping[str, str]:
        return {"path": self.path}


class PromptSpec(Model):
    """How the text of a problem becomes the prompt of the model."""

    format: Literal["Raw", "Chat"] = "Raw"
    """``Chat`` applies the tokenizer's chat template."""
    template: Annotated[str, Field(max_length=16_384)] = "{prompt}"
    """Template of the user message; ``{prompt}`` is replaced by the text of the problem."""
    system: Annotated[str, Field(max_length=16_384)] | None = None
    """System message; requires ``format: Chat``."""
    chat_template: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """Chat template (Jinja) in place of the tokenizer's; requires ``format: Chat``. Exported models keep the tokenizer's."""

    rules = (
        Rule(
            "!has(self.template) || self.template.contains('{prompt}')",
            "template must contain {prompt}",
            "template",
            lambda prompt: "{prompt}" in prompt.template,
        ),
        Rule(
            "!has(self.system) || self.format == 'Chat'",
            "system needs format: Chat",
            "system",
            lambda prompt: prompt.system is None or prompt.format == "Chat",
        ),
        Rule(
            "!has(self.chatTemplate) || self.format == 'Chat'",
            "chatTemplate needs format: Chat",
            "chatTemplate",
            lambda prompt: prompt.chat_template is None or prompt.format == "Chat",
        ),
    )


class HeldOutSpec(Model):
    """Prompts excluded from training; their mean score is the curve. Fixed for the whole run."""

    size: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Number of held-out prompts. ScaleRL: 1,000 [P]."""
    graphs: OpenUnitDecimal | None = None
    """With a plugin whose problems have graphs of operations (opgraph): share of the graphs that are held out. Held-out prompts have
    only these graphs, and training prompts none of them, under any names. Default: held-out prompts differ from training prompts
    in text only."""


class SourcesSpec(Model):
    """Alternative sources of problems."""

    reasoning_gym: ReasoningGymSource | None = None
    """Procedurally generated problems; give this, jsonl, dataset or plugin."""
    jsonl: JsonlSource | None = None
    """Problems from a file; give this, reasoningGym, dataset or plugin."""
    dataset: DatasetSource | None = None
    """Problems from files of any layout, or of a hub; give this, reasoningGym, jsonl or plugin."""
    plugin: SourcePlugin | None = None
    """Problems of a source of the entry points ``scalerl.sources``, such as opgraph; give this, reasoningGym, jsonl or dataset."""

    @property
    def source(self) -> SourceKind:
        """The one that is given. Without one, as in a mix, it implies nothing."""
        given = (getattr(self, name) for name in SourcesSpec.model_fields)
        return next((one for one in given if one is not None), SourceKind())


SOURCES: Final = tuple(str(field.alias) for field in SourcesSpec.model_fields.values())
"""Fields of a task of which one says where its problems are from."""


class ScoringSpec(SourcesSpec):
    """Sources with the verifiers of their completions."""

    verifier: VerifierSpec | None = None
    """How completions are scored, and the limits of scoring."""
    verifiers: VerifierList | None = None
    """Several verifiers, in place of one; each is a part of the verdict."""
    combine: Literal["Sum", "Product"] = "Sum"
    """How the scores of verifiers are combined. Sum: by their weights, as a mean. Product: multiplied, as by a gate."""
    environment: EnvironmentSpec | None = None
    """Episodes of several turns; in place of a verifier, except for ``retry`` and ``tools``, which use it."""

    @property
    def own_environment(self) -> EnvironmentSpec | None:
        """The environment, if it scores its episodes itself."""
        return None if self.environment is None or self.environment.uses_verifier else self.environment

    @property
    def stepping_environment(self) -> EnvironmentSpec | None:
        """The environment, if it makes its steps itself, and not by the task's verifier alone."""
        return self.environment if self.environment is not None and self.environment.makes_steps else None

    @property
    def scoring(self) -> Sequence[VerifierSpec]:
        """The verifiers: one, several, or with an environment of its own rewards none."""
        return [self.verifier] if self.verifier is not None else self.verifiers or ()


def _names(task: ScoringSpec, several: bool) -> list[str]:
    given = task.verifiers or () if several else [task.verifier] if task.verifier is not None else ()
    return [one.name for one in given if one.name is not None]


def _verifier_rules(field: str, given: str, verifier: str, end: str, several: bool) -> tuple[Rule, ...]:
    """given: CEL up to the condition for ``verifier``; end: closes it."""
    return (
        Rule(
            f"{given} || !has({verifier}.name) || {verifier}.name != 'reasoning-gym' || has(self.reasoningGym){end}",
            "verifier reasoning-gym scores reasoningGym data only; use exact, number or math-verify",
            field,
            lambda task: task.reasoning_gym is not None or "reasoning-gym" not in _names(task, several),
        ),
    )


SCORED_BY: Final = (
    "has(self.verifier), has(self.verifiers), "
    f"has(self.environment) && (!has(self.environment.name) || !(self.environment.name in {list(USE_VERIFIER)}))"
)
"""What scores a task, in CEL."""


def scored_by(task: ScoringSpec) -> int:
    """Number of fields that score a task; see :data:`SCORED_BY`."""
    return sum(one is not None for one in (task.verifier, task.verifiers, task.own_environment))


VERIFIER_RULES: Final = (
    *_verifier_rules("verifier.name", "!has(self.verifier)", "self.verifier", "", False),
    *_verifier_rules("verifiers", "!has(self.verifiers) || self.verifiers.all(v, false", "v", ")", True),
)
"""Rules for the combination of a source and a verifier, if they are given."""
HELD_OUT_RULES: Final = (
    Rule(
        "!has(self.reasoningGym) || self.heldOut.size < self.reasoningGym.size",
        "%(heldOut.size)s must be less than %(reasoningGym.size)s: problems to train on have to be left",
        "heldOut.size",
        lambda task: task.reasoning_gym is None or task.held_out.size < task.reasoning_gym.size,
    ),
    Rule(
        "!has(self.heldOut.graphs) || has(self.plugin)",
        "heldOut.graphs needs a plugin, such as opgraph: other sources have no graphs",
        "heldOut.graphs",
        lambda task: task.held_out.graphs is None or task.plugin is not None,
    ),
)
"""Rules for the held-out prompts of a training source."""


class ProblemSpec(ScoringSpec):
    """A source of problems with its verifier and prompt format; common to training and evaluation."""

    prompt: PromptSpec | None
    """How the text of a problem becomes a prompt."""

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one(*SOURCES),
        Rule(
            f"[{SCORED_BY}].exists_one(given, given)",
            "give exactly one of verifier, verifiers and environment; environments retry and tools need a verifier, which they use",
            "verifier",
            lambda task: scored_by(task) == 1,
        ),
        *VERIFIER_RULES,
    )

    @property
    def source_field(self) -> str:
        fields = zip(SOURCES, SourcesSpec.model_fields, strict=True)
        return next((alias for alias, name in fields if getattr(self, name) is not None), "plugin")


class TaskSpec(ProblemSpec):
    """A training task."""

    prompt: PromptSpec = PromptSpec()
    """How the text of a problem becomes a prompt."""
    held_out: HeldOutSpec = HeldOutSpec()
    """Prompts excluded from training; their mean score is the curve."""

    rules: ClassVar[tuple[Rule, ...]] = (*ProblemSpec.rules[:2], *HELD_OUT_RULES, *VERIFIER_RULES)


class EvaluationTaskSpec(ProblemSpec):
    """The problems of an evaluation set. Problems with the same text are excluded from training."""

    prompt: PromptSpec | None = None
    """How the text of a problem becomes a prompt; default: ``task.prompt``; with a mix, the text alone."""
    size: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of problems; default: 1000, or all problems of a smaller source."""

    rules = (
        *ProblemSpec.rules,
        Rule(
            "!has(self.size) || !has(self.reasoningGym) || self.size <= self.reasoningGym.size",
            "%(size)s must be at most %(reasoningGym.size)s, the problems that there are",
            "size",
            lambda task: (
                task.size is None or task.reasoning_gym is None or task.size <= task.reasoning_gym.size
            ),
        ),
    )
