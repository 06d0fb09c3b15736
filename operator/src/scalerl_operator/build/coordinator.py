"""The coordinator: a StatefulSet of one pod, so that no two pods write its journal.

It has no PodDisruptionBudget, which for one pod forbids every eviction, so that its node cannot be drained, or none. The
coordinator restarts from its journal; actors and trainer retry until it responds.
"""

from __future__ import annotations

from typing import Final

from scalerl_operator import names
from scalerl_operator.build.pods import NEVER_EVICT, PodSettings, pod_template
from scalerl_operator.build.scope import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Role

GRACE_SECONDS: Final = 30
"""For responses to long polls and the end of the journal."""


def stateful_set(scope: Scope) -> Object:
    settings = PodSettings(
        role=Role.COORDINATOR,
        grace_seconds=GRACE_SECONDS,
        name=scope.workload(Role.COORDINATOR).replica_name(0),
        metrics_port="http",
        annotations=NEVER_EVICT,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": scope.workload_metadata(scope.names.coordinator, Role.COORDINATOR),
        "spec": {
            "replicas": 1,
            "serviceName": scope.names.coordinator,
            # With OrderedReady, a corrected template does not replace a pod that never becomes ready.
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(scope.uid, Role.COORDINATOR)},
            "template": pod_template(scope, settings),
        },
    }
