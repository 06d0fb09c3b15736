"""Runs the tracker processes of a run, and reports their status."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from scalerl_api.trackers import TrackersSpec
from scalerl_api.wire import Tracker
from scalerl_processes.kernel import describe
from scalerl_processes.waiting import cancel, pause

log = logging.getLogger(__name__)

_PACKAGES: Final = {"tensorBoard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
BACKOFF_SECONDS: Final = (5.0, 20.0, 60.0, 300.0)
"""Seconds before a failed tracker is retried, by consecutive failures; the last value repeats."""
CLOSE_SECONDS: Final = 15.0
"""Seconds that the coordinator's shutdown waits for trackers; shorter than its grace period."""


def missing_package(name: str) -> str | None:
    """A message if the package for a field of ``spec.trackers`` is not installed; None if it is.

    >>> missing_package("tensorBoard")
    """
    package = _PACKAGES.get(name)
    if package is None:  # a plugin, which the registry checks
        return None
    found = importlib.util.find_spec(package)
    if (
        found is not None and found.origin is not None
    ):  # a folder with the package's name, such as wandb creates, has no origin
        return None
    return (
        f"the Python package {package} is missing: pip install --no-deps --require-hashes -r requirements/trackers.txt, "
        "on a cluster into an image that spec.images.coordinator names (docs/trackers.md)"
    )


class Trackers:
    """Runs one process per tracker in ``spec`` from :meth:`start` until :meth:`close`."""

    def __init__(self, spec: TrackersSpec, backoff_seconds: Sequence[float] = BACKOFF_SECONDS) -> None:
        self._supervisors = [_TrackerSupervisor(name, backoff_seconds) for name in spec.asked_for]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the processes; needs a running event loop."""
        self._tasks = [
            asyncio.create_task(supervisor.run(), name=supervisor.name) for supervisor in self._supervisors
        ]

    def status(self) -> list[Tracker]:
        return [supervisor.tracker for supervisor in self._supervisors]

    async def close(self) -> None:
        """Let the trackers write the remaining rows; cancel those that do not finish in time."""
        for supervisor in self._supervisors:
            supervisor.closing.set()
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in late:
            log.error("tracker %s: did not write all steps within %.0f s", task.get_name(), CLOSE_SECONDS)
        await cancel(*self._tasks)


class _TrackerSupervisor:
    """Runs one tracker's process and restarts it whenever it ends."""

    def __init__(self, name: str, backoff_seconds: Sequence[float]) -> None:
        self.name, self._backoff_seconds = name, backoff_seconds
        self.tracker = Tracker(name=name)
        self.closing = asyncio.Event()

    async def run(self) -> None:
        """Run the process until closing, and once more if the last attempt failed."""
        consecutive_failures = 0
        while True:
            final_attempt = self.closing.is_set()
            before = self.tracker.step
            try:
                problem = missing_package(self.name) or await self._attempt()
            except OSError as error:
                problem = f"its process cannot be started: {error}"
            if problem:
                self._mark_failed(problem)
            if final_attempt or (self.closing.is_set() and not problem):
                return
            consecutive_failures = 1 if self.tracker.step > before else consecutive_failures + 1
            seconds = self._backoff_seconds[min(consecutive_failures, len(self._backoff_seconds)) - 1]
            await pause(seconds, until=self.closing)

    def _mark_failed(self, problem: str) -> None:
        if problem != self.tracker.problem:
            log.error("tracker %s failed and is retried; the run continues: %s", self.name, problem)
        self.tracker = msgspec.structs.replace(
            self.tracker, failures=self.tracker.failures + 1, problem=problem
        )

    async def _attempt(self) -> str:
        """Run the process once; returns why it failed, or an empty string if it ended on request.

        Raises:
            OSError: the process cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scalerl_coordinator.tracking.tracker_process", self.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A new session, so that a signal to the coordinator's process group does not reach the process.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        closing = asyncio.create_task(self._close_when_asked(process.stdin))
        problem = ""
        try:
            async for line in process.stdout:
                report = msgspec.json.decode(line, type=Tracker)
                problem = report.problem or problem
                if not report.problem:
                    self._mark_healthy(report.step)
            code = await process.wait()
        finally:
            closing.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code == 0 and self.closing.is_set():
            return ""
        return problem or f"its process {describe(code)}"

    def _mark_healthy(self, step: int) -> None:
        if self.tracker.problem:
            log.info("tracker %s works again", self.name)
        self.tracker = msgspec.structs.replace(self.tracker, step=step, problem="")

    async def _close_when_asked(self, stdin: asyncio.StreamWriter) -> None:
        await self.closing.wait()
        stdin.close()
