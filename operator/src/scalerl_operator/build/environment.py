"""Environment servers: a Deployment of the user's image, which only the run's generators reach (:mod:`.network`).

A session is a connection to one replica, and a cache: the episodes of a lost one are played again on another. So there is no
PodDisruptionBudget, and an update replaces one pod at a time.
"""

from __future__ import annotations

from typing import Final

from scalerl_operator import names
from scalerl_operator.build.coordinator import leave_soon
from scalerl_operator.build.pod_settings import PodSettings
from scalerl_operator.build.pods import pod_template
from scalerl_operator.build.scope import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Role

GRACE_SECONDS: Final = 30
"""Sessions have nothing to save."""
START_SECONDS: Final = 2100
"""Longer than the startup probe, before whose end a Deployment without progress may only be slow."""


def deployments(scope: Scope) -> list[Object]:
    """Servers beyond those of a gang are in a Deployment of their own, as generators are."""
    replicas, gang = scope.workload(Role.ENVIRONMENT).replicas, scope.desired.gang
    first = replicas if gang is None else min(replicas, gang.environments)
    made = [deployment(scope, first)] if first else []
    if replicas > first:
        made.append(deployment(scope, replicas - first, extra=True))
    return made


def deployment(scope: Scope, replicas: int, *, extra: bool = False) -> Object:
    label = {names.EXTRA: "true"} if extra else {}
    settings = PodSettings(role=Role.ENVIRONMENT, grace_seconds=GRACE_SECONDS, labels=label, extra_pod=extra)
    template = pod_template(scope, settings)
    leave_soon(template)
    in_place = bool(scope.queue_labels)
    name = scope.names.extra_environments if extra else scope.names.environment
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": scope.workload_metadata(name, Role.ENVIRONMENT),
        "spec": {
            "replicas": replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": int(not in_place), "maxUnavailable": int(in_place)},
            },
            "progressDeadlineSeconds": START_SECONDS,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(scope.uid, Role.ENVIRONMENT) | label},
            "template": template,
        },
    }
