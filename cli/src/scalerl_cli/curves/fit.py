"""``scalerl fit``: fits a curve, and prints and draws the result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from scalerl_cli.curves.analysis import Analysis, State, analyse
from scalerl_cli.curves.columns import Columns
from scalerl_cli.curves.comparison import comparison_json, comparison_report, doubts, pair, verdict
from scalerl_cli.curves.pace import pace_of
from scalerl_cli.curves.plotting import check_target
from scalerl_cli.curves.prior import read_prior
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.recipes import Rule
from scalerl_cli.curves.report import report
from scalerl_cli.curves.source import read_curve
from scalerl_cli.exits import DONE
from scalerl_cli.output import say


def run_fit(arguments: argparse.Namespace) -> int:
    """Fit, draw if ``--plot`` is given, and print; after an error nothing is printed. Returns the exit code."""
    check_target(arguments.plot)
    _check_together(arguments)
    made = analysed(arguments, arguments.at)
    say(_compared(arguments, made) if arguments.compare else _alone(arguments, made))
    return DONE


def _check_together(arguments: argparse.Namespace) -> None:
    """Raise CurveProblem for an option that a comparison does not support."""
    alone = {
        "--target": arguments.target is not None,
        "--budget": arguments.budget is not None,
        "--alternatives": arguments.alternatives,
        "--log": arguments.log,
        "--prior": bool(arguments.prior),
    }
    asked = [option for option, given in alone.items() if given]
    if arguments.compare and asked:
        raise CurveProblem(f"{', '.join(asked)}: not with --compare; use it with each file alone")


def analysed(arguments: argparse.Namespace, at: Sequence[float] = ()) -> Analysis:
    """The analysis of the file of a command, with its prior, and forecasts at ``at``."""
    columns = Columns.of(arguments)
    file = read_curve(arguments.curve, columns)
    return analyse(file, at, read_prior(arguments.prior, file, columns), arguments.late_rises)


def _alone(arguments: argparse.Namespace, made: Analysis) -> str:
    pace = pace_of(made.file, arguments.rate)
    lines = report(made, pace, arguments.target, arguments.budget, arguments.alternatives)
    if arguments.plot:
        from scalerl_cli.curves.fit_picture import draw_fit

        draw_fit(
            made,
            arguments.plot,
            budget=arguments.budget,
            target=arguments.target,
            alternatives=arguments.alternatives,
            log=arguments.log,
        )
        lines.append(f"picture: {arguments.plot}")
    if not arguments.json:
        return "\n".join(lines)
    if made.state is State.BROKEN:
        say(f"{made.file.path}: no forecast: {'; '.join(made.guarded.reasons)}", error=True)
    shown = made.as_json(arguments.target, arguments.budget, alternatives=arguments.alternatives)
    return json.dumps(shown, allow_nan=False)


def _compared(arguments: argparse.Namespace, made: Analysis) -> str:
    other = read_curve(arguments.compare, Columns.of(arguments))
    table = pair(made, analyse(other, arguments.at, None, arguments.late_rises))
    both = Rule.of(*table.recipes)
    lines = list(comparison_report(both))
    if arguments.plot:
        from scalerl_cli.curves.recipes_picture import draw_recipes

        doubt = "; do not rely on it yet (see the doubts printed)" if doubts(both) else ""
        draw_recipes(table, arguments.plot, f"{verdict(both)}{doubt}")
        lines.append(f"picture: {arguments.plot}")
    if arguments.json:
        return json.dumps(comparison_json(both), allow_nan=False)
    return "\n".join(lines)
