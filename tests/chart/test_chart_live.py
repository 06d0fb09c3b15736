"""The operator at work with the role that the chart gives it, and no other."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from charts import NAMESPACE, RELEASE, Object, render
from live_operator import LiveOperator, as_account, operator, until
from queries import CHART, ROOT
from releases import Helm
from roles import ELSEWHERE, NEEDED
from testcluster import KubectlError

if TYPE_CHECKING:
    from testcluster import Cluster

pytestmark = pytest.mark.cluster
RUNS = "scalerlruns.scalerl.dev"
RUN: Object = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
NAME = RUN["metadata"]["name"]
VALUES = {
    "cluster-wide": [],
    "namespaced": ["--set", "watchNamespaces={research}", "--set", "rbac.aggregateToUsers=false"],
}
RUNS_IN = {"cluster-wide": ["-A"], "namespaced": ["-n", "research"]}


@pytest.fixture(params=VALUES)
def live(
    request: pytest.FixtureRequest, helm: str, control_plane: Cluster, tmp_path: Path
) -> Iterator[LiveOperator]:
    """The chart, installed; its operator, here."""
    values = VALUES[request.param]
    for name in (NAMESPACE, "research"):
        control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    release = Helm(helm, control_plane.env, NAMESPACE)
    # No replica of its own: its pods run nothing here.
    release("install", RELEASE, str(CHART), "--set", "replicas=0", *values)
    (deployment,) = (obj for obj in render(helm, *values) if obj["kind"] == "Deployment")
    kubeconfig = as_account(control_plane, NAMESPACE, RELEASE, tmp_path, *RUNS_IN[request.param])
    try:
        with operator(deployment, kubeconfig, NAMESPACE, tmp_path / "log", SCALERL_SIDECAR_URL="") as made:
            yield made
    finally:
        release("uninstall", RELEASE)
        control_plane.kubectl("delete", "namespace", "research", "--wait=false")
        control_plane.kubectl("delete", "crd", RUNS, "--timeout=500s")
        control_plane.kubectl("delete", "namespace", "research", "--ignore-not-found", "--timeout=500s")


def succeed(cluster: Cluster, selector: str, namespace: str) -> bool:
    """Play the kubelet: the pods of a Job have ended well."""
    pods = cluster.get("pods", "-n", namespace, "-l", selector)["items"]
    for pod in pods:
        with contextlib.suppress(KubectlError):  # it may be gone already
            cluster.kubectl(
                "patch", "pod", pod["metadata"]["name"], "-n", namespace, "--subresource=status", "--type=merge",
                "-p", json.dumps({"status": {"phase": "Succeeded"}}),
            )  # fmt: skip
    return bool(pods)


def there(cluster: Cluster, namespace: str) -> set[str]:
    """Kinds of the objects that the run has."""
    kinds = "configmaps,secrets,services,persistentvolumeclaims,jobs,statefulsets,deployments,networkpolicies,poddisruptionbudgets"
    found = cluster.get(kinds, "-n", namespace, "-l", f"scalerl.dev/run={NAME}")["items"]
    return {obj["kind"] for obj in found} | {obj["metadata"]["name"] for obj in found}


def test_chart_permissions_suffice_for_a_whole_run(control_plane, live):
    here = "research"
    control_plane.kubectl(
        "create", "configmap", "tiny-addition-data", "-n", here,
        f"--from-file={ROOT / 'examples/tiny/data.jsonl'}",
    )  # fmt: skip
    storage = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "chart-live"}}
    control_plane.apply(storage | {"provisioner": "kubernetes.io/no-provisioner"})
    run = copy.deepcopy(RUN)
    run["spec"]["storage"]["storageClassName"] = "chart-live"
    control_plane.apply(run, namespace=here)
    state = lambda: f"{there(control_plane, here)}\n{live.tail()}"  # noqa: E731
    until(lambda: succeed(control_plane, "app.kubernetes.io/component=prepare", here), 120, state)
    wanted = {
        "ConfigMap",
        "Secret",
        "Service",
        "PersistentVolumeClaim",
        "StatefulSet",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        f"{NAME}-trainer-1",
    }
    until(lambda: wanted <= there(control_plane, here), 120, state)

    control_plane.kubectl("scale", RUNS, NAME, "--replicas=3", "-n", here)
    generators = f"{NAME}-generator"
    until(
        lambda: control_plane.get("deployment", generators, "-n", here)["spec"]["replicas"] == 3, 120, state
    )
    # Somebody's hand is undone by what the watch brings, before the comparison after two minutes.
    control_plane.kubectl("scale", "deployment", generators, "--replicas=1", "-n", here)
    until(lambda: control_plane.get("deployment", generators, "-n", here)["spec"]["replicas"] == 3, 90, state)
    events = control_plane.get("events", "-n", here)["items"]
    assert NAME in {event["involvedObject"]["name"] for event in events}
    # What somebody has changed is set back, of each kind; at the second time the event is there already.
    changed = "app.kubernetes.io/managed-by=somebody"
    kinds = "services,networkpolicies,poddisruptionbudgets,statefulsets,persistentvolumeclaims"
    for _ in range(2):
        control_plane.kubectl(
            "label", kinds, "-n", here, "-l", f"scalerl.dev/run={NAME}", changed, "--overwrite"
        )
        until(lambda: not control_plane.get(kinds, "-n", here, "-l", changed)["items"], 90, state)
    control_plane.kubectl("label", "job", f"{NAME}-trainer-1", "-n", here, "scalerl.dev/run-")
    until(lambda: f"{NAME}-trainer-1" in there(control_plane, here), 120, state)
    assert live.refused() == []

    suspend = json.dumps({"spec": {"suspend": True}})
    control_plane.kubectl("patch", RUNS, NAME, "-n", here, "--type=merge", "-p", suspend)
    at_work = {"Service", "StatefulSet", "Deployment", "Job", "PodDisruptionBudget"}

    def is_suspended() -> bool:
        # The test drains no run whose trainer runs nothing: what its pods would do, they have done.
        succeed(control_plane, "app.kubernetes.io/component=trainer", here)
        return not at_work & there(control_plane, here)

    until(is_suspended, 120, state)
    assert {"ConfigMap", "Secret", "PersistentVolumeClaim", "NetworkPolicy"} <= there(control_plane, here)

    control_plane.kubectl("delete", RUNS, NAME, "-n", here, "--wait=false")

    until(lambda: not control_plane.get(RUNS, "-n", here)["items"], 120, state)
    until(lambda: not there(control_plane, here), 120, state)
    assert live.refused() == []
    needed = {(verb, kind) for kind, verbs in NEEDED.items() for verb in verbs}
    assert needed - ELSEWHERE <= live.used() <= needed
    assert "Traceback" not in live.tail()


def test_operator_starts_without_a_deleted_namespace_and_takes_it_up_again(helm, control_plane, tmp_path):
    for name in (NAMESPACE, "research", "gone"):
        control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    values = ["--set", "watchNamespaces={research,gone}", "--set", "rbac.aggregateToUsers=false"]
    release = Helm(helm, control_plane.env, NAMESPACE)
    release("install", RELEASE, str(CHART), "--set", "replicas=0", *values)
    (deployment,) = (obj for obj in render(helm, *values) if obj["kind"] == "Deployment")
    kubeconfig = as_account(control_plane, NAMESPACE, RELEASE, tmp_path, "-n", "research")
    control_plane.kubectl("delete", "namespace", "gone", "--timeout=180s")
    try:
        with operator(deployment, kubeconfig, NAMESPACE, tmp_path / "log", SCALERL_SIDECAR_URL="") as live:
            assert "gone was deleted, or lacks the chart's Role" in live.log.read_text()
            assert live.refused()
            control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gone"}})
            release("upgrade", RELEASE, str(CHART), "--set", "replicas=0", *values)
            control_plane.apply(RUN, namespace="gone")
            until(lambda: there(control_plane, "gone"), 180, live.tail)
            control_plane.kubectl("delete", RUNS, NAME, "-n", "gone", "--wait=false")
            until(lambda: not control_plane.get(RUNS, "-n", "gone")["items"], 120, live.tail)
    finally:
        release("uninstall", RELEASE)
        control_plane.kubectl("delete", "crd", RUNS, "--timeout=180s")
        control_plane.kubectl(
            "delete", "namespace", "research", "gone", "--ignore-not-found", "--timeout=180s"
        )
