"""Who reaches which port of a run's pods: the ports of the plan, and the run's NetworkPolicy as Kubernetes evaluates it.

What answers at each port without the token: the tests ``test_*_attack_list.py`` of the members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from minimal_run import run_spec

from scalerl_lifecycle.lifecycle_types import Wanted
from scalerl_lifecycle.role_containers import plan
from scalerl_lifecycle.workloads import MASTER_PORT
from scalerl_operator.manifests import render
from scalerl_operator.manifests.scope import Desired, Images, Scope
from scalerl_operator.names import COMPONENT, MASTER_PORT_NUMBER, PORTS, SCRAPE, selector

IMAGES = Images("t", "g", "c")
NAMESPACE = {"kubernetes.io/metadata.name": "default"}
OPERATOR = {"app.kubernetes.io/name": "scalerl", COMPONENT: "operator"}

LISTENS = {
    ("coordinator", "http"): "coordinator/tests/test_coordinator_attack_list.py",
    ("trainer", "http"): "trainer/tests/test_trainer_attack_list.py",
    ("actor", "control"): "generator/tests/test_generator_attack_list.py",
    ("server", "vllm"): "generator/tests/test_generator_attack_list.py",
    ("sidecar", "http"): "curvefit/tests/test_curvefit_attack_list.py",
}
"""The test of each container's port. A port that is not here has no test of what answers without a token."""


def test_every_port_of_the_plan_has_a_test(pytestconfig: pytest.Config) -> None:
    from scalerl_lifecycle.role_containers import forecaster

    given = run_spec(generator={"speculation": {"history": {}}}, trainer={"replicas": 2})
    containers = [c for w in (*plan(given).workloads, forecaster()) for c in w.containers]
    assert {(c.name, port) for c in containers for port in c.ports} == set(LISTENS)
    for test in LISTENS.values():
        assert (pytestconfig.rootpath / test).is_file()
    server = next(c for c in containers if c.name == "server")
    assert tuple(server.argv[server.argv.index("--host") :][:2]) == ("--host", "127.0.0.1")


def admits(
    policy: Mapping[str, Any], pod: Mapping[str, str], namespace: Mapping[str, str], port: int
) -> bool:
    """Whether the policy lets a pod with these labels, in a namespace with these labels, connect to a TCP port."""

    def matches(labels: Mapping[str, str], chosen: Mapping[str, Any]) -> bool:
        assert set(chosen) <= {"matchLabels"}, "extend this evaluator"
        return chosen.get("matchLabels", {}).items() <= labels.items()

    def is_peer(peer: Mapping[str, Any]) -> bool:
        assert set(peer) <= {"podSelector", "namespaceSelector"}
        of_namespace = (
            matches(namespace, peer["namespaceSelector"])
            if "namespaceSelector" in peer
            else namespace == NAMESPACE
        )
        return of_namespace and matches(pod, peer.get("podSelector", {}))

    return any(
        any(is_peer(peer) for peer in rule["from"])
        and ("ports" not in rule or any(p == {"protocol": "TCP", "port": port} for p in rule["ports"]))
        for rule in policy["spec"]["ingress"]
    )


def objects(uid: str = "uid-1") -> list[dict[str, Any]]:
    run = run_spec(trainer={"replicas": 2})
    metadata = run.metadata.model_copy(update={"namespace": "default"})
    run = run.model_copy(update={"metadata": metadata})
    return list(render(Scope(run, uid, IMAGES, "scalerl", desired=Desired(Wanted(True, True, True, 1)))))


PODS: dict[str, tuple[dict[str, str], dict[str, str], frozenset[int]]] = {
    "a pod of the namespace": ({"app": "notebook"}, NAMESPACE, frozenset()),
    "a pod without labels": ({}, NAMESPACE, frozenset()),
    "another run's": (selector("uid-2"), NAMESPACE, frozenset()),
    "the run's labels in another namespace": (
        selector("uid-1"),
        {"kubernetes.io/metadata.name": "other"},
        frozenset(),
    ),
    "the operator's labels in the run's namespace": (OPERATOR, NAMESPACE, frozenset()),
    "the operator's namespace": ({}, {"kubernetes.io/metadata.name": "scalerl"}, frozenset()),
    "the operator": (OPERATOR, {"kubernetes.io/metadata.name": "scalerl"}, frozenset({PORTS["http"]})),
    "Prometheus": ({}, {SCRAPE: "true"}, frozenset({PORTS["http"], PORTS["control"]})),
    "an unlabelled Prometheus": ({"app": "prometheus"}, {SCRAPE: "false"}, frozenset()),
}


@pytest.mark.parametrize("who", PODS)
def test_network_policy_admits_no_other(who: str) -> None:
    """Every port of every pod of the run."""
    pod, namespace, ports = PODS[who]
    made = objects()
    (policy,) = (obj for obj in made if obj["kind"] == "NetworkPolicy")
    assert {port for port in range(1, 65536) if admits(policy, pod, namespace, port)} == ports
    assert MASTER_PORT_NUMBER not in ports


def test_network_policy_selects_every_pod_of_the_run() -> None:
    made = objects()
    (policy,) = (obj for obj in made if obj["kind"] == "NetworkPolicy")
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    templates = [obj["spec"]["template"] for obj in made if "template" in obj.get("spec", {})]
    assert len(templates) >= 4
    for template in templates:
        assert chosen <= template["metadata"]["labels"].items()
        assert not template["spec"].get("hostNetwork")
        assert all("hostPort" not in p for c in template["spec"]["containers"] for p in c.get("ports", []))
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert all(admits(policy, selector("uid-1"), NAMESPACE, port) for port in (1, 29500, 65535))


def test_services_expose_the_coordinator_and_the_rendezvous_only() -> None:
    services = {o["metadata"]["labels"][COMPONENT]: o["spec"] for o in objects() if o["kind"] == "Service"}
    assert {role: [(p["name"], p["port"]) for p in spec["ports"]] for role, spec in services.items()} == {
        "coordinator": [("http", PORTS["http"])],
        "trainer": [(MASTER_PORT, MASTER_PORT_NUMBER)],
    }
    assert all(spec.get("type", "ClusterIP") == "ClusterIP" for spec in services.values())
