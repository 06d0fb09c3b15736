"""Search in the recorded rollouts of a run."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from scalerl_analysis.problem import AnalysisProblem
from scalerl_api.paths import RunPaths
from scalerl_api.rollouts import TOKEN_COLUMNS

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
"""Column of each order of a search."""
SPLITS: Final = ("train", "held-out")
NEWEST: Final = "last"
"""As the steps of a search: the newest one."""
_LISTINGS: Final = 3
"""A running coordinator merges files: a listing that is out of date is repeated."""
_NAMES: Final = "[!.]*-[0-9]*-[0-9]*-[0-9]*.parquet"
"""Split, first and last step, and number: a reader's own files beside them are none of the record."""

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
    """(n, 2) what they are sorted by: the column of ``sort``, infinite where it is missing, and the step."""


@dataclass(frozen=True)
class RolloutConditions:
    """Conditions of a search, all of which must hold, and its order. None: any."""

    step: tuple[float, float] | Literal["last"] | None = None
    """Lowest and highest step, both included (of evaluations: version); or ``last``: the newest."""
    split: str | None = None
    """``train`` or ``held-out``."""
    task: str | None = None
    """Task of a mix, or evaluation set."""
    prompt: str | None = None
    """Id of a prompt."""
    sample: int | None = None
    """Number of a completion in its group, from 0."""
    labels: Sequence[tuple[str, str]] = ()
    """Names and values of labels of the prompt."""
    reward: tuple[float, float] | None = None
    """Lowest and highest reward, both included."""
    truncated: bool = False
    """Only completions that were cut off at the length limit."""
    excluded: str | None = None
    """Reason for which a completion was not trained on; empty: any reason."""
    contains: Sequence[str] = ()
    """Texts that the completion has."""
    sort: str = "step"
    """A key of :data:`SORTS`; rows without a value come last."""
    descending: bool = False

    def __post_init__(self) -> None:
        """Raises :class:`AnalysisProblem`: ``split``, ``sort`` or ``step`` is none of its choices."""
        for name, value, choices in (
            ("split", self.split, (None, *SPLITS)),
            ("sort", self.sort, SORTS),
            ("step", self.step if isinstance(self.step, str) else NEWEST, (NEWEST,)),
        ):
            if value not in choices:
                given = ", ".join(str(one) for one in choices if one is not None)
                pair = "a pair of numbers or " if name == "step" else ""
                raise AnalysisProblem(f"{name}: {value!r} is not {pair}one of {given}")


@dataclass(frozen=True)
class FoundRollouts:
    """The rows of a search by column (docs/reference/rollouts.md), the number of matching rows, and that of all rows."""

    rows: list[dict[str, Any]]
    matching: int
    total: int


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def find_rollouts(
    directory: str | Path,
    conditions: RolloutConditions | None = None,
    *,
    limit: int | None = 100,
    offset: int = 0,
    columns: Sequence[str] | None = None,
    tokens: bool = False,
    report: Report = _warn,
) -> FoundRollouts:
    """Search the rollouts of the run in ``directory``, also while it goes on.

    Args:
        limit: largest number of rows; None for all.
        offset: matching rows to leave out before the first one.
        columns: those to read (default: all but those of tokens).
        tokens: whether to read those of tokens too.
        report: gets a sentence for each file that is left out (default: a warning).

    Raises:
        AnalysisProblem: the rollouts cannot be read.
    """
    import numpy as np

    conditions = conditions or RolloutConditions()
    files = _files(Path(directory), report)
    step = _newest(files, conditions) if isinstance(conditions.step, str) else conditions.step
    with ThreadPoolExecutor(_processors()) as pool:
        results = list(pool.map(lambda file: _whole(file, conditions, step, report), files.items()))
    found = [one for one in results if one is not None and len(one.places)]
    matching = sum(len(one.places) for one in found)
    end = None if limit is None else offset + limit
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
    return FoundRollouts(_read(files, chosen, columns, tokens=tokens), matching, total)


def _processors() -> int:
    """Those that this process may use, where the system says it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _files(directory: Path, report: Report) -> dict[Path, pq.ParquetFile]:
    """The files of the record, without those that others replace. Raises :class:`AnalysisProblem`."""
    if find_spec("pyarrow") is None:
        raise AnalysisProblem("scalerl rollouts needs pyarrow, which this installation does not have")
    paths = RunPaths(directory)
    if not directory.is_dir():
        raise AnalysisProblem(f"{directory}: no such directory")
    if not paths.rollouts.is_dir():
        if not (paths.run_file.exists() or paths.metrics.exists()):
            raise AnalysisProblem(f"{directory} is not the directory of a run")
        raise AnalysisProblem(
            f"{directory} has no rollouts: its coordinator did not start, or had rollouts.perStep 0"
        )
    for _ in range(_LISTINGS):
        try:
            files = {path: _open(path, report) for path in sorted(paths.rollouts.glob(_NAMES))}
            break
        except FileNotFoundError:  # merged into another one, or deleted for its age, since the listing
            continue
    else:
        raise AnalysisProblem(f"{directory}: its files change faster than they can be opened; try again")
    opened = {path: file for path, file in files.items() if file is not None}
    metadata = [file.schema_arrow.metadata or {} for file in opened.values()]
    replaced = {name for one in metadata for name in one.get(b"replaces", b"").decode().split(",")}
    opened = {path: file for path, file in opened.items() if path.name not in replaced}
    if not opened:
        raise AnalysisProblem(
            f"{directory} has no rollouts yet: they are written after the first step and the first evaluation"
        )
    return opened


def _open(path: Path, report: Report) -> pq.ParquetFile | None:
    """The file; None if it is torn, which is reported. Raises FileNotFoundError, and :class:`AnalysisProblem` for too many files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Read, not mapped: a search of all texts is faster, and needs a fifth of the memory.
        return pq.ParquetFile(path, pre_buffer=False)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None) == errno.EMFILE:
            raise AnalysisProblem(
                f"{path.parent} has more files than this process may open; raise its limit (ulimit -n)"
            ) from error
        report(f"{path}: left out, not a complete Parquet file: {str(error).splitlines()[0]}")
        return None


def _whole(
    opened: tuple[Path, pq.ParquetFile],
    conditions: RolloutConditions,
    step: tuple[float, float] | None,
    report: Report,
) -> _Found | None:
    """What is found in a file; nothing of a damaged one, which is reported."""
    import pyarrow as pa

    try:
        return _matches(opened, conditions, step)
    except (OSError, pa.ArrowException) as error:
        report(f"{opened[0]}: left out, damaged: {str(error).splitlines()[0]}")
        return None


def _split(conditions: RolloutConditions) -> str | None:
    return None if conditions.split is None else conditions.split.replace("-", "_")


def _newest(files: dict[Path, pq.ParquetFile], conditions: RolloutConditions) -> tuple[float, float]:
    split = _split(conditions)
    steps = [int(path.stem.split("-")[2]) for path in files if split in (None, path.stem.split("-")[0])]
    newest = float(max(steps, default=0))
    return newest, newest


def _matches(
    opened: tuple[Path, pq.ParquetFile], conditions: RolloutConditions, step: tuple[float, float] | None
) -> _Found | None:
    import numpy as np

    path, file = opened
    split, sort = _split(conditions), SORTS[conditions.sort]
    if split is not None and not path.name.startswith(split):
        return None
    columns = {"step", sort, *_wanted(conditions)}
    columns |= {"reward"} if conditions.reward is not None else set()
    columns |= {"labels"} if conditions.labels else set()
    limits = _limits(file, {"step": step, "reward": conditions.reward})
    groups = [number for number in range(file.num_row_groups) if not _pruned(file, number, limits)]
    if not groups:
        return None
    table = file.read_row_groups(groups, columns=sorted(columns), use_threads=False)
    places = np.concatenate([_places(file, number) for number in groups])
    rows = np.flatnonzero(_mask(table, conditions, step))
    if conditions.contains:
        rows = np.concatenate(
            [
                among[_containing(file, number, conditions.contains)[places[among, 1]]]
                for number in groups
                if len(among := rows[places[rows, 0] == number])
            ]
            or [rows]
        )
    value = table[sort].to_numpy().astype(float)[rows]  # null becomes NaN
    value = np.where(np.isnan(value), np.inf, -value if conditions.descending else value)
    return _Found(path, places[rows], np.stack([value, table["step"].to_numpy()[rows]], axis=1))


def _wanted(conditions: RolloutConditions) -> dict[str, Any]:
    """The value that a column must have; ``excluded`` may be empty: any reason."""
    wanted = {
        "task": conditions.task,
        "prompt_id": conditions.prompt,
        "sample": conditions.sample,
        "finish_reason": "length" if conditions.truncated else None,
        "excluded": conditions.excluded,
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


def _mask(table: pa.Table, conditions: RolloutConditions, step: tuple[float, float] | None) -> Any:
    import numpy as np
    import pyarrow.compute as pc

    mask = np.ones(table.num_rows, dtype=bool)

    def require(matches: Any) -> None:
        nonlocal mask
        mask &= matches.fill_null(False).to_numpy()

    for name, limits in (("step", step), ("reward", conditions.reward)):
        if limits is not None:
            column = table[name]
            require(pc.and_(pc.greater_equal(column, limits[0]), pc.less_equal(column, limits[1])))
    for name, value in _wanted(conditions).items():
        any_reason = name == "excluded" and value == ""
        require(pc.is_valid(table[name]) if any_reason else pc.equal(table[name], value))
    for name, value in conditions.labels:
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
    """The chosen rows, in their order. Raises :class:`AnalysisProblem`."""
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
            raise AnalysisProblem(
                f"{path} is damaged: {str(error).splitlines()[0]}; move it elsewhere"
            ) from error
        return rows

    with ThreadPoolExecutor(_processors()) as pool:
        rows = {place: row for some in pool.map(read, by_file.items()) for place, row in some.items()}
    return [rows[one] for one in chosen]
