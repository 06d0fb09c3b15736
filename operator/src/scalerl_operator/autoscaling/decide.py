"""Stops a run that no longer pays, scales one that time would cut short, and reports when the curve does not decide. Pure.

The same spec, observation and history give the same decision, bit for bit: replay rests on that.

| state | when |
|---|---|
| BROKEN | an alarm is raised (:mod:`.alarm`); ``stopAfter`` consecutive new evaluations with it hold the run |
| INSUFFICIENT | no believable forecast (:func:`.vote.doubts`) |
| STOP | ``stopAfter`` consecutive new evaluations voted for it (:mod:`.vote`), by the fit or because nothing happens, and none has voted against it since |
| GROW | the vote is to continue, budget or deadline end before it has paid off, and more generators help |
| CONTINUE | otherwise |
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_operator.autoscaling.alarm import alarm, is_healthy
from scalerl_operator.autoscaling.generator_history import remember, scaled, why_not
from scalerl_operator.autoscaling.models import Action, Alarm, Decision, History, Observation, Recipe, State
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


def decide(spec: AutoscalingSpec, observation: Observation, history: History) -> Decision:
    """The decision on one observation, and the history for the next.

    A stop or a hold is repeated while it stands, so that nothing depends on its delivery; an evaluation counts once, however
    often it is observed.
    """
    history = remember(spec, observation, history)
    active, why = alarm(spec, observation, history)
    if (active is not None) != (history.state is State.BROKEN):
        # What was counted is another thing from here on.
        history = replace(history, streak=0)
    history = replace(history, alarm=active, was_healthy=history.was_healthy or is_healthy(observation))
    if active is not None:
        return _broken(spec, observation, history, active, why)
    unsure = doubts(spec, observation)
    if unsure:
        flat = None if observation.forecast is None else flat_vote(spec, observation.forecast)
        if flat is not None:
            return _voted_flat(spec, observation, history, flat, unsure)
        if observation.forecast is not None:
            # This evaluation has a forecast and did not agree. One without a forecast does neither.
            history = replace(history, streak=0, version=max(history.version, observation.points.version))
        return _or_revert(spec, observation, history, State.INSUFFICIENT, unsure)
    assert observation.forecast is not None
    assert observation.forecast.outlook is not None
    cast = vote(spec, observation.forecast, observation.forecast.outlook)
    history = _counted(observation, history, cast)
    if history.streak >= spec.stop_after:
        return _stop(spec, observation, history, cast)
    if cast.side is Side.STOP:
        reasons = [*cast.reasons, f"{history.streak} of {spec.stop_after} new evaluations in a row agree"]
        return replace(
            _or_revert(spec, observation, history, State.CONTINUE, reasons), advice=advice(observation.recipe)
        )
    return _grow(spec, observation, history, cast)


def _stop(spec: AutoscalingSpec, observation: Observation, history: History, cast: Vote) -> Decision:
    assert observation.forecast is not None
    agree = ", ".join(
        filter(None, [f"{history.streak} new evaluations in a row agree", with_earlier(observation.forecast)])
    )
    reasons = [*cast.reasons, agree, *if_wrong(observation.forecast)]
    decision = _decided(observation, history, State.STOP, reasons, Action(kind="stop", on_stop=spec.on_stop))
    return replace(decision, advice=advice(observation.recipe), pays=0.0)


def _voted_flat(
    spec: AutoscalingSpec, observation: Observation, history: History, cast: Vote, unsure: list[str]
) -> Decision:
    """Of a run that no fit can be believed of because nothing happens."""
    history = _counted(observation, history, cast)
    if history.streak >= spec.stop_after:
        return _stop(spec, observation, history, cast)
    agree = f"{history.streak} of {spec.stop_after} new evaluations in a row agree"
    return _or_revert(spec, observation, history, State.INSUFFICIENT, [*unsure, *cast.reasons, agree])


def _broken(
    spec: AutoscalingSpec, observation: Observation, history: History, active: Alarm, why: str
) -> Decision:
    """An alarm that stands, and whether it has stood long enough to hold the run."""
    if active.kind == "curve" and observation.forecast is None:
        # Without a forecast this evaluation neither agrees nor disagrees.
        return _decided(observation, history, State.BROKEN, [why])
    latest = -1 if observation.latest is None else observation.latest.version
    version = observation.points.version if active.kind == "curve" else latest
    if active.kind == "truncated" and not history.was_healthy:
        # Models begin like that, before training has taught them to come to an end: nothing has gone bad yet.
        known = replace(history, version=max(version, history.version))
        return _decided(
            observation, known, State.BROKEN, [why, "it never was better, so the run is not held"]
        )
    streak = history.streak + (version > history.version)
    history = replace(history, streak=streak, version=max(version, history.version))
    if streak < spec.stop_after:
        count = f"{streak} of {spec.stop_after} new evaluations in a row find it so"
        return _decided(observation, history, State.BROKEN, [why, count])
    count = f"{streak} new evaluations in a row find it so"
    action = Action(kind="hold" if spec.on_broken == "Hold" else "none")
    return _decided(observation, history, State.BROKEN, [why, count], action)


def _counted(observation: Observation, history: History, cast: Vote) -> History:
    version = observation.points.version
    streak = history.streak
    if cast.side is Side.CONTINUE:
        streak = 0
    elif cast.side is Side.STOP and version > history.version:
        streak += 1
    return replace(history, streak=streak, version=max(version, history.version))


def _grow(spec: AutoscalingSpec, observation: Observation, history: History, cast: Vote) -> Decision:
    """More generators, if they bring the compute that pays within reach, or one fewer than were tried."""
    rest, now = left(spec, observation, history), pace_now(observation, history)
    have = None if now is None else reach(now, rest)
    reasons = [*cast.reasons, *([rest.doubt] if rest.doubt else [])]

    def continued(*why: str) -> Decision:
        decision = _or_revert(spec, observation, history, State.CONTINUE, [*reasons, *why])
        return replace(decision, reach=have, pays=cast.pays)

    if not cast.valuable:
        return continued()
    if now is None or have is None:
        return continued(
            "how much compute is left is not known" if now is None else "nothing limits the compute"
        )
    if have >= cast.pays:
        return continued()
    binds = f"{have:.3g} more tokens are within reach, {cast.pays:.3g} would pay"
    if history.elasticity is not None and history.elasticity < LEAST_ELASTICITY:
        return continued(
            binds, f"the last change had an elasticity of {history.elasticity:.2f}, under {LEAST_ELASTICITY}"
        )
    if observation.staleness.most > observation.staleness.allowed:
        return continued(
            binds,
            f"rollouts are {observation.staleness.most} steps old, {observation.staleness.allowed} are allowed",
        )
    wanted = observation.generators.wanted
    refused = why_not(spec, observation, history, wanted + 1)
    if refused:
        return continued(binds, refused)
    if history.elasticity is None and (
        history.settled is None or pace(observation.recent, history.settled) is None
    ):
        return continued(
            binds, "too few evaluations with these generators to tell later what more of them did"
        )

    def with_generators(count: int) -> float:
        more = (count - wanted) * observation.generators.devices_each
        return reach(now, rest, more, 1.0 if history.elasticity is None else history.elasticity) or 0.0

    most = wanted + 1 if history.elasticity is None else MOST_GROWTH * wanted
    possible = [n for n in range(wanted + 1, most + 1) if not why_not(spec, observation, history, n)]
    to = next((n for n in possible if with_generators(n) >= cast.pays), max(possible, key=with_generators))
    if with_generators(to) < LEAST_MORE * have:
        return continued(binds, "more generators would not bring more compute within this budget")
    basis = (
        "elasticity not measured yet: one step, taken back if it does not help"
        if history.elasticity is None
        else f"measured elasticity {history.elasticity:.2f}"
    )
    reasons = [f"{wanted} → {to} generators: {binds}", basis, *reasons]
    grown = scaled(observation, history, to, exploratory=history.elasticity is None)
    decision = _decided(observation, grown, State.GROW, reasons, Action(kind="scale", generators=to))
    return replace(decision, reach=have, pays=cast.pays)


def _or_revert(
    spec: AutoscalingSpec, observation: Observation, history: History, state: State, reasons: list[str]
) -> Decision:
    """The decision as it is, unless the last step up was a trial that did not help."""
    change = history.change
    if (
        change is None
        or not change.exploratory
        or change.measuring
        or observation.generators.wanted != change.after
        or history.elasticity is None
        or history.elasticity >= LEAST_ELASTICITY
    ):
        return _decided(observation, history, state, reasons)
    refused = why_not(spec, observation, history, change.before)
    what = f"an elasticity of {history.elasticity:.2f} was measured, under {LEAST_ELASTICITY}"
    if refused:
        return _decided(observation, history, state, [*reasons, f"{what}; {refused}"])
    action = Action(kind="scale", generators=change.before)
    back = f"{change.after} → {change.before} generators: {what}"
    return _decided(observation, scaled(observation, history, change.before), state, [back, *reasons], action)


def _decided(
    observation: Observation, history: History, state: State, reasons: list[str], action: Action | None = None
) -> Decision:
    history = replace(history, state=state, unix_seconds=observation.unix_seconds)
    return Decision(state=state, reasons=reasons, action=action or Action(), history=history)


def advice(recipe: Recipe) -> list[str]:
    """What raises the asymptote of a curve that has become flat and this recipe does not do yet, cheapest first.

    More devices do not. Figures from ScaleRL, arXiv 2510.13786: [P] read in the paper, [S] reported by others about it.

    >>> advice(Recipe(batch_completions=2048, context_tokens=32768, fp32_head=True, loss="cispo"))[0]
    'a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])'
    """
    found = []
    if not recipe.fp32_head:
        found.append("recipe.fp32Logits Both: A .52 → .61 (ScaleRL [P])")
    if recipe.loss.lower() not in ("cispo", "gspo"):
        found.append(
            "recipe.loss cispo in place of a clipped one: A .520 → .595 against DAPO's (ScaleRL [S])"
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
