"""Jobs: the preparation, of one pod with the trainer's image and podTemplate; and the trainer, an Indexed Job per attempt with a pod per
node.

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
from scalerl_api.process import ATTEMPT, BAD_INPUT_EXIT_CODE, MODEL_CACHE, REPORT_FILE
from scalerl_api.process import SOURCE_DIR as SOURCE
from scalerl_lifecycle.workloads import Role, Workload
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.container_fields import from_field, variable
from scalerl_operator.manifests.pods import NEVER_EVICT, pod_template
from scalerl_operator.manifests.scope import PodSettings, Scope, spec_hash
from scalerl_operator.names import MASTER_PORT_NUMBER, MODELS_DIR, RUN_DIR, SOURCE_DIR

TRAINER_GRACE_SECONDS: Final = 300
"""For the end of a step, and a checkpoint."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PREPARE_GRACE_SECONDS: Final = 30
RETRIES: Final = 4
"""After failures that may be transient, such as an unreachable hub; the first after 10 s, then with doubled pauses."""
HUB_CACHE: Final = f"{RUN_DIR}/hub"
"""On the run's volume: a node's disk may be too small for a model, an interrupted download resumes, and files are linked rather
than copied. ``HF_HOME`` in ``podTemplate.env`` sets another cache, such as a shared one."""
_DISRUPTED: Final = [{"type": "DisruptionTarget", "status": "True"}]
TERMINATION_LOG: Final = "/dev/termination-log"
"""The container's termination message, by Kubernetes' default. It has the model's size, which the operator cannot read from the
volume."""


def prepare_job(scope: Scope) -> Object:
    """The preparation. Retries :data:`RETRIES` times, never after bad input, and without limit after a disruption of its pod."""
    extra = {REPORT_FILE: TERMINATION_LOG}
    if scope.spec.model.hub is not None:
        extra["HF_HOME"] = HUB_CACHE
    if scope.spec.model.cache is not None:
        extra[MODEL_CACHE] = MODELS_DIR
    if scope.desired.source_claim is not None:
        extra[SOURCE] = SOURCE_DIR
    settings = PodSettings(
        role=Role.PREPARE,
        grace_seconds=PREPARE_GRACE_SECONDS,
        name=scope.plan.workload(Role.PREPARE).replica_name(0),
        extra={"prepare": extra},
        pod={"restartPolicy": "Never"},
    )
    bad_input = {"containerName": "prepare", "operator": "In", "values": [BAD_INPUT_EXIT_CODE]}
    rules: list[Object] = [
        {"action": "FailJob", "onExitCodes": bad_input},
        {"action": "Ignore", "onPodConditions": _DISRUPTED},
    ]
    return _job(scope, scope.names.prepare, settings, rules, {"backoffLimit": RETRIES}, pods=1)


def trainer_job(scope: Scope, attempt: int) -> Object:
    """The Job of one attempt, without ``suspend``, which Kueue owns."""
    workload = scope.plan.workload(Role.TRAINER)
    nodes = workload.replicas // workload.per_node
    settings = PodSettings(
        role=Role.TRAINER,
        grace_seconds=TRAINER_GRACE_SECONDS,
        # The launcher names each of its ranks.
        name="trainer-$(RANK)" if workload.per_node == 1 else None,
        variables=[
            *_position(workload),
            variable(ATTEMPT, str(Attempt(scope.created, attempt))),
            variable("MASTER_ADDR", scope.names.master(scope.namespace, attempt)),
            variable("MASTER_PORT", str(MASTER_PORT_NUMBER)),
        ],
        metrics_port="http",
        labels={names.ATTEMPT: str(attempt)},
        annotations=NEVER_EVICT,
        pod={"restartPolicy": "Never", "subdomain": scope.names.trainer},
    )
    rules: list[Object] = [{"action": "FailJob", "onPodConditions": _DISRUPTED}]
    spec = {"completionMode": "Indexed", "backoffLimit": 0, "podReplacementPolicy": "Failed"}
    return _job(scope, scope.names.trainer_job(attempt), settings, rules, spec, pods=nodes)


def _job(
    scope: Scope, name: str, settings: PodSettings, rules: list[Object], spec: Object, *, pods: int
) -> Object:
    metadata = scope.workload_metadata(name, settings.role)
    metadata["labels"] |= settings.labels
    metadata["annotations"][names.SPEC_HASH] = spec_hash(scope.run, settings.role)
    counts = {"completions": pods, "parallelism": pods, "podFailurePolicy": {"rules": rules}}
    template = {"template": pod_template(scope, settings)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec | counts | template}


def _position(workload: Workload) -> list[Object]:
    """Environment with the rank of a pod, or with its node if the launcher numbers the ranks."""
    world = variable("WORLD_SIZE", str(workload.replicas))
    if workload.per_node == 1:
        return [from_field("RANK", _INDEX), world, variable("LOCAL_RANK", "0")]
    return [from_field("NODE_RANK", _INDEX), world, variable("LOCAL_WORLD_SIZE", str(workload.per_node))]
