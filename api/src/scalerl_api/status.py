"""``status`` of a run on a cluster: the state last observed by the operator, which alone writes it.

The operator can derive it again from the objects of the run, its coordinator (all decisions), and the ConfigMap ``<run>-curve``
(all points). Numbers with fractions are strings, as in the spec.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from scalerl_api.conditions import Phase as Phase
from scalerl_api.earlier_status import with_present_names
from scalerl_api.fields import Model, Unique
from scalerl_api.memory.model_size import ModelSize

Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, like ``2026-08-01T12:00:00Z``."""
Text = Annotated[str, Field(max_length=1024)]
Fraction = Annotated[str, Field(max_length=32)]
"""A number with fractions, like ``0.6123``."""

MAX_MESSAGE = 32_768
"""Maximum length of a condition's message in characters, as in Kubernetes."""
RECENT_DECISIONS = 5
MAX_ACCEPTED_SPEC = 262_144
"""Maximum length of the accepted spec in the status, in characters; a longer spec is not stored."""


class StatusModel(Model):
    """Base of all parts of the status. It ignores unknown fields, which a newer operator may have written."""

    model_config = ConfigDict(extra="ignore", strict=False)


class Condition(StatusModel):
    """One aspect of the run's state, as Kubernetes' ``metav1.Condition``."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Type of the condition; docs/operations.md lists all."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    observed_generation: Count = 0
    """Generation of the spec that the condition refers to."""
    last_transition_time: Time
    """When ``status`` last changed."""
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Machine-readable reason, stable between releases."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Human-readable details: which field, pod or object."""


class GeneratorsStatus(StatusModel):
    """The generators."""

    replicas: Count = 0
    """Number of pods."""
    ready: Count = 0
    """Number of ready pods."""


class TrainerStatus(StatusModel):
    """The trainer's Jobs, one per attempt."""

    attempt: Count = 0
    """Number of the current or last Job; 0 before the first."""
    last_recorded_attempt: Count = 0
    """The newest attempt whose end is included in the counts below."""
    restarts: Count = 0
    """Attempts that ended before the run, for any reason."""
    consecutive_failures: Count = 0
    """Failures, other than disruptions, since the last ten minutes of stable operation; after trainer.maxRestarts
    the run fails."""
    failed_starts: Count = 0
    """Consecutive failures before the trainer was ready."""
    disruptions: Count = 0
    """Consecutive attempts (and before the first, preparations) that were evicted or rejected by a node; they do
    not count as failures."""
    diverged: bool = False
    """Steps were skipped in a row since the last ten minutes of stable operation: the next time, the run fails."""
    publish_refused: bool = False
    """Generators could not load the published weights, or computed something else with them, since the last ten minutes of
    stable operation: the next time, the run fails."""
    has_been_ready: bool = False
    """All ranks have been ready with this spec since the last resumption; later start failures are retried for
    longer."""
    ready_time: Time | None = None
    """When all ranks of this attempt became ready."""
    held_time: Time | None = None
    """When a queue started to hold this attempt."""
    awaited_time: Time | None = None
    """When a run that ends started to wait for its trainer, which is not ready; after a while the run ends without it."""
    next_attempt_time: Time | None = None
    """When the next attempt starts, during a back-off."""


class FailureStatus(StatusModel):
    """A failure for which a run saves its training, before it is suspended."""

    reason: Annotated[str, Field(max_length=128)]
    """Reason of the condition Suspended then."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Its message."""


class SourceStatus(StatusModel):
    """The run that this one was forked from."""

    run: Annotated[str, Field(max_length=253)]
    """Its name."""
    uid: Annotated[str, Field(max_length=64)] = ""
    """Its uid; empty if it was deleted and has no record."""
    step: Count | None = None
    """Step of its checkpoint; None before the coordinator reports it."""


class UsageStatus(StatusModel):
    """Resources used by the run, over all attempts; those of a fork since the fork."""

    seconds: Annotated[str, Field(max_length=32)] = "0"
    """Time of mid-training and since the first lease, without suspensions."""
    elapsed_seconds: Annotated[str, Field(max_length=32)] = "0"
    """The same, and the time until the first lease: what budget.maxSeconds limits."""
    device_hours: Annotated[str, Field(max_length=32)] = "0"
    """Devices × hours; a CPU process counts as one device."""
    compute_tokens: Count | None = None
    """Compute, in tokens of supervised training: what budget.maxComputeTokens limits. None before the coordinator reports it."""
    tokens_generated: Count = 0
    """Completion tokens delivered by generators."""
    tokens_trained: Count = 0
    """Completion tokens of trained steps."""


class FaultStatus(StatusModel):
    """Faults of a run that continues: it is degraded until they are resolved."""

    grading_errors: Count = 0
    """Completions whose verifier failed, over the whole run."""
    last_grading_error_time: Time | None = None
    """When the latest one was detected."""
    skipped_steps: Count = 0
    """Steps whose update was not applied, over the whole run."""
    last_skipped_step_time: Time | None = None
    """When the latest one was detected."""
    given_up_rollouts: Count = 0
    """Rollouts, including those of evaluations, that were given up because they were too long or failed
    repeatedly, over the whole run."""
    last_given_up_time: Time | None = None
    """When the latest one was detected."""
    checkpoint_failures: Count = 0
    """Checkpoints that could not be written, over the whole run."""
    unsaved_since: Annotated[int, Field(ge=-1)] | None = None
    """Newest checkpoint when the last one failed, -1 for none; removed once a newer one is written."""
    checkpoint_version: Annotated[int, Field(ge=-1)] | None = None
    """Newest checkpoint in the last status of the coordinator, -1 for none."""


class ExportStatus(StatusModel):
    """A model in Hugging Face format."""

    version: Count
    """Weight version: steps trained."""
    reward: Annotated[str, Field(max_length=32)]
    """Reward of its evaluation."""
    path: Text
    """Path on the run's volume, relative to the run directory."""
    uri: Text = ""
    """Copy in trainer.export.to; empty if there is none yet."""
    time: Time
    """When it was written."""


class ExportsStatus(StatusModel):
    """Exported models."""

    best: ExportStatus | None = None
    """Model of the best evaluation; of several, the newest."""
    last: ExportStatus | None = None
    """Model of the latest evaluation."""
    problem: Text = ""
    """Why the latest export or copy failed; empty after a success."""


class DecisionStatus(StatusModel):
    """Summary of a decision of the autoscaler; ``decisions.jsonl`` on the run's volume has its inputs."""

    sequence: Count
    """Sequence number in the record."""
    time: Time
    """When it was made."""
    state: Annotated[str, Field(max_length=32)]
    """CONTINUE, STOP, GROW, INSUFFICIENT or BROKEN."""
    action: Text = ""
    """``none``, ``stop``, or ``scale`` with the number of generators."""
    reason: Text = ""
    """The deciding reason."""


Size = Annotated[int, Field(ge=0, le=2**53)]
"""Larger numbers are not exact in JSON."""


class ModelStatus(StatusModel):
    """Size of the model, as the preparation found it: the pods' default memory requests follow from it."""

    parameters: Size
    """Number of parameters."""
    hidden_size: Size
    """Width of the residual stream."""
    layers: Size
    """Number of blocks."""
    intermediate_size: Size
    """Width of a feed-forward layer."""
    vocabulary_size: Size
    """Rows of the embedding."""
    largest_tensor: Size = 0
    """Elements of the largest tensor."""
    checkpoint_bytes: Size = 0
    """Bytes of the model's weights files."""
    dtype: Annotated[str, Field(max_length=64)] = ""
    """Data types in these files, like ``BF16``."""

    @property
    def size(self) -> ModelSize:
        """For estimates of memory."""
        return ModelSize(**self.model_dump(exclude={"checkpoint_bytes", "dtype"}))

    @classmethod
    def read_report(cls, text: str) -> Self | None:
        """The report in a preparation's termination message; None for any other text, which an image may write."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


class OutlookStatus(StatusModel):
    """Numbers of the latest forecast. Intervals are 90 % intervals."""

    tokens: Count
    """Compute at the horizon of the forecast: completion tokens of trained steps."""
    median: Fraction
    """Median of the reward at the horizon."""
    low: Fraction
    """Lower end of its interval."""
    high: Fraction
    """Upper end of its interval."""
    asymptote: Fraction
    """Median of the curve's asymptote."""
    asymptote_low: Fraction
    """Lower end of its interval."""
    asymptote_high: Fraction
    """Upper end of its interval."""
    gain: Fraction
    """Median of the gain of reward from now to the horizon."""
    gain_low: Fraction
    """Lower end of its interval."""
    gain_high: Fraction
    """Upper end of its interval."""
    gain_probability: Fraction
    """Probability that the gain is above autoscaling.minGain."""


class RecipeValue(StatusModel):
    """An effective value of the recipe."""

    field: Annotated[str, Field(max_length=128)]
    """Path in spec.recipe."""
    value: Annotated[str, Field(max_length=256)]
    """The value, as written in a spec."""
    origin: Annotated[str, Field(max_length=128)] = ""
    """``preset`` with the paper that provides the value, ``default``, or ``spec``."""


class RunStatus(StatusModel):
    """Observed state of a run."""

    phase: Phase = Phase.PENDING
    """Summary of the run's state."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Reason of the condition that matters most: why the run ended, is suspended or waits, or its problem."""
    observed_generation: Count = 0
    """Generation of the spec that this status refers to."""
    accepted_spec: Annotated[str, Field(max_length=MAX_ACCEPTED_SPEC)] | None = None
    """The spec accepted last, as JSON. The run uses it while its current spec is invalid."""
    accepted_spec_hash: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the spec accepted last, if it is too long to be stored: an edit is detected, but not which fields it changes."""
    trained_spec: Annotated[str, Field(max_length=MAX_ACCEPTED_SPEC)] | None = None
    """The spec of the last trained steps, as JSON, while an edit of it has not trained ten steps yet."""
    conditions: Annotated[list[Condition], Field(max_length=32), AfterValidator(Unique("type"))] = []
    """Conditions of the run, one per type."""
    recipe: Annotated[list[RecipeValue], Field(max_length=64), AfterValidator(Unique("field"))] = []
    """The effective recipe, including all values of the preset and the defaults."""
    source: SourceStatus | None = None
    """The run that this one was forked from (spec.from)."""
    start_time: Time | None = None
    """When the first pod of the run was created."""
    completion_time: Time | None = None
    """When the run was completed or failed; removed when it continues."""
    stop_reason: Text | None = None
    """Why the run is being stopped, from the request on."""
    drain_start_time: Time | None = None
    """When the run started to drain, to be suspended or deleted."""
    coordinator_unreachable_time: Time | None = None
    """When the coordinator stopped responding during a drain; after five minutes the trainer's Job is deleted."""
    coordinator_attempt: Count = 1
    """Number of the coordinator; one with a greater number takes the journal over from a pod on a lost node."""
    suspension: Literal["", "Requested", "Suspended"] = ""
    """``Requested``: stopped by its forecast, but spec.suspend is not set yet. ``Suspended``: suspended and drained."""
    resumed: bool = False
    """The run was resumed, or continues after its end, but the coordinator has not been notified yet."""
    has_trained: bool = False
    """The run has trained steps, of RL or of mid-training."""
    unproven_since: Count | None = None
    """Steps at the last edit or resumption, until ten more are trained: a failure meanwhile suspends the run."""
    suspending_for: FailureStatus | None = None
    """The failure for which the run drains, to be suspended until its spec is edited."""
    step: Count | None = None
    """Steps trained."""
    progress: Annotated[str, Field(max_length=64)] | None = None
    """Steps trained of budget.maxSteps, like ``50/160``."""
    eta: Annotated[str, Field(max_length=32)] | None = None
    """Estimated time until the first limit of the budget is reached, in coarse steps, like ``3h30m``; while the run trains."""
    budget: Annotated[str, Field(max_length=64)] | None = None
    """Used share of the limit of the budget that is nearest, like ``31% of maxSteps``."""
    last_step_time: Time | None = None
    """When the latest step was detected."""
    reward: Annotated[str, Field(max_length=32)] | None = None
    """Mean reward of the latest evaluation."""
    points: Count = 0
    """Number of evaluations: points of the curve in ``<run>-curve``."""
    forecast: Annotated[str, Field(max_length=64)] | None = None
    """Reward predicted at the horizon, with its 90 % interval, like ``0.61 (0.58-0.64)``."""
    outlook: OutlookStatus | None = None
    """The same forecast in numbers, with asymptote and expected gain."""
    decision: Annotated[str, Field(max_length=32)] | None = None
    """State of the latest decision."""
    stop_votes: Count = 0
    """Consecutive evaluations that voted for a stop, or had the alarm of a broken run; autoscaling.stopAfter are needed."""
    decisions: Annotated[list[DecisionStatus], Field(max_length=RECENT_DECISIONS)] = []
    """The latest decisions, newest last; ``decisions.jsonl`` on the run's volume has all."""
    replicas: Count = 0
    """Number of generators, for the scale subresource."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the generator pods, for the scale subresource."""
    generators: GeneratorsStatus = GeneratorsStatus()
    """The generators."""
    trainer: TrainerStatus = TrainerStatus()
    """The trainer's attempts."""
    usage: UsageStatus = UsageStatus()
    """Resources used by the run."""
    faults: FaultStatus = FaultStatus()
    """Faults that have not ended the run."""
    exports: ExportsStatus = ExportsStatus()
    """Exported models and their locations."""
    model: ModelStatus | None = None
    """Size of the model; none before the preparation of a model from a hub or a volume."""

    @classmethod
    def read(cls, status: Mapping[str, Any] | None) -> Self:
        """Parse the status of a run. Values that this release does not support, because another release wrote them (a later
        phase or reason), are dropped, in a list with their whole entry; the next write removes them from the object.
        """
        known: Any = with_present_names(status or {})
        while True:
            try:
                return cls.model_validate(known)
            except ValidationError as error:
                known = copy.deepcopy(known)
                # One error at a time, because several errors may concern the same entry.
                _drop(known, error.errors()[0]["loc"])

    def condition(self, type: str) -> Condition | None:
        """The condition of that type; None if there is none."""
        return next((c for c in self.conditions if c.type == type), None)

    def to_object(self) -> dict[str, Any]:
        """The status as an object for the API server."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


def _drop(value: Any, path: tuple[str | int, ...]) -> None:
    """Delete the value at ``path`` from ``value``; if the path passes through a list, delete the whole list entry."""
    for key, below in zip(path, [*path[1:], None], strict=True):
        inside = value[key]
        within = isinstance(inside, dict) and below in inside
        within |= isinstance(inside, list) and isinstance(below, int) and below < len(inside)
        if isinstance(key, int) or not within:
            del value[key]
            return
        value = inside
