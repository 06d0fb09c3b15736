"""``scalerl rollouts``: the recorded rollouts of a run, filtered and sorted, to read."""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scalerl_api.paths import RunPaths
from scalerl_cli.exits import BAD_INPUT, DONE
from scalerl_cli.output import say

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SORTS: Final = {
    "step": "step",
    "reward": "reward",
    "advantage": "advantage",
    "tokens": "tokens",
    "age": "age",
    "difference": "logprob_difference_max",
}
"""Column of each value of ``--sort``."""
_LISTINGS: Final = 3
"""A running coordinator merges files: a listing that is out of date is repeated."""
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 3000, 1000
_NEWEST: Final = "last"


class Problem(Exception):
    """The rollouts cannot be read; the message has the reason."""


@dataclass(frozen=True)
class _Found:
    """A matching row, with what it is sorted by."""

    key: tuple[Any, ...]
    file: Path
    row_group: int
    row: int


def interval(text: str) -> tuple[float, float]:
    """A closed interval of a command line.

    >>> interval("3"), interval("0.5:1"), interval(":0")
    ((3.0, 3.0), (0.5, 1.0), (-inf, 0.0))
    """
    low, colon, high = text.partition(":")
    first = float(low) if low else -math.inf
    last = (float(high) if high else math.inf) if colon else first
    if not (low or colon) or not first <= last:
        raise ValueError(text)
    return first, last


def step_interval(text: str) -> tuple[float, float] | str:
    """As :func:`interval`, or ``last``."""
    return text if text == _NEWEST else interval(text)


def count(text: str) -> int:
    """A number of rollouts; 0 is all."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def text_argument(text: str) -> str:
    """A text that UTF-8 can encode: an argument may have bytes that are none."""
    text.encode()
    return text


def shown(text: str) -> str:
    """Text of a model for a terminal: characters that control it or the direction of its text are escaped.

    >>> shown("a\\x1b[2J\\tb\\u202ec")
    'a\\\\x1b[2J\\tb\\\\u202ec'
    """
    return "".join(
        c
        if c in "\n\t" or c.isprintable()
        else c.encode("ascii", "backslashreplace").decode()
        if ord(c) > 127
        else f"\\x{ord(c):02x}"
        for c in text
    )


def run_rollouts(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        rows, matching, total = select(arguments)
    except Problem as problem:
        say(str(problem), error=True)
        return BAD_INPUT
    if arguments.json:
        for row in rows:
            # A terminal also obeys characters that JSON does not escape, such as U+009B.
            say(json.dumps(_plain(row), ensure_ascii=sys.stdout.isatty()))
        return DONE
    text = f"{matching:,} of {total:,} recorded rollouts match"
    text += f"; the first {len(rows):,} (--limit)\n" if len(rows) < matching else "\n"
    text += "\n".join(_lines(rows, full=arguments.full))
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        say(text)
    return DONE


def select(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], int, int]:
    """The rows to show, the number of matching rows, and that of all rows. Raises :class:`Problem`."""
    files = _files(arguments.dir)
    step = _newest(files, arguments) if arguments.step == _NEWEST else arguments.step
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda file: _whole(_matches(file, arguments, step), file[0]), files.items())
        found = sorted((one for result in results for one in result), key=lambda one: one.key)
    chosen = found[: arguments.limit] if arguments.limit else found
    return _read(files, chosen), len(found), sum(file.metadata.num_rows for file in files.values())


def _files(directory: Path) -> dict[Path, pq.ParquetFile]:
    """The files of the record, without those that others replace. Raises :class:`Problem`."""
    if find_spec("pyarrow") is None:
        raise Problem("scalerl rollouts needs pyarrow, which this installation does not have")

    paths = RunPaths(directory)
    if not directory.is_dir():
        raise Problem(f"{directory}: no such directory")
    if not paths.rollouts.is_dir():
        if not (paths.run_file.exists() or paths.metrics.exists()):
            raise Problem(f"{directory} is not the directory of a run")
        raise Problem(
            f"{directory} has no rollouts: its coordinator did not start, or had rollouts.perStep 0"
        )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(_LISTINGS):
        try:
            files = {path: _open(path) for path in sorted(paths.rollouts.glob("[!.]*.parquet"))}
            break
        except FileNotFoundError:  # merged into another one, or deleted for its age, since the listing
            continue
    else:
        raise Problem(f"{directory}: its files change faster than they can be opened; try again")
    opened = {path: file for path, file in files.items() if file is not None}
    metadata = [file.schema_arrow.metadata or {} for file in opened.values()]
    replaced = {name for one in metadata for name in one.get(b"replaces", b"").decode().split(",")}
    opened = {path: file for path, file in opened.items() if path.name not in replaced}
    if not opened:
        raise Problem(
            f"{directory} has no rollouts yet: they are written after the first step and the first evaluation"
        )
    return opened


def _open(path: Path) -> pq.ParquetFile | None:
    """The file; None if it is torn, which is reported. Raises FileNotFoundError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        say(f"{path}: left out, not a complete Parquet file: {str(error).splitlines()[0]}", error=True)
        return None


def _whole(found: Iterator[_Found], path: Path) -> list[_Found]:
    """All that is found in a file; nothing of a damaged one, which is reported."""
    import pyarrow as pa

    try:
        return list(found)
    except (OSError, pa.ArrowException) as error:
        say(f"{path}: left out, damaged: {str(error).splitlines()[0]}", error=True)
        return []


def _split(arguments: argparse.Namespace) -> str | None:
    return None if arguments.split is None else arguments.split.replace("-", "_")


def _newest(files: dict[Path, pq.ParquetFile], arguments: argparse.Namespace) -> tuple[float, float]:
    split = _split(arguments)
    steps = [int(path.stem.split("-")[2]) for path in files if split in (None, path.stem.split("-")[0])]
    newest = float(max(steps, default=0))
    return newest, newest


def _matches(
    opened: tuple[Path, pq.ParquetFile], arguments: argparse.Namespace, step: tuple[float, float] | None
) -> Iterator[_Found]:
    import numpy as np

    path, file = opened
    split, sort = _split(arguments), SORTS[arguments.sort]
    if split is not None and not path.name.startswith(split):
        return
    columns = {"step", "task", "prompt_index", "sample", sort}
    columns |= {"reward"} if arguments.reward is not None else set()
    columns |= {"excluded"} if arguments.excluded is not None else set()
    columns |= {"labels"} if arguments.label else set()
    columns |= {"finish_reason"} if arguments.truncated else set()
    columns |= {"prompt_id"} if arguments.prompt is not None else set()
    limits = _limits(file, {"step": step, "reward": arguments.reward})
    groups = [number for number in range(file.num_row_groups) if not _pruned(file, number, limits)]
    if not groups:
        return
    table = file.read_row_groups(groups, columns=sorted(columns), use_threads=False)
    places = np.concatenate([_places(file, number) for number in groups])
    rows = np.flatnonzero(_mask(table, arguments, step))
    if arguments.contains:
        rows = np.concatenate(
            [
                among[_containing(file, number, arguments.contains)[places[among, 1]]]
                for number in groups
                if len(among := rows[places[rows, 0] == number])
            ]
            or [rows]
        )
    names = [sort, "step", "task", "prompt_index", "sample"]
    values = zip(*(table[name].take(rows).to_pylist() for name in names), strict=True)
    for (number, row), (value, *rest) in zip(places[rows].tolist(), values, strict=True):
        missing = value is None or value != value
        ordered = 0 if missing else -value if arguments.descending else value
        yield _Found((missing, ordered, *rest), path, number, row)


def _places(file: pq.ParquetFile, number: int) -> Any:
    """Row group and row of each row of a row group, by row."""
    import numpy as np

    rows = np.arange(file.metadata.row_group(number).num_rows)
    return np.stack([np.full_like(rows, number), rows], axis=1)


def _limits(
    file: pq.ParquetFile, wanted: dict[str, tuple[float, float] | None]
) -> dict[int, tuple[float, float]]:
    """The limits by the number of their column."""
    columns = {file.schema.column(at).path: at for at in range(len(file.schema))}
    return {columns[name]: limits for name, limits in wanted.items() if limits is not None}


def _pruned(file: pq.ParquetFile, number: int, limits: dict[int, tuple[float, float]]) -> bool:
    """Whether the statistics of a row group exclude a match."""
    group = file.metadata.row_group(number)
    for at, (least, most) in limits.items():
        statistics = group.column(at).statistics
        if statistics is None or not statistics.has_min_max:
            continue
        if statistics.max < least or statistics.min > most:
            return True
    return False


def _mask(table: pa.Table, arguments: argparse.Namespace, step: tuple[float, float] | None) -> Any:
    import numpy as np
    import pyarrow.compute as pc

    mask = np.ones(table.num_rows, dtype=bool)

    def require(matches: Any) -> None:
        nonlocal mask
        mask &= matches.fill_null(False).to_numpy()

    for name, limits in (("step", step), ("reward", arguments.reward)):
        if limits is not None:
            column = table[name]
            require(pc.and_(pc.greater_equal(column, limits[0]), pc.less_equal(column, limits[1])))
    if arguments.task is not None:
        require(pc.equal(table["task"], arguments.task))
    if arguments.prompt is not None:
        require(pc.equal(table["prompt_id"], arguments.prompt))
    if arguments.truncated:
        require(pc.equal(table["finish_reason"], "length"))
    if arguments.excluded is not None:
        column = table["excluded"]
        require(pc.is_valid(column) if arguments.excluded == "" else pc.equal(column, arguments.excluded))
    if arguments.label:
        wanted = [tuple(label.split("=", 1)) for label in arguments.label]
        labels = table["labels"].to_pylist()
        mask &= np.array([set(wanted) <= set(one or ()) for one in labels], dtype=bool)
    return mask


def _containing(file: pq.ParquetFile, number: int, wanted: Sequence[str]) -> Any:
    """Which completions of a row group have all of ``wanted``. A regular expression of literals is searched several times as fast as a substring."""
    import numpy as np
    import pyarrow.compute as pc

    texts = file.read_row_group(number, columns=["completion"], use_threads=False)["completion"]
    mask = np.ones(len(texts), dtype=bool)
    for text in wanted:
        pattern = "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
        mask &= pc.match_substring_regex(texts, pattern).fill_null(False).to_numpy()
    return mask


def _read(files: dict[Path, pq.ParquetFile], chosen: Sequence[_Found]) -> list[dict[str, Any]]:
    """The chosen rows, in their order. Raises :class:`Problem`."""
    import pyarrow as pa

    by_group: dict[tuple[Path, int], list[_Found]] = {}
    for one in chosen:
        by_group.setdefault((one.file, one.row_group), []).append(one)
    rows: dict[_Found, dict[str, Any]] = {}
    for (path, number), members in by_group.items():
        try:
            table = files[path].read_row_group(number).take([one.row for one in members])
        except (OSError, pa.ArrowException) as error:
            raise Problem(f"{path} is damaged: {str(error).splitlines()[0]}; move it elsewhere") from error
        rows.update(zip(members, table.to_pylist(maps_as_pydicts="lossy"), strict=True))
    return [rows[one] for one in chosen]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON, which has no NaN."""
    return {name: None if value != value else value for name, value in row.items()}


def _lines(rows: Sequence[dict[str, Any]], *, full: bool) -> Iterator[str]:
    before = None
    for row in rows:
        yield ""
        yield _head(row)
        if row["prompt"] is not None and row["prompt"] != before:
            yield "[prompt]"
            yield _cut(row["prompt"], full)
        before = row["prompt"]
        if row["completion"] is not None:
            yield "[completion]"
            yield _cut(row["completion"], full)
        if row["reference"]:
            yield f"[reference] {_cut(row['reference'], full)}"
        if row["error"]:
            yield f"[error of the verifier] {_cut(row['error'], full)}"


def _head(row: dict[str, Any]) -> str:
    held_out = row["split"] == "held_out"
    parts = [
        f"{'version' if held_out else 'step'} {row['step']}",
        f"{row['split'].replace('_', '-')} {row['task']}",
        f"prompt {row['prompt_id'] or row['prompt_index']}",
        f"completion {row['sample']}",
    ]
    if row["reward"] is not None:
        parts.append(f"reward {row['reward']:g}")
    parts += [f"{name} {value:g}" for name, value in (row["parts"] or {}).items()]
    if row["advantage"] is not None:
        parts.append(f"advantage {row['advantage']:+.3f}")
    parts.append(f"{row['tokens']:,} tokens" + (", cut off" if row["finish_reason"] == "length" else ""))
    if row["oldest_version"] is not None and not held_out:
        parts.append(f"versions {row['oldest_version']} to {row['newest_version']}, age {row['age']}")
    if row["logprob_difference_mean"] is not None:
        mean, largest = row["logprob_difference_mean"], row["logprob_difference_max"]
        parts.append(f"log-probability difference {mean:.3g}, at most {largest:.3g}")
    parts += [f"{name} {value}" for name, value in (row["labels"] or {}).items()]
    if row["excluded"] is not None:
        parts.append(f"not trained on: {row['excluded']}")
    return shown("=== " + " · ".join(parts)).replace("\n", " ")


def _cut(text: str, full: bool) -> str:
    if full or len(text) <= _HEAD_CHARACTERS + _TAIL_CHARACTERS:
        return shown(text)
    left_out = len(text) - _HEAD_CHARACTERS - _TAIL_CHARACTERS
    head, tail = shown(text[:_HEAD_CHARACTERS]), shown(text[-_TAIL_CHARACTERS:])
    return f"{head}\n… {left_out:,} characters (--full) …\n{tail}"
