"""A fit as text. ``docs/forecast.md`` has a section for each line."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl_analysis import formatting
from scalerl_analysis.fitted_curve import FittedCurve, State
from scalerl_analysis.pace import Pace, pace_of
from scalerl_analysis.table import aligned
from scalerl_curvefit import Estimate, gain, marginal_gain

MEANINGS = {
    "A": "asymptote",
    "B": "efficiency exponent",
    "Cmid": "compute at half of the gain",
    "R0": "initial reward",
}


def fit_report(
    made: FittedCurve, pace: Pace | None = None, target: float | None = None, budget: float | None = None
) -> list[str]:
    """The lines of the report.

    Args:
        pace: default: that of the file.
        target: reward, on the scale of the file, for which the compute is forecast.
        budget: total compute, in the unit of the file, at which the reward is forecast.

    Raises:
        AnalysisProblem: the target is outside the scale of the file, or the budget lies before this recipe.
    """
    sections = [
        _points(made),
        _headline(made),
        parameters(made),
        _verdict(made),
        _ahead(made, pace or pace_of(made.file), target, budget),
        _basis(made),
        ["what the numbers mean: docs/forecast.md"],
    ]
    lines: list[str] = []
    for section in sections:
        written = list(section)
        lines += ["", *written] if lines and written else written
    return lines


def _points(made: FittedCurve) -> Iterator[str]:
    file, fitted = made.file, made.fitted
    yield f"{file.path}: {formatting.count(fitted.points_used + made.fallen, 'point')} up to {formatting.compute(made.now, file.unit)}"
    yield from left_out(made)
    yield from prior(made)
    if made.fallen:
        yield (
            f"  only the {formatting.count(fitted.points_used, 'point')} before the fall, up to "
            f"{formatting.amount(fitted.now + made.start)}, are fitted"
        )
    elif made.collapse is not None:
        yield "  the run falls from its start: all points are fitted, by a curve that cannot fall, so A, B, Cmid and R0 mean nothing"
    if len(fitted.curve) > fitted.points_used:
        yield "  the evaluation at compute 0 is drawn but not fitted, because the fit uses ln C"
    if file.segments > 1:
        yield (
            f"  only the last of {file.segments} segments is fitted, from line {file.first_line} on: before it another "
            "recipe or evaluation version was measured"
        )
        if made.start:
            yield f"  Cmid counts from the start of this recipe at {formatting.amount(made.start)}"
    if not made.scale.is_unit:
        yield f"  rewards are on the scale of the file, {made.scale.low:g} to {made.scale.high:g}"


def left_out(made: FittedCurve) -> Iterator[str]:
    """Lines with the columns, unless they are named compute and reward, and with the numbers of rows left out."""
    chosen, mixed = made.file.chosen, made.file.mixed
    if chosen.named:
        yield f"  compute is column {chosen.x}, reward is column {chosen.y}"
    if chosen.skipped:
        yield f"  {formatting.count(chosen.skipped, 'row')} skipped, empty in {chosen.x} or {chosen.y}"
    if chosen.replaced:
        yield f"  {formatting.count(chosen.replaced, 'row')} left out, which a resumed run passed again"
    if mixed:
        yield f"  {formatting.count(mixed, 'evaluation')} left out, because the weights changed meanwhile (mixed_versions)"


def prior(made: FittedCurve) -> Iterator[str]:
    """Lines with the earlier runs that count, and the reason for each that is left out or has less than full weight."""
    if not made.earlier:
        return
    counting = [use for use in made.earlier if use.weight > 0]
    names = f" ({', '.join(use.name for use in counting)})" if counting else ""
    yield f"  prior: {formatting.count(len(counting), 'earlier run')}{names}"
    for use in made.earlier:
        if use.reason:
            how = f"counts for {formatting.reward(use.weight)}" if use.weight > 0 else "left out"
            yield f"    {use.name} {how}: {use.reason}"


def _headline(made: FittedCurve) -> Iterator[str]:
    if made.state is State.BROKEN:
        yield f"no forecast: {made.why_broken}"
        return
    first, *others = made.forecasts
    yield f"reward at 2× compute: {made.scale.rewards(first)}"
    for point in others:
        yield f"reward at {formatting.amount(point.compute)}: {made.scale.rewards(point)}"


def parameters(made: FittedCurve) -> list[str]:
    """Lines with the equation of the curve and its parameters, with 90 % intervals."""
    fitted = made.fitted
    rows = [
        ["A", made.scale.rewards(fitted.A), MEANINGS["A"]],
        ["B", formatting.amounts(fitted.B), MEANINGS["B"]],
        ["Cmid", formatting.amounts(fitted.Cmid), MEANINGS["Cmid"]],
        ["R0", made.scale.rewards(fitted.R0), MEANINGS["R0"]],
    ]
    return ["R(C) = R0 + (A − R0) / (1 + (Cmid/C)^B), median (90 % interval)", *aligned(rows)]


def _verdict(made: FittedCurve) -> Iterator[str]:
    if made.state is State.BROKEN:
        yield "state: BROKEN"
        yield from (f"  {reason}" for reason in made.collapse_check.reasons)
        if made.collapse is None:
            yield "  check the completions: they may repeat themselves, or the task may need a longer limit"
        else:
            yield "  check the run for a collapsed policy, a broken verifier or a changed evaluation set"
    elif made.state is State.INSUFFICIENT:
        yield "state: INSUFFICIENT: the asymptote is not identifiable yet"
        yield from (f"  {warning}" for warning in made.warnings)
    else:
        yield (
            f"state: OK: the asymptote is identifiable (its interval is {made.scale.width(made.fitted.A)} wide; "
            f"now is {formatting.amount(float(f'{made.fitted.now / made.fitted.Cmid.median:.2g}'))} × Cmid), if the equation holds"
        )
    if not made.collapse_check.checked:
        yield "  too few points for the collapse guard"


def _ahead(made: FittedCurve, pace: Pace, target: float | None, budget: float | None) -> Iterator[str]:
    reach = None if target is None else made.reach(target)
    spent = None if budget is None else made.ahead([budget], "`budget`")[0]
    if made.state is State.BROKEN:
        return
    fitted = made.fitted
    margin = marginal_gain(fitted)
    rows = [
        ["by the next doubling of compute", made.scale.gains(gain(fitted, 2.0 * fitted.now))],
        ["up to the asymptote", made.scale.gains(made.left_to_asymptote())],
    ]
    unit, rate = ("unit of compute", 1.0) if pace.rate is None else ("device-hour", pace.rate)
    per = made.scale.changes(Estimate(margin.median * rate, margin.low * rate, margin.high * rate))
    rows.append([f"at the margin, per {unit}", f"+{formatting.amounts(per)}"])
    yield "still to be gained"
    yield from aligned(rows)
    if pace.rate is not None:
        shown = f"{formatting.amount(pace.rate)} {made.file.unit}".rstrip()
        yield f"  compute per device-hour: {shown} ({pace.how})"
    if reach is not None:
        yield ""
        yield (
            f"compute to a reward of {made.scale.reward(reach.target, 3)}: {formatting.reached(reach, fitted.now, made.start)}; "
            f"reached at all with probability {formatting.probability(reach.probability)}"
        )
    if spent is not None:
        yield ""
        yield f"reward at the budget of {formatting.amount(spent.compute)}: {made.scale.rewards(spent)}"


def _basis(made: FittedCurve) -> Iterator[str]:
    fitted = made.fitted
    yield "basis of the forecasts"
    if fitted.burn_in_points:
        yield f"  the first {formatting.count(fitted.burn_in_points, 'point')} count less (burn-in)"
    noise = fitted.sigma
    yield (
        f"  noise of one evaluation: sd {made.scale.differences(noise)}, correlation of neighbours {formatting.reward(fitted.rho)}"
    )
    yield f"  beyond now a forecast departs by an sd of {made.scale.difference(fitted.departure)} with each doubling"
    rate, size = fitted.pool.mean_late_rise, fitted.pool.reach
    yield f"  late rise: with probability {formatting.reward(rate)} a doubling, by up to {made.scale.difference(size)}"
    for past in made.hindcasts:
        yield (
            f"  hindcast: at {formatting.amount(past.made_at + made.start)} the forecast for "
            f"{formatting.amount(past.until + made.start)} was {made.scale.rewards(past)}; observed {made.scale.reward(past.observed)}"
        )
    if not made.hindcasts:
        yield "  hindcasts: none, too few points at half of the compute"
    for edge in fitted.edges:
        yield (
            f"  prior bound met: {edge.parameter} {edge.side} ({made.bound(edge)}) holds {100 * edge.mass:.0f} % of the "
            "posterior; there the bound, not the points, sets the interval"
        )
