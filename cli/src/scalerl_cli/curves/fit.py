"""``scalerl fit``: fits a curve, and prints and draws the result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from scalerl_cli.curves.analysis import Analysis, State, analyse
from scalerl_cli.curves.columns import Columns
from scalerl_cli.curves.pace import pace_of
from scalerl_cli.curves.plotting import check_target
from scalerl_cli.curves.prior import read_prior
from scalerl_cli.curves.report import report
from scalerl_cli.curves.source import read_curve
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo


def run_fit(arguments: argparse.Namespace) -> int:
    """Fit, draw if ``--plot`` is given, and print; after an error nothing is printed. Returns the exit code."""
    check_target(arguments.plot)
    echo(_written(arguments, analysed(arguments, arguments.at)))
    return DONE


def analysed(arguments: argparse.Namespace, at: Sequence[float] = ()) -> Analysis:
    """The analysis of the file of a command, with its prior, and forecasts at ``at``."""
    columns = Columns.of(arguments)
    file = read_curve(arguments.curve, columns)
    return analyse(file, at, read_prior(arguments.prior, file, columns), arguments.late_rises)


def _written(arguments: argparse.Namespace, made: Analysis) -> str:
    pace = pace_of(made.file, arguments.rate)
    lines = report(made, pace, arguments.target, arguments.budget)
    if arguments.plot:
        from scalerl_cli.curves.pictures import draw_fit

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
