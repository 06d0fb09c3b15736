"""The custom resource definition, generated from the models of :mod:`scalerl_api`.

Types, enums, bounds, patterns and defaults come from pydantic, descriptions from the docstrings of fields, and checks from the CEL
rules of :mod:`scalerl_api.crd.cel_rules`. So an API server refuses the same specs as ``scalerl validate``, except values of
``task.reasoningGym.parameters``, keys of labels, raw Kubernetes objects, and ``environment.podTemplate``, for which the size of a
definition has no room; the operator checks those.

The definition is stricter than the models in one point: paths are absolute. A field that is ``null`` is absent for the server.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import core_schema

from scalerl_api.crd import cel_rules
from scalerl_api.crd.refused_edits import REFUSED_EDITS
from scalerl_api.earlier_status import earlier_properties
from scalerl_api.edits import nested_model
from scalerl_api.environment_server import EnvironmentServerSpec
from scalerl_api.fields import DECIMAL_FORM
from scalerl_api.load import to_yaml
from scalerl_api.recipe import RecipeSpec
from scalerl_api.recipe.presets import set_by_others
from scalerl_api.spec import GROUP, KIND, PLURAL, VERSION, RunSpec
from scalerl_api.status import RunStatus
from scalerl_api.verifier import VerifierSpec, WeightedVerifier

Schema = dict[str, Any]
FILE_NAME: Final = f"{GROUP}_{PLURAL}.yaml"
_HEADER = "# Written by `make crds` from the models of scalerl_api; changes here are lost.\n"

_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Step", "string", ".status.progress", 0),
    ("Reward", "string", ".status.reward", 0),
    ("Decision", "string", ".status.decision", 0),
    ("ETA", "string", ".status.eta", 0),
    ("Forecast", "string", ".status.forecast", 1),
    ("Budget", "string", ".status.budget", 1),
    ("Generators", "integer", ".status.generators.ready", 1),
    ("Device-Hours", "string", ".status.usage.deviceHours", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Columns of ``kubectl get``: title, type, path, priority (1: only with ``-o wide``)."""

_REPEATED: Final = (
    *((f"{role}.podTemplate", "podTemplate") for role in ("generator", "trainer", "coordinator")),
    ("generator.actorResources", "podTemplate.resources"),
    ("task.mix[]", "task"),
    ("evaluation.sets[].task", "task"),
    ("warmStart.dataset", "task.dataset"),
)
"""Sections of the spec with the fields of an earlier section, whose descriptions are written there alone."""
_LONG: Final = 120
"""Characters of a longer description, of which the definition has the first sentence alone; all of it is in docs/reference/spec.md."""
_COSTLY: Final = (".all(", ".exists(", ".startsWith(")
"""Functions whose cost an API server cannot estimate for a previous value."""
_ANY: Final[Schema] = {"x-kubernetes-preserve-unknown-fields": True}
_INT64: Final = {"minimum": -(2**63), "maximum": 2**63 - 1}
"""The bounds of the format ``int64``."""


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    status = schema_of(RunStatus, "serialization")
    status["properties"] |= earlier_properties()
    schema = {
        "type": "object",
        "description": "One run that trains a language model by reinforcement learning.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            # The API server permits no other field here, not even a description.
            "metadata": {"type": "object"},
            "spec": schema_of(RunSpec),
            "status": status,
        },
    }
    cel_rules.add(schema, cel_rules.OF_THE_OBJECT)
    _shorten(schema)
    for path, first in _REPEATED:
        _drop_descriptions(_at(schema, f"spec.{path}"), _at(schema, f"spec.{first}"))
        field = _at(schema, f"spec.{path.removesuffix('[]')}")
        field["description"] += f" Its fields: as in spec.{first}."
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
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path}
                        | ({"priority": priority} if priority else {})
                        for name, kind, path, priority in _COLUMNS
                    ],
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
    return _HEADER + to_yaml(definition())


def _of_presets() -> frozenset[tuple[type[BaseModel], str]]:
    """Fields that a preset sets. They have no default here, which the API server would store before the preset is resolved."""
    fields: set[tuple[type[BaseModel], str]] = set()
    for path in set_by_others():
        model: type[BaseModel] = RecipeSpec
        for alias in path.split("."):
            name, field = next((n, f) for n, f in model.model_fields.items() if f.alias == alias)
            owner, model = model, nested_model(field.annotation) or model
        fields.add((owner, name))
    return frozenset(fields)


OF_PRESETS: Final = _of_presets()


class _Structural(GenerateJsonSchema):
    """Structural schemas, as in a CustomResourceDefinition: without references, titles and ``null``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shared: dict[str, core_schema.CoreSchema] = {}

    def generate_inner(self, schema: Any) -> Schema:
        written = copy.deepcopy(self.resolve_ref_schema(super().generate_inner(schema)))
        written.pop("title", None)
        return written

    def definitions_schema(self, schema: core_schema.DefinitionsSchema) -> Schema:
        self._shared |= {shared["ref"]: shared for shared in schema["definitions"]}
        return self.generate_inner(schema["schema"])

    def definition_ref_schema(self, schema: core_schema.DefinitionReferenceSchema) -> Schema:
        return self.generate_inner(self._shared[schema["schema_ref"]])

    def sort(self, value: Schema, parent_key: str | None = None) -> Schema:
        return value

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def int_schema(self, schema: core_schema.IntSchema) -> Schema:
        written = reversed(super().int_schema(schema).items())  # the lower bound first
        bounds = {key: bound for key, bound in written if _INT64.get(key) != bound}
        return (
            {"type": "integer"}
            | ({} if {"minimum", "maximum"} <= bounds.keys() else {"format": "int64"})
            | bounds
        )

    def literal_schema(self, schema: core_schema.LiteralSchema) -> Schema:
        return {"type": "string", "enum": schema["expected"]}

    def nullable_schema(self, schema: core_schema.NullableSchema) -> Schema:
        return self.generate_inner(schema["schema"])

    def union_schema(self, schema: core_schema.UnionSchema) -> Schema:
        return dict(_ANY)  # the model checks the type

    def dict_schema(self, schema: core_schema.DictSchema) -> Schema:
        written = super().dict_schema(schema)
        written.pop("propertyNames", None)
        if written.get("additionalProperties") is True:
            return {"type": "object"} | _ANY
        return written

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> Schema:
        return self._checked(schema)

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> Schema:
        return self._checked(schema)

    def _checked(self, schema: Any) -> Schema:
        written = self.generate_inner(schema["schema"])
        # The rules of a model are added with its fields.
        if schema["schema"]["type"] not in ("model", "model-fields"):
            cel_rules.add_check(written, schema["function"]["function"])
        return written

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Schema:
        """Adds a default that is not empty. The default of a model is ``{}`` if its fields have defaults, so that those apply."""
        written, default = self.generate_inner(schema["schema"]), self.get_default_value(schema)
        if self.mode == "serialization":
            return written
        if isinstance(default, BaseModel):
            if any("default" in nested for nested in written.get("properties", {}).values()):
                written["default"] = {}
        elif default not in (None, [], {}):
            written["default"] = default
        return written

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        model = schema["cls"]
        fields = self.generate_inner(schema["schema"])
        docstrings: dict[str, Any] = {}
        for base in reversed(model.__mro__):
            if issubclass(base, BaseModel):
                docstrings |= _docstrings(sys.modules[base.__module__]).get(base.__name__, {})
        if model is EnvironmentServerSpec:
            fields["properties"]["podTemplate"] = {"type": "object"} | _ANY
        for name, field in model.model_fields.items():
            if name not in docstrings:
                raise ValueError(
                    f"{model.__name__}.{name}: no docstring below the field; it is the description"
                )
            written = fields["properties"][field.alias]
            note = written.pop("description", "") if "x-kubernetes-int-or-string" in written else ""
            if (model, name) in OF_PRESETS and "default" in written:
                note = f"Left out: the preset's value, else {json.dumps(written.pop('default'))}. {note}"
            written = {"description": ""} | written | {"description": _plain(f"{docstrings[name]} {note}")}
            fields["properties"][field.alias] = written
            cel_rules.add(written, cel_rules.OF_FIELDS.get((model, name), ()))
        # Rules across the sections of a spec are also evaluated when only `suspend` changes. A list macro on oldSelf.value(),
        # whose length the API server estimates as unbounded, exceeds its cost limit.
        cel_rules.add(
            fields,
            (
                replace(rule, kept=model is RunSpec and not any(function in rule.cel for function in _COSTLY))
                for rule in model.rules
            ),
        )
        for (owner, name), edit in REFUSED_EDITS.items():
            if owner is model:
                alias = model.model_fields[name].alias
                cel_rules.add(fields if edit.field else fields["properties"][alias], [edit])
        # The API server drops empty properties, which would show as a difference.
        if not fields["properties"]:
            del fields["properties"]
        if model is WeightedVerifier:
            for name in VerifierSpec.model_fields:  # the fields of `verifier`, which has their descriptions
                field_of_both = fields["properties"][model.model_fields[name].alias]
                _drop_descriptions(field_of_both, field_of_both)
        return {"type": "object", "description": _plain(inspect.getdoc(model) or "")} | fields


def schema_of(model: type[BaseModel], mode: JsonSchemaMode = "validation") -> Schema:
    """Structural schema of a model; in mode ``serialization`` without defaults."""
    return model.model_json_schema(schema_generator=_Structural, mode=mode)


def _at(schema: Schema, path: str) -> Schema:
    """The schema at a path such as ``task.mix[]``."""
    for part in path.split("."):
        schema = schema["properties"][part.removesuffix("[]")]
        schema = schema["items"] if part.endswith("[]") else schema
    return schema


# --- descriptions --------------------------------------------------------------------------------


@cache
def _docstrings(module: ModuleType) -> dict[str, dict[str, Any]]:
    """The string below each annotated field, by class and field. pydantic's ``use_attribute_docstrings`` would read the sources
    in every process that imports the models."""
    docstrings = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            docstrings[node.name] = {
                field.target.id: below.value.value
                for field, below in pairwise(node.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            }
    return docstrings


def _plain(docstring: str) -> str:
    """A docstring for ``kubectl explain``: one paragraph, without markup or grades of sources.

    >>> _plain("``max`` of :class:`A`\\n  counts [P].")
    '`max` of `A` counts.'
    """
    plain = re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", docstring)
    plain = re.sub(r" \[[PS?]\]", "", plain.replace("``", "`"))
    return " ".join(plain.split())


def _shorten(schema: Schema) -> None:
    """Keep the first sentence of each long description."""
    text = schema.get("description", "")
    if len(text) > _LONG and ". " in text:
        form = f" {DECIMAL_FORM}" if text.endswith(DECIMAL_FORM) else ""
        schema["description"] = text.partition(". ")[0] + "." + form
    for nested in (
        *schema.get("properties", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
    ):
        if isinstance(nested, dict):
            _shorten(nested)


def _problem(message: str) -> str:
    """A message without what it says after the problem.

    >>> _problem("must be greater than 0: a decimal number in quotes")
    'must be greater than 0'
    """
    return re.split("[;:] ", message)[0]


def _drop_descriptions(schema: Schema, first: Schema) -> None:
    """Removes the descriptions that are the same in another schema, and what messages of the same rules say after the problem: a
    client-side ``kubectl apply`` stores the whole definition in an annotation, of which an object may have 256 KiB."""
    if schema.get("description") == first.get("description"):
        schema.pop("description", None)
    if rules := schema.get("x-kubernetes-validations"):
        known = first.get("x-kubernetes-validations", ())
        schema["x-kubernetes-validations"] = [
            rule | {"message": _problem(rule["message"])}
            if rule in known and "oldSelf" not in rule["rule"]
            else rule
            for rule in rules
        ]
    for name, nested in first.get("properties", {}).items():
        if name in schema.get("properties", {}):
            _drop_descriptions(schema["properties"][name], nested)
    for key in ("items", "additionalProperties"):
        if isinstance(first.get(key), dict) and key in schema:
            _drop_descriptions(schema[key], first[key])
