"""What helm makes of the chart. `SCALERL_UPDATE_SNAPSHOTS=1` writes the snapshots again; look at the difference."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml
from charts import KUBE_VERSION, VALUES, HelmError, abridged, dump, render, snapshot
from queries import CHART, DASHBOARDS, rules

from scalerl_operator.names import labels as labels_of_run

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", VALUES)
def test_chart_renders_as_its_snapshots(helm, name):
    now = dump(abridged(render(helm, "--values", str(VALUES[name]))))
    if os.environ.get("SCALERL_UPDATE_SNAPSHOTS") == "1":
        snapshot(name).write_text(now)
    assert now == snapshot(name).read_text(), "if meant: SCALERL_UPDATE_SNAPSHOTS=1"


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_complain_about(helm, name):
    done = subprocess.run(
        [helm, "lint", "--strict", "--kube-version", KUBE_VERSION, str(CHART), "--values", str(VALUES[name])],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


NO_THRESHOLD = "metrics.rules.alerts.ScaleRLStopAdvised"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "replica=3"], "replica"),
        (["--set", "metrics.rules.enabled=true", "--set", "metrics.rules.alerts.Typo.enabled=false"], "no such alert"),
        (["--set", "metrics.rules.enabled=true", "--set", f"{NO_THRESHOLD}.threshold=1"], f"{NO_THRESHOLD}.threshold: this alert has no threshold"),
        (["--set", "metrics.rules.enabled=true", "--set", "metrics.rules.alerts.ScaleRLMismatch.threshold=-1"], "threshold"),
        (["--set", "serviceAccount.create=false"], "serviceAccount.name"),
        (["--kube-version", "1.29.14"], r"requires kubeVersion: >=1\.30\.0-0"),
        # What the schema says, helm says too, in place of what it could not read or render.
        (["--set", "curvefit=null"], "curvefit"),
        (["--set", "curvefit.metricsPort=null"], "metricsPort"),
        # What a schema cannot say.
        (["--set", "podDisruptionBudget.minAvailable=5"], "no node of theirs can be drained"),
        (["--set", "podDisruptionBudget.minAvailable=2"], "at most 1"),
        (["--set", "podDisruptionBudget.minAvailable=99%"], "no node of theirs can be drained"),
        (["--set", "podDisruptionBudget.minAvailable=51%"], "no node of theirs can be drained"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_helm_refuses_what_cannot_be_meant(helm, options, message):
    with pytest.raises(HelmError, match=message):
        render(helm, *options)


ALERT = "metrics.rules.alerts.ScaleRLRunStalled"
OWN_LABEL = "labels of app.kubernetes.io/ and helm.sh/ are reserved: the chart selects its objects by them"
BYTES = "must be an amount of bytes like 512Mi or 2Gi"
CIDR = "must be a range of addresses like 10.0.0.0/8 or fd00::/8"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"curvefit": {"port": 8080}}, "curvefit.port: 8080 is the operator's own port in the same pod; choose another"),
        ({"curvefit": {"metricsPort": 8080}}, "curvefit.metricsPort: 8080 is the operator's own port in the same pod"),
        ({"curvefit": {"metricsPort": 8090}}, "curvefit.metricsPort: is the same as curvefit.port; choose another"),
        ({"operator": {"extraEnv": [{"name": "SCALERL_LEASE", "value": "x"}]}}, "operator.extraEnv[0].name: SCALERL_LEASE: the chart itself sets variables that begin with SCALERL_ or POD_NAME"),
        ({"operator": {"extraEnv": [{"name": "POD_NAME", "value": "x"}]}}, "operator.extraEnv[0].name: POD_NAME: the chart itself sets"),
        ({"operator": {"extraEnv": [{"name": "A-B", "value": "x"}]}}, 'operator.extraEnv[0].name: "A-B": must be a variable\'s name'),
        ({"operator": {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "operator.extraEnv: A is given twice"),
        ({"operator": {"extraEnv": [{"name": "A", "value": "1", "valueFrom": {}}]}}, "operator.extraEnv[0]: A has both value and valueFrom; set one"),
        # Labels, and keys that are the chart's own: set again, they would be there twice.
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, f"podLabels: app.kubernetes.io/name: {OWN_LABEL}"),
        ({"podLabels": {"team": "rl!"}}, 'podLabels.team: "rl!": must be at most 63 letters'),
        ({"podLabels": {"te am": "rl"}}, 'podLabels: "te am": must be a name like team or example.com/team'),
        ({"nodeSelector": {"zone": "a/b"}}, 'nodeSelector.zone: "a/b": must be at most 63'),
        ({"podAnnotations": {"kubectl.kubernetes.io/default-container": "x"}}, "the chart itself sets it, to the operator; leave it out"),
        ({"podAnnotations": {"no key": "x"}}, 'podAnnotations: "no key": must be a name like'),
        ({"serviceAccount": {"annotations": {"no key": "x"}}}, 'serviceAccount.annotations: "no key"'),
        ({"metrics": {"labels": {"app.kubernetes.io/name": "x"}}}, f"metrics.labels: app.kubernetes.io/name: {OWN_LABEL}"),
        ({"metrics": {"dashboards": {"labels": {"helm.sh/chart": "x"}}}}, f"metrics.dashboards.labels: helm.sh/chart: {OWN_LABEL}"),
        ({"metrics": {"rules": {"alerts": {"ScaleRLRunStalled": {"labels": {"severity": "x"}}}}}}, f"{ALERT}.labels: set severity by {ALERT}.severity"),
        ({"metrics": {"rules": {"alerts": {"ScaleRLRunStalled": {"labels": {"a-b": "x"}}}}}}, f'{ALERT}.labels: "a-b": must be a label of Prometheus'),
        # Images, as a container runtime reads them.
        ({"images": {"registry": "https://registry.example.com/"}}, "an image name has no scheme https://; write registry.example.com"),
        ({"images": {"registry": "registry.example.com/UPPER"}}, 'images.registry: "registry.example.com/UPPER": must be a host, with a port and a path in lower case'),
        ({"images": {"operator": {"repository": "UPPER/Case"}}}, "images.operator.repository"),
        ({"images": {"operator": {"repository": "/a"}}}, "images.operator.repository"),
        ({"images": {"trainer": {"repository": ""}}}, "images.trainer.repository"),
        ({"images": {"generator": {"repository": "repo:tag"}}}, 'images.generator.repository: "repo:tag": must be an image\'s name in lower case, without registry, tag and digest'),
        ({"images": {"operator": {"tag": "with space"}}}, 'images.operator.tag: "with space": must be an image\'s tag'),
        ({"images": {"operator": {"digest": "sha256:abc"}}}, "images.operator.digest: \"sha256:abc\": must be sha256: and 64 digits"),
        ({"images": {"pullSecrets": [{"name": "A b"}]}}, 'images.pullSecrets[0].name: "A b": must be an object\'s name'),
        # Names, as Kubernetes has them.
        ({"fullnameOverride": "Bad_Name"}, "set fullnameOverride"),
        ({"fullnameOverride": "---"}, "set fullnameOverride"),
        ({"fullnameOverride": "1st"}, "set fullnameOverride"),
        ({"nameOverride": "x.y/z"}, "nameOverride"),
        ({"serviceAccount": {"name": "Bad Name"}}, 'serviceAccount.name: "Bad Name": must be an object\'s name'),
        ({"metrics": {"dashboards": {"namespace": "Bad NS"}}}, 'metrics.dashboards.namespace: "Bad NS"'),
        ({"priorityClassName": "a: b"}, 'priorityClassName: "a: b": must be an object\'s name'),
        ({"watchNamespaces": ["a", "Research"]}, 'watchNamespaces[1]: "Research": must be a namespace\'s name'),
        # Amounts.
        ({"operator": {"resources": {"limits": {"memory": "100mi"}}}}, f'operator.resources.limits.memory: "100mi": {BYTES}'),
        ({"operator": {"resources": {"limits": {"memory": "100m"}}}}, BYTES),
        ({"operator": {"resources": {"limits": {"memory": "-5"}}}}, BYTES),
        ({"operator": {"resources": {"limits": {"memory": -5}}}}, BYTES),
        ({"operator": {"resources": {"limits": {"memory": "1 GB"}}}}, BYTES),
        ({"curvefit": {"resources": {"limits": {"memory": "..."}}}}, f'curvefit.resources.limits.memory: "...": {BYTES}'),
        ({"curvefit": {"resources": {"requests": {"cpu": "1 core"}}}}, 'curvefit.resources.requests.cpu: "1 core": must be an amount like 2 or 500m'),
        ({"curvefit": {"resources": {"requests": {"memroy": "1Gi"}}}}, "curvefit.resources.requests.memroy: is not a resource name; use cpu, memory"),
        # Addresses.
        ({"networkPolicy": {"apiServer": {"cidrs": ["999.1.1.1/99"]}}}, f'networkPolicy.apiServer.cidrs[0]: "999.1.1.1/99": {CIDR}'),
        ({"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.0/8", "10.0.0.0/33"]}}}, f'cidrs[1]: "10.0.0.0/33": {CIDR}'),
        ({"networkPolicy": {"apiServer": {"cidrs": ["fd00:::/8"]}}}, CIDR),
        ({"networkPolicy": {"apiServer": {"cidrs": [""]}}}, CIDR),
        ({"admission": {"images": ["registry.example.com/team"]}}, 'admission.images[0]: "registry.example.com/team": must be a prefix with / at its end'),
        ({"admission": {"enabled": True}}, "admission.namespaces: is empty, so that nothing is restricted"),
        ({"admission": {"namespaces": ["Team"]}}, 'admission.namespaces[0]: "Team": must be a namespace\'s name'),
        ({"admission": {"volumeKinds": ["host path"]}}, 'admission.volumeKinds[0]: "host path": must be a kind of volume'),
        # Durations.
        ({"metrics": {"serviceMonitor": {"interval": "0s"}}}, 'metrics.serviceMonitor.interval: "0s": must be greater than 0'),
        ({"metrics": {"serviceMonitor": {"interval": "15"}}}, 'metrics.serviceMonitor.interval: "15": must be a duration like 15s'),
        ({"metrics": {"podMonitor": {"interval": "15s1m"}}}, 'metrics.podMonitor.interval: "15s1m": must be a duration'),
        ({"metrics": {"rules": {"alerts": {"ScaleRLRunStalled": {"for": ""}}}}}, f'{ALERT}.for: "": must be a duration like 15m or 0s'),
        ({"podDisruptionBudget": {"minAvailable": 0}}, "podDisruptionBudget.minAvailable: 0: must be a number from 1 or a percentage"),
        ({"podDisruptionBudget": {"minAvailable": "0%"}}, "podDisruptionBudget.minAvailable: 0%: must be a number from 1 or a percentage"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_helm_names_the_value_and_the_reason(helm, tmp_path, wrong, message):
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(wrong))
    with pytest.raises(HelmError) as refused:
        render(helm, "--values", str(given))
    said = str(refused.value)
    assert message in said
    assert "failed" not in said
    assert "pattern" not in said


def test_helm_names_all_wrong_values_at_once(helm):
    with pytest.raises(HelmError, match=r"(?s)images.registry: .*curvefit.port: "):
        render(helm, "--set", "curvefit.port=8080,images.registry=https://a.example.com")


@pytest.mark.parametrize(
    "meant",
    [
        {"images": {"registry": "localhost:5000"}},
        {"images": {"registry": "registry.example.com/team/"}},
        {"images": {"registry": "[fd00::1]:5000/a"}},
        {"images": {"operator": {"repository": "a/b__c-d.e"}}},
        {"operator": {"resources": {"limits": {"memory": "1.5Gi", "cpu": 2, "example.com/widget": "1"}}}},
        {"operator": {"resources": {"limits": {"memory": 1e9, "cpu": "250m", "ephemeral-storage": "1e9"}}}},
        {"operator": {"extraEnv": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]}},
        {"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.0/8", "0.0.0.0/0", "::/0", "fd00:1::2/64"]}}},
        {"networkPolicy": {"apiServer": {"cidrs": ["255.255.255.255/32", "1:2:3:4:5:6:7:8/128"]}}},
        {"metrics": {"serviceMonitor": {"interval": "1m30s"}, "podMonitor": {"interval": "500ms"}}},
        {"metrics": {"rules": {"alerts": {"ScaleRLRunStalled": {"for": "0s"}}}}},
        {"podLabels": {"example.com/Team_a": "", "x": "a.b-C_d"}, "nodeSelector": {"kubernetes.io/os": "linux"}},
        {"serviceAccount": {"name": "rl.team-1"}, "priorityClassName": "system-cluster-critical"},
        {"podDisruptionBudget": {"minAvailable": "50%"}, "fullnameOverride": "rl-2", "nameOverride": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_helm_takes_what_can_be_meant(helm, tmp_path, meant):
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(meant))
    assert render(helm, "--values", str(given))


def test_crd_is_the_one_of_the_repository(helm):
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


def test_thresholds_of_alerts_are_values(helm, promtool, tmp_path):
    """Of every alert with a number at its end, and of no other: what fires at 1 stays so."""
    ends = {rule["alert"]: re.search(r"[<>]=? [0-9.]+$", rule["expr"].strip()) for rule in rules()}
    having = sorted(name for name, end in ends.items() if end)
    assert {"ScaleRLBudgetUsed", "ScaleRLDeadlineUnreachable", "ScaleRLMismatch"} <= set(having)
    values = tmp_path / "values.yaml"
    for number, written in ((0.125, "0.125"), (3600, "3600"), (0.00002, "2e-05"), (2_000_000, "2e+06")):
        alerts = {name: {"threshold": number} for name in having}
        values.write_text(yaml.safe_dump({"metrics": {"rules": {"enabled": True, "alerts": alerts}}}))
        (made,) = (obj for obj in render(helm, "--values", str(values)) if obj["kind"] == "PrometheusRule")
        by_name = {rule["alert"]: rule for group in made["spec"]["groups"] for rule in group["rules"]}
        for rule in rules():
            before, found = rule["expr"].strip(), by_name[rule["alert"]]["expr"].strip()
            if rule["alert"] in having:
                assert re.sub(r"[0-9.]+$", written, before) == found
            else:
                assert before == found
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump(made["spec"]))
        done = subprocess.run(
            [promtool, "check", "rules", str(file)], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr


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
            capture_output=True, text=True, timeout=200, check=True,
        )  # fmt: skip
        objects = [obj for obj in yaml.load_all(done.stdout, yaml.CSafeLoader) if obj]
        return {(o["kind"], o["metadata"]["name"]) for o in objects if "namespace" not in o["metadata"]}

    first = global_names("scalerl", "a")
    assert first
    assert not first & global_names("scalerl", "b")
    assert not first & global_names("other", "a")
    # Namespace and name put together are the same, though neither is.
    assert not global_names("b-scalerl", "a") & global_names("scalerl", "a-b")


def test_two_releases_in_a_namespace_select_their_own_pods(helm):
    """Nor those of a run of the same name."""
    pods = {}
    for release in ("scalerl", "scalerl-next"):
        for obj in render(helm, "--values", str(VALUES["everything"]), release=release):
            if "template" in obj.get("spec", {}):
                pods[release, obj["metadata"]["name"]] = obj["spec"]["template"]["metadata"]["labels"]
    pods["run", "math"] = labels_of_run("scalerl", "uid", "coordinator")
    seen = set()
    for release in ("scalerl", "scalerl-next"):
        for obj in render(helm, "--values", str(VALUES["everything"]), release=release):
            spec = obj.get("spec", {})
            selector = spec.get("podSelector") if obj["kind"] == "NetworkPolicy" else spec.get("selector")
            if (
                obj["kind"] not in ("Deployment", "PodDisruptionBudget", "NetworkPolicy", "Service")
                or not selector
            ):
                continue
            chosen = selector.get("matchLabels", selector).items()
            assert {key[0] for key, labels in pods.items() if chosen <= labels.items()} == {release}, obj[
                "kind"
            ]
            seen.add(obj["kind"])
    assert {"Deployment", "PodDisruptionBudget", "NetworkPolicy"} <= seen


def test_long_release_name_is_shortened_without_clash(helm):
    objects = render(helm, "--set", f"fullnameOverride={'x' * 53}")
    assert all(
        len(obj["metadata"]["name"]) <= 80 for obj in objects if obj["kind"] != "CustomResourceDefinition"
    )
    assert all(
        len(obj["metadata"]["name"]) <= 63 for obj in objects if obj["kind"] in ("Service", "Deployment")
    )


@pytest.mark.parametrize("name", ["1st", "a.b"])
def test_invalid_release_name_is_refused_with_the_remedy(helm, name):
    with pytest.raises(HelmError, match="set fullnameOverride"):
        render(helm, release=name)
    assert render(helm, "--set", "fullnameOverride=rl", release=name)


def test_namespace_names_like_yaml_values_stay_strings(helm):
    objects = render(helm, "--set-string", "watchNamespaces={123,null},serviceAccount.name=1e3")
    roles = [obj["metadata"]["namespace"] for obj in objects if obj["kind"] == "Role"]
    assert {"123", "null"} <= set(roles)
    (account,) = (obj for obj in objects if obj["kind"] == "ServiceAccount")
    assert account["metadata"]["name"] == "1e3"


@pytest.mark.parametrize(("replicas", "kept"), [(2, "1"), (2, "50%"), (3, "2"), (3, "66%")])
def test_disruption_budget_allows_one(helm, replicas, kept):
    objects = render(helm, "--set", f"replicas={replicas},podDisruptionBudget.minAvailable={kept}")
    (budget,) = (obj for obj in objects if obj["kind"] == "PodDisruptionBudget")
    assert str(budget["spec"]["minAvailable"]) == kept


def test_one_replica_does_not_make_its_node_undrainable(helm):
    (budget,) = (obj for obj in render(helm, "--set", "replicas=1") if obj["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]
