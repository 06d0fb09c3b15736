"""A plan: expected reward, cost and date of each option for more compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from scalerl_analysis import formatting
from scalerl_analysis.costs import Growth, Option, Prices, growths, options, paying_block
from scalerl_analysis.fit_text import left_out, prior
from scalerl_analysis.fitted_curve import FittedCurve, State
from scalerl_analysis.pace import Pace, pace_of
from scalerl_analysis.problem import AnalysisProblem
from scalerl_analysis.table import Column, Table
from scalerl_curvefit import Block


@dataclass(frozen=True, eq=False)
class Plan:
    """The content of a plan."""

    made: FittedCurve
    pace: Pace
    prices: Prices
    elasticity: float | None
    """The given elasticity, else the measured one; None if unknown."""
    when: datetime
    """Start of the options."""
    options: list[Option]
    growths: list[Growth]
    block: Block | None


def plan(
    made: FittedCurve,
    *,
    budgets: Sequence[float] = (),
    prices: Prices | None = None,
    rate: float | None = None,
    devices: float | None = None,
    generators: Sequence[int] = (),
    devices_per_generator: float = 1.0,
    elasticity: float | None = None,
    when: datetime | None = None,
) -> Plan:
    """What stopping now, 2× and 4× the compute, and each budget would give and cost.

    Args:
        budgets: further device-hours.
        rate, devices: compute per device-hour and number of devices, in place of those measured in the file.
        generators: numbers of generators to compare; the first is the present one.
        elasticity: d ln(compute per hour)/d ln(devices), in place of that measured in the file.
        when: start of the options (default: now).

    Raises:
        AnalysisProblem: a budget, a price or a number of generators is given, and what it needs is neither given nor in the file.
    """
    prices = prices or Prices(None, None)
    pace = pace_of(made.file, rate, devices)
    if prices.value is not None and prices.price is None:
        raise AnalysisProblem("`value` needs `price`, the cost that the value is compared with")
    choices = options(made, pace, prices, budgets)
    grown = growths(pace, prices, choices, generators, devices_per_generator, elasticity)
    return Plan(
        made,
        pace,
        prices,
        pace.elasticity if elasticity is None else elasticity,
        when or datetime.now().astimezone(),
        choices,
        grown,
        paying_block(made, pace, prices, choices),
    )


def plan_report(plan: Plan) -> Iterator[str]:
    """The lines of the report."""
    made, pace = plan.made, plan.pace
    yield f"{made.file.path}: now at {formatting.compute(made.now, made.file.unit)}"
    yield from left_out(made)
    yield from prior(made)
    if made.file.segments > 1:
        yield f"  only the last recipe or evaluation version is fitted, from line {made.file.first_line} on"
    rate = f"{formatting.amount(pace.rate)} ({pace.how})" if pace.rate else pace.how
    yield f"  compute per device-hour: {rate}"
    if pace.devices is not None:
        yield f"  {formatting.significant(pace.devices)} devices in use"
    yield ""
    if made.state is State.BROKEN:
        yield f"no plan: {made.why_broken} (BROKEN)"
        yield from (f"  {reason}" for reason in made.collapse_check.reasons)
        return
    yield from _table(plan).lines("  ")
    if made.start:
        yield "  2× and 4× are multiples of the compute of this recipe so far"
    if plan.block is not None:
        yield ""
        yield _block(plan)
    if plan.growths:
        yield ""
        yield from _grown(plan)
    if made.state is State.INSUFFICIENT:
        yield ""
        yield "INSUFFICIENT: the asymptote is not identifiable yet; rely on the nearest rows only"
        yield from (f"  {warning}" for warning in made.warnings)
    yield ""
    yield "what the numbers mean: docs/forecast.md"


def _table(plan: Plan) -> Table:
    """The options. Columns whose values are unknown are not shown."""
    scale = plan.made.scale
    hours, cost, net, wall, date = _spent_columns()
    columns = [
        Column("option", ""),
        Column("compute", "total compute", formatting.amount),
        Column("reward", "reward (90 %)", scale.rewards, scale.levels),
        Column("gain", "gain (90 %)", scale.gains, scale.changes),
        *(hours, cost, Column("mean_gain", "mean gain", scale.difference, scale.change), net, wall, date),
    ]
    return Table(columns, [_row(plan, option) for option in plan.options], unknown="–")


def _spent_columns() -> list[Column]:
    """Columns of what an option takes and costs."""
    return [
        Column("device_hours", "device-hours", formatting.amount, complete=True),
        Column("cost", "cost", formatting.amount, complete=True),
        Column("net", "value − cost", formatting.amount, complete=True),
        Column("wall_hours"),
        Column("date", "done by", complete=True),
    ]


def _row(plan: Plan, option: Option) -> dict[str, Any]:
    wall = option.wall_hours
    return {
        **asdict(option),
        "option": option.name,
        "reward": option.forecast,
        "gain": option.gain,
        "date": None if wall is None else formatting.date(plan.when, wall),
    }


def _block(plan: Plan) -> str:
    block, rate = plan.block, plan.pace.rate
    if block is None or rate is None or block.compute == 0:
        return "best further block: none; its price is above the value of any expected gain: stop"
    young = "; INSUFFICIENT: do not spend by it" if plan.made.state is State.INSUFFICIENT else ""
    return (
        f"best further block: {formatting.amount(block.compute / rate)} device-hours for {plan.made.scale.difference(block.gain)} of reward, "
        f"value − cost {formatting.amount(block.net)}{young}"
    )


def _grown(plan: Plan) -> Iterator[str]:
    how = "as measured in this run" if plan.elasticity == plan.pace.elasticity else "as given"
    yield (
        f"with other numbers of generators (elasticity {formatting.significant(plan.elasticity or 0.0, 2)}, {how}); "
        "the rewards stay the same: the number of generators changes the speed, not the curve"
    )
    columns = [
        Column("generators", "generators"),
        Column("speed", "speed", lambda speed: f"{formatting.significant(speed)}×"),
        Column("option", ""),
        *_spent_columns(),
    ]
    rows = [
        {"generators": grown.generators, "speed": grown.speed} | _row(plan, option)
        for grown in plan.growths
        for option in grown.options
        if option.more > 0
    ]
    yield from Table(columns, rows).lines("  ")


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; unknown values are null."""
    made, pace, block = plan.made, plan.pace, plan.block
    return {
        "state": str(made.state),
        "doubts": [*made.collapse_check.reasons, *made.warnings],
        "now": made.now,
        "compute_per_device_hour": pace.rate,
        "devices": pace.devices,
        "elasticity": plan.elasticity,
        "options": _table(plan).objects(),
        **({"skipped": made.file.chosen.skipped} if made.file.chosen.skipped else {}),
        **({"prior": made.prior_json} if made.earlier else {}),
        "generators": [
            {
                "generators": g.generators,
                "devices": g.devices,
                "speed": g.speed,
                "options": Table(
                    [Column("option"), *_spent_columns()], [_row(plan, option) for option in g.options]
                ).objects(),
            }
            for g in plan.growths
        ],
        "best_block": None
        if block is None
        else {"compute": block.compute, "gain": made.scale.change(block.gain), "net": block.net},
    }
