"""The pods of a run: what all containers have, podTemplate, and probes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from operator_tests.manifests import (
    EVERYTHING,
    EXAMPLES,
    PODS,
    UID,
    cluster_run,
    container,
    environment,
    every_container,
    example,
    pod_spec,
    rendered,
)
from scalerl_api import process
from scalerl_api.reserved_in_pods import RANK_VARIABLES
from scalerl_api.spec_warnings import warnings_of
from scalerl_lifecycle.lifecycle_types import Wanted
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.workloads import Role, expand
from scalerl_operator.manifests.container_fields import probes
from scalerl_operator.manifests.scope import Desired
from scalerl_operator.names import ATTEMPT


def test_pods_meet_the_restricted_standard() -> None:
    for pod, each in every_container(rendered(cluster_run(trainer={"devices": 1}))):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_mounts_have_volumes_and_containers_share_no_tmp() -> None:
    objects = rendered(cluster_run())
    tmp = []
    for pod, each in every_container(objects):
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        assert {"/tmp", "/run/scalerl/run", "/etc/scalerl/spec", "/etc/scalerl/token"} <= mounts.keys()
        tmp.append(mounts["/tmp"])
    assert len(set(tmp)) == len(tmp)
    generators = objects["Deployment/generator"]
    for name in ("server", "actor"):
        assert container(generators, name)["volumeMounts"][0]["readOnly"] is True


WRITABLE = {
    "prepare": {"/run/scalerl/run", "/tmp", "/dev/shm", "/claim", "/scratch", "/own"},
    "coordinator": {"/run/scalerl/run", "/tmp", "/dev/shm", "/claim", "/scratch", "/own"},
    "trainer": {"/run/scalerl/run", "/tmp", "/dev/shm", "/claim", "/scratch", "/own"},
    "server": {"/tmp", "/dev/shm", "/claim", "/scratch", "/own"},
    "actor": {"/tmp", "/scratch", "/own"},
}
"""Every path that a container may write to, with one volume of each kind from ``podTemplate``."""


def test_each_container_writes_only_where_it_must() -> None:
    template = {
        "volumes": [
            {"name": "claim", "persistentVolumeClaim": {"claimName": "shared"}},
            {"name": "nfs", "nfs": {"server": "s", "path": "/"}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "own", "ephemeral": {"volumeClaimTemplate": {}}},
        ],
        "volumeMounts": [
            {"name": "claim", "mountPath": "/claim", "readOnly": False},
            {"name": "nfs", "mountPath": "/nfs", "readOnly": True},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "own", "mountPath": "/own"},
        ],
    }
    run = cluster_run(storage={"claimName": "shared"}, podTemplate=template)
    found = {
        each["name"]: {m["mountPath"] for m in each["volumeMounts"] if not m.get("readOnly")}
        for _, each in every_container(rendered(run))
    }
    assert found == WRITABLE


def test_each_container_sees_only_its_runs_folder_of_a_shared_claim() -> None:
    run = cluster_run(storage={"claimName": "shared"})
    for pod, each in every_container(rendered(run)):
        claims = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        (mount,) = (m for m in each["volumeMounts"] if m["name"] in claims)
        assert mount["subPath"] == run.metadata.name


def test_actor_tmp_has_a_size_limit() -> None:
    pod = rendered(cluster_run())["Deployment/generator"]["spec"]["template"]["spec"]
    actor = container(rendered(cluster_run())["Deployment/generator"], "actor")
    (mount,) = (m["name"] for m in actor["volumeMounts"] if m["mountPath"] == "/tmp")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mount]["emptyDir"] == {"sizeLimit": "1Gi"}
    # Compiled kernels, and what a library loads: of no size that would do for every model.
    server = container(rendered(cluster_run())["Deployment/generator"], "server")
    (mount,) = (m["name"] for m in server["volumeMounts"] if m["mountPath"] == "/tmp")
    assert volumes[mount]["emptyDir"] == {}


def test_variables_refer_only_to_those_before_them() -> None:
    run = cluster_run(generator={"extraArgs": ["--hf-token=$(HOME)"]}, trainer={"replicas": 2})
    for _, each in every_container(rendered(run)):
        known: dict[str, str] = {}
        for entry in each["env"]:
            assert entry["name"] not in known, "given twice"
            known[entry["name"]] = expand(entry["value"], known) if "value" in entry else "from the pod"
        for word in each["command"]:
            expand(word, known)
        assert known["SCALERL_DIR"] == "/run/scalerl/run"
        assert known["SCALERL_COORDINATOR_URL"] == "http://math-coordinator.ml.svc:8080"
        assert known["HOME"].startswith("/tmp/")
    server = container(rendered(run)["Deployment/generator"], "server")
    assert expand(server["command"][-1], {}) == "--hf-token=$(HOME)"


def test_commands_are_the_plans() -> None:
    run = cluster_run()
    objects = rendered(run)
    for workload in plan(run).workloads:
        for each in workload.containers:
            found = next(c for _, c in every_container(objects) if c["name"] == each.name)
            assert tuple(found["command"]) == each.argv


def test_replicas_have_names() -> None:
    objects = rendered(cluster_run())
    assert (
        environment(container(objects["StatefulSet/coordinator"], "coordinator"))["SCALERL_NAME"]
        == "coordinator-0"
    )
    assert environment(container(objects["Deployment/generator"], "actor"))["SCALERL_NAME"] == "metadata.name"
    assert environment(container(objects["Job/trainer"], "trainer"))["SCALERL_NAME"] == "trainer-$(RANK)"


def test_prepare_caches_on_the_volume_for_a_hub_model_only() -> None:
    hub = rendered(cluster_run(model={"hub": {"name": "a/b"}}))
    env = environment(container(hub["Job/prepare"], "prepare"))
    assert env["HF_HOME"] == "/run/scalerl/run/hub"
    assert "HF_HUB_OFFLINE" not in env
    assert "HF_HOME" not in environment(container(hub["Job/trainer"], "trainer"))
    assert "HF_HOME" not in environment(container(rendered(cluster_run())["Job/prepare"], "prepare"))


def test_images_of_the_run_override_the_operators() -> None:
    objects = rendered(cluster_run(images={"trainer": "own:2", "pullPolicy": "Always"}))
    found = {each["name"]: (each["image"], each["imagePullPolicy"]) for _, each in every_container(objects)}
    assert found == {
        "prepare": ("own:2", "Always"),
        "trainer": ("own:2", "Always"),
        "coordinator": ("registry/operator:1", "Always"),
        "server": ("registry/generator:1", "Always"),
        "actor": ("registry/generator:1", "Always"),
    }
    pulled = {c["imagePullPolicy"] for _, c in every_container(rendered(cluster_run()))}
    assert pulled == {"IfNotPresent"}


def test_pod_templates_of_run_and_role_are_merged() -> None:
    run = cluster_run(
        podTemplate={
            "nodeSelector": {"pool": "all"},
            "env": [{"name": "A", "value": "all"}, {"name": "B", "value": "all"}],
            "volumes": [{"name": "data", "configMap": {"name": "data"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "labels": {"team": "x"},
            "annotations": {"prometheus.io/scrape": "no"},
            "imagePullSecrets": [{"name": "registry"}],
            "shmSize": "8192Mi",
        },
        trainer={
            "podTemplate": {
                "nodeSelector": {"gpu": "yes"},
                "env": [{"name": "B", "value": "trainer"}],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "priorityClassName": "high",
                "runtimeClassName": "nvidia",
                "affinity": {"nodeAffinity": {}},
            }
        },
    )
    objects = rendered(run)
    trainer, generator = objects["Job/trainer"], objects["Deployment/generator"]
    spec = pod_spec(trainer)
    assert spec["nodeSelector"] == {"pool": "all", "gpu": "yes"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "nvidia")
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    shm = next(v for v in spec["volumes"] if v["name"] == "scalerl-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8192Mi"}
    assert environment(container(trainer, "trainer")).items() >= {"A": "all", "B": "trainer"}.items()
    assert environment(container(objects["Job/prepare"], "prepare"))["B"] == "trainer"
    assert pod_spec(generator)["nodeSelector"] == {"pool": "all"}
    assert not {"tolerations", "affinity", "priorityClassName"} & pod_spec(generator).keys()
    for name in ("server", "actor"):
        assert environment(container(generator, name))["B"] == "all"
        read_only = {"readOnly": True} if name == "actor" else {}
        assert {"name": "data", "mountPath": "/data", **read_only} in container(generator, name)[
            "volumeMounts"
        ]
    metadata = generator["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "x"
    assert metadata["annotations"]["prometheus.io/scrape"] == "no"
    assert "team" not in generator["metadata"]["labels"]


PLACED = {
    "schedulerName": "kai-scheduler",
    "serviceAccountName": "reader",
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
        {"maxSkew": 1, "topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}},
    ],
    "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight"}],
    "envFrom": [{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "c", "optional": True}, "prefix": "A_"}],
    "volumes": [
        {"name": "data", "emptyDir": {}},
        {"name": "vault", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
    ],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "vault", "mountPath": "/vault"}],
    "initContainers": [
        {
            "name": "fetch",
            "image": "fetcher:1",
            "args": ["s3://bucket", "/data"],
            "envFrom": [{"secretRef": {"name": "hub"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "resources": {"limits": {"memory": "1Gi"}},
        }
    ],
}  # fmt: skip


def placed(**trainer: object) -> dict[str, Any]:
    return rendered(
        cluster_run(
            podTemplate=PLACED, generator={"devices": 1}, trainer={"devices": 8, "replicas": 2} | trainer
        )
    )


def test_scheduler_spread_and_claims_of_pods() -> None:
    objects = placed()
    for key in PODS:
        spec = pod_spec(objects[key])
        assert spec["schedulerName"] == "kai-scheduler"
        own = {"matchLabels": {"scalerl.dev/run-uid": UID, "app.kubernetes.io/component": key.split("/")[1]}}
        assert [spread["labelSelector"] for spread in spec["topologySpreadConstraints"]] == [own, {}]
        claimed = [each for each in spec["containers"] if "claims" in each["resources"]]
        # The preparation uses no device; the actor none of the server's.
        assert [each["name"] for each in claimed] == (
            [] if key == "Job/prepare" else [spec["containers"][0]["name"]]
        )
        assert spec.get("resourceClaims", []) == ([] if key == "Job/prepare" else PLACED["resourceClaims"])
        for each in spec["containers"]:
            assert "nvidia.com/gpu" not in each["resources"].get("limits", {}), "the claim is for the devices"
    run = cluster_run(podTemplate=PLACED, trainer={"devices": 1})
    assert not [w for w in warnings_of(run.spec) if "nvidia.com/gpu" in str(w)]


def test_warns_of_a_device_that_resources_name() -> None:
    given = {"limits": {"nvidia.com/gpu": 1}}
    run = cluster_run(trainer={"podTemplate": {"resources": given}}, generator={"actorResources": given})
    assert [w.where for w in warnings_of(run.spec) if "nvidia.com/gpu" in str(w)] == [
        "spec.generator.actorResources",
        "spec.trainer.podTemplate.resources",
    ]


def test_only_the_generators_own_account_is_in_their_pods_and_the_actor_has_no_token() -> None:
    objects = placed()
    accounts = {key: pod_spec(objects[key]).get("serviceAccountName") for key in PODS}
    assert accounts == dict.fromkeys(PODS, "reader") | {"Deployment/generator": "default"}
    own = cluster_run(podTemplate=PLACED, generator={"podTemplate": {"serviceAccountName": "weights"}})
    generator = rendered(own)["Deployment/generator"]
    assert pod_spec(generator)["serviceAccountName"] == "weights"
    annotations = generator["spec"]["template"]["metadata"]["annotations"]
    assert annotations["eks.amazonaws.com/skip-containers"] == "actor"
    assert annotations["azure.workload.identity/skip-containers"] == "actor"
    for pod, each in every_container(rendered(own)):
        assert pod["automountServiceAccountToken"] is False
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert ("vault" in mounted) is (each["name"] != "actor"), each["name"]


@pytest.mark.parametrize("devices", [1, 8])
def test_sources_of_variables_cannot_set_the_runtimes(devices: int) -> None:
    """A key of a Secret has effect where ``env`` does not have its name."""
    for _, each in every_container(placed(devices=devices)):
        assert each["envFrom"] == PLACED["envFrom"]
        names = {entry["name"] for entry in each["env"]}
        reserved = {*process.OPTIONAL, *(RANK_VARIABLES if each["name"] == "trainer" else ())}
        assert reserved <= names, each["name"]
        assert len(names) == len(each["env"])
    for _, each in every_container(rendered(cluster_run())):
        assert "envFrom" not in each
        assert not {"SCALERL_VLLM_TOKEN"} & {entry["name"] for entry in each["env"]}


def test_every_variable_of_the_roles_is_set_or_emptied() -> None:
    read = set()
    for member in ("api", "trainer", "generator", "coordinator"):
        for path in (EXAMPLES.parent / member / "src").rglob("*.py"):
            read |= set(
                re.findall(r'^\w+(?:: Final)? = "(SCALERL_[A-Z_]+)"$', path.read_text(), re.MULTILINE)
            )
    assert len(read) > 10
    read.remove("SCALERL_ENVIRONMENT_URL")  # set where it is read
    for _, each in every_container(placed()):
        assert read <= {entry["name"] for entry in each["env"]}, each["name"]


def test_init_containers_are_restricted_and_see_only_their_mounts() -> None:
    objects = placed()
    for key in PODS:
        spec = pod_spec(objects[key])
        (first,) = spec["initContainers"]
        assert first["securityContext"] == spec["containers"][0]["securityContext"]
        assert (first["image"], first["args"]) == ("fetcher:1", ["s3://bucket", "/data"])
        assert first["resources"] == {"limits": {"memory": "1Gi"}}
        assert [m["name"] for m in first["volumeMounts"]] == ["data", "scalerl-tmp-fetch"]
        assert {"name": "scalerl-tmp-fetch", "emptyDir": {}} in spec["volumes"]
        assert "env" not in first, "the runtime's variables and token are for the roles"


def test_user_variables_override_the_plans_not_the_runtimes() -> None:
    env = [
        {"name": "USER", "value": "me"},
        {"name": "HF_HUB_OFFLINE", "value": "0"},
        {"name": "C", "value": "$(USER)"},
    ]
    trainer = container(rendered(cluster_run(podTemplate={"env": env}))["Job/trainer"], "trainer")
    assert [entry for entry in trainer["env"] if entry["name"] in ("USER", "HF_HUB_OFFLINE", "C")] == env


def test_runtime_variables_are_refused_in_pod_templates() -> None:
    """The variables that the operator sets and those that the CRD refuses are the same."""
    objects = rendered(cluster_run(podTemplate={"env": [{"name": "ZZZ", "value": "theirs"}]}))
    for _, each in every_container(objects):
        names = [entry["name"] for entry in each["env"]]
        fixed = names[: next(i for i, name in enumerate(names) if name == "HOME")]
        assert fixed
        for name in fixed:
            with pytest.raises(ValueError, match="the operator"):
                cluster_run(podTemplate={"env": [{"name": name, "value": "x"}]})


def test_tiny_examples_render_completely() -> None:
    for path in ("tiny", "tiny-autostop"):
        here, cluster = example(f"{path}/run.yaml").spec, example(f"{path}/run-kubernetes.yaml").spec
        assert cluster.task.jsonl
        assert here.task.jsonl
        same = {
            "task": {"jsonl"},
            "budget": {"max_seconds"},
            "storage": True,
            "pod_template": True,
            "trace": True,
        }
        assert here.model_dump(exclude=same) == cluster.model_dump(exclude=same)
        objects = rendered(example(f"{path}/run-kubernetes.yaml"), EVERYTHING)
        for _, each in every_container(objects):
            assert cluster.task.jsonl.path.startswith(each["volumeMounts"][-1]["mountPath"] + "/")


def test_probes_have_longer_periods_and_the_same_time_limit() -> None:
    run = cluster_run()
    for workload in plan(run).workloads:
        for each in workload.containers:
            made = probes(each)
            assert bool(made) is (workload.role is not Role.PREPARE)
            for name, given_probe in (("startupProbe", each.startup), ("livenessProbe", each.liveness)):
                if given_probe is None:
                    continue
                probe = made[name]
                assert probe["periodSeconds"] >= 5
                total = given_probe.period_seconds * given_probe.failure_threshold
                assert (
                    0 <= probe["periodSeconds"] * probe["failureThreshold"] - total < probe["periodSeconds"]
                )


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield http.server_port
        http.shutdown()
        thread.join(120)


def test_loopback_port_has_an_exec_probe(server: int) -> None:
    each = container(rendered(cluster_run())["Deployment/generator"], "server")
    command = each["livenessProbe"]["exec"]["command"]
    assert command[0] == "python"

    def ask(*swaps: tuple[str, str]) -> int:
        code = command[-1]
        for old, new in swaps:
            assert old in code
            code = code.replace(old, new)
        return subprocess.run(
            [sys.executable, *command[1:-1], code], timeout=30, capture_output=True
        ).returncode

    assert ask(("8000", str(server))) == 0
    assert ask(("8000", str(server)), ("/health", "/else")) == 1
    assert ask(("8000", "1")) == 1


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ([], ["not-ready", "unreachable"]),
        ([{"key": "gpu", "operator": "Exists"}], ["not-ready", "unreachable"]),
        ([{"key": "node.kubernetes.io/unreachable", "operator": "Exists"}], ["not-ready"]),
        ([{"operator": "Exists"}], []),
    ],
)
def test_coordinator_leaves_a_node_that_does_not_answer_before_the_trainer_gives_it_up(
    given: list[dict[str, str]], own: list[str]
) -> None:
    run = cluster_run(coordinator={"podTemplate": {"tolerations": given}})
    found = pod_spec(
        rendered(run, Desired(Wanted(coordinator=True), coordinator_attempt=3))["StatefulSet/coordinator"]
    )["tolerations"]
    assert found[: len(given)] == given
    assert [toleration["key"].rpartition("/")[2] for toleration in found[len(given) :]] == own
    assert all(
        toleration["tolerationSeconds"] < process.COORDINATOR_TIMEOUT_SECONDS
        for toleration in found[len(given) :]
    )


def test_coordinator_has_its_number_and_its_pods_uid() -> None:
    made = rendered(cluster_run(), Desired(Wanted(coordinator=True), coordinator_attempt=3))[
        "StatefulSet/coordinator"
    ]
    known = environment(container(made, "coordinator"))
    assert known[process.ATTEMPT].endswith(".3")
    assert known[process.POD] == "metadata.uid"
    assert made["spec"]["template"]["metadata"]["labels"][ATTEMPT] == "3"
    assert ATTEMPT not in made["spec"]["selector"]["matchLabels"]
