"""All writes of the run's own object: status and Events, finalizer, ``spec.suspend`` and ``spec.generator.replicas``, and its deletion;
and of its record before it goes.

Each write requires the version that was read: a change by another writer is reconciled first.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final

from scalerl_api.conditions import Phase
from scalerl_api.spec import API_VERSION, KIND
from scalerl_api.status import RunStatus
from scalerl_lifecycle.status_fields import (
    PROGRESS_SECONDS,
    seconds,
    waits_for_progress_only,
)
from scalerl_operator.controller.conditions import event_type
from scalerl_operator.controller.parts import Run
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.run_record import record
from scalerl_operator.manifests.storage import CURVE_KEY
from scalerl_operator.names import AUTOSCALER, ENDED, FIELD_OWNER, FINALIZER, SCALED_BY, Names

MAX_RECORDS: Final = 200
"""Records of one namespace."""
TRY_SECONDS: Final = 120.0
"""After so long without success, the run goes without a record."""

log = logging.getLogger(__name__)


class RunObject:
    """Writes the ScaleRLRun objects."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._dropped: set[str] = set()
        """Fields of the status that an older installed CRD drops, as already logged."""

    async def write(self, run: Run, status: RunStatus, *, at_once: bool = False) -> float | None:
        """Writes the status if it has changed, and the Events of the change. Returns the seconds until a write that was put off
        is due. at_once: never puts it off."""
        new, old = status.to_object(), run.obj.get("status") or {}
        if new == old or (new, old) == run.state.pruned:
            return None
        before = RunStatus.read(old)
        if not at_once and before.conditions and waits_for_progress_only(before, status):
            due = run.state.status_written + PROGRESS_SECONDS - run.unix_seconds
            if 0 < due <= PROGRESS_SECONDS:
                return due
        run.state.status_written = run.unix_seconds
        await self._patch(run, {"status": merge_patch(old, new)}, "status")
        kept = run.obj["status"]
        dropped = {f"status.{field}" for field, value in new.items() if kept.get(field) != value}
        run.state.pruned = (new, kept) if dropped else None
        if not dropped <= self._dropped:
            self._dropped |= dropped
            text = "the CRD %s is of an older release and does not keep all of %s: update the CRDs, then restart the operator"
            log.warning(text, KIND, ", ".join(sorted(dropped)))
        await _write_events(self._api, run.obj, before, status)
        return None

    async def add_finalizer(self, run: Run) -> None:
        """Adds the finalizer, so that the run drains before it is deleted."""
        await self._set_finalizers(run, [*run.finalizers, FINALIZER])

    async def remove_finalizer(self, run: Run) -> None:
        """Removes the finalizer after the drain; the garbage collector then deletes the run's objects."""
        await self._set_finalizers(run, [f for f in run.finalizers if f != FINALIZER])

    async def suspend(self, run: Run) -> None:
        """Sets ``spec.suspend``, as Kueue does, so that a user can resume the run by the same field."""
        await self._patch(run, {"spec": {"suspend": True}, "metadata": {"uid": run.uid}})

    async def scale(self, run: Run, replicas: int, decision: int) -> None:
        """Sets ``spec.generator.replicas``, as an HPA does, and the decision's number in an annotation: each decision is applied
        once, so that a user's number stays until the next decision."""
        metadata = {"uid": run.uid, "annotations": {SCALED_BY: str(decision)}}
        patch = {"spec": {"generator": {"replicas": replicas}}, "metadata": metadata}
        await self._patch(run, patch, manager=AUTOSCALER)

    async def expire(self, run: Run, ttl: int | None) -> float | None:
        """Deletes a run ``ttlSecondsAfterFinished`` after its end. Returns the seconds until then."""
        if ttl is None or run.deleted:
            return None
        left = seconds(run.obj["status"]["completionTime"]) + ttl - run.unix_seconds
        if left > 0:
            return left
        await self._api.delete(KIND, run.namespace, run.name, uid=run.uid)
        return None

    async def _set_finalizers(self, run: Run, finalizers: list[str]) -> None:
        with contextlib.suppress(errors.NotFound):
            await self._patch(run, {"metadata": {"finalizers": finalizers, "uid": run.uid}})

    async def _patch(
        self, run: Run, patch: Object, subresource: str | None = None, manager: str = FIELD_OWNER
    ) -> None:
        """Patches the version of the run that was read, and updates ``run.obj`` and the cache."""
        what = (KIND, run.namespace, run.name, patch, subresource)
        version = run.obj["metadata"]["resourceVersion"]
        patched = await self._api.patch(*what, resource_version=version, manager=manager)
        self._cache.remember(patched)
        run.obj.update({part: patched[part] for part in ("metadata", "status") if part in patched})


async def _write_events(api: KubeApi, run: Object, before: RunStatus, status: RunStatus) -> None:
    """Writes an Event for a new phase, and for each condition whose status or reason has changed."""
    if status.phase is not before.phase:
        await api.event(run, "Normal", status.phase, Phase(status.phase).text)
    for condition in status.conditions:
        old = before.condition(condition.type)
        known = None if old is None else (old.status, old.reason)
        if known != (condition.status, condition.reason) and (kind := event_type(condition)) is not None:
            await api.event(run, kind, condition.reason, f"{condition.type}: {condition.message}")


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


async def write_record(api: KubeApi, run: Run) -> None:
    """Writes the record of a run that has drained and is about to go.

    Raises:
        ApiError: the caller retries, for at most :data:`TRY_SECONDS`. Afterwards, and after an error that a retry does not
            change (a quota, an admission rule, a namespace that is being deleted, an object that cannot be read), the failure
            is only logged: the record must not keep a run from going.
    """
    tried = run.state.record_tried = run.state.record_tried or run.unix_seconds
    try:
        await _write_record(api, run)
    except errors.Fenced:
        raise
    except Exception as error:
        passing = isinstance(error, errors.Unreachable | errors.Conflict)
        if passing and 0 <= run.unix_seconds - tried < TRY_SECONDS:
            raise
        log.warning("%s/%s is deleted without a record: %r", run.namespace, run.name, error)
        return
    try:
        await _own_oldest_records(api, run)
    except errors.Fenced:
        raise
    except Exception as error:
        log.warning("%s/%s: the oldest records are not deleted: %r", run.namespace, run.name, error)


async def _write_record(api: KubeApi, run: Run) -> None:
    curve = run.objects.get(("ConfigMap", Names(run.name).curve))
    table = (curve.get("data") or {}).get(CURVE_KEY, "") if curve is not None and run.owns(curve) else ""
    events: list[Object] = []
    try:
        events = await api.list("Event", run.namespace, field_selector=f"involvedObject.uid={run.uid}")
    except errors.Forbidden as error:
        log.warning("%s/%s: its record has no Events: %s", run.namespace, run.name, error)
    recorded = {**run.obj, "apiVersion": API_VERSION, "kind": KIND}
    await api.apply(record(recorded, events, table))


async def _own_oldest_records(api: KubeApi, run: Run) -> None:
    """Makes the run that goes the owner of records beyond :data:`MAX_RECORDS`, the oldest: the garbage collector deletes them
    with it. So the operator needs no right to delete ConfigMaps."""
    found, _ = await api.list_at("ConfigMap", run.namespace, label_selector=ENDED, metadata_only=True)
    found.sort(key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": run.name, "uid": run.uid}
    for one in found[: max(0, len(found) - MAX_RECORDS)]:
        patch = {"metadata": {"ownerReferences": [owner]}}
        await api.patch("ConfigMap", run.namespace, one["metadata"]["name"], patch)
