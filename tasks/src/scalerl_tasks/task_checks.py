"""Checks of a run's tasks before it starts: the same for ``scalerl validate``, ``scalerl run`` and the preparation.

Of a file, every row is read, and the problems of all are reported; of a generated source, a sample. The verifier runs in the
processes that grade completions, with the same limits.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_processes.waiting import cancel
from scalerl_tasks.dataset import DatasetSource, open_dataset
from scalerl_tasks.dataset.overlap import leave_out_overlap
from scalerl_tasks.dataset.source import description
from scalerl_tasks.dataset.table import LeftOut, Table
from scalerl_tasks.errors import (
    AnswersError,
    EvaluationSetError,
    MixedTaskError,
    ParameterError,
    SourceError,
    SplitError,
    TaskError,
    TemplateError,
    UnknownTaskError,
    VerifierError,
)
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.prompts import Prompt, PromptSource
from scalerl_tasks.row_problems import RowProblems
from scalerl_tasks.scoring import grading_digest, group_problem, open_episodes, open_grading_pool
from scalerl_tasks.sources import RunTasks, open_source, open_tasks, open_warm_start

if TYPE_CHECKING:
    from scalerl_api.spec import ProblemSpec, RunSpec

GENERATED_PROMPTS = 1000
"""Number of evenly spaced prompts that are checked of a generated source."""
DATASET_PROMPTS = 20_000
"""The same for a data set without a run's directory; in one, and by ``scalerl data``, all are checked."""
OWN_CODE_PROMPTS = 200
"""The same for a verifier of the user's own code, which may take seconds for each."""
PROGRESS_SECONDS = 10.0
"""Interval of the lines about a check that takes long."""
_MAX_WORKERS = 32
_MAX_TIMEOUTS = 20
"""After as many checks that took too long, the others are not made."""
_MAX_KNOWN = 1 << 20
"""Different answers whose result is kept, about 100 bytes each."""
_CHUNK = 64
"""Prompts that one grader checks at a time."""
_MAX_REASONS = 8
"""Reasons that are counted; further ones count together."""
_MAX_REASON = 160
_EXAMPLES = 3
"""Rows that are listed for each reason."""
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|(?<= gave )[^ ,]+")
"""A text as ``repr`` shows it, or a reward."""
_OF_THE_ANSWER = frozenset({"exact", "number", "math-verify"})
"""Verifiers whose check depends on the answer alone, so that each different answer is checked once."""

Progress = Callable[[str], None]


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
        spec: the run.
        directory: as in :func:`~.sources.open_source`.
        answers: whether to start the graders and to check the reference answers. Otherwise, files are only read.
        progress: called about every :data:`PROGRESS_SECONDS` with a line about a check that takes longer.

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
    checked: dict[tuple[str, str], tuple[str, ...]] = {}
    rejected: dict[Path, Rejected] = {}
    found = False
    for field, section in sections:
        for problem in _section_problems(field, section, directory, answers, progress, checked, rejected):
            found = True
            yield problem
    for problem in _warm_start_file_problems(spec, directory):
        found = True
        yield problem
    if found:  # a file with invalid rows cannot be opened
        return
    try:
        for path, rows in rejected.items():
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


def _section_problems(
    field: str,
    section: ProblemSpec,
    directory: Path | None,
    answers: bool,
    progress: Progress,
    checked: dict[tuple[str, str], tuple[str, ...]],
    rejected: dict[Path, Rejected],
) -> Iterator[TaskProblem]:
    """Problems of a task or an evaluation set by itself: its source, its rows, and its answers.

    ``checked``: the problems of the answers of each file and verifier so far. ``rejected``: the rows that verifiers have rejected so
    far of each table in the run's directory.
    """
    source: PromptSource | None = None
    try:
        grader = open_grading_pool(section, directory=directory)
        try:
            open_episodes(section, grader)
        except VerifierError as error:
            name = "name" if group_problem(section) else "parameters"
            yield TaskProblem(f"{field}.environment.{name}", str(error))
            return
        scoring = f"{section.scoring!r} {grading_digest(section, directory)}"
        if section.dataset is not None:
            source = open_dataset(section.dataset, directory, progress)
            for line in description(source):
                progress(f"{field}.dataset: {line}")
            open_source(section, directory)  # whether the prompt format fits
            key, say = (str(source.table.path), scoring), partial(_say, progress, f"{field}.dataset: ")
            parts = _parts(section) if answers and key not in checked else ()
            checked[key] = ()
            for part in parts:
                if _own_code(part):  # it is asked about some rows, at each start, and no row is left out
                    check_answers(source, part, directory=directory, progress=say)
                elif directory is None:
                    check_answers(source, part, progress=say)
                elif source.left_out is None:  # rows are left out once for the whole run
                    of_table = rejected.setdefault(source.table.path, Rejected())
                    check_answers(
                        source, part, len(source), directory=directory, progress=say, rejected=of_table
                    )
            return
        if section.jsonl is None:
            if answers:
                check_answers(
                    open_source(section, directory), section, directory=directory, progress=progress
                )
            return
        path = (directory or Path()) / section.jsonl.path
        source = JsonlSource(path, keep_valid=True)
        for text in source.problems.texts:
            yield TaskProblem(f"{field}.jsonl.path", text)
        key = (str(path.resolve()), scoring)
        if answers and key not in checked:
            checked[key] = ()
            try:
                check_answers(source, section, directory=directory, progress=progress)
            except AnswersError as error:
                checked[key] = error.texts
        for text in checked.get(key, ()):
            yield TaskProblem(f"{field}{_verifier_field(section)}", text)
    except AnswersError as error:
        yield from (TaskProblem(f"{field}{_verifier_field(section)}", text) for text in error.texts)
    except (SourceError, VerifierError) as error:
        yield _source_problem(field, section, error)
    finally:
        if isinstance(source, JsonlSource | DatasetSource):
            source.close()


def _say(progress: Progress, prefix: str, text: str) -> None:
    progress(prefix + text)


def _warm_start_file_problems(spec: RunSpec, directory: Path | None) -> Iterator[TaskProblem]:
    """Problems of the separate problems of ``warmStart``: invalid rows, and rows without a solution."""
    given = spec.warm_start
    if given is None or not given.own:
        return
    field = given.own
    source: JsonlSource | DatasetSource | None = None
    try:
        if given.jsonl is not None:
            field, path = f"{field}.path", (directory or Path()) / given.jsonl.path
            source = JsonlSource(path, keep_valid=True)
            yield from (TaskProblem(field, text) for text in source.problems.texts)
            missing = RowProblems(path, source.problems.rows)
        else:
            source = open_warm_start(spec, directory)
            assert source is not None
            missing = RowProblems("the data set", len(source))
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


# --- answers ------------------------------------------------------------------------------------------


def check_answers(
    source: PromptSource,
    spec: ProblemSpec,
    limit: int | None = None,
    *,
    directory: Path | None = None,
    progress: Progress = lambda text: None,
    rejected: Rejected | None = None,
) -> None:
    """Start the graders of a section, and check that its prompts' own answers can be graded.

    Of a data set, up to ``filter.maxRejected`` of the rows may have others: they are listed by ``progress``, and added to ``rejected``.

    Args:
        source: the prompts.
        spec: the section, with the verifier and its limits for one completion, which hold for one check too.
        limit: number of prompts, evenly spread; default: all of a JSONL file, :data:`DATASET_PROMPTS` of a data set,
            :data:`GENERATED_PROMPTS` of another source, :data:`OWN_CODE_PROMPTS` with a verifier of the user's own code.
        directory: base of a relative path of a verifier.
        progress: as in :func:`task_problems`.

    Raises:
        AnswersError: lists the answers that cannot be graded, those of a file with their line.
        VerifierError: the verifier cannot be opened.
        GradingError: no grader could be started.
    """
    if len(parts := _parts(spec)) > 1:
        for part in parts:
            check_answers(source, part, limit, directory=directory, progress=progress, rejected=rejected)
        return
    if limit is None and _own_code(spec):
        limit = OWN_CODE_PROMPTS
    elif limit is None and spec.jsonl is None:
        limit = GENERATED_PROMPTS if spec.dataset is None else DATASET_PROMPTS
    total = len(source)
    count = total if limit is None else min(limit, total)
    where = source.path if isinstance(source, JsonlSource) else spec.source_field
    if isinstance(source, DatasetSource) and spec.dataset is not None:
        found = Rejected()
        asyncio.run(_check_answers(source, spec, directory, count, found, progress))
        texts = found.texts(spec, count, len(source))
        if found.too_many(spec, count, len(source)):
            raise AnswersError(texts)
        for text in texts:
            progress(text)
        if rejected is not None:
            rejected.update(found)
        return
    rows = count + source.problems.total if isinstance(source, JsonlSource) else count
    problems = RowProblems(where, rows)
    asyncio.run(_check_answers(source, spec, directory, count, problems, progress))
    if problems.total:
        raise AnswersError(problems.texts)


class Rejected:
    """The rows of a data set whose answers a verifier rejects, by reason."""

    def __init__(self) -> None:
        self.rows = array("Q")
        self.note = ""
        """Why not all were checked."""
        self.where = "the data set"
        self._counts = Counter[str]()
        self._first: dict[str, list[tuple[int, str]]] = {}

    def add(self, index: int, message: str, reason: str) -> None:
        """Count a row, and keep the message if it is one of the first for this reason."""
        self.rows.append(index)
        reason = reason if reason in self._counts or len(self._counts) < _MAX_REASONS else "other reasons"
        self._counts[reason] += 1
        self._keep(reason, (index, message))

    def _keep(self, reason: str, example: tuple[int, str]) -> None:
        first = self._first.setdefault(reason, [])
        bisect.insort(first, example)
        del first[_EXAMPLES:]

    def update(self, other: Rejected) -> None:
        """Add the rows that another verifier of the same data set rejects."""
        self.rows = array("Q", sorted({*self.rows, *other.rows}))
        self._counts += other._counts
        for reason, examples in other._first.items():
            for example in examples:
                self._keep(reason, example)

    def left_out(self, digest: str) -> LeftOut:
        """As the record beside the table with this digest."""
        examples = [text for first in self._first.values() for _, text in first]
        return LeftOut(digest, sorted(self.rows), dict(self._counts.most_common()), examples)

    def too_many(self, spec: ProblemSpec, checked: int, total: int) -> bool:
        """Whether the run is refused. A sample has to exceed the share by three standard deviations; the user's own code has to
        score each row."""
        assert spec.dataset is not None
        if _own_code(spec):
            return bool(self.rows or self.note)
        allowed = float(spec.dataset.filter.max_rejected) * checked
        return bool(self.note) or len(self.rows) > allowed + (
            3 * math.sqrt(allowed) if checked < total else 0
        )

    def texts(self, spec: ProblemSpec, checked: int, total: int) -> list[str]:
        """Lines with the first rows of each reason, and one with all counts; none without such rows."""
        assert spec.dataset is not None
        if not self.rows and not self.note:
            return []
        listed = [text for first in self._first.values() for _, text in first]
        of = f"{checked:,} rows" if checked == total else f"{checked:,} sampled rows of {total:,}"
        share, limit = len(self.rows) / max(checked, 1), spec.dataset.filter.max_rejected
        own, titles = _own_code(spec), _titles(spec)
        counts = self._counts.most_common()
        reasons = "; ".join(f"{count:,} {reason.removeprefix(f'{titles} ')}" for reason, count in counts)
        what = (
            f"answers that get no reward by {titles}" if own else f"answers that do not score 1 by {titles}"
        )
        text = f"{len(self.rows):,} of {of} ({share:.2%}) have {what}: {reasons}"
        if own:
            text += "; correct the code, or drop such rows by filter.where"
        elif self.too_many(spec, checked, total):
            text += (
                f"; that is more than filter.maxRejected ({limit}): set columns.answer, answerPattern or another verifier, drop them "
                "by filter.where, or raise filter.maxRejected to have them left out"
            )
        else:
            text += "; a run leaves such rows out"
        return [*listed, text + (f"; {self.note}" if self.note else "")]


def _parts(spec: ProblemSpec) -> list[ProblemSpec]:
    """The section with its verifiers of this package alone, and with the user's own code alone."""
    if spec.verifiers is None:
        return [spec]
    kinds = [[one for one in spec.verifiers if one.is_own_code == own] for own in (False, True)]
    return [spec.model_copy(update={"verifiers": kind}) for kind in kinds if kind]


def _own_code(spec: ProblemSpec) -> bool:
    environment = spec.own_environment
    return (environment is not None and environment.is_own_code) or any(
        one.is_own_code for one in spec.scoring
    )


def _titles(spec: ProblemSpec) -> str:
    return " and ".join(one.title for one in (*spec.scoring, spec.own_environment) if one is not None)


def _limit(spec: ProblemSpec) -> str:
    """The time limit of a check, with its field."""
    if (own := spec.own_environment) is not None:
        return f"environment.turnTimeoutSeconds ({own.turn_timeout_seconds})"
    return f"verifier.timeoutSeconds ({max(one.timeout_seconds for one in spec.scoring):g})"


def _reason(error: str) -> str:
    """An error without the values in it.

    >>> _reason("its answer 'Ada' has no number; write only the number")
    'its answer … has no number'
    """
    return _QUOTED.sub("…", error).partition(";")[0][:_MAX_REASON]


async def _check_answers(
    source: PromptSource,
    spec: ProblemSpec,
    directory: Path | None,
    count: int,
    problems: RowProblems | Rejected,
    progress: Progress,
) -> None:
    workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS, max(1, count // _CHUNK))
    total, once = (
        len(source),
        spec.own_environment is None and all(one.name in _OF_THE_ANSWER for one in spec.scoring),
    )
    known: dict[bytes, str | None] = {}
    """Result by key of the answer."""
    waiting: dict[bytes, list[int]] = {}
    """Indices of the prompts in a chunk that is being checked, by that key."""
    started = reported = time.monotonic()
    done = 0

    def record(index: int, error: str | None) -> None:
        nonlocal done
        done += 1
        if error is None:
            return
        kind = f"answers that {_titles(spec)} cannot use"
        if isinstance(source, JsonlSource):
            line = source.line(index)
            problems.add(line, f"{source.path}, line {line}, field 'answer': {error}", kind)
        elif isinstance(source, DatasetSource):
            place, field = source.place(index), source.table.info.fields.get("answer")
            problems.add(index, f"{f'{place}, {field}' if field else place}: {error}", _reason(error))
        else:
            problems.add(index, error, kind)

    async def check(pool: GroupGrader, chunk: dict[bytes, Prompt]) -> None:
        todo = iter(chunk.items())

        def checked(error: str | None) -> None:
            key, prompt = next(todo)
            if error is not None and (
                once or isinstance(source, DatasetSource)
            ):  # other rows have the same answer
                error = error.removeprefix(f"prompt {prompt.id}").lstrip(": ")
                error = error.replace(f" for the prompt {prompt.id}", "")
                error = error.replace(f"the prompt {prompt.id}", "the row")
            if once and len(known) < _MAX_KNOWN:
                known[key] = error
            for index in waiting.pop(key):
                record(index, error)

        await pool.check(list(chunk.values()), checked)

    async with open_grading_pool(spec, workers, directory=directory) as pool:
        running: set[asyncio.Task[None]] = set()
        chunk: dict[bytes, Prompt] = {}
        try:
            for rank in range(count):
                index = rank * total // count
                prompt = source[index]
                key = blake2b(prompt.answer.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                key = key if once else index.to_bytes(8)
                if key in known:
                    record(index, known[key])
                elif key in waiting:
                    waiting[key].append(index)
                else:
                    waiting[key], chunk[key] = [index], prompt
                if len(chunk) < _CHUNK and rank < count - 1:
                    continue
                if chunk:
                    running.add(asyncio.create_task(check(pool, chunk)))
                    chunk = {}
                while running and (len(running) > workers or rank == count - 1):
                    _, running = await _first(running)
                    if (now := time.monotonic()) - reported >= PROGRESS_SECONDS:
                        reported = now
                        left = (now - started) * (count - done) / max(done, 1)
                        progress(
                            f"checked {done:,} of {count:,} answers of {problems.where}; about {left:,.0f} s left"
                        )
                    if pool.counts.timeouts >= _MAX_TIMEOUTS:
                        text = (
                            f"stopped after {done:,} of {count:,} answers: the checks of {_MAX_TIMEOUTS} took longer than "
                            f"{_limit(spec)} each"
                        )
                        problems.note = text
                        return
        finally:
            await cancel(*running)


async def _first(running: set[asyncio.Task[None]]) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
    """Wait until a task is done, or for :data:`PROGRESS_SECONDS`; returns those that are done, and the others."""
    finished, pending = await asyncio.wait(
        running, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    for task in finished:
        task.result()
    return finished, pending
