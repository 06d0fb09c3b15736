"""``scalerl plan``: prints and draws the plan of a curve."""

from __future__ import annotations

import argparse
import json
from datetime import datetime

from scalerl_analysis.costs import Prices
from scalerl_analysis.plans import plan, plan_json, plan_report
from scalerl_analysis.plotting import check_target
from scalerl_cli.curves.fit import analysed
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo


def run_plan(arguments: argparse.Namespace, when: datetime | None = None) -> int:
    """Plan, draw if ``--plot`` is given, and print; after an error nothing is printed. Returns the exit code."""
    check_target(arguments.plot)
    made = plan(
        analysed(arguments),
        budgets=arguments.budget,
        prices=Prices(arguments.price, arguments.value_per_point),
        rate=arguments.rate,
        devices=arguments.devices,
        generators=arguments.generators,
        devices_per_generator=arguments.devices_per_generator,
        elasticity=arguments.elasticity,
        when=when,
    )
    lines = list(plan_report(made))
    if arguments.plot:
        from scalerl_analysis.pictures import draw_plan

        draw_plan(made, arguments.plot)
        lines.append(f"picture: {arguments.plot}")
    echo(json.dumps(plan_json(made), allow_nan=False) if arguments.json else "\n".join(lines))
    return DONE
