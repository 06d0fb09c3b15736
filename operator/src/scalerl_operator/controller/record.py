"""Writes the record of a run before its object goes, and lets the oldest records of the namespace go."""

from __future__ import annotations

import logging
from typing import Final

from scalerl_api.spec import API_VERSION, KIND
from scalerl_operator.build.run_record import record
from scalerl_operator.build.storage import CURVE_KEY
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.names import ENDED, Names

MAX_RECORDS: Final = 200
"""Records of one namespace."""
TRY_SECONDS: Final = 120.0
"""After so long without success, the run goes without a record."""

log = logging.getLogger(__name__)


async def write_record(api: KubeApi, context: RunContext) -> None:
    """Writes the record of a run that has drained and is about to go.

    Raises:
        ApiError: the caller retries, for at most :data:`TRY_SECONDS`. Afterwards, and after an error that a retry does not
            change (a quota, an admission rule, a namespace that is being deleted, an object that cannot be read), the failure
            is only logged: the record must not keep a run from going.
    """
    state = context.state
    if state.record_tried is None:
        state.record_tried = context.unix_seconds
    try:
        await _write(api, context)
    except errors.Fenced:
        raise
    except Exception as error:
        passing = isinstance(error, errors.Unreachable | errors.Conflict)
        if passing and 0 <= context.unix_seconds - state.record_tried < TRY_SECONDS:
            raise
        log.warning("%s/%s is deleted without a record: %r", context.namespace, context.name, error)
        return
    try:
        await _expire(api, context)
    except errors.Fenced:
        raise
    except Exception as error:
        log.warning("%s/%s: the oldest records are not deleted: %r", context.namespace, context.name, error)


async def _write(api: KubeApi, context: RunContext) -> None:
    curve = context.objects.get(("ConfigMap", Names(context.name).curve))
    table = (curve.get("data") or {}).get(CURVE_KEY, "") if curve is not None and context.owns(curve) else ""
    events: list[Object] = []
    try:
        events = await api.list(
            "Event", context.namespace, field_selector=f"involvedObject.uid={context.uid}"
        )
    except errors.Forbidden as error:
        log.warning("%s/%s: its record has no Events: %s", context.namespace, context.name, error)
    run = {**context.obj, "apiVersion": API_VERSION, "kind": KIND}
    await api.apply(record(run, events, table))


async def _expire(api: KubeApi, context: RunContext) -> None:
    """Makes the run that goes the owner of records beyond :data:`MAX_RECORDS`, the oldest: the garbage collector deletes them
    with it. So the operator needs no right to delete ConfigMaps."""
    found, _ = await api.list_at("ConfigMap", context.namespace, label_selector=ENDED, metadata_only=True)
    found.sort(key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": context.name, "uid": context.uid}
    for one in found[: max(0, len(found) - MAX_RECORDS)]:
        patch = {"metadata": {"ownerReferences": [owner]}}
        await api.patch("ConfigMap", context.namespace, one["metadata"]["name"], patch)
