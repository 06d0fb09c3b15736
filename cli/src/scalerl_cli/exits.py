"""Exit codes of the command, and how a command ends that cannot go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from scalerl_analysis.problem import AnalysisProblem
from scalerl_api.load import SpecError
from scalerl_cli.output import echo
from scalerl_local.run_directory import DirectoryProblem

DONE: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
NOT_FOUND: Final = 3
"""On a cluster: there is no such run or pod, or ScaleRL is not installed."""
FORBIDDEN: Final = 4
"""On a cluster: the user may not do it."""
INTERRUPTED: Final = 130

_OPTIONS = {"budgets": "--budget", "device_hours": "--device-hours-column", "value": "--value-per-point"}
"""Options that have another name than the parameter of ``scalerl_analysis`` that they set."""


class Refused(Exception):
    """The command cannot go on. Each argument is a line of the reasons; code: its exit code."""

    def __init__(self, *lines: str, code: int = BAD_INPUT) -> None:
        super().__init__(*lines)
        self.code = code


def exit_code(command: Callable[[], int]) -> int:
    """The exit code of a command; prints why one cannot go on."""
    try:
        return command()
    except Refused as refused:
        lines, code = refused.args, refused.code
    except AnalysisProblem as error:
        lines, code = (options_named(str(error)),), BAD_INPUT
    except (SpecError, DirectoryProblem) as error:
        lines, code = (str(error),), BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    for line in lines:
        echo(line, error=True)
    return code


def options_named(text: str) -> str:
    """A text of the analysis with the options that set its parameters.

    >>> options_named("give `rate` or `device_hours`")
    'give --rate or --device-hours-column'
    """
    return re.sub(r"`(\w+)`", lambda found: _OPTIONS.get(found[1], f"--{found[1]}"), text)
