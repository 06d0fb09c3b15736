"""Search in the recorded rollouts of a run, for ``scalerl rollouts`` and its page."""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scalerl_api.paths import RunPaths
from scalerl_api.rollouts import TOKEN_COLUMNS
from scalerl_cli.argument_types import NEWEST, SORTS
from scalerl_cli.exits import Refused
from scalerl_cli.output import echo

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_LISTINGS: Final = 3
"""A running coordinator merges files: a listing that is out of date is repeated."""
_NAMES: Final = "[!.]*-[0-9]*-[0-9]*-[0-9]*.parquet"
"""Split, first and last step, and number: a reader's own files beside them are none of the record."""


class RolloutsProblem(Refused):
    """The rollouts cannot be read; the message has the reason."""


Report = Callable[[str], None]
"""Gets a sentence for each file that is left out."""
RowLocation = tuple[Path, int, int]
"""File, row group and row."""


@dataclass(frozen=True, eq=False)
class _Found:
    """Matching rows of a file."""

    file: Path
    places: Any
    """(n, 2) row group and row."""
    keys: Any
    """(n, 2) what they are sorted by: the column of ``--sort``, infinite where it is missing, and the step."""


def echo_error(text: str) -> None:
    echo(text, error=True)


def select(
    arguments: argparse.Namespace,
    *,
    offset: int = 0,
    columns: Sequence[str] | None = None,
    tokens: bool = False,
    report: Report = echo_error,
) -> tuple[list[dict[str, Any]], int, int]:
    """The rows to show, the number of matching rows, and that of all rows. Raises :class:`RolloutsProblem`.

    Args:
        offset: matching rows to leave out before the first one.
        columns: those to read (default: all but those of tokens).
        tokens: whether to read those of tokens too.
    """
    import numpy as np

    files = _files(arguments.dir, report)
    step = _newest(files, arguments) if arguments.step == NEWEST else arguments.step
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(lambda file: _whole(file, arguments, step, report), files.items()))
    found = [one for one in results if one is not None and len(one.places)]
    matching = sum(len(one.places) for one in found)
    end = offset + arguments.limit if arguments.limit else None
    chosen: list[RowLocation] = []
    if found:
        # Stable: rows with equal keys keep the order of the files, in which a group's completions are neighbours.
        order = np.lexsort(np.concatenate([one.keys for one in found]).T[::-1])[offset:end]
        source = np.repeat(np.arange(len(found)), [len(one.places) for one in found])[order]
        places = np.concatenate([one.places for one in found])[order]
        chosen = [
            (found[at].file, group, row)
            for at, (group, row) in zip(source.tolist(), places.tolist(), strict=True)
        ]
    total = sum(file.metadata.num_rows for file in files.values())
    return _read(files, chosen, columns, tokens=tokens), matching, total


def _files(directory: Path, report: Report) -> dict[Path, pq.ParquetFile]:
    """The files of the record, without those that others replace. Raises :class:`RolloutsProblem`."""
    if find_spec("pyarrow") is None:
        raise RolloutsProblem("scalerl rollouts needs pyarrow, which this installation does not have")
    # Before its import, which reads it: else Arrow returns the memory of each row group, and the kernel clears it for the next.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

    paths = RunPaths(directory)
    if not directory.is_dir():
        raise RolloutsProblem(f"{directory}: no such directory")
    if not paths.rollouts.is_dir():
        if not (paths.run_file.exists() or paths.metrics.exists()):
            raise RolloutsProblem(f"{directory} is not the directory of a run")
        raise RolloutsProblem(
            f"{directory} has no rollouts: its coordinator did not start, or had rollouts.perStep 0"
        )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(_LISTINGS):
        try:
            files = {path: _open(path, report) for path in sorted(paths.rollouts.glob(_NAMES))}
            break
        except FileNotFoundError:  # merged into another one, or deleted for its age, since the listing
            continue
    else:
        raise RolloutsProblem(f"{directory}: its files change faster than they can be opened; try again")
    opened = {path: file for path, file in files.items() if file is not None}
    metadata = [file.schema_arrow.metadata or {} for file in opened.values()]
    replaced = {name for one in metadata for name in one.get(b"replaces", b"").decode().split(",")}
    opened = {path: file for path, file in opened.items() if path.name not in replaced}
    if not opened:
        raise RolloutsProblem(
            f"{directory} has no rollouts yet: they are written after the first step and the first evaluation"
        )
    return opened


def _open(path: Path, report: Report) -> pq.ParquetFile | None:
    """The file; None if it is torn, which is reported. Raises FileNotFoundError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Read, not mapped: a search of all texts is faster, and needs a fifth of the memory.
        return pq.ParquetFile(path, pre_buffer=False)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        report(f"{path}: left out, not a complete Parquet file: {str(error).splitlines()[0]}")
        return None


def _whole(
    opened: tuple[Path, pq.ParquetFile],
    arguments: argparse.Namespace,
    step: tuple[float, float] | None,
    report: Report,
) -> _Found | None:
    """What is found in a file; nothing of a damaged one, which is reported."""
    import pyarrow as pa

    try:
        return _matches(opened, arguments, step)
    except (OSError, pa.ArrowException) as error:
        report(f"{opened[0]}: left out, damaged: {str(error).splitlines()[0]}")
        return None


def _split(arguments: argparse.Namespace) -> str | None:
    return None if arguments.split is None else arguments.split.replace("-", "_")


def _newest(files: dict[Path, pq.ParquetFile], arguments: argparse.Namespace) -> tuple[float, float]:
    split = _split(arguments)
    steps = [int(path.stem.split("-")[2]) for path in files if split in (None, path.stem.split("-")[0])]
    newest = float(max(steps, default=0))
    return newest, newest


def _matches(
    opened: tuple[Path, pq.ParquetFile], arguments: argparse.Namespace, step: tuple[float, float] | None
) -> _Found | None:
    import numpy as np

    path, file = opened
    split, sort = _split(arguments), SORTS[arguments.sort]
    if split is not None and not path.name.startswith(split):
        return None
    columns = {"step", sort, *_wanted(arguments)}
    columns |= {"reward"} if arguments.reward is not None else set()
    columns |= {"labels"} if arguments.label else set()
    limits = _limits(file, {"step": step, "reward": arguments.reward})
    groups = [number for number in range(file.num_row_groups) if not _pruned(file, number, limits)]
    if not groups:
        return None
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
    value = table[sort].to_numpy().astype(float)[rows]  # null becomes NaN
    value = np.where(np.isnan(value), np.inf, -value if arguments.descending else value)
    return _Found(path, places[rows], np.stack([value, table["step"].to_numpy()[rows]], axis=1))


def _wanted(arguments: argparse.Namespace) -> dict[str, Any]:
    """The value that a column must have; ``excluded`` may be empty: any reason."""
    wanted = {
        "task": arguments.task,
        "prompt_id": arguments.prompt,
        "sample": arguments.sample,
        "finish_reason": "length" if arguments.truncated else None,
        "excluded": arguments.excluded,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _places(file: pq.ParquetFile, number: int) -> Any:
    """Row group and row of each row of a row group, by row."""
    import numpy as np

    rows = np.arange(file.metadata.row_group(number).num_rows, dtype=np.int32)
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
    for name, value in _wanted(arguments).items():
        any_reason = name == "excluded" and value == ""
        require(pc.is_valid(table[name]) if any_reason else pc.equal(table[name], value))
    for label in arguments.label:
        name, _, value = label.partition("=")
        require(pc.equal(pc.map_lookup(table["labels"], name, "first"), value))
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


def _read(
    files: dict[Path, pq.ParquetFile],
    chosen: Sequence[RowLocation],
    columns: Sequence[str] | None,
    *,
    tokens: bool,
) -> list[dict[str, Any]]:
    """The chosen rows, in their order. Raises :class:`RolloutsProblem`."""
    import pyarrow as pa

    by_file: dict[Path, dict[int, list[RowLocation]]] = {}
    for one in chosen:
        by_file.setdefault(one[0], {}).setdefault(one[1], []).append(one)

    def read(file: tuple[Path, dict[int, list[RowLocation]]]) -> dict[RowLocation, dict[str, Any]]:
        """Of one file, whose reader serves one thread at a time."""
        path, groups = file
        names = files[path].schema_arrow.names
        wanted = columns or [name for name in names if tokens or name not in TOKEN_COLUMNS]
        rows: dict[RowLocation, dict[str, Any]] = {}
        try:
            for number, members in groups.items():
                table = files[path].read_row_group(number, columns=wanted, use_threads=False)
                found = table.take([row for _, _, row in members]).to_pylist(maps_as_pydicts="lossy")
                rows |= zip(members, found, strict=True)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise RolloutsProblem(
                f"{path} is damaged: {str(error).splitlines()[0]}; move it elsewhere"
            ) from error
        return rows

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = {place: row for some in pool.map(read, by_file.items()) for place, row in some.items()}
    return [rows[one] for one in chosen]
