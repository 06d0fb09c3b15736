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
        asyncio.run(_check_answers(source, spec, directory, count, found, progress, timings))
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
    asyncio.run(_check_answers(source, spec, directory, count, problems, progress, timings))
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


async def _check_answers(
    source: PromptSource,
    spec: ProblemSpec,
    directory: Path | None,
    count: int,
    problems: RowProblems | Rejected,
    progress: Progress,
    timings: Timings,
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
            # Other rows have the same answer.
            if error is not None and (once or isinstance(source, DatasetSource)):
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
                    finished, running = await asyncio.wait(
                        running, timeout=timings.progress_seconds, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in finished:
                        task.result()
                    if (now := time.monotonic()) - reported >= timings.progress_seconds:
                        reported = now
                        left = (now - started) * (count - done) / max(done, 1)
                        progress(
                            f"checked {done:,} of {count:,} answers of {problems.where}; about {left:,.0f} s left"
                        )
                    if pool.counts.timeouts >= timings.max_timeouts:
                        text = (
                            f"stopped after {done:,} of {count:,} answers: the checks of {timings.max_timeouts} took longer than "
                            f"{_limit(spec)} each"
                        )
                        problems.note = text
                        return
        finally:
            await cancel(*running)
