"""Generators: a Deployment with vLLM and its actor in each pod, and its PodDisruptionBudget."""

from __future__ import annotations

from typing import Final

from scalerl_api.process import COMPILE_CACHE
from scalerl_lifecycle.workloads import ADDRESS, Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.deployments import deployment
from scalerl_operator.manifests.pod_settings import PodSettings
from scalerl_operator.manifests.scope import Scope
from scalerl_operator.names import COMPILE_CACHE_DIR

GRACE_SECONDS: Final = 60
"""For the actor to return its leases."""


def generators(scope: Scope, extra: bool = False) -> Object:
    settings = PodSettings(
        role=Role.GENERATOR,
        grace_seconds=GRACE_SECONDS,
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
