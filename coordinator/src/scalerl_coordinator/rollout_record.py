"""The record of rollouts: Parquet files in ``rollouts/`` with prompts, completions and what was computed of them.

A thread of its own writes; no request and no record of the journal waits for it (``docs/adr/0020-rollouts-are-parquet-parts.md``).
The rollouts of a step are written when the trainer has reported the step, those of an evaluation when it is complete. A file
appears under its name once it is complete. What cannot be written is dropped, counted, and logged once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from scalerl_api.rollouts import TOKEN_COLUMNS
from scalerl_api.wire import PromptRef, Split, TrainedSequence
from scalerl_coordinator.disk import Disk
from scalerl_coordinator.recorded_rows import RecordedGroup, table_of

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_QUEUE_BYTES: Final = 2**28
"""Bound on the texts that wait for the disk."""
_CLOSE_SECONDS: Final = 10.0
_MERGED_FILES: Final = 32
_MERGED_BYTES: Final = 2**24
"""Files below this size are merged, :data:`_MERGED_FILES` at a time."""
_ROW_GROUP_BYTES: Final = 2**22
"""What a reader decompresses at a time; it stays in a processor's cache."""


@dataclass(frozen=True, slots=True)
class RecordPart:
    """A file of the record, by its name."""

    path: Path
    split: str
    first: int
    """First step, or version of an evaluation."""
    last: int
    serial: int
    """Unique among the files of a split."""

    @classmethod
    def named(cls, directory: Path, split: str, first: int, last: int, serial: int) -> RecordPart:
        name = f"{split}-{first:08d}-{last:08d}-{serial:08d}.parquet"
        return cls(directory / name, split, first, last, serial)

    @classmethod
    def parse(cls, path: Path) -> RecordPart | None:
        split, *numbers = path.stem.split("-")
        if path.suffix != ".parquet" or len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
            return None
        return cls(path, split, *map(int, numbers))

    @property
    def size(self) -> int:
        """Its size on disk; 0 if it was deleted."""
        return self.path.stat().st_size if self.path.exists() else 0


class RolloutRecord:
    """The record in ``directory``, which the journal's lock reserves for one process.

    Life cycle: construct → :meth:`start` → the other methods, from the event loop → :meth:`close`. Reading it needs no
    coordinator: ``scalerl rollouts``.

    Args:
        max_bytes: maximum size on disk.
        tasks: name of the task of training prompts, and of the evaluation set of held-out ones.
        on_lost: called from any thread with the number of rollouts that are not written.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        tasks: Callable[[PromptRef], str],
        on_lost: Callable[[int], None],
        *,
        disk: Disk | None = None,
        queue_bytes: int = _QUEUE_BYTES,
    ) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._tasks, self._on_lost = tasks, on_lost
        self._disk = disk or Disk()
        self._max_queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int, int], list[RecordedGroup]] = {}
        """Groups of running evaluations by split, version and task, and refilled ones of steps by split, step and task."""
        self._logged = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._parts: list[RecordPart] = []
        """The thread's: the files, as they are on disk."""

    # --- callers --------------------------------------------------------------------------------

    def start(self) -> None:
        """Read which files there are."""
        self._submit((), self._open)

    def close(self) -> None:
        """Write what waits, for a bounded time. Blocking."""
        self.end_evaluations(())
        done = self._thread.submit(lambda: None)
        try:
            done.result(_CLOSE_SECONDS)
        except TimeoutError:
            log.error("the record of rollouts is not complete: the disk is too slow")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Wait until all that was given is written."""
        self._thread.submit(lambda: None).result()

    def has_step(self, step: int) -> bool:
        """Whether the record has a step. Blocking."""
        return self._thread.submit(self._has_step, step).result()

    def keep(self, group: RecordedGroup) -> None:
        """Keep a group of an evaluation, or a refilled one of a step, until the evaluation or the step ends. Never blocks."""
        if self._reserve([group]):
            key = group.prompt.split, group.step, group.prompt.task
            self._waiting.setdefault(key, []).append(group)

    def end_evaluations(self, running: Container[tuple[int, int]]) -> None:
        """Write the groups of all evaluations but the ``running`` ones, by version and task. Never blocks."""
        for split, version, task in list(self._waiting):
            if split == Split.HELD_OUT and (version, task) not in running:
                # Readers keep the order of rows with equal rewards.
                groups = sorted(
                    self._waiting.pop((split, version, task)), key=lambda group: group.prompt.index
                )
                self._submit(groups, partial(self._write, split, version, groups, {}))
                self._submit((), partial(self._tidy, split, version))

    def add_step(
        self, step: int, groups: Sequence[RecordedGroup], sequences: Sequence[TrainedSequence], settled: int
    ) -> None:
        """Write the groups of a step, unless the record has it. Never blocks.

        Args:
            sequences: what the trainer computed of them.
            settled: no step below it can be trained again.
        """
        refilled = [key for key in self._waiting if key[:2] == (Split.TRAIN, step)]
        kept = [group for key in refilled for group in self._waiting.pop(key)]
        if not self._reserve(groups):
            groups = []
        groups = sorted([*kept, *groups], key=lambda group: group.slot)
        figures = {(one.slot, one.sample): one for one in sequences}

        def write() -> None:
            if not self._has_step(step):
                self._write(Split.TRAIN, step, groups, figures)

        if groups:
            self._submit(groups, write)
            self._submit((), partial(self._tidy, Split.TRAIN, settled))

    def truncate(self, version: int) -> None:
        """Delete the rollouts of steps from ``version`` on, which are trained again. Evaluations keep their points, and rollouts."""
        self._submit((), partial(self._truncate, version))

    # --- the queue ------------------------------------------------------------------------------

    def _reserve(self, groups: Sequence[RecordedGroup]) -> bool:
        size = sum(group.nbytes for group in groups)
        with self._lock:
            if self._queued_bytes + size <= self._max_queue_bytes:
                self._queued_bytes += size
                return True
        self._lose(groups, "the disk is too slow for the record of rollouts")
        return False

    def _submit(self, groups: Sequence[RecordedGroup], work: Callable[[], None]) -> None:
        """Run ``work`` in the thread; ``groups``, which it writes, are lost if it fails."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._lose(groups, "rollouts cannot be recorded", error)
            finally:
                with self._lock:
                    self._queued_bytes -= sum(group.nbytes for group in groups)

        self._thread.submit(run)

    def _lose(self, groups: Sequence[RecordedGroup], what: str, error: Exception | None = None) -> None:
        self._on_lost(sum(len(group.lengths) for group in groups))
        if not self._logged:
            log.error(
                "%s; the run continues, and rollouts that are not recorded are only counted from now on%s",
                *(what, "" if error is None else f": {error}"),
                exc_info=error if not isinstance(error, OSError) else None,
            )
        self._logged = True

    # --- the thread -----------------------------------------------------------------------------

    def _open(self) -> None:
        self._directory.mkdir(exist_ok=True)
        for path in self._directory.iterdir():
            if path.name.startswith("."):
                path.unlink()  # incomplete
        found = [part for path in self._directory.iterdir() if (part := RecordPart.parse(path)) is not None]
        sources = {part: names for part in found if (names := _read(part.path, replaced_by)) is not None}
        merged = {name for names in sources.values() for name in names}
        for part in sources:
            if part.path.name in merged:  # a crash came between the merge and the deletion of its sources
                part.path.unlink()
        whole = (part for part in sources if part.path.name not in merged)
        self._parts = sorted(whole, key=lambda part: (part.first, part.serial))

    def _has_step(self, step: int) -> bool:
        return any(one.split == Split.TRAIN and one.first <= step <= one.last for one in self._parts)

    def _write(
        self,
        split: str,
        step: int,
        groups: Sequence[RecordedGroup],
        figures: Mapping[tuple[int, int], TrainedSequence],
    ) -> None:
        rows = [row for group in groups for row in group.rows(self._tasks(group.prompt), figures)]
        if rows and split == Split.HELD_OUT:
            self._forget_evaluated(step, {(row["task"], row["prompt_index"]) for row in rows})
        if rows:
            self._store(table_of(rows), split, step, step)

    def _forget_evaluated(self, version: int, prompts: set[tuple[str, int]]) -> None:
        """Delete what an evaluation of ``version`` that was dropped has of ``prompts``."""
        for part in list(self._parts):
            if part.split == Split.HELD_OUT and part.first <= version <= part.last:
                table = self._table(part)
                columns = ("step", "task", "prompt_index")
                rows = (
                    [] if table is None else zip(*(table[name].to_pylist() for name in columns), strict=True)
                )
                kept = [step != version or (task, index) not in prompts for step, task, index in rows]
                if table is not None and not all(kept):
                    self._store(table.filter(kept), part.split, part.first, part.last, [part])

    def _tidy(self, split: str, settled: int) -> None:
        self._forget_oldest()
        self._merge(split, settled)

    def _store(
        self, table: pa.Table, split: str, first: int, last: int, replaces: Sequence[RecordPart] = ()
    ) -> None:
        """Write a file, which appears once it is complete. Raises OSError."""
        import pyarrow.parquet as pq

        self._directory.mkdir(exist_ok=True)
        if not self._disk.leaves_reserve(self._directory, table.nbytes):
            raise OSError(errno.ENOSPC, "the volume is nearly full")
        serial = max((part.serial for part in self._parts), default=0) + 1
        part = RecordPart.named(self._directory, split, first, last, serial)
        staging = part.path.with_name(f".{part.path.name}")
        searched = table.drop_columns(TOKEN_COLUMNS).nbytes
        if replaces:
            names = ",".join(old.path.name for old in replaces)
            table = table.replace_schema_metadata({_REPLACES: names})
        try:
            pq.write_table(
                table,
                staging,
                compression="lz4",
                use_dictionary=_REPEATED,
                column_encoding=_ENCODINGS,
                row_group_size=max(64, _ROW_GROUP_BYTES * table.num_rows // max(1, searched)),
            )
            os.replace(staging, part.path)
        except OSError:
            staging.unlink(missing_ok=True)
            raise
        for old in replaces:
            old.path.unlink(missing_ok=True)
        self._parts = sorted(
            [*(one for one in self._parts if one not in replaces), part],
            key=lambda one: (one.first, one.serial),
        )

    def _forget_oldest(self) -> None:
        sizes = {part: part.size for part in self._parts}
        while len(sizes) > 1 and sum(sizes.values()) > self._max_bytes:
            oldest = next(iter(sizes))
            oldest.path.unlink(missing_ok=True)
            del sizes[oldest]
        self._parts = list(sizes)

    def _merge(self, split: str, settled: int) -> None:
        """Merge small files: a long run has tens of thousands of steps."""
        import pyarrow as pa

        small = [part for part in self._parts if part.split == split and part.last < settled]
        small = [part for part in small if part.size < _MERGED_BYTES][:_MERGED_FILES]
        if len(small) < _MERGED_FILES:
            return
        tables = {part: table for part in small if (table := self._table(part)) is not None}
        if tables:
            first, last = min(part.first for part in tables), max(part.last for part in tables)
            whole = pa.concat_tables(
                tables.values(), promote_options="default"
            )  # earlier files may lack a column
            self._store(whole, split, first, last, list(tables))

    def _table(self, part: RecordPart) -> pa.Table | None:
        """The rows of a file; None of one that is lost, which is then no longer among the files."""
        import pyarrow.parquet as pq

        table = _read(part.path, lambda path: pq.ParquetFile(path).read())
        if table is None:
            self._parts.remove(part)
        return table

    def _truncate(self, version: int) -> None:
        import pyarrow.compute as pc

        for part in [part for part in self._parts if part.split == Split.TRAIN]:
            if part.first >= version:
                part.path.unlink(missing_ok=True)
                self._parts.remove(part)
            elif part.last >= version and (table := self._table(part)) is not None:
                rest = table.filter(pc.less(table["step"], version))
                self._store(rest, part.split, part.first, version - 1, [part])


_REPLACES: Final = b"replaces"
_REPEATED: Final = [
    *("split", "task", "prompt_id", "prompt", "reference", "finish_reason", "excluded"),
    "token_versions.list.element",
]
_ENCODINGS: Final = {
    "token_ends.list.element": "DELTA_BINARY_PACKED",
    "token_logprob_differences.list.element": "BYTE_STREAM_SPLIT",
}


Result = TypeVar("Result")


def _read(path: Path, read: Callable[[Path], Result]) -> Result | None:
    """What ``read`` returns; None of a file that is gone, or that a power cut tore, which is deleted. Raises OSError."""
    import pyarrow as pa

    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the volume fails, not the file
        log.warning("%s: deleted, not a complete Parquet file: %s", path, error)
        path.unlink(missing_ok=True)
        return None


def replaced_by(path: Path) -> list[str]:
    """Names of the files that were merged into this one."""
    import pyarrow.parquet as pq

    metadata = pq.read_schema(path).metadata or {}
    return [name for name in metadata.get(_REPLACES, b"").decode().split(",") if name]
