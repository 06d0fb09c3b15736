"""Opens the objects of a run's task section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_tasks.errors import SourceError, VerifierError
from scalerl_tasks.grading.grading_pool import MIN_MEMORY_BYTES, GradingPool
from scalerl_tasks.gym import GymTask, ReasoningGymSource
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.opgraph import OpGraphSource, OpGraphTask
from scalerl_tasks.prompts import Prompt, PromptSource, RenderedPrompt, check_template, render_prompt
from scalerl_tasks.split import HeldOut, Train, split_held_out
from scalerl_tasks.verifiers import Verifier, VerifierConfig

if TYPE_CHECKING:
    from scalerl_api.spec import TaskSpec


def open_source(
    spec: TaskSpec, directory: Path | None = None
) -> ReasoningGymSource | JsonlSource | OpGraphSource:
    """Open the prompt source of a task section.

    Args:
        spec: the section.
        directory: base of a relative ``jsonl.path``; the working directory by default.

    Raises:
        SourceError: see :func:`open_reasoning_gym`, :func:`open_jsonl` and :class:`~scalerl_tasks.opgraph.OpGraphTask`.
    """
    task = _gym_task(spec)
    if task is not None:
        return ReasoningGymSource(task)
    if spec.jsonl is not None:
        return JsonlSource((directory or Path()) / spec.jsonl.path)
    if (section := spec.op_graph) is not None:
        low, high = section.operations
        return OpGraphSource(
            OpGraphTask(
                (low, high), section.contexts, section.modes, section.distractors, section.seed, section.size
            )
        )
    raise SourceError("task: give one of reasoningGym, jsonl and opGraph")


def verifier_config(spec: TaskSpec) -> VerifierConfig:
    """The verifier of a task section, for a grading process to open."""
    name = spec.verifier.name
    return VerifierConfig(name, task=_gym_task(spec) if name == "reasoning-gym" else None)


def open_grading_pool(spec: TaskSpec) -> GradingPool:
    """The grading pool of a task section; not started yet.

    Raises:
        VerifierError: ``verifier.memory`` is too small to grade anything.
    """
    from scalerl_api.fields import quantity_bytes  # a caller with a TaskSpec has imported it already

    memory_bytes = quantity_bytes(spec.verifier.memory)
    if memory_bytes < MIN_MEMORY_BYTES:
        raise VerifierError(f"task.verifier.memory is {spec.verifier.memory}; a grader needs at least 64Mi")
    return GradingPool(
        verifier_config(spec),
        workers=spec.verifier.workers,
        timeout_seconds=spec.verifier.timeout_seconds,
        memory_bytes=memory_bytes,
    )


@dataclass(frozen=True, slots=True)
class Task:
    """An opened task section: training prompts, held-out prompts, template.

    ``train.digest`` and ``held_out.digest`` identify the sets; equal digests mean equal prompts.
    """

    train: Train
    held_out: HeldOut
    template: str | None = None
    system: str | None = None

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """The prompt in the task's template."""
        return render_prompt(prompt, self.template, self.system)


def open_task(spec: TaskSpec, directory: Path | None = None) -> Task:
    """Open the source, take the held-out set, check the template.

    Raises:
        SourceError: the source is bad or too small for the held-out set.
        TemplateError: the template is bad.
    """
    check_template(spec.prompt.template)
    train, held_out = split_held_out(open_source(spec, directory), spec.held_out.size, spec.held_out.seed)
    return Task(train, held_out, spec.prompt.template, spec.prompt.system)


def check_answers(source: PromptSource, verifier: Verifier, limit: int | None = None) -> None:
    """Check that the prompts' own answers can be graded: all of them, or ``limit`` spread evenly over the
    source.

    Raises:
        VerifierError: the first answer that cannot be graded.
    """
    total = len(source)
    count = total if limit is None else min(limit, total)
    for rank in range(count):
        verifier.check(source[rank * total // count])


def _gym_task(spec: TaskSpec) -> GymTask | None:
    section = spec.reasoning_gym
    if section is None:
        return None
    return GymTask(section.name, section.parameters, section.seed, section.size)
