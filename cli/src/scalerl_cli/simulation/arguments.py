"""The arguments of ``scalerl simulate``: light to import."""

from __future__ import annotations

import argparse
from pathlib import Path

POLICIES = {
    "leastLoaded": "the coordinator's default",
    "byLength": "spec.schedule.byLength",
    "slotOrder": "to whoever asks first, as earlier releases",
    "roundRobin": "slot order, equally many to all",
    "oracle": "as byLength, with the lengths known in advance",
    "tailBatching": "RollPacker's rounds; synchronous",
    "april": "APRIL's rounds, which continue partial completions",
}


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of the command."""
    command = commands.add_parser(
        "simulate",
        help="simulate the work of a trace (spec.trace) under other schedules and on other clusters",
        epilog="policies: " + "; ".join(f"{name}: {text}" for name, text in POLICIES.items()),
    )
    command.add_argument("trace", type=Path, metavar="TRACE", help="trace.jsonl, or a run directory with one")
    command.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        help="schedule; may be repeated (default: that of the trace)",
    )
    command.add_argument("--generators", type=_positive, metavar="N", help="default: those of the trace")
    command.add_argument(
        "--trainers", type=_positive, metavar="N", help="times the speed of the trace's trainer (default: 1)"
    )
    command.add_argument("--concurrency", type=_positive, metavar="N", help="default: that of the trace")
    command.add_argument(
        "--max-staleness-steps", type=int, metavar="K", help="k of PipelineRL-k (default: the trace's scheme)"
    )
    command.add_argument(
        "--decode",
        type=float,
        nargs=2,
        metavar=("BASE", "PER_SEQUENCE"),
        help="seconds of a decoding step: BASE + PER_SEQUENCE * running sequences (default: fitted to the trace)",
    )
    command.add_argument(
        "--train",
        type=float,
        nargs=2,
        metavar=("BASE", "PER_TOKEN"),
        help="seconds of a step of one trainer: BASE + PER_TOKEN * completion tokens (default: fitted)",
    )
    command.add_argument("--publish", type=float, metavar="SECONDS", help="default: the trace's median")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
