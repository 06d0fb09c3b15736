"""Reasons of conditions and Events of a run on a cluster, each with the recommended action. ``docs/operations.md`` lists exactly these."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

NOTHING_TO_DO: Final = "Nothing to do."


class Explained(StrEnum):
    """A constant with a description."""

    text: str
    """Description; of a reason, the recommended action."""
    todo: str
    """Recommended action of a condition type; else empty."""

    def __new__(cls, value: str, text: str = "", todo: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text, member.todo = text, todo
        return member


class Reason(Explained):
    """Reasons of conditions and Events. ``text`` is the recommended action."""

    @classmethod
    def read(cls, name: str) -> Reason:
        """The reason with this name in a status. An unknown name, from a later release, is ``OtherRelease``."""
        return cls(name) if name in cls._value2member_map_ else cls.OTHER_RELEASE

    @classmethod
    def understood(cls, name: str, message: str) -> tuple[Reason, str]:
        """Reason and message of a condition that may be from a later release, whose reason then becomes a prefix of the message."""
        reason = cls.read(name)
        unknown = reason is cls.OTHER_RELEASE and name != reason
        return reason, f"{name}: {message}" if unknown else message

    # any
    OTHER_RELEASE = (
        "OtherRelease",
        "Set by an operator of a later release before a rollback; the message starts with its reason.",
    )

    # Accepted
    ACCEPTED = "Accepted", NOTHING_TO_DO
    ACCEPTED_WITH_WARNINGS = (
        "AcceptedWithWarnings",
        "The run continues. The message lists fields with unusual values, each with a recommendation; `scalerl validate` "
        "prints the same.",
    )
    SPEC_INVALID = (
        "SpecInvalid",
        "Fix the field that the message names. Until then, no part of an edit takes effect, except suspend.",
    )
    REFERENCE_NOT_FOUND = (
        "ReferenceNotFound",
        "Create the object that the message names (a claim, StorageClass, Secret, ConfigMap or a key of it, PriorityClass, "
        "LocalQueue, or RuntimeClass, whose handler has to be installed on the nodes), install the package of a plugin that it names "
        "in the images, or name another one.",
    )
    CLAIM_LOST = (
        "ClaimLost",
        "The run is held. Restore its claim from its volume, a snapshot or a backup, or discard the steps: "
        "docs/operations.md, A claim that was deleted.",
    )
    CLAIM_DELETED = (
        "ClaimDeleted",
        "Retain the volume before the run is suspended or ends: docs/operations.md, A claim that was deleted.",
    )
    CLAIM_NOT_ENLARGED = (
        "ClaimNotEnlarged",
        "The claim keeps its size, and the run continues. If the storage supports it, set allowVolumeExpansion: true in "
        "the StorageClass; the operator retries every five minutes. Otherwise revert spec.storage.size.",
    )
    NAME_TAKEN = (
        "NameTaken",
        "An object with a name that the run needs belongs to someone else: rename the run, or delete the object. A claim has "
        "the data of another run: to continue from it, set it as spec.storage.claimName of a new run.",
    )
    OBJECT_REFUSED = (
        "ObjectRefused",
        "The API server rejected an object of the run; the message quotes it. Usual causes: an invalid podTemplate, a "
        "policy of the namespace, or a permission that the operator lacks (the RBAC templates of the chart).",
    )
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        "Request less, or have the ResourceQuota of the namespace raised; the run then continues automatically.",
    )

    # Admitted
    NO_QUEUE = "NoQueue", "Nothing to do: the run has no queue label."
    WAITING_FOR_QUOTA = (
        "WaitingForQuota",
        "Wait for Kueue, or check `kubectl describe workload` for the missing quota.",
    )
    QUEUE_ADMITTED = "QueueAdmitted", NOTHING_TO_DO

    # pods of any role
    STARTING = "Starting", "Wait; the first start pulls images, loads weights and compiles kernels."
    READY = "Ready", NOTHING_TO_DO
    PARTIALLY_READY = (
        "PartiallyReady",
        "The run continues with the ready ones; the message states what the others need.",
    )
    BACK_OFF = "BackOff", "It failed and restarts after a back-off; see the message, and the log of the pod."
    UNSCHEDULABLE = (
        "Unschedulable",
        "No node has enough capacity; the message is the scheduler's. Request less, add nodes, or check "
        "spec.deviceResource, nodeSelector and tolerations.",
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        "Check spec.images (or the images of the chart) and podTemplate.imagePullSecrets.",
    )
    CONTAINER_START_FAILED = (
        "ContainerStartFailed",
        "The node cannot start the container; the message is the node's. Usual causes: spec.images has another image than "
        "that of the role, or one for another architecture; a securityContext that the image does not allow; the node's "
        "network plug-in.",
    )
    VOLUME_NOT_WRITABLE = (
        "VolumeNotWritable",
        "The coordinator cannot write its journal: disk full, quota exceeded, or volume read-only (see the message). Free "
        "space or enlarge the volume. The run then continues without loss.",
    )
    VOLUME_NOT_READY = (
        "VolumeNotReady",
        "A volume is not bound or cannot be mounted: check the events of the claim. The StorageClass must support "
        "spec.storage.accessMode.",
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        "Raise podTemplate.resources.limits.memory of the role (generator.actorResources for an actor), or lower its memory use: microBatchTokens, kvCache, "
        "maxConcurrentSequences.",
    )
    EVICTED = "Evicted", "The node evicted the pod; it is rescheduled."
    NODE_LOST = (
        "NodeLost",
        "The pod's node does not answer. The trainer's next attempt, or the next coordinator, starts without it, where its volume "
        "can be mounted on another node.",
    )
    REFUSED_BY_NODE = (
        "RefusedByNode",
        "The kubelet rejected the pod, for example because a device plug-in restarted or capacity was taken. The operator "
        "retries without limit, with back-off. If it persists, check the node.",
    )

    # Prepared
    PREPARED = "Prepared", NOTHING_TO_DO
    PREPARE_FAILED = (
        "PrepareFailed",
        "The message quotes the end of its log. Fix the spec: the run then continues.",
    )

    # Progressing
    STALLED = (
        "Stalled",
        "No training step completes: check CoordinatorReady, GeneratorsReady and TrainerReady, then the logs.",
    )
    COORDINATOR_UNREACHABLE = (
        "CoordinatorUnreachable",
        "The operator cannot reach the coordinator: check the NetworkPolicies between the two namespaces.",
    )
    COORDINATOR_REFUSED = (
        "CoordinatorRefused",
        "The coordinator rejects the requests of the operator; the message has its HTTP code. Different wire version: see "
        "docs/operations.md, Upgrade. Wrong token: the Secret of the run was changed after its pods read it; restore it, "
        "or delete the pods.",
    )

    # ForecastReady
    AUTOSCALING_OFF = "AutoscalingOff", "Set spec.autoscaling.mode to Advisory or Auto for forecasts."
    NO_FORECAST = (
        "NoForecast",
        "The points do not determine a curve yet. Wait for more evaluations, or evaluate more often "
        "(evaluation.everySteps); docs/autoscaling.md explains each message.",
    )
    SIDECAR_UNREACHABLE = (
        "SidecarUnreachable",
        "No decisions are made meanwhile. Check the log of the container curvefit in the operator pod.",
    )
    AUTOSCALER_FAILED = (
        "AutoscalerFailed",
        "A decision could not be made or recorded, so none is executed; the operator retries, and the run continues. The "
        "message has the line of `decisions.jsonl` that cannot be read, the response of the coordinator, or an internal "
        "error, whose details are in the log of the operator.",
    )
    BROKEN = (
        "Broken",
        "The reward fell, too many completions are truncated, or a value is not finite; the last good checkpoint is kept. "
        'See docs/autoscaling.md, "A run that is held". A suspended run continues when spec.suspend is set to false.',
    )

    # Degraded
    HEALTHY = "Healthy", NOTHING_TO_DO
    REPAIRED_DRIFT = (
        "RepairedDrift",
        "An object of the run was changed and has been reverted; change the spec of the run instead.",
    )
    CHECKPOINT_FAILED = (
        "CheckpointFailed",
        "A checkpoint could not be written; the last good one is kept, and training continues. The message has the error: check the "
        "free space of the volume. The trainer retries once there is more. Clears with the next successful checkpoint.",
    )
    UNSAVED_WEIGHTS = (
        "UnsavedWeights",
        "Training has ended, and its last version is in no checkpoint; the message has the disk's error. The trainer keeps the "
        "weights in memory and retries: free space on the volume, or enlarge spec.storage.size, and the run completes. To give "
        "up the updates, delete the pod of the trainer, or suspend the run, which waits for space for half an hour first.",
    )
    UPLOAD_FAILED = (
        "UploadFailed",
        "The newest checkpoint could not be copied to checkpoint.to; the trainer retries, training and the checkpoints on the volume "
        "continue. The message has the error: check the credentials, the bucket and its quota. A new Secret takes effect with the "
        "next start of the trainer: suspend and resume the run. Clears with the next success.",
    )
    EXPORT_FAILED = (
        "ExportFailed",
        "A model could not be exported, or not copied to trainer.export.to; the trainer retries, and training continues. "
        "status.exports.problem has the reason. Clears with the next success.",
    )
    TRACKER_FAILED = (
        "TrackerFailed",
        "An experiment tracker rejects data; the coordinator retries, and training continues. The message is from the "
        "tracker library. Missing data is sent later; nothing is lost while the run directory exists.",
    )
    TEACHER_UNAVAILABLE = (
        "TeacherUnavailable",
        "The teacher of recipe.distillation gives a generator no log-probabilities. Its groups wait, since nothing is trained "
        "without them; it sends failed requests again with back-off. The message has the teacher's answer.",
    )
    REWARD_SERVICE_UNAVAILABLE = (
        "RewardServiceUnavailable",
        "The reward service of verifier.http, or the server of environment.url, gives a generator no scores. Its groups wait, since "
        "nothing is trained without them; it sends failed requests again with back-off. The message says what the service answered.",
    )
    ENVIRONMENT_FAILING = (
        "EnvironmentFailing",
        "More than half of the last 64 episodes of a generator failed in their environment. Episodes that fail wait, since what is "
        "left would be learned from, and are tried again with back-off. The message has the error; correct the environment.",
    )
    GRADING_FAILED = (
        "GradingFailed",
        "The verifier failed on completions, which have no verdict: check the actor logs. Clears after ten minutes "
        "without another failure.",
    )
    NOT_LEARNING = (
        "NotLearning",
        "For three steps or more, no completion scored above 0, or all groups were filtered: the policy does not change. The "
        "message has a reply, the answer extracted from it and the reference: compare them, then correct the verifier, the "
        "prompt or the data, or take prompts of another difficulty. Clears with a step that has a gradient.",
    )
    LOGPROBS_NOT_FINITE = (
        "LogprobsNotFinite",
        "More than 0.1 % of the latest tokens have no finite log-probability at their generator and are not trained on. Check "
        "the weights of the model for values that are not numbers, and model.dtype. If most tokens have none, the trainer ends "
        "the run as diverged.",
    )
    SLOTS_GIVEN_UP = (
        "SlotsGivenUp",
        "Prompts are too long for model.contextTokens, or their groups failed repeatedly: their steps continue without "
        "them, and status.faults.givenUpRollouts counts them. The coordinator log has each slot with the reason. Clears "
        "after ten minutes without another.",
    )
    STEP_SKIPPED = (
        "StepSkipped",
        "An update was not applied because its loss or gradient was not finite or its ratios exploded; training "
        "continues. The coordinator log has the slots, the trainer log the cause. Clears after ten minutes without "
        "another; three in a row end the attempt.",
    )
    GENERATORS_FAILING = "GeneratorsFailing", "Check the logs of the generator that the message names."

    # TrainingHealthy
    HEALTH_RULE = (
        "HealthRule",
        "The message has the first rule of docs/operations.md, Health of a run, that holds, with the figures at that step: read the "
        "rollouts, and the lines of metrics.jsonl. Clears ten steps after no rule holds any more.",
    )

    # Suspended
    SUSPENDED_BY_SPEC = "SuspendedBySpec", "Set spec.suspend to false to continue."
    EDIT_FAILED = (
        "EditFailed",
        "The run has trained, and failed to start after an edit, or within ten steps. The message has the failure and the edited "
        "fields: revert or fix them, and the run continues from its checkpoint. If the cause was elsewhere, set spec.suspend to "
        "true and then to false.",
    )

    # Completed
    BUDGET_REACHED = (
        "BudgetReached",
        "Nothing to do. To continue, raise the limit: the run goes on from its last checkpoint.",
    )
    STOPPED_BY_FORECAST = (
        "StoppedByForecast",
        "The predicted gain was not worth its cost; the decision has the reasons. A suspended run continues when "
        "spec.suspend is set to false, a completed one when its budget is raised or autoscaling.mode is no longer Auto; "
        "it takes new evaluations to stop it again.",
    )

    # Failed
    BAD_INPUT = (
        "BadInput",
        "A role rejected its input; the message quotes the end of its log. Fix the spec: the run then continues.",
    )
    DIVERGED = (
        "Diverged",
        "Three steps in a row were skipped, or most log-probabilities of a step were not numbers, twice from the same "
        "checkpoint; the message says which: lower the learning rate, or check the model's weights and the data.",
    )
    PUBLISH_REFUSED = (
        "PublishRefused",
        "Generators cannot load the weights that the trainer publishes, or compute something else with them, twice in a row; "
        "the message has the tensors or the measured mismatch, and the checkpoint has the trained weights. The run is held until "
        "its spec is edited, or suspended and resumed. See docs/operations.md, A publish that is refused.",
    )
    BACKOFF_LIMIT_EXCEEDED = (
        "BackoffLimitExceeded",
        "The role that the message names failed too often: check its log. If the cluster caused the failures, "
        "suspend the run and resume it, or raise trainer.maxRestarts.",
    )
    STARTS_FAILED = (
        "StartsFailed",
        "The role never became ready: check its log. Usual causes: memory, devices, the image.",
    )

    # only in Events
    STOPPING = (
        "Stopping",
        "Nothing to do: the operator asked the coordinator to stop; the event has the reason.",
    )
    STEPS_ABANDONED = (
        "StepsAbandoned",
        "Nothing to do: the run restarts at step 0, as requested by its annotation.",
    )
    STOP_CANCELLED = "StopCancelled", "Nothing to do: the request to stop was cancelled."
    AUTOSCALER = (
        "Autoscaler",
        "A decision of the autoscaler, or why none could be made; docs/autoscaling.md explains each.",
    )
