"""``scalerl replay``: recomputes the recorded decisions of a run, also under another policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_api.load import load_run
from scalerl_api.paths import RunPaths
from scalerl_autoscaling.decision_log import Line
from scalerl_autoscaling.models import Decision
from scalerl_autoscaling.replay import Alternative, replay_under, verify
from scalerl_autoscaling.vote import prior_runs
from scalerl_cli.exits import DONE, FAILED, Refused
from scalerl_cli.output import echo

_SHOWN = 20
"""Limit on printed differences: in a record that was overwritten from some line on, all later lines differ."""


def replay(arguments: argparse.Namespace) -> int:
    """Recompute the decisions from the recorded observations; returns the exit code, which is 1 if any decision differs.

    With ``--policy``, the ``spec.autoscaling`` of that run file decides on the same observations, and the decisions that differ
    from the recorded ones are printed; they are no failure.
    """
    path, content = _recorded(arguments.source)
    if not content.strip():
        raise Refused(f"{path}: empty; wait for the run's first decision")
    lines, differences = verify(content)
    for difference in differences[:_SHOWN]:
        echo(f"{path}: {difference}", error=True)
    if len(differences) > _SHOWN:
        echo(f"{path}: and {len(differences) - _SHOWN} more", error=True)
    if differences:
        return FAILED
    if arguments.policy is None:
        echo(f"{path}: {len(lines)} decisions, all reproduced")
        _echo_changes(lines)
        return DONE
    return _other(lines, arguments.policy)


def _recorded(source: Path) -> tuple[str, bytes]:
    """The name of the record for messages, and its content: of a run directory, a file, or ``-`` for standard input."""
    try:
        if source.is_dir():
            source = RunPaths(source).decisions
        content = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
    except OSError as error:
        raise Refused(
            f"{source}: {error.strerror}; a run writes its decisions with autoscaling.mode Advisory or Auto"
        ) from error
    return str(source), content


def _echo_changes(lines: Sequence[Line]) -> None:
    """The decisions that changed something, one line each."""
    before = ""
    for line in lines:
        if line.decision.state != before or line.decision.action.kind == "scale":
            echo(f"  {_when(line)}: {_summary(line.decision)}{_prior(line)}")
        before = line.decision.state


def _other(lines: Sequence[Line], policy: Path) -> int:
    spec = load_run(policy).spec.autoscaling
    if spec.mode == "Off":
        raise Refused(f"{policy}: spec.autoscaling.mode: Off makes no decisions (set Advisory or Auto)")
    others = list(replay_under(spec, list(lines), _forecast))
    different = [other for other in others if other.differs]
    for other in different:
        echo(f"  {_when(other.line)}: recorded {_summary(other.line.decision)}{_prior(other.line)}")
        echo(f"  {' ' * len(_when(other.line))}    other {_summary(other.decision)}")
    echo(f"{len(different)} of {len(others)} decisions differ under {policy}")
    echo(
        f"first stop: recorded {_first_stop(others, recorded=True)}, other {_first_stop(others, recorded=False)}"
    )
    if different:
        echo(
            "observations stay as recorded: a run that would have stopped or changed its size earlier continues here"
        )
    return DONE


def _forecast(request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
    # Imported here: numpy and scipy take half a second, and a replay without another policy needs no new forecast.
    from scalerl_curvefit import CurveError
    from scalerl_curvefit.sidecar.forecast_answers import answer_forecast

    try:
        return answer_forecast(request), ""
    except CurveError as error:
        return None, f"the forecast was refused: {error}"


def _first_stop(others: Sequence[Alternative], *, recorded: bool) -> str:
    for other in others:
        decision = other.line.decision if recorded else other.decision
        if decision.action.kind in ("stop", "hold"):
            return f"at version {other.line.observation.points.version}"
    return "never"


def _when(line: Line) -> str:
    return f"line {line.sequence + 1}, {line.policy}, version {line.observation.points.version}"


def _prior(line: Line) -> str:
    number = len(prior_runs(line.observation.forecast))
    return f" ({number} earlier run{'s' if number > 1 else ''} as prior)" if number else ""


def _summary(decision: Decision) -> str:
    action = decision.action
    done = {
        "none": "",
        "stop": f", stop ({action.on_stop})",
        "scale": f", to {action.scale_to} generators",
        "hold": ", hold",
    }
    return f"{decision.state}{done[action.kind]}: {decision.reasons[0]}"
