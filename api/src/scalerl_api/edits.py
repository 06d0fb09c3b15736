"""The effect of editing a field of an active run's spec: one entry per field.

The entries determine the API server's immutability rules, the roles that the operator restarts, the edits that
``scalerl run --resume`` accepts, and the table in ``docs/operations.md``. :func:`edit_of` raises for a field without an
entry; a test covers every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scalerl_api.source import SOURCES
from scalerl_api.spec import RunSpec


class Effect(StrEnum):
    """The effect of an edit."""

    text: str
    """The effect as a sentence, for the table of the documentation."""
    roles: frozenset[str]

    def __new__(cls, value: str, text: str, *roles: str) -> Effect:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        member.roles = frozenset(roles)
        return member

    AT_ONCE = ("AtOnce", "Takes effect without a restart.")
    COORDINATOR = (
        "Coordinator",
        "The coordinator restarts within seconds; generators and trainer continue.",
        "coordinator",
    )
    GENERATOR = (
        "Generator",
        "Generators restart one at a time; training continues with the others.",
        "generator",
    )
    GENERATORS = (
        "Generators",
        "The coordinator restarts, then the generators one at a time; the trainer continues.",
        *("coordinator", "generator"),
    )
    ENVIRONMENT = (
        "Environment",
        "Environment servers restart one at a time; generators and trainer continue.",
        "environment",
    )
    ALL = (
        "All",
        "The trainer completes its step and writes a checkpoint; all roles restart from it.",
        *("prepare", "coordinator", "generator", "trainer"),
    )
    REFUSED = ("Refused", "Rejected:")


@dataclass(frozen=True)
class Edit:
    """The entry of a field."""

    effect: Effect
    note: str = ""
    """When the edit applies, or why it is rejected."""
    fork: bool = False
    """Whether a fork (``spec.from``) may have another value, though the edit of a run is rejected."""


def _of_the_run(what: str) -> Edit:
    return Edit(
        Effect.REFUSED, f"{what} cannot change: weights, journal and curve depend on it. Create another run"
    )


def _of_the_claim(what: str) -> Edit:
    return Edit(
        Effect.REFUSED,
        f"{what} cannot change: Kubernetes does not allow changing it for a claim. Create another run with another claim",
        fork=True,
    )


_NEXT_STEP = Edit(
    Effect.COORDINATOR,
    "Applies from the first incomplete step. Accepted rollouts are kept, unless they are too old for the step that they are "
    "now part of: those count as stale, and their prompts are reissued.",
)
_NEXT_EVALUATION = Edit(Effect.COORDINATOR, "Applies from the next evaluation.")
_EVALUATION_PROMPTS_ISSUED_THEN = Edit(
    Effect.COORDINATOR,
    "Applies to prompts issued afterwards, including those of an evaluation in progress.",
)
_GRADED_FROM_THEN = Edit(Effect.GENERATOR, "Applies to completions graded afterwards.")
_NEW_SET = "Points before and after belong to two curves: the forecast restarts."
_COMPLETIONS_STARTED_THEN = Edit(
    Effect.ALL, f"Applies to completions started afterwards; an evaluation in progress restarts. {_NEW_SET}"
)
_ALSO_PREPARATION = "The preparation also uses it, and is repeated."


def _scoring(task: str) -> dict[str, Edit]:
    """Entries of what scores the completions of a task."""
    chosen = ("name", "python", "code", "range", "http", "parameters")
    fixed = (*(f"verifier.{name}" for name in chosen), "verifiers", "combine")
    limits = (f"verifier.{name}" for name in ("timeoutSeconds", "memory", "workers"))
    of_environment = (f"environment.{name}" for name in ("turnTimeoutSeconds", "memory", "workers"))
    return {
        **{f"{task}.{name}": _of_the_run("the verifier") for name in fixed},
        **{f"{task}.{name}": _GRADED_FROM_THEN for name in limits},
        f"{task}.environment": _of_the_run("the environment"),
        **{f"{task}.{name}": _GRADED_FROM_THEN for name in of_environment},
    }


EDITS: Final[Mapping[str, Edit]] = {
    "model": _of_the_run("the model"),
    **{f"task.{source}": _of_the_run("the task") for source in SOURCES},
    "task.mix": _of_the_run("the mix"),
    "task.mix.maxCompletionTokens": _COMPLETIONS_STARTED_THEN,
    **_scoring("task.mix"),
    "task.prompt": _of_the_run("the prompt"),
    "task.heldOut": _of_the_run("the held-out set"),
    **_scoring("task"),
    "warmStart": Edit(
        Effect.REFUSED, "warmStart cannot change: it runs before the first step. Create another run"
    ),
    "from": Edit(
        Effect.REFUSED, "from cannot change: it is read before the first step. Create another run", fork=True
    ),
    "seed": _of_the_run("the seed"),
    "recipe.promptsPerStep": _NEXT_STEP,
    "recipe.preset": Edit(Effect.ALL),
    "recipe.offPolicy": _NEXT_STEP,
    "recipe.offPolicy.ppo": Edit(
        Effect.ALL,
        "With recipe.correction the trainer keeps the policy before a batch's first update. Accepted rollouts are kept as after an "
        "edit of recipe.offPolicy.pipeline.",
    ),
    "recipe.zeroVarianceFilter": Edit(Effect.COORDINATOR, "Applies from the first incomplete step."),
    "recipe.refill": Edit(Effect.COORDINATOR, "Applies to groups accepted afterwards."),
    "recipe.completionsPerPrompt": Edit(
        Effect.GENERATORS,
        "Applies to prompts issued afterwards; groups in progress are reissued. Accepted groups are kept, so a step may "
        "contain both sizes.",
    ),
    "recipe.maxCompletionTokens": _COMPLETIONS_STARTED_THEN,
    "recipe.temperature": Edit(
        Effect.REFUSED,
        "the recipe's temperature cannot change: accepted rollouts have log-probabilities at the previous one. Fork "
        "the run",
        fork=True,
    ),
    "recipe.curriculum": Edit(Effect.COORDINATOR, "Applies to prompts not selected yet."),
    "recipe.length": Edit(
        Effect.GENERATORS, "Applies to completions issued afterwards; earlier rewards do not change."
    ),
    "recipe.loss": Edit(Effect.ALL),
    "recipe.correction": Edit(
        Effect.ALL,
        "Within a batch of offPolicy.ppo, the policy at the restart counts as the one before its first update.",
    ),
    "recipe.offPolicyMask": Edit(Effect.ALL),
    "recipe.kl": Edit(
        Effect.ALL,
        "The reference is the initial model of the run, even if the penalty is added later. Compute before the edit keeps its cost in budget.maxComputeTokens.",
    ),
    "recipe.distillation": Edit(
        Effect.REFUSED,
        "the distillation cannot change: accepted rollouts have the log-probabilities of the previous teacher, or none. Fork "
        "the run",
        fork=True,
    ),
    "recipe.aggregation": Edit(Effect.ALL),
    "recipe.advantage": Edit(Effect.ALL),
    "recipe.fp32Logits": Edit(Effect.ALL),
    "recipe.optimizer": Edit(Effect.ALL, "The moments are restored from the checkpoint."),
    "generator.replicas": Edit(Effect.AT_ONCE),
    "generator.devices": Edit(Effect.ALL),
    "generator.cpuThreads": Edit(Effect.GENERATOR),
    "generator.cpuWorkers": Edit(Effect.ALL),
    "generator.maxConcurrentSequences": Edit(Effect.GENERATOR),
    "generator.adaptiveConcurrency": Edit(Effect.GENERATOR),
    "generator.kvCache": Edit(Effect.ALL),
    "generator.memoryFraction": Edit(Effect.ALL),
    "generator.deviceMemory": Edit(Effect.ALL, "Checked before the roles start."),
    "generator.extraArgs": Edit(Effect.GENERATOR),
    "generator.compileCache": Edit(Effect.GENERATOR),
    "generator.speculation": Edit(Effect.GENERATORS),
    "generator.podTemplate": Edit(Effect.GENERATOR),
    "generator.actorResources": Edit(Effect.GENERATOR),
    "trainer.replicas": Edit(Effect.ALL, "Checkpoints load with any number of ranks."),
    "trainer.devices": Edit(Effect.ALL, "Checkpoints load with any number of ranks."),
    "trainer.cpuThreads": Edit(Effect.ALL),
    "trainer.engine": Edit(Effect.ALL, "Checkpoints load in either engine."),
    "trainer.zeroStage": Edit(Effect.ALL, "Checkpoints load with any stage."),
    "trainer.offload": Edit(Effect.ALL, "Checkpoints load with or without it."),
    "trainer.microBatchTokens": Edit(Effect.ALL),
    "trainer.activationCheckpointing": Edit(Effect.ALL),
    "trainer.routerReplay": Edit(
        Effect.ALL, "Applies to tokens sampled afterwards; the trainer chooses the experts of the others."
    ),
    "trainer.lora": _of_the_run("the adapters"),
    "trainer.deviceMemory": Edit(Effect.ALL, "Checked before the roles start."),
    "trainer.export": Edit(Effect.ALL),
    "trainer.maxRestarts": Edit(Effect.AT_ONCE),
    "trainer.podTemplate": Edit(Effect.ALL, _ALSO_PREPARATION),
    "coordinator.podTemplate": Edit(Effect.COORDINATOR),
    "environment": Edit(
        Effect.ENVIRONMENT,
        "Their episodes are played again; one that is answered in another way than before has no verdict.",
    ),
    "environment.replicas": Edit(Effect.AT_ONCE),
    "environment.sessionsPerReplica": Edit(Effect.AT_ONCE),
    "schedule": Edit(Effect.COORDINATOR, "Applies to slots leased afterwards."),
    "trace": Edit(Effect.COORDINATOR, "An existing trace is continued."),
    "rollouts": Edit(Effect.COORDINATOR, "Applies to groups leased afterwards."),
    "weightSync": Edit(Effect.ALL),
    "evaluation.everySteps": _NEXT_EVALUATION,
    "evaluation.samplesPerPrompt": _EVALUATION_PROMPTS_ISSUED_THEN,
    "evaluation.temperature": Edit(
        Effect.COORDINATOR, f"Applies immediately; an evaluation in progress restarts. {_NEW_SET}"
    ),
    "evaluation.holdSeconds": _NEXT_EVALUATION,
    "evaluation.generators": Edit(
        Effect.COORDINATOR, "Applies immediately; prompts that are leased are completed where they are."
    ),
    "evaluation.sets": Edit(
        Effect.REFUSED,
        "the evaluation sets and their order cannot change: training prompts, curves and the default of forecastSet depend on "
        "them. Create another run",
    ),
    "evaluation.sets.everySteps": _NEXT_EVALUATION,
    "evaluation.sets.samplesPerPrompt": _EVALUATION_PROMPTS_ISSUED_THEN,
    "evaluation.sets.k": Edit(
        Effect.COORDINATOR,
        "Applies to points completed afterwards; earlier ones keep their columns of pass@k.",
    ),
    **_scoring("evaluation.sets.task"),
    "evaluation.forecastSet": Edit(
        Effect.COORDINATOR,
        "Applies immediately: curve.csv has the other set's points. The forecast restarts.",
    ),
    "checkpoint": Edit(Effect.ALL),
    "checkpoint.to": Edit(
        Effect.ALL, "The newest checkpoint is copied to the new prefix; copies under the previous one stay."
    ),
    "budget.maxComputeTokens": Edit(
        Effect.ALL, "After mid-training, all of a change with budget.split is RL's."
    ),
    "budget.split": Edit(
        Effect.REFUSED,
        "budget.split cannot change: mid-training may have ended at its share. Create another run",
    ),
    "budget.maxSteps": Edit(Effect.COORDINATOR),
    "budget.maxDeviceHours": Edit(Effect.AT_ONCE),
    "budget.maxSeconds": Edit(Effect.AT_ONCE),
    "autoscaling": Edit(Effect.AT_ONCE),
    "trackers": Edit(Effect.COORDINATOR, "A new or relocated tracker also receives the earlier steps."),
    "suspend": Edit(Effect.AT_ONCE),
    "storage.claimName": _of_the_claim("the claim"),
    "storage.size": Edit(
        Effect.AT_ONCE,
        "The claim is enlarged if its StorageClass allows expansion; a smaller size is rejected, because Kubernetes does not shrink claims.",
    ),
    "storage.storageClassName": _of_the_claim("the claim's storage class"),
    "storage.accessMode": _of_the_claim("the claim's access mode"),
    "storage.mountedBy": Edit(
        Effect.REFUSED,
        "the pods that mount the claim cannot change: the others' files are elsewhere. Create another run",
    ),
    "storage.onDelete": Edit(Effect.AT_ONCE),
    "images.coordinator": Edit(Effect.COORDINATOR),
    "images.generator": Edit(Effect.GENERATOR),
    "images.trainer": Edit(Effect.ALL, _ALSO_PREPARATION),
    "images.pullPolicy": Edit(Effect.GENERATORS, "Applies to the trainer from its next attempt."),
    "podTemplate": Edit(Effect.ALL),
    "deviceResource": Edit(Effect.ALL),
    "ttlSecondsAfterFinished": Edit(Effect.AT_ONCE),
}
"""Entries by path in a manifest's ``spec``. The entry of a section applies to each of its fields that has no entry with a
longer path. A field of the objects in a list has the same effect in each of them."""


def edit_of(path: str) -> Edit:
    """The entry of a field, or of the section that contains it.

    Raises:
        KeyError: neither has an entry.

    >>> edit_of("model.scratch.layers").effect, edit_of("task.mix.0.verifier.memory").effect
    (<Effect.REFUSED: 'Refused'>, <Effect.GENERATOR: 'Generator'>)
    """
    parts = without_indices(path).split(".")
    for length in range(len(parts), 0, -1):
        found = EDITS.get(".".join(parts[:length]))
        if found is not None:
            return found
    raise KeyError(f"spec.{path}: no effect of an edit is declared in scalerl_api.edits")


def without_indices(path: str) -> str:
    """The path without list indices: the same for a field of every object in a list."""
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a manifest with its path. A list of objects is expanded; any other list is one value.

    >>> list(flat({"a": {"b": [{"c": 1}], "d": [2]}}))
    [('a.b.0.c', 1), ('a.d', [2])]
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(at): item for at, item in enumerate(value)}
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


@dataclass(frozen=True)
class Leaf:
    """A field of the spec without nested fields."""

    path: str
    """Path in a manifest, without ``spec``."""
    names: tuple[str, ...]
    """The same path as attribute names in Python."""
    field: FieldInfo


def leaves(model: type[BaseModel] = RunSpec) -> Iterator[Leaf]:
    """All fields without nested fields, in the order of the spec."""
    for name, field in model.model_fields.items():
        alias, nested = field.alias or name, nested_model(field.annotation)
        if nested is None or not nested.model_fields:
            yield Leaf(alias, (name,), field)
        else:
            for leaf in leaves(nested):
                yield Leaf(f"{alias}.{leaf.path}", (name, *leaf.names), leaf.field)


def entry_model(annotation: Any) -> type[BaseModel] | None:
    """The model of the items of a list field; None if the annotation has no list of models."""
    if annotation is None or get_origin(annotation) is list:
        return nested_model(get_args(annotation)[0]) if annotation is not None else None
    return next((found for item in get_args(annotation) if (found := entry_model(item)) is not None), None)


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a field, optional or not; None if the annotation is no model."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        given = [item for item in get_args(annotation) if item is not type(None)]
        return nested_model(given[0]) if len(given) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
