"""The arguments of ``scalerl compare``, ``fit``, ``plan`` and ``report``. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl_cli.argument_types import counts, not_negative, positive, positive_whole, scale
from scalerl_cli.clusters.arguments import add_connection

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_CURVE_HELP = "CSV with columns compute,reward[,samples]; a run directory; or an export of W&B, TensorBoard, MLflow, TRL or verl"


def add_curve_commands(commands: Commands) -> None:
    """Add ``compare``, ``fit``, ``plan`` and ``report``."""
    _add_compare(commands)
    _add_fit(commands)
    _add_plan(commands)
    _add_report(commands)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="show rewards and pass@k by label of the prompts, such as their difficulty",
        description="Tabulate and plot the newest evaluations of runs by label of the prompts (DIR/labels.csv), into report.md, "
        ".csv and .png. docs/tasks.md lists the prompts that have labels.",
    )
    report.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]DIR",
        help="run directory; runs with the same NAME are averaged, such as seeds of one recipe",
    )
    report.add_argument("--set", metavar="NAME", help="only this evaluation set")
    report.add_argument("--label", metavar="NAME", help="only this label, such as difficulty")
    report.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="output directory (default: the run directory; report for several runs)",
    )


def _add_compare(commands: Commands) -> None:
    compare = commands.add_parser(
        "compare",
        help="run recipes and compare their curves: A, B, reward at equal compute",
        description="Run each spec, variant and seed sequentially, and compare all with the first one by the paper's rule. "
        "Finished runs are reused; interrupted or failed runs are resumed. docs/forecast.md explains every number.",
    )
    compare.add_argument(
        "what",
        type=Path,
        nargs="+",
        metavar="SPEC|RUN",
        help="run file (.yaml) to run; or a curve: a run directory, a file as for `scalerl fit`, or the name of a run on a "
        "cluster, if there is no such file",
    )
    compare.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="[LABEL:]FIELD=VALUE[;...]",
        help="add a variant of each spec: 'dapo loss: recipe.loss={ppoClip: {clipHigh: 0.26}}'; repeatable",
    )
    compare.add_argument(
        "--seeds",
        type=positive_whole,
        default=1,
        metavar="N",
        help="number of seeds of each: seed, seed + 1, ... (default: 1)",
    )
    compare.add_argument(
        "--dir",
        type=Path,
        default=Path("compare"),
        metavar="DIR",
        help="directory for the runs, comparison.md, .csv and .png (default: compare)",
    )
    _add_columns(compare)
    add_connection(compare)


def _add_fit(commands: Commands) -> None:
    fit = commands.add_parser(
        "fit",
        help="fit a compute-reward curve and forecast it",
        description="Fit R(C) = R0 + (A - R0) / (1 + (Cmid/C)^B) to a curve and forecast it. "
        "docs/forecast.md explains every number.",
    )
    fit.add_argument("curve", type=Path, metavar="CURVE.csv", help=_CURVE_HELP)
    fit.add_argument(
        "--at",
        type=positive,
        nargs="+",
        default=[],
        metavar="C",
        help="also forecast at this total compute",
    )
    fit.add_argument(
        "--target", type=float, metavar="T", help="forecast the compute at which this reward is reached"
    )
    fit.add_argument("--budget", type=positive, metavar="C", help="total compute available")
    fit.add_argument("--log", action="store_true", help="plot compute on a logarithmic axis")
    _add_common(fit)


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict reward, cost and date for more compute",
        description="Expected reward of each option: stop now, continue to 2x or 4x the compute, or spend a budget. "
        "docs/forecast.md explains every number.",
    )
    plan.add_argument("--from", dest="curve", type=Path, required=True, metavar="CURVE.csv", help=_CURVE_HELP)
    plan.add_argument(
        "--budget",
        type=positive,
        nargs="+",
        default=[],
        metavar="DEVICE_HOURS",
        help="additional device-hours",
    )
    plan.add_argument("--price", type=not_negative, metavar="P", help="price of a device-hour")
    plan.add_argument(
        "--value-per-point",
        type=not_negative,
        metavar="V",
        help="value of one point of reward (.01, or a hundredth of --scale), in the currency of --price",
    )
    plan.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="current number of devices (default: measured from device_seconds and wall_seconds)",
    )
    plan.add_argument(
        "--generators",
        type=counts,
        default=[],
        metavar="N,N,...",
        help="numbers of generators to compare; the first is the current one",
    )
    plan.add_argument(
        "--elasticity",
        type=positive,
        metavar="E",
        help="d ln(compute per hour)/d ln(devices) (default: measured, if the number of devices has changed)",
    )
    plan.add_argument("--devices-per-generator", type=positive, default=1.0, metavar="N", help="default: 1")
    _add_common(plan)


def _add_columns(command: argparse.ArgumentParser) -> None:
    """Add the options that select and scale the columns of a curve file."""
    command.add_argument("--x", metavar="COLUMN", help="column with the compute (default: compute)")
    command.add_argument(
        "--y",
        metavar="COLUMN",
        help="column or metric with the reward of evaluations (default: reward, or the only series of an export)",
    )
    command.add_argument(
        "--samples",
        metavar="COLUMN",
        help="column with the number of samples per evaluation, or a constant (default: samples, if the file has it)",
    )
    command.add_argument(
        "--resumed",
        choices=["KeepLast"],
        help="where compute goes back, as in the log of a resumed run, leave out the rows that it goes back over",
    )
    command.add_argument(
        "--scale",
        type=scale,
        default=(0.0, 1.0),
        metavar="LOW,HIGH",
        help="lowest and highest possible reward in the file; write --scale=-1,1 for rewards of ±1",
    )
    command.add_argument("--unit", metavar="NAME", help="unit of compute, for tables and figures")


def _add_common(command: argparse.ArgumentParser) -> None:
    _add_columns(command)
    command.add_argument(
        "--prior",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="earlier runs of the same task and model: directories (runs/*) or files with the same columns",
    )
    command.add_argument(
        "--late-rises",
        choices=["language_models", "games"],
        default="language_models",
        help="public curves from which the probability of late rises is taken (default: language_models)",
    )
    command.add_argument("--plot", type=Path, metavar="OUT.png", help="write a figure (.png, .pdf or .svg)")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    rate = command.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=positive, metavar="C_PER_DEVICE_HOUR", help="compute per device-hour")
    rate.add_argument(
        "--device-hours-column",
        metavar="COLUMN",
        help="column with cumulative device-hours (default: device_seconds, if the file has it)",
    )
