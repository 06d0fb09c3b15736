"""NetworkPolicy and Services of a run."""

from __future__ import annotations

from scalerl_lifecycle.workloads import MASTER_PORT, Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.names import MASTER_PORT_NUMBER, PORTS


def network_policy(scope: Scope) -> Object:
    """Allows ingress from the run's own pods to any port (weight transfer uses free ports), from the operator's pods to the
    coordinator's API, and from namespaces labelled ``scalerl.dev/scrape: "true"`` to the ports with metrics. vLLM listens on
    loopback only. Environment servers act on the text of a model: they have a policy of their own, :func:`environment_policy`, and may
    not connect to the run's other pods.

    Egress is not restricted: the preparation downloads, and a user's environment may name any service.
    """
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scope.operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "scalerl", names.COMPONENT: "operator"}},
    }
    prometheus = {"namespaceSelector": {"matchLabels": {names.SCRAPE: "true"}}}
    own: Object = {"matchLabels": names.selector(scope.uid)}
    if scope.spec.environment is not None:
        others = {"key": names.COMPONENT, "operator": "NotIn", "values": [str(Role.ENVIRONMENT)]}
        own["matchExpressions"] = [others]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(scope.names.network),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": [operator], "ports": [_tcp("http")]},
                {"from": [prometheus], "ports": [_tcp("http"), _tcp("control")]},
            ],
        },
    }


def environment_policy(scope: Scope) -> Object:
    """Only the run's generators connect to its environment servers, which connect to nothing. Policies add up: one of the user's, for
    a label of ``environment.podTemplate``, allows more."""
    generators = {"podSelector": {"matchLabels": names.selector(scope.uid, Role.GENERATOR)}}
    port = {"protocol": "TCP", "port": scope.port(Role.ENVIRONMENT)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(scope.names.environment, Role.ENVIRONMENT),
        "spec": {
            "podSelector": {"matchLabels": names.selector(scope.uid, Role.ENVIRONMENT)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [generators], "ports": [port]}],
            "egress": [],
        },
    }


def _tcp(port: str) -> Object:
    return {"protocol": "TCP", "port": PORTS[port]}


def coordinator_service(scope: Scope) -> Object:
    """DNS name of the coordinator, published also while it is not ready, so that a busy coordinator stays reachable."""
    return _service(scope, Role.COORDINATOR, "http", PORTS["http"], {})


def trainer_service(scope: Scope) -> Object:
    """DNS names of the trainer's pods, published before they are ready, for the ranks to connect."""
    return _service(scope, Role.TRAINER, MASTER_PORT, MASTER_PORT_NUMBER, {"clusterIP": "None"})


def environment_service(scope: Scope) -> Object:
    """DNS name of the environment servers that are ready, with the address of each: a session is a connection, for which an actor takes
    one address after the other, so that replicas have equally many."""
    port = str(Role.ENVIRONMENT)
    made = _service(scope, Role.ENVIRONMENT, port, scope.port(port), {"clusterIP": "None"})
    made["spec"]["publishNotReadyAddresses"] = False
    return made


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
