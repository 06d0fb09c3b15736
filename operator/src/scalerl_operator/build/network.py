"""NetworkPolicy and Services of a run: who reaches its pods, and by which names."""

from __future__ import annotations

from scalerl_operator import names
from scalerl_operator.names import MASTER_PORT_NUMBER, PORTS
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import MASTER_PORT, Role


def network_policy(scope: Scope) -> Object:
    """Who gets in: the run's own pods, on any port (weights travel on ports chosen as they go); from the operator's
    namespace, the coordinator's API (and with it the health and metrics of the ranks, on the same port); from
    namespaces labelled ``scalerl.dev/scrape: "true"``, the ports with metrics. vLLM listens on loopback only.

    What goes out is not restricted: the preparation downloads, and a user's variables may name any service.
    """
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scope.operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "scalerl", names.COMPONENT: "operator"}},
    }
    prometheus = {"namespaceSelector": {"matchLabels": {names.SCRAPE: "true"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(scope.names.network),
        "spec": {
            "podSelector": {"matchLabels": names.selector(scope.uid)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": names.selector(scope.uid)}}]},
                {"from": [operator], "ports": [_tcp("http")]},
                {"from": [prometheus], "ports": [_tcp("http"), _tcp("control")]},
            ],
        },
    }


def _tcp(port: str) -> Object:
    return {"protocol": "TCP", "port": PORTS[port]}


def coordinator_service(scope: Scope) -> Object:
    """The coordinator's name. There is one pod or none, so readiness takes no part: a busy one stays reachable."""
    return _service(scope, Role.COORDINATOR, "http", PORTS["http"], {})


def trainer_service(scope: Scope) -> Object:
    """Names of the ranks of all attempts; they look for each other before any is ready."""
    return _service(scope, Role.TRAINER, MASTER_PORT, MASTER_PORT_NUMBER, {"clusterIP": "None"})


def _service(scope: Scope, role: Role, port: str, number: int, spec: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": scope.metadata(f"{scope.names.stem}-{role}", role),
        "spec": {
            **spec,
            "selector": names.selector(scope.uid, role),
            "publishNotReadyAddresses": True,
            "ports": [{"name": port, "port": number, "targetPort": number, "protocol": "TCP"}],
        },
    }
