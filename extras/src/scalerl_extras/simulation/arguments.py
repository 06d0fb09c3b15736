"""The arguments of ``scalerl simulate``. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from scalerl_api.registry import Kind, installed
from scalerl_cli.argument_types import not_negative, positive_whole

POLICIES = {
    "leastLoaded": "the coordinator's default",
    "byLength": "spec.schedule.byLength",
    "slotOrder": "first come, first served",
    "roundRobin": "slot order, the same number to each generator",
    "histoPipe": "RhymeRL's ranges of length, ascending and descending",
    "oracle": "byLength with the lengths known in advance",
    "tailBatching": "RollPacker's rounds; synchronous",
    "april": "APRIL's rounds, which continue partial completions",
}


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments."""
    command = commands.add_parser(
        "simulate",
        help="simulate the work of a trace (spec.trace) under other schedules and on other clusters",
        epilog="policies: " + "; ".join(f"{name}: {text}" for name, text in POLICIES.items()),
    )
    command.set_defaults(function="scalerl_extras.simulation.command:run_simulate")
    command.add_argument("trace", type=Path, metavar="TRACE", help="trace.jsonl, or a run directory with one")
    command.add_argument(
        "--policy",
        action="append",
        choices=[*POLICIES, *installed(Kind.SCHEDULE)],
        help="schedule, also of an installed package; may be repeated (default: the trace's)",
    )
    command.add_argument(
        "--generators", type=positive_whole, metavar="N", help="number of generators (default: the trace's)"
    )
    command.add_argument(
        "--trainers",
        type=positive_whole,
        metavar="N",
        help="speed of the trainer, in multiples of the trace's (default: 1)",
    )
    command.add_argument(
        "--concurrency",
        type=positive_whole,
        metavar="N",
        help="sequences that a generator samples at once (default: the trace's)",
    )
    command.add_argument(
        "--max-staleness-steps", type=int, metavar="K", help="k of PipelineRL-k (default: the trace's scheme)"
    )
    _add_speeds(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_speeds(command: argparse.ArgumentParser) -> None:
    """Add what replaces a value of the trace."""
    command.add_argument(
        "--drafts",
        action="append",
        type=_drafts,
        metavar="DRAFTS",
        help="speculative decoding: none, traced (as in the trace), or TOKENS:DRAFTED per verification, from the second time on "
        "that a prompt is sampled; may be repeated (default: traced)",
    )
    command.add_argument(
        "--max-draft-tokens",
        type=positive_whole,
        metavar="N",
        help="longest draft (default: the run's, or 16 if the trace has none)",
    )
    command.add_argument(
        "--verify",
        type=not_negative,
        nargs=2,
        metavar=("PER_DRAFT", "FREE"),
        help="seconds that a drafted token adds to a decoding step, and the number of tokens per step, running sequences included, up to "
        "which it adds none, because the step waits for memory (default: fitted to the trace; PER_SEQUENCE and 0 with --decode, or without "
        "drafts in the trace)",
    )
    command.add_argument(
        "--decode",
        type=not_negative,
        nargs=2,
        metavar=("BASE", "PER_SEQUENCE"),
        help="seconds of a decoding step: BASE + PER_SEQUENCE * running sequences (default: fitted to the trace)",
    )
    command.add_argument(
        "--train",
        type=not_negative,
        nargs=2,
        metavar=("BASE", "PER_TOKEN"),
        help="seconds of a step of one trainer: BASE + PER_TOKEN * completion tokens (default: fitted)",
    )
    command.add_argument(
        "--publish",
        type=not_negative,
        metavar="SECONDS",
        help="duration of a publish (default: the trace's median)",
    )


def _drafts(text: str) -> str | tuple[float, float]:
    if text in ("none", "traced"):
        return text
    try:
        tokens, drafted = map(float, text.split(":"))
    except ValueError:
        tokens, drafted = 0.0, 0.0
    if not 1 <= tokens < 1 + drafted < 1000:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write none, traced, or TOKENS:DRAFTED per verification, such as 2.9:7.3, with TOKENS from 1 to 1 + DRAFTED"
        )
    return tokens, drafted
