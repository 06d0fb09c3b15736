"""Makes recorded decisions again, by the recorded policy or by another one. Pure except for the forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_autoscaling.balance import balance
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.decision_log import Line, LogSummary, read
from scalerl_autoscaling.forecast_request import build_request
from scalerl_autoscaling.models import Decision, History, Observation
from scalerl_autoscaling.observation import point_set
from scalerl_autoscaling.vote import prior_runs

_LONGEST = 60


@dataclass(frozen=True)
class Difference:
    """A difference between a recorded line and the line made again.

    Attributes:
        field: path within the line.
    """

    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.field}: {self.message}"


def verify(content: bytes) -> tuple[list[Line], list[Difference]]:
    """Makes every decision of a record again from its own line; the valid lines, and all differences."""
    before, lines, found = LogSummary(), [], []
    for number, line in read(content):
        if isinstance(line, str):
            found.append(Difference(number, "line", line))
            continue
        found.extend(_differences(number, line, before))
        before.add(line)
        lines.append(line)
    return lines, found


def _differences(number: int, line: Line, before: LogSummary) -> Iterator[Difference]:
    def differ(name: str, recorded: object, found: object) -> Iterator[Difference]:
        for path, a, b in _parts(msgspec.to_builtins(recorded), msgspec.to_builtins(found), name):
            yield Difference(number, path, f"recorded {_short(a)}, {_short(b)} follows")

    yield from differ("sequence", line.sequence, before.sequence)
    yield from differ("before", line.before, before.history)
    points = [*before.points[: line.kept], *line.added]
    yield from differ("observation.points", line.observation.points, point_set(points))
    try:
        spec = AutoscalingSpec.model_validate(line.spec)
    except ValidationError as error:
        yield Difference(number, "spec", str(error.errors(include_url=False)[0]["msg"]))
        return
    yield from differ("decision", line.decision, _decide(line, spec, line.observation, line.before))


def _decide(line: Line, spec: AutoscalingSpec, observation: Observation, history: History) -> Decision:
    return (decide if line.policy == "autoscale" else balance)(spec, observation, history)


@dataclass(frozen=True)
class Alternative:
    """A recorded line, and the decision of another policy on its observation."""

    line: Line
    decision: Decision

    @property
    def differs(self) -> bool:
        """Whether state or action differ from the recorded ones."""
        recorded = self.line.decision
        return (recorded.state, recorded.action) != (self.decision.state, self.decision.action)


def replay_under(
    spec: AutoscalingSpec,
    lines: list[Line],
    forecast: Callable[[ForecastRequest], tuple[ForecastAnswer | None, str]],
) -> Iterator[Alternative]:
    """The decisions of another policy on each recorded observation, each with the history of the one before.

    Where its forecast request differs from the recorded one, ``forecast`` answers it from the recorded points, without earlier
    runs as a prior. Where the sidecar gave no answer, there is none here either. Observations stay as recorded, also after the
    other policy would have stopped or scaled the run.
    """
    history, recorded = History(), LogSummary()
    for line in lines:
        observation = line.observation
        recorded.add(line)
        points = recorded.points
        if line.policy == "autoscale" and observation.forecast is not None:
            recorded_spec = AutoscalingSpec.model_validate(line.spec)
            request = build_request(spec, points, observation, history)
            same = request == build_request(recorded_spec, points, observation, line.before)
            without_prior = spec.prior == "None" and bool(prior_runs(observation.forecast))
            if (not same or without_prior) and not isinstance(request, str):
                # The record has no points of earlier runs, so a new forecast has no prior.
                answer, trouble = forecast(request)
                observation = replace(observation, forecast=answer, trouble=trouble)
        decision = _decide(line, spec, observation, history)
        history = decision.history
        yield Alternative(line, decision)


def _parts(a: object, b: object, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _parts(a.get(key), b.get(key), f"{path}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _parts(x, y, f"{path}[{i}]")
    elif a != b:
        yield path, a, b


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
