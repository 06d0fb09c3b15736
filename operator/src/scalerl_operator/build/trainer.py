"""The trainer: an Indexed Job a start of the gang.

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
from scalerl_operator.workloads import Role

GRACE_SECONDS: Final = 300
"""The rest of a step, and a checkpoint."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def job(scope: Scope, attempt: int) -> Object:
    """Start ``attempt`` of the gang. ``suspend`` is never said: that field is Kueue's where there is one."""
    ranks = scope.workload(Role.TRAINER).replicas
    label = {names.ATTEMPT: str(attempt)}
    settings = PodSettings(
        role=Role.TRAINER,
        image=scope.spec.images.trainer or scope.images.trainer,
        grace_seconds=GRACE_SECONDS,
        name="trainer-$(RANK)",
        variables=[
            from_field("RANK", _INDEX),
            variable("WORLD_SIZE", str(ranks)),
            # Each rank sees its own device only, so the first it sees is the one.
            variable("LOCAL_RANK", "0"),
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
            "completions": ranks,
            "parallelism": ranks,
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
