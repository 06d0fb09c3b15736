"""Generators: a Deployment, vLLM and its actor in each pod, and how many of them may be evicted at once."""

from __future__ import annotations

from typing import Final

from scalerl_operator import names
from scalerl_operator.build.pods import PodSettings, pod_template
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import ADDRESS, Role

GRACE_SECONDS: Final = 60
"""The actor returns its leases and ends."""
START_SECONDS: Final = 2100
"""Longer than the start-up probe waits: before that, a Deployment that makes no progress is only slow."""


def deployment(scope: Scope, replicas: int) -> Object:
    """On accelerators, and in a queue, a new pod replaces one that is gone, since there may be no room for both; else it
    comes first.
    """
    in_place = bool(scope.spec.generator.devices or scope.queue_labels)
    settings = PodSettings(
        role=Role.GENERATOR,
        image=scope.spec.images.generator or scope.images.generator,
        grace_seconds=GRACE_SECONDS,
        # vLLM would else find its address by asking for a route to the internet.
        extra={"server": {"VLLM_HOST_IP": f"$({ADDRESS})"}},
        metrics_port="control",
    )
    metadata = scope.metadata(scope.names.generator, Role.GENERATOR)
    metadata["labels"] |= scope.queue_labels
    metadata["annotations"][names.IMAGE] = scope.images.generator
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": int(not in_place), "maxUnavailable": int(in_place)},
            },
            "progressDeadlineSeconds": START_SECONDS,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(scope.uid, Role.GENERATOR)},
            "template": pod_template(scope, settings),
        },
    }


def disruption_budget(scope: Scope) -> Object:
    """A drain of nodes takes a quarter of the generators at a time, rounded up: one at least, so that a drain always proceeds.

    One that is not ready counts for nothing and never holds a drain up.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": scope.metadata(scope.names.generator, Role.GENERATOR),
        "spec": {
            "maxUnavailable": "25%",
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.selector(scope.uid, Role.GENERATOR)},
        },
    }
