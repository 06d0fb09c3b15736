"""Runs whose claim only the coordinator mounts."""

from __future__ import annotations

from typing import Any

import pytest

from operator_tests.manifests import EVERYTHING, IMAGES, PODS, UID, cluster_run, container, pod_spec, rendered
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.spec import ScaleRLRun
from scalerl_operator.controller.pod_views import pod_view
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Scope

SECRET = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "bucket", "key": "key"}}}


def own_directories(**changes: Any) -> ScaleRLRun:
    spec: dict[str, Any] = {
        "storage": {"mountedBy": "Coordinator"},
        "checkpoint": {"to": "s3://bucket/run", "keep": 2},
        "trainer": {"podTemplate": {"env": [SECRET]}},
    }
    return cluster_run(**spec | changes)


def test_only_the_coordinator_mounts_the_claim() -> None:
    objects = rendered(own_directories())
    claims = {
        pod
        for pod in PODS
        for volume in pod_spec(objects[pod])["volumes"]
        if volume["name"] == "scalerl-run" and "persistentVolumeClaim" in volume
    }
    assert claims == {"StatefulSet/coordinator"}
    for pod in set(PODS) - claims:
        for each in pod_spec(objects[pod])["containers"]:
            (mount,) = (m for m in each["volumeMounts"] if m["name"] == "scalerl-run")
            assert "subPath" not in mount
            assert mount.get("readOnly", False) == (each["name"] in ("server", "actor"))


def test_only_preparation_trainer_and_init_container_have_the_credentials() -> None:
    objects = rendered(own_directories(generator={"speculation": {"history": {}}}))
    with_credentials = {
        (pod.split("/")[1], each["name"])
        for pod in PODS
        for kind in ("initContainers", "containers")
        for each in pod_spec(objects[pod]).get(kind, ())
        if SECRET in each["env"]
    }
    assert with_credentials == {
        ("prepare", "prepare"),
        ("trainer", "fetch-model"),
        ("trainer", "trainer"),
        ("generator", "fetch-model"),
        ("coordinator", "fetch-model"),
    }


@pytest.mark.parametrize(
    ("changes", "fetches"),
    [
        ({}, False),
        ({"generator": {"speculation": {"history": {}}}}, True),
        ({"task": {"dataset": {"files": ["/data/a.csv"]}, "verifier": {"name": "exact"}}}, True),
    ],
)
def test_coordinator_fetches_the_tokenizer_for_past_responses_and_the_tables(
    changes: dict[str, Any], fetches: bool
) -> None:
    pod = pod_spec(rendered(own_directories(**changes))["StatefulSet/coordinator"])
    commands = [each["command"] for each in pod.get("initContainers", ())]
    assert commands == [["python", "-m", "scalerl_trainer.fetch_model", "--without-weights"]] * fetches


def test_pods_with_their_own_directory_request_its_size() -> None:
    size = ModelSize(parameters=2**30, hidden_size=64, layers=2, intermediate_size=64, vocabulary_size=64)
    objects = render(Scope(own_directories(), UID, IMAGES, "o", desired=EVERYTHING, size=size))
    requests = {
        each["name"]: each["resources"]["requests"].get("ephemeral-storage")
        for obj in objects
        if "template" in obj.get("spec", {})
        for each in pod_spec(obj)["containers"]
    }
    bytes_of_model = 4 if own_directories().spec.model.dtype == "float32" else 2
    # The model, five checkpoints of 12 bytes a weight, three exported models; and a tenth.
    trainer = 1.1 * 1024 * (bytes_of_model + 5 * 12 + 3 * bytes_of_model)
    assert float(requests["trainer"].removesuffix("Mi")) == pytest.approx(trainer, abs=1)
    assert float(requests["server"].removesuffix("Mi")) == pytest.approx(1.1 * 1024 * bytes_of_model, abs=1)
    assert requests["actor"] is requests["coordinator"] is None
    shared = render(Scope(cluster_run(), UID, IMAGES, "o", desired=EVERYTHING, size=size))
    assert "ephemeral-storage" not in str(shared)


def test_shared_claim_needs_no_init_container() -> None:
    objects = rendered(cluster_run(checkpoint={"to": "s3://bucket/run"}))
    assert "initContainers" not in str(objects)
    names = {e["name"] for e in container(objects["Job/trainer"], "trainer")["env"]}
    assert "SCALERL_OWN_DIRECTORY" not in names


def test_pod_has_started_though_its_init_container_has_ended() -> None:
    ended = {"name": "fetch-model", "ready": True, "started": False, "state": {"terminated": {"exitCode": 0}}}
    running = {"name": "trainer", "ready": True, "started": True, "state": {"running": {}}}
    status = {"phase": "Running", "initContainerStatuses": [ended], "containerStatuses": [running]}
    assert pod_view({"metadata": {"name": "p"}, "status": status}).started
    waiting = running | {"started": False, "state": {"waiting": {"reason": "PodInitializing"}}}
    assert not pod_view(
        {"metadata": {"name": "p"}, "status": status | {"containerStatuses": [waiting]}}
    ).started


def test_failed_init_container_is_a_problem_with_its_last_line() -> None:
    before = {"terminated": {"exitCode": 1, "message": "s3://bucket/run/model: 403 Forbidden"}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    failed = {"name": "fetch-model", "ready": False, "state": state, "lastState": before}
    waiting = {"name": "server", "ready": False, "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"phase": "Pending", "initContainerStatuses": [failed], "containerStatuses": [waiting]}
    problem = pod_view({"metadata": {"name": "p"}, "status": status}).problem
    assert problem is not None
    assert "fetch-model: s3://bucket/run/model: 403 Forbidden" in problem.message
