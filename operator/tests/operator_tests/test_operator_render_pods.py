"""The pods of a run: what all containers have, podTemplate, and probes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from operator_tests.manifests import (
    EVERYTHING,
    cluster_run,
    container,
    environment,
    every_container,
    example,
    pod_spec,
    rendered,
)
from scalerl_operator.build.pods import probes
from scalerl_operator.role_containers import plan
from scalerl_operator.workloads import Role, expand


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
        same = {"task": {"jsonl"}, "budget": {"max_seconds"}, "storage": True, "pod_template": True}
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
