"""Condition types of a run on a cluster, and the reasons they carry, each with what a person can do about it.

``docs/operations.md`` lists exactly these. A reason never changes its meaning; the message beside it has the
particulars (which field, which pod, which object).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

NOTHING_TO_DO: Final = "Nothing to do."


class _Explained(StrEnum):
    """A constant and one line about it, ``.text``; of some also what to do, ``.todo``."""

    text: str
    todo: str

    def __new__(cls, value: str, text: str = "", todo: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text, member.todo = text, todo
        return member


class Phase(_Explained):
    """One word for where a run stands."""

    PENDING = "Pending", "Nothing runs: the run waits in its queue, or for its spec to be usable."
    PREPARING = "Preparing", "Model, tokenizer and task are being made ready on the volume."
    RUNNING = "Running", "The trainer trains, or is about to."
    FINISHING = "Finishing", "The run has reached its end; the last evaluation and checkpoint are under way."
    SUSPENDING = "Suspending", "The run writes its checkpoint and lets its devices go."
    SUSPENDED = "Suspended", "Nothing runs; setting spec.suspend to false goes on from the checkpoint."
    COMPLETED = "Completed", "Ended as its spec says; what is kept lies on the volume."
    FAILED = "Failed", "Given up; the condition Failed says why."


class ConditionType(_Explained):
    """What is said about a run. ``text`` says what ``True`` means, ``todo`` what to do where it is not as one would have
    it: ``False``, and ``True`` of the last five but ``Completed``."""

    ACCEPTED = (
        "Accepted",
        "The spec can be run, and everything it names was found.",
        "Correct what the message names, in the spec or in the namespace. A run that was accepted before goes on with the spec "
        "that it had, and heeds `suspend` alone; of another, nothing is made.",
    )
    ADMITTED = (
        "Admitted",
        "Kueue lets the run have its devices; always so without a queue.",
        "Wait, or see the queue's quota; without Kueue in the cluster, take the queue's label off the run.",
    )
    PREPARED = (
        "Prepared",
        "Model, tokenizer and task are on the volume.",
        "Wait, if the reason is Preparing; else it says why the pod does not start, or what its last try ended with.",
    )
    COORDINATOR_READY = (
        "CoordinatorReady",
        "The coordinator answers and hands out work.",
        "The others wait for it and lose nothing. See its pod's log, and whether the operator reaches it (NetworkPolicies).",
    )
    GENERATORS_READY = (
        "GeneratorsReady",
        "All generators wanted hold weights and work.",
        "The run goes on with those that do. The reason says what the others lack: room, an image, memory.",
    )
    TRAINER_READY = (
        "TrainerReady",
        "All ranks of the trainer are up.",
        "The message has the last words of the rank that failed; the next attempt comes by itself, a while later each time.",
    )
    PROGRESSING = (
        "Progressing",
        "Steps are being trained.",
        "Look at the three conditions above; the message has what the coordinator waits for.",
    )
    FORECAST_READY = (
        "ForecastReady",
        "The newest points of the curve have a forecast.",
        "The run goes on, nothing is stopped by its forecast, and generators are balanced. Wait for points, or see to the "
        "curve-fit service.",
    )
    DEGRADED = (
        "Degraded",
        "The run goes on, but not as it should; the message says what is wrong.",
        "See to the reason soon: the run does not end by it, but may get worse. It clears by itself once it is over.",
    )
    SUSPENDED = (
        "Suspended",
        "Nothing of the run is running, and its checkpoint is written.",
        "Set spec.suspend to false to go on from there.",
    )
    COMPLETED = (
        "Completed",
        "The run has ended as its spec says.",
        "Nothing: False says that it is under way, or Suspended, or Failed.",
    )
    FAILED = (
        "Failed",
        "The run has been given up.",
        "The message has the last words. Mend the cause and create the run anew; with its claim in spec.storage.claimName it "
        "goes on from its checkpoint.",
    )


RENAMED: Final = {
    "AsExpected": "Healthy",
    "GoingOn": "StopCancelled",
    "NoSteps": "Stalled",
    "RestartsExhausted": "BackoffLimitExceeded",
    "SomeReady": "PartiallyReady",
}
"""Reasons of the release before, and what they are called now."""


class Reason(_Explained):
    """Why a condition is as it is. ``text`` says what to do."""

    @classmethod
    def read(cls, word: str) -> Reason:
        """The reason that a status has, also by its name of the release before; one of a later release is ``OtherRelease``."""
        word = RENAMED.get(word, word)
        return cls(word) if word in cls._value2member_map_ else cls.OTHER_RELEASE

    @classmethod
    def understood(cls, word: str, message: str) -> tuple[Reason, str]:
        """Reason and message of a condition that may be from a later release: it keeps its word in the message."""
        reason = cls.read(word)
        unknown = reason is cls.OTHER_RELEASE and word != reason
        return reason, f"{word}: {message}" if unknown else message

    # any
    OTHER_RELEASE = (
        "OtherRelease",
        "An operator of a later release said so before it was rolled back; the message begins with its reason.",
    )

    # Accepted
    ACCEPTED = "Accepted", NOTHING_TO_DO
    ACCEPTED_WITH_WARNINGS = (
        "AcceptedWithWarnings",
        "The run goes on. The message names fields that are seldom meant so, each with what to do; `scalerl validate` prints "
        "the same.",
    )
    SPEC_INVALID = (
        "SpecInvalid",
        "Change the field that the message names; until then nothing of the change is acted upon.",
    )
    DEADLINE_PASSED = (
        "DeadlinePassed",
        "spec.autoscaling.deadline was over when the run was created: set a later time, or leave it out.",
    )
    CLAIM_NOT_FOUND = (
        "ClaimNotFound",
        "Create the claim that spec.storage.claimName, or a volume of a podTemplate, names; or name another.",
    )
    CLAIM_TAKEN = (
        "ClaimTaken",
        "A claim of that name holds another run's data. To go on with it, name it in spec.storage.claimName of a new "
        "run; else delete it, or choose another name for the run.",
    )
    CLAIM_LOST = (
        "ClaimLost",
        "The run is held. Restore its claim from its volume, a snapshot or a backup, or give the steps up: "
        "docs/operations.md, A claim that was deleted.",
    )
    CLAIM_NOT_ENLARGED = (
        "ClaimNotEnlarged",
        "The claim keeps its size, and the run goes on. Set allowVolumeExpansion: true in its StorageClass, if its storage "
        "can; it is tried again every five minutes. Else set spec.storage.size back.",
    )
    CLAIM_DELETED = (
        "ClaimDeleted",
        "Do not suspend the run, nor let it end, before its volume is kept: docs/operations.md, A claim that was deleted.",
    )
    STORAGE_CLASS_NOT_FOUND = (
        "StorageClassNotFound",
        "Name a StorageClass that `kubectl get storageclass` lists, or leave out spec.storage.storageClassName.",
    )
    SECRET_NOT_FOUND = "SecretNotFound", "Create the Secret that the message names, in the run's namespace."
    CONFIG_MAP_NOT_FOUND = (
        "ConfigMapNotFound",
        "Create the ConfigMap that the message names, in the run's namespace.",
    )
    PRIORITY_CLASS_NOT_FOUND = "PriorityClassNotFound", "Name a PriorityClass that the cluster has."
    RUNTIME_CLASS_NOT_FOUND = (
        "RuntimeClassNotFound",
        "Name a RuntimeClass that the cluster has, and whose handler its nodes have.",
    )
    NAME_TAKEN = (
        "NameTaken",
        "An object that the run needs exists and is not this run's: rename or delete it, or rename the run.",
    )
    OBJECT_REFUSED = (
        "ObjectRefused",
        "The API server refused an object of the run; the message is its own. Often a podTemplate that is not "
        "valid, or a policy of the namespace.",
    )
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        "Ask for less, or have the namespace's ResourceQuota raised; the run goes on by itself then.",
    )
    FORBIDDEN = "Forbidden", "Give the operator the permission that the message names; see the chart's RBAC."

    # Admitted
    NO_QUEUE = "NoQueue", "Nothing to do: the run has no queue label."
    WAITING_FOR_QUOTA = (
        "WaitingForQuota",
        "Wait for Kueue, or see `kubectl describe workload` for what is short.",
    )
    QUEUE_NOT_FOUND = (
        "QueueNotFound",
        "The namespace has no LocalQueue of that name, or the cluster no Kueue. With Kueue the run waits for ever; without, it "
        "begins at once, past every quota. Create the queue, or take the label kueue.x-k8s.io/queue-name off the run.",
    )
    QUEUE_ADMITTED = "QueueAdmitted", NOTHING_TO_DO

    # pods of any role
    NOT_STARTED = "NotStarted", "Wait: the run is not accepted, admitted and prepared yet."
    RUN_SUSPENDED = "RunSuspended", "Nothing to do: the run is suspended, and so has no pods."
    RUN_COMPLETED = "RunCompleted", "Nothing to do: the run has completed."
    RUN_FAILED = "RunFailed", "The run has failed: the condition Failed says why."
    STARTING = "Starting", "Wait; a first start loads images, weights and compiled kernels."
    READY = "Ready", NOTHING_TO_DO
    PARTIALLY_READY = (
        "PartiallyReady",
        "The run continues with those that are ready; the message says what the others lack.",
    )
    BACK_OFF = "BackOff", "It failed and is started again shortly; the message has its last words."
    UNSCHEDULABLE = (
        "Unschedulable",
        "No node has room: the message is the scheduler's. Ask for less, add nodes, or check spec.deviceResource, "
        "nodeSelector and tolerations.",
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        "Check spec.images (or the chart's images) for typing errors, and podTemplate.imagePullSecrets.",
    )
    CONTAINER_CONFIG_INVALID = (
        "ContainerConfigInvalid",
        "A Secret, ConfigMap or key that a podTemplate refers to is missing: create it, or change the template.",
    )
    CONTAINER_START_FAILED = (
        "ContainerStartFailed",
        "The node has the image and cannot start its program: the message is the container runtime's. Check that spec.images "
        "names the image of that role, built for the node's architecture.",
    )
    VOLUME_NOT_WRITABLE = (
        "VolumeNotWritable",
        "The coordinator cannot write its journal: a full disk, a quota, or a volume that has become read-only; the message "
        "says which. Make room or enlarge the volume. The run goes on by itself then, and has lost nothing.",
    )
    VOLUME_NOT_READY = (
        "VolumeNotReady",
        "A volume is not bound or cannot be mounted: see the claim's events; the storage class must offer "
        "spec.storage.accessMode.",
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        "Raise podTemplate.resources.limits.memory of the role, or lower what it holds: microBatchTokens, kvCache, "
        "maxConcurrentSequences.",
    )
    EVICTED = "Evicted", "The node took the pod's place away; it is started elsewhere."
    REFUSED_BY_NODE = (
        "RefusedByNode",
        "The node that was to start the pod did not: a device plug-in that restarts, room that another took. It is tried "
        "again for as long as it takes, less and less often; if it goes on, see to that node.",
    )
    SANDBOX_FAILED = (
        "SandboxFailed",
        "The node cannot make room for the pod's containers, mostly because of its network plug-in: see the message, and to "
        "that node.",
    )

    # Prepared
    PREPARING = (
        "Preparing",
        "Wait; the message says where the model comes from, and the pod's log how far it is.",
    )
    PREPARED = "Prepared", NOTHING_TO_DO
    PREPARE_FAILED = (
        "PrepareFailed",
        "The message is the last of its log. Correct the spec and create the run anew.",
    )

    # Progressing
    STEPS_TRAINED = "StepsTrained", NOTHING_TO_DO
    STALLED = (
        "Stalled",
        "No step ended for long: look at CoordinatorReady, GeneratorsReady and TrainerReady, then at the logs.",
    )
    COORDINATOR_UNREACHABLE = (
        "CoordinatorUnreachable",
        "The operator cannot reach the coordinator: check NetworkPolicies between the two namespaces.",
    )
    COORDINATOR_REFUSED = (
        "CoordinatorRefused",
        "The coordinator is reached and does not listen; the message has its words. Another wire version: see Upgrade. A wrong "
        "token: somebody changed the run's Secret, which its pods read when they start; put it back, or delete them.",
    )
    TRAINER_NOT_READY = (
        "TrainerNotReady",
        "No step is trained while ranks of the trainer are missing: TrainerReady says what they lack.",
    )
    NOT_RUNNING = "NotRunning", "Nothing to do: the run is not meant to train now."

    # ForecastReady
    FORECASTING = "Forecasting", NOTHING_TO_DO
    AUTOSCALING_OFF = "AutoscalingOff", "Set spec.autoscaling.mode to Advisory or Auto for forecasts."
    TOO_FEW_POINTS = (
        "TooFewPoints",
        "Wait for more evaluations, or evaluate more often (evaluation.everySteps).",
    )
    NO_FIT = "NoFit", "The points do not follow a curve yet; docs/autoscaling.md says what each answer means."
    SIDECAR_UNREACHABLE = (
        "SidecarUnreachable",
        "No decision is taken meanwhile. See the log of the container curvefit in the operator's pod.",
    )
    NOT_RECORDED = (
        "NotRecorded",
        "A decision could not be written to `decisions.jsonl` on the run's volume, so nothing is done about it; it is tried "
        "again. The message has the answer of the coordinator, or the line that cannot be read.",
    )
    AUTOSCALER_FAILED = (
        "AutoscalerFailed",
        "A fault of the operator's own: its log has the details. The run goes on, and no decision is taken meanwhile.",
    )
    BROKEN = (
        "Broken",
        "The curve, the truncation or the numbers went bad. See docs/autoscaling.md; the last good checkpoint is kept.",
    )

    # Degraded
    HEALTHY = "Healthy", NOTHING_TO_DO
    REPAIRED_DRIFT = (
        "RepairedDrift",
        "Someone changed an object of the run, and it was set back; change the run's spec instead.",
    )
    CHECKPOINT_FAILED = (
        "CheckpointFailed",
        "A checkpoint could not be written; the last good one stays. Look at the volume's free space and the trainer's "
        "log. It is over with the next one that is written.",
    )
    EXPORT_FAILED = (
        "ExportFailed",
        "A model could not be exported, or not copied to trainer.export.to; it is tried again, and training goes on. "
        "status.exports.problem says why. It is over with the next one that succeeds.",
    )
    TRACKER_FAILED = (
        "TrackerFailed",
        "An experiment tracker takes no steps; it is tried again, and training goes on. The message is its library's. What "
        "it lacks it gets later: nothing is lost while the run's directory is there.",
    )
    GRADING_FAILED = (
        "GradingFailed",
        "The verifier itself failed on completions, whose scores say nothing: see the logs of the actors. It is over after "
        "ten minutes without another.",
    )
    SLOTS_GIVEN_UP = (
        "SlotsGivenUp",
        "Prompts leave no room for a completion in model.contextTokens, or their groups failed again and again: their steps "
        "go on without them, and status.trouble.givenUpRollouts counts them. The coordinator's log names each and why. It "
        "is over after ten minutes without another.",
    )
    STEP_SKIPPED = (
        "StepSkipped",
        "A step's loss or gradient was not finite, or its ratios exploded: it was not applied, and training goes on. The "
        "coordinator's log names its slots, the trainer's the cause. It is over after ten minutes without another; three "
        "in a row end the attempt.",
    )
    GENERATORS_FAILING = "GeneratorsFailing", "See the logs of the generator that the message names."

    # Suspended
    SUSPENDED_BY_SPEC = "SuspendedBySpec", "Set spec.suspend to false to go on."
    SUSPENDED_BY_FORECAST = (
        "SuspendedByForecast",
        "Going on was predicted not to pay. Set spec.suspend to false to go on all the same.",
    )
    SUSPENDED_AS_BROKEN = (
        "SuspendedAsBroken",
        'The curve or the numbers went bad. See docs/autoscaling.md, "A run that is held"; setting spec.suspend to '
        "false goes on all the same.",
    )
    SUSPENDING = "Suspending", "Wait until the checkpoint is written."
    NOT_SUSPENDED = "NotSuspended", NOTHING_TO_DO

    # Completed
    BUDGET_REACHED = (
        "BudgetReached",
        "Nothing to do; to go on, create a run with a larger budget on its claim.",
    )
    STOPPED_BY_FORECAST = (
        "StoppedByForecast",
        "Going on was predicted not to pay; the decision has its reasons.",
    )
    NOT_FINISHED = "NotFinished", "Nothing to do: the run has not ended."

    # Failed
    BAD_INPUT = (
        "BadInput",
        "A role found its input wrong; the message is the last of its log. Correct the spec.",
    )
    DIVERGED = (
        "Diverged",
        "Several steps in a row were skipped, twice from the same checkpoint: lower the learning rate, or look at the data.",
    )
    BACKOFF_LIMIT_EXCEEDED = (
        "BackoffLimitExceeded",
        "The role that the message names failed too often: see its log. Raise its maxRestarts only if the cause is "
        "the cluster's.",
    )
    STARTS_FAILED = (
        "StartsFailed",
        "The role never became ready: see its log; often memory, devices or an image.",
    )

    # events alone
    STOPPING = "Stopping", "Nothing to do: the coordinator has been asked to stop, and the event says why."
    STEPS_ABANDONED = (
        "StepsAbandoned",
        "Nothing to do: the run begins again at step 0, as its annotation asks.",
    )
    STOP_CANCELLED = "StopCancelled", "Nothing to do: the request to stop was cancelled."
    AUTOSCALER = (
        "Autoscaler",
        "A decision of the autoscaler, or why none could be taken; docs/autoscaling.md says what each means.",
    )
