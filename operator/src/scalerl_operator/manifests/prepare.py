"""The preparation: a Job of one pod, with the trainer's image and the trainer's podTemplate."""

from __future__ import annotations

from typing import Final

from scalerl_api.process import BAD_INPUT_EXIT_CODE, MODEL_CACHE, REPORT_FILE
from scalerl_api.process import SOURCE_DIR as SOURCE
from scalerl_lifecycle.workloads import Role
from scalerl_operator import names
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.pod_settings import PodSettings
from scalerl_operator.manifests.pods import pod_template
from scalerl_operator.manifests.scope import Scope, spec_hash
from scalerl_operator.names import MODELS_DIR, RUN_DIR, SOURCE_DIR

GRACE_SECONDS: Final = 30
RETRIES: Final = 4
"""After failures that may be transient, such as an unreachable hub; the first after 10 s, then with doubled pauses."""
HUB_CACHE: Final = f"{RUN_DIR}/hub"
"""On the run's volume: a node's disk may be too small for a model, an interrupted download resumes, and files are linked rather
than copied. ``HF_HOME`` in ``podTemplate.env`` sets another cache, such as a shared one."""

TERMINATION_LOG: Final = "/dev/termination-log"
"""The container's termination message, by Kubernetes' default. It has the model's size, which the operator cannot read from the
volume."""


def job(scope: Scope) -> Object:
    """Retries :data:`RETRIES` times, never after bad input, and without limit after a disruption of its pod."""
    extra = {REPORT_FILE: TERMINATION_LOG}
    if scope.spec.model.hub is not None:
        extra["HF_HOME"] = HUB_CACHE
    if scope.spec.model.cache is not None:
        extra[MODEL_CACHE] = MODELS_DIR
    if scope.desired.source_claim is not None:
        extra[SOURCE] = SOURCE_DIR
    settings = PodSettings(
        role=Role.PREPARE,
        grace_seconds=GRACE_SECONDS,
        name=scope.plan.workload(Role.PREPARE).replica_name(0),
        extra={"prepare": extra},
        pod={"restartPolicy": "Never"},
    )
    metadata = scope.workload_metadata(scope.names.prepare, Role.PREPARE)
    metadata["annotations"][names.SPEC_HASH] = spec_hash(scope.run, Role.PREPARE)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": "prepare",
                            "operator": "In",
                            "values": [BAD_INPUT_EXIT_CODE],
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "completions": 1,
            "parallelism": 1,
            "template": pod_template(scope, settings),
        },
    }
