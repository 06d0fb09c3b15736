"""Deployments of roles whose replicas come and go: generators and environment servers.

Replicas beyond those of a gang are in a Deployment of their own, whose pods Kueue queues one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from scalerl_api.process import COMPILE_CACHE
from scalerl_lifecycle.workloads import ADDRESS, Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.coordinator import leave_soon
from scalerl_operator.manifests.pods import pod_template
from scalerl_operator.manifests.scope import PodSettings, Scope
from scalerl_operator.names import COMPILE_CACHE_DIR

START_SECONDS: Final = 2100
"""Longer than the startup probe, before whose end a Deployment without progress may only be slow."""
GENERATOR_GRACE_SECONDS: Final = 60
"""For the actor to return its leases."""
ENVIRONMENT_GRACE_SECONDS: Final = 30
"""Sessions have nothing to save."""


def beside_gang(scope: Scope, role: Role, make: Callable[[Scope, bool], Object]) -> list[Object]:
    """One Deployment of the role, or with a gang of fewer replicas, two. make: takes whether its pods are beyond the gang's."""
    return [make(scope, extra) for extra in (False, True) if _replicas(scope, role, extra)]


def _replicas(scope: Scope, role: Role, extra: bool) -> int:
    wanted, gang = scope.plan.workload(role).replicas, scope.desired.gang
    first = wanted if gang is None else min(wanted, gang.replicas(role))
    return wanted - first if extra else first


def deployment(scope: Scope, settings: PodSettings, name: str, *, extra: bool, in_place: bool) -> Object:
    """extra: its pods are beyond the run's gang. in_place: an update deletes a pod before it creates another, as there may be no room
    for both; otherwise the reverse."""
    label = {names.EXTRA: "true"} if extra else {}
    settings = replace(settings, labels=label, extra_pod=extra)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": scope.workload_metadata(name, settings.role),
        "spec": {
            "replicas": _replicas(scope, settings.role, extra),
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": int(not in_place), "maxUnavailable": int(in_place)},
            },
            "progressDeadlineSeconds": START_SECONDS,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(scope.uid, settings.role) | label},
            "template": pod_template(scope, settings),
        },
    }


def generators(scope: Scope, extra: bool = False) -> Object:
    """vLLM and its actor in each pod."""
    settings = PodSettings(
        role=Role.GENERATOR,
        grace_seconds=GENERATOR_GRACE_SECONDS,
        # Otherwise vLLM derives its address from the route to the internet.
        extra={"server": {"VLLM_HOST_IP": f"$({ADDRESS})"} | _compile_cache(scope)},
        metrics_port="control",
    )
    name = scope.names.extra_generators if extra else scope.names.generator
    in_place = bool(scope.spec.generator.devices or scope.queue_labels)
    return deployment(scope, settings, name, extra=extra, in_place=in_place)


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


def environment_servers(scope: Scope, extra: bool = False) -> Object:
    """The user's image, which only the run's generators reach (:mod:`.network`).

    A session is a connection to one replica, and a cache: the episodes of a lost one are played again on another. So there is no
    PodDisruptionBudget, and an update replaces one pod at a time.
    """
    settings = PodSettings(role=Role.ENVIRONMENT, grace_seconds=ENVIRONMENT_GRACE_SECONDS)
    name = scope.names.extra_environments if extra else scope.names.environment
    made = deployment(scope, settings, name, extra=extra, in_place=bool(scope.queue_labels))
    leave_soon(made["spec"]["template"])
    return made
