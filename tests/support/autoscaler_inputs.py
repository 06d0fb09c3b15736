"""Observations and forecasts for the tests of the autoscaler."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from coordinator_statuses import EVERY, TOKENS
from minimal_run import run_spec

from scalerl_api import forecast as wire
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.spec import RunSpec
from scalerl_autoscaling.models import (
    Decision,
    Generators,
    History,
    Latest,
    Limits,
    Observation,
    PointSet,
    Progress,
    Recipe,
    Recorded,
    Spent,
    Staleness,
)


def spec(**fields: Any) -> AutoscalingSpec:
    return AutoscalingSpec.model_validate({"mode": "Auto"} | fields)


def run(autoscaling: dict[str, Any] | None = None, **fields: Any) -> RunSpec:
    return run_spec(autoscaling={"mode": "Auto"} | (autoscaling or {}), **fields).spec


def at(median: float, width: float = 0.0) -> wire.Interval:
    return wire.Interval(median=median, low=median - width / 2, high=median + width / 2)


def answer(
    p_gain: float = 0.5,
    *,
    now: float = 1e6,
    width: float = 0.05,
    before_cmid: float = 0.0,
    points: int = 20,
    broken: float | None = None,
    **outlook: Any,
) -> wire.ForecastAnswer:
    """broken: how far the newest mean of three lies below the best."""
    fit = wire.FitAnswer(
        A=at(0.6, width),
        B=at(1.9),
        Cmid=at(now / 4),
        R0=at(0.2),
        sigma=at(0.01),
        rho=0.3,
        point=wire.LeastSquares(A=0.6, B=1.9, Cmid=now / 4, R0=0.2, residual_sd=0.01),
        identifiable=width <= 0.15 and before_cmid <= 0.2 and points >= 10,
        warnings=[],
        edges=[],
        discrepancy=0.01,
        p_before_cmid=before_cmid,
        points_used=points,
        now=now,
        segment_start=0.0,
        seed=1,
    )
    if broken is not None:
        newest = 0.56 - broken
        guard = wire.CollapseAnswer(
            broken=True,
            checked=True,
            reasons=["the mean of the last 3 evaluations lies below the best"],
            seen=[newest] * 3,
            floor=[0.55],
            collapse=wire.Collapse(
                compute=0.9 * now, best=0.56, best_compute=0.8 * now, newest=newest, noise=0.01
            ),
        )
        return wire.ForecastAnswer(
            fit=fit, collapse_check=guard, forecasts=[], outlook=None, method=wire.METHOD
        )
    guard = wire.CollapseAnswer(broken=False, checked=True, reasons=[], seen=[0.56] * 3, floor=[])
    ahead = wire.Outlook(marginal_gain=at(1e-9), gain=at(0.02), p_gain_above_min=p_gain, **outlook)
    return wire.ForecastAnswer(fit=fit, collapse_check=guard, forecasts=[], outlook=ahead, method=wire.METHOD)


def progress(
    count: int, *, tokens: float = TOKENS, devices: float = 4.0, start: float = 0.0
) -> list[Progress]:
    return [
        Progress(
            version=10 * (i + 1),
            tokens=round(tokens * EVERY * (i + 1)),
            seconds=start + EVERY * (i + 1),
            device_seconds=devices * EVERY * (i + 1),
        )
        for i in range(count)
    ]


def seen(
    version: int = 200,
    p_gain: float = 0.5,
    *,
    forecast: wire.ForecastAnswer | None = None,
    trouble: str = "",
    reward: float | None = 0.56,
    truncated: float | None = 0.02,
    seconds: float = 2000.0,
    limits: Limits | None = None,
    generators: Generators | None = None,
    **more: Any,
) -> Observation:
    """20 evaluations in, 1,000 tokens a second on 4 devices, and all the time in the world."""
    if forecast is None and not trouble:
        forecast = answer(p_gain)
    return Observation(
        **{
            "unix_seconds": 1.7e9 + seconds,
            "spent": Spent(seconds=seconds, device_seconds=4 * seconds, steps=version),
            "limits": limits or Limits(seconds=1e9),
            "recent": progress(16),
            "latest": Latest(version=version, reward=reward, truncated=truncated),
            "points": PointSet(used=20, version=version, eval_version="set", digest="d"),
            "generators": generators or Generators(wanted=1, ready=1),
            "staleness": Staleness(allowed=8, most=4),
            "recipe": Recipe(batch_completions=768, context_tokens=16384, fp32_head=True, loss="cispo"),
            "forecast": forecast,
            "trouble": trouble,
        }
        | more
    )


def states(decisions: list[Decision]) -> list[str]:
    return [decision.state.value for decision in decisions]


def round_trips(fact: Recorded) -> bool:
    """Whether JSON gives back exactly what it was given, and the same JSON again."""
    text = msgspec.json.encode(fact)
    again = msgspec.json.decode(text, type=type(fact))
    return bool(again == fact) and msgspec.json.encode(again) == text


def chain(step: Any, rules: AutoscalingSpec, observations: list[Observation]) -> list[Decision]:
    history, made = History(), []
    for observation in observations:
        made.append(step(rules, observation, history))
        history = made[-1].history
    return made


def versions() -> itertools.count[int]:
    return itertools.count(200, 10)
