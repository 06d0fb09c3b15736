"""``scalerl plot``: draws the picture of a run again."""

from __future__ import annotations

from pathlib import Path

from scalerl_api.load import SpecError, load_accepted_run
from scalerl_api.paths import RunPaths
from scalerl_cli.curves.problem import CurveProblem
from scalerl_cli.curves.run_picture import draw_run
from scalerl_cli.exits import BAD_INPUT, DONE
from scalerl_cli.output import say


def plot(directory: Path) -> int:
    """Draw ``curve.png`` from ``curve.csv``; works during the run too."""
    paths = RunPaths(directory)
    try:
        run = load_accepted_run(paths.run_file)  # perhaps by other rules
        draw_run(paths, run)
    except (SpecError, CurveProblem) as problem:
        say(str(problem), error=True)
        return BAD_INPUT
    say(str(paths.curve_picture))
    return DONE
