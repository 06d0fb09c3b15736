"""Volumes of `model.cache` and `generator.compileCache`: which containers mount them, and which may write."""

from __future__ import annotations

from typing import Any

import pytest

from operator_tests.manifests import (
    PODS,
    cluster_run,
    container,
    environment,
    every_container,
    pod_spec,
    rendered,
)
from scalerl_api.spec import ScaleRLRun
from scalerl_lifecycle.workloads import Role
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import spec_hash

HUB: Object = {"hub": {"name": "me/model"}}


def mounts(run: ScaleRLRun, path: str) -> dict[str, Object]:
    """The mount at a path, by container."""
    found = {}
    for _, each in every_container(rendered(run)):
        for mount in each["volumeMounts"]:
            if mount["mountPath"] == path:
                found[each["name"]] = mount
    return found


def claims(run: ScaleRLRun, name: str) -> dict[str, Object]:
    """The source of a volume, by workload."""
    objects = rendered(run)
    return {
        key: volume["persistentVolumeClaim"]
        for key in PODS
        for volume in pod_spec(objects[key])["volumes"]
        if volume["name"] == name
    }


def cached(**cache: Any) -> ScaleRLRun:
    return cluster_run(model=HUB | {"cache": {"claimName": "models", **cache}})


def test_only_the_preparation_writes_models() -> None:
    """Readers are the containers that load weights, not the actor, which grades untrusted text, nor the coordinator."""
    found = mounts(cached(), "/run/scalerl/models")
    assert {name: mount.get("readOnly", False) for name, mount in found.items()} == {
        "prepare": False,
        "server": True,
        "trainer": True,
    }
    assert claims(cached(), "scalerl-models") == {
        "Job/prepare": {"claimName": "models"},
        "Deployment/generator": {"claimName": "models", "readOnly": True},
        "Job/trainer": {"claimName": "models", "readOnly": True},
    }
    prepare = container(rendered(cached())["Job/prepare"], "prepare")
    assert environment(prepare)["SCALERL_MODEL_CACHE"] == "/run/scalerl/models"


def test_read_only_claim_is_written_by_nobody() -> None:
    run = cached(readOnly=True)
    assert all(mount["readOnly"] for mount in mounts(run, "/run/scalerl/models").values())
    assert all(source["readOnly"] for source in claims(run, "scalerl-models").values())


def test_without_a_cache_nothing_is_mounted() -> None:
    run = cluster_run(model=HUB)
    assert mounts(run, "/run/scalerl/models") == mounts(run, "/run/scalerl/compile-cache") == {}
    prepare = container(rendered(run)["Job/prepare"], "prepare")
    assert "SCALERL_MODEL_CACHE" not in environment(prepare)


@pytest.mark.parametrize("claim", [None, "compiled"])
def test_only_the_server_mounts_the_compile_cache(claim: str | None) -> None:
    run = cluster_run(generator={"compileCache": {} if claim is None else {"claimName": claim}})
    found = mounts(run, "/run/scalerl/compile-cache")
    assert found.keys() == {"server"}
    expected = {
        None: {"name": "scalerl-run", "subPath": "math/compile-cache"},
        "compiled": {"name": "scalerl-compile-cache", "subPath": "compile-cache"},
    }[claim]
    assert found["server"] == {"mountPath": "/run/scalerl/compile-cache"} | expected
    server = container(rendered(run)["Deployment/generator"], "server")
    assert environment(server)["SCALERL_COMPILE_CACHE"] == "/run/scalerl/compile-cache"
    assert {key: source["claimName"] for key, source in claims(run, "scalerl-compile-cache").items()} == (
        {"Deployment/generator": claim} if claim else {}
    )
    # The run's own directory stays read-only in both containers of a generator.
    assert all(mounts(run, "/run/scalerl/run")[name]["readOnly"] for name in ("server", "actor"))


def test_edit_of_the_compile_cache_replaces_generators_only() -> None:
    runs = [
        cluster_run(generator=g) for g in ({}, {"compileCache": {}}, {"compileCache": {"claimName": "a"}})
    ]
    assert len({spec_hash(run, Role.GENERATOR) for run in runs}) == 3
    assert len({spec_hash(run, Role.TRAINER) for run in runs}) == 1
