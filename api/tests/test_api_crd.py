"""The custom resource definition says what the models say: same fields, same defaults, a rule for each check."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from client_side_apply import applied_configuration
from pydantic import AfterValidator

from scalerl_api import crd
from scalerl_api.crd import cel_rules
from scalerl_api.fields import A_DECIMAL, DECIMAL_FORM, Model
from scalerl_api.load import load_run
from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_api.recipe.presets import set_by_others
from scalerl_api.spec import RunSpec, ScaleRLRun

ROOT = Path(__file__).parents[2]
VERSION = crd.definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SMALL: dict[str, Any] = {
    "model": {"scratch": {}},
    "task": {"jsonl": {"path": "/data.jsonl"}, "verifier": {"name": "exact"}},
    "budget": {"maxSteps": 3},
    "warmStart": {"steps": 1},
    "autoscaling": {"generators": {"max": 2}},
    "podTemplate": {"shmSize": "2Gi"},
}


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema."""
    yield path, schema
    for name, nested in schema.get("properties", {}).items():
        yield from schemas(nested, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from schemas(schema[key], f"{path}[]")


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """What an API server makes of a value: absent fields get their default, from the outside in."""
    if isinstance(value, dict):
        value = dict(value)
        for name, nested in schema.get("properties", {}).items():
            if name not in value and "default" in nested:
                value[name] = nested["default"]
            if name in value:
                value[name] = defaulted(nested, value[name])
    return value


def at(path: str) -> dict[str, Any]:
    node = SCHEMA
    for part in path.strip(".").split("."):
        node = node["properties"][part]
    return node


def models(model: type[Model]) -> Iterator[type[Model]]:
    """All models below a model."""
    seen = {model}
    waiting = [model]
    while waiting:
        for annotation in (field.annotation for field in waiting.pop().model_fields.values()):
            for name in re.findall(r"scalerl_api(?:\.\w+)+", repr(annotation)):
                module, _, cls = name.rpartition(".")
                found = getattr(importlib.import_module(module), cls, None)
                if isinstance(found, type) and issubclass(found, Model) and found not in seen:
                    seen.add(found)
                    waiting.append(found)
    yield from seen


@pytest.mark.parametrize("directory", ["crds", "charts/scalerl/files/crds"])
def test_file_is_what_the_models_say(directory: str) -> None:
    assert (ROOT / directory / crd.FILE_NAME).read_text() == crd.text(), "run `make crds` and commit the file"


POINTER = re.compile(r" Its fields: as in (spec[\w.]+)\.$")


def test_every_field_is_described_in_a_sentence() -> None:
    """Itself, or in the section that the description of its own refers to."""
    section, first = "\0", ""
    for path, schema in schemas(SCHEMA):
        if pointer := POINTER.search(schema.get("description", "")):
            section, first = path, f".{pointer[1]}"
        for name, nested in schema.get("properties", {}).items():
            # Those of verifiers are described at verifier.
            if (path, name) == ("", "metadata") or (
                ".verifiers[]" in path and name not in ("label", "weight")
            ):
                continue
            if path.startswith(section) and "description" not in nested:
                below = path.removeprefix(section).removeprefix("[]" if ".mix[]" in path else "")
                nested = dict(schemas(SCHEMA))[f"{first}{below}.{name}"]
            description = nested.get("description", "")
            assert description.endswith("."), f"{path}.{name}: {description!r}"
            assert not re.search(r"``|:\w+:`|\[[PS?]\]", description), f"{path}.{name}: {description!r}"


def test_crd_is_structural() -> None:
    for path, schema in schemas(SCHEMA):
        assert not schema.keys() & {"$ref", "allOf", "oneOf", "not", "title", "const", "anyOf"}, path
        untyped = "x-kubernetes-preserve-unknown-fields" in schema or "x-kubernetes-int-or-string" in schema
        assert ("type" in schema) != untyped or schema.get("type") == "object", path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_every_string_and_list_is_bounded() -> None:
    # Without limits an API server cannot bound what a rule costs, and takes objects that no ConfigMap holds.
    limit = {"string": "maxLength", "array": "maxItems"}
    for path, schema in schemas(SCHEMA["properties"]["spec"]):
        kind = schema.get("type")
        if kind in limit and "enum" not in schema:
            assert limit[kind] in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


def test_servers_defaults_are_the_models() -> None:
    spec = defaulted(at("spec"), SMALL)
    run = RunSpec.model_validate(spec)
    assert run == RunSpec.model_validate(SMALL)
    written = run.model_dump(by_alias=True, exclude_none=True, mode="json")

    def shown(value: Any) -> Any:
        """Without what is empty, which needs no default."""
        if not isinstance(value, dict):
            return value
        kept = {key: shown(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in ({}, [])}

    recipe, completed = shown(spec.pop("recipe")), shown(written.pop("recipe"))
    assert shown(spec) == shown(written)
    of_presets = set_by_others()
    # Another alternative than the preset's takes the place of all its fields.
    of_presets |= {name for name in ONE_OF if any(path.startswith(f"{name}.") for path in of_presets)}

    def without_presets(fields: dict[str, Any], path: str = "") -> dict[str, Any]:
        kept = {
            name: without_presets(item, f"{path}{name}.") if isinstance(item, dict) else item
            for name, item in fields.items()
            if f"{path}{name}" not in of_presets
        }
        return {name: item for name, item in kept.items() if item != {}}

    assert recipe == without_presets(completed), "what a preset gives is not the server's to write"


def test_every_check_across_fields_is_a_rule() -> None:
    """A validator of another kind would have no CEL."""
    found = list(models(RunSpec))
    for model in found:
        completing = ["_completed"] if model is RecipeSpec else []
        assert sorted(model.__pydantic_decorators__.model_validators) == sorted(["_rules_hold", *completing])
    assert sum(len(m.rules) for m in found) > 15
    assert all(rule.holds or rule.changes for m in found for rule in m.rules), (
        "of edits, scalerl_api.edits decides"
    )


def test_every_rule_is_in_the_crd_and_names_a_field() -> None:
    rules = [
        (path, schema, rule)
        for path, schema in schemas(SCHEMA)
        for rule in schema.get("x-kubernetes-validations", [])
    ]
    written = {rule["rule"] for _, _, rule in rules}
    of_models = [rule for model in models(RunSpec) for rule in model.rules]
    for rule in (*of_models, *(rule for group in cel_rules.OF_FIELDS.values() for rule in group)):
        cel = cel_rules.compact(rule.cel)
        assert cel in written or any(text.startswith(f"({cel})||") for text in written), rule
    for path, schema, rule in rules:
        assert rule["message"], path
        node = schema
        for part in filter(None, rule.get("fieldPath", "").split(".")):
            assert part in node["properties"], f"{path}: {rule}"
            node = node["properties"][part]
        changes = "oldSelf" in rule["rule"] and not rule.get("optionalOldSelf")
        assert changes == (rule.get("reason") == "FieldValueForbidden"), rule


_OF_VERIFIERS = (
    *(f"verifier.{name}" for name in ("name", "python", "code", "http", "parameters", "range")),
    "verifiers",
    "combine",
    "environment",
    *(
        f"environment.{name}"
        for name in ("name", "python", "url", "parameters", "maxTurns", "maxTokensPerTurn")
    ),
)


def test_fields_of_a_checkpoint_cannot_change() -> None:
    fixed = {
        path + rule.get("fieldPath", "")
        for path, schema in schemas(SCHEMA)
        for rule in schema.get("x-kubernetes-validations", [])
        if rule.get("reason") == "FieldValueForbidden" and "self.status" not in rule["rule"]
    }
    assert fixed == {
        *(
            f".spec.{name}"
            for name in (
                "model",
                "seed",
                "warmStart",
                "trainer.lora",
                "budget.split",
                "recipe.temperature",
                "recipe.distillation",
            )
        ),
        ".spec.from",
        *(
            f".spec.task.{name}"
            for name in (
                "reasoningGym",
                "jsonl",
                "dataset",
                "mix",
                "prompt",
                "heldOut",
                *(f"{of}{name}" for of in ("", "mix[].") for name in _OF_VERIFIERS),
                "plugin",
                "mix[].plugin",
                "mix[].verifier",
            )
        ),
        *(
            f".spec.task.mix[].{name}"
            for name in ("reasoningGym", "jsonl", "dataset", "weight", "prompt", "heldOut")
        ),
        *(f".spec.evaluation.sets{name}" for name in ("", "[].task", "[].heldOutOf")),
        *(
            f".spec.evaluation.sets[].task.{name}"
            for name in (
                "reasoningGym",
                "jsonl",
                "dataset",
                *_OF_VERIFIERS,
                "plugin",
                "verifier",
                "prompt",
                "size",
            )
        ),
        *(f".spec.storage.{name}" for name in ("claimName", "storageClassName", "accessMode", "mountedBy")),
        ".spec.checkpoint.to",  # with storage.mountedBy: Coordinator
    }


def test_columns_and_scale_are_detected() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        if not column["jsonPath"].startswith(".metadata"):
            assert at(column["jsonPath"])["type"] == column["type"], column
    scale = VERSION["subresources"]["scale"]
    assert at(scale["specReplicasPath"])["default"] == 1
    assert at(scale["statusReplicasPath"])["type"] == "integer"
    assert at(scale["labelSelectorPath"])["type"] == "string"


def test_every_example_has_only_fields_of_the_crd() -> None:
    def unknown(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict) and "properties" in schema:
            for name, item in value.items():
                if name in schema["properties"]:
                    yield from unknown(schema["properties"][name], item, f"{path}.{name}")
                elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                    yield f"{path}.{name}"

    examples = sorted((ROOT / "examples").glob("*/run*.yaml"))
    assert examples
    for example in examples:
        manifest = load_run(example).to_manifest()
        assert list(unknown(at("spec"), manifest["spec"], "spec")) == []


def test_field_without_a_docstring_has_no_description() -> None:
    class Undescribed(Model):
        """A model."""

        bare: int = 0

    with pytest.raises(ValueError, match=r"Undescribed\.bare: no docstring"):
        crd.schema_of(Undescribed)


def test_add_check_refuses_a_check_without_a_rule() -> None:
    class Checked(Model):
        """A model."""

        even: Annotated[int, AfterValidator(abs)] = 0
        """A number."""

    with pytest.raises(ValueError, match=r"no rule in .*abs"):
        crd.schema_of(Checked)


def test_run_from_a_cluster_has_the_kind_of_the_crd() -> None:
    names = crd.definition()["spec"]["names"]
    assert names["kind"] == ScaleRLRun.model_fields["kind"].default
    assert crd.definition()["metadata"]["name"] == f"{names['plural']}.{crd.definition()['spec']['group']}"


def test_description_of_each_decimal_says_how_to_write_it() -> None:
    """The API server's refusal of a float does not."""
    decimals, others = list[str](), list[str]()
    for path, schema in schemas(SCHEMA["properties"]["spec"]):
        rules = [rule["message"] for rule in schema.get("x-kubernetes-validations", ())]
        decimal = any(A_DECIMAL.message.removeprefix("must be ") in rule for rule in rules)
        (decimals if decimal else others).append(path)
        if "description" in schema:  # not where another section has it
            assert decimal == schema["description"].endswith(DECIMAL_FORM), path
    assert {".recipe.temperature", ".recipe.optimizer.learningRate", ".budget.maxDeviceHours"} <= set(
        decimals
    )
    assert ".storage.size" in others


MAX_APPLIED_BYTES = 256_000
"""A client-side ``kubectl apply`` stores the definition in an annotation, and the annotations of an object may have 262,144 bytes.
The rest is for the fields of coming releases, and for annotations of other tools. A field of a task is there three times: in
``task``, ``task.mix`` and ``evaluation.sets``."""


def test_definition_fits_into_the_annotation_of_kubectl_apply() -> None:
    applied = len(applied_configuration(crd.definition()).encode())
    assert applied < MAX_APPLIED_BYTES, (
        f"{applied} bytes: shorten what is repeated (`_REPEATED` in crd/generate.py)"
    )


def test_fields_of_a_repeated_section_are_described_once() -> None:
    own, first = at("spec.generator.podTemplate"), at("spec.podTemplate")
    assert own["description"].endswith("Its fields: as in spec.podTemplate.")
    assert "description" not in own["properties"]["env"]
    assert first["properties"]["env"]["description"]
    share = at("spec.task.mix")["items"]["properties"]["weight"]
    assert share["description"], "a field that the first section does not have"
