"""Finished runs beside a run's directory, as a prior of its forecast."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from scalerl_api.forecast import MAX_EARLIER_RUNS, EarlierRun
from scalerl_api.load import accepted_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_operator.autoscaling.history import MOST_EXAMINED, consider, words
from scalerl_operator.local.run_directory import in_use, stored_manifest

MAX_BYTES: Final = 16 * 1024 * 1024
"""Of a curve that is read: 100,000 evaluations."""


class FinishedRuns:
    """Reads the finished runs in the parent of ``root``, the directory of the run that asks.

    A run is finished once a command has left its ``summary.json`` and no process works on it. on_read: told what was found.
    """

    def __init__(self, root: Path, on_read: Callable[[str], None]) -> None:
        self._root = root
        self._on_read = on_read

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        """Those that may be a prior of a run of this spec: the newest first, at most ``MAX_EARLIER_RUNS``."""
        runs, left_out = await asyncio.to_thread(self._read, spec)
        if runs or left_out:
            self._on_read(words(runs, left_out))
        return runs

    def _read(self, spec: RunSpec) -> tuple[list[EarlierRun], dict[str, str]]:
        runs, left_out = list[EarlierRun](), dict[str, str]()
        newest = sorted(self._finished(), reverse=True)
        for _, root in newest[:MOST_EXAMINED]:
            found = consider(root.name, functools.partial(_load, root), spec)
            if isinstance(found, EarlierRun):
                runs.append(found)
            else:
                left_out[root.name] = found
            if len(runs) == MAX_EARLIER_RUNS:
                break
        return runs, left_out

    def _finished(self) -> Iterator[tuple[float, Path]]:
        """When they ended, and where they are."""
        for root in self._root.parent.iterdir():
            if root.is_symlink():  # such as runs/latest: the run would count twice
                continue
            paths = RunPaths(root)
            try:
                ended = paths.summary.stat().st_mtime
            except OSError:
                continue
            if root != self._root and not in_use(root):
                yield ended, root


def _load(root: Path) -> tuple[RunSpec, str]:
    path = RunPaths(root).curve
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"its curve has more than {MAX_BYTES} bytes")
    return accepted_run(stored_manifest(root)).spec, path.read_text(encoding="utf-8")
