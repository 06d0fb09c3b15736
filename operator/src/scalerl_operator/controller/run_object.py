"""The run's own object: all that the operator writes of it. Status and its Events, finalizer, ``spec.suspend``, and its end.

Each write is against the version that was read: what another writer has written since is reconciled first.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

from scalerl_api.conditions import ConditionType, Phase, Reason
from scalerl_api.spec import KIND
from scalerl_api.status import RunStatus
from scalerl_operator.controller.observe import seconds
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.controller.status import merge_patch, waits_for_progress_only
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import AUTOSCALER, FINALIZER, SCALED_BY

log = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 15.0
"""Between two writes of a status in which only what moves all the time is new."""
_LOUD: Final[dict[tuple[str, str], Literal["Normal", "Warning"]]] = {
    (ConditionType.ACCEPTED, "False"): "Warning",
    (ConditionType.FAILED, "True"): "Warning",
    (ConditionType.DEGRADED, "True"): "Warning",
    (ConditionType.ACCEPTED, "True"): "Normal",
    (ConditionType.ADMITTED, "False"): "Normal",
    (ConditionType.PREPARED, "True"): "Normal",
    (ConditionType.COMPLETED, "True"): "Normal",
    (ConditionType.SUSPENDED, "True"): "Normal",
}
"""Transitions that are worth an event; the others show in the conditions."""
_TROUBLE: Final = frozenset(
    {
        *(Reason.UNSCHEDULABLE, Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CONFIG_INVALID),
        *(Reason.VOLUME_NOT_READY, Reason.OUT_OF_MEMORY, Reason.EVICTED, Reason.REFUSED_BY_NODE),
        *(Reason.SANDBOX_FAILED, Reason.COORDINATOR_REFUSED, Reason.CONTAINER_START_FAILED),
        *(Reason.CLAIM_NOT_FOUND, Reason.STORAGE_CLASS_NOT_FOUND, Reason.VOLUME_NOT_WRITABLE),
    }
)
"""Problems that a person has to solve, of whichever role: these get an Event too."""


class RunObject:
    """Writes the objects of all runs."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._dropped: set[str] = set()
        """Fields of a status that the installed CRD, which is older than this process, does not keep."""

    async def write(self, context: RunContext, status: RunStatus, *, at_once: bool = False) -> float | None:
        """Writes the status, if it has changed, and the events of the change. Returns the seconds until a postponed write is
        due. ``at_once``: without postponing."""
        new, old = status.to_object(), context.obj.get("status") or {}
        new = {name: value for name, value in new.items() if name not in self._dropped}
        if new == old:
            return None
        if not at_once and context.before.conditions and waits_for_progress_only(context.before, status):
            due = context.state.status_written + PROGRESS_SECONDS - context.unix_seconds
            if 0 < due <= PROGRESS_SECONDS:
                return due
        context.state.status_written = context.unix_seconds
        made = await self._api.patch(
            KIND,
            context.namespace,
            context.name,
            {"status": merge_patch(old, new)},
            subresource="status",
            resource_version=context.obj["metadata"]["resourceVersion"],
        )
        self._cache.remember(made)
        context.obj.update(metadata=made["metadata"], status=made["status"])
        if dropped := new.keys() - made["status"].keys():
            self._dropped |= dropped
            log.warning(
                "the CRD %s is of an older release and does not keep status.%s: update the CRDs, then restart the operator",
                KIND,
                ", status.".join(sorted(dropped)),
            )
        await _write_events(self._api, context.obj, context.before, status)
        return None

    async def hold(self, context: RunContext) -> None:
        """Adds the finalizer: the run is not to be removed before it is drained."""
        await self._set_finalizers(context, [*context.finalizers, FINALIZER])

    async def release(self, context: RunContext) -> None:
        """Removes the finalizer after the drain; the garbage collector then removes what the run owns."""
        await self._set_finalizers(context, [f for f in context.finalizers if f != FINALIZER])

    async def suspend(self, context: RunContext) -> None:
        """Sets ``spec.suspend``, as Kueue does: a person resumes the run where they see that it is suspended."""
        made = await self._api.patch(
            KIND,
            context.namespace,
            context.name,
            {"spec": {"suspend": True}, "metadata": {"uid": context.uid}},
            resource_version=context.obj["metadata"]["resourceVersion"],
        )
        self._cache.remember(made)

    async def scale(self, context: RunContext, generators: int, decision: int) -> None:
        """Sets ``spec.generator.replicas``, as an HPA does, and notes the decision's number: each is carried out once, and a
        number that somebody else sets afterwards stays until the next one."""
        made = await self._api.patch(
            KIND,
            context.namespace,
            context.name,
            {
                "spec": {"generator": {"replicas": generators}},
                "metadata": {"uid": context.uid, "annotations": {SCALED_BY: str(decision)}},
            },
            resource_version=context.obj["metadata"]["resourceVersion"],
            manager=AUTOSCALER,
        )
        self._cache.remember(made)

    async def expire(self, context: RunContext) -> float | None:
        """Deletes a run ``ttlSecondsAfterFinished`` after its end. Returns the seconds until then."""
        ttl = context.run.spec.ttl_seconds_after_finished
        if ttl is None or context.deleted:
            return None
        if context.before.completion_time is None:
            return 0.0  # written just now: our own writes wake nobody
        left = seconds(context.before.completion_time) + ttl - context.unix_seconds
        if left > 0:
            return left
        await self._api.delete(KIND, context.namespace, context.name, uid=context.uid)
        return None

    async def _set_finalizers(self, context: RunContext, finalizers: list[str]) -> None:
        try:
            made = await self._api.patch(
                KIND,
                context.namespace,
                context.name,
                {"metadata": {"finalizers": finalizers, "uid": context.uid}},
                resource_version=context.obj["metadata"]["resourceVersion"],
            )
        except errors.NotFound:
            return
        if finalizers:
            context.obj["metadata"] = made["metadata"]
            self._cache.remember(made)


async def _write_events(api: KubeApi, run: Object, was: RunStatus, status: RunStatus) -> None:
    """One event a transition, from what was said to what is."""
    if status.phase is not was.phase:
        await api.event(run, "Normal", status.phase, Phase(status.phase).text)
    for condition in status.conditions:
        before = was.condition(condition.type)
        loudness = _LOUD.get((condition.type, condition.status))
        if condition.status == "False" and condition.reason in _TROUBLE:
            loudness = "Warning"
        if condition.reason == Reason.ACCEPTED_WITH_WARNINGS:
            loudness = "Warning"
        if loudness is None or (
            before is not None and (before.status, before.reason) == (condition.status, condition.reason)
        ):
            continue
        await api.event(run, loudness, condition.reason, f"{condition.type}: {condition.message}")
