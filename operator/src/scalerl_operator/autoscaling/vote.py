"""What one evaluation's forecast says: whether it can be believed, and for or against stopping. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

import msgspec

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import ForecastAnswer, Outlook
from scalerl_operator.autoscaling.alarm import too_small_fall
from scalerl_operator.autoscaling.models import Observation

ENOUGH_POINTS: Final = 10
WIDEST_A: Final = 0.15
MOST_BEFORE_CMID: Final = 0.2
"""Beyond these three the asymptote is not identified, and nothing is decided: on simulated curves of the
published parameters the reward at twice the compute was off by more than .02 in one of four at 2·Cmid,
in two of three at Cmid."""

STOP_BELOW: Final = 0.18
"""P(gain at the horizon > minGain) that votes for a stop; some .06 of it are late rises, which no fit can exclude."""
RELEASE_AT: Final = 0.28
"""From where it votes against one; in between it does neither."""
TARGET_BELOW: Final = 0.05
"""P(R(Cmax) > target) that votes for a stop."""
TARGET_RELEASE_AT: Final = 0.2
"""From where it votes against one."""
RELEASE_RETURN: Final = 0.1
"""With money: what a block has to return beyond its price, as a share of it, to vote against a stop."""
PATIENCE: Final = 0.5
"""Share of what may be used from where a run that shows nothing can be stopped; see docs/autoscaling.md for the
frontier between reward lost and compute saved that it was chosen on."""
FIT_EXPECTS_GAIN: Final = 0.7
"""P(gain at the horizon > minGain) of a fit from where the run is not flat, however uncertain its asymptote is: a rise
that gains speed has a low mean trend too."""
WORTH_MORE_DEVICES: Final = 0.5
"""P(gain at the horizon > minGain), or P(A > target), from which continuing is worth more devices."""
EARLIER_COUNT: Final = 0.1
"""Weight in all from which on the method uses earlier runs; one of its own is named from there on, or where none has so much."""
MOST_NAMES: Final = 5
METHOD_1_STOP_BELOW: Final = 0.1
METHOD_1_RELEASE_AT: Final = 0.2
"""As above, for answers of method 1, which had no late rises in P."""


class Side(enum.IntEnum):
    """Ordered: of several rules the one that says the most for a stop counts."""

    CONTINUE = 0
    NEITHER = 1
    STOP = 2


@dataclass(frozen=True)
class Vote:
    """One evaluation's say.

    valuable: continuing is worth more devices. pays: further compute that would pay, in tokens.
    """

    side: Side
    reasons: tuple[str, ...]
    valuable: bool
    pays: float


def doubts(spec: AutoscalingSpec, observation: Observation) -> list[str]:
    """Why there is no believable forecast; empty if there is one."""
    answer = observation.forecast
    if answer is None:
        return [observation.trouble or "no forecast was made"]
    fit = answer.fit
    found = []
    if fit.points_used < ENOUGH_POINTS:
        found.append(
            f"{fit.points_used} evaluations that can be used since the recipe or the evaluation set last changed, "
            f"fewer than {ENOUGH_POINTS}"
        )
    width = fit.A.high - fit.A.low
    if width > WIDEST_A:
        found.append(f"the 90 % interval of the asymptote is {width:.2f} wide, more than {WIDEST_A}")
    if fit.p_before_cmid > MOST_BEFORE_CMID:
        found.append(f"half of the gain still lies ahead with probability {fit.p_before_cmid:.2f}")
    if not found and not fit.identifiable:
        found.extend(fit.doubts or ["the asymptote is not identifiable"])
    if answer.outlook is None:
        found.append(too_small_fall(answer.guard) or "the answer has no outlook")
    elif spec.price_per_device_hour is not None and answer.outlook.best_block is None:
        found.append("what a device-hour buys is not known yet, so nothing can be said in money")
    return found


def vote(spec: AutoscalingSpec, answer: ForecastAnswer, outlook: Outlook) -> Vote:
    """Of a forecast without :func:`doubts`: by money or else by gain, and by the target if there is one."""
    ahead = (float(spec.horizon) - 1.0) * answer.fit.now
    block = outlook.best_block if spec.price_per_device_hour is not None else None
    if block is not None:
        said = [(_by_return(spec, block.compute, block.gain, block.net), _block_text(block.gain, block.net))]
        valuable, pays = block.net > 0, block.compute
    else:
        p = outlook.p_gain_above_min
        text = f"P(gain at {spec.horizon}× the compute > {spec.min_gain}) is {p:.2f}"
        if answer.method is msgspec.UNSET:
            said = [(_by_probability(p, METHOD_1_STOP_BELOW, METHOD_1_RELEASE_AT), text)]
        else:
            said = [_by_gain(spec, answer, outlook, text)]
        valuable, pays = p >= WORTH_MORE_DEVICES, ahead
    if spec.target is not None:
        p_ever = outlook.p_asymptote_above_target
        if block is None and p_ever is not None:
            valuable, pays = p_ever >= WORTH_MORE_DEVICES, _to_target(answer, outlook, ahead)
        if outlook.p_target_at_max_compute is not None:
            p = outlook.p_target_at_max_compute
            text = f"P(reward > {spec.target} within what may be used) is {p:.2f}"
            late = 0.0 if outlook.p_late_rise is msgspec.UNSET else outlook.p_late_rise
            said.append((_by_probability(p, TARGET_BELOW + late, TARGET_RELEASE_AT + late), text))
    side = max(one for one, _ in said)
    said.sort(key=lambda one: one[0], reverse=True)
    return Vote(side, tuple(text for _, text in said), valuable and side is Side.CONTINUE, pays)


def flat_vote(spec: AutoscalingSpec, answer: ForecastAnswer) -> Vote | None:
    """For a stop, because nothing happens, whatever a fit says; None if the points do not say it.

    Where a price decides, a flat run has no best block to be held against it, so this says nothing.
    """
    flat = answer.flat
    if (
        flat is msgspec.UNSET
        or answer.outlook is None
        or spec.price_per_device_hour is not None
        or answer.fit.points_used < ENOUGH_POINTS
        or flat.share < PATIENCE
        or (answer.method != 2 and answer.outlook.p_gain_above_min >= FIT_EXPECTS_GAIN)
    ):
        return None
    side = _by_probability(flat.p_gain, STOP_BELOW, RELEASE_AT)
    if side is Side.CONTINUE:
        return None
    slope = flat.slope
    text = (
        f"nothing happens: {slope.median:+.3f} ({slope.low:+.3f} to {slope.high:+.3f}) with each doubling of compute, at "
        f"{flat.share:.0%} of what may be used; P(gain > {spec.min_gain}) is {flat.p_gain:.2f}, that of a first rise so "
        f"late, {flat.p_late:.2f}, included"
    )
    return Vote(side, (text,), False, 0.0)


def if_wrong(answer: ForecastAnswer) -> list[str]:
    """What a wrong stop loses; nothing where the answer does not say (method 1)."""
    outlook = answer.outlook
    if outlook is None or outlook.p_late_rise is msgspec.UNSET:
        return []
    late = outlook.late_rise
    known = (
        ""
        if late is msgspec.UNSET
        else f"; late rises in public curves gained {late.low:.2f} to {late.high:.2f}"
    )
    return [
        f"where this is wrong: the forecast's 95th percentile is {outlook.gain.high:+.3f}{known}; resuming takes it back"
    ]


def counted(answer: ForecastAnswer | None) -> list[str]:
    """Names of the earlier runs that counted, by weight."""
    if answer is None or answer.earlier is msgspec.UNSET:
        return []
    if sum(use.weight for use in answer.earlier) < EARLIER_COUNT:
        return []
    uses = sorted(answer.earlier, key=lambda use: -use.weight)
    heavy = [use.name for use in uses if use.weight >= EARLIER_COUNT]
    return heavy or [use.name for use in uses if use.weight > 0]


def with_earlier(answer: ForecastAnswer | None) -> str:
    """``with 3 earlier runs as prior: a, b, c``; empty where none counted."""
    names = counted(answer)
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    runs = "run" if len(names) == 1 else "runs"
    return f"with {len(names)} earlier {runs} as prior: {', '.join(names[:MOST_NAMES])}{more}"


def _by_gain(spec: AutoscalingSpec, answer: ForecastAnswer, outlook: Outlook, text: str) -> tuple[Side, str]:
    """Before half of what may be used a fit alone is not enough: the run must have gained something, and have stopped to."""
    flat, late = answer.flat, outlook.p_late_rise
    text += "" if late is msgspec.UNSET else f", that of an unannounced rise, {late:.2f}, included"
    more = _late_rises_beyond_a_doubling(spec, outlook)
    side = _by_probability(outlook.p_gain_above_min, STOP_BELOW + more, RELEASE_AT + more)
    # At low rewards, or far ahead, a fit leaves room for more than its points show: they say it themselves.
    shown = flat_vote(spec, answer) if side is Side.NEITHER else None
    if shown is not None and shown.side is Side.STOP:
        return Side.STOP, f"{text}; {shown.reasons[0]}"
    if side is not Side.STOP or flat is msgspec.UNSET or flat.share >= PATIENCE:
        return side, text
    least, early = float(spec.min_gain), f"at {flat.share:.0%} of what may be used"
    if flat.gained < least:
        return Side.NEITHER, f"{text}, but it has gained nothing yet {early}"
    if flat.slope.high * math.log2(float(spec.horizon)) >= least:
        return Side.NEITHER, f"{text}, but it still gained up to {flat.slope.high:.3f} a doubling {early}"
    return side, text


def _late_rises_beyond_a_doubling(spec: AutoscalingSpec, outlook: Outlook) -> float:
    """What late rises add to P at a horizon other than 2, which the bounds are for."""
    late = outlook.p_late_rise
    return (
        0.0
        if late is msgspec.UNSET
        else late - (1.0 - (1.0 - late) ** (1.0 / math.log2(float(spec.horizon))))
    )


def _by_probability(p: float, stop_below: float, release_at: float) -> Side:
    if p < stop_below:
        return Side.STOP
    return Side.CONTINUE if p >= release_at else Side.NEITHER


def _by_return(spec: AutoscalingSpec, compute: float, gain: float, net: float) -> Side:
    if net <= 0 or compute <= 0:
        return Side.STOP
    worth = 100.0 * float(spec.value_per_point or 0) * gain
    return Side.CONTINUE if net >= RELEASE_RETURN * (worth - net) else Side.NEITHER


def _block_text(gain: float, net: float) -> str:
    if net <= 0:
        return "no further compute is worth its price"
    return f"the best further block gains {gain:.3f} and is worth {net:.2f} more than it costs"


def _to_target(answer: ForecastAnswer, outlook: Outlook, otherwise: float) -> float:
    median = None if outlook.to_target is None else outlook.to_target.median
    if median is None:
        return otherwise
    return max(0.0, median - (answer.fit.now + answer.fit.segment_start))
