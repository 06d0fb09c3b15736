"""JSON schemas for kubeconform, from what a real API server says of itself: none has to be downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Schema = dict[str, Any]


def write_schemas(openapi: Schema, into: Path) -> int:
    """One file a kind, closed to unknown fields; returns how many."""
    definitions = {name: _closed(schema) for name, schema in openapi["definitions"].items()}
    text = json.dumps(definitions).replace("#/definitions/", "definitions.json#/")
    (into / "definitions.json").write_text(text)
    written = 0
    for name, schema in openapi["definitions"].items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            group = kind["group"].split(".")[0]
            suffix = "-".join(part for part in (group, kind["version"]) if part)
            path = into / f"{kind['kind'].lower()}-{suffix}.json"
            path.write_text(json.dumps({"$ref": f"definitions.json#/{name}"}))
            written += 1
    return written


def _closed(schema: Any) -> Any:
    """The schema with nothing allowed that it does not name. Quantities and ports may be a number or text."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if closed.get("format") in ("int-or-string",) or "Quantity is a fixed-point" in str(
        closed.get("description", "")
    ):
        return {"type": ["string", "number"]}
    if (
        "properties" in closed
        and isinstance(closed["properties"], dict)
        and "additionalProperties" not in closed
    ):
        closed["additionalProperties"] = False
    return closed
