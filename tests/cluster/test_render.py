"""What a real API server makes of rendered objects: it takes them all, and gives them back as they were rendered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from stage import serve_runs
from testcluster.handle import Cluster, KubectlError

from scalerl_api.load import run_from_object
from scalerl_api.spec import ScaleRLRun
from scalerl_lifecycle.lifecycle_types import Wanted
from scalerl_operator import names
from scalerl_operator.kube.objects import content_hash
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests import render, secret
from scalerl_operator.manifests.scope import Desired, Images, Scope
from scalerl_operator.names import FIELD_OWNER

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
IMAGES = Images("registry.local/trainer:1", "registry.local/generator:1", "registry.local/operator:1")
EVERYTHING = Desired(Wanted(prepare=True, coordinator=True, generators=True, trainer=3))
CONTROLLERS_SECONDS = 180.0

TINY: Object = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())

# All that a podTemplate has, written as no API server writes it.
TEMPLATED: Object = {
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 1,
                    "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}},
                }
            ]
        }
    },
    "env": [
        {"name": "EMPTY", "value": ""},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}}},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1000m"}}},
    ],
    "volumes": [
        {"name": "scratch", "emptyDir": {"sizeLimit": "2048Mi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": False}},
    ],
    "volumeMounts": [
        {"name": "scratch", "mountPath": "/scratch", "readOnly": False},
        {"name": "data", "mountPath": "/data", "subPath": ""},
    ],
    "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}, "limits": {"cpu": "2000m", "rdma/ib": 1}},
    "labels": {"team": "a"},
    "annotations": {"note": "x"},
    "imagePullSecrets": [{"name": "registry"}],
    "shmSize": "2048Mi",
}  # fmt: skip

PLACED: Object = {
    "schedulerName": "kai-scheduler",
    "serviceAccountName": "reader",
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "resourceClaims": [
        {"name": "gpus", "resourceClaimTemplateName": "eight"},
        {"name": "nics", "resourceClaimName": "shared"},
    ],
    "envFrom": [{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "c", "optional": True}, "prefix": "A_"}],
    "volumes": [{"name": "data", "emptyDir": {}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "initContainers": [
        {
            "name": "fetch",
            "image": "fetcher:1",
            "args": ["s3://bucket"],
            "env": [{"name": "A", "value": ""}],
            "envFrom": [{"secretRef": {"name": "hub"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "resources": {"limits": {"memory": "1Gi"}},
        }
    ],
    "labels": {"pod-group.scheduling.sigs.k8s.io": "g", "kai.scheduler/queue": "team"},
    "annotations": {"scheduling.k8s.io/group-name": "g", "kueue.x-k8s.io/podset-required-topology": "rack"},
}  # fmt: skip

RUNS: dict[str, Callable[[Object], Object]] = {
    "tiny": lambda run: run,
    "devices": lambda run: with_spec(run, generator={"devices": 4, "replicas": 2}, trainer={"devices": 1, "replicas": 8}),
    "nodes": lambda run: with_spec(run, generator={"devices": 4}, trainer={"devices": 8, "replicas": 2}),
    "pod-template": lambda run: with_spec(run, podTemplate=TEMPLATED),
    "placed": lambda run: with_spec(run, podTemplate=PLACED, generator={"devices": 1}, trainer={"devices": 2}),
    "claim": lambda run: with_spec(run, storage={"claimName": "shared"}),
    "long-name": lambda run: {**run, "metadata": {"name": "0" + "long-name" * 10 + ".9"}},
    "queue": lambda run: {**run, "metadata": {"name": "queue", "labels": {names.QUEUE: "team"}}},
}  # fmt: skip


def with_spec(run: Object, **spec: Any) -> Object:
    return {**run, "spec": {**run["spec"], **spec}}


@dataclass
class Namespace:
    """Where a test's objects are; pods that do not meet the restricted standard are refused there."""

    cluster: Cluster
    name: str

    def create(self, run: Object) -> tuple[ScaleRLRun, str]:
        """The run as the server has it, and its uid: what owns nothing that exists is collected."""
        made = json.loads(
            self.cluster.kubectl("create", "-n", self.name, "-o", "json", "-f", "-", stdin=json.dumps(run))
        )
        return run_from_object(made), made["metadata"]["uid"]

    def apply(self, objects: list[Object], *options: str) -> list[Object]:
        """As the operator does; what the server then has."""
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        words = (
            "apply",
            "--server-side",
            "--force-conflicts",
            "--validate=strict",
            f"--field-manager={FIELD_OWNER}",
        )
        answer = json.loads(self.cluster.kubectl(*words, *options, "-o", "json", "-f", "-", stdin=manifest))
        return list(answer["items"]) if answer["kind"] == "List" else [answer]

    def delete(self, run: ScaleRLRun) -> None:
        """The run; what it owns goes with it in its own time."""
        self.cluster.kubectl("delete", "scalerlrun", run.metadata.name, "-n", self.name, "--wait=false")

    def get(self, obj: Object) -> Object:
        return self.cluster.get(obj["kind"], obj["metadata"]["name"], "-n", self.name)


@pytest.fixture(scope="module")
def namespace(control_plane: Cluster) -> Iterator[Namespace]:
    serve_runs(control_plane)
    name = f"render-{time.time_ns():x}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    control_plane.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    control_plane.kubectl("create", "serviceaccount", PLACED["serviceAccountName"], "-n", name)
    yield Namespace(control_plane, name)
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(params=RUNS)
def objects(namespace: Namespace, request: pytest.FixtureRequest) -> Iterator[list[Object]]:
    """All objects of a run that the server has."""
    named = {**TINY, "metadata": {"name": request.param}}
    run, uid = namespace.create(RUNS[request.param](named))
    yield rendered(run, uid)
    namespace.delete(run)


def rendered(run: ScaleRLRun, uid: str) -> list[Object]:
    made = render(Scope(run, uid, IMAGES, "scalerl-system", desired=EVERYTHING))
    return [*made, secret(run, uid, "hush")]


def assert_as_rendered(objects: list[Object], live: list[Object]) -> None:
    assert len(objects) == len(live)
    for wanted, is_now in zip(objects, live, strict=True):
        assert wanted["metadata"]["name"] == is_now["metadata"]["name"]
        hashes = [obj["metadata"].get("annotations", {}).get(names.RENDERED_HASH) for obj in (wanted, is_now)]
        assert hashes[0] == hashes[1]


def test_server_accepts_rendered_objects_unchanged(namespace: Namespace, objects: list[Object]) -> None:
    assert_as_rendered(objects, namespace.apply(objects, "--dry-run=server"))
    assert_as_rendered(objects, namespace.apply(objects))
    pods = wait_for_pods(namespace, objects)
    live = [namespace.get(obj) for obj in objects]
    assert_as_rendered(objects, live)  # after controllers have written to them too
    for was, again in zip(live, namespace.apply(objects), strict=True):
        assert content_hash(was) == content_hash(again), "applying it again changes nothing"
    job = next(obj for obj in objects if obj["metadata"]["labels"].get(names.ATTEMPT))
    ranks = [pod for pod in pods if pod["metadata"]["labels"][names.COMPONENT] == "trainer"]
    hostnames = {pod["spec"]["hostname"] for pod in ranks}
    assert hostnames == {f"{job['metadata']['name']}-{rank}" for rank in range(len(ranks))}
    assert {pod["spec"]["subdomain"] for pod in ranks} <= {obj["metadata"]["name"] for obj in objects}


def wait_for_pods(namespace: Namespace, objects: list[Object]) -> list[Object]:
    """The pods that controllers make of the objects: none is refused, by the restricted standard or else."""
    wanted = sum(
        obj["spec"].get("replicas", obj["spec"].get("parallelism", 0))
        for obj in objects
        if obj["kind"] in ("Job", "Deployment", "StatefulSet")
    )
    uid = objects[0]["metadata"]["labels"][names.RUN_UID]
    until = time.monotonic() + CONTROLLERS_SECONDS
    while True:
        pods = list(
            namespace.cluster.get("pods", "-n", namespace.name, "-l", f"{names.RUN_UID}={uid}")["items"]
        )
        if len(pods) == wanted:
            return pods
        if time.monotonic() > until:
            events = namespace.cluster.kubectl(
                "get", "events", "-n", namespace.name, "--field-selector=type=Warning"
            )
            raise AssertionError(f"{len(pods)} pods, not {wanted}:\n{events}")
        time.sleep(0.5)


def test_apply_restores_and_removes_fields(
    namespace: Namespace,
) -> None:
    run, uid = namespace.create(
        with_spec(RUNS["pod-template"]({**TINY, "metadata": {"name": "changed"}}), generator={"replicas": 1})
    )
    before = next(o for o in rendered(run, uid) if o["kind"] == "Deployment")
    namespace.apply([before])
    change = {"spec": {"template": {"spec": {"containers": [{"name": "server", "image": "other"}]}}}}
    namespace.cluster.kubectl(
        "patch", "-n", namespace.name, "deployment", before["metadata"]["name"], "-p", json.dumps(change)
    )
    [restored] = namespace.apply([before])
    images = {c["image"] for c in restored["spec"]["template"]["spec"]["containers"]}
    assert images == {"registry.local/generator:1"}

    plain = run.model_copy(update={"spec": run.spec.model_copy(update={"pod_template": None})})
    after = next(o for o in rendered(plain, uid) if o["kind"] == "Deployment")
    live = namespace.apply([after])
    assert_as_rendered([after], live)
    spec = live[0]["spec"]["template"]["spec"]
    assert not {"nodeSelector", "tolerations", "affinity", "imagePullSecrets"} & spec.keys()
    assert {volume["name"] for volume in spec["volumes"]} == {
        v["name"] for v in after["spec"]["template"]["spec"]["volumes"]
    }
    namespace.delete(run)


def test_unknown_field_is_an_error(namespace: Namespace) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": namespace.name},
        "dta": {},
    }
    with pytest.raises(KubectlError, match="dta"):
        namespace.apply([claim], "--dry-run=server")
