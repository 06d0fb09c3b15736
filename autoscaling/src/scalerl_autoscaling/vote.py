"""The vote of one evaluation's forecast for or against a stop, and whether the forecast suffices for a vote. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

import msgspec

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import BestBlock, ForecastAnswer, Outlook
from scalerl_autoscaling.models import Observation, Pace

ENOUGH_POINTS: Final = 10
MAX_A_WIDTH: Final = 0.15
MAX_BEFORE_CMID: Final = 0.2
"""With fewer points, or beyond these two, the asymptote is not identified and nothing is decided: on simulated curves of the
published parameters, the reward at twice the compute was off by more than .02 in one of four at 2·Cmid, and in two of
three at Cmid."""

STOP_BELOW: Final = 0.13
"""P(gain at the horizon > minGain) below which the vote is to stop; some .015 of it are late rises, which no fit can exclude."""
RELEASE_AT: Final = 0.25
"""The same P from which the vote is to continue; between the two it is neither."""
TARGET_BELOW: Final = 0.05
"""P(R(Cmax) > target) below which the vote is to stop."""
TARGET_RELEASE_AT: Final = 0.2
"""The same P from which the vote is to continue."""
RELEASE_RETURN: Final = 0.1
"""With a price: the net return of a block, as a share of its price, from which the vote is to continue."""
PATIENCE: Final = 0.5
"""Share of the budget from which a run without any rise can be stopped. docs/autoscaling.md has the frontier between reward
lost and compute saved from which it was chosen."""
FLAT_STOP_BELOW: Final = 0.08
FLAT_RELEASE_AT: Final = 0.16
"""STOP_BELOW and RELEASE_AT for P of a flat run, which has that of a first rise."""
FIT_EXPECTS_GAIN: Final = 0.2
"""P(gain at the horizon > minGain) of a fit from which a run is not flat, however uncertain its asymptote is: a rise that
accelerates has a low mean trend too."""
WORTH_MORE_DEVICES: Final = 0.5
"""P(gain at the horizon > minGain), or P(A > target), from which continuing is worth more devices."""
EARLIER_COUNT: Final = 0.1
"""Total weight from which the method uses earlier runs. A run of at least this weight is named; without one, all are."""
MAX_NAMES: Final = 5


class Side(enum.IntEnum):
    """Ordered: of several rules, the one nearest to a stop decides."""

    CONTINUE = 0
    NEITHER = 1
    STOP = 2


@dataclass(frozen=True)
class Vote:
    """One evaluation's vote.

    Attributes:
        worth_scaling: continuing is worth more devices.
        worthwhile_compute: further compute that would pay, in tokens.
    """

    side: Side
    reasons: tuple[str, ...]
    worth_scaling: bool
    worthwhile_compute: float


def insufficiency(spec: AutoscalingSpec, observation: Observation) -> list[str]:
    """Why the forecast does not suffice for a vote; empty if it does."""
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
    if width > MAX_A_WIDTH:
        found.append(f"the 90 % interval of the asymptote is {width:.2f} wide, more than {MAX_A_WIDTH}")
    if fit.p_before_cmid > MAX_BEFORE_CMID:
        found.append(f"half of the gain still lies ahead with probability {fit.p_before_cmid:.2f}")
    if not found and not fit.identifiable:
        found.extend(fit.warnings or ["the asymptote is not identifiable"])
    if spec.price_per_device_hour is None and answer.outlook is not None:
        found.extend(_undecidable(spec, answer, answer.outlook))
    if answer.outlook is None:
        found.append("the answer has no outlook")
    elif spec.price_per_device_hour is not None and answer.outlook.best_block is None:
        found.append("what a device-hour buys is not known yet, so nothing can be said in money")
    return found


def _undecidable(spec: AutoscalingSpec, answer: ForecastAnswer, outlook: Outlook) -> list[str]:
    """Whether ``minGain`` is below what an evaluation can tell from noise, and the samples that would do."""
    least = outlook.decidable_gain
    if least is msgspec.UNSET or float(spec.min_gain) >= least:
        return []
    needed = outlook.samples_needed
    remedy = (
        "a larger minGain"
        if needed is msgspec.UNSET
        else f"evaluations of {needed:,} samples, or a larger minGain"
    )
    return [
        f"minGain {spec.min_gain} is below three standard deviations of an evaluation, {least:.3f}, so a gain of it cannot be "
        f"forecast; {remedy} would do"
    ]


def vote(spec: AutoscalingSpec, answer: ForecastAnswer, outlook: Outlook) -> Vote:
    """The vote of a forecast without :func:`insufficiency`: by price or else by gain, and by the target if there is one."""
    ahead = (float(spec.horizon) - 1.0) * answer.fit.now
    block = outlook.best_block if spec.price_per_device_hour is not None else None
    if block is not None:
        votes = [_by_price(spec, block)]
        worth_scaling, worthwhile = block.net > 0, block.compute
    else:
        votes = [_by_gain(spec, answer, outlook)]
        worth_scaling, worthwhile = outlook.p_gain_above_min >= WORTH_MORE_DEVICES, ahead
    if spec.target is not None:
        p_ever = outlook.p_asymptote_above_target
        if block is None and p_ever is not None:
            worth_scaling, worthwhile = p_ever >= WORTH_MORE_DEVICES, _to_target(answer, outlook, ahead)
        if outlook.p_target_at_max_compute is not None:
            p = outlook.p_target_at_max_compute
            text = f"P(reward > {spec.target} within what may be used) is {p:.2f}"
            late = 0.0 if outlook.p_late_rise is msgspec.UNSET else outlook.p_late_rise
            votes.append((_side(p, TARGET_BELOW + late, TARGET_RELEASE_AT + late), text))
    votes.sort(key=lambda one: one[0], reverse=True)
    side = votes[0][0]
    return Vote(side, tuple(text for _, text in votes), worth_scaling and side is Side.CONTINUE, worthwhile)


def flat_vote(spec: AutoscalingSpec, answer: ForecastAnswer) -> Vote | None:
    """The vote to stop a run that does not rise, whatever its fit says; None if it rises, or it is too early.

    With a price there is none: a flat run has no best block to compare with the price.
    """
    flat = answer.flat
    if (
        flat is msgspec.UNSET
        or answer.outlook is None
        or spec.price_per_device_hour is not None
        or answer.fit.points_used < ENOUGH_POINTS
        or flat.share < PATIENCE
        or answer.outlook.p_gain_above_min >= FIT_EXPECTS_GAIN
    ):
        return None
    side = _side(flat.p_gain, FLAT_STOP_BELOW, FLAT_RELEASE_AT)
    if side is Side.CONTINUE:
        return None
    slope = flat.slope
    text = (
        f"nothing happens: {slope.median:+.3f} ({slope.low:+.3f} to {slope.high:+.3f}) with each doubling of compute, at "
        f"{flat.share:.0%} of what may be used; P(gain > {spec.min_gain}) is {flat.p_gain:.2f}, that of a first rise so "
        f"late, {flat.p_late:.2f}, included"
    )
    return Vote(side, (text,), False, 0.0)


def stop_price(spec: AutoscalingSpec, answer: ForecastAnswer, pace: Pace | None) -> list[str]:
    """What a stop forgoes and what it saves: the expected gain up to the horizon, its interval, and the compute for it.

    Empty without an expected gain.
    """
    outlook = answer.outlook
    if outlook is None or outlook.expected_gain is msgspec.UNSET:
        return []
    tokens = (float(spec.horizon) - 1.0) * answer.fit.now
    cost = f"{tokens:.3g} more tokens"
    if pace is not None:
        hours = tokens / pace.tokens_per_second * pace.devices / 3600.0
        cost += f", {hours:,.1f} device-hours at the present pace"
        if spec.price_per_device_hour is not None:
            cost += f", a cost of {float(spec.price_per_device_hour) * hours:,.2f}"
    gain = outlook.gain
    return [
        f"a stop forgoes an expected gain of {outlook.expected_gain:+.3f} (90 %: {gain.low:+.3f} to {gain.high:+.3f}) at "
        f"{spec.horizon}× the compute, P(gain > {spec.min_gain}) {outlook.p_gain_above_min:.2f}, and saves {cost}"
    ]


def stop_caveat(answer: ForecastAnswer) -> list[str]:
    """The loss if a stop is wrong; empty without a probability of late rises."""
    outlook = answer.outlook
    if outlook is None or outlook.p_late_rise is msgspec.UNSET:
        return []
    late, known = outlook.late_rise, ""
    if late is not msgspec.UNSET:
        known = f"; late rises in public curves gained {late.low:.2f} to {late.high:.2f}"
    return [
        f"where this is wrong: the forecast's 95th percentile is {outlook.gain.high:+.3f}{known}; resuming takes it back"
    ]


def prior_runs(answer: ForecastAnswer | None) -> list[str]:
    """Names of the earlier runs that the forecast used as a prior, by weight."""
    if answer is None or answer.earlier is msgspec.UNSET:
        return []
    if sum(use.weight for use in answer.earlier) < EARLIER_COUNT:
        return []
    uses = sorted(answer.earlier, key=lambda use: -use.weight)
    heavy = [use.name for use in uses if use.weight >= EARLIER_COUNT]
    return heavy or [use.name for use in uses if use.weight > 0]


def prior_note(answer: ForecastAnswer) -> str:
    """``with 3 earlier runs as prior: a, b, c``; empty without a prior."""
    names = prior_runs(answer)
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    runs = "run" if len(names) == 1 else "runs"
    return f"with {len(names)} earlier {runs} as prior: {', '.join(names[:MAX_NAMES])}{more}"


def _by_gain(spec: AutoscalingSpec, answer: ForecastAnswer, outlook: Outlook) -> tuple[Side, str]:
    """Before half of the budget, a fit alone does not stop a run: the run must have gained something, and have stopped to."""
    p, flat, late = outlook.p_gain_above_min, answer.flat, outlook.p_late_rise
    text = f"P(gain at {spec.horizon}× the compute > {spec.min_gain}) is {p:.2f}"
    doublings, more = math.log2(float(spec.horizon)), 0.0
    if late is not msgspec.UNSET:
        text += f", that of an unannounced rise, {late:.2f}, included"
        # The thresholds are for a horizon of one doubling; a longer one adds late rises to P.
        more = late - (1.0 - (1.0 - late) ** (1.0 / doublings))
    side = _side(p, STOP_BELOW + more, RELEASE_AT + more)
    # At low rewards, or far ahead, a fit has a wider distribution than the trend of its points.
    flat_cast = flat_vote(spec, answer) if side is Side.NEITHER else None
    if flat_cast is not None and flat_cast.side is Side.STOP:
        return Side.STOP, f"{text}; {flat_cast.reasons[0]}"
    if side is not Side.STOP or flat is msgspec.UNSET or flat.share >= PATIENCE:
        return side, text
    least, early = float(spec.min_gain), f"at {flat.share:.0%} of what may be used"
    if flat.gained < least:
        return Side.NEITHER, f"{text}, but it has gained nothing yet {early}"
    if flat.slope.high * doublings >= least:
        return Side.NEITHER, f"{text}, but it still gained up to {flat.slope.high:.3f} a doubling {early}"
    return side, text


def _by_price(spec: AutoscalingSpec, block: BestBlock) -> tuple[Side, str]:
    if block.net <= 0:
        return Side.STOP, "no further compute is worth its price"
    text = f"the best further block gains {block.gain:.3f} and is worth {block.net:.2f} more than it costs"
    if block.compute <= 0:
        return Side.STOP, text
    worth = 100.0 * float(spec.value_per_point or 0) * block.gain
    return Side.CONTINUE if block.net >= RELEASE_RETURN * (worth - block.net) else Side.NEITHER, text


def _side(p: float, stop_below: float, release_at: float) -> Side:
    if p < stop_below:
        return Side.STOP
    return Side.CONTINUE if p >= release_at else Side.NEITHER


def _to_target(answer: ForecastAnswer, outlook: Outlook, otherwise: float) -> float:
    """Further compute to the target, in tokens; ``otherwise`` where the forecast does not reach it."""
    median = None if outlook.to_target is None else outlook.to_target.median
    if median is None:
        return otherwise
    return max(0.0, median - (answer.fit.now + answer.fit.segment_start))
