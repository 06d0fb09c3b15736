"""Makes recorded decisions again, by the policy they were made with or by another one. Pure but for the forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.forecast import ForecastAnswer, ForecastRequest
from scalerl_operator.autoscaling.balance import balance
from scalerl_operator.autoscaling.decide import decide
from scalerl_operator.autoscaling.decision_log import Known, Line, read
from scalerl_operator.autoscaling.forecast_request import question
from scalerl_operator.autoscaling.models import Decision, History, Observation, Recorded
from scalerl_operator.autoscaling.observation import point_set
from scalerl_operator.autoscaling.vote import counted

_LONGEST = 60


@dataclass(frozen=True)
class Difference:
    """Where a record and what follows from it part. field: path within the line."""

    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.field}: {self.message}"


def verify(content: bytes) -> tuple[list[Line], list[Difference]]:
    """Make every decision of a record again from its own line; the lines that could be read, and all differences."""
    known, lines, found = Known(), [], []
    for one in read(content):
        if one.line is None:
            found.append(Difference(one.number, "line", one.problem))
            continue
        found.extend(_differences(one.number, one.line, known))
        known.add(one.line)
        lines.append(one.line)
    return lines, found


def _differences(number: int, line: Line, known: Known) -> Iterator[Difference]:
    def differ(name: str, recorded: object, found: object) -> Iterator[Difference]:
        for path, a, b in _parts(recorded, found, name):
            yield Difference(number, path, f"recorded {_short(a)}, {_short(b)} follows")

    yield from differ("sequence", line.sequence, known.sequence)
    yield from differ("before", line.before, known.history)
    points = [*known.points[: line.kept], *line.added]
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
class Other:
    """What another policy makes of a recorded moment."""

    line: Line
    decision: Decision

    @property
    def differs(self) -> bool:
        """In its state, or in what it would have done."""
        recorded = self.line.decision
        return (recorded.state, recorded.action) != (self.decision.state, self.decision.action)


def under(
    spec: AutoscalingSpec,
    lines: list[Line],
    forecast: Callable[[ForecastRequest], tuple[ForecastAnswer | None, str]],
) -> Iterator[Other]:
    """Each recorded moment under another policy, its history chained from the start.

    Where the other policy asks the forecast something else than was asked, ``forecast`` answers from
    the recorded points, without earlier runs as a prior; where the sidecar gave no answer, there is none here either.
    Observations stay as recorded, also where the other policy would have stopped or scaled the run.
    """
    history, known = History(), Known()
    for line in lines:
        observation = line.observation
        points = [*known.points[: line.kept], *line.added]
        known.add(line)
        if line.policy == "autoscale" and observation.forecast is not None:
            theirs = question(AutoscalingSpec.model_validate(line.spec), points, observation, line.before)
            ours = question(spec, points, observation, history)
            # Their points are not in the record: a new forecast has no prior.
            without = spec.prior == "None" and bool(counted(observation.forecast))
            if (ours != theirs or without) and not isinstance(ours, str):
                answer, trouble = forecast(ours)
                observation = replace(observation, forecast=answer, trouble=trouble)
        decision = _decide(line, spec, observation, history)
        history = decision.history
        yield Other(line, decision)


def _parts(a: object, b: object, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two values differ."""
    if isinstance(a, Recorded):
        a = msgspec.to_builtins(a)
    if isinstance(b, Recorded):
        b = msgspec.to_builtins(b)
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
