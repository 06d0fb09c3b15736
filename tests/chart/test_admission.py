"""The admission kit on a real API server: what it refuses in each place of a run, and what it takes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from charts import NAMESPACE, RELEASE, Object, render
from live_operator import until
from queries import ROOT
from test_chart_values import merged
from testcluster import KubectlError

from scalerl_operator.names import PRIORITY

if TYPE_CHECKING:
    from testcluster import Cluster

pytestmark = pytest.mark.cluster
RUN: Object = yaml.safe_load((ROOT / "examples/tiny/run-kubernetes.yaml").read_text())
TENANT, OTHER = "admission-tenant", "admission-other"
VALUES = {
    "enabled": True,
    "namespaces": [TENANT],
    "images": ["registry.example.com/team/"],
    "volumeKinds": ["configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"],
    "secrets": ["hub"],
    "priorityClasses": ["batch"],
    "queuePriorityClasses": ["low"],
    "runtimeClasses": ["nvidia"],
    "serviceAccounts": ["reader"],
    "schedulers": ["volcano"],
    "resourceClaims": ["gpus"],
    "tolerationKeys": ["gpu"],
    "nodeLabels": ["pool"],
    "podLabels": ["team"],
    "podAnnotations": ["example.com/note"],
    "quota": {"count/scalerlruns.scalerl.dev": "1"},
}


def secret_in(kind: str, name: str) -> Object:
    return {
        "env": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}]},
        "volume": {"volumes": [{"name": "a", "secret": {"secretName": name}}]},
        "projected": {"volumes": [{"name": "a", "projected": {"sources": [{"secret": {"name": name}}]}}]},
        "pull": {"imagePullSecrets": [{"name": name}]},
        "envFrom": {"envFrom": [{"configMapRef": {"name": "c"}}, {"secretRef": {"name": name}}]},
        "init": init_container(
            env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}]
        ),
        "init envFrom": init_container(envFrom=[{"secretRef": {"name": name}}]),
    }[kind]


def init_container(image: str = "registry.example.com/team/fetch:1", **fields: Any) -> Object:
    return {"initContainers": [{"name": "fetch", "image": image, **fields}]}


def node_affinity(kind: str, term: Object) -> Object:
    terms: Any = (
        {"nodeSelectorTerms": [term]} if kind.startswith("required") else [{"weight": 1, "preference": term}]
    )
    return {"affinity": {"nodeAffinity": {f"{kind}DuringSchedulingIgnoredDuringExecution": terms}}}


def expression(key: str) -> Object:
    return {"matchExpressions": [{"key": key, "operator": "Exists"}]}


SECRETS = ("env", "volume", "projected", "pull", "envFrom", "init", "init envFrom")
REFUSED: dict[str, tuple[Object, str]] = {
    "hostPath": ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "allowed kinds are configMap"),
    "nfs": ({"volumes": [{"name": "b", "emptyDir": {}}, {"name": "a", "nfs": {"server": "s", "path": "/"}}]}, "allowed kinds"),
    "csi": ({"volumes": [{"name": "a", "csi": {"driver": "d"}}]}, "allowed kinds"),
    **{f"secret by {kind}": (secret_in(kind, "admin"), "allowed Secrets are hub") for kind in SECRETS},
    "init image": (init_container("elsewhere.example.com/x:1"), "initContainers: use an image below registry.example.com/team/"),
    "account": ({"serviceAccountName": "admin"}, "serviceAccountName: allowed are reader"),
    "scheduler": ({"schedulerName": "own"}, "schedulerName: allowed are volcano"),
    "claim": ({"resourceClaims": [{"name": "a", "resourceClaimName": "admins"}]}, "allowed claims and templates are gpus"),
    "claim's template": (
        {"resourceClaims": [{"name": "a", "resourceClaimName": "gpus"}, {"name": "b", "resourceClaimTemplateName": "x"}]},
        "allowed claims and templates are gpus",
    ),
    "token": ({"volumes": [{"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}, "serviceAccountToken"),
    "priority": ({"priorityClassName": "system-node-critical"}, "priorityClassName: allowed are batch"),
    "runtime": ({"runtimeClassName": "privileged"}, "runtimeClassName: allowed are nvidia"),
    "toleration": ({"tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "control-plane", "operator": "Exists"}]}, "keys gpu"),
    "every toleration": ({"tolerations": [{"operator": "Exists"}]}, "needs one of the keys gpu"),
    "node label": ({"nodeSelector": {"kubernetes.io/hostname": "n"}}, "nodes may be selected by the labels pool"),
    "node affinity": (node_affinity("required", expression("zone")), "nodes may be selected"),
    "preferred node": (node_affinity("preferred", expression("zone")), "nodes may be selected"),
    "node name": (
        node_affinity("required", {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}),
        "nodes may be selected",
    ),
    "pod label": ({"labels": {"app": "payments"}}, "labels: allowed are team"),
    "pod annotation": ({"annotations": {"k8s.v1.cni.cncf.io/networks": "host"}}, "annotations: allowed are example.com/note"),
}  # fmt: skip
IMAGES = ("elsewhere.example.com/x:1", "x", "registry.example.com/team-b/x:1", "registry.example.com/teams")
PLACES: dict[str, Any] = {
    "all": lambda template: {"podTemplate": template},
    "coordinator": lambda template: {"coordinator": {"podTemplate": template}},
    "generator": lambda template: {"generator": {"podTemplate": template}},
    "trainer": lambda template: {"trainer": {"podTemplate": template}},
    "environment": lambda template: {
        "task": {"verifier": None, "environment": {"name": "server"}},
        "environment": {"image": "registry.example.com/team/game:1", "podTemplate": template},
    },
}
ALLOWED: Object = {
    "podTemplate": {
        "volumes": [
            {"name": "a", "configMap": {"name": "c"}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "data"}},
            {
                "name": "c",
                "projected": {"sources": [{"secret": {"name": "hub"}}, {"configMap": {"name": "c"}}]},
            },
            {"name": "d", "secret": {"secretName": "hub"}},
        ],
        "env": [{"name": "B", "value": "1"}, *secret_in("env", "hub")["env"]],
        "priorityClassName": "batch",
        "runtimeClassName": "nvidia",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "gpu"},
        "labels": {"team": "a"},
        "annotations": {"example.com/note": "yes"},
        "imagePullSecrets": [{"name": "hub"}],
        "envFrom": [{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "c"}}],
        "serviceAccountName": "reader",
        "schedulerName": "volcano",
        "resourceClaims": [{"name": "a", "resourceClaimTemplateName": "gpus"}],
        **init_container(env=[{"name": "B", "value": "1"}], envFrom=[{"secretRef": {"name": "hub"}}]),
        **node_affinity("required", expression("pool")),
    },
    "images": {"trainer": "registry.example.com/team/trainer:1"},
}


class Tenant:
    """Runs that a user would create, without their being stored."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.quota: Object = {}

    def create(
        self,
        spec: Object,
        namespace: str = TENANT,
        *,
        name: str = "r",
        dry: bool = True,
        labels: dict[str, str] | None = None,
    ) -> str:
        """The refusal; empty if the run is taken."""
        metadata = {"name": name, "namespace": namespace, "labels": labels or {}}
        run = merged(RUN, {"metadata": metadata, "spec": spec})
        words = ("create", "-f", "-", *(("--dry-run=server",) if dry else ()))
        try:
            self.cluster.kubectl(*words, stdin=json.dumps(run))
        except KubectlError as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def tenant(control_plane: Cluster, helm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    found = Tenant(control_plane)
    values = tmp_path_factory.mktemp("admission") / "values.yaml"
    values.write_text(yaml.safe_dump({"admission": VALUES}))
    objects = render(helm, "--values", str(values))
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "CustomResourceDefinition")
    for name in (TENANT, OTHER):
        control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    made = [obj for obj in objects if obj["kind"] in kinds or obj["metadata"]["name"].endswith(":run-author")]
    found.quota = next(obj for obj in objects if obj["kind"] == "ResourceQuota")
    for obj in made:
        control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(obj))
    priority = {"podTemplate": {"priorityClassName": "x"}}
    until(lambda: "priorityClassName" in found.create(priority), 120, lambda: found.create(priority))
    yield found
    control_plane.kubectl("delete", "namespace", TENANT, OTHER, "--wait=false")
    for obj in reversed(made):
        control_plane.kubectl("delete", obj["kind"], obj["metadata"]["name"], "--timeout=500s")


@pytest.mark.parametrize("case", REFUSED)
def test_template_beyond_the_values_is_refused_in_each_place(tenant: Tenant, case: str) -> None:
    template, says = REFUSED[case]
    for place, spec in PLACES.items():
        refusal = tenant.create(spec(template))
        assert "ValidatingAdmissionPolicy" in refusal, (place, refusal)
        assert says in refusal, (place, refusal)


@pytest.mark.parametrize("role", ["trainer", "generator", "coordinator"])
def test_image_of_another_registry_is_refused(tenant: Tenant, role: str) -> None:
    for image in IMAGES:
        assert "use an image below registry.example.com/team/" in tenant.create({"images": {role: image}}), (
            image
        )


def test_what_the_values_name_is_taken(tenant: Tenant) -> None:
    assert tenant.create({}) == ""
    assert tenant.create(ALLOWED) == ""
    assert tenant.create({}, labels={PRIORITY: "low"}) == ""


def test_priority_in_a_queue_beyond_the_values_is_refused(tenant: Tenant) -> None:
    assert f"the label {PRIORITY}: allowed are low" in tenant.create({}, labels={PRIORITY: "of-production"})


def test_other_namespaces_are_not_restricted(tenant: Tenant) -> None:
    assert tenant.create({"podTemplate": {"priorityClassName": "x"}, "images": {"trainer": "x"}}, OTHER) == ""


def test_change_is_judged_and_the_number_of_runs_is_limited(tenant: Tenant, control_plane: Cluster) -> None:
    # The controller of quotas finds a new kind within 30 seconds, and counts it for a quota at its next change or after five minutes.
    # Until then no run is taken.
    changes = itertools.count(100)

    def taken() -> bool:
        hard = tenant.quota["spec"]["hard"] | {"pods": str(next(changes))}
        control_plane.apply(tenant.quota | {"spec": {"hard": hard}})
        return not tenant.create({}, name="first", dry=False)

    until(taken, 120, lambda: tenant.create({}))
    until(
        lambda: "exceeded quota" in tenant.create({}, name="second"),
        120,
        lambda: tenant.create({}, name="second"),
    )

    def patch(spec: Object, *more: str) -> None:
        body = json.dumps({"spec": spec})
        control_plane.kubectl("patch", "scalerlrun", "first", "-n", TENANT, "--type=merge", "-p", body, *more)

    with pytest.raises(KubectlError, match="allowed are low"):
        control_plane.kubectl("label", "scalerlrun", "first", "-n", TENANT, f"{PRIORITY}=of-production")
    with pytest.raises(KubectlError, match="allowed kinds"):
        patch({"generator": {"podTemplate": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}}})
    patch({"suspend": True})
    # What the operator itself writes is not judged, so that it can suspend a run from before the policy.
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
    control_plane.kubectl(
        "create", "clusterrole", "admission-runs", "--verb=get,patch", "--resource=scalerlruns.scalerl.dev"
    )
    control_plane.kubectl(
        "create",
        "rolebinding",
        "operator-runs",
        "--clusterrole=admission-runs",
        f"--user={account}",
        "-n",
        TENANT,
    )

    refusals: list[str] = []

    def by_the_operator() -> bool:
        try:
            patch({"podTemplate": {"priorityClassName": "x"}}, f"--as={account}")
        except KubectlError as error:
            refusals.append(str(error))
            return False
        return True

    until(by_the_operator, 120, lambda: refusals[-1])
    assert not any("ValidatingAdmissionPolicy" in refusal for refusal in refusals)
    # Such a run may still lose its finalizer.
    control_plane.kubectl(
        *(
            "patch",
            "scalerlrun",
            "first",
            "-n",
            TENANT,
            "--type=merge",
            "-p",
            '{"metadata":{"finalizers":["example.com/a"]}}',
        )
    )
    control_plane.kubectl(
        *(
            "patch",
            "scalerlrun",
            "first",
            "-n",
            TENANT,
            "--type=merge",
            "-p",
            '{"metadata":{"finalizers":null}}',
        )
    )
    control_plane.kubectl("delete", "clusterrole", "admission-runs")
    control_plane.kubectl("delete", "scalerlrun", "first", "-n", TENANT)


def test_author_of_runs_may_not_create_pods(tenant: Tenant, control_plane: Cluster) -> None:
    role = f"--clusterrole={NAMESPACE}:{RELEASE}:run-author"
    control_plane.kubectl("create", "rolebinding", "authors", role, "--user=ada", "-n", TENANT)

    def may(verb: str, what: str) -> bool:
        try:
            return (
                control_plane.kubectl("auth", "can-i", verb, what, "-n", TENANT, "--as=ada").strip() == "yes"
            )
        except KubectlError:
            return False

    until(lambda: may("create", "scalerlruns.scalerl.dev"), 120, lambda: "ada may not create runs")
    for verb, what in (
        *(("create", kind) for kind in ("pods", "jobs.batch", "secrets", "rolebindings.rbac.authorization.k8s.io", "pods/exec")),
        *(("get", "secrets"), ("patch", "resourcequotas"), ("delete", "networkpolicies.networking.k8s.io")),
    ):  # fmt: skip
        assert not may(verb, what), (verb, what)
