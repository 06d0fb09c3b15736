"""Runs of small real processes for the tests of the local runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from coordinator_statuses import status
from minimal_run import run_spec

from scalerl_api.wire import Phase, Status
from scalerl_lifecycle.restarts import RestartPolicy
from scalerl_lifecycle.workloads import Container, Lifetime, Plan, Role, Workload
from scalerl_local.commands import LocalSettings
from scalerl_local.local_runtime import LocalRuntime
from scalerl_local.run_directory import RunDirectory
from scalerl_local.run_view import Event, Failure, UnitState, UnitStatus

QUICK = RestartPolicy(first_delay_seconds=0.05, max_delay_seconds=0.2, max_failed_starts=3, max_restarts=4)


def workload(role: Role, lifetime: Lifetime, *argv: str, replicas: int = 1, **container: Any) -> Workload:
    return Workload(
        role, lifetime, (Container(str(role), ("python", "-S", *argv), **container),), replicas=replicas
    )


class StandIn:
    """In place of a coordinator: the run trains until its trainer has exited with 0 and ``is_complete`` says so."""

    def __init__(self, trainer: UnitStatus | None, is_complete: Callable[[], bool]) -> None:
        self.trainer = trainer
        self.is_complete = is_complete
        self.changes: dict[str, Any] = {}
        """Fields of the status."""
        self.stops: list[str] = []

    async def status(self) -> Status:
        done = self.trainer is not None and self.trainer.state is UnitState.DONE and self.is_complete()
        phase = Phase.FINISHED if done else Phase.RUNNING
        fields = {"phase": phase, "stop_reason": "maxSteps" if done else ""} | self.changes
        return status([], **fields)

    async def stop(self, reason: str) -> None:
        self.stops.append(reason)

    async def aclose(self) -> None:
        """Nothing is open."""


class Harness:
    """A run of small processes, with its events kept. ``is_complete``: whether the trainer, which has exited with 0, has ended the run."""

    def __init__(
        self,
        tmp: Path,
        *workloads: Workload,
        is_complete: Callable[[], bool] = lambda: True,
        spec: dict[str, Any] | None = None,
        resume: bool = False,
        **settings: Any,
    ) -> None:
        run = run_spec(**spec or {})
        self.directory = (RunDirectory.resume if resume else RunDirectory.create)(tmp / "run", run)
        self.events: list[Event] = []
        self.local = LocalRuntime(
            run,
            Plan(workloads),
            self.directory,
            settings=LocalSettings(**{"restart": QUICK, "grace_seconds": 1.0, **settings}),
            on_event=self.events.append,
        )
        self.runtime = self.local._supervisor
        trainer = (s for s in self.runtime.statuses() if s.role is Role.TRAINER)
        self.coordinator = StandIn(next(trainer, None), is_complete)
        self.local._client = self.coordinator  # type: ignore[assignment]

    def log(self, name: str) -> str:
        return (self.directory.paths.logs / f"{name}.log").read_text()

    async def run(self) -> Failure | None:
        return (await self.local.run()).failure

    def stop(self) -> None:
        """Without a drain."""
        self.local._is_over = True
        self.local._wake.set()

    def kill(self) -> None:
        self.local.interrupt()
        self.local.interrupt()

    async def while_running(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run, ``scenario`` meanwhile, stop, and see that the run ends."""
        task = asyncio.create_task(self.run())
        try:
            await scenario()
        finally:
            self.stop()
            await asyncio.wait_for(task, 120)
