"""Observation, history and decision of the autoscaler: plain data, recorded as JSON and read back exactly.

Seconds, unless said otherwise, are the run's own clock: since its first lease, over all its
incarnations, never taken back by the coordinator. Compute is in completion tokens of trained steps
(``work_tokens``), the axis of the curve.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from scalerl_api.forecast import ForecastAnswer

RECENT: int = 16
"""Evaluations in an observation, for the run's pace."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything recorded."""


class State(enum.StrEnum):
    """What is thought of a run; ``docs/autoscaling.md`` says what to do about each."""

    INSUFFICIENT = "INSUFFICIENT"
    """No believable forecast: the run continues."""
    CONTINUE = "CONTINUE"
    STOP = "STOP"
    """Continuing does not pay."""
    GROW = "GROW"
    """Continuing pays, and time runs out before it has paid off."""
    BROKEN = "BROKEN"
    """The curve, the truncation or the numbers went bad: an alarm, never a stop by forecast; one that stays holds
    the run."""


# --- observed ----------------------------------------------------------------------------------------


class Spent(Recorded, frozen=True, kw_only=True):
    """What the run has used, over all its incarnations."""

    seconds: float
    device_seconds: float
    steps: int
    tokens: float | msgspec.UnsetType = msgspec.UNSET
    """Of :attr:`Limits.tokens`; left out without that limit, and in records of the release before."""


class Limits(Recorded, frozen=True, kw_only=True):
    """The run's budget; None is no limit."""

    steps: int | None = None
    seconds: float | None = None
    device_hours: float | None = None
    tokens: float | msgspec.UnsetType = msgspec.UNSET
    """``budget.maxComputeTokens`` in completion tokens of RL, at what one costs by the recipe (:mod:`scalerl_api.compute`);
    left out where it is no limit, and in records of the release before."""


class Progress(Recorded, frozen=True, kw_only=True):
    """What had been used when an evaluation was made."""

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
    """The points that the forecast was asked with.

    version: of the last one used; -1 with none. digest: of those used. mixed, not_finite: left out,
    because several weight versions made them, or because they are no numbers.
    """

    used: int
    version: int
    eval_version: str
    digest: str
    mixed: int = 0
    not_finite: int = 0


class Generators(Recorded, frozen=True, kw_only=True):
    """wanted: replicas asked for. ready: of those, how many hold weights and work. quota: the most there
    can be here (devices, cluster quota), None if not known. devices_each: what one counts for."""

    wanted: int
    ready: int
    quota: int | None = None
    devices_each: int = 1


class Staleness(Recorded, frozen=True, kw_only=True):
    """allowed: k of recipe.offPolicy. most: the oldest token trained on so far, in steps."""

    allowed: int
    most: int


class Load(Recorded, frozen=True, kw_only=True):
    """How busy both sides were over the last ``seconds``, in which ``steps`` were trained.

    queued_steps: rollouts that wait for the trainer, in steps' worth, at the end of it.
    stale_share: of the rollouts delivered, those dropped because they had become too old.
    """

    seconds: float
    steps: int
    trainer_busy: float
    generator_busy: float
    queued_steps: float
    stale_share: float


class Recipe(Recorded, frozen=True, kw_only=True):
    """What of the recipe the paper found to move the asymptote."""

    batch_completions: int
    context_tokens: int
    fp32_head: bool
    loss: str


class Observation(Recorded, frozen=True, kw_only=True):
    """Everything that a decision rests on, besides the spec and the history.

    unix_seconds: this machine's clock; only a deadline is held against it.
    forecast: as received. trouble: why there is none; empty with one, and while nothing was asked.
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


# --- remembered ----------------------------------------------------------------------------------


class Pace(Recorded, frozen=True, kw_only=True):
    """How fast the run goes: medians over ``intervals`` between evaluations."""

    tokens_per_second: float
    devices: float
    tokens_per_step: float
    intervals: int


class Change(Recorded, frozen=True, kw_only=True):
    """The last change of the number of generators that was wanted.

    at: the run's clock. pace: before it. exploratory: made without a measured elasticity, and taken
    back if that turns out too low. measuring: until the elasticity is known, or someone else's change
    (or that this one was not carried out) made it unknowable.
    """

    before: int
    after: int
    at: float
    exploratory: bool
    measuring: bool
    pace: Pace | None


class Alarm(Recorded, frozen=True, kw_only=True):
    """Why the run is BROKEN, and what ends that.

    floor: by method 1, the reward that the newest evaluation had to stay above. eval_version: what was measured on.
    """

    kind: Literal["curve", "truncated", "not finite"]
    floor: float | None = None
    eval_version: str = ""


class History(Recorded, frozen=True, kw_only=True):
    """What one decision hands to the next.

    rules: the fields of the spec that the streak was counted under. version: newest evaluation that
    had a vote. streak: consecutive evaluations that voted for a stop, or, while BROKEN, that found the run so.
    forgiven: newest evaluation when a broken run was last resumed; earlier falls raise no alarm.
    was_healthy: few completions were cut off once since then. generators: wanted at the last observation.
    settled: since when all of them have been ready; None while they are not. elasticity: as last measured. reversals: changes against the direction of the one before. unix_seconds: of the last observation.
    """

    state: State = State.INSUFFICIENT
    rules: str = ""
    version: int = -1
    streak: int = 0
    alarm: Alarm | None = None
    forgiven: int = -1
    was_healthy: bool = False
    generators: int | None = None
    settled: float | None = None
    change: Change | None = None
    elasticity: float | None = None
    reversals: int = 0
    unix_seconds: float = 0.0


# --- decided -------------------------------------------------------------------------------------


class Action(Recorded, frozen=True, kw_only=True):
    """What is to be done. stop: ``on_stop`` says how. scale: to ``generators`` replicas. hold: suspend a broken run."""

    kind: Literal["none", "stop", "scale", "hold"] = "none"
    generators: int | None = None
    on_stop: str = ""


class Decision(Recorded, frozen=True, kw_only=True):
    """reasons: in words, the deciding one first. advice: what raises the asymptote, with its source.

    reach: compute still to be had within budget and deadline; pays: further compute that would pay.
    """

    state: State
    reasons: list[str]
    action: Action = Action()
    advice: list[str] = []
    reach: float | None = None
    pays: float | None = None
    history: History
