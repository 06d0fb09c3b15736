"""``scalerl status``, ``plot`` and ``export``: health, picture and model of a run in a directory."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from scalerl_analysis.metric_series import MetricSeries
from scalerl_api.health import health
from scalerl_api.load import load_accepted_run
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
    """Print what is wrong first in the run, in one sentence."""
    directory, paths = arguments.dir, RunPaths(arguments.dir)
    if not (paths.metrics.exists() or paths.run_file.exists()):
        raise Refused(f"{directory} is not the directory of a run")
    series = read_metrics(paths.metrics)
    if not series.rows:
        echo(f"{directory} has no trained steps yet")
        return DONE
    row, steps = series.row(-1), series.steps()
    reward = f", reward {row['reward']:.3f}" if "reward" in row else ""
    tokens = f"{row.get('mean_completion_tokens', 0.0):,.0f}"
    echo(f"step {row['step'] + 1:.0f}{reward}, {tokens} tokens a completion")
    echo(health(steps) or f"nothing is wrong in the last {len(steps.last)} steps, as far as the metrics show")
    return DONE


def plot(arguments: argparse.Namespace) -> int:
    """Draw ``curve.png`` from ``curve.csv``; works during the run too."""
    from scalerl_analysis.pictures import draw_run

    paths = RunPaths(arguments.dir)
    draw_run(paths, load_accepted_run(paths.run_file))
    echo(str(paths.curve_picture))
    return DONE


def export(arguments: argparse.Namespace) -> int:
    """Run ``scalerl_trainer.export``, which needs torch; returns its exit code."""
    if find_spec("scalerl_trainer") is None:
        raise Refused("scalerl export needs the trainer's packages: use the trainer's image, or `make setup`")
    command = [sys.executable, "-m", "scalerl_trainer.export", str(arguments.dir), "--to", str(arguments.to)]
    return subprocess.call([*command, *([] if arguments.step is None else ["--step", str(arguments.step)])])
