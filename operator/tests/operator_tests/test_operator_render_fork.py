"""The volume of a fork's source: which container mounts it, and how."""

from __future__ import annotations

from dataclasses import replace

from operator_tests.manifests import (
    EVERYTHING,
    PODS,
    cluster_run,
    container,
    environment,
    every_container,
    pod_spec,
    rendered,
)
from scalerl_lifecycle.workloads import Role
from scalerl_operator.manifests import spec_hash

FORK = cluster_run(**{"from": {"run": "v1.5-math", "step": 20}})
SOURCE = "/run/scalerl/source"


def test_only_the_preparation_mounts_the_source_read_only() -> None:
    objects = rendered(FORK, replace(EVERYTHING, source_claim="their-claim"))
    mounts = {
        each["name"]: mount
        for _, each in every_container(objects)
        for mount in each["volumeMounts"]
        if mount["mountPath"] == SOURCE or mount["name"] == "scalerl-source"
    }
    assert mounts == {
        "prepare": {"name": "scalerl-source", "mountPath": SOURCE, "subPath": "v1.5-math", "readOnly": True}
    }
    claims = {
        key: volume["persistentVolumeClaim"]
        for key in PODS
        for volume in pod_spec(objects[key])["volumes"]
        if volume["name"] == "scalerl-source"
    }
    assert claims == {"Job/prepare": {"claimName": "their-claim"}}
    assert environment(container(objects["Job/prepare"], "prepare"))["SCALERL_SOURCE_DIR"] == SOURCE
    run = next(
        m for m in container(objects["Job/prepare"], "prepare")["volumeMounts"] if m["name"] == "scalerl-run"
    )
    assert (run["subPath"], run.get("readOnly", False)) == ("math", False)


def test_fork_that_has_trained_mounts_no_source() -> None:
    """Its own preparation after an edit: the source may be gone."""
    assert "scalerl-source" not in str(rendered(FORK))
    assert "SCALERL_SOURCE_DIR" not in str(rendered(FORK))


def test_claim_of_the_source_is_no_part_of_the_hashes() -> None:
    """They decide what is restarted."""
    with_source = rendered(FORK, replace(EVERYTHING, source_claim="a"))["Job/prepare"]
    for obj in (with_source, rendered(FORK)["Job/prepare"]):
        assert obj["metadata"]["annotations"]["scalerl.dev/spec-hash"] == spec_hash(FORK, Role.PREPARE)
