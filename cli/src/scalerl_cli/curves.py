"""``scalerl fit`` and ``scalerl plan``: print and draw what the analysis makes of a curve; after an error, nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from scalerl_analysis.costs import Prices
from scalerl_analysis.curve_columns import Columns
from scalerl_analysis.curve_file import read_curve
from scalerl_analysis.fit_text import fit_report
from scalerl_analysis.fitted_curve import FittedCurve, State, fit_curve
from scalerl_analysis.pace import pace_of
from scalerl_analysis.plans import plan, plan_json, plan_report
from scalerl_analysis.plotting import check_target
from scalerl_analysis.prior import read_prior
from scalerl_cli.exits import DONE, options_named
from scalerl_cli.output import echo


def run_fit(arguments: argparse.Namespace) -> int:
    """Run ``scalerl fit``; returns its exit code."""
    check_target(arguments.plot)
    made = analysed(arguments, arguments.at)
    target, budget = arguments.target, arguments.budget
    lines = fit_report(made, pace_of(made.file, arguments.rate), target, budget)
    if arguments.plot:
        from scalerl_analysis.pictures import draw_fit

        draw_fit(made, arguments.plot, budget=budget, target=target, log=arguments.log)
        lines.append(f"picture: {arguments.plot}")
    if arguments.json and made.state is State.BROKEN:
        echo(f"{made.file.path}: no forecast: {'; '.join(made.collapse_check.reasons)}", error=True)
    text = options_named("\n".join(lines))
    echo(json.dumps(made.as_json(target, budget), allow_nan=False) if arguments.json else text)
    return DONE


def run_plan(arguments: argparse.Namespace, when: datetime | None = None) -> int:
    """Run ``scalerl plan``; returns its exit code."""
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
    echo(json.dumps(plan_json(made), allow_nan=False) if arguments.json else options_named("\n".join(lines)))
    return DONE


def columns_of(arguments: argparse.Namespace) -> Columns:
    """The options that select and scale the columns of a file."""
    names = ("x", "y", "samples", "resumed", "scale", "unit", "device_hours_column")
    values: list[Any] = [getattr(arguments, name, None) for name in names]
    return Columns(*values)


def analysed(arguments: argparse.Namespace, at: Sequence[float] = ()) -> FittedCurve:
    """The analysis of the file of a command, with its prior, and forecasts at ``at``."""
    columns = columns_of(arguments)
    file = read_curve(arguments.curve, columns)
    return fit_curve(file, at, read_prior(arguments.prior, file, columns), arguments.late_rises)
