"""``scalerl status``: what is wrong first in a run, in one sentence, from its ``metrics.jsonl``."""

from __future__ import annotations

import argparse
from pathlib import Path

from scalerl_analysis.metric_series import MetricSeries
from scalerl_api.health import health
from scalerl_api.paths import RunPaths
from scalerl_cli.exits import DONE, Refused
from scalerl_cli.output import echo


def read_metrics(path: Path) -> MetricSeries:
    """The series of ``metrics.jsonl``; prints how many lines are left out, if some are.

    Raises:
        AnalysisProblem: the file cannot be read.
    """
    series = MetricSeries.read(path)
    if count := series.unreadable:
        lines, are = ("lines", "are") if count > 1 else ("line", "is")
        echo(f"{count} {lines} of {path} cannot be read and {are} left out", error=True)
    return series


def run_status(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    directory: Path = arguments.dir
    paths = RunPaths(directory)
    if not (paths.metrics.exists() or paths.run_file.exists()):
        raise Refused(f"{directory} is not the directory of a run")
    series = read_metrics(paths.metrics)
    if not series.rows:
        echo(f"{directory} has no trained steps yet")
        return DONE
    row, steps = series.row(-1), series.steps()
    reward = f", reward {row['reward']:.3f}" if "reward" in row else ""
    echo(
        f"step {row['step'] + 1:.0f}{reward}, {row.get('mean_completion_tokens', 0.0):,.0f} tokens a completion"
    )
    echo(health(steps) or f"nothing is wrong in the last {len(steps.last)} steps, as far as the metrics show")
    return DONE
