"""The history that one decision passes to the next, and whether the number of generators may change now. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_autoscaling.models import Change, History, Observation, State
from scalerl_autoscaling.throughput import elasticity, pace, settled_pace

ALWAYS_COUNTED: Final = (
    "min_gain",
    "horizon",
    "target",
    "price_per_device_hour",
    "value_per_point",
    "stop_after",
)
"""Fields of ``spec.autoscaling`` whose edit resets the consecutive votes, recorded also at their defaults."""
NOT_COUNTED: Final = frozenset(
    (
        *("mode", "on_stop", "on_broken"),
        *("generators", "cooldown_seconds"),
        *("max_device_hours", "deadline"),
    )
)
"""Fields whose edit does not reset them: who acts, and how; the number of generators; limits, which each observation has."""
MAX_DOUBLINGS: Final = 6
"""The cooldown doubles with each change in the direction opposite to the one before, up to 64 times its length."""


def rules(spec: AutoscalingSpec) -> str:
    """The fields that consecutive votes are counted under, with their values.

    A field in neither list counts, so that a new field resets the votes. At its default it is left out, so that the
    rules of records from before the field stay the same.
    """
    fields = type(spec).model_fields
    values = {name: getattr(spec, name) for name in ALWAYS_COUNTED if getattr(spec, name) is not None}
    for name, field in fields.items():
        if name not in ALWAYS_COUNTED and name not in NOT_COUNTED:
            value = getattr(spec, name)
            if value != field.get_default(call_default_factory=True):
                values[name] = value
    return " ".join(f"{name}={value}" for name, value in values.items())


def updated(spec: AutoscalingSpec, observation: Observation, history: History) -> History:
    """The history with this observation, before a decision."""
    now = observation.spent.seconds
    if history.rules != rules(spec):
        # Evaluations that agreed under other rules do not count under these.
        history = replace(history, rules=rules(spec), consecutive_votes=0, elasticity=None)
    if observation.resumed and history.state in (State.STOP, State.BROKEN):
        # The user resumed the run despite these evaluations, so it takes new ones to stop it again.
        history = replace(history, consecutive_votes=0)
        if history.state is State.BROKEN:
            newest = -1 if observation.latest is None else observation.latest.version
            history = replace(
                history, alarm=None, alarms_acknowledged_until=newest, seen_healthy_evaluation=False
            )
    change, ready_since, measured = history.change, history.ready_since, history.elasticity
    wanted, ready = observation.generators.wanted, observation.generators.ready
    if change is not None and change.at > now:
        # The run's clock was set back; the cooldown must not last as long as the gap.
        change = replace(change, at=now)
    if history.generators is None:
        ready_since = 0.0
    elif wanted != history.generators:
        ready_since = None
    if ready_since is None and ready >= wanted:
        ready_since = now
    if change is not None and change.measuring:
        if wanted != change.after:
            change = replace(change, measuring=False)
        elif ready_since is not None and change.pace is not None:
            after = pace(observation.recent, ready_since)
            if after is not None:
                found = elasticity(change.pace, after)
                measured = measured if found is None else found
                change = replace(change, measuring=False)
    return replace(history, generators=wanted, ready_since=ready_since, change=change, elasticity=measured)


def scaling_refusal(spec: AutoscalingSpec, observation: Observation, history: History, to: int) -> str:
    """Why the number of generators may not become ``to`` now; empty if it may."""
    generators, allowed = observation.generators, spec.generators
    if allowed is None:
        return "autoscaling.generators gives no range"
    # From outside the range, a step towards it is allowed.
    if generators.wanted < to > allowed.max:
        return f"{generators.wanted} generators are the most that autoscaling.generators allows"
    if generators.wanted > to < allowed.min:
        return f"{generators.wanted} generators are the fewest that autoscaling.generators allows"
    if generators.quota is not None and to > max(generators.quota, generators.wanted):
        return f"there is room for {generators.quota} generators only"
    if generators.ready != generators.wanted or history.ready_since is None:
        return f"a change is under way: {generators.ready} of {generators.wanted} generators are ready"
    change = history.change
    if change is None:
        return ""
    since = observation.spent.seconds - change.at
    doublings = min(history.reversals, MAX_DOUBLINGS) if _reverses(change, generators.wanted, to) else 0
    rest = spec.cooldown_seconds * 2**doublings - since
    return f"the last change was {since:.0f} s ago, {rest:.0f} s of cooldown are left" if rest > 0 else ""


def after_scaling(
    observation: Observation, history: History, to: int, *, exploratory: bool = False
) -> History:
    """The history after a decision to change the number of generators to ``to``."""
    change, wanted = history.change, observation.generators.wanted
    before = settled_pace(observation, history)
    return replace(
        history,
        reversals=history.reversals + (change is not None and _reverses(change, wanted, to)),
        change=Change(
            before=wanted,
            after=to,
            at=observation.spent.seconds,
            exploratory=exploratory,
            measuring=before is not None,
            pace=before,
        ),
    )


def _reverses(change: Change, wanted: int, to: int) -> bool:
    """Whether going from ``wanted`` to ``to`` generators is in the direction opposite to the last change."""
    return (to > wanted) != (change.after > change.before)
