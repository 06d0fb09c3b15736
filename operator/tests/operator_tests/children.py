"""A runtime of small real processes for the tests of the local runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.local.run_directory import RunDirectory
from scalerl_operator.local.supervisor import LocalRuntime, LocalSettings
from scalerl_operator.local.unit import Event
from scalerl_operator.policy.restarts import RestartPolicy
from scalerl_operator.workloads import Container, Lifetime, Plan, Role, Workload

QUICK = RestartPolicy(first_delay_seconds=0.05, max_delay_seconds=0.2, max_failed_starts=3, max_restarts=4)


def run_spec(**spec: Any) -> ScaleRLRun:
    base: dict[str, Any] = {
        "model": {"scratch": {}},
        "task": {"reasoningGym": {"name": "chain_sum"}, "verifier": {"name": "reasoning-gym"}},
        "budget": {"maxSteps": 4},
    }
    return ScaleRLRun.model_validate({"metadata": {"name": "test"}, "spec": base | spec})


def workload(role: Role, lifetime: Lifetime, *argv: str, replicas: int = 1, **container: Any) -> Workload:
    return Workload(
        role, lifetime, (Container(str(role), ("python", "-S", *argv), **container),), replicas=replicas
    )


async def always(lifetime: Lifetime) -> bool:
    return True


class Harness:
    """A runtime on a plan of small processes, with its events kept."""

    def __init__(self, tmp: Path, *workloads: Workload, may_exit: Any = always, **settings: Any) -> None:
        self.directory = RunDirectory.create(tmp / "run", run_spec())
        self.events: list[Event] = []
        self.needed = True
        self.runtime = LocalRuntime(
            Plan(workloads),
            self.directory,
            settings=LocalSettings(**{"restart": QUICK, "grace_seconds": 1.0, **settings}),
            may_exit=may_exit,
            needed=lambda role: self.needed,
            on_event=self.events.append,
        )

    def log(self, name: str) -> str:
        return (self.directory.paths.logs / f"{name}.log").read_text()

    async def while_running(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run, ``scenario`` meanwhile, stop, and see that the runtime ends."""
        task = asyncio.create_task(self.runtime.run())
        try:
            await scenario()
        finally:
            self.runtime.stop()
            await asyncio.wait_for(task, 120)
