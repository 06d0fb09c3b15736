"""``scalerl fit``: fits a curve, and prints and draws the result."""

from __future__ import annotations

import argparse
import json

from scalerl_cli.curves.analysis import Analysis, State, analyse
from scalerl_cli.curves.columns import Columns
from scalerl_cli.curves.comparison import comparison_report, pair
from scalerl_cli.curves.pace import pace_of
from scalerl_cli.curves.plotting import check_target
from scalerl_cli.curves.prior import read_prior
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.report import report
from scalerl_cli.curves.source import CurveFile, read_curve
from scalerl_cli.exits import DONE
from scalerl_cli.output import say


def run_fit(arguments: argparse.Namespace) -> int:
    """Fit, draw if ``--plot`` is given, and print; after an error nothing is printed. Returns the exit code."""
    check_target(arguments.plot)
    _check_together(arguments)
    file = _read(arguments)
    prior = read_prior(arguments.prior, file, arguments.scale, arguments.unit, _columns(arguments))
    made = analyse(file, arguments.at, prior, arguments.late_rises)
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


def _read(arguments: argparse.Namespace, *, other: bool = False) -> CurveFile:
    return read_curve(
        arguments.compare if other else arguments.curve,
        arguments.scale,
        arguments.unit,
        arguments.device_hours_column,
        _columns(arguments),
    )


def _columns(arguments: argparse.Namespace) -> Columns:
    return Columns(arguments.x, arguments.y, arguments.samples, arguments.resumed)


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
    both = pair(made, analyse(_read(arguments, other=True), arguments.at, None, arguments.late_rises))
    lines = list(comparison_report(both))
    if arguments.plot:
        from scalerl_cli.curves.compare_picture import draw_comparison

        draw_comparison(both, arguments.plot)
        lines.append(f"picture: {arguments.plot}")
    if arguments.json:
        return json.dumps(both.as_json(), allow_nan=False)
    return "\n".join(lines)
