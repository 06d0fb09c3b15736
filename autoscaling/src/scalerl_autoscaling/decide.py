"""Decides whether to stop a run, add generators, or hold a broken run. Pure.

The same spec, observation and history give the same decision, bit for bit. A replay compares the reasons too, so a text that
is recorded stays as it is.

| state | when |
|---|---|
| BROKEN | an alarm is active (:mod:`.alarm`); ``stopAfter`` consecutive new evaluations with it hold the run |
| INSUFFICIENT | there is no forecast, or it does not suffice for a decision (:func:`.vote.insufficiency`) |
| STOP | ``stopAfter`` consecutive new evaluations voted for a stop (:mod:`.vote`), and none has voted against it since |
| GROW | the vote is to continue, budget or deadline end before that pays off, and more generators help |
| CONTINUE | otherwise |
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_autoscaling.alarm import alarm, is_healthy
from scalerl_autoscaling.decision_history import after_scaling, scaling_refusal, updated
from scalerl_autoscaling.models import Action, Alarm, Decision, History, Observation, Recipe, State
from scalerl_autoscaling.throughput import pace_now, reach, remaining, settled_pace
from scalerl_autoscaling.vote import (
    Side,
    Vote,
    flat_vote,
    insufficiency,
    prior_note,
    stop_caveat,
    stop_price,
    vote,
)

MIN_ELASTICITY: Final = 0.7
"""d ln(tokens/s) / d ln(devices) under which more devices are mostly wasted."""
MIN_MORE: Final = 1.01
"""More generators must bring at least this many times the compute."""
MAX_GROWTH: Final = 2
"""A measured elasticity is extrapolated to at most so many times the generators it was measured with."""
CLIPPED_LOSS: Final = "ppoclip"
"""The loss that clips the ratio of each token, in lower case."""
LARGE_BATCH: Final = 2048
LONG_CONTEXT: Final = 32_768


def decide(spec: AutoscalingSpec, observation: Observation, history: History) -> Decision:
    """The decision on one observation, and the history for the next.

    A stop or a hold is repeated while its condition holds, so that nothing depends on its delivery. Each evaluation counts
    once, however often it is observed.
    """
    history = updated(spec, observation, history)
    active, why = alarm(observation, history)
    if (active is not None) != (history.state is State.BROKEN):
        # The votes count something else from here on.
        history = replace(history, consecutive_votes=0)
    history = replace(
        history,
        alarm=active,
        seen_healthy_evaluation=history.seen_healthy_evaluation or is_healthy(observation),
    )
    if active is not None:
        return _broken(spec, observation, history, active, why)
    answer = observation.forecast
    lacking = insufficiency(spec, observation)
    cast: Vote | None
    if not lacking:
        assert answer is not None
        assert answer.outlook is not None
        cast = vote(spec, answer, answer.outlook)
    else:
        cast = None if answer is None else flat_vote(spec, answer)
    if cast is None:
        if answer is not None:
            # A forecast that does not suffice resets the consecutive votes. Without a forecast they stay.
            history = replace(
                history, consecutive_votes=0, version=max(history.version, observation.points.version)
            )
        return _or_revert(spec, observation, history, State.INSUFFICIENT, lacking)
    history = _counted(observation, history, cast)
    if history.consecutive_votes >= spec.stop_after:
        return _stop(spec, observation, history, cast)
    agree = f"{history.consecutive_votes} of {spec.stop_after} new evaluations in a row agree"
    if lacking:
        reasons = [*lacking, *cast.reasons, agree]
        return _or_revert(spec, observation, history, State.INSUFFICIENT, reasons)
    if cast.side is Side.STOP:
        decision = _or_revert(spec, observation, history, State.CONTINUE, [*cast.reasons, agree])
        return replace(decision, advice=advice(observation.recipe))
    return _grow(spec, observation, history, cast)


def _stop(spec: AutoscalingSpec, observation: Observation, history: History, cast: Vote) -> Decision:
    assert observation.forecast is not None
    agree = f"{history.consecutive_votes} new evaluations in a row agree"
    if prior := prior_note(observation.forecast):
        agree += f", {prior}"
    price = stop_price(spec, observation.forecast, pace_now(observation, history))
    reasons = [*cast.reasons, agree, *price, *stop_caveat(observation.forecast)]
    decision = _decided(observation, history, State.STOP, reasons, Action(kind="stop", on_stop=spec.on_stop))
    return replace(decision, advice=advice(observation.recipe), worthwhile_compute=0.0)


def _broken(
    spec: AutoscalingSpec, observation: Observation, history: History, active: Alarm, why: str
) -> Decision:
    """The decision while an alarm is active; it holds the run after ``stopAfter`` new evaluations."""
    if active.kind == "curve" and observation.forecast is None:
        # Whether this evaluation has fallen too is unknown.
        return _decided(observation, history, State.BROKEN, [why])
    latest = -1 if observation.latest is None else observation.latest.version
    version = observation.points.version if active.kind == "curve" else latest
    consecutive_votes = history.consecutive_votes + (version > history.version)
    history = replace(history, version=max(version, history.version))
    if active.kind == "truncated" and not history.seen_healthy_evaluation:
        # Many completions of an untrained model are cut off; training has not made this run worse.
        reasons = [why, "it never was better, so the run is not held"]
        return _decided(observation, history, State.BROKEN, reasons)
    history = replace(history, consecutive_votes=consecutive_votes)
    if consecutive_votes < spec.stop_after:
        count = f"{consecutive_votes} of {spec.stop_after} new evaluations in a row find it so"
        return _decided(observation, history, State.BROKEN, [why, count])
    count = f"{consecutive_votes} new evaluations in a row find it so"
    action = Action(kind="hold" if spec.on_broken == "Hold" else "none")
    return _decided(observation, history, State.BROKEN, [why, count], action)


def _counted(observation: Observation, history: History, cast: Vote) -> History:
    version = observation.points.version
    consecutive_votes = history.consecutive_votes
    if cast.side is Side.CONTINUE:
        consecutive_votes = 0
    elif cast.side is Side.STOP and version > history.version:
        consecutive_votes += 1
    return replace(history, consecutive_votes=consecutive_votes, version=max(version, history.version))


def _grow(spec: AutoscalingSpec, observation: Observation, history: History, cast: Vote) -> Decision:
    """The smallest number of generators that brings the compute that pays within reach; else :func:`_or_revert`."""
    limits, now = remaining(spec, observation, history), pace_now(observation, history)
    reachable = None if now is None else reach(now, limits)
    reasons = [*cast.reasons, *([limits.deadline_note] if limits.deadline_note else [])]

    def continued(*why: str) -> Decision:
        decision = _or_revert(spec, observation, history, State.CONTINUE, [*reasons, *why])
        return replace(decision, affordable_compute=reachable, worthwhile_compute=cast.worthwhile_compute)

    if not cast.worth_scaling:
        return continued()
    if now is None or reachable is None:
        return continued(
            "how much compute is left is not known" if now is None else "nothing limits the compute"
        )
    if reachable >= cast.worthwhile_compute:
        return continued()
    shortfall = f"{reachable:.3g} more tokens are within reach, {cast.worthwhile_compute:.3g} would pay"
    elasticity = history.elasticity
    if elasticity is not None and elasticity < MIN_ELASTICITY:
        return continued(
            shortfall, f"the last change had an elasticity of {elasticity:.2f}, under {MIN_ELASTICITY}"
        )
    staleness = observation.staleness
    if staleness.most > staleness.allowed:
        return continued(
            shortfall, f"rollouts are {staleness.most} steps old, {staleness.allowed} are allowed"
        )
    wanted = observation.generators.wanted
    refused = scaling_refusal(spec, observation, history, wanted + 1)
    if refused:
        return continued(shortfall, refused)
    if elasticity is None and settled_pace(observation, history) is None:
        return continued(
            shortfall, "too few evaluations with these generators to tell later what more of them did"
        )

    def reachable_with(count: int) -> float:
        more = (count - wanted) * observation.generators.devices_each
        return reach(now, limits, more, 1.0 if elasticity is None else elasticity) or 0.0

    most = wanted + 1 if elasticity is None else MAX_GROWTH * wanted
    possible = [n for n in range(wanted + 1, most + 1) if not scaling_refusal(spec, observation, history, n)]
    to = next(
        (n for n in possible if reachable_with(n) >= cast.worthwhile_compute),
        max(possible, key=reachable_with),
    )
    if reachable_with(to) < MIN_MORE * reachable:
        return continued(shortfall, "more generators would not bring more compute within this budget")
    basis = (
        "elasticity not measured yet: one step, taken back if it does not help"
        if elasticity is None
        else f"measured elasticity {elasticity:.2f}"
    )
    reasons = [f"{wanted} → {to} generators: {shortfall}", basis, *reasons]
    grown = after_scaling(observation, history, to, exploratory=elasticity is None)
    decision = _decided(observation, grown, State.GROW, reasons, Action(kind="scale", scale_to=to))
    return replace(decision, affordable_compute=reachable, worthwhile_compute=cast.worthwhile_compute)


def _or_revert(
    spec: AutoscalingSpec, observation: Observation, history: History, state: State, reasons: list[str]
) -> Decision:
    """The decision without an action, or with the removal of generators that were added exploratorily and did not help."""
    change, elasticity = history.change, history.elasticity
    if (
        change is None
        or not change.exploratory
        or change.measuring
        or observation.generators.wanted != change.after
        or elasticity is None
        or elasticity >= MIN_ELASTICITY
    ):
        return _decided(observation, history, state, reasons)
    measured = f"an elasticity of {elasticity:.2f} was measured, under {MIN_ELASTICITY}"
    refused = scaling_refusal(spec, observation, history, change.before)
    if refused:
        return _decided(observation, history, state, [*reasons, f"{measured}; {refused}"])
    reasons = [f"{change.after} → {change.before} generators: {measured}", *reasons]
    action = Action(kind="scale", scale_to=change.before)
    return _decided(observation, after_scaling(observation, history, change.before), state, reasons, action)


def _decided(
    observation: Observation, history: History, state: State, reasons: list[str], action: Action | None = None
) -> Decision:
    history = replace(history, state=state, unix_seconds=observation.unix_seconds)
    return Decision(state=state, reasons=reasons, action=action or Action(), history=history)


def advice(recipe: Recipe) -> list[str]:
    """Changes of the recipe that raise the asymptote, which more devices do not; the cheapest first.

    Figures from ScaleRL, arXiv 2510.13786: [P] from the paper, [S] from reports of others about it.

    >>> advice(Recipe(batch_completions=2048, context_tokens=32768, fp32_head=True, loss="cispo"))[0]
    'a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])'
    """
    changes = [
        (not recipe.fp32_head, "recipe.fp32Logits Both: A .52 → .61 (ScaleRL [P])"),
        (
            recipe.loss.lower() == CLIPPED_LOSS,
            "recipe.loss cispo in place of a clipped one: A .520 → .595 against DAPO's (ScaleRL [S])",
        ),
        (
            recipe.batch_completions < LARGE_BATCH,
            f"a batch of {LARGE_BATCH} completions ({recipe.batch_completions} now): A .610 → .645 from 768 to 2048, "
            "with Cmid 2,542 → 10,909 GPU-hours (ScaleRL [P])",
        ),
        (
            recipe.context_tokens < LONG_CONTEXT,
            f"a context of {LONG_CONTEXT} tokens ({recipe.context_tokens} now): A .610 → .645 from 14k to 32k, "
            "with Cmid 2,542 → 11,272 GPU-hours (ScaleRL [P])",
        ),
    ]
    return [
        *(text for applies, text in changes if applies),
        "a larger model: A .610 → .710 with the Scout mixture of experts, Cmid 2,542 → 4,242 GPU-hours (ScaleRL [P])",
        "a new recipe is a new curve with a later midpoint: compare none before it has passed its own",
    ]
