"""``scalerl run --runtime NAME``: the run in a runtime of an installed package."""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from scalerl_api.conditions import Phase
from scalerl_api.registry import Kind, PluginError, make
from scalerl_cli.exits import DONE, FAILED, INTERRUPTED, Refused
from scalerl_cli.inputs import load, plugin_problems
from scalerl_cli.output import echo
from scalerl_cli.run import RUNS
from scalerl_lifecycle.runtime import Runtime, drive
from scalerl_local.run_directory import latest_directory, next_directory

_CODES: Final = {Phase.COMPLETED: DONE, Phase.FAILED: FAILED, Phase.SUSPENDED: INTERRUPTED}


def run_in_runtime(arguments: argparse.Namespace) -> int:
    """Execute the run of a file until it stops; returns the exit code. If this command is interrupted, the run continues.

    Raises:
        Refused, SpecError, DirectoryProblem: lists every problem.
    """
    run = load(arguments.file)
    if problems := list(plugin_problems(run.spec)):
        raise Refused(*(f"{arguments.file}: {problem}" for problem in problems))
    name = run.metadata.name
    try:
        directory = arguments.dir or (latest_directory if arguments.resume else next_directory)(RUNS, name)
        plan = arguments.planner(run)
        runtime: Runtime = make(Kind.RUNTIME, arguments.runtime, {}, run, plan, directory)
    except PluginError as error:
        raise Refused(f"--runtime: {error}") from error
    echo(f"{name} in {directory}, by {arguments.runtime}")
    try:
        decision = asyncio.run(drive(runtime, run.spec))
    except KeyboardInterrupt:
        echo("the run continues; the same command with --resume follows it again")
        return INTERRUPTED
    outcome = decision.persisted.outcome
    echo(f"{decision.phase}{f': {outcome.message}' if outcome else ''}")
    return _CODES[decision.phase]
