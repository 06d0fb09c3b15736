"""``scalerl plan``: expected reward, cost and date of each option for more compute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from scalerl_cli.curves import formatting
from scalerl_cli.curves.analysis import Analysis, State, interval_json
from scalerl_cli.curves.costs import Growth, Option, Prices, growths, options, paying_block
from scalerl_cli.curves.fit import analysed
from scalerl_cli.curves.pace import Pace, pace_of
from scalerl_cli.curves.plotting import check_target
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.report import left_out, prior
from scalerl_cli.exits import DONE
from scalerl_cli.output import say
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
        from scalerl_cli.curves.plan_picture import draw_plan

        draw_plan(outlook, arguments.plot)
        lines.append(f"picture: {arguments.plot}")
    say(json.dumps(as_json(outlook), allow_nan=False) if arguments.json else "\n".join(lines))
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
        yield from (f"  {reason}" for reason in made.guarded.reasons)
        return
    yield from formatting.table(_rows(outlook))
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
        yield from (f"  {doubt}" for doubt in made.doubts)
    yield ""
    yield "what the numbers mean: docs/forecast.md"


def _rows(outlook: Outlook) -> list[list[str]]:
    """Rows of the table of options, without columns whose values are unknown."""
    choices, made = outlook.options, outlook.made
    rows = [["", "total compute", "reward (90 %)", "gain (90 %)"]]
    rows += [
        [
            o.name,
            formatting.amount(o.compute),
            made.scale.rewards(o.forecast),
            "–" if o.gain is None else made.scale.gains(o.gain),
        ]
        for o in choices
    ]
    columns: list[tuple[str, list[str | None]]] = [
        (
            "device-hours",
            [None if o.device_hours is None else formatting.amount(o.device_hours) for o in choices],
        ),
        ("cost", [None if o.cost is None else formatting.amount(o.cost) for o in choices]),
        ("mean gain", [*(made.scale.difference(o.mean_gain) for o in choices)]),
        ("value − cost", [None if o.net is None else formatting.amount(o.net) for o in choices]),
        (
            "done by",
            [
                None
                if o.wall_hours is None
                else formatting.date(outlook.when, o.wall_hours)
                if o.more
                else "now"
                for o in choices
            ],
        ),
    ]
    for name, cells in columns:
        if None not in cells:
            for row, cell in zip(rows, [name, *cells], strict=True):
                row.append(str(cell))
    return rows


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
    head = [""]
    for grown in outlook.growths:
        head += [f"{grown.generators} gen., {formatting.significant(grown.speed)}× speed", "done by"]
        head += [
            name
            for name, known in zip(("cost", "value − cost"), grown.worth[0], strict=True)
            if known is not None
        ]
    rows = [head]
    for i, option in enumerate(outlook.options):
        if option.more > 0:
            row = [option.name]
            for grown in outlook.growths:
                used, wall = grown.spent[i]
                row += [f"{formatting.amount(used)} device-hours", formatting.date(outlook.when, wall)]
                row += [formatting.amount(known) for known in grown.worth[i] if known is not None]
            rows.append(row)
    yield from formatting.table(rows)


def as_json(outlook: Outlook) -> dict[str, Any]:
    """The object of ``--json``; unknown values are null."""
    made, pace, block = outlook.made, outlook.pace, outlook.block
    return {
        "state": str(made.state),
        "doubts": [*made.guarded.reasons, *made.doubts],
        "now": made.now,
        "compute_per_device_hour": pace.rate,
        "devices": pace.devices,
        "elasticity": outlook.elasticity,
        "options": [
            {
                "option": o.name,
                "compute": o.compute,
                "reward": interval_json(made.scale.levels(o.forecast)),
                "gain": None if o.gain is None else interval_json(made.scale.changes(o.gain)),
                "mean_gain": made.scale.change(o.mean_gain),
                "device_hours": o.device_hours,
                "cost": o.cost,
                "net": o.net,
                "wall_hours": o.wall_hours,
                "date": None if o.wall_hours is None else formatting.date(outlook.when, o.wall_hours),
            }
            for o in outlook.options
        ],
        **({"skipped": made.file.chosen.skipped} if made.file.chosen.skipped else {}),
        **({"prior": made.prior_json} if made.earlier else {}),
        "generators": [
            {
                "generators": g.generators,
                "devices": g.devices,
                "speed": g.speed,
                "options": [
                    {"option": o.name, "device_hours": used, "cost": cost, "net": net, "wall_hours": wall}
                    for o, (used, wall), (cost, net) in zip(outlook.options, g.spent, g.worth, strict=True)
                ],
            }
            for g in outlook.growths
        ],
        "best_block": None
        if block is None
        else {"compute": block.compute, "gain": made.scale.change(block.gain), "net": block.net},
    }
