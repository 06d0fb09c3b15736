"""Observation, history and decision of the autoscaler: plain data that JSON preserves exactly.

Seconds are by the run's clock unless stated otherwise: since its first lease, over all its incarnations; the coordinator never
sets it back. Compute is in completion tokens of trained steps (``work_tokens``), the axis of the curve.
"""

from __future__ import annotations

import enum
from typing import Final, Literal

import msgspec

from scalerl_api.forecast import ForecastAnswer

RECENT: int = 16
"""Most evaluations in an observation, for the run's pace."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything recorded."""


class State(enum.StrEnum):
    """State of a run; ``docs/autoscaling.md`` has the remedy for each."""

    INSUFFICIENT = "INSUFFICIENT"
    """No sufficient forecast: the run continues."""
    CONTINUE = "CONTINUE"
    STOP = "STOP"
    """Continuing does not pay."""
    GROW = "GROW"
    """Continuing pays, but budget or deadline end before it pays off."""
    BROKEN = "BROKEN"
    """An alarm is active: the curve fell, too many completions are cut off, or a number is not finite."""


# --- observation -------------------------------------------------------------------------------------


class Spent(Recorded, frozen=True, kw_only=True):
    """What the run has used, over all its incarnations."""

    seconds: float
    device_seconds: float
    steps: int
    tokens: float | msgspec.UnsetType = msgspec.UNSET
    """Counted as :attr:`Limits.tokens`; left out without that limit."""
    inherited_seconds: float | msgspec.UnsetType = msgspec.UNSET
    """The part of ``seconds`` of the run from which this one was forked, which no limit counts; left out in other runs."""
    inherited_device_seconds: float | msgspec.UnsetType = msgspec.UNSET
    """The same of ``device_seconds``."""


class Limits(Recorded, frozen=True, kw_only=True):
    """The run's budget; None is no limit."""

    steps: int | None = None
    seconds: float | None = None
    device_hours: float | None = None
    tokens: float | msgspec.UnsetType = msgspec.UNSET
    """``budget.maxComputeTokens`` in completion tokens of RL, at the recipe's cost of one (:mod:`scalerl_api.compute`); left out
    where there is no limit."""


class Progress(Recorded, frozen=True, kw_only=True):
    """The totals at an evaluation."""

    version: int
    tokens: int
    seconds: float
    device_seconds: float


class Latest(Recorded, frozen=True, kw_only=True):
    """The newest evaluation, of one version or of several."""

    version: int
    reward: float | None
    """None: not a finite number."""
    truncated: float | None


class PointSet(Recorded, frozen=True, kw_only=True):
    """The points of the forecast request.

    Attributes:
        used: their number.
        version: of the last one; -1 without any.
        digest: of all of them.
        mixed: evaluations left out because several weight versions made them.
        not_finite: evaluations left out because their reward is not finite.
    """

    used: int
    version: int
    eval_version: str
    digest: str
    mixed: int = 0
    not_finite: int = 0


class Generators(Recorded, frozen=True, kw_only=True):
    """The generators of the run.

    Attributes:
        wanted: requested replicas.
        ready: replicas that hold weights and work.
        quota: most replicas that devices or quota allow; None if unknown.
        devices_each: devices of one replica, at least 1.
    """

    wanted: int
    ready: int
    quota: int | None = None
    devices_each: int = 1


class Staleness(Recorded, frozen=True, kw_only=True):
    """Staleness in steps.

    Attributes:
        allowed: k of recipe.offPolicy.
        most: of the oldest token trained on so far.
    """

    allowed: int
    most: int


class Load(Recorded, frozen=True, kw_only=True):
    """Utilisation of trainer and generators over the last ``seconds``, in which ``steps`` were trained.

    Attributes:
        queued_steps: rollouts that wait for the trainer at the end, in steps.
        stale_share: share of the delivered rollouts that were dropped as too old.
        outage: whether episodes or verdicts waited for an environment or a reward service that failed.
    """

    seconds: float
    steps: int
    trainer_busy: float
    generator_busy: float
    queued_steps: float
    stale_share: float
    outage: bool = False


class Recipe(Recorded, frozen=True, kw_only=True):
    """The choices of the recipe that move the asymptote according to ScaleRL."""

    batch_completions: int
    context_tokens: int
    fp32_head: bool
    loss: str


class Observation(Recorded, frozen=True, kw_only=True):
    """The input of a decision, besides the spec and the history.

    Attributes:
        unix_seconds: the machine's clock, for a deadline only.
        forecast: as received.
        trouble: why there is no forecast; empty with one, and where none was requested.
        resumed: the run was resumed since the last decision.
    """

    unix_seconds: float
    spent: Spent
    limits: Limits
    recent: list[Progress]
    latest: Latest | None
    points: PointSet
    generators: Generators
    staleness: Staleness
    recipe: Recipe
    load: Load | None = None
    forecast: ForecastAnswer | None = None
    trouble: str = ""
    resumed: bool = False


# --- history -------------------------------------------------------------------------------------


class Pace(Recorded, frozen=True, kw_only=True):
    """The run's pace: medians over ``intervals`` between evaluations."""

    tokens_per_second: float
    devices: float
    tokens_per_step: float
    intervals: int


class Change(Recorded, frozen=True, kw_only=True):
    """The last decision that changed the number of generators.

    Attributes:
        at: seconds of the run's clock.
        exploratory: made without a measured elasticity, and reverted if the elasticity is too low.
        measuring: the elasticity is not known yet; False also if another number of generators prevents the measurement.
        pace: before the change.
    """

    before: int
    after: int
    at: float
    exploratory: bool
    measuring: bool
    pace: Pace | None


class Alarm(Recorded, frozen=True, kw_only=True):
    """Why the run is BROKEN.

    Attributes:
        eval_version: the evaluation set of a fallen curve.
    """

    kind: Literal["curve", "truncated", "not finite"]
    eval_version: str = ""


_HISTORY: Final = {
    "consecutive_votes": "streak",
    "alarms_acknowledged_until": "forgiven",
    "seen_healthy_evaluation": "was_healthy",
    "ready_since": "settled",
}
"""Names in the record, by field."""


class History(Recorded, frozen=True, kw_only=True, rename=_HISTORY):
    """What one decision passes to the next.

    Attributes:
        rules: the fields of the spec that the consecutive votes were counted under.
        version: newest evaluation that was counted.
        consecutive_votes: consecutive evaluations that voted for a stop, or, while BROKEN, that had the alarm.
        alarms_acknowledged_until: newest evaluation when a broken run was last resumed; earlier falls raise no alarm.
        seen_healthy_evaluation: since then, an evaluation had few completions cut off.
        generators: requested at the last observation.
        ready_since: since when all of them have been ready; None while they are not.
        elasticity: as last measured.
        reversals: number of changes in the direction opposite to the one before.
        unix_seconds: of the last observation.
    """

    state: State = State.INSUFFICIENT
    rules: str = ""
    version: int = -1
    consecutive_votes: int = 0
    alarm: Alarm | None = None
    alarms_acknowledged_until: int = -1
    seen_healthy_evaluation: bool = False
    generators: int | None = None
    ready_since: float | None = None
    change: Change | None = None
    elasticity: float | None = None
    reversals: int = 0
    unix_seconds: float = 0.0


# --- decision ------------------------------------------------------------------------------------


class Action(Recorded, frozen=True, kw_only=True, rename={"scale_to": "generators"}):
    """The action of a decision.

    Attributes:
        kind: ``stop`` as ``on_stop`` says, ``scale`` to ``scale_to`` generators, ``hold`` suspends a broken run.
    """

    kind: Literal["none", "stop", "scale", "hold"] = "none"
    scale_to: int | None = None
    on_stop: str = ""


_DECISION: Final = {"affordable_compute": "reach", "worthwhile_compute": "pays"}
"""Names in the record, by field."""


class Decision(Recorded, frozen=True, kw_only=True, rename=_DECISION):
    """A decision.

    Attributes:
        reasons: for people, the decisive one first.
        advice: changes of the recipe that raise the asymptote.
        affordable_compute: further compute within budget and deadline, in tokens.
        worthwhile_compute: further compute that would pay, in tokens.
    """

    state: State
    reasons: list[str]
    action: Action = Action()
    advice: list[str] = []
    affordable_compute: float | None = None
    worthwhile_compute: float | None = None
    history: History
