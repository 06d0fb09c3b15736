"""The trainer: an Indexed Job a start of the gang, with a pod per node.

NCCL takes a pod for a host: only ranks of one pod use NVLink and ``/dev/shm``. A pod with several ranks starts them with
``scalerl_trainer.launch`` and exits as the rank that failed first; a pod with one rank is that rank.

One rank that fails ends the Job, and with it all ranks; the next start is another Job, made when the failure policy
says so. A rank that is evicted gets SIGTERM, tells the others at the next step, and all leave with a checkpoint and
exit code 0: with ``podReplacementPolicy: Failed`` the Job waits for how the evicted one ends instead of counting it as
failed at once, and is complete. Where that takes too long, the Job's failure policy notes for us that the rank lost its
place: the pod, which would say so, is gone with that.

There is no PodDisruptionBudget: of pods of a Job the API server can only keep a fixed number up, which either forbids
every eviction or none. Autoscalers of nodes are asked to leave the pods alone; a person who drains a node ends the
attempt in order, and the next one starts elsewhere.
"""

from __future__ import annotations

from typing import Final

from scalerl_operator import names
from scalerl_operator.names import MASTER_PORT_NUMBER
from scalerl_operator.build.pods import NEVER_EVICT, PodSettings, from_field, pod_template, variable
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube.types import Object
from scalerl_operator.workloads import Role, Workload

GRACE_SECONDS: Final = 300
"""The rest of a step, and a checkpoint."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def job(scope: Scope, attempt: int) -> Object:
    """Start ``attempt`` of the gang. ``suspend`` is never said: that field is Kueue's where there is one."""
    workload = scope.workload(Role.TRAINER)
    nodes = workload.replicas // workload.per_node
    label = {names.ATTEMPT: str(attempt)}
    settings = PodSettings(
        role=Role.TRAINER,
        image=scope.spec.images.trainer or scope.images.trainer,
        grace_seconds=GRACE_SECONDS,
        # The launcher names each of its ranks.
        name="trainer-$(RANK)" if workload.per_node == 1 else None,
        variables=[
            *_position(workload),
            variable("MASTER_ADDR", scope.names.master(scope.namespace, attempt)),
            variable("MASTER_PORT", str(MASTER_PORT_NUMBER)),
        ],
        metrics_port="http",
        labels=label,
        annotations=NEVER_EVICT,
        pod={"restartPolicy": "Never", "subdomain": scope.names.trainer},
    )
    metadata = scope.metadata(scope.names.trainer_job(attempt), Role.TRAINER)
    metadata["labels"] |= label | scope.queue_labels
    metadata["annotations"][names.IMAGE] = scope.images.trainer
    metadata["annotations"][names.SPEC_HASH] = scope.spec_hash(Role.TRAINER)
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
    """Which rank a pod is, or which node where its launcher numbers the ranks."""
    world = variable("WORLD_SIZE", str(workload.replicas))
    if workload.per_node == 1:
        return [from_field("RANK", _INDEX), world, variable("LOCAL_RANK", "0")]
    return [from_field("NODE_RANK", _INDEX), world, variable("LOCAL_WORLD_SIZE", str(workload.per_node))]
