"""Opens the prompts of a run's tasks and evaluation sets; what scores them: :mod:`.open_graders`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scalerl_tasks.dataset import DatasetSource, open_dataset
from scalerl_tasks.errors import (
    EvaluationSetError,
    JsonlError,
    MixedTaskError,
    SourceError,
    TaskError,
)
from scalerl_tasks.gym import ReasoningGymSource, gym_task
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.open_graders import grading_digest
from scalerl_tasks.plugins import Plugin, open_plugin_source
from scalerl_tasks.prompts import Prompt, PromptSource, RenderedPrompt, check_template, render_prompt
from scalerl_tasks.split import (
    HeldOut,
    HeldOutGraphs,
    Train,
    choose_held_out,
    open_train,
    select_prompts,
)

if TYPE_CHECKING:
    from scalerl_api.source import HeldOutSpec
    from scalerl_api.spec import ProblemSpec, PromptSpec, RunSpec, TaskSpec, TrainingTask

SELECTION_SEED: Final = 0
"""Of the selection of held-out prompts and of evaluation sets, which is one for all runs of a source, so that they can be compared."""


def open_source(spec: ProblemSpec, directory: Path | None = None) -> PromptSource:
    """Open the prompt source of a task section.

    Args:
        directory: base of a relative ``jsonl.path``, and the run's directory, with the table of ``dataset``; by default the
            working directory, and the user's cache.

    Raises:
        SourceError: see :class:`.ReasoningGymSource`, :class:`.JsonlSource`, :func:`~scalerl_tasks.dataset.open_dataset` and :func:`.open_plugin_source`.
    """
    task = gym_task(spec)
    if task is not None:
        return ReasoningGymSource(task)
    if spec.jsonl is not None:
        return JsonlSource((directory or Path()) / spec.jsonl.path)
    if spec.dataset is not None:
        source = open_dataset(spec.dataset, directory)
        if source.table.info.chat and spec.prompt is not None and spec.prompt.format == "Raw":
            raise SourceError(
                "task.dataset: its prompts have system messages or several turns, which only a chat template can render: set "
                "prompt.format to Chat, or map columns.prompt to one message, such as messages[0].content"
            )
        needs_answers = not all(one.is_own_code for one in spec.scoring)
        if "answer" not in source.table.info.fields and needs_answers:
            raise SourceError(
                f"task.dataset: the data have no answers, which {' and '.join(one.title for one in spec.scoring)} needs: say where "
                f"answer is, such as columns: {{answer: COLUMN}} (columns: {', '.join(source.table.info.columns)})"
            )
        return source
    if spec.plugin is not None:
        return open_plugin_source(Plugin(spec.plugin.name, spec.plugin.parameters))
    raise SourceError("task: give one of reasoningGym, jsonl, dataset and plugin")


def open_warm_start(spec: RunSpec, directory: Path | None = None) -> JsonlSource | DatasetSource | None:
    """Open the separate problems of ``warmStart``; None if there are none. ``directory``: as for :func:`open_source`.

    Raises:
        SourceError: as :func:`open_source`.
    """
    given = spec.warm_start
    if given is None or not given.own:
        return None
    if given.jsonl is not None:
        return JsonlSource((directory or Path()) / given.jsonl.path, solutions=True)
    assert given.dataset is not None
    columns = given.dataset.columns
    if columns.answer is None and columns.solution is not None:
        columns = columns.model_copy(update={"answer": columns.solution})
    try:
        return open_dataset(given.dataset.model_copy(update={"columns": columns}), directory, solutions=True)
    except JsonlError:
        raise
    except SourceError as error:
        raise SourceError(str(error).replace("task.dataset", "warmStart.dataset")) from error


@dataclass(frozen=True, slots=True)
class Task:
    """An opened task section: training prompts, held-out prompts, template.

    ``train.digest`` and ``held_out.digest`` identify the sets; equal digests mean equal prompts.
    """

    train: Train
    held_out: HeldOut
    template: str | None = None
    system: str | None = None
    grading: str = ""
    """:func:`grading_digest` of the section."""

    def render(self, prompt: Prompt) -> RenderedPrompt:
        return render_prompt(prompt, self.template, self.system)


@dataclass(frozen=True, slots=True)
class EvaluationPrompts:
    """The prompts of an evaluation set, with their source, prompt format and verifier."""

    name: str
    field: str
    """Path of the task in the spec, with the index of the set."""
    prompts: HeldOut
    spec: ProblemSpec
    """Section with source, prompt format and verifier."""
    prompt: PromptSpec
    grading: str = ""
    """:func:`grading_digest` of the section."""

    @property
    def digest(self) -> str:
        """Digest of the rendered prompts and the name of their verifier; a score also depends on :attr:`grading`."""
        parts = (
            self.prompts.digest,
            "+".join(one.title for one in (*self.spec.scoring, self.spec.environment) if one is not None),
            self.prompt.model_dump_json(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RunTasks:
    """All prompts of a run."""

    tasks: tuple[Task, ...]
    """The training tasks, in the order of ``task.mix``. Their training prompts have no text of an evaluation set or of any
    task's held-out prompts."""
    sections: tuple[TrainingTask, ...]
    """Sections of the tasks in the spec."""
    sets: tuple[EvaluationPrompts, ...]
    """The evaluation sets with their own task, in the order of the spec."""
    digest: str
    """Digest of the training prompts: equal digests mean equal prompts, in equal proportions."""

    @property
    def grading(self) -> tuple[str, ...]:
        """:func:`grading_digest` of each task, then of each set."""
        return (*(task.grading for task in self.tasks), *(one.grading for one in self.sets))

    def overlap(self, one: EvaluationPrompts) -> str:
        """The reason why a training file and an evaluation set cannot be used together: the file has prompts of the set. Empty
        if no such prompt is found.

        Generated training prompts are too many to be searched; :class:`~.split.Train` excludes those with the text of a set. It also
        does so for ``dataset``.
        """
        for given, task in zip(self.sections, self.tasks, strict=True):
            file = given.section.jsonl
            if file is not None and (shared := task.train.shared(one.prompts)):
                return (
                    f"{len(shared)} training prompts of {given.field}.jsonl.path ({file.path}) have the text of a "
                    f"prompt of this set, the first of them {shared[0].id!r}: take them out of one of the two"
                )
        return ""


def open_task(spec: TaskSpec, directory: Path | None = None, others: Sequence[HeldOut] = ()) -> Task:
    """Open the source, select the held-out set, and check the template. ``others``: further prompts to exclude from training.

    Raises:
        SourceError: the source is invalid or too small for the held-out set.
        TemplateError: the template is invalid.
        VerifierError: the code of the verifier cannot be read.
    """
    check_template(spec.prompt.template)
    source = open_source(spec, directory)
    given = spec.held_out
    held_out = choose_held_out(source, given.size, SELECTION_SEED, _held_out_graphs(given))
    train = open_train(source, held_out, given.size, SELECTION_SEED, others, _overlap(source))
    return Task(train, held_out, spec.prompt.template, spec.prompt.system, grading_digest(spec, directory))


def open_tasks(spec: RunSpec, directory: Path | None = None) -> RunTasks:
    """Open the tasks of a run, and its evaluation sets.

    Raises:
        SectionError: a set or a task of a mix cannot be opened; its ``problem`` is the error of :func:`open_task`.
        SourceError, TemplateError: the only task cannot be opened; see :func:`open_task`.
    """
    sets = tuple(
        _open_set(at, spec, directory)
        for at, one in enumerate(spec.evaluation.sets or ())
        if one.task is not None
    )
    evaluated = [one.prompts for one in sets]
    sections = tuple(spec.task.tasks)
    if spec.task.mix is None:
        task = open_task(sections[0].section, directory, evaluated)
        return RunTasks((task,), sections, sets, task.train.digest)
    tasks = _open_mix(sections, directory, evaluated)
    parts = [
        (one.name, str(one.weight), task.train.digest) for one, task in zip(sections, tasks, strict=True)
    ]
    return RunTasks(tasks, sections, sets, hashlib.sha256(repr(parts).encode()).hexdigest())


def _open_mix(
    mix: Sequence[TrainingTask], directory: Path | None, others: Sequence[HeldOut]
) -> tuple[Task, ...]:
    """Open the tasks of a mix, each without the held-out prompts of the others among its training prompts."""
    sources, held_out, tasks = [], [], []
    for one in mix:
        with _section(one):
            check_template(one.section.prompt.template)
            sources.append(source := open_source(one.section, directory))
            given = one.section.held_out
            held_out.append(choose_held_out(source, given.size, SELECTION_SEED, _held_out_graphs(given)))
    for at, (one, source) in enumerate(zip(mix, sources, strict=True)):
        with _section(one):
            excluded = [*held_out[:at], *held_out[at + 1 :], *others]
            size = one.section.held_out.size
            train = open_train(source, held_out[at], size, SELECTION_SEED, excluded, _overlap(source))
            prompt, grading = one.section.prompt, grading_digest(one.section, directory)
            tasks.append(Task(train, held_out[at], prompt.template, prompt.system, grading))
    return tuple(tasks)


def _overlap(source: PromptSource) -> list[int]:
    return source.overlap if isinstance(source, DatasetSource) else []


def _held_out_graphs(given: HeldOutSpec) -> HeldOutGraphs | None:
    return None if given.graphs is None else HeldOutGraphs(Fraction(given.graphs), SELECTION_SEED)


@contextmanager
def _section(one: TrainingTask) -> Iterator[None]:
    try:
        yield
    except TaskError as error:
        raise MixedTaskError(one.name, one.field, error) from error


def _open_set(at: int, spec: RunSpec, directory: Path | None) -> EvaluationPrompts:
    given = (spec.evaluation.sets or [])[at]
    task = given.task
    assert task is not None
    prompt, field = task.prompt or spec.task.prompt, f"evaluation.sets.{at}"
    try:
        check_template(prompt.template)
        prompts = select_prompts(open_source(task, directory), task.size, SELECTION_SEED)
        grading = grading_digest(task, directory)
    except TaskError as error:
        raise EvaluationSetError(given.name, field, error) from error
    return EvaluationPrompts(given.name, field, prompts, task, prompt, grading)
