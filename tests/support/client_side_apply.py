"""What ``kubectl apply`` without ``--server-side`` stores in an annotation of the object."""

from __future__ import annotations

import json
from typing import Any

ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"


def applied_configuration(obj: dict[str, Any]) -> str:
    """The value of the annotation: the object in Go's JSON."""
    written = obj | {"metadata": {"annotations": {}} | obj["metadata"]}
    text = json.dumps(written, separators=(",", ":"), sort_keys=True, ensure_ascii=False) + "\n"
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
