"""Opens ``task.dataset``: makes its table unless there is one, and reads prompts from it."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl_tasks.dataset.layouts import recognize
from scalerl_tasks.dataset.readers import find_files, read_rows, row_word
from scalerl_tasks.dataset.rows import Mapper, RowProblem, TableRow
from scalerl_tasks.dataset.table import LeftOut, Table, TableInfo, TableWriter
from scalerl_tasks.errors import DatasetError, JsonlError, SourceError
from scalerl_tasks.jsonl import JsonlSource
from scalerl_tasks.prompts import Prompt, PromptSource, check_index
from scalerl_tasks.repeats import Repeats
from scalerl_tasks.row_problems import RowProblems

if TYPE_CHECKING:
    from scalerl_api.dataset_source import DatasetSource as DatasetSpec

log = logging.getLogger("scalerl_tasks.dataset")

FOLDER = "data"
"""Folder of the tables in a run's directory."""
_VERSION = 1
_CACHE_VERSION = 3
"""Of tables in the user's cache: raised by a check that refuses rows or expressions of earlier tables, and by other ids."""
_PROGRESS_SECONDS = 10.0
_HEAD = 100
"""Rows by whose values the layout is recognized."""
_OF_THE_RUN = {"filter": {"max_rejected", "overlap"}}
"""Fields that do not change the table: of a run, they say which of its rows are left out."""


class DatasetSource:
    """A :class:`~scalerl_tasks.PromptSource` over the rows of a table that are not left out."""

    def __init__(self, table: Table, left_out: LeftOut | None = None) -> None:
        self.table, self.left_out = table, left_out
        rows = [] if left_out is None else left_out.rows
        # The p-th row that is kept is p + (number of rows left out before it); at these positions that number increases.
        self._steps = array("Q", (row - rank for rank, row in enumerate(rows)))
        self.digest = table.info.digest
        if rows:
            self.digest = hashlib.sha256(f"{self.digest}/{rows}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.table) - len(self._steps)

    @property
    def overlap(self) -> list[int]:
        """Indices of prompts that overlap with held-out ones of the run."""
        return [] if self.left_out is None else self.left_out.overlap or []

    def row(self, index: int) -> TableRow:
        check_index(index, len(self))
        return self.table[index + bisect.bisect_right(self._steps, index)]

    def __getitem__(self, index: int, /) -> Prompt:
        row = self.row(index)
        return Prompt(
            id=row.id,
            text=row.prompt,
            answer=row.answer,
            solution=row.solution,
            difficulty=row.difficulty,
            metadata=row.metadata | self._mapped(row),
            labels=row.labels,
            system=row.system,
            turns=tuple((role, text) for role, text in row.turns),
        )

    def _mapped(self, row: TableRow) -> dict[str, Any]:
        """Mapped columns by their own names, for rewards that read them."""
        info = self.table.info
        given = {name: info.fields.get(name, "") for name in ("answer", "solution", "difficulty")}
        found = {
            text.removeprefix("json(").removesuffix(")"): getattr(row, name) for name, text in given.items()
        }
        return {
            name: value for name, value in found.items() if name in info.columns and name not in row.metadata
        }

    def difficulty(self, index: int, /) -> float | None:
        return self.row(index).difficulty

    def place(self, index: int) -> str:
        """File and row of the prompt at ``index``."""
        row, info = self.row(index), self.table.info
        return f"{info.files[row.file]}, {info.words[row.file]} {row.row:,}"

    def close(self) -> None:
        self.table.close()


def open_dataset(
    spec: DatasetSpec,
    directory: Path | None = None,
    progress: Callable[[str], None] = log.info,
    *,
    solutions: bool = False,
) -> DatasetSource:
    """Open a data set. Its table is in ``directory``'s folder ``data``, or, without a directory, in the user's cache; it is made
    if it is not there. In a run's directory it is kept for the whole run, whatever becomes of the files.

    Args:
        directory: the run's directory, and the base of relative paths.
        progress: called about every ten seconds with a line about the rows that were read.
        solutions: as of :class:`.Repeats`.

    Raises:
        SourceError: no file, or one that cannot be read; an expression that cannot be parsed, or without a value in any row; no row
            left; no room for the table. A :class:`JsonlError` for rows that cannot be used.
    """
    settings = json.dumps(
        # Without defaults, so that a field of a later release does not change the name of a run's table.
        [
            _VERSION,
            spec.model_dump(mode="json", exclude_defaults=True, exclude=_OF_THE_RUN),
            *["solutions"] * solutions,
        ],
        sort_keys=True,
    )
    kept = None
    if directory is not None:
        kept = directory / FOLDER / f"{_key(settings)}.rows"
        if kept.exists():
            table = Table(kept)
            return DatasetSource(table, LeftOut.of(table))
    files, revision = _files(spec, directory or Path())
    stamps = [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files)]
    identity = [
        _CACHE_VERSION,
        settings,
        revision,
        [(str(file.resolve()), *stamp) for file, stamp in zip(files, stamps, strict=True)],
    ]
    cached = cache_folder() / f"{_key(json.dumps(identity))}.rows"
    target = kept or cached
    if cached.exists() and kept is not None:
        _link_or_copy(cached, kept)
    elif not target.exists():
        _write(
            spec,
            files,
            target,
            TableInfo(
                "", 0, list(map(str, files)), list(map(row_word, files)), 0, revision=revision, stamps=stamps
            ),
            progress,
            solutions,
        )
    return DatasetSource(Table(target))


def cache_folder() -> Path:
    """The user's cache of tables, for commands without a run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalerl" / "datasets"


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _link_or_copy(cached: Path, target: Path) -> None:
    staged = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(cached, staged)
        except OSError:  # another file system
            shutil.copyfile(cached, staged)
        staged.rename(target)
    except OSError as error:
        raise SourceError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        staged.unlink(missing_ok=True)


def _files(spec: DatasetSpec, directory: Path) -> tuple[list[Path], str]:
    """The files, and the commit of a data set of a hub."""
    if spec.hub is not None:
        from scalerl_tasks.dataset.hub import download

        return download(spec.hub)
    return find_files(spec.files or (), directory), ""


def _write(
    spec: DatasetSpec,
    files: list[Path],
    target: Path,
    info: TableInfo,
    progress: Callable[[str], None],
    solutions: bool,
) -> None:
    """Write the table of the files' rows to ``target``, with ``info`` completed."""
    started = reported = time.monotonic()
    rows = ((at, path, *row) for at, path in enumerate(files) for row in read_rows(path))
    with TableWriter(target) as table:
        head = list(itertools.islice(rows, _HEAD))
        selection = _RowSelection(spec, table, solutions)
        if first := _first_values(given for *_, given in head if isinstance(given, dict)):
            selection.mapper_of(first)
        for read, (at, path, number, given) in enumerate(itertools.chain(head, rows), start=1):
            if not read % 1024 and (now := time.monotonic()) - reported >= _PROGRESS_SECONDS:
                reported = now
                progress(
                    f"read {read:,} rows, {read / (now - started):,.0f} a second; {path}, {row_word(path)} {number:,}"
                )
            selection.add(at, path, number, given)
        selection.complete(info)
        table.finish(info)


class _RowSelection:
    """Maps rows, and adds those to a table that pass the filter and are no duplicates."""

    def __init__(self, spec: DatasetSpec, table: TableWriter, solutions: bool) -> None:
        self._spec, self._table, self._solutions = spec, table, solutions
        self._mapper: Mapper | None = None
        self._columns: list[str] = []
        self._problems = RowProblems(f"task.dataset.{'hub' if spec.hub else 'files'}")
        self._repeats = Repeats(solutions)
        self._read = 0
        self._chat = False

    def mapper_of(self, values: dict[str, Any]) -> Mapper:
        """The mapper of all rows, which is made for ``values`` of the columns if there is none yet."""
        if self._mapper is None:
            self._mapper = Mapper(self._spec, values, recognize(values), self._solutions)
            self._columns = list(values)
        return self._mapper

    def add(self, at: int, path: Path, number: int, given: dict[str, Any] | JsonlError) -> None:
        """Add row ``number`` of ``path``, the file ``at`` this index, or count why not."""
        self._read += 1
        if isinstance(given, JsonlError):
            self._problems.add_error(given)
            return
        mapper = self.mapper_of(given)
        try:
            row = mapper.map(given, at, number)
            raw = None if row is None else self._table.encode(row)
        except RowProblem as problem:
            self._add_problem(path, number, str(problem), problem.field, problem.kind)
            return
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            what = f"cannot be written as JSON: {error}; correct it, or leave the column out of task.dataset.metadata"
            self._add_problem(path, number, what, None, "not JSON")
            return
        if (
            row is None
            or raw is None
            or self._repeats.is_repeat(row.prompt, row.turns, row.answer, row.solution)
        ):
            return
        if "id" in mapper.texts and not self._repeats.is_new_id(row.id):
            what = f"{row.id!r} is also the id of an earlier row; ids must be unique: leave columns.id out to have one made"
            self._add_problem(path, number, what, mapper.texts["id"], "repeated id")
            return
        self._chat = self._chat or bool(row.system or row.turns)
        self._table.add(raw)

    def _add_problem(self, path: Path, number: int, problem: str, field: str | None, kind: str) -> None:
        self._problems.add_error(
            DatasetError(path, problem, row=number, word=row_word(path), field=field, kind=kind)
        )

    def complete(self, info: TableInfo) -> None:
        """Add to ``info`` what is known after the last row.

        Raises:
            JsonlError: rows cannot be used.
            SourceError: no row, none left, or an expression without a value in any row.
        """
        self._problems.rows = self._read
        self._problems.check()
        mapper = self._mapper
        if mapper is None:
            raise SourceError(f"{', '.join(info.files[:3])}: no rows; name files, or a split, that have some")
        mapper.check_all()
        dropped = self._dropped(mapper)
        if not self._table.rows:
            raise SourceError(
                f"task.dataset.filter: no row is left of {self._read:,}: "
                + "; ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            )
        info.read, info.dropped, info.chat, info.columns = self._read, dropped, self._chat, self._columns
        info.fields, info.labels, info.pattern = mapper.texts, mapper.label_texts, mapper.pattern
        if mapper.layout is not None:
            info.layout, info.programs = mapper.layout.name, mapper.layout.programs

    def _dropped(self, mapper: Mapper) -> dict[str, int]:
        dropped = {}
        for at, text in enumerate(self._spec.filter.where):
            dropped[f"dropped by filter.where: {text}"] = mapper.dropped[at]
            if mapper.without_value[at]:
                dropped[f"dropped by filter.where, without a value: {text}"] = mapper.without_value[at]
        return dropped | self._repeats.dropped


def _first_values(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first value of each column that is not null."""
    first: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            if first.get(name) is None:
                first[name] = value
    return first


def description(source: PromptSource) -> list[str]:
    """Lines about a source: prompts, and what was left out; of a data set also rows, layout and mapping."""
    if not isinstance(source, DatasetSource):
        dropped = source.dropped if isinstance(source, JsonlSource) else {}
        return [f"{len(source):,} prompts", *_of_rows(dropped)]
    info, left_out = source.table.info, source.left_out
    mapping = ", ".join(f"{name} = {text}" for name, text in info.fields.items())
    pattern = f", answerPattern {info.pattern}" if info.pattern else ""
    layout = f"recognized as {info.layout}" if info.layout else "mapped as given"
    lines = [
        f"{info.rows:,} of {info.read:,} rows of {len(info.files)} file{'s' * (len(info.files) != 1)}"
        + (f" at revision {info.revision}" if info.revision else ""),
        f"{layout}: {mapping}{pattern}; set task.dataset.columns and answerPattern to override",
    ]
    if info.labels:
        lines.append("labels: " + ", ".join(f"{name} = {text}" for name, text in info.labels.items()))
    lines += _of_rows(info.dropped)
    if left_out is not None:
        lines += [
            f"{count:,} rows left out, rejected by the verifier: {reason}"
            for reason, count in left_out.rejected.items()
        ]
        lines += left_out.examples
        if left_out.overlap:
            lines.append(f"{len(left_out.overlap):,} rows not trained on: they overlap with held-out prompts")
    if info.programs:
        lines.append("the answers are tests of programs: grade them by verifier.code")
    return lines


def _of_rows(dropped: dict[str, int]) -> list[str]:
    return [f"{count:,} row{'s' * (count != 1)} {reason}" for reason, count in dropped.items()]
