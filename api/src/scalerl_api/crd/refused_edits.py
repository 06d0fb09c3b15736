"""CEL rules that refuse edits: fields that may not change once the run exists, by :data:`scalerl_api.edits.EDITS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scalerl_api.edits import EDITS, Edit, Effect, edit_of, entry_model, nested_model
from scalerl_api.fields import Rule
from scalerl_api.spec import RunSpec


def _refused_edits() -> dict[tuple[type[BaseModel], str], Rule]:
    rules: dict[tuple[type[BaseModel], str], Rule] = {}
    for path, edit in EDITS.items():
        if edit.effect is not Effect.REFUSED:
            continue
        *sections, _ = path.split(".")
        model: type[BaseModel] = RunSpec
        for alias in sections:
            annotation = _field(model, alias)[1].annotation
            nested = entry_model(annotation) or nested_model(annotation)
            assert nested is not None, path
            model = nested
        rules |= _unchanged(model, path, edit)
    return rules


def _unchanged(model: type[BaseModel], path: str, edit: Edit) -> dict[tuple[type[BaseModel], str], Rule]:
    """Rules that the last field of ``path``, a field of ``model``, does not change, except nested fields with their own entry."""
    last = path.rpartition(".")[2]
    name, field = _field(model, last)
    inner = entry_model(field.annotation) or nested_model(field.annotation)
    has = f"has(self.{last}) == has(oldSelf.{last}) && (!has(self.{last}) || "
    if inner is None or not any(other.startswith(f"{path}.") for other in EDITS):
        if field.is_required() or field.default is not None:
            return {(model, name): Rule("self == oldSelf", edit.note, changes=True)}
        # An optional field may be neither set, removed, nor changed, which only a rule of its model can check.
        same = f"{has}self.{last} == oldSelf.{last})"
        return {(model, name): Rule(same, edit.note, field=last, changes=True)}
    rules: dict[tuple[type[BaseModel], str], Rule] = {}
    # An API server compares each entry with the one of the same name.
    entries = inner is entry_model(field.annotation)
    for name_below, below in inner.model_fields.items():
        if edit_of(f"{path}.{below.alias}") == edit and not (entries and name_below == "name"):
            rules |= _unchanged(inner, f"{path}.{below.alias}", edit)
    if entries:
        same = f"{has}self.{last}.map(e, e.name) == oldSelf.{last}.map(e, e.name))"
        rules[model, name] = Rule(same, edit.note, field=last, changes=True)
    elif field.default is None:
        # When it is set or removed, the API server does not evaluate the rules of its fields.
        same = f"has(self.{last}) == has(oldSelf.{last})"
        rules[model, name] = Rule(same, edit.note, field=last, changes=True)
    return rules


def _field(model: type[BaseModel], alias: str) -> tuple[str, FieldInfo]:
    return next((n, f) for n, f in model.model_fields.items() if (f.alias or n) == alias)


REFUSED_EDITS: Final[Mapping[tuple[type[BaseModel], str], Rule]] = _refused_edits()
"""Rules for fields that may not change, by model and name in Python. With ``field``, it is a rule of the model."""
