"""Values: the schema knows every one of them, and refuses everything else. No helm needed."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from charts import VALUES
from queries import CHART, ROOT, rules

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As helm does it."""
    both = dict(under)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(both.get(key), dict):
            both[key] = merged(both[key], value)
        else:
            both[key] = value
    return both


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the definition that it names."""
    return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] | schema if "$ref" in schema else schema


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas below one, with their paths."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from objects(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from objects(schema[key], f"{path}[]")


def test_values_schema_is_valid():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_values_and_schema_have_the_same_fields():
    def same(schema: dict[str, Any], value: object, path: str) -> None:
        schema = resolved(schema)
        if "required" in schema and isinstance(value, dict):
            assert set(schema["properties"]) - {"global"} == set(value), path
            for name, below in value.items():
                same(schema["properties"][name], below, f"{path}.{name}")

    same(SCHEMA, DEFAULTS, "values")


def test_every_field_is_described_and_closed():
    for path, schema in objects(SCHEMA):
        if "$ref" in schema or "[]" in path:
            continue
        assert schema["description"].endswith("."), path
        if schema.get("type") == "object" and "properties" in schema:
            assert schema["additionalProperties"] is False, path


def test_every_value_is_demanded():
    """One that is missing (`null`, or an upgrade with an older chart's defaults) is refused by its name."""

    def leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, below in value.items():
            yield (*path, name)
            free = name in ("resources", "labels", "quota")
            if isinstance(below, dict) and not free:
                yield from leaves(below, (*path, name))

    found = list(leaves(DEFAULTS))
    assert ("curvefit", "metricsPort") in found
    for *above, name in found:
        values = copy.deepcopy(DEFAULTS)
        holder = values
        for key in above:
            holder = holder[key]
        del holder[name]
        (problem,) = VALIDATOR.iter_errors(values)
        assert problem.validator == "required"
        assert repr(name) in problem.message


@pytest.mark.parametrize("name", VALUES)
def test_files_of_values_are_valid(name):
    VALIDATOR.validate(merged(DEFAULTS, yaml.safe_load(VALUES[name].read_text()) or {}))


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "2"}, "replicas"),
        ({"replicas": -1}, "replicas"),
        ({"images": {"trainer": {"name": "x"}}}, "name"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"operator": {"logLevel": "loud"}}, "logLevel"),
        ({"operator": {"extraEnv": [{"name": "A", "value": 1}]}}, "extraEnv"),
        ({"operator": {"resources": {"request": {}}}}, "request"),
        ({"curvefit": {"port": 80}}, "port"),
        ({"watchNamespaces": "research"}, "watchNamespaces"),
        ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
        ({"podLabels": {"team": 1}}, "podLabels"),
        ({"networkPolicy": {"apiServer": {"ports": []}}}, "ports"),
        ({"metrics": {"rules": {"alerts": {"ScaleRLRunStalled": {"severity": "page"}}}}}, "severity"),
        ({"metrics": {"rules": {"alerts": {"ScaleRLRunStalled": {"expr": "1"}}}}}, "expr"),
        ({"crds": {"enabled": "yes"}}, "enabled"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_wrong_value_is_refused_where_it_is(wrong, where):
    problems = list(VALIDATOR.iter_errors(merged(DEFAULTS, wrong)))
    assert len(problems) == 1
    assert where in f"{problems[0].json_path} {problems[0].message}"


def test_chart_operator_and_crd_are_released_together():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    operator = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == operator["version"]
    assert (CHART / "files" / "crds").is_dir()
    ours = {path.name: path.read_bytes() for path in (CHART / "files" / "crds").iterdir()}
    theirs = {path.name: path.read_bytes() for path in (ROOT / "crds").iterdir()}
    assert ours == theirs, "run `make crds`"
    for crd in theirs.values():
        # What the template puts its annotation after.
        assert crd.count(b"\nmetadata:\n  name:") == 1


def test_alerts_that_values_may_change_exist():
    known = {rule["alert"] for rule in rules()}
    everything = yaml.safe_load(VALUES["everything"].read_text())
    assert set(everything["metrics"]["rules"]["alerts"]) <= known
