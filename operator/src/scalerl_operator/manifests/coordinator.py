"""The coordinator: a StatefulSet of one pod, so that no two pods write its journal.

It has no PodDisruptionBudget, which for one pod forbids every eviction, so that its node cannot be drained, or none. The
coordinator restarts from its journal; actors and trainer retry until it responds.

A StatefulSet does not replace a pod on a lost node, which may still run. The operator gives the next one a greater number, which fences the
earlier one out (:mod:`scalerl_coordinator.fence`), and then deletes that pod by force.
"""

from __future__ import annotations

from typing import Final

from scalerl_api.attempts import Attempt
from scalerl_api.process import ATTEMPT, POD
from scalerl_lifecycle.workloads import Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.container_fields import from_field, variable
from scalerl_operator.manifests.pods import NEVER_EVICT, pod_template
from scalerl_operator.manifests.scope import PodSettings, Scope

GRACE_SECONDS: Final = 30
"""For responses to long polls and the end of the journal."""
TOLERATED_SECONDS: Final = 60
"""Until Kubernetes evicts the pod from a node that does not answer; its default of 300 is as long as a trainer waits for a coordinator."""
_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def stateful_set(scope: Scope) -> Object:
    attempt = scope.desired.coordinator_attempt
    settings = PodSettings(
        role=Role.COORDINATOR,
        grace_seconds=GRACE_SECONDS,
        name=scope.plan.workload(Role.COORDINATOR).replica_name(0),
        variables=[
            variable(ATTEMPT, str(Attempt(scope.created, attempt))),
            from_field(POD, "metadata.uid"),
        ],
        metrics_port="http",
        labels={names.ATTEMPT: str(attempt)},
        annotations=NEVER_EVICT,
    )
    template = pod_template(scope, settings)
    leave_soon(template)
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
            "template": template,
        },
    }


def leave_soon(template: Object) -> None:
    """Has Kubernetes evict the pods after :data:`TOLERATED_SECONDS`, unless the podTemplate says when."""
    given = template["spec"].get("tolerations", [])
    # One without a key tolerates every taint, and one without an effect all effects.
    keys = {one.get("key") for one in given if one.get("effect") in ("NoExecute", "", None)}
    template["spec"]["tolerations"] = [
        *given,
        *(_toleration(key) for key in _TAINTS if keys.isdisjoint((key, None, ""))),
    ]


def _toleration(key: str) -> Object:
    return {
        "key": key,
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": TOLERATED_SECONDS,
    }
