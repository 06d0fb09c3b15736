from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

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
from scalerl_api.load import parse_run
from scalerl_operator.cluster import names
from scalerl_operator.cluster.render import names_of, raw_hash, render, secret, spec_hash
from scalerl_operator.cluster.render.probes import probes
from scalerl_operator.cluster.render.quantities import canonical, value
from scalerl_operator.cluster.types import Desired, Images, Object
from scalerl_operator.plan import plan
from scalerl_operator.workloads import Role, expand

PODS = ("Job/prepare", "StatefulSet/coordinator", "Deployment/generator", "Job/trainer")


# --- what exists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desired", "more"),
    [
        (Desired(), []),
        (Desired(prepare=True), ["Job/prepare"]),
        (Desired(coordinator=True), ["Service/coordinator", "Service/trainer", "StatefulSet/coordinator"]),
        (Desired(generators=2), ["PodDisruptionBudget/generator", "Deployment/generator"]),
        (Desired(trainer_attempt=2), ["Service/coordinator", "Service/trainer", "Job/trainer"]),
    ],
)
def test_there_is_what_is_desired_and_what_every_run_has(desired: Desired, more: list[str]) -> None:
    always = ["PersistentVolumeClaim/run", "ConfigMap/run", "NetworkPolicy/run"]
    assert list(rendered(cluster_run(), desired)) == always + more


def test_the_same_run_gives_the_same_objects_and_they_share_nothing_with_it() -> None:
    run = cluster_run(podTemplate={"env": [{"name": "A", "value": "1"}], "tolerations": [{"key": "a"}]})
    first = rendered(run)
    before = json.dumps(first)
    for obj in first.values():
        if obj["kind"] in ("Job", "Deployment"):
            pod_spec(obj)["tolerations"][0]["key"] = "changed"
            pod_spec(obj)["containers"][0]["env"][-1]["value"] = "changed"
    assert json.dumps(rendered(run)) == before


def test_objects_are_plain_json_and_valid_yaml() -> None:
    for obj in rendered(cluster_run()).values():
        assert yaml.safe_load(yaml.safe_dump(obj)) == obj


def test_every_object_names_its_run_and_goes_with_it_but_a_claim_to_keep() -> None:
    for key, obj in rendered(cluster_run()).items():
        metadata = obj["metadata"]
        assert metadata["namespace"] == "ml"
        assert metadata["labels"].items() >= {names.RUN: "math", names.RUN_UID: UID}.items()
        owners = [
            (o["uid"], o["controller"], o["blockOwnerDeletion"]) for o in metadata.get("ownerReferences", [])
        ]
        assert owners == ([] if key == "PersistentVolumeClaim/run" else [(UID, True, True)])


def test_a_run_without_a_namespace_is_no_clusters() -> None:
    run = cluster_run()
    homeless = run.model_copy(update={"metadata": run.metadata.model_copy(update={"namespace": None})})
    with pytest.raises(ValueError, match="math has no namespace"):
        render(homeless, UID, Desired(), IMAGES, operator_namespace="x")


def test_a_long_name_fits_everywhere() -> None:
    for obj in rendered(cluster_run("r" * 253)).values():
        metadata = obj["metadata"]
        assert len(metadata["name"]) <= 63
        assert all(len(label) <= 63 for label in metadata["labels"].values())


# --- storage, spec, token ------------------------------------------------------------------------------------


def test_the_claim_is_as_the_spec_says() -> None:
    storage = {
        "size": "2048Gi",
        "storageClassName": "nfs",
        "accessMode": "ReadWriteOnce",
        "onDelete": "Delete",
    }
    claim = rendered(cluster_run(storage=storage))["PersistentVolumeClaim/run"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "2Ti"}},
        "storageClassName": "nfs",
    }
    assert claim["metadata"]["ownerReferences"]


def test_a_claim_that_exists_is_used_in_a_folder_of_the_run() -> None:
    objects = rendered(cluster_run(storage={"claimName": "shared"}))
    assert "PersistentVolumeClaim/run" not in objects
    for key in PODS:
        spec = pod_spec(objects[key])
        assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
        assert all(c["volumeMounts"][0]["subPath"] == "math" for c in spec["containers"])


def test_roles_read_the_run_as_it_was_accepted() -> None:
    run = cluster_run(seed=3)
    data = rendered(run)["ConfigMap/run"]["data"]
    assert list(data) == ["run.yaml"]
    read = parse_run(data["run.yaml"], "run.yaml")
    assert read == run
    assert "temperature" in data["run.yaml"]


def test_labels_and_annotations_of_the_run_do_not_change_what_roles_read() -> None:
    assert (
        rendered(cluster_run(labels={"team": "a"}))["ConfigMap/run"]
        == rendered(cluster_run())["ConfigMap/run"]
    )


def test_the_token_is_apart() -> None:
    made = secret(cluster_run(), UID, "hush")
    assert base64.b64decode(made["data"]["token"]) == b"hush"
    assert made["metadata"]["name"] == "math-token"
    assert made["metadata"]["ownerReferences"][0]["uid"] == UID
    assert "hush" not in json.dumps(rendered(cluster_run()))


# --- pods ----------------------------------------------------------------------------------------------------


def every_container(objects: dict[str, Object]) -> Iterator[tuple[Object, Object]]:
    for key in PODS:
        for each in pod_spec(objects[key])["containers"]:
            yield pod_spec(objects[key]), each


def test_every_pod_meets_the_restricted_standard() -> None:
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


def test_every_mount_has_its_volume_and_containers_share_no_temporary_folder() -> None:
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


def test_what_grades_hostile_text_cannot_fill_its_nodes_disk() -> None:
    pod = rendered(cluster_run())["Deployment/generator"]["spec"]["template"]["spec"]
    actor = container(rendered(cluster_run())["Deployment/generator"], "actor")
    (mount,) = (m["name"] for m in actor["volumeMounts"] if m["mountPath"] == "/tmp")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mount]["emptyDir"] == {"sizeLimit": "1Gi"}
    # Compiled kernels, and what a library loads: of no size that would do for every model.
    server = container(rendered(cluster_run())["Deployment/generator"], "server")
    (mount,) = (m["name"] for m in server["volumeMounts"] if m["mountPath"] == "/tmp")
    assert volumes[mount]["emptyDir"] == {}


def test_every_command_and_variable_can_be_expanded_from_those_before_it() -> None:
    run = cluster_run(generator={"extraArgs": ["--x=$(HOME)"]}, trainer={"replicas": 2})
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
    assert expand(server["command"][-1], {}) == "--x=$(HOME)"


def test_a_command_is_the_plans() -> None:
    run = cluster_run()
    objects = rendered(run)
    for workload in plan(run).workloads:
        for each in workload.containers:
            found = next(c for _, c in every_container(objects) if c["name"] == each.name)
            assert tuple(found["command"]) == each.argv


def test_names_of_the_replicas() -> None:
    objects = rendered(cluster_run())
    assert (
        environment(container(objects["StatefulSet/coordinator"], "coordinator"))["SCALERL_NAME"]
        == "coordinator-0"
    )
    assert environment(container(objects["Deployment/generator"], "actor"))["SCALERL_NAME"] == "metadata.name"
    assert environment(container(objects["Job/trainer"], "trainer"))["SCALERL_NAME"] == "trainer-$(RANK)"


def test_only_a_hub_models_preparation_keeps_a_cache_on_the_volume() -> None:
    hub = rendered(cluster_run(model={"hub": {"name": "a/b"}}))
    env = environment(container(hub["Job/prepare"], "prepare"))
    assert env["HF_HOME"] == "/run/scalerl/run/hub"
    assert "HF_HUB_OFFLINE" not in env
    assert "HF_HOME" not in environment(container(hub["Job/trainer"], "trainer"))
    assert "HF_HOME" not in environment(container(rendered(cluster_run())["Job/prepare"], "prepare"))


def test_images_are_the_runs_then_the_operators() -> None:
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


# --- resources -----------------------------------------------------------------------------------------------


def test_devices_are_limited_and_requested_by_their_resources_name() -> None:
    run = cluster_run(
        deviceResource="amd.com/gpu", generator={"devices": 4}, trainer={"devices": 1, "cpuThreads": 6}
    )
    objects = rendered(run)
    assert container(objects["Deployment/generator"], "server")["resources"] == {
        "requests": {"cpu": "1", "memory": "1Gi", "amd.com/gpu": "4"},
        "limits": {"amd.com/gpu": "4"},
    }
    assert container(objects["Job/trainer"], "trainer")["resources"] == {
        "requests": {"cpu": "6", "memory": "1Gi", "amd.com/gpu": "1"},
        "limits": {"amd.com/gpu": "1"},
    }
    for key, name in (("Deployment/generator", "actor"), ("Job/prepare", "prepare")):
        assert "limits" not in container(objects[key], name)["resources"]


def test_threads_are_cores_and_told_to_the_process() -> None:
    objects = rendered(cluster_run(generator={"cpuThreads": 3, "kvCache": "512Mi"}))
    server = container(objects["Deployment/generator"], "server")
    assert server["resources"] == {"requests": {"cpu": "3", "memory": "1536Mi"}}
    assert environment(server)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(container(objects["Job/trainer"], "trainer"))


def test_what_the_user_says_of_resources_wins_on_the_main_container() -> None:
    given = {"requests": {"cpu": "0.5"}, "limits": {"memory": "2048Mi", "rdma/ib": 1}}
    objects = rendered(cluster_run(podTemplate={"resources": given}, trainer={"devices": 1}))
    assert container(objects["Job/trainer"], "trainer")["resources"] == {
        "requests": {"cpu": "500m", "memory": "2Gi", "rdma/ib": "1", "nvidia.com/gpu": "1"},
        "limits": {"memory": "2Gi", "rdma/ib": "1", "nvidia.com/gpu": "1"},
    }
    assert container(objects["Deployment/generator"], "actor")["resources"] == {
        "requests": {"cpu": "250m", "memory": "1280Mi"}
    }
    # The preparation uses no device, so it waits for none.
    assert container(objects["Job/prepare"], "prepare")["resources"] == {
        "requests": {"cpu": "500m", "memory": "2Gi"},
        "limits": {"memory": "2Gi"},
    }


@pytest.mark.parametrize(
    ("given", "back"),
    [
        *[("1000m", "1"), ("0.1", "100m"), ("1e3", "1e3"), ("1E", "1E"), ("1500", "1500"), ("2000", "2k")],
        *[("1024Ki", "1Mi"), ("1.5Gi", "1536Mi"), ("0.5Ki", "512"), ("1.3Ki", "1331200m"), ("0", "0")],
        *[("0Gi", "0"), ("12e6", "12e6"), ("1000000e-3", "1e3"), (".5", "500m")],
        *[("0.1n", "1n"), ("100k", "100k"), ("0.3m", "300u"), ("1000Mi", "1000Mi"), ("1023", "1023")],
    ],
)
def test_quantities_are_written_as_the_api_server_gives_them_back(given: str, back: str) -> None:
    assert canonical(given) == back


@given(st.from_regex(r"([0-9]{1,9}(\.[0-9]{0,3})?)(m|k|M|G|T|Ki|Mi|Gi|Ti|e[0-9])?", fullmatch=True))
def test_the_canonical_form_is_the_same_amount_and_stays(quantity: str) -> None:
    assert value(canonical(quantity)) == value(quantity)
    assert canonical(canonical(quantity)) == canonical(quantity)


@pytest.mark.parametrize("text", ["", "1 Gi", "1gb", "one", "1Gii", "--1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        canonical(text)


# --- podTemplate ---------------------------------------------------------------------------------------------


def test_what_is_for_all_roles_and_what_is_for_one_come_together() -> None:
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
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert environment(container(trainer, "trainer")).items() >= {"A": "all", "B": "trainer"}.items()
    assert environment(container(objects["Job/prepare"], "prepare"))["B"] == "trainer"
    assert pod_spec(generator)["nodeSelector"] == {"pool": "all"}
    assert not {"tolerations", "affinity", "priorityClassName"} & pod_spec(generator).keys()
    for name in ("server", "actor"):
        assert environment(container(generator, name))["B"] == "all"
        assert {"name": "data", "mountPath": "/data"} in container(generator, name)["volumeMounts"]
    metadata = generator["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "x"
    assert metadata["annotations"]["prometheus.io/scrape"] == "no"
    assert "team" not in generator["metadata"]["labels"]


def test_a_users_variable_wins_but_over_where_a_process_stands() -> None:
    env = [
        {"name": "USER", "value": "me"},
        {"name": "HF_HUB_OFFLINE", "value": "0"},
        {"name": "C", "value": "$(USER)"},
    ]
    trainer = container(rendered(cluster_run(podTemplate={"env": env}))["Job/trainer"], "trainer")
    assert [entry for entry in trainer["env"] if entry["name"] in ("USER", "HF_HUB_OFFLINE", "C")] == env


# --- workloads -----------------------------------------------------------------------------------------------


def test_the_trainer_is_a_gang_that_ends_as_one() -> None:
    job = rendered(cluster_run(trainer={"replicas": 3}), Desired(trainer_attempt=7))["Job/trainer"]
    assert job["metadata"]["name"] == "math-trainer-7"
    assert job["metadata"]["labels"][names.ATTEMPT] == "7"
    spec = {name: field for name, field in job["spec"].items() if name != "template"}
    assert spec == {
        "completionMode": "Indexed",
        "completions": 3,
        "parallelism": 3,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
            ]
        },
    }
    assert pod_spec(job)["restartPolicy"] == "Never"
    assert pod_spec(job)["subdomain"] == "math-trainer"
    env = environment(container(job, "trainer"))
    assert env["RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["WORLD_SIZE"] == "3"
    assert env["MASTER_ADDR"] == "math-trainer-7-0.math-trainer.ml.svc"
    assert env["SCALERL_TRAINER_HOST"] == "$(SCALERL_ADDRESS)"


@pytest.mark.parametrize(
    ("devices", "queue", "surge", "unavailable"),
    [(0, {}, 1, 0), (1, {}, 0, 1), (0, {names.QUEUE: "q"}, 0, 1)],
)
def test_a_new_generator_comes_first_where_there_is_room(
    devices: int, queue: dict[str, str], surge: int, unavailable: int
) -> None:
    run = cluster_run(labels=queue, generator={"devices": devices})
    deployment = rendered(run, Desired(generators=3))["Deployment/generator"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": surge,
        "maxUnavailable": unavailable,
    }


def test_selectors_find_the_pods_and_no_others() -> None:
    objects = rendered(cluster_run())
    templates = {key: objects[key]["spec"]["template"]["metadata"]["labels"] for key in PODS}
    selectors: dict[str, dict[str, str]] = {
        "StatefulSet/coordinator": objects["StatefulSet/coordinator"]["spec"]["selector"]["matchLabels"],
        "Deployment/generator": objects["Deployment/generator"]["spec"]["selector"]["matchLabels"],
        "PodDisruptionBudget/generator": objects["PodDisruptionBudget/generator"]["spec"]["selector"][
            "matchLabels"
        ],
        "Service/coordinator": objects["Service/coordinator"]["spec"]["selector"],
        "Service/trainer": objects["Service/trainer"]["spec"]["selector"],
    }
    for key, selector in selectors.items():
        found = [name for name, labels in templates.items() if selector.items() <= labels.items()]
        assert [name.split("/")[1] for name in found] == [key.split("/")[1]]
    everyone = objects["NetworkPolicy/run"]["spec"]["podSelector"]["matchLabels"]
    assert all(everyone.items() <= labels.items() for labels in templates.values())


def test_kueues_queue_goes_on_to_what_it_queues_and_jobs_never_say_suspend() -> None:
    label = "kueue.x-k8s.io/queue-name"
    objects = rendered(cluster_run(labels={label: "team", "other": "x"}))
    with_queue = {key for key, obj in objects.items() if obj["metadata"]["labels"].get(label) == "team"}
    assert with_queue == set(PODS)
    assert all("other" not in obj["metadata"]["labels"] for obj in objects.values())
    assert all("suspend" not in objects[key]["spec"] for key in PODS)


def test_who_gets_in() -> None:
    policy = rendered(cluster_run())["NetworkPolicy/run"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    own, operator, prometheus = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {names.RUN_UID: UID}}}]}
    assert operator["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "scalerl-system"
    }
    assert [port["port"] for port in operator["ports"]] == [8080]
    assert prometheus["from"][0]["namespaceSelector"]["matchLabels"] == {"scalerl.dev/scrape": "true"}
    assert [port["port"] for port in prometheus["ports"]] == [8080, 8081]


def test_a_drain_always_goes_on() -> None:
    objects = rendered(cluster_run())
    budgets = [obj for obj in objects.values() if obj["kind"] == "PodDisruptionBudget"]
    assert [b["spec"]["maxUnavailable"] for b in budgets] == ["25%"]  # rounded up
    assert budgets[0]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_metrics_are_where_the_annotations_say() -> None:
    objects = rendered(cluster_run())
    for key in PODS[1:]:
        annotations = objects[key]["spec"]["template"]["metadata"]["annotations"]
        ports = (
            [p["containerPort"] for c in pod_spec(objects[key])["containers"] for p in c["ports"]]
            if key != "Deployment/generator"
            else [8081]
        )
        assert annotations["prometheus.io/scrape"] == "true"
        assert int(annotations["prometheus.io/port"]) in ports
    assert "ports" not in container(objects["Deployment/generator"], "server")


# --- what rolls pods -----------------------------------------------------------------------------------------


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
        ({"generator": {"maxRestarts": 5}}, set()),
        ({"coordinator": {"maxRestarts": 5}}, set()),
        ({"trainer": {"maxRestarts": 5}}, set()),
        ({"budget": {"maxSteps": 99}}, {Role.COORDINATOR}),
        ({"trainer": {"podTemplate": {"labels": {"a": "b"}}}}, {Role.TRAINER}),
        ({"generator": {"podTemplate": {"shmSize": "2Gi"}}}, {Role.GENERATOR}),
        ({"images": {"trainer": "x"}}, {Role.TRAINER}),
        ({"podTemplate": {"labels": {"a": "b"}}}, set(Role) - {Role.PREPARE, Role.FORECASTER}),
        ({"trainer": {"replicas": 2}}, set(Role) - {Role.PREPARE, Role.FORECASTER}),
        ({"seed": 9}, set(Role) - {Role.PREPARE, Role.FORECASTER}),
        ({"trainer": {}, "generator": {"replicas": 1}}, set()),
    ],
)
def test_a_change_rolls_the_pods_that_read_it(change: dict[str, Any], rolled: set[Role]) -> None:
    before, after = hashes(), hashes(**change)
    assert {role for role in before if before[role] != after[role]} == rolled


def test_pods_and_jobs_say_for_which_spec_they_were_made() -> None:
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


def test_another_release_of_the_operator_makes_no_new_hash() -> None:
    run = cluster_run()
    old = {o["kind"]: o for o in render(run, UID, RUNNING, IMAGES, operator_namespace="a")}
    new = {
        o["kind"]: o for o in render(run, UID, RUNNING, Images("t:2", "g:2", "c:2"), operator_namespace="a")
    }
    assert (
        old["Job"]["metadata"]["annotations"][names.SPEC_HASH]
        == new["Job"]["metadata"]["annotations"][names.SPEC_HASH]
    )
    assert (
        old["Job"]["metadata"]["annotations"][names.RENDERED_HASH]
        != new["Job"]["metadata"]["annotations"][names.RENDERED_HASH]
    )


# --- probes --------------------------------------------------------------------------------------------------


def test_probes_are_asked_less_often_than_on_one_machine_and_give_up_after_the_same_time() -> None:
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
        thread.join(5)


def test_a_port_on_loopback_is_asked_from_inside(server: int) -> None:
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


@pytest.mark.parametrize("claim", [None, "shared"])
def test_all_names_are_known_before_anything_is_made(claim: str | None) -> None:
    run = cluster_run(storage={"claimName": claim} if claim else {})
    objects = [*rendered(run).values(), secret(run, UID, "")]
    named = sorted((obj["kind"], obj["metadata"]["name"]) for obj in objects)
    assert sorted(names_of(run)) == named


def test_what_decides_whether_pods_are_taken_is_not_what_they_train() -> None:
    same = raw_hash(cluster_run("a", budget={"maxSteps": 3}))
    assert raw_hash(cluster_run("b", budget={"maxSteps": 4})) == same
    others = [
        {"podTemplate": {"nodeSelector": {"a": "b"}}},
        {"trainer": {"podTemplate": {"labels": {"a": "b"}}}},
        {"deviceResource": "amd.com/gpu"},
        {"images": {"trainer": "mine:1"}},
    ]
    hashes = [raw_hash(cluster_run("a", budget={"maxSteps": 3}, **spec)) for spec in others]
    assert len({same, *hashes}) == 5


def test_everything_of_the_tiny_examples_is_there() -> None:
    for path in ("tiny", "tiny-autostop"):
        here, cluster = example(f"{path}/run.yaml").spec, example(f"{path}/run-kubernetes.yaml").spec
        assert cluster.task.jsonl
        assert here.task.jsonl
        same = {"task": {"jsonl"}, "budget": {"max_seconds"}, "storage": True, "pod_template": True}
        assert here.model_dump(exclude=same) == cluster.model_dump(exclude=same)
        objects = rendered(example(f"{path}/run-kubernetes.yaml"), EVERYTHING)
        for _, each in every_container(objects):
            assert cluster.task.jsonl.path.startswith(each["volumeMounts"][-1]["mountPath"] + "/")


def test_what_says_where_a_process_stands_cannot_be_given_by_a_user() -> None:
    """What the operator sets over a user's word, and what the definition refuses, are the same names."""
    objects = rendered(cluster_run(podTemplate={"env": [{"name": "ZZZ", "value": "theirs"}]}))
    for _, each in every_container(objects):
        names = [entry["name"] for entry in each["env"]]
        fixed = names[: next(i for i, name in enumerate(names) if name == "HOME")]
        assert fixed
        for name in fixed:
            with pytest.raises(ValueError, match="the operator"):
                cluster_run(podTemplate={"env": [{"name": name, "value": "x"}]})
