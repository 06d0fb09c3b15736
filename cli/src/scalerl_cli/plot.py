"""``scalerl plot``: ``curve.png`` of a run."""

from __future__ import annotations

import argparse

from scalerl_analysis.pictures import draw_run
from scalerl_api.load import load_accepted_run
from scalerl_api.paths import RunPaths
from scalerl_cli.exits import DONE
from scalerl_cli.output import echo


def plot(arguments: argparse.Namespace) -> int:
    """Draw ``curve.png`` from ``curve.csv``; works during the run too."""
    paths = RunPaths(arguments.dir)
    draw_run(paths, load_accepted_run(paths.run_file))
    echo(str(paths.curve_picture))
    return DONE
