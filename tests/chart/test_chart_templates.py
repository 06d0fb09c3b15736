"""What the rendered chart promises: the smallest role that works, restricted pods, names that the operator's own code uses.

Reads the snapshots, so that it needs no helm.
"""

from __future__ import annotations

import pytest
from charts import VALUES, Object, snapshots
from roles import NEEDED, REVIEWS, granted

from scalerl_lifecycle.workloads import Role
from scalerl_operator import names
from scalerl_operator.kube.kinds import KINDS, RUN

CHARTS = snapshots()


def of_kind(name: str, *kinds: str, admission: bool = False) -> list[Object]:
    """Of the operator, or of the admission kit."""
    found = [obj for obj in CHARTS[name] if obj["kind"] in kinds]
    component = "app.kubernetes.io/component"
    return [o for o in found if (o["metadata"]["labels"].get(component) == "admission") == admission]


def operators_roles(name: str) -> list[Object]:
    return [
        role
        for role in of_kind(name, "Role", "ClusterRole")
        if not any("aggregate-to" in label for label in role["metadata"]["labels"])
        and not any("nonResourceURLs" in rule for rule in role["rules"])  # for Prometheus
    ]


def test_permissions_cover_every_kind_of_the_operator():
    assert set(NEEDED) == set(KINDS)


@pytest.mark.parametrize("name", VALUES)
def test_role_grants_exactly_what_the_operator_does(name):
    needed = {kind: verbs for kind, verbs in NEEDED.items() if kind not in REVIEWS or name == "everything"}
    wanted = {(KINDS[kind].group, KINDS[kind].plural): verbs for kind, verbs in needed.items()}
    wanted[KINDS[RUN].group, "scalerlruns/status"] = {"patch"}
    wanted[KINDS[RUN].group, "scalerlruns/finalizers"] = {"update"}
    wanted[KINDS["Workload"].group, "workloads/status"] = {"patch"}
    if name == "namespaced":
        of_the_cluster = {(kind.group, kind.plural) for kind in KINDS.values() if not kind.namespaced}
        wanted = {key: verbs for key, verbs in wanted.items() if key not in of_the_cluster}
    assert granted(operators_roles(name)) == wanted


@pytest.mark.parametrize("name", VALUES)
def test_roles_have_no_wildcards(name):
    account = of_kind(name, "Deployment")[0]["spec"]["template"]["spec"]["serviceAccountName"]
    bound = {
        (binding["roleRef"]["kind"], binding["metadata"].get("namespace"), binding["roleRef"]["name"])
        for binding in of_kind(name, "RoleBinding", "ClusterRoleBinding")
    }
    for binding in of_kind(name, "RoleBinding", "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "scalerl-system"}
    roles = operators_roles(name)
    assert bound == {(r["kind"], r["metadata"].get("namespace"), r["metadata"]["name"]) for r in roles}
    for role in of_kind(name, "Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in (*rule["verbs"], *rule.get("resources", ()), *rule.get("apiGroups", ()))


def test_namespaced_operator_has_no_cluster_role():
    assert not of_kind(
        "namespaced", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ServiceAccount"
    )
    runs = [role for role in of_kind("namespaced", "Role") if role["metadata"]["name"].endswith("-runs")]
    assert {role["metadata"]["namespace"] for role in runs} == {"research", "evaluation"}


@pytest.mark.parametrize("name", VALUES)
def test_role_allows_the_one_lease_by_name(name):
    (role,) = (r for r in of_kind(name, "Role") if r["metadata"]["name"].endswith("-leader"))
    assert role["metadata"]["namespace"] == "scalerl-system"
    (lease,) = (rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule)
    assert lease == [environment(name)["SCALERL_LEASE"]]


def pods(name: str) -> list[tuple[str, Object]]:
    """Pod specs, with whose they are."""
    found = [
        (obj["metadata"]["name"], obj["spec"]["template"]["spec"]) for obj in of_kind(name, "Deployment")
    ]
    return found + [(obj["metadata"]["name"], obj["spec"]) for obj in of_kind(name, "Pod")]


def containers(name: str) -> dict[str, Object]:
    (deployment,) = of_kind(name, "Deployment")
    return {c["name"]: c for c in deployment["spec"]["template"]["spec"]["containers"]}


def environment(name: str) -> dict[str, str]:
    """Of the operator, what is plain text."""
    return {e["name"]: e["value"] for e in containers(name)["operator"]["env"] if "value" in e}


@pytest.mark.parametrize("name", VALUES)
def test_pods_are_restricted(name):
    assert len(pods(name)) == (3 if name == "default" else 2)
    for _, pod in pods(name):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for volume in pod.get("volumes", []):
            assert set(volume) - {"name"} <= {"emptyDir", "projected"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


@pytest.mark.parametrize("name", VALUES)
def test_only_the_operators_container_has_a_token(name):
    for container in containers(name).values():
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert ("token" in mounted) == (container["name"] == "operator")


@pytest.mark.parametrize("name", ["default", "everything"])
def test_only_the_operator_reaches_the_curvefit_service(name):
    service, port = containers(name)["curvefit"], {"default": 8090, "everything": 9000}[name]
    assert {"--host=127.0.0.1", f"--port={port}"} <= set(service["command"])
    assert port not in {open_["containerPort"] for open_ in service["ports"]}
    assert environment(name)["SCALERL_SIDECAR_URL"] == f"http://127.0.0.1:{port}"
    for probe in ("startupProbe", "livenessProbe"):
        assert f"http://127.0.0.1:{port}/healthz" in service[probe]["exec"]["command"][-1]


@pytest.mark.parametrize("name", ["default", "everything"])
def test_prometheus_scrapes_the_curvefit_service(name):
    """The same port all the way: who serves it, who names it, who lets it in, who asks."""
    container = containers(name)["curvefit"]
    (open_,) = container["ports"]
    assert f"--metrics-port={open_['containerPort']}" in container["command"]
    assert "--metrics-host=0.0.0.0" in container["command"]
    (service,) = of_kind(name, "Service")
    ports = {port["targetPort"]: port for port in service["spec"]["ports"]}
    assert ports[open_["name"]]["port"] == open_["containerPort"]
    (policy,) = of_kind(name, "NetworkPolicy")
    (let_in,) = policy["spec"]["ingress"]
    assert {port["port"] for port in let_in["ports"]} == set(ports)
    for monitor in of_kind(name, "ServiceMonitor"):
        jobs = {e["port"]: e["relabelings"][0]["replacement"] for e in monitor["spec"]["endpoints"]}
        assert jobs == {"http": "scalerl-operator", open_["name"]: "scalerl-curvefit"}


def test_no_forecast_url_without_curve_fit_service():
    assert set(containers("namespaced")) == {"operator"}
    assert "SCALERL_SIDECAR_URL" not in environment("namespaced")
    assert "curvefit" not in str(of_kind("namespaced", "Service", "NetworkPolicy", "ServiceMonitor"))


@pytest.mark.parametrize("name", VALUES)
def test_replica_can_be_replaced_without_a_gap(name):
    (deployment,) = of_kind(name, "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    operator = containers(name)["operator"]
    assert {operator[p]["httpGet"]["path"] for p in ("startupProbe", "livenessProbe")} == {"/healthz"}
    assert operator["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_replicas_prefer_different_nodes():
    (deployment,) = of_kind("default", "Deployment")
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert term["podAffinityTerm"]["labelSelector"] == deployment["spec"]["selector"]


@pytest.mark.parametrize("name", VALUES)
def test_everything_that_selects_the_operator_selects_it(name):
    (deployment,) = of_kind(name, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selecting = [deployment["spec"]["selector"]["matchLabels"]]
    selecting += [obj["spec"]["selector"] for obj in of_kind(name, "Service")]
    selecting += [obj["spec"]["selector"]["matchLabels"] for obj in of_kind(name, "PodDisruptionBudget")]
    selecting += [obj["spec"]["podSelector"]["matchLabels"] for obj in of_kind(name, "NetworkPolicy")]
    for selector in selecting:
        assert selector.items() <= labels
    services = [obj["metadata"]["labels"].items() for obj in of_kind(name, "Service")]
    for monitor in of_kind(name, "ServiceMonitor"):
        assert all(monitor["spec"]["selector"]["matchLabels"].items() <= labels for labels in services)


@pytest.mark.parametrize("name", ["default", "everything"])
def test_operator_reaches_the_coordinators_of_runs(name):
    coordinator = names.labels("a-run", "uid", Role.COORDINATOR).items()
    (policy,) = of_kind(name, "NetworkPolicy")
    (to_runs,) = (rule for rule in policy["spec"]["egress"] if "podSelector" in rule.get("to", [{}])[0])
    assert to_runs["to"][0]["podSelector"]["matchLabels"].items() <= coordinator
    assert [port["port"] for port in to_runs["ports"]] == [names.PORTS["http"]]


def test_pod_monitor_selects_pods_of_runs_and_labels_them():
    (monitor,) = of_kind("everything", "PodMonitor")
    for role in (Role.COORDINATOR, Role.GENERATOR, Role.TRAINER):
        assert (
            monitor["spec"]["selector"]["matchLabels"].items() <= names.labels("a-run", "uid", role).items()
        )
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in endpoints} <= set(names.PORTS)
    as_prometheus = {"scalerl_dev_run": names.RUN, "app_kubernetes_io_component": names.COMPONENT}
    for endpoint in endpoints:
        relabelled = {r["targetLabel"]: r for r in endpoint["relabelings"]}
        assert {"run", "role", "job"} == set(relabelled)
        for target, label in (("run", "scalerl_dev_run"), ("role", "app_kubernetes_io_component")):
            assert relabelled[target]["sourceLabels"] == [f"__meta_kubernetes_pod_label_{label}"]
            name = as_prometheus[label]
            assert "".join(c if c.isalnum() else "_" for c in name) == label


def test_monitoring_is_off_by_default_without_prometheus_crds():
    groups = {obj["apiVersion"].split("/")[0] for obj in CHARTS["default"]}
    assert "monitoring.coreos.com" not in groups
    assert len(of_kind("everything", "ServiceMonitor", "PodMonitor", "PrometheusRule")) == 3
    dashboards = of_kind("everything", "ConfigMap")
    assert {obj["metadata"]["labels"]["grafana_dashboard"] for obj in dashboards} == {"1"}
    assert {obj["metadata"]["namespace"] for obj in dashboards} == {"monitoring"}


@pytest.mark.parametrize("name", VALUES)
def test_helm_test_requests_the_service(name):
    (service,) = of_kind(name, "Service")
    for pod in of_kind(name, "Pod"):
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        script = pod["spec"]["containers"][0]["command"][-1]
        compile(script, "answers.yaml", "exec")
        assert f"http://{service['metadata']['name']}.scalerl-system.svc:8080" in script


def test_only_scrapers_and_the_helm_test_reach_the_operator():
    """By default namespaces with the label that lets them scrape runs; the pod that helm test has denied is none of them."""
    (policy,) = of_kind("default", "NetworkPolicy")
    (let_in,) = policy["spec"]["ingress"]
    namespaces, tests = let_in["from"]
    assert namespaces == {"namespaceSelector": {"matchLabels": {names.SCRAPE: "true"}}}
    admitted = tests["podSelector"]["matchLabels"].items()
    pods = {pod["metadata"]["name"]: pod["metadata"]["labels"].items() for pod in of_kind("default", "Pod")}
    assert admitted <= pods["scalerl-test"]
    assert not admitted <= pods["scalerl-test-denied"]
    assert len(of_kind("everything", "Pod")) == 1  # its own scrapers may include it


def test_tenants_namespaces_deny_by_default_and_runs_still_talk():
    policies = of_kind("everything", "NetworkPolicy", admission=True)
    assert [policy["metadata"]["namespace"] for policy in policies] == ["team-a", "team-b"]
    for policy in policies:
        assert policy["spec"]["podSelector"] == {}
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in policy["spec"]
        _, runs, values = policy["spec"]["egress"]
        labels = names.labels("a-run", "uid", Role.TRAINER).items()
        assert runs["to"][0]["podSelector"]["matchLabels"].items() <= labels
        assert values == {"ports": [{"port": 443, "protocol": "TCP"}]}
    assert not of_kind("default", "NetworkPolicy", "ClusterRole", "ResourceQuota", admission=True)
