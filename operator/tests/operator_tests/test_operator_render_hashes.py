"""``spec_hash``: which fields replace pods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from operator_tests.manifests import (
    IMAGES,
    PODS,
    RUNNING,
    UID,
    cluster_run,
    rendered,
)
from scalerl_api.spec import RunSpec
from scalerl_lifecycle.workloads import Role
from scalerl_operator import names
from scalerl_operator.manifests import render, spec_hash
from scalerl_operator.manifests.scope import _SWITCHES, Images, Scope

ROLES = (Role.PREPARE, Role.COORDINATOR, Role.GENERATOR, Role.TRAINER)
FULL: dict[str, Any] = {
    "images": {"generator": "g:1"},
    "podTemplate": {"labels": {"a": "b"}},
    "recipe": {"temperature": "0.9"},
    "storage": {"onDelete": "Delete", "size": "20Gi"},
    "task": {
        "reasoningGym": {"name": "chain_sum", "size": 400},
        "verifier": {"name": "exact", "timeoutSeconds": 9},
        "heldOut": {"size": 3},
    },
    "trainer": {"replicas": 2},
}


def hashes(**spec: Any) -> dict[Role, str]:
    run = cluster_run(**spec)
    return {role: spec_hash(run, role) for role in (Role.COORDINATOR, Role.GENERATOR, Role.TRAINER)}


@pytest.mark.parametrize(
    ("change", "rolled"),
    [
        ({"suspend": True}, set()),
        ({"autoscaling": {"mode": "Auto"}}, set()),
        ({"ttlSecondsAfterFinished": 5}, set()),
        ({"storage": {"onDelete": "Delete"}}, set()),
        ({"generator": {"replicas": 5}}, set()),
        ({"trainer": {"maxRestarts": 5}}, set()),
        ({"budget": {"maxSteps": 99}}, {Role.COORDINATOR}),
        (
            {"trainer": {"podTemplate": {"labels": {"a": "b"}}}},
            {Role.COORDINATOR, Role.GENERATOR, Role.TRAINER},
        ),
        ({"generator": {"podTemplate": {"shmSize": "2Gi"}}}, {Role.GENERATOR}),
        ({"images": {"trainer": "x"}}, {Role.COORDINATOR, Role.GENERATOR, Role.TRAINER}),
        ({"podTemplate": {"labels": {"a": "b"}}}, {Role.COORDINATOR, Role.GENERATOR, Role.TRAINER}),
        ({"trainer": {"replicas": 2}}, {Role.COORDINATOR, Role.GENERATOR, Role.TRAINER}),
        ({"recipe": {"promptsPerStep": 9}}, {Role.COORDINATOR}),
        ({"recipe": {"completionsPerPrompt": 9}}, {Role.COORDINATOR, Role.GENERATOR}),
        ({"generator": {"extraArgs": ["--enforce-eager"]}}, {Role.GENERATOR}),
        ({"generator": {"speculation": {"history": {}}}}, {Role.COORDINATOR, Role.GENERATOR}),
        ({"recipe": {"refill": {}}}, {Role.COORDINATOR}),
        ({"trackers": {"tensorBoard": {}}}, {Role.COORDINATOR}),
        ({"recipe": {"loss": {"ppoClip": {}}}}, {Role.COORDINATOR, Role.GENERATOR, Role.TRAINER}),
        ({"recipe": {"loss": {}, "optimizer": {"beta1": "0.9"}}}, set()),
        ({"trainer": {}, "generator": {"replicas": 1}}, set()),
    ],
)
def test_spec_hash_changes_for_roles_that_an_edit_restarts(change: dict[str, Any], rolled: set[Role]) -> None:
    before, after = hashes(), hashes(**change)
    assert {role for role in before if before[role] != after[role]} == rolled


def optional_sections(model: type[BaseModel]) -> Iterator[str]:
    """Names of fields that are None unless given, and valid when given empty."""
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
                continue
            with contextlib.suppress(ValidationError):
                kind()
                if field.default is None:
                    yield name
            yield from optional_sections(kind)


def test_spec_hash_sees_sections_that_are_given_empty() -> None:
    """An empty podTemplate changes nothing, and the model, its adapters and the warm start are immutable; any other section does
    something by being there."""
    assert (
        set(optional_sections(RunSpec)) - {"pod_template", "scratch", "experts", "lora", "warm_start"}
        <= _SWITCHES
    )


def test_pods_and_jobs_carry_the_spec_hash() -> None:
    run = cluster_run()
    objects = rendered(run)
    for key in PODS:
        role = Role(key.split("/")[1])
        assert objects[key]["spec"]["template"]["metadata"]["annotations"][names.SPEC_HASH] == spec_hash(
            run, role
        )
    for key in ("Job/prepare", "Job/trainer"):
        assert objects[key]["metadata"]["annotations"][names.SPEC_HASH] == spec_hash(
            run, Role(key.split("/")[1])
        )


def test_spec_hash_keeps_its_values() -> None:
    """If this fails, the input of the hash has changed: an upgrade would drain every run."""
    assert [spec_hash(cluster_run(), role) for role in ROLES] == [
        "e8e0f5c2aaa0177d",
        "ce16489e945bc2c1",
        "e8e0f5c2aaa0177d",
        "e8e0f5c2aaa0177d",
    ]
    assert [spec_hash(cluster_run(**FULL), role) for role in ROLES] == [
        "2f50861d056990ee",
        "05b1770e1ccd682f",
        "014c87ae5e8c28da",
        "2f50861d056990ee",
    ]


def test_spec_hash_does_not_depend_on_the_operator() -> None:
    run = cluster_run()
    old = {o["kind"]: o for o in render(Scope(run, UID, IMAGES, "a", desired=RUNNING))}
    new = {o["kind"]: o for o in render(Scope(run, UID, Images("t:2", "g:2", "c:2"), "a", desired=RUNNING))}
    assert (
        old["Job"]["metadata"]["annotations"][names.SPEC_HASH]
        == new["Job"]["metadata"]["annotations"][names.SPEC_HASH]
    )
    assert (
        old["Job"]["metadata"]["annotations"][names.RENDERED_HASH]
        != new["Job"]["metadata"]["annotations"][names.RENDERED_HASH]
    )
