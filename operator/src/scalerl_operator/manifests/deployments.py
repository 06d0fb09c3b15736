"""Deployments of roles whose replicas come and go: generators and environment servers.

Replicas beyond those of a gang are in a Deployment of their own, whose pods Kueue queues one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from scalerl_lifecycle.workloads import Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.pod_settings import PodSettings
from scalerl_operator.manifests.pods import pod_template
from scalerl_operator.manifests.scope import Scope

START_SECONDS: Final = 2100
"""Longer than the startup probe, before whose end a Deployment without progress may only be slow."""


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
