"""What helm makes of the chart. `SCALERL_UPDATE_SNAPSHOTS=1` writes the snapshots anew; look at the difference."""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml
from charts import KUBE_VERSION, VALUES, HelmError, abridged, dump, render, snapshot
from queries import CHART, DASHBOARDS, rules

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", VALUES)
def test_it_renders_as_it_did(helm, name):
    now = dump(abridged(render(helm, "--values", str(VALUES[name]))))
    if os.environ.get("SCALERL_UPDATE_SNAPSHOTS") == "1":
        snapshot(name).write_text(now)
    assert now == snapshot(name).read_text(), "if meant: SCALERL_UPDATE_SNAPSHOTS=1"


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_complain_about(helm, name):
    done = subprocess.run(
        [helm, "lint", "--strict", "--kube-version", KUBE_VERSION, str(CHART), "--values", str(VALUES[name])],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--set", "replica=3"], "replica"),
        (["--set", "metrics.rules.enabled=true", "--set", "metrics.rules.alerts.Typo.enabled=false"], "no such alert"),
        (["--set", "serviceAccount.create=false"], "serviceAccount.name"),
        (["--set", "images.operator.digest=latest"], "digest"),
        (["--kube-version", "1.25.0"], "kubeVersion"),
        # What the schema says, helm says too, in place of what it could not read or render.
        (["--set", "curvefit=null"], "curvefit"),
        (["--set", "curvefit.metricsPort=null"], "metricsPort"),
        (["--set", "metrics.serviceMonitor.interval=0s"], "interval"),
        (["--set", "networkPolicy.apiServer.cidrs={999.1.1.1/99}"], "cidrs"),
        (["--set", "priorityClassName=a: b"], "priorityClassName"),
        # What a schema cannot say.
        (["--set-json", 'operator.extraEnv=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]'], "A is there twice"),
        (["--set", "podDisruptionBudget.minAvailable=5"], "no node of theirs can be drained"),
        (["--set", "podDisruptionBudget.minAvailable=2"], "at most 1"),
        (["--set", "podDisruptionBudget.minAvailable=99%"], "no node of theirs can be drained"),
        (["--set", "podDisruptionBudget.minAvailable=51%"], "no node of theirs can be drained"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_helm_refuses_what_cannot_be_meant(helm, options, told):
    with pytest.raises(HelmError, match=told):
        render(helm, *options)


def test_the_crd_is_the_one_of_the_repository(helm):
    (crd,) = (obj for obj in render(helm) if obj["kind"] == "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load((CHART / "files/crds/scalerl.dev_scalerlruns.yaml").read_text())
    (crd,) = (
        obj for obj in render(helm, "--set", "crds.keep=false") if obj["kind"] == "CustomResourceDefinition"
    )
    assert "annotations" not in crd["metadata"]


def test_dashboards_and_alerts_arrive_as_they_are(helm):
    objects = render(helm, "--set", "metrics.dashboards.enabled=true", "--set", "metrics.rules.enabled=true")
    data = {key: text for obj in objects if obj["kind"] == "ConfigMap" for key, text in obj["data"].items()}
    assert data == {path.name: path.read_text().strip() for path in DASHBOARDS}
    (made,) = (obj for obj in objects if obj["kind"] == "PrometheusRule")
    arrived = [rule for group in made["spec"]["groups"] for rule in group["rules"]]
    for rule in arrived:
        anchor = rule["annotations"].pop("runbook_url")
        assert anchor == f"docs/operations.md#{rule['alert'].lower()}"
        rule["expr"] = rule["expr"].strip()
    assert arrived == [rule | {"expr": rule["expr"].strip()} for rule in rules()]


def test_alerts_are_changed_by_name(helm):
    changes = "metrics.rules.alerts.ScaleRLRunStalled"
    objects = render(
        helm,
        *("--set", "metrics.rules.enabled=true", "--set", f"{changes}.for=2h,{changes}.severity=info"),
        *(
            "--set",
            "metrics.rules.alerts.ScaleRLMismatch.enabled=false",
            "--set",
            f"{changes}.labels.team=rl",
        ),
    )
    (made,) = (obj for obj in objects if obj["kind"] == "PrometheusRule")
    by_name = {rule["alert"]: rule for group in made["spec"]["groups"] for rule in group["rules"]}
    assert "ScaleRLMismatch" not in by_name
    assert len(by_name) == len(rules()) - 1
    assert by_name["ScaleRLRunStalled"]["for"] == "2h"
    assert by_name["ScaleRLRunStalled"]["labels"] == {"severity": "info", "team": "rl"}


def test_each_watched_namespace_has_its_role_and_none_more(helm):
    objects = render(helm, "--set", "watchNamespaces={a,b}", "--set", "rbac.aggregateToUsers=false")
    assert not [obj for obj in objects if obj["kind"].startswith("ClusterRole")]
    for kind in ("Role", "RoleBinding"):
        assert sorted(obj["metadata"]["namespace"] for obj in objects if obj["kind"] == kind) == [
            "a", "b", "scalerl-system",
        ]  # fmt: skip


def test_two_releases_share_no_name_of_the_cluster(helm):
    def global_names(release: str, namespace: str) -> set[tuple[str, str]]:
        done = subprocess.run(
            [helm, "template", release, str(CHART), "-n", namespace, "--kube-version", KUBE_VERSION, "--set", "crds.enabled=false"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        objects = [obj for obj in yaml.safe_load_all(done.stdout) if obj]
        return {(o["kind"], o["metadata"]["name"]) for o in objects if "namespace" not in o["metadata"]}

    first = global_names("scalerl", "a")
    assert first
    assert not first & global_names("scalerl", "b")
    assert not first & global_names("other", "a")
    # Namespace and name put together are the same, though neither is.
    assert not global_names("b-scalerl", "a") & global_names("scalerl", "a-b")


def test_a_long_release_name_is_no_clash_and_no_error(helm):
    objects = render(helm, "--set", f"fullnameOverride={'x' * 53}")
    assert all(
        len(obj["metadata"]["name"]) <= 80 for obj in objects if obj["kind"] != "CustomResourceDefinition"
    )
    assert all(
        len(obj["metadata"]["name"]) <= 63 for obj in objects if obj["kind"] in ("Service", "Deployment")
    )


@pytest.mark.parametrize("name", ["1st", "a.b"])
def test_a_release_whose_name_no_service_can_have_is_told_what_to_do(helm, name):
    with pytest.raises(HelmError, match="set fullnameOverride"):
        render(helm, release=name)
    assert render(helm, "--set", "fullnameOverride=rl", release=name)


def test_names_that_yaml_takes_for_something_else_stay_names(helm):
    objects = render(helm, "--set-string", "watchNamespaces={123,null},serviceAccount.name=1e3")
    roles = [obj["metadata"]["namespace"] for obj in objects if obj["kind"] == "Role"]
    assert {"123", "null"} <= set(roles)
    (account,) = (obj for obj in objects if obj["kind"] == "ServiceAccount")
    assert account["metadata"]["name"] == "1e3"


@pytest.mark.parametrize(("replicas", "kept"), [(2, "1"), (2, "50%"), (3, "2"), (3, "66%")])
def test_a_budget_that_lets_one_go_is_taken(helm, replicas, kept):
    objects = render(helm, "--set", f"replicas={replicas},podDisruptionBudget.minAvailable={kept}")
    (budget,) = (obj for obj in objects if obj["kind"] == "PodDisruptionBudget")
    assert str(budget["spec"]["minAvailable"]) == kept


def test_one_replica_does_not_make_its_node_undrainable(helm):
    (budget,) = (obj for obj in render(helm, "--set", "replicas=1") if obj["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]
