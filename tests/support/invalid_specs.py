"""Reads ``invalid_specs.yaml``, the table of runs that must be refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

Object = dict[str, Any]

INVALID: Final = Path(__file__).parents[1] / "cluster" / "invalid_specs.yaml"


@dataclass(frozen=True)
class Case:
    """One row (see the head of the file). ``run`` is applied first, then ``changed``, if any."""

    name: str
    by: Literal["schema", "cel", "operator"]
    run: Object
    changed: Object | None
    status: Object | None = None
    field: str = ""
    says: str = ""
    given: tuple[Object, ...] = ()
    condition: str = ""
    reason: str = ""
    nodes: bool = False
    scheduled: bool = False
    queued: bool = False


def cases(*by: str) -> list[Case]:
    """The rows that are refused by one of ``by``."""
    table = yaml.load(INVALID.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return [_case(table["base"], row) for row in table["cases"] if row["by"] in by]


@dataclass(frozen=True)
class Warned:
    """One row of ``warnings``."""

    name: str
    run: Object
    field: str
    says: str


def warned() -> list[Warned]:
    """The runs that are accepted with a warning."""
    table = yaml.load(INVALID.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return [
        Warned(row["name"], merged(table["base"], {"spec": row["with"]}), row["field"], row["says"])
        for row in table["warnings"]
    ]


def _case(base: Object, row: Object) -> Case:
    row = dict(row)
    run = merged(base, {"spec": row.pop("with", {})})
    run = merged(run, row.pop("manifest", {}))
    then = row.pop("then", None)
    return Case(run=run, changed=None if then is None else merged(run, {"spec": then}), **row)


def merged(value: Object, patch: Object) -> Object:
    """Apply a JSON merge patch (RFC 7386): objects are merged, null removes a field, other values are replaced."""
    result = copy.deepcopy(value)
    for key, new in patch.items():
        if new is None:
            result.pop(key, None)
        elif isinstance(new, dict):
            old = result.get(key)
            result[key] = merged(old if isinstance(old, dict) else {}, new)
        else:
            result[key] = copy.deepcopy(new)
    return result
