"""Inputs of the lifecycle for tests: a running run and what is changed of it."""

from __future__ import annotations

from coordinator_statuses import status

from scalerl_api.spec import RunSpec
from scalerl_api.wire import Phase as CoordinatorPhase
from scalerl_api.wire import Status
from scalerl_lifecycle.lifecycle_types import Job, JobState, LifecycleDecision, LifecycleInput, PersistedState


def spec(**changes: object) -> RunSpec:
    base: dict[str, object] = {
        "model": {"path": "/m"},
        "task": {"jsonl": {"path": "/t"}, "verifier": {"name": "exact"}},
        "budget": {"maxSteps": 10, "maxSeconds": 1000},
    }
    return RunSpec.model_validate(base | changes)


def reported(phase: CoordinatorPhase, reason: str = "", seconds: float = 10.0) -> Status:
    return status([], phase=phase, stop_reason=reason, wall_seconds=seconds, device_seconds=2 * seconds)


SPEC = spec()
DONE = Job(JobState.COMPLETE)
RUNNING = LifecycleInput(
    100.0,
    prepare=DONE,
    trainer=Job(JobState.ACTIVE, 1),
    status=reported(CoordinatorPhase.RUNNING),
)
FIRST = PersistedState(attempt=1, ready_since=95.0)


def exists(decision: LifecycleDecision) -> tuple[bool, bool, bool, int | None]:
    return (
        decision.wanted.prepare,
        decision.wanted.coordinator,
        decision.wanted.generators,
        decision.wanted.trainer,
    )
