"""What an edit of a run's spec does while the run is under way: one entry a field.

From here come the rules by which the API server refuses an edit, what the operator restarts, what ``scalerl run
--resume`` takes, and the table of ``docs/operations.md``. A field without an entry is an error of :func:`edit_of`, and a
test asks it of every field that there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scalerl_api.spec import RunSpec


class Effect(StrEnum):
    """What an edit does; ``roles`` are the processes that restart for it."""

    text: str
    roles: frozenset[str]

    def __new__(cls, value: str, text: str, *roles: str) -> Effect:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        member.roles = frozenset(roles)
        return member

    AT_ONCE = ("AtOnce", "The operator acts on it; nothing restarts.")
    COORDINATOR = (
        "Coordinator",
        "The coordinator restarts, within seconds; generators and trainer go on.",
        "coordinator",
    )
    GENERATOR = (
        "Generator",
        "Generators restart one after the other; training goes on with the others.",
        "generator",
    )
    GENERATORS = (
        "Generators",
        "The coordinator restarts, and generators one after the other; the trainer goes on.",
        *("coordinator", "generator"),
    )
    ALL = (
        "All",
        "The trainer finishes its step and writes a checkpoint; all roles restart and go on from it.",
        *("prepare", "coordinator", "generator", "trainer"),
    )
    REFUSED = ("Refused", "Refused:")


@dataclass(frozen=True)
class Edit:
    """effect: of an edit under way. note: from when it counts, or why it is refused."""

    effect: Effect
    note: str = ""


def _of_the_run(what: str) -> Edit:
    return Edit(
        Effect.REFUSED, f"{what} cannot change: weights, journal and curve come from it. Create another run"
    )


def _of_the_claim(what: str) -> Edit:
    return Edit(
        Effect.REFUSED,
        f"{what} cannot change: Kubernetes fixes it with the claim. Create another run, on another claim",
    )


_NEXT_STEP = Edit(
    Effect.COORDINATOR,
    "From the first step on that is not complete yet. Accepted rollouts stay, unless they are too old for the step that "
    "they fall into now: those count as stale, and their prompts are issued again.",
)
_NEXT_EVALUATION = Edit(Effect.COORDINATOR, "From the next evaluation on.")
_GRADED_FROM_THEN = Edit(Effect.GENERATOR, "For completions graded from then on.")
_NEW_SET = "Points before and after are two curves: a forecast begins again."
_ALSO_PREPARATION = "The preparation has it too, and is made anew."

EDITS: Final[Mapping[str, Edit]] = {
    "model": _of_the_run("the model"),
    "task.reasoningGym": _of_the_run("the task"),
    "task.jsonl": _of_the_run("the task"),
    "task.prompt": _of_the_run("the prompt"),
    "task.heldOut": _of_the_run("the held-out set"),
    "task.verifier.name": _of_the_run("the verifier"),
    "task.verifier.timeoutSeconds": _GRADED_FROM_THEN,
    "task.verifier.memory": _GRADED_FROM_THEN,
    "task.verifier.workers": _GRADED_FROM_THEN,
    "warmStart": Edit(
        Effect.REFUSED, "warmStart cannot change: it is done before the first step. Create another run"
    ),
    "seed": _of_the_run("the seed"),
    "recipe.promptsPerStep": _NEXT_STEP,
    "recipe.preset": Edit(Effect.ALL),
    "recipe.offPolicy": _NEXT_STEP,
    "recipe.zeroVarianceFilter": Edit(Effect.COORDINATOR, "From the first step on that is not complete yet."),
    "recipe.completionsPerPrompt": Edit(
        Effect.GENERATORS,
        "For prompts issued from then on; groups that are being generated are issued again. Groups that were accepted "
        "stay as they are, and a step may have some of both sizes.",
    ),
    "recipe.maxCompletionTokens": Edit(
        Effect.ALL, f"For completions begun from then on; an evaluation under way begins again. {_NEW_SET}"
    ),
    "recipe.temperature": Edit(
        Effect.REFUSED,
        "the recipe's temperature cannot change: rollouts that were accepted have log-probabilities at the one of before. "
        "Create another run",
    ),
    "recipe.curriculum": Edit(Effect.COORDINATOR, "For prompts that are not chosen yet."),
    "recipe.length": Edit(
        Effect.GENERATORS, "For completions issued from then on; rewards that were given stay."
    ),
    "recipe.loss": Edit(Effect.ALL),
    "recipe.correction": Edit(Effect.ALL),
    "recipe.aggregation": Edit(Effect.ALL),
    "recipe.advantage": Edit(Effect.ALL),
    "recipe.fp32Logits": Edit(Effect.ALL),
    "recipe.optimizer": Edit(Effect.ALL, "The moments come from the checkpoint."),
    "generator.replicas": Edit(Effect.AT_ONCE),
    "generator.devices": Edit(Effect.ALL),
    "generator.cpuThreads": Edit(Effect.GENERATOR),
    "generator.maxConcurrentSequences": Edit(Effect.GENERATOR),
    "generator.kvCache": Edit(Effect.ALL),
    "generator.memoryFraction": Edit(Effect.ALL),
    "generator.leaseSeconds": Edit(Effect.COORDINATOR),
    "generator.extraArgs": Edit(Effect.GENERATOR),
    "generator.maxRestarts": Edit(Effect.AT_ONCE),
    "generator.podTemplate": Edit(Effect.GENERATOR),
    "trainer.replicas": Edit(Effect.ALL, "Checkpoints load at another number of ranks."),
    "trainer.devices": Edit(Effect.ALL, "Checkpoints load at another number of ranks."),
    "trainer.cpuThreads": Edit(Effect.ALL),
    "trainer.zeroStage": Edit(Effect.ALL, "Checkpoints load at another stage."),
    "trainer.microBatchTokens": Edit(Effect.ALL),
    "trainer.activationCheckpointing": Edit(Effect.ALL),
    "trainer.export": Edit(Effect.ALL),
    "trainer.maxRestarts": Edit(Effect.AT_ONCE),
    "trainer.podTemplate": Edit(Effect.ALL, _ALSO_PREPARATION),
    "coordinator.maxRestarts": Edit(Effect.AT_ONCE),
    "coordinator.podTemplate": Edit(Effect.COORDINATOR),
    "weightSync": Edit(Effect.ALL),
    "evaluation.everySteps": _NEXT_EVALUATION,
    "evaluation.samplesPerPrompt": Edit(
        Effect.COORDINATOR, "For prompts issued from then on, also of the evaluation that is under way."
    ),
    "evaluation.temperature": Edit(
        Effect.COORDINATOR, f"From then on; an evaluation under way begins again. {_NEW_SET}"
    ),
    "evaluation.holdSeconds": _NEXT_EVALUATION,
    "checkpoint": Edit(Effect.ALL),
    "budget.maxSteps": Edit(Effect.COORDINATOR),
    "budget.maxDeviceHours": Edit(Effect.AT_ONCE),
    "budget.maxSeconds": Edit(Effect.AT_ONCE),
    "autoscaling": Edit(Effect.AT_ONCE),
    "trackers": Edit(
        Effect.COORDINATOR, "A tracker that is new, or elsewhere, gets the steps of before too."
    ),
    "suspend": Edit(Effect.AT_ONCE),
    "storage.claimName": _of_the_claim("the claim"),
    "storage.size": Edit(
        Effect.AT_ONCE,
        "The claim is enlarged where its StorageClass allows expansion; a smaller size is refused: Kubernetes shrinks none.",
    ),
    "storage.storageClassName": _of_the_claim("the claim's storage class"),
    "storage.accessMode": _of_the_claim("the claim's access mode"),
    "storage.onDelete": Edit(Effect.AT_ONCE),
    "images.coordinator": Edit(Effect.COORDINATOR),
    "images.generator": Edit(Effect.GENERATOR),
    "images.trainer": Edit(Effect.ALL, _ALSO_PREPARATION),
    "images.pullPolicy": Edit(Effect.GENERATORS, "Of the trainer from its next attempt on."),
    "podTemplate": Edit(Effect.ALL),
    "deviceResource": Edit(Effect.ALL),
    "ttlSecondsAfterFinished": Edit(Effect.AT_ONCE),
}
"""By path in a manifest's ``spec``. An entry of a section is of all its fields."""


def edit_of(path: str) -> Edit:
    """The entry of a field, or of the section that it is in.

    Raises:
        KeyError: it has none.

    >>> edit_of("model.scratch.layers").effect
    <Effect.REFUSED: 'Refused'>
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        found = EDITS.get(".".join(parts[:length]))
        if found is not None:
            return found
    raise KeyError(f"spec.{path}: scalerl_api.edits does not say what an edit of it does")


@dataclass(frozen=True)
class Leaf:
    """A field of the spec that holds no further ones."""

    path: str
    """As in a manifest, without ``spec``."""
    names: tuple[str, ...]
    """The same in Python."""
    field: FieldInfo


def leaves(model: type[BaseModel] = RunSpec) -> Iterator[Leaf]:
    """All fields of the spec, in its order."""
    for name, field in model.model_fields.items():
        alias, nested = field.alias or name, nested_model(field.annotation)
        if nested is None or not nested.model_fields:
            yield Leaf(alias, (name,), field)
        else:
            for leaf in leaves(nested):
                yield Leaf(f"{alias}.{leaf.path}", (name, *leaf.names), leaf.field)


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, given or not."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        given = [item for item in get_args(annotation) if item is not type(None)]
        return nested_model(given[0]) if len(given) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
