"""Keeps the processes of a run's trackers alive, and knows how each stands."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
from typing import Final

import msgspec

from scalerl_api.trackers import TrackersSpec
from scalerl_api.wire import Tracker

log = logging.getLogger(__name__)

_PACKAGES: Final = {"tensorBoard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
PAUSES: Final = (5.0, 20.0, 60.0, 300.0)
"""Seconds before a tracker that failed is tried again; the last one for ever after."""
CLOSE_SECONDS: Final = 15.0
"""How long the end of the coordinator waits for trackers: within its grace period."""


def missing_package(name: str) -> str | None:
    """What is wrong where the package for a field of ``spec.trackers`` is not installed; None where it is.

    >>> missing_package("tensorBoard")
    """
    package = _PACKAGES[name]
    found = importlib.util.find_spec(package)
    if (
        found is not None and found.origin is not None
    ):  # a folder of the name, as wandb makes them, has no origin
        return None
    return (
        f"the Python package {package} is missing: pip install --no-deps --require-hashes -r requirements/trackers.txt, "
        "on a cluster into an image that spec.images.coordinator names (docs/trackers.md)"
    )


class Trackers:
    """The processes of all trackers that ``spec`` asks for, between :meth:`start` and :meth:`close`."""

    def __init__(self, spec: TrackersSpec) -> None:
        self._keepers = [_Keeper(name) for name in spec.asked_for]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start them all; needs a running event loop."""
        self._tasks = [asyncio.create_task(keeper.keep(), name=keeper.name) for keeper in self._keepers]

    def status(self) -> list[Tracker]:
        """How each stands."""
        return [keeper.tracker for keeper in self._keepers]

    async def close(self) -> None:
        """Have all written that is in ``metrics.jsonl`` and ``curve.csv`` now; what cannot be in time is given up."""
        for keeper in self._keepers:
            keeper.closing.set()
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in late:
            log.error("tracker %s: not all steps are written after %.0f s", task.get_name(), CLOSE_SECONDS)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Keeper:
    """One tracker: its process, started again whenever it ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracker = Tracker(name=name)
        self.closing = asyncio.Event()

    async def keep(self) -> None:
        """Until closing, and then once more if the last attempt failed."""
        failed_in_a_row = 0
        while True:
            at_the_end = self.closing.is_set()
            before = self.tracker.step
            try:
                problem = missing_package(self.name) or await self._attempt()
            except OSError as error:
                problem = f"its process cannot be started: {error}"
            if problem:
                self._failed(problem)
            if at_the_end or (self.closing.is_set() and not problem):
                return
            failed_in_a_row = 1 if self.tracker.step > before else failed_in_a_row + 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSES[min(failed_in_a_row, len(PAUSES)) - 1]):
                    await self.closing.wait()

    def _failed(self, problem: str) -> None:
        if problem != self.tracker.problem:
            log.error("tracker %s failed and is tried again, the run goes on: %s", self.name, problem)
        self.tracker = msgspec.structs.replace(
            self.tracker, failures=self.tracker.failures + 1, problem=problem
        )

    async def _attempt(self) -> str:
        """One life of the process. Returns why it failed, empty where it was asked to end and did. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scalerl_coordinator.tracking.process", self.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A signal to the coordinator's group is the coordinator's to answer.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        closing = asyncio.create_task(self._close_when_asked(process.stdin))
        problem = ""
        try:
            async for line in process.stdout:
                told = msgspec.json.decode(line, type=Tracker)
                problem = told.problem or problem
                if not told.problem:
                    self._works(told.step)
            code = await process.wait()
        finally:
            closing.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code == 0 and self.closing.is_set():
            return ""
        return problem or f"its process ended with code {code}"

    def _works(self, step: int) -> None:
        if self.tracker.problem:
            log.info("tracker %s works again", self.name)
        self.tracker = msgspec.structs.replace(self.tracker, step=step, problem="")

    async def _close_when_asked(self, stdin: asyncio.StreamWriter) -> None:
        await self.closing.wait()
        stdin.close()
