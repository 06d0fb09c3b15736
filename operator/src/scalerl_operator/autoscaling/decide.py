"""Autoscale: stop a run that no longer pays, grow one that time would cut short, and say when nobody knows. Pure.

``decide`` is told the spec, what is seen and what was remembered, and gives a decision with what to
remember next. The same three give the same decision, bit for bit: that is what replay rests on.

| state | when |
|---|---|
| BROKEN | an alarm stands (:mod:`.alarm`); ``stopAfter`` new evaluations in a row of it hold the run |
| INSUFFICIENT | no believable forecast (:func:`.vote.doubts`) |
| STOP | ``stopAfter`` new evaluations in a row voted for it (:mod:`.vote`), by the fit or because nothing happens, and none has voted against it since |
| GROW | the vote is to go on, budget or deadline end before it has paid off, and more generators help |
| CONTINUE | otherwise |
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_operator.autoscaling.alarm import alarm, is_healthy
from scalerl_operator.autoscaling.generator_memory import remember, scaled, why_not
from scalerl_operator.autoscaling.models import (
    Action,
    Alarm,
    Decision,
    History,
    Observation,
    Recipe,
    State,
)
from scalerl_operator.autoscaling.throughput import left, pace, pace_now, reach
from scalerl_operator.autoscaling.vote import Side, Vote, doubts, flat_vote, if_wrong, vote, with_earlier

LEAST_ELASTICITY: Final = 0.7
"""d ln(tokens/s) / d ln(devices) under which more devices are mostly wasted."""
LEAST_MORE: Final = 1.01
"""Growing has to bring at least this many times the compute."""
MOST_GROWTH: Final = 2
"""A measured elasticity is believed up to so many times the generators it was measured with."""
LARGE_BATCH: Final = 2048
LONG_CONTEXT: Final = 32_768


def decide(spec: AutoscalingSpec, seen: Observation, history: History) -> Decision:
    """What to do about the run as it is seen now.

    A stop or a hold is given again for as long as it stands, so that nothing depends on its having been heard;
    an evaluation counts once, however often it is seen.
    """
    history = remember(spec, seen, history)
    standing, why = alarm(spec, seen, history)
    if (standing is not None) != (history.state is State.BROKEN):
        # What was counted is another thing from here on.
        history = replace(history, streak=0)
    history = replace(history, alarm=standing, was_healthy=history.was_healthy or is_healthy(seen))
    if standing is not None:
        return _broken(spec, seen, history, standing, why)
    unsure = doubts(spec, seen)
    if unsure:
        flat = None if seen.forecast is None else flat_vote(spec, seen.forecast)
        if flat is not None:
            return _voted_flat(spec, seen, history, flat, unsure)
        if seen.forecast is not None:
            # This evaluation was looked at and did not agree. One that could not be looked at did neither.
            history = replace(history, streak=0, version=max(history.version, seen.points.version))
        return _or_take_back(spec, seen, history, State.INSUFFICIENT, unsure)
    assert seen.forecast is not None
    assert seen.forecast.outlook is not None
    cast = vote(spec, seen.forecast, seen.forecast.outlook)
    history = _counted(seen, history, cast)
    if history.streak >= spec.stop_after:
        return _stop(spec, seen, history, cast)
    if cast.side is Side.STOP:
        reasons = [*cast.reasons, f"{history.streak} of {spec.stop_after} new evaluations in a row agree"]
        return replace(
            _or_take_back(spec, seen, history, State.CONTINUE, reasons), advice=advice(seen.recipe)
        )
    return _grow(spec, seen, history, cast)


def _stop(spec: AutoscalingSpec, seen: Observation, history: History, cast: Vote) -> Decision:
    assert seen.forecast is not None
    agree = ", ".join(
        filter(None, [f"{history.streak} new evaluations in a row agree", with_earlier(seen.forecast)])
    )
    reasons = [*cast.reasons, agree, *if_wrong(seen.forecast)]
    decision = _decided(seen, history, State.STOP, reasons, Action(kind="stop", on_stop=spec.on_stop))
    return replace(decision, advice=advice(seen.recipe), pays=0.0)


def _voted_flat(
    spec: AutoscalingSpec, seen: Observation, history: History, cast: Vote, unsure: list[str]
) -> Decision:
    """Of a run that no fit can be believed of because nothing happens."""
    history = _counted(seen, history, cast)
    if history.streak >= spec.stop_after:
        return _stop(spec, seen, history, cast)
    agree = f"{history.streak} of {spec.stop_after} new evaluations in a row agree"
    return _or_take_back(spec, seen, history, State.INSUFFICIENT, [*unsure, *cast.reasons, agree])


def _broken(
    spec: AutoscalingSpec, seen: Observation, history: History, standing: Alarm, why: str
) -> Decision:
    """An alarm that stands, and whether it has stood long enough to hold the run."""
    if standing.kind == "curve" and seen.forecast is None:
        # Nobody could be asked about this evaluation: it neither agrees nor disagrees.
        return _decided(seen, history, State.BROKEN, [why])
    latest = -1 if seen.latest is None else seen.latest.version
    version = seen.points.version if standing.kind == "curve" else latest
    if standing.kind == "truncated" and not history.was_healthy:
        # Models begin like that, before training has taught them to come to an end: nothing has gone bad yet.
        known = replace(history, version=max(version, history.version))
        return _decided(seen, known, State.BROKEN, [why, "it never was better, so the run is not held"])
    streak = history.streak + (version > history.version)
    history = replace(history, streak=streak, version=max(version, history.version))
    if streak < spec.stop_after:
        count = f"{streak} of {spec.stop_after} new evaluations in a row find it so"
        return _decided(seen, history, State.BROKEN, [why, count])
    count = f"{streak} new evaluations in a row find it so"
    action = Action(kind="hold" if spec.on_broken == "Hold" else "none")
    return _decided(seen, history, State.BROKEN, [why, count], action)


def _counted(seen: Observation, history: History, cast: Vote) -> History:
    version = seen.points.version
    streak = history.streak
    if cast.side is Side.GO_ON:
        streak = 0
    elif cast.side is Side.STOP and version > history.version:
        streak += 1
    return replace(history, streak=streak, version=max(version, history.version))


def _grow(spec: AutoscalingSpec, seen: Observation, history: History, cast: Vote) -> Decision:
    """More generators, if they bring the compute that pays within reach, or one fewer than were tried."""
    rest, now = left(spec, seen, history), pace_now(seen, history)
    have = None if now is None else reach(now, rest)
    reasons = [*cast.reasons, *([rest.doubt] if rest.doubt else [])]

    def goes_on(*why: str) -> Decision:
        decision = _or_take_back(spec, seen, history, State.CONTINUE, [*reasons, *why])
        return replace(decision, reach=have, pays=cast.pays)

    if not cast.valuable:
        return goes_on()
    if now is None or have is None:
        return goes_on(
            "how much compute is left is not known" if now is None else "nothing limits the compute"
        )
    if have >= cast.pays:
        return goes_on()
    binds = f"{have:.3g} more tokens are within reach, {cast.pays:.3g} would pay"
    if history.elasticity is not None and history.elasticity < LEAST_ELASTICITY:
        return goes_on(
            binds, f"the last change had an elasticity of {history.elasticity:.2f}, under {LEAST_ELASTICITY}"
        )
    if seen.staleness.most > seen.staleness.allowed:
        return goes_on(
            binds, f"rollouts are {seen.staleness.most} steps old, {seen.staleness.allowed} are allowed"
        )
    wanted = seen.generators.wanted
    refused = why_not(spec, seen, history, wanted + 1)
    if refused:
        return goes_on(binds, refused)
    if history.elasticity is None and (history.settled is None or pace(seen.recent, history.settled) is None):
        return goes_on(binds, "too few evaluations with these generators to tell later what more of them did")

    def with_generators(count: int) -> float:
        more = (count - wanted) * seen.generators.devices_each
        return reach(now, rest, more, 1.0 if history.elasticity is None else history.elasticity) or 0.0

    most = wanted + 1 if history.elasticity is None else MOST_GROWTH * wanted
    possible = [n for n in range(wanted + 1, most + 1) if not why_not(spec, seen, history, n)]
    to = next((n for n in possible if with_generators(n) >= cast.pays), max(possible, key=with_generators))
    if with_generators(to) < LEAST_MORE * have:
        return goes_on(binds, "more generators would not bring more compute within this budget")
    basis = (
        "elasticity not measured yet: one step, taken back if it does not help"
        if history.elasticity is None
        else f"measured elasticity {history.elasticity:.2f}"
    )
    reasons = [f"{wanted} → {to} generators: {binds}", basis, *reasons]
    grown = scaled(seen, history, to, exploratory=history.elasticity is None)
    decision = _decided(seen, grown, State.GROW, reasons, Action(kind="scale", generators=to))
    return replace(decision, reach=have, pays=cast.pays)


def _or_take_back(
    spec: AutoscalingSpec, seen: Observation, history: History, state: State, reasons: list[str]
) -> Decision:
    """The decision as it is, unless the last step up was a trial that did not help."""
    change = history.change
    if (
        change is None
        or not change.exploratory
        or change.measuring
        or seen.generators.wanted != change.after
        or history.elasticity is None
        or history.elasticity >= LEAST_ELASTICITY
    ):
        return _decided(seen, history, state, reasons)
    refused = why_not(spec, seen, history, change.before)
    what = f"an elasticity of {history.elasticity:.2f} was measured, under {LEAST_ELASTICITY}"
    if refused:
        return _decided(seen, history, state, [*reasons, f"{what}; {refused}"])
    action = Action(kind="scale", generators=change.before)
    back = f"{change.after} → {change.before} generators: {what}"
    return _decided(seen, scaled(seen, history, change.before), state, [back, *reasons], action)


def _decided(
    seen: Observation, history: History, state: State, reasons: list[str], action: Action | None = None
) -> Decision:
    history = replace(history, state=state, unix_seconds=seen.unix_seconds)
    return Decision(state=state, reasons=reasons, action=action or Action(), history=history)


def advice(recipe: Recipe) -> list[str]:
    """What raises the asymptote of a curve that has become flat and this recipe does not do yet, cheapest first.

    More devices do not. Figures from ScaleRL, arXiv 2510.13786: [P] read in the paper, [S] reported by others about it.

    >>> advice(Recipe(batch_completions=2048, context_tokens=32768, fp32_head=True, loss="CISPO"))[0]
    'a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])'
    """
    found = []
    if not recipe.fp32_head:
        found.append("recipe.fp32Head: A .52 → .61 (ScaleRL [P])")
    if recipe.loss != "CISPO":
        found.append(
            "recipe.loss CISPO in place of a clipped one: A .520 → .595 against DAPO's (ScaleRL [S])"
        )
    if recipe.batch_completions < LARGE_BATCH:
        found.append(
            f"a batch of {LARGE_BATCH} completions ({recipe.batch_completions} now): A .610 → .645 from 768 to 2048, "
            "with Cmid 2,542 → 10,909 GPU-hours (ScaleRL [P])"
        )
    if recipe.context_tokens < LONG_CONTEXT:
        found.append(
            f"a context of {LONG_CONTEXT} tokens ({recipe.context_tokens} now): A .610 → .645 from 14k to 32k, "
            "with Cmid 2,542 → 11,272 GPU-hours (ScaleRL [P])"
        )
    found.append(
        "a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])"
    )
    return [
        *found,
        "a new recipe is a new curve with a later midpoint: compare none before it has passed its own",
    ]
