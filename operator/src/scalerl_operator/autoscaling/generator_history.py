"""The history of the number of generators, and whether it may be changed now. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_operator.autoscaling.counted_fields import rules
from scalerl_operator.autoscaling.models import Change, History, Observation, State
from scalerl_operator.autoscaling.throughput import elasticity, pace

MOST_DOUBLINGS: Final = 6
"""A change against the one before it waits twice as long as the last such change did, up to 64 cooldowns."""


def remember(spec: AutoscalingSpec, observation: Observation, history: History) -> History:
    """The history updated by this observation, before anything is decided."""
    now = observation.spent.seconds
    if history.rules != rules(spec):
        # Another policy, so another question: agreement with the old one says nothing of it.
        history = replace(history, rules=rules(spec), streak=0, elasticity=None)
    if observation.resumed and history.state in (State.STOP, State.BROKEN):
        # Whoever takes a stop back knows it; the run is not stopped again by what stopped it.
        history = replace(history, streak=0)
    if observation.resumed and history.state is State.BROKEN:
        newest = -1 if observation.latest is None else observation.latest.version
        history = replace(history, alarm=None, forgiven=newest, was_healthy=False)
    change, settled, measured = history.change, history.settled, history.elasticity
    wanted, ready = observation.generators.wanted, observation.generators.ready
    if change is not None and change.at > now:
        # The run's clock was set back. Waiting out the rest of the gap could take for ever.
        change = replace(change, at=now)
    if history.generators is None:
        settled = 0.0
    elif wanted != history.generators:
        settled = None
    if settled is None and ready >= wanted:
        settled = now
    if change is not None and change.measuring:
        if wanted != change.after:
            change = replace(change, measuring=False)
        elif settled is not None and change.pace is not None:
            after = pace(observation.recent, settled)
            if after is not None:
                found = elasticity(change.pace, after)
                measured = measured if found is None else found
                change = replace(change, measuring=False)
    return replace(history, generators=wanted, settled=settled, change=change, elasticity=measured)


def why_not(spec: AutoscalingSpec, observation: Observation, history: History, to: int) -> str:
    """Why the number of generators may not become ``to`` now; empty if it may."""
    generators, allowed = observation.generators, spec.generators
    if allowed is None:
        return "autoscaling.generators gives no range"
    # From outside the range a step towards it is one that is wanted.
    if generators.wanted < to > allowed.max:
        return f"{generators.wanted} generators are the most that autoscaling.generators allows"
    if generators.wanted > to < allowed.min:
        return f"{generators.wanted} generators are the fewest that autoscaling.generators allows"
    if generators.quota is not None and to > max(generators.quota, generators.wanted):
        return f"there is room for {generators.quota} generators only"
    if generators.ready != generators.wanted or history.settled is None:
        return f"a change is under way: {generators.ready} of {generators.wanted} generators are ready"
    change = history.change
    if change is None:
        return ""
    back = (to > generators.wanted) != (change.after > change.before)
    wait = spec.cooldown_seconds * (2 ** min(history.reversals, MOST_DOUBLINGS) if back else 1)
    rest = wait - (observation.spent.seconds - change.at)
    if rest > 0:
        return f"the last change was {observation.spent.seconds - change.at:.0f} s ago, {rest:.0f} s of cooldown are left"
    return ""


def scaled(observation: Observation, history: History, to: int, *, exploratory: bool = False) -> History:
    """The history after a change of the number of generators was decided."""
    change = history.change
    wanted = observation.generators.wanted
    back = change is not None and (to > wanted) != (change.after > change.before)
    # Only intervals with exactly these generators: a mixture would measure something else.
    before = None if history.settled is None else pace(observation.recent, history.settled)
    return replace(
        history,
        reversals=history.reversals + back,
        change=Change(
            before=wanted,
            after=to,
            at=observation.spent.seconds,
            exploratory=exploratory,
            measuring=before is not None,
            pace=before,
        ),
    )
