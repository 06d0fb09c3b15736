"""``python -m scalerl_operator.crd``: write the custom resource definition from the models of :mod:`scalerl_api`.

What one field may be becomes schema: types, enums, bounds, patterns, defaults, and its docstring as the description.
What crosses fields, or what may not change, is a CEL rule of :mod:`scalerl_operator.crd_rules`. So an API server
refuses what ``scalerl validate`` refuses, when the object is applied. Left to the operator is what a server cannot
look into: values of ``task.reasoningGym.parameters``, keys of labels, and raw Kubernetes objects.

One thing is narrower here than in a file: paths are absolute. An optional field that is ``null`` is for the server one
that is absent.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scalerl_api.fields import (
    DECIMAL_FORM,
    AtLeast,
    AtMost,
    InRange,
    Matches,
    decimal_input,
    quantity_input,
)
from scalerl_api.load import to_yaml
from scalerl_api.pods import Named, Unique, own_path, text_value, unreserved
from scalerl_api.spec import GROUP, KIND, PLURAL, VERSION, RunSpec
from scalerl_api.status import RunStatus
from scalerl_operator import crd_rules
from scalerl_operator.crd_rules import Rule

Schema = dict[str, Any]
FILE_NAME: Final = f"{GROUP}_{PLURAL}.yaml"
_HEADER = "# Written by `make crds` from the models of scalerl_api; changes here are lost.\n"

_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "integer", ".status.step", 0),
    ("Reward", "string", ".status.reward", 0),
    ("Forecast", "string", ".status.forecast", 0),
    ("Decision", "string", ".status.decision", 0),
    ("Generators", "integer", ".status.generators.ready", 1),
    ("Device-Hours", "string", ".status.usage.deviceHours", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Of ``kubectl get``: title, type, path, priority (1: only with ``-o wide``)."""

_ANY: Final[Schema] = {"x-kubernetes-preserve-unknown-fields": True}
_INT_OR_STRING: Final[Schema] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}


class NotExpressible(Exception):
    """A model has something that the definition has no words for: a type, a check, or a field without a docstring."""


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    spec = _model(RunSpec, defaults=True)
    status = _model(RunStatus, defaults=False)
    schema = {
        "type": "object",
        "description": "One run that trains a language model by reinforcement learning.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            # The server's own: nothing may be said of it here, not even a description.
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    _add_rules(schema, crd_rules.OF_THE_OBJECT)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["slr", "rlrun"],
                "categories": ["scalerl"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.generator.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def text() -> str:
    """The definition as it stands in ``crds/``."""
    return _HEADER + to_yaml(definition())


def _column(name: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


# --- models --------------------------------------------------------------------------------------


def _model(model: type[BaseModel], *, defaults: bool) -> Schema:
    documented = _docstrings(model)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for name, field in model.model_fields.items():
        alias = field.alias or name
        where = f"{model.__name__}.{name}"
        schema = _type(field.annotation, field.metadata, where, defaults=defaults)
        description = documented.get(name) or schema.get("description")
        if description and "x-kubernetes-int-or-string" in schema and "description" in schema:
            description = f"{description} {schema['description']}"
        if not description:
            raise NotExpressible(f"{where}: no docstring below the field, and it becomes the description")
        properties[alias] = {"description": _plain(description)} | {
            key: value for key, value in schema.items() if key != "description"
        }
        if field.is_required():
            required.append(alias)
        elif defaults:
            _set_default(properties[alias], field)
        if isinstance(field.json_schema_extra, dict):
            properties[alias] |= field.json_schema_extra
        _add_rules(properties[alias], crd_rules.OF_FIELDS.get((model, name), ()))
        edit = crd_rules.REFUSED_EDITS.get((model, name))
        if edit is not None and not edit.field:
            _add_rules(properties[alias], [edit])
    schema = {"type": "object", "description": _plain(inspect.getdoc(model) or ""), "properties": properties}
    if required:
        schema["required"] = required
    # What holds for fields further apart is looked at anew with any edit of the spec, also one of `suspend`.
    held = crd_rules.OF_MODELS.get(model, ())
    _add_rules(schema, (replace(rule, kept=True) for rule in held) if model is RunSpec else held)
    _add_rules(schema, (r for (of, _), r in crd_rules.REFUSED_EDITS.items() if of is model and r.field))
    return schema


def _set_default(schema: Schema, field: FieldInfo) -> None:
    """Shown where it says something. An object's is ``{}`` if its own fields have some, so that theirs are applied."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        if any("default" in nested for nested in schema["properties"].values()):
            schema["default"] = {}
    elif default not in (None, [], {}, PydanticUndefined):
        schema["default"] = default


def _add_rules(schema: Schema, rules: Iterable[Rule]) -> None:
    written = [rule.as_validation() for rule in rules]
    if written:
        schema["x-kubernetes-validations"] = [*schema.get("x-kubernetes-validations", []), *written]


# --- types ---------------------------------------------------------------------------------------


def _type(annotation: Any, metadata: Iterable[Any], where: str, *, defaults: bool) -> Schema:
    """Schema of a type under the checks that its annotations name."""
    checks = list(_flat(metadata))
    while get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        checks = [*_flat(inner), *checks]
    schema = _bare(annotation, where, defaults=defaults)
    for check in checks:
        _apply(schema, check, where)
    return schema


def _flat(metadata: Iterable[Any]) -> Iterable[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(item.metadata)
            if isinstance(item.json_schema_extra, dict):
                yield item.json_schema_extra
        else:
            yield item


def _bare(annotation: Any, where: str, *, defaults: bool) -> Schema:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        given = [argument for argument in arguments if argument is not type(None)]
        if len(given) == 1:
            return _type(given[0], (), where, defaults=defaults)
        # Only a value of any type has no schema of its own; what it may be, the model says.
        return dict(_ANY)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _type(arguments[0], (), where, defaults=defaults)}
    if origin is dict:
        if arguments[1] is Any:
            return {"type": "object"} | _ANY
        return {
            "type": "object",
            "additionalProperties": _type(arguments[1], (), where, defaults=defaults),
        }
    if annotation is bool:
        return {"type": "boolean"}
    if annotation is int:
        return {"type": "integer", "format": "int64"}
    if annotation is str:
        return {"type": "string"}
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return {"type": "string", "enum": [str(member) for member in annotation]}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _model(annotation, defaults=defaults)
    raise NotExpressible(f"{where}: {annotation!r} has no schema")


def _apply(schema: Schema, check: Any, where: str) -> None:
    match check:
        case Ge(ge=bound) | Le(le=bound) if bound in _INT64:
            pass
        case Ge(ge=bound):
            schema["minimum"] = bound
        case Le(le=bound):
            schema["maximum"] = bound
        case MinLen(min_length=length):
            schema[_LENGTH[schema.get("type", "string")][0]] = length
        case MaxLen(max_length=length):
            schema[_LENGTH[schema.get("type", "string")][1]] = length
        case dict():
            schema |= check
        case AfterValidator(func=func) | BeforeValidator(func=func):
            _validator(schema, func, where)
        case _ if isinstance(pattern := getattr(check, "pattern", None), str):
            schema["pattern"] = pattern
        case _ if getattr(check, "strict", None) is not None:
            pass
        case _:
            raise NotExpressible(f"{where}: {check!r} has no schema")


_INT64: Final = (-(2**63), 2**63 - 1)
"""Bounds that the format says already."""
_LENGTH: Final = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def _validator(schema: Schema, func: Callable[..., Any], where: str) -> None:
    """What a validator function of the models is in the definition."""
    if func in (decimal_input, quantity_input):
        del schema["type"]
        schema |= _INT_OR_STRING | ({"description": DECIMAL_FORM} if func is decimal_input else {})
    elif isinstance(func, Matches):
        value = crd_rules.TEXT if schema.get("type") == "string" else crd_rules.TEXT_OR_INTEGER
        _add_rules(schema, crd_rules.matches(func, text=value))
    elif isinstance(func, InRange):
        _add_rules(schema, crd_rules.in_range(func))
    elif isinstance(func, AtLeast):
        _add_rules(schema, crd_rules.at_least(func))
    elif isinstance(func, AtMost):
        _add_rules(schema, crd_rules.at_most(func))
    elif isinstance(func, Unique):
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [func.key]}
    elif isinstance(func, Named):
        schema |= {"required": ["name"], "properties": {"name": crd_rules.named(func)}}
    elif func is text_value:
        schema["properties"] |= {"value": crd_rules.VARIABLE_VALUE}
    elif func is own_path:
        schema |= {"required": ["name", "mountPath"], "properties": crd_rules.MOUNT}
    elif func is unreserved:
        _add_rules(schema, crd_rules.UNRESERVED)
    elif func in crd_rules.OF_FUNCTIONS:
        _add_rules(schema, crd_rules.OF_FUNCTIONS[func])
    else:
        raise NotExpressible(f"{where}: the check {func!r} has no words in crd_rules")


# --- descriptions --------------------------------------------------------------------------------


@cache
def _module_docstrings(path: str) -> Mapping[tuple[str, str], str]:
    """The string below each annotated field of each class in a file, by class and field."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found[node.name, name] = docstring
    return found


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    path = inspect.getsourcefile(model)
    if path is None:
        raise NotExpressible(
            f"{model.__name__}: its source is not at hand, and its docstrings are the descriptions"
        )
    return {field: text for (cls, field), text in _module_docstrings(path).items() if cls == model.__name__}


def _plain(docstring: str) -> str:
    """A docstring as ``kubectl explain`` shows it: one paragraph, without markup or grades of sources.

    >>> _plain("``max`` of :class:`A`\\n  counts [P].")
    '`max` of `A` counts.'
    """
    plain = re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", docstring)
    plain = re.sub(r" \[[PS?]\]", "", plain.replace("``", "`"))
    return " ".join(plain.split())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scalerl_operator.crd", description=__doc__)
    parser.add_argument(
        "directory", nargs="?", default="crds", type=Path, help="where to write (default: crds)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the file there differs"
    )
    options = parser.parse_args(arguments)
    path: Path = options.directory / FILE_NAME
    if options.check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text():
            print(f"{path}: not what the models say; run `make crds` and commit the file", file=sys.stderr)
            return 1
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(), encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
