"""Environment servers: a Deployment of the user's image, which only the run's generators reach (:mod:`.network`).

A session is a connection to one replica, and a cache: the episodes of a lost one are played again on another. So there is no
PodDisruptionBudget, and an update replaces one pod at a time.
"""

from __future__ import annotations

from typing import Final

from scalerl_lifecycle.workloads import Role
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.coordinator import leave_soon
from scalerl_operator.manifests.deployments import deployment
from scalerl_operator.manifests.pod_settings import PodSettings
from scalerl_operator.manifests.scope import Scope

GRACE_SECONDS: Final = 30
"""Sessions have nothing to save."""


def servers(scope: Scope, extra: bool = False) -> Object:
    settings = PodSettings(role=Role.ENVIRONMENT, grace_seconds=GRACE_SECONDS)
    name = scope.names.extra_environments if extra else scope.names.environment
    made = deployment(scope, settings, name, extra=extra, in_place=bool(scope.queue_labels))
    leave_soon(made["spec"]["template"])
    return made
