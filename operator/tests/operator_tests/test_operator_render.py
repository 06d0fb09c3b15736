"""The objects of a run: which exist, their names, and their references to each other."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml

from operator_tests.manifests import (
    IMAGES,
    PODS,
    UID,
    cluster_run,
    container,
    environment,
    pod_spec,
    rendered,
)
from scalerl_api.load import SpecError, accepted_run, load_accepted_run, load_run, parse_run
from scalerl_lifecycle.lifecycle_types import Wanted
from scalerl_operator import names
from scalerl_operator.manifests import render, secret
from scalerl_operator.manifests.scope import Desired, Scope
from scalerl_trainer.launch import rank_environments


@pytest.mark.parametrize(
    ("desired", "more"),
    [
        (Desired(), []),
        (Desired(Wanted(prepare=True)), ["Job/prepare"]),
        (
            Desired(Wanted(coordinator=True)),
            ["Service/coordinator", "Service/trainer", "StatefulSet/coordinator"],
        ),
        (Desired(Wanted(generators=True)), ["PodDisruptionBudget/generator", "Deployment/generator"]),
        (Desired(Wanted(trainer=2)), ["Service/coordinator", "Service/trainer", "Job/trainer"]),
    ],
)
def test_render_returns_the_desired_objects(desired: Desired, more: list[str]) -> None:
    always = ["PersistentVolumeClaim/run", "ConfigMap/run", "NetworkPolicy/run"]
    assert list(rendered(cluster_run(), desired)) == always + more


def test_render_is_pure() -> None:
    run = cluster_run(podTemplate={"env": [{"name": "A", "value": "1"}], "tolerations": [{"key": "a"}]})
    first = rendered(run)
    before = json.dumps(first)
    for obj in first.values():
        if obj["kind"] in ("Job", "Deployment"):
            pod_spec(obj)["tolerations"][0]["key"] = "changed"
            pod_spec(obj)["containers"][0]["env"][-1]["value"] = "changed"
    assert json.dumps(rendered(run)) == before


def test_render_returns_json_that_is_valid_yaml() -> None:
    for obj in rendered(cluster_run()).values():
        assert yaml.safe_load(yaml.safe_dump(obj)) == obj


def test_render_sets_labels_and_owner_except_of_a_retained_claim() -> None:
    for key, obj in rendered(cluster_run()).items():
        metadata = obj["metadata"]
        assert metadata["namespace"] == "ml"
        assert metadata["labels"].items() >= {names.RUN: "math", names.RUN_UID: UID}.items()
        owners = [
            (o["uid"], o["controller"], o["blockOwnerDeletion"]) for o in metadata.get("ownerReferences", [])
        ]
        assert owners == ([] if key == "PersistentVolumeClaim/run" else [(UID, True, True)])


def test_render_refuses_a_run_without_a_namespace() -> None:
    run = cluster_run()
    homeless = run.model_copy(update={"metadata": run.metadata.model_copy(update={"namespace": None})})
    with pytest.raises(ValueError, match="math has no namespace"):
        render(Scope(homeless, UID, IMAGES, "x", desired=Desired()))


def test_render_shortens_a_long_name() -> None:
    for obj in rendered(cluster_run("r" * 253)).values():
        metadata = obj["metadata"]
        assert len(metadata["name"]) <= 63
        assert all(len(label) <= 63 for label in metadata["labels"].values())


def test_claim_has_the_fields_of_the_spec() -> None:
    storage = {
        "size": "2048Gi",
        "storageClassName": "nfs",
        "accessMode": "ReadWriteOnce",
        "onDelete": "Delete",
    }
    claim = rendered(cluster_run(storage=storage))["PersistentVolumeClaim/run"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "2048Gi"}},
        "storageClassName": "nfs",
    }
    assert claim["metadata"]["ownerReferences"]


def test_existing_claim_is_mounted_at_a_folder_of_the_run() -> None:
    objects = rendered(cluster_run(storage={"claimName": "shared"}))
    assert "PersistentVolumeClaim/run" not in objects
    for key in PODS:
        spec = pod_spec(objects[key])
        assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
        assert all(c["volumeMounts"][0]["subPath"] == "math" for c in spec["containers"])


def test_spec_map_holds_the_accepted_run() -> None:
    run = cluster_run(seed=3)
    data = rendered(run)["ConfigMap/run"]["data"]
    assert list(data) == ["run.yaml"]
    read = parse_run(data["run.yaml"], "run.yaml")
    assert read == run
    assert "temperature" in data["run.yaml"]


def test_spec_map_of_a_run_accepted_by_an_earlier_release(tmp_path: Path) -> None:
    obj = cluster_run().to_manifest()
    obj["metadata"]["namespace"] = "ml"
    obj["spec"]["recipe"]["optimizer"]["learningRate"] = "1e5"
    obj["spec"]["generator"]["extraArgs"] = ["--host=0.0.0.0"]
    run = accepted_run(obj)
    file = tmp_path / "run.yaml"
    file.write_text(rendered(run)["ConfigMap/run"]["data"]["run.yaml"])
    with pytest.raises(SpecError):
        load_run(file)
    assert load_accepted_run(file).to_manifest()["spec"] == run.to_manifest()["spec"]


def test_spec_map_leaves_out_labels_and_annotations() -> None:
    assert (
        rendered(cluster_run(labels={"team": "a"}))["ConfigMap/run"]
        == rendered(cluster_run())["ConfigMap/run"]
    )


def test_secret_holds_the_token() -> None:
    made = secret(cluster_run(), UID, "hush")
    assert base64.b64decode(made["data"]["token"]) == b"hush"
    assert made["metadata"]["name"] == "math-token"
    assert made["metadata"]["ownerReferences"][0]["uid"] == UID
    assert "hush" not in json.dumps(rendered(cluster_run()))


def test_trainer_job_fails_as_a_whole() -> None:
    job = rendered(cluster_run(trainer={"replicas": 3}), Desired(Wanted(trainer=7)))["Job/trainer"]
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


def test_trainer_has_a_pod_per_node_with_a_rank_per_device() -> None:
    run = cluster_run(trainer={"replicas": 2, "devices": 4, "cpuThreads": 3})
    job = rendered(run, Desired(Wanted(trainer=7)))["Job/trainer"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    trainer = container(job, "trainer")
    assert trainer["command"][:6] == [
        *("python", "-m", "scalerl_trainer.launch"),
        *("python", "-m", "scalerl_trainer.main"),
    ]
    env = environment(trainer)
    assert env["NODE_RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert (env["LOCAL_WORLD_SIZE"], env["WORLD_SIZE"]) == ("4", "8")
    assert (env["MASTER_ADDR"], env["OMP_NUM_THREADS"]) == ("math-trainer-7-0.math-trainer.ml.svc", "3")
    assert env["SCALERL_NAME"] == "metadata.name"
    assert not {"RANK", "LOCAL_RANK"} & set(env), "the launcher sets them"
    assert "livenessProbe" in trainer


def test_launcher_numbers_ranks_across_pods() -> None:
    """The pods' environments, as the launcher reads them, give each rank of the world once."""
    job = rendered(cluster_run(trainer={"replicas": 3, "devices": 2}))["Job/trainer"]
    env = environment(container(job, "trainer"))
    pods = [env | {"NODE_RANK": str(index)} for index in range(job["spec"]["completions"])]
    ranks = [rank_environments(pod) for pod in pods]
    assert [list(each) for each in ranks] == [[0, 1], [2, 3], [4, 5]]
    assert [r["LOCAL_RANK"] for each in ranks for r in each.values()] == ["0", "1"] * 3
    assert env["WORLD_SIZE"] == "6"


def test_trainer_pod_with_one_rank_is_that_rank() -> None:
    for trainer in ({"replicas": 3}, {"replicas": 3, "devices": 1}):
        found = container(rendered(cluster_run(trainer=trainer))["Job/trainer"], "trainer")
        assert found["command"][:3] == ["python", "-m", "scalerl_trainer.main"]
        assert (environment(found)["LOCAL_RANK"], environment(found)["SCALERL_NAME"]) == (
            "0",
            "trainer-$(RANK)",
        )


@pytest.mark.parametrize(
    ("devices", "queue", "surge", "unavailable"),
    [(0, {}, 1, 0), (1, {}, 0, 1), (0, {names.QUEUE: "q"}, 0, 1)],
)
def test_generator_update_strategy(devices: int, queue: dict[str, str], surge: int, unavailable: int) -> None:
    run = cluster_run(labels=queue, generator={"replicas": 3, "devices": devices})
    deployment = rendered(run, Desired(Wanted(generators=True)))["Deployment/generator"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": surge,
        "maxUnavailable": unavailable,
    }


def test_selectors_match_the_pods_of_their_role() -> None:
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


def test_queue_labels_are_on_workloads() -> None:
    label = "kueue.x-k8s.io/queue-name"
    objects = rendered(cluster_run(labels={label: "team", "other": "x"}))
    with_queue = {key for key, obj in objects.items() if obj["metadata"]["labels"].get(label) == "team"}
    assert with_queue == set(PODS)
    assert all("other" not in obj["metadata"]["labels"] for obj in objects.values())
    assert all("suspend" not in objects[key]["spec"] for key in PODS)


def test_network_policy_ingress() -> None:
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


def test_disruption_budget_never_blocks_a_drain() -> None:
    objects = rendered(cluster_run())
    budgets = [obj for obj in objects.values() if obj["kind"] == "PodDisruptionBudget"]
    assert [b["spec"]["maxUnavailable"] for b in budgets] == ["25%"]  # rounded up
    assert budgets[0]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_scrape_annotations_name_a_port_with_metrics() -> None:
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
