"""``scalerl fit``: fits a curve, and prints and draws the result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from scalerl_analysis.curve_columns import Columns
from scalerl_analysis.curve_file import read_curve
from scalerl_analysis.fit_text import fit_report
from scalerl_analysis.fitted_curve import FittedCurve, State, fit_curve
from scalerl_analysis.pace import pace_of
from scalerl_analysis.plotting import check_target
from scalerl_analysis.prior import read_prior
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo


def run_fit(arguments: argparse.Namespace) -> int:
    """Fit, draw if ``--plot`` is given, and print; after an error nothing is printed. Returns the exit code."""
    check_target(arguments.plot)
    echo(_written(arguments, analysed(arguments, arguments.at)))
    return DONE


def columns_of(arguments: argparse.Namespace) -> Columns:
    """The options that select and scale the columns of a file."""
    return Columns(
        arguments.x,
        arguments.y,
        arguments.samples,
        arguments.resumed,
        arguments.scale,
        arguments.unit,
        getattr(arguments, "device_hours_column", None),
    )


def analysed(arguments: argparse.Namespace, at: Sequence[float] = ()) -> FittedCurve:
    """The analysis of the file of a command, with its prior, and forecasts at ``at``."""
    columns = columns_of(arguments)
    file = read_curve(arguments.curve, columns)
    return fit_curve(file, at, read_prior(arguments.prior, file, columns), arguments.late_rises)


def _written(arguments: argparse.Namespace, made: FittedCurve) -> str:
    pace = pace_of(made.file, arguments.rate)
    lines = fit_report(made, pace, arguments.target, arguments.budget)
    if arguments.plot:
        from scalerl_analysis.pictures import draw_fit

        draw_fit(
            made,
            arguments.plot,
            budget=arguments.budget,
            target=arguments.target,
            log=arguments.log,
        )
        lines.append(f"picture: {arguments.plot}")
    if not arguments.json:
        return "\n".join(lines)
    if made.state is State.BROKEN:
        echo(f"{made.file.path}: no forecast: {'; '.join(made.collapse_check.reasons)}", error=True)
    shown = made.as_json(arguments.target, arguments.budget)
    return json.dumps(shown, allow_nan=False)
