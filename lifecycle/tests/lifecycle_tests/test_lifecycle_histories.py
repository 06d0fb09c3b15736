"""A run on a cluster and on one machine goes through the same phases, reasons and counts, of the same observations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from coordinator_statuses import status
from local_runs import StandIn
from minimal_run import run_spec

from scalerl_api.status import RunStatus
from scalerl_api.wire import INTERRUPTED, Phase, Status
from scalerl_lifecycle.lifecycle_types import (
    ContainerExit,
    Job,
    JobState,
    LifecycleDecision,
    LifecycleInput,
    Service,
)
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.runtime import step
from scalerl_lifecycle.status_fields import persisted_fields, persisted_state
from scalerl_lifecycle.workloads import Role
from scalerl_local.local_runtime import LocalRuntime
from scalerl_local.run_directory import RunDirectory
from scalerl_operator.controller.parts import Findings, Observed, PodView, Run
from scalerl_operator.controller.reconcile import accept, decide
from scalerl_operator.controller.report import report
from scalerl_operator.kube.types import Object

NOW = 1e9
DONE, NONE = Job(JobState.COMPLETE), Job()


@dataclass(frozen=True)
class Scene:
    """What exists of a run at one moment, so many seconds after the one before."""

    seconds: float = 5.0
    prepare: Job = DONE
    trainer: Job = NONE
    ready: bool = True
    """Coordinator and generators."""
    bad_input: ContainerExit | None = None
    """Of the generators."""
    suspend: bool = False
    coordinator: dict[str, Any] | None = field(default_factory=dict)
    """Fields of its status; None: it does not answer."""

    @property
    def status(self) -> Status | None:
        changes = {"step": 20, "published_version": 20} | (self.coordinator or {})
        return None if self.coordinator is None else status([], **changes)


def trainer(attempt: int, *codes: int, state: JobState = JobState.ACTIVE) -> Job:
    """A ready attempt, or one that has failed with these exit codes."""
    ends = tuple(ContainerExit(code, f"line {code}") for code in codes)
    return Job(
        JobState.FAILED if codes else state, attempt, ends, ready=not codes and state is JobState.ACTIVE
    )


BEGIN = [
    Scene(prepare=Job(JobState.ABSENT), ready=False, coordinator=None),
    Scene(prepare=Job(JobState.ACTIVE), ready=False, coordinator=None),
    Scene(ready=False, coordinator=None),
    Scene(trainer=replace(trainer(1), ready=False), coordinator={"phase": Phase.WAITING, "step": 0}),
]
CRASH = [
    Scene(trainer=trainer(1, 1)),
    Scene(1.0, trainer=trainer(1, 1)),
    Scene(2.0),
    Scene(trainer=trainer(2)),
]
DRAIN = [
    Scene(trainer=trainer(2), suspend=True),
    Scene(
        trainer=trainer(2), suspend=True, coordinator={"stop_reason": INTERRUPTED, "phase": Phase.FINISHING}
    ),
    Scene(
        trainer=trainer(2, state=JobState.COMPLETE), suspend=True, coordinator={"stop_reason": INTERRUPTED}
    ),
    Scene(prepare=Job(), ready=False, coordinator=None, suspend=True),
]
RESUME = [
    Scene(prepare=Job(), ready=False, coordinator=None),
    Scene(prepare=Job(JobState.ACTIVE), ready=False, coordinator=None),
    Scene(coordinator={"stop_reason": INTERRUPTED, "phase": Phase.FINISHED}),
    Scene(trainer=replace(trainer(2), ready=False)),
]
END = [
    Scene(trainer=trainer(2), coordinator={"stop_reason": "maxSteps", "phase": Phase.FINISHING}),
    Scene(
        trainer=trainer(2, state=JobState.COMPLETE),
        coordinator={"stop_reason": "maxSteps", "phase": Phase.FINISHED},
    ),
    Scene(trainer=trainer(2, state=JobState.COMPLETE), ready=False, coordinator=None),
]
SCRIPTS: dict[str, tuple[list[Scene], str, str]] = {
    "crash and end": ([*BEGIN, Scene(trainer=trainer(1)), *CRASH, *END], "Completed", "BudgetReached"),
    "diverges twice": (
        [*BEGIN, Scene(trainer=trainer(1, 3)), Scene(trainer=trainer(1, 3)), Scene(), Scene(trainer=trainer(2, 3))],
        "Failed",
        "Diverged",
    ),
    "never ready": (
        [*BEGIN, *(s for n in range(1, 7) for s in (Scene(40.0, trainer=trainer(n, 1)), Scene(40.0)))],
        "Failed",
        "StartsFailed",
    ),
    "wrong input of the preparation": (
        [*BEGIN[:2], Scene(prepare=Job(JobState.FAILED, exits=(ContainerExit(2, "no model"),)), coordinator=None)],
        "Failed",
        "BadInput",
    ),
    "wrong input of the generators": (
        [*BEGIN, Scene(ready=False, bad_input=ContainerExit(2, "no layer"), coordinator={"published_version": -1})],
        "Failed",
        "BadInput",
    ),
    "suspended and resumed": ([*BEGIN, Scene(trainer=trainer(1)), *CRASH, *DRAIN, *RESUME, *END], "Completed", "BudgetReached"),
    "held after a resumption": (
        [*BEGIN, Scene(trainer=trainer(1)), *CRASH, *DRAIN, *RESUME, Scene(trainer=trainer(2, 2))],
        "Suspended",
        "BadInput",
    ),
}  # fmt: skip


class ClusterHistory:
    """The operator's own steps without the API server."""

    def __init__(self) -> None:
        manifest = run_spec().to_manifest()
        metadata = {
            "uid": "0b6f0c52-7d4e-4a53-9a68-0a3c5c1f3f10",
            "namespace": "ml",
            "generation": 1,
            "resourceVersion": "1",
        }
        self.obj: Object = {**manifest, "metadata": manifest["metadata"] | metadata, "status": {}}

    def reconcile(self, scene: Scene, now: float) -> tuple[LifecycleDecision, RunStatus]:
        self.obj["spec"]["suspend"] = scene.suspend
        before = RunStatus.read(self.obj["status"])
        run = Run(self.obj, {}, now, before, persisted_state(before))
        accepted = accept(run)
        pods = tuple(_pod(role, scene) for role in (Role.COORDINATOR, Role.GENERATOR))
        observed = Observed(pods, scene.prepare, scene.trainer, serving=scene.ready, coordinator=scene.status)
        decision = decide(run, accepted, observed)
        written = report(Findings(run, accepted, observed, decision))
        self.obj["status"] = written.to_object()
        return decision, written


def _pod(role: Role, scene: Scene) -> PodView:
    bad_input = scene.bad_input if role is Role.GENERATOR else None
    ready = scene.ready or (role is Role.COORDINATOR and scene.coordinator is not None)
    return PodView(role, role, role, "", "", NOW, False, False, ready, False, 0, None, (), bad_input)


class StillProcesses:
    """In place of the processes of a local run: those of a scene, whatever is decided."""

    def __init__(self) -> None:
        self.scene = Scene()

    def observed(self, unix_seconds: float) -> LifecycleInput:
        scene = self.scene
        failing = scene.bad_input is not None
        ready = Service(ready=1) if scene.ready else Service(starting=not failing, bad_input=scene.bad_input)
        coordinator = Service(ready=1) if scene.coordinator is not None else Service(starting=1)
        return LifecycleInput(
            unix_seconds,
            prepare=scene.prepare,
            trainer=scene.trainer,
            coordinator=coordinator,
            generators=ready,
            serving=scene.coordinator is not None,
        )

    def apply(self, decision: LifecycleDecision) -> None:
        """Scenes follow a script."""

    def existing_replicas(self, role: Role) -> int:
        return 1


@asynccontextmanager
async def local_history(
    tmp_path: Path,
) -> AsyncIterator[tuple[LocalRuntime, StillProcesses, StandIn, list[float]]]:
    run, now = run_spec(), [NOW]
    directory = RunDirectory.create(tmp_path / "run", run)
    local = LocalRuntime(run, plan(run), directory, clock=lambda: now[0])
    processes, coordinator = StillProcesses(), StandIn(None, lambda: False)
    await local._supervisor.close()
    await local._client.aclose()
    local._supervisor, local._client = processes, coordinator  # type: ignore[assignment]
    yield local, processes, coordinator, now
    directory.release()


@pytest.mark.parametrize("name", SCRIPTS)
async def test_histories_are_the_same(tmp_path: Path, name: str) -> None:
    script, phase, reason = SCRIPTS[name]
    cluster = ClusterHistory()
    async with local_history(tmp_path) as (local, processes, coordinator, now):
        for number, scene in enumerate(script):
            now[0] += scene.seconds
            processes.scene, local._suspend = scene, scene.suspend
            coordinator.changes = {"step": 20, "published_version": 20} | (scene.coordinator or {})
            decided, expected = cluster.reconcile(scene, now[0])
            decision = await step(local, local._run.spec, local.persisted)
            local.persisted = decision.persisted
            found = local._file.status
            at = f"{name}, scene {number}: {scene}"
            assert replace(decision, persisted=decided.persisted) == decided, at
            assert persisted_fields(persisted_state(found)) == persisted_fields(persisted_state(expected)), at
            assert _ends(found) == _ends(expected), at
            await asyncio.sleep(0)
    assert (found.phase, next(c.reason for c in found.conditions if c.status == "True")) == (phase, reason)
    if phase == "Failed" or reason == "BadInput":
        assert found.trainer == expected.trainer


def _ends(status: RunStatus) -> list[tuple[str, str, str, str, str]]:
    """Phase, and the conditions that say how a run has ended, with the time of their change."""
    return [
        (status.phase, c.status, c.reason, c.message, c.last_transition_time)
        for type_ in ("Suspended", "Completed", "Failed")
        if (c := status.condition(type_)) is not None
    ]
