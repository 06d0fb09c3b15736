"""A refused field of a rendered object is named as the run's spec has it."""

from __future__ import annotations

import pytest

from operator_tests.manifests import cluster_run, rendered
from scalerl_operator.controller.refusals import in_terms_of_the_spec, spec_field
from scalerl_operator.kube import errors
from scalerl_operator.kube.errors import Cause

RUN = cluster_run(
    podTemplate={
        "env": [{"name": "A", "value": "x"}, {"name": "B", "value": "y"}],
        "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}],
        "volumeMounts": [{"name": "b", "mountPath": "/b"}],
        "tolerations": [{"key": "gpu"}, {"key": "spot"}],
        "nodeSelector": {"zone": "a"},
        "imagePullSecrets": [{"name": "s"}],
        "resources": {"limits": {"cpu": "2"}},
        "labels": {"team": "rl"},
    },
    generator={
        "podTemplate": {"env": [{"name": "C", "value": "z"}], "affinity": {"podAffinity": {}}},
        "actorResources": {"limits": {"cpu": "2"}},
    },
    trainer={"podTemplate": {"volumes": [{"name": "b", "emptyDir": {"medium": "Memory"}}], "resources": {"requests": {"cpu": "4"}}}},
)  # fmt: skip
OBJECTS = rendered(RUN)


def where(key: str, part: str, name: str, entry: str) -> int:
    """Index of the entry of that name in a list of the first container, or of the pod."""
    spec = OBJECTS[key]["spec"]["template"]["spec"]
    found = spec.get(part) or spec["containers"][0][part]
    return next(i for i, e in enumerate(found) if e.get(entry) == name)


@pytest.mark.parametrize(
    ("key", "part", "name", "rest", "field"),
    [
        ("Job/prepare", "env", "B", ".name", "spec.podTemplate.env[1].name"),
        ("Deployment/generator", "env", "C", ".value", "spec.generator.podTemplate.env[0].value"),
        ("Job/trainer", "volumes", "a", ".emptyDir", "spec.podTemplate.volumes[0].emptyDir"),
        ("Job/trainer", "volumes", "b", ".emptyDir", "spec.trainer.podTemplate.volumes[0].emptyDir"),
        ("StatefulSet/coordinator", "volumes", "b", "", "spec.podTemplate.volumes[1]"),
        ("Job/prepare", "volumeMounts", "b", ".name", "spec.podTemplate.volumeMounts[0].name"),
        ("Job/prepare", "imagePullSecrets", "s", ".name", "spec.podTemplate.imagePullSecrets[0].name"),
    ],
)
def test_spec_field_finds_list_entries_by_key(key: str, part: str, name: str, rest: str, field: str) -> None:
    index = where(key, part, name, "name")
    of = "spec.containers[0]." if part in ("env", "volumeMounts") else "spec."
    path = f"spec.template.{of}{part}[{index}]{rest}"
    assert spec_field(path, OBJECTS[key], RUN.to_manifest()) == field


@pytest.mark.parametrize(
    ("key", "path", "field"),
    [
        ("Job/prepare", "spec.tolerations[1].key", "spec.podTemplate.tolerations[1].key"),
        ("Job/prepare", "spec.nodeSelector", "spec.podTemplate.nodeSelector"),
        ("Deployment/generator", "spec.affinity.podAffinity", "spec.generator.podTemplate.affinity.podAffinity"),
        ("Job/trainer", "spec.containers[0].resources.requests", "spec.trainer.podTemplate.resources.requests"),
        ("Job/trainer", "spec.containers[0].resources.limits[cpu]", "spec.podTemplate.resources.limits[cpu]"),
        ("Deployment/generator", "spec.containers[1].resources.limits[cpu]", "spec.generator.actorResources.limits[cpu]"),
        ("Job/prepare", "spec.containers[0].image", "spec.images.trainer"),
        ("Deployment/generator", "spec.containers[1].image", "spec.images.generator"),
        ("Job/prepare", "labels", "spec.podTemplate.labels"),
        ("Job/prepare", "spec.containers[0].volumeMounts.subPath", "spec.podTemplate.volumeMounts.subPath"),
        ("Job/prepare", "metadata.labels", "spec.podTemplate.labels"),
    ],
)  # fmt: skip
def test_spec_field_finds_the_value_in_the_spec(key: str, path: str, field: str) -> None:
    assert spec_field(f"spec.template.{path}", OBJECTS[key], RUN.to_manifest()) == field


@pytest.mark.parametrize(
    "path", ["spec.template.spec.securityContext", "spec.template.spec.volumes[0].name", "spec.parallelism",
             "spec.template.spec.volumes[99]", "spec.template.spec.containers[9].env[99].name"],
)  # fmt: skip
def test_operator_fields_keep_their_path(path: str) -> None:
    assert spec_field(path, OBJECTS["Job/prepare"], RUN.to_manifest()) == path


def test_resources_of_the_actor_that_the_operator_sets_keep_their_path() -> None:
    path = "spec.template.spec.containers[1].resources.requests"
    assert spec_field(path, OBJECTS["Deployment/generator"], RUN.to_manifest()) == path


def test_field_of_two_containers_is_named_once() -> None:
    generator = OBJECTS["Deployment/generator"]
    index = where("Deployment/generator", "env", "A", "name")
    causes = tuple(
        Cause(f"spec.template.spec.containers[{i}].env[{index}].name", "Invalid value") for i in (0, 1)
    )
    error = errors.Invalid("Deployment is invalid", causes=causes)
    assert (
        in_terms_of_the_spec(error, generator, RUN.to_manifest())
        == "spec.podTemplate.env[0].name: Invalid value"
    )


def test_field_in_a_message_without_causes_is_named() -> None:
    index = where("Job/prepare", "volumes", "a", "name")
    error = errors.Invalid(
        f'strict decoding error: unknown field "spec.template.spec.volumes[{index}].emptydir"'
    )
    said = in_terms_of_the_spec(error, OBJECTS["Job/prepare"], RUN.to_manifest())
    assert said == 'strict decoding error: unknown field "spec.podTemplate.volumes[0].emptydir"'
