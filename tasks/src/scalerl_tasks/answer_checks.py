"""Checks of prompts' own answers by their verifier, before a run."""

from __future__ import annotations

import asyncio
import bisect
import math
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_processes.waiting import cancel
from scalerl_tasks.dataset import DatasetSource
from scalerl_tasks.dataset.table import LeftOut
from scalerl_tasks.errors import AnswersError
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.open_graders import open_grading_pool
from scalerl_tasks.prompts import Prompt, PromptSource
from scalerl_tasks.row_problems import RowProblems

if TYPE_CHECKING:
    from scalerl_api.spec import ProblemSpec

OWN_CODE_PROMPTS = 200
"""Number of evenly spaced prompts that are checked with a verifier of the user's own code, which may take seconds for each."""
_MAX_WORKERS = 32
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
class Timings:
    """How long checks may take."""

    max_timeouts: int = 20
    """After as many checks that took too long, the others are not made."""
    progress_seconds: float = 10.0
    """Interval of the lines about a check that takes long."""


TIMINGS = Timings()


def check_answers(
    source: PromptSource,
    spec: ProblemSpec,
    limit: int | None = None,
    *,
    directory: Path | None = None,
    progress: Progress = lambda text: None,
    rejected: Rejected | None = None,
    timings: Timings = TIMINGS,
) -> None:
    """Start the graders of a section, and check that its prompts' own answers can be graded.

    Of a data set, up to ``filter.maxRejected`` of the rows may have others: they are listed by ``progress``, and added to ``rejected``.

    Args:
        spec: the section, with the verifier and its limits for one completion, which hold for one check too.
        limit: number of prompts, evenly spread; default: ``answers_checked`` of the source's kind, :data:`OWN_CODE_PROMPTS` with a
            verifier of the user's own code.
        directory: base of a relative path of a verifier.
        progress: as in :func:`task_problems`.

    Raises:
        AnswersError: lists the answers that cannot be graded, those of a file with their line.
        VerifierError: the verifier cannot be opened.
        GradingError: no grader could be started.
    """
    if len(parts := by_kind(spec)) > 1:
        for part in parts:
            check_answers(
                source,
                part,
                limit,
                directory=directory,
                progress=progress,
                rejected=rejected,
                timings=timings,
            )
        return
    if limit is None and has_own_code(spec):
        limit = OWN_CODE_PROMPTS
    elif limit is None:
        limit = spec.source.answers_checked
    total = len(source)
    count = total if limit is None else min(limit, total)
    where = source.path if isinstance(source, JsonlSource) else spec.source_field
    if isinstance(source, DatasetSource) and spec.dataset is not None:
        found = Rejected()
        asyncio.run(_AnswerChecker(source, spec, count, found, progress, timings).run(directory))
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
    asyncio.run(_AnswerChecker(source, spec, count, problems, progress, timings).run(directory))
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
        if has_own_code(spec):
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
        own, titles = has_own_code(spec), _titles(spec)
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


def by_kind(spec: ProblemSpec) -> list[ProblemSpec]:
    """The section with its verifiers of this package alone, and with the user's own code alone."""
    if spec.verifiers is None:
        return [spec]
    kinds = [[one for one in spec.verifiers if one.is_own_code == own] for own in (False, True)]
    return [spec.model_copy(update={"verifiers": kind}) for kind in kinds if kind]


def has_own_code(spec: ProblemSpec) -> bool:
    """Whether code of the user scores, or is the environment."""
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


class _AnswerChecker:
    """Checks the answers of ``count`` evenly spread prompts, and adds those that cannot be graded to ``problems``."""

    def __init__(
        self,
        source: PromptSource,
        spec: ProblemSpec,
        count: int,
        problems: RowProblems | Rejected,
        progress: Progress,
        timings: Timings,
    ) -> None:
        self._source, self._spec, self._count, self._problems = source, spec, count, problems
        self._progress, self._timings = progress, timings
        self._once = spec.own_environment is None and all(one.name in _OF_THE_ANSWER for one in spec.scoring)
        """Whether each different answer is checked once."""
        self._known: dict[bytes, str | None] = {}
        """Result by key of the answer."""
        self._waiting: dict[bytes, list[int]] = {}
        """Indices of the prompts in a chunk that is being checked, by that key."""
        self._running: set[asyncio.Task[None]] = set()
        """Of each chunk that is being checked."""
        self._done = 0
        self._started = self._reported = time.monotonic()

    async def run(self, directory: Path | None) -> None:
        """Check all answers, or end with a note in ``problems`` after too many checks that took too long."""
        count, total = self._count, len(self._source)
        workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS, max(1, count // _CHUNK))
        chunk: dict[bytes, Prompt] = {}
        async with open_grading_pool(self._spec, workers, directory=directory) as pool:
            try:
                for rank in range(count):
                    is_last = rank == count - 1
                    self._enqueue(rank * total // count, chunk)
                    if len(chunk) < _CHUNK and not is_last:
                        continue
                    if chunk:
                        self._running.add(asyncio.create_task(self._check(pool, chunk)))
                        chunk = {}
                    while self._running and (len(self._running) > workers or is_last):
                        await self._wait()
                        self._report_progress()
                        if pool.counts.timeouts >= self._timings.max_timeouts:
                            self._problems.note = self._timeouts_note()
                            return
            finally:
                await cancel(*self._running)

    def _enqueue(self, index: int, chunk: dict[bytes, Prompt]) -> None:
        """Add the prompt at ``index`` to ``chunk``, unless its answer is known or being checked."""
        prompt = self._source[index]
        if self._once:
            key = blake2b(prompt.answer.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        else:
            key = index.to_bytes(8)
        if key in self._known:
            self._record(index, self._known[key])
        elif key in self._waiting:
            self._waiting[key].append(index)
        else:
            self._waiting[key], chunk[key] = [index], prompt

    async def _check(self, pool: GroupGrader, chunk: dict[bytes, Prompt]) -> None:
        todo = iter(chunk.items())

        def checked(error: str | None) -> None:
            key, prompt = next(todo)
            # Other rows have the same answer.
            if error is not None and (self._once or isinstance(self._source, DatasetSource)):
                error = _without_id(error, prompt.id)
            if self._once and len(self._known) < _MAX_KNOWN:
                self._known[key] = error
            for index in self._waiting.pop(key):
                self._record(index, error)

        await pool.check(list(chunk.values()), checked)

    def _record(self, index: int, error: str | None) -> None:
        self._done += 1
        if error is None:
            return
        source, kind = self._source, f"answers that {_titles(self._spec)} cannot use"
        if isinstance(source, JsonlSource):
            line = source.line(index)
            self._problems.add(line, f"{source.path}, line {line}, field 'answer': {error}", kind)
        elif isinstance(source, DatasetSource):
            place, field = source.place(index), source.table.info.fields.get("answer")
            where = f"{place}, {field}" if field else place
            self._problems.add(index, f"{where}: {error}", _reason(error))
        else:
            self._problems.add(index, error, kind)

    async def _wait(self) -> None:
        """Wait for a chunk, at most until the next line of progress; raises what its check raised."""
        finished, self._running = await asyncio.wait(
            self._running, timeout=self._timings.progress_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in finished:
            task.result()

    def _report_progress(self) -> None:
        now, done, count = time.monotonic(), self._done, self._count
        if now - self._reported < self._timings.progress_seconds:
            return
        self._reported = now
        left = (now - self._started) * (count - done) / max(done, 1)
        self._progress(
            f"checked {done:,} of {count:,} answers of {self._problems.where}; about {left:,.0f} s left"
        )

    def _timeouts_note(self) -> str:
        return (
            f"stopped after {self._done:,} of {self._count:,} answers: the checks of {self._timings.max_timeouts} took longer than "
            f"{_limit(self._spec)} each"
        )


def _without_id(error: str, prompt_id: str) -> str:
    """An error without the id of the prompt.

    >>> _without_id("prompt 7: no number in the answer of the prompt 7", "7")
    'no number in the answer of the row'
    """
    error = error.removeprefix(f"prompt {prompt_id}").lstrip(": ")
    return error.replace(f" for the prompt {prompt_id}", "").replace(f"the prompt {prompt_id}", "the row")
