"""Environment servers: what their pods have, who reaches them, how many there are, and what their failures do to a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_tests.builders import container as container_status
from operator_tests.builders import pod
from operator_tests.manifests import (
    EVERYTHING,
    IMAGES,
    RUNNING,
    UID,
    cluster_run,
    container,
    environment,
    example,
    pod_spec,
    rendered,
)
from scalerl_api.conditions import Phase
from scalerl_api.spec import ScaleRLRun
from scalerl_lifecycle import lifecycle
from scalerl_lifecycle.lifecycle_types import (
    ContainerExit,
    Job,
    JobState,
    LifecycleInput,
    PersistedState,
    Service,
)
from scalerl_lifecycle.role_containers import environment_replicas, plan
from scalerl_lifecycle.workloads import Role, expand
from scalerl_operator.controller.pod_views import observe_objects, pod_view
from scalerl_operator.manifests import render
from scalerl_operator.manifests.gang import Gang
from scalerl_operator.manifests.scope import Desired, Scope, spec_hash

SERVER = {
    "image": "registry/game:1",
    "command": ["serve", "--at=$(HOST):$(PORT)", "$(A) $$"],
    "port": 7860,
    "podTemplate": {"labels": {"net": "open"}, "env": [{"name": "A", "value": "1"}]},
}
OF_THE_RUN = {
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "nodeSelector": {"accelerator": "h100"},
    "serviceAccountName": "bucket",
}


def serving(server: dict[str, Any] | None = None, parameters: Any = None, **spec: Any) -> ScaleRLRun:
    task = {"jsonl": {"path": "/data/a.jsonl"}, "environment": {"name": "server", "parameters": parameters}}
    return cluster_run(task=task, environment=SERVER if server is None else server, **spec)


def test_servers_have_nothing_of_the_run() -> None:
    """They act on the text of a model: no volume, no token, no credentials, no accelerator."""
    objects = rendered(serving(podTemplate=OF_THE_RUN, storage={"claimName": "data"}))
    made = objects["Deployment/environment"]
    only = container(made, "environment")
    assert (only["image"], only["command"]) == ("registry/game:1", ["serve", "--at=$(SCALERL_BIND):$(SCALERL_PORT_ENVIRONMENT)", "$$(A) $$$$"])  # fmt: skip
    given_variables = environment(only)
    assert given_variables.keys() == {
        *("SCALERL_BIND", "SCALERL_ADDRESS", "SCALERL_NAME", "SCALERL_PORT_ENVIRONMENT"),
        *("HOME", "USER", "PYTHONUNBUFFERED", "HOST", "PORT", "A"),
    }
    assert expand(only["command"][1], given_variables) == "--at=0.0.0.0:7860"
    assert {volume["name"] for volume in pod_spec(made)["volumes"]} == {"scalerl-shm", "scalerl-tmp-environment"}  # fmt: skip
    assert {mount["mountPath"] for mount in only["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert "nodeSelector" not in pod_spec(made)
    assert (pod_spec(made)["serviceAccountName"], pod_spec(made)["automountServiceAccountToken"]) == ("default", False)  # fmt: skip
    assert pod_spec(made)["securityContext"]["runAsNonRoot"] is True
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert made["spec"]["template"]["metadata"]["labels"]["net"] == "open"
    assert "nodeSelector" in pod_spec(objects["Deployment/generator"]), "the others have the run's"


def test_only_generators_reach_the_servers_which_reach_nothing() -> None:
    objects = rendered(serving())
    policy, of_others = objects["NetworkPolicy/environment"]["spec"], objects["NetworkPolicy/run"]["spec"]
    pods = objects["Deployment/environment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    assert (policy["egress"], policy["policyTypes"]) == ([], ["Ingress", "Egress"])
    (entry,) = policy["ingress"]
    (peer,) = entry["from"]
    assert entry["ports"] == [{"protocol": "TCP", "port": 7860}]
    for name in ("Deployment/generator", "StatefulSet/coordinator", "Deployment/environment"):
        labels = objects[name]["spec"]["template"]["metadata"]["labels"]
        reaches = peer["podSelector"]["matchLabels"].items() <= labels.items()
        assert reaches == (name == "Deployment/generator")
    not_servers = {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["environment"]}
    assert of_others["podSelector"]["matchExpressions"] == [not_servers]
    assert of_others["ingress"][0]["from"] == [{"podSelector": of_others["podSelector"]}]
    assert "matchExpressions" not in rendered(cluster_run())["NetworkPolicy/run"]["spec"]["podSelector"]


def test_generators_find_the_servers_that_are_ready() -> None:
    objects = rendered(serving())
    service = objects["Service/environment"]
    url = environment(container(objects["Deployment/generator"], "actor"))["SCALERL_ENVIRONMENT_URL"]
    assert url == f"http://{service['metadata']['name']}.ml.svc:7860"
    assert service["spec"]["clusterIP"] == "None", "an actor takes one address after the other"
    assert service["spec"]["publishNotReadyAddresses"] is False
    assert service["spec"]["ports"][0]["targetPort"] == 7860
    only = container(objects["Deployment/environment"], "environment")
    assert only["ports"] == [{"name": "environment", "containerPort": 7860, "protocol": "TCP"}]
    assert only["readinessProbe"]["httpGet"] == {"path": "/health", "port": "environment"}


def test_servers_exist_with_the_coordinator_alone() -> None:
    run = serving()
    for desired, there in ((RUNNING, True), (Desired(replace(EVERYTHING.wanted, coordinator=False)), False)):
        objects = rendered(run, desired)
        assert ("Deployment/environment" in objects) == ("Service/environment" in objects) == there
        assert "NetworkPolicy/environment" in objects
    assert "Deployment/environment" not in rendered(cluster_run())


def test_image_is_that_of_the_generator_without_one() -> None:
    run = serving({"command": ["python", "/code/game.py"]})
    made = rendered(run)["Deployment/environment"]
    assert container(made, "environment")["image"] == IMAGES.generator
    own = serving({"command": ["python", "/code/game.py"]}, images={"generator": "registry/own:2"})
    assert container(rendered(own)["Deployment/environment"], "environment")["image"] == "registry/own:2"
    other = serving(images={"generator": "registry/own:2"})
    assert spec_hash(other, Role.ENVIRONMENT) == spec_hash(serving(), Role.ENVIRONMENT)


@pytest.mark.parametrize("change", [{"image": "registry/game:2"}, {"command": ["x"]}, {"podTemplate": {}}])
def test_edit_restarts_the_servers_alone(change: dict[str, Any]) -> None:
    before, after = serving(), serving(SERVER | change)
    for role in (Role.COORDINATOR, Role.GENERATOR, Role.TRAINER, Role.PREPARE):
        assert spec_hash(before, role) == spec_hash(after, role)
    assert spec_hash(before, Role.ENVIRONMENT) != spec_hash(after, Role.ENVIRONMENT)
    scaled = serving(SERVER | {"replicas": 3})
    assert spec_hash(before, Role.ENVIRONMENT) == spec_hash(scaled, Role.ENVIRONMENT)


@given(st.integers(1, 1024), st.integers(1, 500), st.integers(1, 500), st.integers(1, 2000))
def test_replicas_hold_the_sessions_of_all_generators(
    generators: int, sessions: int, each: int, least: int
) -> None:
    least = min(least, 1024)
    run = serving(
        SERVER | {"replicas": least, "sessionsPerReplica": each},
        {"sessions": sessions},
        generator={"replicas": generators},
    )
    found = environment_replicas(run.spec)
    assert least <= found <= 1024
    assert found == 1024 or found * each >= generators * sessions
    assert found == least or (found - 1) * each < generators * sessions


@pytest.mark.parametrize(
    ("parameters", "expected"), [(None, 4), ({"sessions": "x"}, 4), ({"sessions": 32}, 2)]
)
def test_replicas_by_load_have_the_default_of_sessions(parameters: Any, expected: int) -> None:
    run = serving(SERVER | {"sessionsPerReplica": 32}, parameters, generator={"replicas": 2})
    assert environment_replicas(run.spec) == expected
    assert plan(run).workload(Role.ENVIRONMENT).replicas == expected
    assert environment_replicas(run.spec, 1) == expected // 2


def test_gang_has_the_servers_and_later_ones_are_queued_one_by_one() -> None:
    run = cluster_run(
        labels={"kueue.x-k8s.io/queue-name": "team"},
        task={"jsonl": {"path": "/a"}, "environment": {"name": "server"}},
        environment=SERVER | {"replicas": 5},
    )
    gang = Gang(1, '{"environment": {"nodeSelector": {"pool": "a"}}}', admitted=True, environments=3)
    objects = render(Scope(run, UID, IMAGES, "o", desired=replace(EVERYTHING, gang=gang)))
    (workload,) = (obj for obj in objects if obj["kind"] == "Workload")
    assert {one["name"]: one["count"] for one in workload["spec"]["podSets"]}["environment"] == 3
    servers = [o for o in objects if o["kind"] == "Deployment" and "environment" in o["metadata"]["name"]]
    assert [(o["spec"]["replicas"], o["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")) for o in servers] == [(3, None), (2, "team")]  # fmt: skip
    assert [pod_spec(o).get("nodeSelector") for o in servers] == [{"pool": "a"}, None]


def test_example_has_as_many_servers_as_its_sessions_need() -> None:
    made = rendered(example("openenv/run-kubernetes.yaml"))["Deployment/environment"]
    assert made["spec"]["replicas"] == 4
    assert container(made, "environment")["image"] == "registry.example.com/environment:1"


# --- failures -----------------------------------------------------------------------------------

SPEC = serving().spec
SEEN = LifecycleInput(100.0, prepare=Job(JobState.COMPLETE), trainer=Job(JobState.ACTIVE, 1))


@pytest.mark.parametrize(
    ("environment_servers", "ends"),
    [
        (Service(restarts=20, restarted="e"), False),
        (Service(restarts=21, restarted="e"), True),
        (Service(ready=1, restarts=21), False),
        (Service(given_up=ContainerExit(1, "no module named game")), True),
        (Service(starting=1, given_up=ContainerExit(1, "no module named game")), False),
        (Service(starting=2), False),
        (None, False),
    ],
)
def test_run_ends_when_no_server_starts_any_more(environment_servers: Service | None, ends: bool) -> None:
    seen = replace(SEEN, environment=environment_servers)
    fresh = lifecycle.decide(SPEC, seen, PersistedState(attempt=1))
    trained = lifecycle.decide(SPEC, seen, PersistedState(attempt=1, has_trained=True))
    assert (fresh.phase, trained.phase) == (
        (Phase.FAILED, Phase.SUSPENDED) if ends else (Phase.RUNNING, Phase.RUNNING)
    )
    if ends:
        assert trained.persisted.outcome is not None
        assert trained.persisted.outcome.message.startswith("environment: ")


def test_exit_codes_of_a_users_program_have_no_meaning() -> None:
    """uvicorn exits with 3 when it cannot start, gunicorn with 4, a command line with 2."""
    for code in (2, 3, 4, 5):
        ended = {"exitCode": code, "finishedAt": "2026-01-01T01:00:00Z"}
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
        status = container_status(waiting, restarts=9, lastState={"terminated": ended}, name="environment")
        view = pod_view(pod("e", Role.ENVIRONMENT, status))
        assert (view.bad_input, view.restarts, view.problem is not None) == (None, 9, True)
        observed = observe_objects({("Pod", "e"): pod("e", Role.ENVIRONMENT, status)}, UID, {Role.PREPARE: "", Role.TRAINER: ""})  # fmt: skip
        assert observed.service(Role.ENVIRONMENT).starting == 1
