"""The arguments of ``scalerl fit`` and ``scalerl plan``. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_CURVE_HELP = "columns compute,reward and optionally samples; a run's directory; or what W&B, TensorBoard, MLflow, TRL or verl wrote"


def add_curve_commands(commands: Commands) -> None:
    """Add ``fit`` and ``plan``."""
    _add_fit(commands)
    _add_plan(commands)


def _add_fit(commands: Commands) -> None:
    fit = commands.add_parser(
        "fit",
        help="fit a compute-reward curve and forecast it",
        description="Fit R(C) = R0 + (A - R0) / (1 + (Cmid/C)^B) to a curve and say what lies ahead. "
        "docs/forecast.md explains every number.",
    )
    fit.add_argument("curve", type=Path, metavar="CURVE.csv", help=_CURVE_HELP)
    fit.add_argument(
        "--compare", type=Path, metavar="OTHER.csv", help="which of two recipes is better, as the paper tells"
    )
    fit.add_argument(
        "--at",
        type=_positive,
        nargs="+",
        default=[],
        metavar="C",
        help="also forecast at this total compute",
    )
    fit.add_argument("--target", type=float, metavar="T", help="compute at which this reward is reached")
    fit.add_argument("--budget", type=_positive, metavar="C", help="total compute that may be used")
    fit.add_argument(
        "--alternatives", action="store_true", help="show a power law and the last value beside the forecast"
    )
    fit.add_argument("--log", action="store_true", help="draw compute on a logarithmic axis")
    _add_common(fit)


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="what more compute would buy: reward, cost and date of each choice",
        description="Stop now, go on to 2x or 4x the compute, or spend a budget: what each is expected to give. "
        "docs/forecast.md explains every number.",
    )
    plan.add_argument("--from", dest="curve", type=Path, required=True, metavar="CURVE.csv", help=_CURVE_HELP)
    plan.add_argument(
        "--budget",
        type=_positive,
        nargs="+",
        default=[],
        metavar="DEVICE_HOURS",
        help="further device-hours, from now on",
    )
    plan.add_argument("--price", type=_not_negative, metavar="P", help="of a device-hour")
    plan.add_argument(
        "--value-per-point",
        type=_not_negative,
        metavar="V",
        help="what one more point of reward (.01, or a hundredth of --scale) is worth, in the currency of --price",
    )
    plan.add_argument(
        "--devices",
        type=_positive,
        metavar="N",
        help="devices that work now (default: measured, from device_seconds and wall_seconds)",
    )
    plan.add_argument(
        "--generators",
        type=_counts,
        default=[],
        metavar="N,N,...",
        help="compare so many generators; the first is what the run has now",
    )
    plan.add_argument(
        "--elasticity",
        type=_positive,
        metavar="E",
        help="d ln(compute per hour)/d ln(devices) (default: measured, if the number of devices has changed)",
    )
    plan.add_argument("--devices-per-generator", type=_positive, default=1.0, metavar="N", help="default: 1")
    _add_common(plan)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--x", metavar="COLUMN", help="column with the compute (default: compute)")
    command.add_argument(
        "--y",
        metavar="COLUMN",
        help="column or metric with the reward of evaluations (default: reward, or the only series of an export)",
    )
    command.add_argument(
        "--samples",
        metavar="COLUMN",
        help="column with the samples behind each evaluation, or their number where it is always the same "
        "(default: samples, if the file has it)",
    )
    command.add_argument(
        "--prior",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="earlier runs of the same task and model: directories (runs/*) or files with the same columns",
    )
    command.add_argument("--plot", type=Path, metavar="OUT.png", help="draw a picture (.png, .pdf or .svg)")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.add_argument(
        "--scale",
        type=_scale,
        default=(0.0, 1.0),
        metavar="LOW,HIGH",
        help="lowest and highest possible reward of the file; write --scale=-1,1 for rewards of -1 and 1",
    )
    command.add_argument("--unit", metavar="NAME", help="what compute is counted in, for tables and pictures")
    rate = command.add_mutually_exclusive_group()
    rate.add_argument(
        "--rate", type=_positive, metavar="C_PER_DEVICE_HOUR", help="compute that a device-hour does"
    )
    rate.add_argument(
        "--device-hours-column",
        metavar="COLUMN",
        help="column with the device-hours used so far (default: device_seconds, if the file has it)",
    )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _scale(text: str) -> tuple[float, float]:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH; for ±1 write --scale=-1,1")
    low, high = _number(parts[0]), _number(parts[1])
    if low >= high:
        raise argparse.ArgumentTypeError(f"{text}: LOW has to be below HIGH")
    return low, high


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,2,4") from None
    if min(counts) < 1 or len(set(counts)) != len(counts):
        raise argparse.ArgumentTypeError(f"{text!r}: counts are at least 1, and each stands once")
    return counts
