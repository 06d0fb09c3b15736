"""What a run's pods read and write: its volume, its spec, its token; and its curve as a ConfigMap."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Final

import yaml

from scalerl_api.curve import curve_csv
from scalerl_api.paths import TRAINED_FILE
from scalerl_api.recipe.earlier import with_earlier_names
from scalerl_api.spec import GROUP, ScaleRLRun
from scalerl_api.wire import EvaluationPoint
from scalerl_operator.build.scope import Scope, metadata_of
from scalerl_operator.kube.types import Object
from scalerl_operator.names import SPEC_KEY, TOKEN_KEY, Names

CURVE_KEY: Final = "curve.csv"
CURVE_DIGEST: Final = f"{GROUP}/curve-digest"
"""Annotation: digest of the table, so that an unchanged one is not written again."""
CURVE_LEFT_OUT: Final = f"{GROUP}/curve-left-out"
"""Annotation: number of points left out; ``curve.csv`` on the run's volume has all."""
MAX_CURVE_BYTES: Final = 900 * 1024
"""Of the table: an object must be smaller than 1 MiB, its metadata included."""


def claim(scope: Scope) -> Object | None:
    """The run's volume; None where the spec names an existing claim.

    A claim with ``onDelete: Retain`` has no owner, so the garbage collector leaves it. The API server refuses changes of its
    immutable fields (class, access mode, a smaller size).
    """
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
    """The run file that all roles read: name and spec with every default. Labels and annotations are left out, since no role
    reads them. trained: adds the file that marks a run with steps."""
    manifest = scope.run.to_manifest()
    manifest["spec"]["recipe"] = with_earlier_names(manifest["spec"]["recipe"])
    manifest["metadata"] = {"name": scope.run.metadata.name, "namespace": scope.namespace}
    # Each reconcile renders this: PyYAML's own writer would take most of its time.
    text = yaml.dump(manifest, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": scope.metadata(scope.names.spec),
        "data": {SPEC_KEY: text, **({TRAINED_FILE: "true\n"} if trained else {})},
    }


def secret(run: ScaleRLRun, uid: str, token: str) -> Object:
    """The run's bearer token: created once, never applied over an existing one.

    Raises:
        ValueError: the run has no namespace.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(run, uid, Names(run.metadata.name).token),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def curve_config_map(run: ScaleRLRun, uid: str, points: Sequence[EvaluationPoint]) -> Object:
    """The ConfigMap ``<run>-curve``: the table of ``curve.csv``.

    A curve that is too long is thinned out evenly, without its first and last point; :data:`CURVE_LEFT_OUT` has the number
    of points left out.

    Raises:
        ValueError: the run has no namespace.
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
