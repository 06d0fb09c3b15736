"""The lifecycle's persisted state and a run's progress as fields of its status, and back. Pure.

The operator keeps the status in the run's object, ``scalerl run`` in ``status.json``: the same fields, by the same functions. The other
conditions are those of a cluster: ``scalerl_operator.controller.conditions``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any, Final

from scalerl_api.conditions import ConditionType, Phase
from scalerl_api.exports import ExportedModel, Exports
from scalerl_api.reasons import NOTHING_TO_DO, Reason
from scalerl_api.status import (
    MAX_MESSAGE,
    Condition,
    ExportsStatus,
    ExportStatus,
    FailureStatus,
    RunStatus,
    TrainerStatus,
    UsageStatus,
)
from scalerl_api.wire import BROKEN, FORECAST, Status
from scalerl_lifecycle import restarts
from scalerl_lifecycle.budget import elapsed_seconds
from scalerl_lifecycle.lifecycle_types import (
    LifecycleDecision,
    OutcomeKind,
    PersistedState,
    Problem,
    RunOutcome,
    Suspension,
)

PROGRESS: Final = frozenset(
    {
        *("step", "progress", "eta", "budget", "lastStepTime", "reward", "points", "usage", "faults"),
        *("exports", "forecast", "outlook", "stopVotes", "decisions"),
    }
)
"""Fields of the status that change continuously while a run trains."""
PROGRESS_SECONDS: Final = 15.0
"""Between two writes of a status in which only those fields have changed."""

_MESSAGE_CHARACTERS: Final = 2000
_SUSPENDED_BY: Final = {FORECAST: Reason.STOPPED_BY_FORECAST, BROKEN: Reason.BROKEN}
DECIDED: Final = frozenset({Reason.SUSPENDED_BY_SPEC, *_SUSPENDED_BY.values()})
"""Reasons of a suspension by a user or the autoscaler; any other is a failure, after which the run is suspended."""


def persisted_state(status: RunStatus) -> PersistedState:
    """The lifecycle's persisted state, from the last status."""
    trainer, failure = status.trainer, status.suspending_for
    return PersistedState(
        attempt=trainer.attempt,
        last_recorded_attempt=trainer.last_recorded_attempt,
        record=restarts.Record(**{one.name: getattr(trainer, one.name) for one in fields(restarts.Record)}),
        restarts=trainer.restarts,
        ready_since=seconds(trainer.ready_time) or None,
        next_at=seconds(trainer.next_attempt_time),
        gated_since=seconds(trainer.held_time) or None,
        drain_since=seconds(status.drain_start_time) or None,
        unreachable_since=seconds(status.coordinator_unreachable_time) or None,
        coordinator_attempt=status.coordinator_attempt,
        suspension=Suspension(status.suspension),
        resumed=status.resumed,
        has_trained=status.has_trained,
        unproven_since=status.unproven_since,
        suspending_for=None
        if failure is None
        else RunOutcome(OutcomeKind.SUSPENDED, *Reason.understood(failure.reason, failure.message)),
        awaited_since=seconds(trainer.awaited_time) or None,
        outcome=_outcome(status),
    )


def is_over(persisted: PersistedState) -> bool:
    """Whether the run has ended; a run that is suspended has not."""
    return persisted.outcome is not None and persisted.outcome.kind is not OutcomeKind.SUSPENDED


def persisted_fields(persisted: PersistedState) -> dict[str, Any]:
    """The fields from which :func:`persisted_state` reads the state, but for its outcome, which the conditions have."""
    failure = persisted.suspending_for
    return {
        "drain_start_time": _time(persisted.drain_since),
        "coordinator_unreachable_time": _time(persisted.unreachable_since),
        "coordinator_attempt": persisted.coordinator_attempt,
        "suspension": persisted.suspension.value,
        "resumed": persisted.resumed,
        "has_trained": persisted.has_trained,
        "unproven_since": persisted.unproven_since,
        "suspending_for": failure
        and FailureStatus(reason=failure.reason, message=failure.message[:MAX_MESSAGE]),
        "trainer": _trainer(persisted),
    }


def decision_fields(before: RunStatus, decision: LifecycleDecision, now: str) -> dict[str, Any]:
    """The fields of a decision: its phase, its persisted state, when the run started and ended."""
    return {
        "phase": decision.phase,
        "start_time": before.start_time or (now if decision.wanted.prepare else None),
        "completion_time": (before.completion_time or now) if is_over(decision.persisted) else None,
        **persisted_fields(decision.persisted),
    }


def trained_spec(before: RunStatus, persisted: PersistedState, text: str | None) -> str | None:
    """The spec of the last steps that were trained, while the accepted one, ``text``, has not been proven."""
    proven = before.trained_spec or before.accepted_spec
    return proven if persisted.unproven_since is not None and proven != text else None


def end_of(type_: ConditionType, decision: LifecycleDecision, stop_reason: str) -> tuple[bool, Problem]:
    """Value and reason of a condition Suspended, Completed or Failed."""
    end, outcome = _ENDS[type_], decision.persisted.outcome
    if outcome is not None and outcome.kind is end:
        return True, Problem(outcome.reason, outcome.message)
    if end is not OutcomeKind.SUSPENDED or decision.phase is not Phase.SUSPENDED:
        return False, phase_problem(decision)
    return True, Problem(_SUSPENDED_BY.get(stop_reason, Reason.SUSPENDED_BY_SPEC), "")


def condition(
    before: RunStatus, type_: ConditionType, value: bool, why: Problem, time: str, generation: int = 0
) -> Condition:
    """A condition of the run, with the time of its last change. Its message is never empty, so that ``kubectl describe`` shows the
    meaning, or what to do."""
    old = before.condition(type_)
    if old is not None and old.status == str(value):
        time = old.last_transition_time
    meaning = type_.text if value and why.reason.text == NOTHING_TO_DO else why.reason.text
    return Condition(
        type=type_.value,
        status="True" if value else "False",
        observed_generation=generation,
        last_transition_time=time,
        reason=why.reason.value,
        message=(why.message or meaning)[:_MESSAGE_CHARACTERS],
    )


def phase_problem(decision: LifecycleDecision) -> Problem:
    """The reason of a condition that is False only because of the run's phase."""
    return Problem(decision.phase, f"Waiting for {decision.waiting_for}" if decision.waiting_for else "")


_ENDS: Final = {
    ConditionType.SUSPENDED: OutcomeKind.SUSPENDED,
    ConditionType.COMPLETED: OutcomeKind.COMPLETED,
    ConditionType.FAILED: OutcomeKind.FAILED,
}


def waits_for_progress_only(before: RunStatus, now: RunStatus) -> bool:
    """Whether only the fields of :data:`PROGRESS` differ."""
    one, other = before.to_object(), now.to_object()
    return all(one.get(name) == other.get(name) for name in (one.keys() | other.keys()) - PROGRESS)


def _outcome(status: RunStatus) -> RunOutcome | None:
    for type_, end in (
        (ConditionType.COMPLETED, OutcomeKind.COMPLETED),
        (ConditionType.FAILED, OutcomeKind.FAILED),
    ):
        condition = status.condition(type_)
        if condition is not None and condition.status == "True":
            return RunOutcome(end, *Reason.understood(condition.reason, condition.message))
    suspended = status.condition(ConditionType.SUSPENDED)
    if suspended is not None and suspended.status == "True" and not status.suspension:
        return RunOutcome(OutcomeKind.SUSPENDED, *Reason.understood(suspended.reason, suspended.message))
    return None


def _time(unix_seconds: float | None) -> str | None:
    return None if not unix_seconds else rfc3339(unix_seconds)


def _trainer(persisted: PersistedState) -> TrainerStatus:
    awaited = persisted.last_recorded_attempt == persisted.attempt and persisted.next_at
    return TrainerStatus(
        attempt=persisted.attempt,
        last_recorded_attempt=persisted.last_recorded_attempt,
        restarts=persisted.restarts,
        **asdict(persisted.record),
        ready_time=_time(persisted.ready_since),
        held_time=_time(persisted.gated_since),
        awaited_time=_time(persisted.awaited_since),
        next_attempt_time=rfc3339(persisted.next_at + 0.999)
        if awaited
        else None,  # in whole seconds, rounded up
    )


def progress_fields(coordinator: Status, before: RunStatus, now: str) -> dict[str, Any]:
    return {
        "step": coordinator.step,
        "last_step_time": now if coordinator.step > (before.step or 0) else before.last_step_time,
        "reward": f"{coordinator.points[-1].reward:.4f}" if coordinator.points else before.reward,
        "points": len(coordinator.points),
        "stop_reason": coordinator.stop_reason or None,
        "usage": UsageStatus(
            seconds=f"{coordinator.own_seconds:.0f}"[:32],
            elapsed_seconds=f"{elapsed_seconds(coordinator):.0f}"[:32],
            device_hours=f"{coordinator.own_device_seconds / 3600:.4f}"[:32],
            tokens_generated=coordinator.tokens_generated,
            tokens_trained=coordinator.tokens_trained,
            compute_tokens=_count(coordinator.compute_tokens),
        ),
        "exports": before.exports if coordinator.exports is None else _exports(coordinator.exports),
    }


def _count(value: float) -> int:
    """A count of a coordinator as the API server accepts it."""
    return int(min(max(value, 0.0), 1e18)) if math.isfinite(value) else 0


def _exports(found: Exports) -> ExportsStatus:
    return ExportsStatus(best=_export(found.best), last=_export(found.last), problem=found.problem[:1024])


def _export(model: ExportedModel | None) -> ExportStatus | None:
    if model is None:
        return None
    reward = f"{model.reward:.4f}"
    return ExportStatus(version=model.version, reward=reward, path=model.path, uri=model.uri, time=model.time)


def seconds(time: str | None) -> float:
    """Unix seconds of an RFC 3339 time; 0 without one."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def rfc3339(unix_seconds: float) -> str:
    """The time in Kubernetes' format.

    >>> rfc3339(0.4)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(int(unix_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
