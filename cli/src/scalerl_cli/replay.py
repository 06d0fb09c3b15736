"""``scalerl replay``: recomputes the recorded decisions of a run, also under another policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_api.load import SpecError, load_run
from scalerl_cli.exits import BAD_INPUT, DONE, FAILED
from scalerl_cli.output import say
from scalerl_cli.records import RecordProblem, recorded
from scalerl_operator.autoscaling.decision_log import Line
from scalerl_operator.autoscaling.models import Decision
from scalerl_operator.autoscaling.replay import Alternative, replay_under, verify
from scalerl_operator.autoscaling.vote import prior_runs

_SHOWN = 20
"""Limit on printed differences: in a record that was overwritten from some line on, all later lines differ."""


def replay(source: Path, policy: Path | None = None) -> int:
    """Recompute the decisions from the recorded observations; returns the exit code, which is 1 if any decision differs.

    source: see :func:`.records.recorded`.
    policy: a run file. Its ``spec.autoscaling`` then decides on the same observations, and the decisions that differ from
        the recorded ones are printed; they are no failure.
    """
    try:
        path, content = recorded(source)
    except RecordProblem as problem:
        say(str(problem), error=True)
        return BAD_INPUT
    if not content.strip():
        say(f"{path}: empty; wait for the run's first decision", error=True)
        return BAD_INPUT
    lines, differences = verify(content)
    for difference in differences[:_SHOWN]:
        say(f"{path}: {difference}", error=True)
    if len(differences) > _SHOWN:
        say(f"{path}: and {len(differences) - _SHOWN} more", error=True)
    if differences:
        return FAILED
    if policy is None:
        say(f"{path}: {len(lines)} decisions, all reproduced")
        _say_changes(lines)
        return DONE
    return _other(lines, policy)


def _say_changes(lines: Sequence[Line]) -> None:
    """The decisions that changed something, one line each."""
    before = ""
    for line in lines:
        if line.decision.state != before or line.decision.action.kind == "scale":
            say(f"  {_when(line)}: {_summary(line.decision)}{_prior(line)}")
        before = line.decision.state


def _other(lines: Sequence[Line], policy: Path) -> int:
    try:
        spec = load_run(policy).spec.autoscaling
    except SpecError as error:
        say(str(error), error=True)
        return BAD_INPUT
    if spec.mode == "Off":
        say(f"{policy}: spec.autoscaling.mode: Off makes no decisions (set Advisory or Auto)", error=True)
        return BAD_INPUT
    others = list(replay_under(spec, list(lines), _forecast))
    different = [other for other in others if other.differs]
    for other in different:
        say(f"  {_when(other.line)}: recorded {_summary(other.line.decision)}{_prior(other.line)}")
        say(f"  {' ' * len(_when(other.line))}    other {_summary(other.decision)}")
    say(f"{len(different)} of {len(others)} decisions differ under {policy}")
    say(
        f"first stop: recorded {_first_stop(others, recorded=True)}, other {_first_stop(others, recorded=False)}"
    )
    if different:
        say(
            "observations stay as recorded: a run that would have stopped or changed its size earlier continues here"
        )
    return DONE


def _forecast(request: ForecastRequest) -> tuple[ForecastAnswer | None, str]:
    # Imported here: numpy and scipy take half a second, and a replay without another policy needs no new forecast.
    from scalerl_curvefit import CurveError
    from scalerl_curvefit.sidecar.answers import answer_forecast

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
        "scale": f", to {action.generators} generators",
        "hold": ", hold",
    }
    return f"{decision.state}{done[action.kind]}: {decision.reasons[0]}"
