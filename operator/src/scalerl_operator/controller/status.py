"""The run's status, from its observation and its decision, and back to the lifecycle's memory at the next reconcile; and all
writes of the run's own object: status and Events, finalizer, ``spec.suspend`` and ``spec.generator.replicas``, and its deletion.

Each write requires the version that was read: a change by another writer is reconciled first.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_api.exports import ExportedModel, Exports
from scalerl_api.recipe import resolve
from scalerl_api.spec import KIND
from scalerl_api.status import (
    MAX_MESSAGE,
    ExportsStatus,
    ExportStatus,
    GeneratorsStatus,
    HoldingStatus,
    RecipeValue,
    RunStatus,
    SourceStatus,
    TrainerStatus,
    UsageStatus,
)
from scalerl_api.wire import Status
from scalerl_operator.controller.conditions import conditions, event_type
from scalerl_operator.controller.observe import rfc3339, seconds
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.controller.summary import columns
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import AUTOSCALER, FIELD_OWNER, FINALIZER, SCALED_BY, selector
from scalerl_operator.policy import restarts
from scalerl_operator.policy.budget import elapsed_seconds
from scalerl_operator.policy.lifecycle_types import End, Memory, Outcome, Suspension
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

PROGRESS: Final = frozenset(
    {
        *("step", "progress", "eta", "budget", "lastStepTime", "reward", "points", "usage", "trouble"),
        *("exports", "forecast", "outlook", "stopVotes", "decisions"),
    }
)
"""Fields of the status that change continuously while a run trains."""
PROGRESS_SECONDS: Final = 15.0
"""Between two writes of a status in which only those fields have changed."""


def report(context: RunContext) -> RunStatus:
    """The current status."""
    before, memory, now = context.before, context.decision.memory, rfc3339(context.unix_seconds)
    labels = sorted(selector(context.uid, Role.GENERATOR).items())
    update: dict[str, Any] = {
        "phase": context.decision.phase,
        "observed_generation": context.generation,
        "accepted_spec": context.spec_text if context.not_started is None else before.accepted_spec,
        "accepted_spec_hash": context.long_spec if context.not_started is None else before.accepted_spec_hash,
        "trained_spec": _trained_spec(context),
        "conditions": conditions(context),
        "start_time": before.start_time or (now if context.decision.prepare else None),
        "completion_time": (before.completion_time or now) if is_over(memory) else None,
        "drain_start_time": _time(memory.drain_since),
        "coordinator_unreachable_time": _time(memory.unreachable_since),
        "rest": memory.rest.value,
        "resumed": memory.resumed,
        "has_trained": memory.has_trained,
        "unproven_since": memory.unproven_since,
        "holding": _holding(memory.holding),
        "source": _source(context),
        "trainer": _trainer(memory),
        "model": context.model,
        "selector": before.selector or ",".join(f"{key}={value}" for key, value in labels),
    }
    scaling = context.autoscaler
    if scaling.known and scaling.decisions:
        update |= {
            "forecast": scaling.forecast,
            "outlook": scaling.outlook,
            "stop_votes": scaling.votes,
            "decision": scaling.state,
            "decisions": list(scaling.decisions),
        }
    if context.accepted is not None:
        update["recipe"] = [
            RecipeValue(field=choice.field, value=choice.value[:256], origin=choice.shown_origin)
            for choice in resolve(context.accepted.spec.recipe).choices
        ]
        pods = [pod for pod in context.observed.of(Role.GENERATOR) if not pod.over]
        ready = sum(pod.ready for pod in pods)
        update |= {"replicas": len(pods), "generators": GeneratorsStatus(replicas=len(pods), ready=ready)}
    if context.coordinator is not None:
        update |= _progress(context.coordinator, before, now)
    status = before.model_copy(update=update)
    return status.model_copy(update=columns(context, status))


def remembered(status: RunStatus) -> Memory:
    """The lifecycle's memory, from the last status."""
    trainer = status.trainer
    return Memory(
        attempt=trainer.attempt,
        last_recorded_attempt=trainer.last_recorded_attempt,
        record=restarts.Record(
            consecutive_failures=trainer.consecutive_failures,
            failed_starts=trainer.failed_starts,
            diverged=trainer.diverged,
            publish_refused=trainer.publish_refused,
            has_been_ready=trainer.has_been_ready,
            disruptions=trainer.disruptions,
        ),
        restarts=trainer.restarts,
        ready_since=seconds(trainer.ready_time) or None,
        next_at=seconds(trainer.next_attempt_time),
        held_since=seconds(trainer.held_time) or None,
        drain_since=seconds(status.drain_start_time) or None,
        unreachable_since=seconds(status.coordinator_unreachable_time) or None,
        rest=Suspension(status.rest),
        resumed=status.resumed,
        has_trained=status.has_trained,
        unproven_since=status.unproven_since,
        holding=_held(status.holding),
        awaited_since=seconds(trainer.awaited_time) or None,
        outcome=_outcome(status),
    )


def is_over(memory: Memory) -> bool:
    """Whether the run has ended; a run that is held has not."""
    return memory.outcome is not None and memory.outcome.end is not End.HELD


def _trained_spec(context: RunContext) -> str | None:
    """The spec of the last steps that were trained, while the accepted one has not been proven."""
    before = context.before
    if context.not_started is not None:
        return before.trained_spec
    proven = before.trained_spec or before.accepted_spec
    unproven = context.decision.memory.unproven_since is not None and proven != context.spec_text
    return proven if unproven else None


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) from ``before`` to ``after``, with null for fields that ``after`` does not have.

    >>> merge_patch({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}, "e": 4})
    {'a': {'b': 1, 'c': None}, 'e': 4, 'd': None}
    """
    patch: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merge_patch(old, value)
        patch[name] = value
    return patch | {name: None for name in before if name not in after}


def waits_for_progress_only(before: RunStatus, now: RunStatus) -> bool:
    """Whether only the fields of :data:`PROGRESS` differ."""
    one, other = before.to_object(), now.to_object()
    return all(one.get(name) == other.get(name) for name in (one.keys() | other.keys()) - PROGRESS)


def _outcome(status: RunStatus) -> Outcome | None:
    for type_, end in ((ConditionType.COMPLETED, End.COMPLETED), (ConditionType.FAILED, End.FAILED)):
        condition = status.condition(type_)
        if condition is not None and condition.status == "True":
            return Outcome(end, *Reason.understood(condition.reason, condition.message))
    suspended = status.condition(ConditionType.SUSPENDED)
    if suspended is not None and suspended.status == "True" and not status.rest:
        return Outcome(End.HELD, *Reason.understood(suspended.reason, suspended.message))
    return None


def _source(context: RunContext) -> SourceStatus | None:
    """Of a fork, its source: as found at its preparation, with the step as the coordinator reports it."""
    given = None if context.accepted is None else context.accepted.spec.source
    if given is None:
        return context.before.source
    found = context.before.source or SourceStatus(run=given.run)
    if context.source_uid:
        found = found.model_copy(update={"uid": context.source_uid[:64]})
    if context.coordinator is not None and context.coordinator.forked_step >= 0:
        found = found.model_copy(update={"step": context.coordinator.forked_step})
    return found


def _holding(failure: Outcome | None) -> HoldingStatus | None:
    return (
        None
        if failure is None
        else HoldingStatus(reason=failure.reason, message=failure.message[:MAX_MESSAGE])
    )


def _held(holding: HoldingStatus | None) -> Outcome | None:
    return None if holding is None else Outcome(End.HELD, *Reason.understood(holding.reason, holding.message))


def _time(unix_seconds: float | None) -> str | None:
    return None if not unix_seconds else rfc3339(unix_seconds)


def _trainer(memory: Memory) -> TrainerStatus:
    awaited = memory.last_recorded_attempt == memory.attempt and memory.next_at
    return TrainerStatus(
        attempt=memory.attempt,
        last_recorded_attempt=memory.last_recorded_attempt,
        restarts=memory.restarts,
        consecutive_failures=memory.record.consecutive_failures,
        failed_starts=memory.record.failed_starts,
        disruptions=memory.record.disruptions,
        diverged=memory.record.diverged,
        publish_refused=memory.record.publish_refused,
        has_been_ready=memory.record.has_been_ready,
        ready_time=_time(memory.ready_since),
        held_time=_time(memory.held_since),
        awaited_time=_time(memory.awaited_since),
        next_attempt_time=rfc3339(memory.next_at + 0.999)
        if awaited
        else None,  # in whole seconds, rounded up
    )


def _progress(coordinator: Status, before: RunStatus, now: str) -> dict[str, Any]:
    """Fields from the coordinator's status."""
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


# --- writes -------------------------------------------------------------------------------------


class RunObject:
    """Writes the ScaleRLRun objects."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._dropped: set[str] = set()
        """Fields of the status that an older installed CRD drops, as already logged."""

    async def write(self, context: RunContext, status: RunStatus, *, at_once: bool = False) -> float | None:
        """Writes the status if it has changed, and the Events of the change. Returns the seconds until a write that was put off
        is due. at_once: never puts it off."""
        new, old = status.to_object(), context.obj.get("status") or {}
        if new == old or (new, old) == context.state.pruned:
            return None
        if not at_once and context.before.conditions and waits_for_progress_only(context.before, status):
            due = context.state.status_written + PROGRESS_SECONDS - context.unix_seconds
            if 0 < due <= PROGRESS_SECONDS:
                return due
        context.state.status_written = context.unix_seconds
        await self._patch(context, {"status": merge_patch(old, new)}, "status")
        kept = context.obj["status"]
        dropped = {f"status.{field}" for field, value in new.items() if kept.get(field) != value}
        context.state.pruned = (new, kept) if dropped else None
        if not dropped <= self._dropped:
            self._dropped |= dropped
            text = "the CRD %s is of an older release and does not keep all of %s: update the CRDs, then restart the operator"
            log.warning(text, KIND, ", ".join(sorted(dropped)))
        await _write_events(self._api, context.obj, context.before, status)
        return None

    async def hold(self, context: RunContext) -> None:
        """Adds the finalizer, so that the run drains before it is deleted."""
        await self._set_finalizers(context, [*context.finalizers, FINALIZER])

    async def release(self, context: RunContext) -> None:
        """Removes the finalizer after the drain; the garbage collector then deletes the run's objects."""
        await self._set_finalizers(context, [f for f in context.finalizers if f != FINALIZER])

    async def suspend(self, context: RunContext) -> None:
        """Sets ``spec.suspend``, as Kueue does, so that a user can resume the run by the same field."""
        await self._patch(context, {"spec": {"suspend": True}, "metadata": {"uid": context.uid}})

    async def scale(self, context: RunContext, generators: int, decision: int) -> None:
        """Sets ``spec.generator.replicas``, as an HPA does, and the decision's number in an annotation: each decision is applied
        once, so that a user's number stays until the next decision."""
        metadata = {"uid": context.uid, "annotations": {SCALED_BY: str(decision)}}
        patch = {"spec": {"generator": {"replicas": generators}}, "metadata": metadata}
        await self._patch(context, patch, manager=AUTOSCALER)

    async def expire(self, context: RunContext) -> float | None:
        """Deletes a run ``ttlSecondsAfterFinished`` after its end. Returns the seconds until then."""
        ttl = context.run.spec.ttl_seconds_after_finished
        if ttl is None or context.deleted:
            return None
        if context.before.completion_time is None:
            return 0.0  # this reconcile has written it, and the operator's own writes wake no run
        left = seconds(context.before.completion_time) + ttl - context.unix_seconds
        if left > 0:
            return left
        await self._api.delete(KIND, context.namespace, context.name, uid=context.uid)
        return None

    async def _set_finalizers(self, context: RunContext, finalizers: list[str]) -> None:
        with contextlib.suppress(errors.NotFound):
            await self._patch(context, {"metadata": {"finalizers": finalizers, "uid": context.uid}})

    async def _patch(
        self, context: RunContext, patch: Object, subresource: str | None = None, manager: str = FIELD_OWNER
    ) -> None:
        """Patches the version of the run that was read, and updates ``context`` and the cache."""
        version = context.obj["metadata"]["resourceVersion"]
        address = (KIND, context.namespace, context.name)
        run = await self._api.patch(*address, patch, subresource, resource_version=version, manager=manager)
        self._cache.remember(run)
        context.obj.update({part: run[part] for part in ("metadata", "status") if part in run})


async def _write_events(api: KubeApi, run: Object, before: RunStatus, status: RunStatus) -> None:
    """Writes an Event for a new phase, and for each condition whose status or reason has changed."""
    if status.phase is not before.phase:
        await api.event(run, "Normal", status.phase, Phase(status.phase).text)
    for condition in status.conditions:
        old = before.condition(condition.type)
        known = None if old is None else (old.status, old.reason)
        if known != (condition.status, condition.reason) and (kind := event_type(condition)) is not None:
            await api.event(run, kind, condition.reason, f"{condition.type}: {condition.message}")
