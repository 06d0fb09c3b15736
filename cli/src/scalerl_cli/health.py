"""``scalerl status``: what is wrong first in a run, in one sentence, from the last lines of its ``metrics.jsonl``."""

from __future__ import annotations

import argparse
from pathlib import Path

from scalerl_api.health import LAST, LONG, Steps, health, rows_of
from scalerl_api.paths import RunPaths
from scalerl_cli.exits import DONE, Refused
from scalerl_cli.output import say


def run_status(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    directory: Path = arguments.dir
    paths = RunPaths(directory)
    try:
        lines = paths.metrics.read_bytes().splitlines()
    except FileNotFoundError:
        if not paths.run_file.exists():
            raise Refused(f"{directory} is not the directory of a run") from None
        lines = []
    except OSError as error:
        raise Refused(f"{paths.metrics}: {error.strerror}") from error
    first, last = (rows_of(some) for some in (lines[:LAST] if len(lines) >= LONG else [], lines[-LAST - 1 :]))
    last = last[-LAST:]
    if not last:
        say(f"{directory} has no trained steps yet")
        return DONE
    row = last[-1]
    reward = f", reward {row['reward']:.3f}" if "reward" in row else ""
    say(
        f"step {row['step'] + 1:.0f}{reward}, {row.get('mean_completion_tokens', 0.0):,.0f} tokens a completion"
    )
    say(
        health(Steps(first, last))
        or f"nothing is wrong in the last {len(last)} steps, as far as the metrics show"
    )
    return DONE
