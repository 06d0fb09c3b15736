"""The volume, the spec and the token of a run's pods, and the run's curve as a ConfigMap."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Final

import yaml

from scalerl_api.curve import curve_csv
from scalerl_api.paths import TRAINED_FILE
from scalerl_api.spec import GROUP, ScaleRLRun
from scalerl_api.wire import EvaluationPoint
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.scope import Scope, metadata_of
from scalerl_operator.names import SPEC_KEY, TOKEN_KEY, Names

CURVE_KEY: Final = "curve.csv"
CURVE_DIGEST: Final = f"{GROUP}/curve-digest"
"""Annotation: digest of the table, by which an unchanged one is not written again."""
CURVE_LEFT_OUT: Final = f"{GROUP}/curve-left-out"
"""Annotation: number of points left out; ``curve.csv`` on the run's volume has all."""
MAX_CURVE_BYTES: Final = 900 * 1024
"""Of the table: an object with its metadata must be smaller than 1 MiB."""


def claim(scope: Scope) -> Object | None:
    """The run's claim; None if the spec names an existing one. With ``onDelete: Retain`` it has no owner, so that the garbage
    collector does not delete it."""
    storage = scope.spec.storage
    if storage.claim_name is not None:
        return None
    spec: Object = {
        "accessModes": [storage.access_mode],
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": scope.metadata(scope.names.claim, owned=storage.on_delete == "Delete"),
        "spec": spec,
    }


def spec_map(scope: Scope, *, trained: bool) -> Object:
    """The run file of all roles: name and spec with every default. trained: adds the file that marks a run with steps."""
    manifest = scope.run.to_manifest()
    manifest["metadata"] = {"name": scope.run.metadata.name, "namespace": scope.namespace}
    # PyYAML's own writer would take most of the time of a rendering.
    text = yaml.dump(manifest, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": scope.metadata(scope.names.spec),
        "data": {SPEC_KEY: text, **({TRAINED_FILE: "true\n"} if trained else {})},
    }


def secret(run: ScaleRLRun, uid: str, token: str) -> Object:
    """The run's bearer token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(run, uid, Names(run.metadata.name).token),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def curve_config_map(run: ScaleRLRun, uid: str, points: Sequence[EvaluationPoint]) -> Object:
    """The ConfigMap ``<run>-curve``: the table of ``curve.csv``. A curve that is too long loses points at even distances, except
    its first and last; :data:`CURVE_LEFT_OUT` has their number.
    """
    table, kept = curve_csv(points), len(points)
    while len(table) > MAX_CURVE_BYTES:
        kept = int(kept * 0.9 * MAX_CURVE_BYTES / len(table))
        table = curve_csv(points[round(i * (len(points) - 1) / (kept - 1))] for i in range(kept))
    metadata = metadata_of(run, uid, Names(run.metadata.name).curve)
    metadata["annotations"] = {CURVE_DIGEST: hashlib.sha256(table.encode()).hexdigest()[:32]}
    if kept < len(points):
        metadata["annotations"][CURVE_LEFT_OUT] = str(len(points) - kept)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CURVE_KEY: table}}
