"""Generators: a Deployment with vLLM and its actor in each pod, and its PodDisruptionBudget."""

from __future__ import annotations

from typing import Final

from scalerl_api.process import COMPILE_CACHE
from scalerl_operator import names
from scalerl_operator.build.pod_settings import PodSettings
from scalerl_operator.build.pods import pod_template
from scalerl_operator.build.scope import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.names import COMPILE_CACHE_DIR
from scalerl_operator.workloads import ADDRESS, Role

GRACE_SECONDS: Final = 60
"""For the actor to return its leases."""
START_SECONDS: Final = 2100
"""Longer than the startup probe, before whose end a Deployment without progress may only be slow."""


def deployments(scope: Scope, replicas: int) -> list[Object]:
    """Generators beyond those of a gang are in a Deployment of their own, whose pods Kueue queues one by one."""
    if scope.desired.gang is None:
        return [deployment(scope, replicas)]
    first = min(replicas, scope.desired.gang.generators)
    made = [deployment(scope, first)]
    if replicas > first:
        made.append(deployment(scope, replicas - first, extra=True))
    return made


def deployment(scope: Scope, replicas: int, *, extra: bool = False) -> Object:
    """An update creates a pod before it deletes another; with devices or a queue the reverse, as there may be no room for both."""
    name = scope.names.extra_generators if extra else scope.names.generator
    label = {names.EXTRA: "true"} if extra else {}
    in_place = bool(scope.spec.generator.devices or scope.queue_labels)
    settings = PodSettings(
        role=Role.GENERATOR,
        grace_seconds=GRACE_SECONDS,
        # Otherwise vLLM derives its address from the route to the internet.
        extra={"server": {"VLLM_HOST_IP": f"$({ADDRESS})"} | _compile_cache(scope)},
        metrics_port="control",
        labels=label,
        extra_pod=extra,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": scope.workload_metadata(name, Role.GENERATOR),
        "spec": {
            "replicas": replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": int(not in_place), "maxUnavailable": int(in_place)},
            },
            "progressDeadlineSeconds": START_SECONDS,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(scope.uid, Role.GENERATOR) | label},
            "template": pod_template(scope, settings),
        },
    }


def _compile_cache(scope: Scope) -> dict[str, str]:
    return {} if scope.spec.generator.compile_cache is None else {COMPILE_CACHE: COMPILE_CACHE_DIR}


def disruption_budget(scope: Scope) -> Object:
    """A node drain may evict a quarter of the generators at a time, rounded up: at least one, so that it always proceeds.

    A pod that is not ready can always be evicted.
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
