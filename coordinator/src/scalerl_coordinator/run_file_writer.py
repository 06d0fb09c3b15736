"""Writes the run's files beside the event loop, in one thread: ``metrics.jsonl``, the curves, exports and decisions."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from scalerl_api import wire
from scalerl_api.exports import Exports
from scalerl_api.health import HealthMonitor
from scalerl_coordinator.core import Core
from scalerl_coordinator.decisions import StaleOffset
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.http import ErrorResponse

log = logging.getLogger(__name__)

T = TypeVar("T")


class RunFileWriter:
    """The files of one run."""

    def __init__(self, core: Core, files: RunFiles) -> None:
        self._core, self._files = core, files
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self.monitor = HealthMonitor()
        """Judges the run's health by the rows of metrics.jsonl."""
        self.exports: Exports | None = None
        """The exported models, as last read or reported."""
        self._points_written: list[wire.EvaluationPoint] | None = None
        self._logged_error = ""

    async def write_rows(self, *, whole: bool = False) -> bool:
        """Write the rows to metrics.jsonl; see :meth:`.RunFiles.write_rows`. Returns whether that succeeded."""
        rows, version = dict(self._core.state.rows), self._core.state.version
        if self._core.state.awaits_trainer:
            return True  # the file may have the rows up to the trainer's checkpoint, which the state does not know yet
        return await self._on_files(lambda: self._files.write_rows(rows, version, whole=whole))

    async def read_health(self) -> None:
        """Judge the health by the rows of the file."""
        with contextlib.suppress(OSError):  # then it is judged from the next steps
            loop = asyncio.get_running_loop()
            self.monitor.load(await loop.run_in_executor(self.thread, self._files.health_rows))

    async def write_curve(self) -> None:
        """Write the curves if they have a new point."""
        points, forecast = self._core.points, self._core.settings.forecast_task
        if points != self._points_written and await self._on_files(
            lambda: self._files.write_curves(points, forecast)
        ):
            self._points_written = points

    async def _on_files(self, write: Callable[[], None]) -> bool:
        """Write metrics.jsonl or curve.csv in the files' thread. Returns whether that succeeded.

        A failure does not stop the run, since the journal has their content until a checkpoint is committed.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self.thread, write)
        except OSError as error:
            if str(error) != self._logged_error:  # retried at every tick, but logged once
                log.error("cannot write metrics.jsonl or curve.csv, retrying: %s", error)
            self._logged_error = str(error)
            return False
        if self._logged_error:
            log.info("metrics.jsonl and curve.csv can be written again")
            self._logged_error = ""
        return True

    async def on_decision_log(self, access: Callable[[], T]) -> T:
        """Access decisions.jsonl in the files' thread. Raises ErrorResponse."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, access)
        except StaleOffset as problem:
            raise ErrorResponse(409, "superseded", str(problem)) from problem
        except ValueError as problem:
            raise ErrorResponse(400, "bad-request", str(problem)) from problem
        except OSError as problem:
            message = f"decisions.jsonl: {problem.strerror or problem}"
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ErrorResponse(
                    507, "no-space", f"{message}; free space on the run's volume"
                ) from problem
            raise ErrorResponse(500, "disk-failed", message) from problem

    async def read_exports(self) -> None:
        self.exports = await asyncio.get_running_loop().run_in_executor(self.thread, self._files.exports)

    async def keep_exports(self, exports: Exports) -> None:
        """Write the exported models of a trainer that has a directory of its own. Raises ErrorResponse."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.thread, self._files.keep_exports, exports)
        except OSError as error:
            message = f"exports.json: {error.strerror or error}"
            raise ErrorResponse(500, "disk-failed", message) from error
        self.exports = exports
