"""Checks of a run's tasks before it starts: the same for ``scalerl validate``, ``scalerl run`` and the preparation.

Of a file, every row is read, and the problems of all are reported; of a generated source, a sample. The verifier runs in the
processes that grade completions, with the same limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_tasks.answer_checks import Progress, Rejected, by_kind, check_answers, has_own_code
from scalerl_tasks.dataset import DatasetSource, open_dataset
from scalerl_tasks.dataset.overlap import leave_out_overlap
from scalerl_tasks.dataset.table import Table
from scalerl_tasks.dataset.table_source import description
from scalerl_tasks.errors import (
    AnswersError,
    EvaluationSetError,
    JsonlRowsError,
    MixedTaskError,
    ParameterError,
    SourceError,
    SplitError,
    TaskError,
    TemplateError,
    UnknownTaskError,
    VerifierError,
)
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.open_graders import grading_digest, group_problem, open_episodes, open_grading_pool
from scalerl_tasks.prompts import PromptSource, check_template
from scalerl_tasks.row_problems import RowProblems
from scalerl_tasks.sources import RunTasks, open_source, open_tasks, open_warm_start

if TYPE_CHECKING:
    from scalerl_api.spec import ProblemSpec, RunSpec


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """A problem of a run's tasks."""

    field: str
    """Path of the field in the spec, such as ``task.jsonl.path``."""
    text: str
    """What is wrong, and what to do."""

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def task_problems(
    spec: RunSpec,
    directory: Path | None = None,
    *,
    answers: bool = True,
    progress: Progress = lambda text: None,
) -> list[TaskProblem]:
    """The problems of a run's tasks, evaluation sets and warm start. Empty if :func:`~.sources.open_tasks` succeeds and every
    prompt can be graded.

    Args:
        directory: as in :func:`~.sources.open_source`.
        answers: whether to start the graders and to check the reference answers. Otherwise, files are only read.
        progress: called about every ten seconds with a line about a check that takes longer.

    Raises:
        GradingError: no grader could be started.
    """
    return list(_problems(spec, directory, answers, progress))


def _problems(
    spec: RunSpec, directory: Path | None, answers: bool, progress: Progress
) -> Iterator[TaskProblem]:
    sections: list[tuple[str, ProblemSpec]] = [(one.field, one.section) for one in spec.task.tasks]
    sections += [
        (f"evaluation.sets.{at}.task", one.task)
        for at, one in enumerate(spec.evaluation.sets or ())
        if one.task is not None
    ]
    checks = _SectionChecks(directory, answers, progress)
    problems: list[TaskProblem] = []
    for field, section in sections:
        problems += checks.problems(field, section)
    problems += _warm_start_file_problems(spec, directory, progress)
    if problems:  # a file with invalid rows cannot be opened
        yield from problems
        return
    try:
        for path, rows in checks.rejected.items():
            table = Table(path)
            rows.left_out(table.info.digest).write(path)
            table.close()
        tasks = open_tasks(spec, directory)
        if directory is not None and leave_out_overlap(spec, tasks, directory, progress):
            tasks = open_tasks(spec, directory)
    except EvaluationSetError as error:
        yield TaskProblem(error.field, str(error.problem))
        return
    except MixedTaskError as error:
        at = int(error.field.rpartition(".")[2])
        yield _source_problem(error.field, spec.task.tasks[at].section, error.problem)
        return
    except TaskError as error:
        yield _source_problem("task", spec.task.tasks[0].section, error)
        return
    yield from _joint_problems(spec, tasks)


class _SectionChecks:
    """Checks each task and each evaluation set by itself: its source, its rows, and its answers.

    Args:
        directory, answers, progress: as in :func:`task_problems`.
    """

    def __init__(self, directory: Path | None, answers: bool, progress: Progress) -> None:
        self._directory, self._answers, self._progress = directory, answers, progress
        self._checked: dict[tuple[str, str], tuple[str, ...]] = {}
        """The problems of the answers of each file and verifier so far."""
        self.rejected: dict[Path, Rejected] = {}
        """The rows that verifiers have rejected so far of each table in the run's directory."""

    def problems(self, field: str, section: ProblemSpec) -> Iterator[TaskProblem]:
        try:
            if section.prompt is not None:  # before functions of TRL, which are given prompts in it
                check_template(section.prompt.template)
            grader = open_grading_pool(section, directory=self._directory)
            try:
                open_episodes(section, grader)
            except VerifierError as error:
                name = "name" if group_problem(section) else "parameters"
                yield TaskProblem(f"{field}.environment.{name}", str(error))
                return
            scoring = f"{section.scoring!r} {grading_digest(section, self._directory)}"
            if section.dataset is not None:
                with closing(open_dataset(section.dataset, self._directory, self._progress)) as source:
                    self._check_dataset(field, section, scoring, source)
            elif section.jsonl is not None:
                path = (self._directory or Path()) / section.jsonl.path
                with closing(JsonlSource(path, keep_valid=True)) as rows:
                    for line in description(rows)[1:]:
                        self._progress(f"{field}.jsonl: {line}")
                    yield from self._jsonl_problems(field, section, scoring, rows)
            elif self._answers:
                self._check_answers(open_source(section, self._directory), section)
        except AnswersError as error:
            yield from (TaskProblem(f"{field}{_verifier_field(section)}", text) for text in error.texts)
        except JsonlRowsError as error:
            yield from (TaskProblem(f"{field}.{section.source_field}", text) for text in error.texts)
        except (SourceError, TemplateError, VerifierError) as error:
            yield _source_problem(field, section, error)

    def _check_dataset(self, field: str, section: ProblemSpec, scoring: str, source: DatasetSource) -> None:
        """Describe a data set by ``progress``, and check its answers.

        Raises:
            AnswersError, SourceError, TemplateError, VerifierError: problems of it.
        """

        def say(text: str) -> None:
            self._progress(f"{field}.dataset: {text}")

        for line in description(source):
            say(line)
        open_source(section, self._directory)  # whether the prompt format fits
        key = str(source.table.path), scoring
        parts = by_kind(section) if self._answers and key not in self._checked else ()
        self._checked[key] = ()
        for part in parts:
            if has_own_code(part):  # it is asked about some rows, at each start, and no row is left out
                check_answers(source, part, directory=self._directory, progress=say)
            elif self._directory is None:
                check_answers(source, part, progress=say)
            elif source.left_out is None:  # rows are left out once for the whole run
                of_table = self.rejected.setdefault(source.table.path, Rejected())
                check_answers(
                    source, part, len(source), directory=self._directory, progress=say, rejected=of_table
                )

    def _jsonl_problems(
        self, field: str, section: ProblemSpec, scoring: str, source: JsonlSource
    ) -> Iterator[TaskProblem]:
        """Problems of the rows of a file, and of the answers of its valid ones."""
        for text in source.problems.texts:
            yield TaskProblem(f"{field}.jsonl.path", text)
        key = str(source.path.resolve()), scoring
        if self._answers and key not in self._checked:
            self._checked[key] = ()
            try:
                self._check_answers(source, section)
            except AnswersError as error:
                self._checked[key] = error.texts
        for text in self._checked.get(key, ()):
            yield TaskProblem(f"{field}{_verifier_field(section)}", text)

    def _check_answers(self, source: PromptSource, section: ProblemSpec) -> None:
        check_answers(source, section, directory=self._directory, progress=self._progress)


def _warm_start_file_problems(
    spec: RunSpec, directory: Path | None, progress: Progress
) -> Iterator[TaskProblem]:
    """Problems of the separate problems of ``warmStart``: invalid rows, and rows without a solution."""
    given = spec.warm_start
    if given is None or not given.own:
        return
    field = given.own
    source: JsonlSource | DatasetSource | None = None
    try:
        if given.jsonl is not None:
            field, path = f"{field}.path", (directory or Path()) / given.jsonl.path
            source = JsonlSource(path, keep_valid=True, solutions=True)
            yield from (TaskProblem(field, text) for text in source.problems.texts)
            missing = RowProblems(path, source.problems.rows)
        else:
            source = open_warm_start(spec, directory)
            assert source is not None
            missing = RowProblems("the data set", len(source))
        for line in description(source)[1:]:
            progress(f"{given.own}: {line}")
        for index in range(len(source)):
            if not source[index].solution:
                text = (
                    f"{source.place(index)} has no solution: give each row a solution, or leave {given.own} out to train on the task's "
                    "own"
                )
                missing.add(
                    source.line(index) if isinstance(source, JsonlSource) else index, text, "without solution"
                )
        yield from (TaskProblem(field, text) for text in missing.texts)
    except JsonlRowsError as error:
        yield from (TaskProblem(field, text) for text in error.texts)
    except SourceError as error:
        yield TaskProblem(field, str(error))
    finally:
        if source is not None:
            source.close()


def _joint_problems(spec: RunSpec, tasks: RunTasks) -> Iterator[TaskProblem]:
    """Problems of tasks that can be opened: with each other, with the curriculum and with the warm start."""
    for given, opened in zip(tasks.sections, tasks.tasks, strict=True):
        if spec.recipe.curriculum.sec is not None and opened.train.difficulty(0) is None:
            yield TaskProblem(
                "recipe.curriculum.sec",
                f"the task's prompts have no difficulty: give each line of {given.field}.jsonl.path one (of a data set: "
                "columns.difficulty), or use edgeOfCompetence, which measures it",
            )
        if spec.warm_start is not None and not spec.warm_start.own:
            try:
                opened.train[0].worked_solution  # noqa: B018
            except ValueError as error:
                yield TaskProblem("warmStart", f"{error}; leave it out, or take a task with solutions")
    for one in tasks.sets:
        if problem := tasks.overlap(one):
            yield TaskProblem(f"{one.field}.task", problem)


def _verifier_field(task: ProblemSpec) -> str:
    if (environment := task.own_environment) is not None:
        return (
            f".environment.{next(name for name in ('name', 'python', 'url') if getattr(environment, name))}"
        )
    if task.verifier is None:
        return ".verifiers"
    return next(
        (f".verifier.{name}" for name in ("python", "code", "http") if getattr(task.verifier, name)),
        ".verifier.name",
    )


def _source_problem(where: str, task: ProblemSpec, error: Exception) -> TaskProblem:
    """The problem of the task at ``where``, with the field that has to be corrected."""
    field = f".{task.source_field}" + (".path" if task.jsonl is not None else "")
    match error:
        case UnknownTaskError():
            field = ".reasoningGym.name"
        case ParameterError():
            field = f".{task.source_field}.parameters" + (f".{error.parameter}" if error.parameter else "")
        case SplitError():
            field = ".heldOut.size"
        case TemplateError():
            field = ".prompt.template"
        case VerifierError() if str(error).startswith("environment.parameters"):
            field = ".environment.parameters"
        case VerifierError():
            field = _verifier_field(task)
        case SourceError() if task.reasoning_gym is not None:
            field = ""
    return TaskProblem(where + field, str(error))
