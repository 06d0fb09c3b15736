"""``status`` of a run on a cluster: what the operator last saw, written by nobody else.

Everything in it can be derived again: from the objects of the run, its coordinator, which has all decisions, and the ConfigMap
``<run>-curve``, which holds all points. Numbers with fractions are
strings, as in the spec.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from scalerl_api.conditions import Phase as Phase
from scalerl_api.fields import Model
from scalerl_api.pods import Unique

Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, like ``2026-08-01T12:00:00Z``."""
Text = Annotated[str, Field(max_length=1024)]

MAX_MESSAGE = 32_768
"""Longest message of a condition, as Kubernetes has it."""
RECENT_DECISIONS = 5
MAX_ACCEPTED_SPEC = 262_144
"""Characters of a spec that the status keeps; a longer one is not kept."""


class StatusModel(Model):
    """Base: what a newer operator wrote is left out, not refused."""

    model_config = ConfigDict(extra="ignore", strict=False)


class Condition(StatusModel):
    """One thing said about the run, as Kubernetes' ``metav1.Condition``."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """What is said; docs/operations.md lists all."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    observed_generation: Count = 0
    """Generation of the spec that this was said about."""
    last_transition_time: Time
    """When ``status`` last changed."""
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Why, in one word that keeps its meaning."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Why, for a person: which field, pod or object."""


class GeneratorsStatus(StatusModel):
    """The generators."""

    replicas: Count = 0
    """Pods there are."""
    ready: Count = 0
    """Of those, how many work."""
    chosen: Count | None = None
    """Of an earlier release, read for one release: the autoscaler's number, while spec.generator.replicas was ``base``."""
    base: Count | None = None
    """Of an earlier release: spec.generator.replicas when the autoscaler chose."""


class TrainerStatus(StatusModel):
    """The trainer's Jobs, one an attempt."""

    attempt: Count = 0
    """Number of the Job that runs, or ran last; 0 before the first."""
    last_recorded_attempt: Count = 0
    """The newest attempt whose end is in the counts below."""
    restarts: Count = 0
    """Attempts that ended before the run did, over the whole run, whatever ended them."""
    consecutive_failures: Count = 0
    """Of those, how many failed by themselves since the last ten minutes of quiet; past trainer.maxRestarts the run is
    given up."""
    failed_starts: Count = 0
    """Of those in a row, how many ended before they were ready."""
    disruptions: Count = 0
    """In a row, attempts (and before the first, preparations) that lost their places, or that no node let begin; they count
    as no failure."""
    diverged: bool = False
    """Steps in a row were skipped since the last ten minutes of quiet: the next time ends the run."""
    has_been_ready: bool = False
    """All ranks have been up once on this spec, since the run was last resumed: what keeps them from it now is given time
    to pass."""
    ready_time: Time | None = None
    """Since when all ranks of this attempt have been up."""
    held_time: Time | None = None
    """Since when a queue has held this attempt."""
    next_attempt_time: Time | None = None
    """When the next attempt starts, while one is waited for."""
    judged: Count = 0
    """As lastRecordedAttempt, which it was called before; kept for one release, for an upgrade or its rollback."""
    in_a_row: Count = 0
    """As consecutiveFailures, likewise."""
    worked: bool = False
    """As hasBeenReady, likewise."""


class UsageStatus(StatusModel):
    """What the run has used, over all its starts."""

    seconds: Annotated[str, Field(max_length=32)] = "0"
    """Time since its first lease, without suspensions."""
    device_hours: Annotated[str, Field(max_length=32)] = "0"
    """Devices × hours; a CPU process counts as one device."""
    tokens_generated: Count = 0
    """Completion tokens that generators delivered."""
    tokens_trained: Count = 0
    """Completion tokens of trained steps."""


class TroubleStatus(StatusModel):
    """What went wrong in a run that goes on: it is degraded until that is over."""

    grading_errors: Count = 0
    """Completions whose verifier failed, over the whole run."""
    last_grading_error_time: Time | None = None
    """When the newest of them was first seen."""
    skipped_steps: Count = 0
    """Steps that were not applied, over the whole run."""
    last_skipped_step_time: Time | None = None
    """When the newest of them was first seen."""
    given_up_rollouts: Count = 0
    """Rollouts, also of evaluations, that were given up: too long, or failed again and again; over the whole run."""
    last_given_up_time: Time | None = None
    """When the newest of them was first seen."""
    checkpoint_failures: Count = 0
    """Checkpoints that could not be written, over the whole run."""
    unsaved_since: Annotated[int, Field(ge=-1)] | None = None
    """Newest checkpoint when the last one failed, -1 for none; gone once a newer one is written."""
    checkpoint_version: Annotated[int, Field(ge=-1)] | None = None
    """Newest checkpoint when the coordinator was last heard, -1 for none."""


class ExportStatus(StatusModel):
    """A model that transformers and vLLM load."""

    version: Count
    """Weight version: steps trained."""
    reward: Annotated[str, Field(max_length=32)]
    """Of its evaluation."""
    path: Text
    """On the run's volume, relative to the run's directory."""
    uri: Text = ""
    """Where trainer.export.to has a copy; empty: nowhere, or not yet."""
    time: Time
    """When it was written."""


class ExportsStatus(StatusModel):
    """Models to take away."""

    best: ExportStatus | None = None
    """Of the best evaluation, of several the newest."""
    last: ExportStatus | None = None
    """Of the newest evaluation."""
    problem: Text = ""
    """Why the newest export or copy failed; empty once one has succeeded."""


class DecisionStatus(StatusModel):
    """One decision of the autoscaler, in short; ``decisions.jsonl`` on the run's volume has its inputs."""

    sequence: Count
    """Its number in the record."""
    time: Time
    """When it was taken."""
    state: Annotated[str, Field(max_length=32)]
    """CONTINUE, STOP, GROW, INSUFFICIENT or BROKEN."""
    action: Text = ""
    """What was to be done: ``none``, ``stop``, or ``scale`` and to how many."""
    reason: Text = ""
    """The deciding reason."""


class RecipeValue(StatusModel):
    """A value of the recipe that is carried out."""

    field: Annotated[str, Field(max_length=128)]
    """Path in spec.recipe."""
    value: Annotated[str, Field(max_length=256)]
    """As it would be written there."""
    origin: Annotated[str, Field(max_length=128)] = ""
    """``preset`` and the paper that it has the value from, ``default``, or ``spec``."""


class RunStatus(StatusModel):
    """What is known of a run."""

    phase: Phase = Phase.PENDING
    """One word for where the run stands."""
    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    accepted_spec: Annotated[str, Field(max_length=MAX_ACCEPTED_SPEC)] | None = None
    """The spec that was accepted last, as JSON. The run goes on with it while its spec is invalid."""
    conditions: Annotated[list[Condition], Field(max_length=32), AfterValidator(Unique("type"))] = []
    """What is said about the run, one entry a type."""
    recipe: Annotated[list[RecipeValue], Field(max_length=64), AfterValidator(Unique("field"))] = []
    """The recipe with every value that the preset and the defaults give."""
    start_time: Time | None = None
    """When the first pod of the run was asked for."""
    completion_time: Time | None = None
    """When the run was completed or failed."""
    stop_reason: Text | None = None
    """Why the run is stopped, from the request on."""
    drain_start_time: Time | None = None
    """Since when the run saves what it trained, to be suspended or deleted."""
    coordinator_unreachable_time: Time | None = None
    """Since when the coordinator has not answered while the run drains; after five minutes the trainer's Job is deleted."""
    rest: Literal["", "Asked", "Resting"] = ""
    """``Asked``: stopped by its forecast, and spec.suspend is yet to say so. ``Resting``: suspended and drained."""
    resumed: bool = False
    """A suspension was taken back, and the coordinator is yet to hear of it."""
    step: Count | None = None
    """Steps trained."""
    last_step_time: Time | None = None
    """When the newest of them was first seen."""
    reward: Annotated[str, Field(max_length=32)] | None = None
    """Mean reward of the newest evaluation."""
    points: Count = 0
    """Evaluations so far: points of the curve in ``<run>-curve``."""
    forecast: Annotated[str, Field(max_length=64)] | None = None
    """Reward predicted at the horizon, with its 90 % interval, like ``0.61 (0.58-0.64)``."""
    decision: Annotated[str, Field(max_length=32)] | None = None
    """State of the last decision."""
    decisions: Annotated[list[DecisionStatus], Field(max_length=RECENT_DECISIONS)] = []
    """The last decisions, newest last; ``decisions.jsonl`` on the run's volume has all."""
    replicas: Count = 0
    """Generators there are, for the scale subresource."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the generators' pods, for the scale subresource."""
    generators: GeneratorsStatus = GeneratorsStatus()
    """The generators."""
    trainer: TrainerStatus = TrainerStatus()
    """The trainer's attempts."""
    usage: UsageStatus = UsageStatus()
    """What the run has used."""
    trouble: TroubleStatus = TroubleStatus()
    """What went wrong without ending the run."""
    exports: ExportsStatus = ExportsStatus()
    """Models to take away, and where they lie."""

    @classmethod
    def read(cls, status: Mapping[str, Any] | None) -> Self:
        """Whatever stands in a run's status. What this release does not understand (another has written it: a phase or a
        reason that came later) is left out, an entry of a list as a whole, and so is gone with the next write.
        """
        known: Any = status or {}
        while True:
            try:
                return cls.model_validate(known)
            except ValidationError as error:
                known = copy.deepcopy(known)
                # One at a time: what is wrong with an entry may be said more than once.
                _drop(known, error.errors()[0]["loc"])

    def condition(self, type: str) -> Condition | None:
        """The entry of that type."""
        return next((c for c in self.conditions if c.type == type), None)

    def to_object(self) -> dict[str, Any]:
        """As it is written to the API server."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


def _drop(value: Any, path: tuple[str | int, ...]) -> None:
    """Take what is at ``path`` out of ``value``; of a list the entry on the way there as a whole."""
    for key, below in zip(path, [*path[1:], None], strict=True):
        inside = value[key]
        within = isinstance(inside, dict) and below in inside
        within |= isinstance(inside, list) and isinstance(below, int) and below < len(inside)
        if isinstance(key, int) or not within:
            del value[key]
            return
        value = inside
