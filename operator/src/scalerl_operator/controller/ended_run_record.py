"""Writes the record of a run before its object goes, and lets the oldest records of the namespace go."""

from __future__ import annotations

import logging
from typing import Final

from scalerl_api.spec import API_VERSION, KIND
from scalerl_operator.controller.parts import Run
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.run_record import record
from scalerl_operator.manifests.storage import CURVE_KEY
from scalerl_operator.names import ENDED, Names

MAX_RECORDS: Final = 200
"""Records of one namespace."""
TRY_SECONDS: Final = 120.0
"""After so long without success, the run goes without a record."""

log = logging.getLogger(__name__)


async def write_record(api: KubeApi, run: Run) -> None:
    """Writes the record of a run that has drained and is about to go.

    Raises:
        ApiError: the caller retries, for at most :data:`TRY_SECONDS`. Afterwards, and after an error that a retry does not
            change (a quota, an admission rule, a namespace that is being deleted, an object that cannot be read), the failure
            is only logged: the record must not keep a run from going.
    """
    tried = run.state.record_tried = run.state.record_tried or run.unix_seconds
    try:
        await _write(api, run)
    except errors.Fenced:
        raise
    except Exception as error:
        passing = isinstance(error, errors.Unreachable | errors.Conflict)
        if passing and 0 <= run.unix_seconds - tried < TRY_SECONDS:
            raise
        log.warning("%s/%s is deleted without a record: %r", run.namespace, run.name, error)
        return
    try:
        await _expire(api, run)
    except errors.Fenced:
        raise
    except Exception as error:
        log.warning("%s/%s: the oldest records are not deleted: %r", run.namespace, run.name, error)


async def _write(api: KubeApi, run: Run) -> None:
    curve = run.objects.get(("ConfigMap", Names(run.name).curve))
    table = (curve.get("data") or {}).get(CURVE_KEY, "") if curve is not None and run.owns(curve) else ""
    events: list[Object] = []
    try:
        events = await api.list("Event", run.namespace, field_selector=f"involvedObject.uid={run.uid}")
    except errors.Forbidden as error:
        log.warning("%s/%s: its record has no Events: %s", run.namespace, run.name, error)
    recorded = {**run.obj, "apiVersion": API_VERSION, "kind": KIND}
    await api.apply(record(recorded, events, table))


async def _expire(api: KubeApi, run: Run) -> None:
    """Makes the run that goes the owner of records beyond :data:`MAX_RECORDS`, the oldest: the garbage collector deletes them
    with it. So the operator needs no right to delete ConfigMaps."""
    found, _ = await api.list_at("ConfigMap", run.namespace, label_selector=ENDED, metadata_only=True)
    found.sort(key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": run.name, "uid": run.uid}
    for one in found[: max(0, len(found) - MAX_RECORDS)]:
        patch = {"metadata": {"ownerReferences": [owner]}}
        await api.patch("ConfigMap", run.namespace, one["metadata"]["name"], patch)
