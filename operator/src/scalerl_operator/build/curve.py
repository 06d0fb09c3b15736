"""The ConfigMap ``<run>-curve``: the points of a run's curve, in the same table as its directory has. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from scalerl_api.curve import curve_csv
from scalerl_api.spec import GROUP, ScaleRLRun
from scalerl_api.wire import EvaluationPoint
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube.types import Images, Object

KEY: Final = "curve.csv"
DIGEST: Final = f"{GROUP}/curve-digest"
"""Annotation: of the table, so that one that is unchanged is not written again."""
LEFT_OUT: Final = f"{GROUP}/curve-left-out"
"""Annotation: how many points did not find room; ``curve.csv`` on the run's volume has all."""
MAX_BYTES: Final = 900 * 1024
"""Of the table: an object has to stay under 1 MiB, with room for what surrounds it."""


def curve_config_map(run: ScaleRLRun, uid: str, points: Sequence[EvaluationPoint]) -> Object:
    """The object as it is to be; compare :func:`digest_of` of it with the one that is there.

    A curve too long for an object is thinned out evenly, the first and the last point stay; the annotation
    :data:`LEFT_OUT` says how many are missing.

    Raises:
        ValueError: the run has no namespace.
    """
    table, kept = curve_csv(points), len(points)
    while len(table) > MAX_BYTES:
        kept = int(kept * 0.9 * MAX_BYTES / len(table))
        table = curve_csv(points[round(i * (len(points) - 1) / (kept - 1))] for i in range(kept))
    scope = Scope(run, uid, Images("", "", ""), "")
    metadata = scope.metadata(scope.names.curve)
    metadata["annotations"] = {DIGEST: hashlib.sha256(table.encode()).hexdigest()[:32]}
    if kept < len(points):
        metadata["annotations"][LEFT_OUT] = str(len(points) - kept)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: table}}


def digest_of(config_map: Object | None) -> str:
    """Of the table in an object; empty where there is none."""
    annotations = {} if config_map is None else config_map["metadata"].get("annotations") or {}
    return str(annotations.get(DIGEST, ""))
