"""The chart on a real API server: taken as it is, admitted where pods are restricted, upgraded with runs alive."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from charts import NAMESPACE, RELEASE, VALUES, HelmError, Object, render
from live_operator import until
from queries import CHART, ROOT
from releases import CRD, Helm, chart_before, older_chart
from schemas import write_schemas

if TYPE_CHECKING:
    from testcluster import Cluster

pytestmark = pytest.mark.cluster
RUN: Object = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
RUNS = "scalerlruns.scalerl.dev"
OF_THE_PROMETHEUS_OPERATOR = "monitoring.coreos.com"


def rendered(helm: str, name: str) -> list[Object]:
    """What an API server without the Prometheus operator knows; all of it in a namespace."""
    return [
        obj
        for obj in render(helm, "--values", str(VALUES[name]))
        if not obj["apiVersion"].startswith(OF_THE_PROMETHEUS_OPERATOR)
    ]


@pytest.fixture
def namespace(control_plane: Cluster, request: pytest.FixtureRequest) -> str:
    """A new one, which only takes restricted pods."""
    name = f"chart-{request.node.name.split('[')[0].removeprefix('test_').replace('_', '-')[:50].rstrip('-')}"
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    )
    return name


@pytest.fixture
def release(helm: str, control_plane: Cluster, namespace: str) -> Iterator[Helm]:
    """helm in that namespace. What it installs is removed again, with the CRD."""
    made = Helm(helm, control_plane.env, namespace)
    yield made
    for name in json.loads(made("list", "--all", "--output", "json")):
        made("uninstall", name["name"])
    control_plane.kubectl("delete", "crd", RUNS, "--ignore-not-found", "--wait=true")


@pytest.mark.parametrize("name", VALUES)
def test_api_server_accepts_every_object_unchanged(control_plane, helm, name):
    objects = rendered(helm, name)
    namespaces = {obj["metadata"]["namespace"] for obj in objects if "namespace" in obj["metadata"]}
    for wanted in namespaces:
        control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": wanted}})
    control_plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )  # fmt: skip


def test_prometheus_operator_understands_what_is_for_it(control_plane, helm, prometheus_operator_crds):
    objects = [
        obj
        for obj in render(helm, "--values", str(VALUES["everything"]))
        if obj["apiVersion"].startswith(OF_THE_PROMETHEUS_OPERATOR)
    ]
    assert len(objects) == 3
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    files = [word for path in prometheus_operator_crds for word in ("-f", str(path))]
    control_plane.kubectl("apply", "--server-side", *files)
    control_plane.once_served(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_kubeconform_finds_nothing_unknown(control_plane, helm, kubeconform, name, tmp_path):
    write_schemas(json.loads(control_plane.kubectl("get", "--raw", "/openapi/v2")), tmp_path)
    manifest = yaml.safe_dump_all(rendered(helm, name))
    command = [
        *(kubeconform, "-strict", "-summary", "-output", "json"),
        *("-schema-location", str(tmp_path / "{{.ResourceKind}}{{.KindSuffix}}.json"), "-"),
    ]
    done = subprocess.run(command, input=manifest, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["summary"]["valid"] == len(rendered(helm, name))
    wrong = manifest.replace("serviceAccountName:", "serviceAccountNam:")
    done = subprocess.run(command, input=wrong, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0


def test_pods_are_admitted_under_restricted_pod_security(control_plane, release):
    notes = release("install", RELEASE, str(CHART), "--wait", "--timeout", "600s")
    assert "manages the runs in all namespaces" in notes
    assert f"helm -n {release.namespace} test {RELEASE}" in notes
    pods = control_plane.get("pods", "-n", release.namespace, "-l", "app.kubernetes.io/component=operator")
    assert len(pods["items"]) == 2
    for test in (obj for obj in render(release.program) if obj["kind"] == "Pod"):
        test["metadata"]["namespace"] = release.namespace
        control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(test))


def test_operator_has_no_permission_beyond_its_role(control_plane, release):
    release("install", RELEASE, str(CHART))
    account = f"system:serviceaccount:{release.namespace}:{RELEASE}"

    def may(verb: str, *what: str) -> bool:
        words = ["auth", "can-i", verb, *what, f"--as={account}"]
        done = subprocess.run(
            [str(control_plane.kubectl_program), *words], capture_output=True, text=True, timeout=200, env=control_plane.env
        )  # fmt: skip
        return done.stdout.strip() == "yes"

    for verb, what in (
        ("get", "secrets"),
        ("create", "jobs.batch"),
        ("patch", f"{RUNS}/status"),
        ("watch", "pods"),
        ("get", "storageclasses.storage.k8s.io"),
    ):
        group, _, sub = what.partition("/")
        deadline = time.monotonic() + 120
        # The authorizer and kubectl's discovery learn of the role and of the CRD a moment after they are made.
        while not may(verb, group, *([f"--subresource={sub}"] if sub else []), "-n", "default"):
            assert time.monotonic() < deadline, (verb, what)
            time.sleep(0.5)
    for verb, what in (
        ("list", "secrets"), ("watch", "secrets"), ("delete", "secrets"), ("create", "pods"),
        ("delete", "persistentvolumeclaims"), ("delete", "configmaps"), ("get", "pods"), ("create", RUNS), ("get", "nodes"), ("list", "namespaces"),
        ("create", "serviceaccounts"), ("create", "rolebindings.rbac.authorization.k8s.io"), ("escalate", "roles"),
    ):  # fmt: skip
        assert not may(verb, what, "-n", "default"), (verb, what)
    assert not may("get", "leases.coordination.k8s.io/another", "-n", release.namespace)
    lease = f"leases.coordination.k8s.io/{RELEASE}-leader"
    until(lambda: may("update", lease, "-n", release.namespace), 120, lambda: f"update {lease}")
    assert not may("get", f"leases.coordination.k8s.io/{RELEASE}-leader", "-n", "default")


def before_ttl(schema: dict[str, Any]) -> None:
    """An earlier schema, which knew of no TTL and of no decision in the status."""
    del schema["properties"]["spec"]["properties"]["ttlSecondsAfterFinished"]
    del schema["properties"]["status"]["properties"]["decision"]


def live(cluster: Cluster, namespace: str) -> Object:
    return cluster.get(RUNS, RUN["metadata"]["name"], "-n", namespace)


def keeps_ttl(cluster: Cluster, namespace: str) -> bool:
    """Whether the newer schema is served, which is a moment after it is written."""
    return with_ttl(cluster, namespace)["spec"].get("ttlSecondsAfterFinished") == 60


def with_ttl(cluster: Cluster, namespace: str) -> Object:
    """The run after an attempt to give it a field that only the newer schema has."""
    patch = json.dumps({"spec": {"ttlSecondsAfterFinished": 60}})
    cluster.kubectl("patch", RUNS, RUN["metadata"]["name"], "-n", namespace, "--type=merge", "-p", patch)
    return live(cluster, namespace)


def test_upgrade_and_rollback_with_live_runs(control_plane, release, tmp_path):
    older, here = older_chart(tmp_path, before_ttl), release.namespace
    release("install", RELEASE, str(older))
    control_plane.apply(RUN, namespace=here)
    first = live(control_plane, here)
    assert "ttlSecondsAfterFinished" not in with_ttl(control_plane, here)["spec"]

    release("upgrade", RELEASE, str(CHART))
    upgraded = live(control_plane, here)
    # The same run, untouched: nothing that was served is gone, nothing was rewritten.
    assert (upgraded["metadata"]["uid"], upgraded["metadata"]["generation"]) == (
        first["metadata"]["uid"],
        first["metadata"]["generation"],
    )
    assert first["spec"].items() <= upgraded["spec"].items()
    until(lambda: keeps_ttl(control_plane, here), 120, lambda: str(live(control_plane, here)["spec"]))

    release("rollback", RELEASE, "1")
    back = live(control_plane, here)
    assert back["metadata"]["uid"] == first["metadata"]["uid"]
    until(
        lambda: "ttlSecondsAfterFinished" not in live(control_plane, here)["spec"],
        120,
        lambda: str(back["spec"]),
    )


def test_documented_upgrade_keeps_values_and_adds_defaults(control_plane, release, tmp_path):
    page = (ROOT / "docs" / "operations.md").read_text()
    (flags,) = re.findall(r"^helm upgrade scalerl charts/scalerl -n scalerl-system (.*)$", page, re.M)[1:2]
    release(
        "install", RELEASE, str(chart_before(tmp_path, "curvefit.metricsPort", "9999")), "--set", "replicas=3"
    )

    def ports() -> set[int]:
        (service,) = control_plane.get("services", "-n", release.namespace)["items"]
        return {port["port"] for port in service["spec"]["ports"]}

    assert ports() == {8080, 9999}
    with pytest.raises(HelmError, match="metricsPort"):
        release("upgrade", RELEASE, str(CHART), "--reuse-values")
    release("upgrade", RELEASE, str(CHART), *flags.split())
    assert ports() == {8080, 8091}
    assert control_plane.get("deployment", RELEASE, "-n", release.namespace)["spec"]["replicas"] == 3


def test_runs_survive_uninstall_and_reinstall(control_plane, release, tmp_path):
    here = release.namespace
    release("install", RELEASE, str(older_chart(tmp_path, before_ttl)))
    control_plane.apply(RUN, namespace=here)
    uid = live(control_plane, here)["metadata"]["uid"]
    release("uninstall", RELEASE)
    assert live(control_plane, here)["metadata"]["uid"] == uid
    release("install", RELEASE, str(CHART))
    assert live(control_plane, here)["metadata"]["uid"] == uid
    until(lambda: keeps_ttl(control_plane, here), 120, lambda: str(live(control_plane, here)["spec"]))


def test_foreign_crd_is_unchanged_until_ownership_is_transferred(control_plane, release):
    control_plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / CRD))
    with pytest.raises(HelmError, match="exists and cannot be imported"):
        release("install", RELEASE, str(CHART))
    release("install", RELEASE, str(CHART), "--set", "crds.enabled=false")
    release("upgrade", RELEASE, str(CHART), "--set", "crds.enabled=true", "--take-ownership")
    crd = control_plane.get("crd", RUNS)
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-name"] == RELEASE
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_namespace_editors_may_edit_runs(control_plane, release):
    release("install", RELEASE, str(CHART))
    control_plane.kubectl(
        "create", "rolebinding", "editors", "--clusterrole=edit", "--user=ada", "-n", release.namespace
    )
    control_plane.kubectl(
        "create", "rolebinding", "viewers", "--clusterrole=view", "--user=bob", "-n", release.namespace
    )

    def may(user: str, verb: str, *more: str) -> bool:
        words = ["auth", "can-i", verb, RUNS, *more, "-n", release.namespace, f"--as={user}"]
        done = subprocess.run(
            [str(control_plane.kubectl_program), *words], capture_output=True, text=True, timeout=200, env=control_plane.env
        )  # fmt: skip
        return done.stdout.strip() == "yes"

    # Aggregation is a controller's work, and takes a moment.
    until(lambda: may("ada", "create") and may("bob", "list"), 120, lambda: "create by ada, list by bob")
    assert may("ada", "patch", "--subresource=scale")
    assert not may("ada", "patch", "--subresource=status")
    assert not may("bob", "create")
    assert not may("eve", "list")


def test_documented_commands_work(control_plane, release):
    page = (ROOT / "docs" / "operations.md").read_text()
    assert "helm install scalerl charts/scalerl" in page
    release("install", RELEASE, str(CHART), "--set", "images.registry=registry.example.com/team")
    assert Path(CHART).name == "scalerl"
    control_plane.apply(RUN, namespace=release.namespace)
    name = RUN["metadata"]["name"]
    control_plane.kubectl("scale", "scalerlrun", name, "--replicas", "3", "-n", release.namespace)
    assert live(control_plane, release.namespace)["spec"]["generator"]["replicas"] == 3
    suspend = '{"spec":{"suspend":true}}'
    control_plane.kubectl(
        "patch", "scalerlrun", name, "--type", "merge", "-p", suspend, "-n", release.namespace
    )
    assert "suspend" in control_plane.once_served("explain", "scalerlrun.spec", "--recursive")
