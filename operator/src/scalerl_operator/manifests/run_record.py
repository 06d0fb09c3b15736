"""The record of a run that is deleted: a ConfigMap without an owner, with the run, its Events and its curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from scalerl_operator.kube.types import Object
from scalerl_operator.names import ENDED, FIELD_OWNER, Names, label_value

RUN_KEY: Final = "run.json"
"""Metadata, spec and status of the run."""
EVENTS_KEY: Final = "events.json"
"""Its last Events, oldest first, each with time, type, reason, message and count."""
RECORDED_CURVE_KEY: Final = "curve.csv"
"""Its curve, if it has any."""
POINTS_LEFT_OUT: Final = "curve-left-out"
"""Number of points of the curve that the record leaves out; ``curve.csv`` on the run's volume has all."""
MAX_CURVE_BYTES: Final = 128 * 1024
"""Of the curve in a record: about 800 points."""
MAX_EVENTS: Final = 100
_MAX_SPEC_BYTES: Final = 400 * 1024
"""Of metadata, spec and status; a longer text loses the accepted spec, that of the trained steps and the effective recipe, which repeat the spec."""
_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "labels",
    "annotations",
    "creationTimestamp",
    "deletionTimestamp",
)


def record(run: Object, events: Sequence[Object], curve: str) -> Object:
    """The ConfigMap. It does not have the label of the run's objects, so that no cache holds it.

    Args:
        run: the ScaleRLRun with its last status.
        events: its Events, in any order.
        curve: the text of its ``curve.csv``; empty without one.
    """
    metadata = run["metadata"]
    kept: dict[str, Any] = {
        "apiVersion": run["apiVersion"],
        "kind": run["kind"],
        "metadata": {name: metadata[name] for name in _METADATA if name in metadata},
        "spec": run.get("spec") or {},
        "status": dict(run.get("status") or {}),
    }
    # A copy of the whole manifest, by `kubectl apply`.
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    kept["metadata"] |= {"annotations": annotations}
    for name in ("acceptedSpec", "trainedSpec", "recipe"):
        if len(json.dumps(kept)) > _MAX_SPEC_BYTES:
            kept["status"].pop(name, None)
    table, left_out = _thinned(curve)
    data = {RUN_KEY: json.dumps(kept), EVENTS_KEY: json.dumps(_short(events))}
    data |= {RECORDED_CURVE_KEY: table} if table else {}
    data |= {POINTS_LEFT_OUT: str(left_out)} if left_out else {}
    name = str(metadata["name"])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{Names(name).stem}-ended-{str(metadata['uid'])[:8]}",
            "namespace": metadata["namespace"],
            "labels": {
                "app.kubernetes.io/name": "scalerl",
                "app.kubernetes.io/managed-by": FIELD_OWNER,
                ENDED: label_value(name),
            },
        },
        "data": data,
    }


def _thinned(curve: str) -> tuple[str, int]:
    """The table with points at even distances, its first and last among them, and the number of those left out."""
    if len(curve.encode()) <= MAX_CURVE_BYTES:
        return curve, 0
    header, *rows = curve.splitlines(keepends=True)
    kept = min(len(rows), MAX_CURVE_BYTES // max(len(row.encode()) for row in (header, *rows)) - 1)
    if kept < 2:
        return "", len(rows)
    chosen = [rows[round(i * (len(rows) - 1) / (kept - 1))] for i in range(kept)]
    return "".join([header, *chosen]), len(rows) - kept


def _short(events: Sequence[Object]) -> list[Object]:
    short = [
        {
            "time": event.get("lastTimestamp") or event.get("eventTime") or "",
            "type": event.get("type", ""),
            "reason": event.get("reason", ""),
            "message": event.get("message", ""),
            "count": event.get("count") or 1,
        }
        for event in events
    ]
    return sorted(short, key=lambda event: str(event["time"]))[-MAX_EVENTS:]
