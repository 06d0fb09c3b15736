"""The coordinator: a StatefulSet of one pod, so that never two hold its journal.

It has no PodDisruptionBudget. Of one pod a budget either forbids every eviction, and a node can never be drained, or
forbids none and says nothing. It comes back from its journal; actors and trainer wait for it and try again.
"""

from __future__ import annotations

from typing import Final

from scalerl_operator import names
from scalerl_operator.build.pods import NEVER_EVICT, PodSettings, pod_template
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Role

GRACE_SECONDS: Final = 30
"""Answers to long polls, and the journal's last write."""


def stateful_set(scope: Scope) -> Object:
    settings = PodSettings(
        role=Role.COORDINATOR,
        image=scope.spec.images.coordinator or scope.images.coordinator,
        grace_seconds=GRACE_SECONDS,
        name=scope.workload(Role.COORDINATOR).replica_name(0),
        metrics_port="http",
        annotations=NEVER_EVICT,
    )
    metadata = scope.metadata(scope.names.coordinator, Role.COORDINATOR)
    metadata["labels"] |= scope.queue_labels
    metadata["annotations"][names.IMAGE] = scope.images.coordinator
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "serviceName": scope.names.coordinator,
            # In order, a pod that never gets ready would also keep a mended template from replacing it.
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.selector(scope.uid, Role.COORDINATOR)},
            "template": pod_template(scope, settings),
        },
    }
