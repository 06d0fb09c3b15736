"""Phases and condition types of a run on a cluster; the reasons are in :mod:`.reasons`.

``docs/operations.md`` lists exactly these. If a condition is False only because of the phase of the run, its reason is the
phase. The message of a condition has the details (which field, which pod, which object).
"""

from __future__ import annotations

from typing import Final

from scalerl_api.reasons import Explained


class Phase(Explained):
    """Summary of the run's state."""

    PENDING = "Pending", "The run waits for its queue, a valid spec or its claim; nothing is started."
    PREPARING = "Preparing", "The preparation writes model, tokenizer and task to the volume."
    RUNNING = "Running", "The run is training or about to start training."
    FINISHING = "Finishing", "Training has ended; the last evaluation and checkpoint are in progress."
    SUSPENDING = "Suspending", "The run is writing a checkpoint and releasing its devices."
    SUSPENDED = (
        "Suspended",
        "Nothing is running, and the checkpoint stays; the condition Suspended has the reason, and how to continue.",
    )
    COMPLETED = (
        "Completed",
        "The run has finished; its results are on the volume. It continues when its budget is raised.",
    )
    FAILED = (
        "Failed",
        "The run has failed; the condition Failed has the reason. It continues when its spec is fixed.",
    )


class ConditionType(Explained):
    """Condition types. ``text`` is the meaning of ``True``; ``todo`` is the action to take on ``False``, or, for Degraded,
    Suspended and Failed, on ``True``."""

    ACCEPTED = (
        "Accepted",
        "The spec is valid, and all objects that it references exist.",
        "Fix what the message names, in the spec or in the namespace. A run that was accepted before continues with its "
        "previous spec, and only `suspend` of the new one takes effect; for other runs, nothing is created.",
    )
    ADMITTED = (
        "Admitted",
        "Kueue has admitted the run, or the run has no queue.",
        "Wait, or check the quota of the queue. If the cluster has no Kueue, remove the queue label from the run.",
    )
    PREPARED = (
        "Prepared",
        "Model, tokenizer and task are on the volume.",
        "Wait if the reason is Preparing. Otherwise the reason states why the pod does not start or why the last attempt "
        "failed.",
    )
    COORDINATOR_READY = (
        "CoordinatorReady",
        "The coordinator responds and assigns work.",
        "The other roles wait for it and lose nothing. Check the log of its pod, and whether NetworkPolicies block the "
        "operator.",
    )
    GENERATORS_READY = (
        "GeneratorsReady",
        "All requested generators hold weights and generate.",
        "The run continues with the ready generators. The reason states what the others need: capacity, an image, memory.",
    )
    TRAINER_READY = (
        "TrainerReady",
        "All ranks of the trainer are running.",
        "The message quotes the last log line of the failed rank. The next attempt starts automatically, with back-off.",
    )
    PROGRESSING = (
        "Progressing",
        "The run completes training steps.",
        "Check the three conditions above; the message states what the coordinator waits for.",
    )
    FORECAST_READY = (
        "ForecastReady",
        "There is a forecast for the latest points of the curve.",
        "The run continues without forecast-based stops; generators are still balanced. Wait for more points, or check "
        "the curve-fit sidecar.",
    )
    DEGRADED = (
        "Degraded",
        "The run continues with a problem, which the message describes.",
        "Fix the cause soon: it does not end the run, but may get worse. The condition clears when the problem is "
        "resolved.",
    )
    TRAINING_HEALTHY = (
        "TrainingHealthy",
        "The figures of the last steps show nothing wrong.",
        "The message says what is wrong first, as `scalerl status` does. The run continues; what each rule means: Health of a run.",
    )
    SUSPENDED = (
        "Suspended",
        "Nothing of the run is running, and its checkpoint is written.",
        "Suspended by its spec or its forecast: set spec.suspend to false to continue from the checkpoint. Held after a failure: "
        "fix the spec, or set spec.suspend to true and then to false to try again.",
    )
    COMPLETED = (
        "Completed",
        "The run has finished.",
        "Nothing: False means that the run is active, suspended or failed.",
    )
    FAILED = (
        "Failed",
        "The run has failed.",
        "The message has the error. Fix the spec, and the run continues, from its checkpoint if it has one. If the cause was "
        "not in the spec, set spec.suspend to true and then to false.",
    )


BY_IMPORTANCE: Final = (
    (ConditionType.ACCEPTED, "False"),
    (ConditionType.ADMITTED, "False"),
    (ConditionType.DEGRADED, "True"),
    (ConditionType.PREPARED, "False"),
    (ConditionType.COORDINATOR_READY, "False"),
    (ConditionType.TRAINER_READY, "False"),
    (ConditionType.GENERATORS_READY, "False"),
    (ConditionType.PROGRESSING, "False"),
)
"""Conditions whose reason explains the state of a run, with the status that does; the first one that applies is shown."""
