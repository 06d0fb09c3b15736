"""The trainer: an Indexed Job per attempt, with a pod per node.

For NCCL a pod is a host: only ranks of one pod use NVLink and ``/dev/shm``. A pod with several ranks starts them with
``scalerl_trainer.launch``, and has the exit code of the rank that failed first.

One failed rank fails the Job and ends all ranks; the operator creates the next attempt as another Job. An evicted rank gets
SIGTERM and notifies the others at the next step; all write a checkpoint and exit with 0. With ``podReplacementPolicy: Failed``
the Job waits for the exit of the evicted pod, and completes. If that takes too long, the Job's failure policy records the
disruption, since the pod is gone by then.

A pod on a lost node does not end, so the Job does not either. The operator then deletes the Job, and creates the next attempt when only
such pods are left: the attempt's number, in its environment, fences the earlier one out (:mod:`scalerl_trainer.fence`).

There is no PodDisruptionBudget: for pods of a Job it can only forbid every eviction or none. Annotations keep node autoscalers
from evicting the pods; a node drain ends the attempt with a checkpoint, and the next one starts on another node.
"""

from __future__ import annotations

from typing import Final

from scalerl_api.attempts import Attempt
from scalerl_api.process import ATTEMPT
from scalerl_lifecycle.workloads import Role, Workload
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.environment_variables import from_field, variable
from scalerl_operator.manifests.pod_settings import PodSettings
from scalerl_operator.manifests.pods import NEVER_EVICT, pod_template
from scalerl_operator.manifests.scope import Scope, spec_hash
from scalerl_operator.names import MASTER_PORT_NUMBER

GRACE_SECONDS: Final = 300
"""For the end of a step, and a checkpoint."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def job(scope: Scope, attempt: int) -> Object:
    """The Job of one attempt, without ``suspend``, which Kueue owns."""
    workload = scope.plan.workload(Role.TRAINER)
    nodes = workload.replicas // workload.per_node
    label = {names.ATTEMPT: str(attempt)}
    settings = PodSettings(
        role=Role.TRAINER,
        grace_seconds=GRACE_SECONDS,
        # The launcher names each of its ranks.
        name="trainer-$(RANK)" if workload.per_node == 1 else None,
        variables=[
            *_position(workload),
            variable(ATTEMPT, str(Attempt(scope.created, attempt))),
            variable("MASTER_ADDR", scope.names.master(scope.namespace, attempt)),
            variable("MASTER_PORT", str(MASTER_PORT_NUMBER)),
        ],
        metrics_port="http",
        labels=label,
        annotations=NEVER_EVICT,
        pod={"restartPolicy": "Never", "subdomain": scope.names.trainer},
    )
    metadata = scope.workload_metadata(scope.names.trainer_job(attempt), Role.TRAINER)
    metadata["labels"] |= label
    metadata["annotations"][names.SPEC_HASH] = spec_hash(scope.run, Role.TRAINER)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
            "template": pod_template(scope, settings),
        },
    }


def _position(workload: Workload) -> list[Object]:
    """Environment with the rank of a pod, or with its node if the launcher numbers the ranks."""
    world = variable("WORLD_SIZE", str(workload.replicas))
    if workload.per_node == 1:
        return [from_field("RANK", _INDEX), world, variable("LOCAL_RANK", "0")]
    return [from_field("NODE_RANK", _INDEX), world, variable("LOCAL_WORLD_SIZE", str(workload.per_node))]
