"""``scalerl plan``: expected reward, cost and date of each option for more compute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State
from scalerl_cli.curves.costs import Growth, Option, Prices, growths, options, paying_block
from scalerl_cli.curves.fit import analysed
from scalerl_cli.curves.pace import Pace, pace_of
from scalerl_cli.curves.plotting import check_target
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.report import left_out, prior
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo
from scalerl_cli.table import Column, Table
from scalerl_curvefit import Block


@dataclass(frozen=True, eq=False)
class Outlook:
    """The content of a plan."""

    made: Analysis
    pace: Pace
    prices: Prices
    elasticity: float | None
    """The given elasticity, else the measured one; None if unknown."""
    when: datetime
    """Start of the options."""
    options: list[Option]
    growths: list[Growth]
    block: Block | None


def run_plan(arguments: argparse.Namespace, when: datetime | None = None) -> int:
    """Plan, draw if ``--plot`` is given, and print; after an error nothing is printed. Returns the exit code."""
    check_target(arguments.plot)
    outlook = _outlook(arguments, when or datetime.now().astimezone())
    lines = list(plan_report(outlook))
    if arguments.plot:
        from scalerl_cli.curves.pictures import draw_plan

        draw_plan(outlook, arguments.plot)
        lines.append(f"picture: {arguments.plot}")
    echo(json.dumps(as_json(outlook), allow_nan=False) if arguments.json else "\n".join(lines))
    return DONE


def _outlook(arguments: argparse.Namespace, when: datetime) -> Outlook:
    made = analysed(arguments)
    pace = pace_of(made.file, arguments.rate, arguments.devices)
    prices = Prices(arguments.price, arguments.value_per_point)
    if prices.value is not None and prices.price is None:
        raise CurveProblem("--value-per-point needs --price, the cost that the value is compared with")
    choices = options(made, pace, prices, arguments.budget)
    grown = growths(
        pace, prices, choices, arguments.generators, arguments.devices_per_generator, arguments.elasticity
    )
    elasticity = pace.elasticity if arguments.elasticity is None else arguments.elasticity
    return Outlook(
        made, pace, prices, elasticity, when, choices, grown, paying_block(made, pace, prices, choices)
    )


def plan_report(outlook: Outlook) -> Iterator[str]:
    """The lines of the report."""
    made, pace = outlook.made, outlook.pace
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
    yield from _table(outlook).lines("  ")
    if made.start:
        yield "  2× and 4× are multiples of the compute of this recipe so far"
    if outlook.block is not None:
        yield ""
        yield _block(outlook)
    if outlook.growths:
        yield ""
        yield from _grown(outlook)
    if made.state is State.INSUFFICIENT:
        yield ""
        yield "INSUFFICIENT: the asymptote is not identifiable yet; rely on the nearest rows only"
        yield from (f"  {warning}" for warning in made.warnings)
    yield ""
    yield "what the numbers mean: docs/forecast.md"


def _table(outlook: Outlook) -> Table:
    """The options. Columns whose values are unknown are not shown."""
    scale = outlook.made.scale
    hours, cost, net, wall, date = _spent_columns()
    columns = [
        Column("option", ""),
        Column("compute", "total compute", formatting.amount),
        Column("reward", "reward (90 %)", scale.rewards, scale.levels),
        Column("gain", "gain (90 %)", scale.gains, scale.changes),
        *(hours, cost, Column("mean_gain", "mean gain", scale.difference, scale.change), net, wall, date),
    ]
    return Table(columns, [_row(outlook, option) for option in outlook.options], unknown="–")


def _spent_columns() -> list[Column]:
    """Columns of what an option takes and costs."""
    return [
        Column("device_hours", "device-hours", formatting.amount, complete=True),
        Column("cost", "cost", formatting.amount, complete=True),
        Column("net", "value − cost", formatting.amount, complete=True),
        Column("wall_hours"),
        Column("date", "done by", complete=True),
    ]


def _row(outlook: Outlook, option: Option) -> dict[str, Any]:
    wall = option.wall_hours
    return {
        **asdict(option),
        "option": option.name,
        "reward": option.forecast,
        "gain": option.gain,
        "date": None if wall is None else formatting.date(outlook.when, wall),
    }


def _block(outlook: Outlook) -> str:
    block, rate = outlook.block, outlook.pace.rate
    if block is None or rate is None or block.compute == 0:
        return "best further block: none; its price is above the value of any expected gain: stop"
    young = "; INSUFFICIENT: do not spend by it" if outlook.made.state is State.INSUFFICIENT else ""
    return (
        f"best further block: {formatting.amount(block.compute / rate)} device-hours for {outlook.made.scale.difference(block.gain)} of reward, "
        f"value − cost {formatting.amount(block.net)}{young}"
    )


def _grown(outlook: Outlook) -> Iterator[str]:
    how = "as measured in this run" if outlook.elasticity == outlook.pace.elasticity else "as given"
    yield (
        f"with other numbers of generators (elasticity {formatting.significant(outlook.elasticity or 0.0, 2)}, {how}); "
        "the rewards stay the same: the number of generators changes the speed, not the curve"
    )
    columns = [
        Column("generators", "generators"),
        Column("speed", "speed", lambda speed: f"{formatting.significant(speed)}×"),
        Column("option", ""),
        *_spent_columns(),
    ]
    rows = [
        {"generators": grown.generators, "speed": grown.speed} | _row(outlook, option)
        for grown in outlook.growths
        for option in grown.options
        if option.more > 0
    ]
    yield from Table(columns, rows).lines("  ")


def as_json(outlook: Outlook) -> dict[str, Any]:
    """The object of ``--json``; unknown values are null."""
    made, pace, block = outlook.made, outlook.pace, outlook.block
    return {
        "state": str(made.state),
        "doubts": [*made.collapse_check.reasons, *made.warnings],
        "now": made.now,
        "compute_per_device_hour": pace.rate,
        "devices": pace.devices,
        "elasticity": outlook.elasticity,
        "options": _table(outlook).objects(),
        **({"skipped": made.file.chosen.skipped} if made.file.chosen.skipped else {}),
        **({"prior": made.prior_json} if made.earlier else {}),
        "generators": [
            {
                "generators": g.generators,
                "devices": g.devices,
                "speed": g.speed,
                "options": Table(
                    [Column("option"), *_spent_columns()], [_row(outlook, option) for option in g.options]
                ).objects(),
            }
            for g in outlook.growths
        ],
        "best_block": None
        if block is None
        else {"compute": block.compute, "gain": made.scale.change(block.gain), "net": block.net},
    }
