"""Finished runs as a prior: which of them count, which of their points, and that they are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from autoscaler_inputs import answer, chain, run, seen, spec
from coordinator_statuses import evaluations, flat_curve
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import Field

from autoscaling_tests.watched import Watched
from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.curve import curve_csv
from scalerl_api.forecast import EarlierRun, EarlierUse, ForecastRequest, Points
from scalerl_api.spec import RunSpec
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.decision_history import ALWAYS_COUNTED, NOT_COUNTED, rules
from scalerl_autoscaling.decision_log import as_recorded
from scalerl_autoscaling.earlier_runs import MAX_POINTS, earlier_run, evenly
from scalerl_autoscaling.forecast_request import implausibility
from scalerl_autoscaling.models import State
from scalerl_autoscaling.replay import replay_under, verify
from scalerl_autoscaling.vote import prior_note

REWARDS = [0.2 + 0.01 * i for i in range(12)]
TABLE = curve_csv(evaluations(REWARDS))
# --- one run ----------------------------------------------------------------------------------------


def test_evaluations_are_those_that_lie_on_one_curve() -> None:
    points = evaluations(REWARDS)
    points[0:3] = [replace(p, set_digest="another set") for p in points[0:3]]
    points[4] = replace(points[4], mixed_versions=True)
    points[5] = replace(points[5], reward=float("nan"))
    found = earlier_run("a", curve_csv(points))
    assert found is not None
    assert found.points.eval_version == "first set"
    kept = [points[i] for i in (3, *range(6, 12))]
    assert found.points.compute == [p.work_tokens for p in kept]
    assert found.points.reward == [p.reward for p in kept]


def test_run_failed_at_its_start_is_no_earlier_run() -> None:
    assert earlier_run("a", curve_csv(evaluations(REWARDS[:4]))) is None, "the first is at compute 0"
    assert earlier_run("a", curve_csv(evaluations(REWARDS[:5]))) is not None
    assert earlier_run("a", curve_csv([])) is None


def test_long_run_is_thinned_out() -> None:
    found = earlier_run("a", curve_csv(evaluations([0.5] * 50_000)))
    assert found is not None
    compute = found.points.compute
    assert len(compute) <= MAX_POINTS
    assert (compute[0], compute[-1]) == (0.0, 49_999 * 1e5)
    assert sum(c > compute[-1] / 2 for c in compute) >= 6, (
        "evenly in log compute: 100 points over 16 doublings"
    )


@given(
    st.lists(st.integers(1, 10**12), min_size=2, unique=True).map(sorted), st.integers(3, 100), st.booleans()
)
def test_evenly_keeps_the_ends(compute: list[int], most: int, zero: bool) -> None:
    compute = [0, *compute] if zero else compute
    kept = evenly(compute, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    assert (kept[0], kept[-1]) == (0, len(compute) - 1)
    assert len(compute) > most or len(kept) == len(compute)


# --- the autoscaler ---------------------------------------------------------------------------------


class Reader:
    def __init__(self, runs: list[EarlierRun] | None) -> None:
        self.runs, self.calls = runs, 0

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        self.calls += 1
        if self.runs is None:
            raise OSError("no such thing")
        return self.runs


def as_earlier(name: str, level: float = 0.0) -> EarlierRun:
    rewards = [p.reward + level for p in flat_curve()]
    found = earlier_run(name, curve_csv(evaluations(rewards + rewards[-10:] * 6)))
    assert found is not None
    return found


def uses(watched: Watched) -> list[Any]:
    lines, differences = verify(watched.path.read_bytes())
    assert differences == []
    forecast = lines[-1].observation.forecast
    assert forecast is not None
    return list(forecast.earlier or [])


async def test_earlier_runs_are_read_once_per_request(tmp_path: Path, url: str) -> None:
    reader, curve = Reader([as_earlier("like"), as_earlier("unlike", -0.15)]), flat_curve()
    watched = Watched(tmp_path / "d", url, earlier=reader)
    for count in (30, 40):
        await watched.must(curve[:count])
    like, unlike = uses(watched)
    assert (like.name, like.weight > 0.5, like.reason) == ("like", True, "")
    assert (unlike.name, unlike.weight < like.weight / 2) == ("unlike", True)
    assert unlike.reason == "its rewards so far differ from this run's by 0.15 at equal compute"
    reader.runs = [as_earlier("ended-meanwhile")]
    step = await watched.must(curve[:41])
    assert reader.calls == 1
    assert [use.name for use in uses(watched)] == ["like", "unlike"]
    assert step.decision.state is State.STOP
    assert step.decision.reasons[1].startswith("3 new evaluations in a row agree, with ")
    assert " as prior: like" in step.decision.reasons[1]
    # Without a prior, under way: asked again, and without.
    watched.scaler.spec = run({"stopAfter": 2, "prior": "None"}, budget={"maxSeconds": 1_000_000})
    await watched.must(curve[:41])
    assert uses(watched) == []


async def test_failure_to_read_them_costs_no_forecast(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, curve = Reader(None), flat_curve()
    watched = Watched(tmp_path / "d", url, earlier=reader)
    for count in (30, 40):
        await watched.must(curve[:count])
    assert uses(watched) == []
    assert reader.calls == 1
    (record,) = caplog.records
    assert "the forecast is made without them as a prior" in record.getMessage()


async def test_other_policy_without_prior_requests_forecast(tmp_path: Path, url: str) -> None:
    curve = flat_curve()
    watched = Watched(tmp_path / "d", url, earlier=Reader([as_earlier("like")]))
    await watched.must(curve[:40])
    lines, _ = verify(watched.path.read_bytes())
    asked: list[ForecastRequest] = []

    def forecast(request: ForecastRequest) -> Any:
        asked.append(request)
        return answer(), ""

    list(replay_under(spec(stopAfter=2), lines, forecast))
    assert asked == []
    list(replay_under(spec(stopAfter=2, prior="None"), lines, forecast))
    assert [request.earlier for request in asked] == [[]]


# --- policy, spec and answer ------------------------------------------------------------------------


def with_uses(*weights: float) -> Any:
    made = [EarlierUse(name=f"run-{i}", weight=w, reason="") for i, w in enumerate(weights)]
    return replace(answer(0.01), earlier=made)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((), ""),
        ((0.05, 0.0), ""),
        ((0.05, 0.9), "with 1 earlier run as prior: run-1"),
        ((0.5, 0.9, 0.7), "with 3 earlier runs as prior: run-1, run-2, run-0"),
        ((1.0,) * 7, "with 7 earlier runs as prior: run-0, run-1, run-2, run-3, run-4 and 2 more"),
    ],
)
def test_stop_names_the_runs_that_counted(weights: tuple[float, ...], text: str) -> None:
    assert prior_note(with_uses(*weights)) == text
    observations = [seen(200 + 10 * i, forecast=with_uses(*weights)) for i in range(2)]
    last = chain(decide, spec(stopAfter=2), observations)[-1]
    assert last.state is State.STOP
    assert last.reasons[1] == ", ".join(filter(None, ["2 new evaluations in a row agree", text]))


def test_request_differs_by_prior_except_the_default() -> None:
    assert rules(spec()) == "min_gain=0.04 horizon=2 stop_after=3"
    assert rules(spec(prior="None")) == "min_gain=0.04 horizon=2 stop_after=3 prior=None"
    assert as_recorded(spec(prior="None"))["prior"] == "None"


def test_unknown_field_restarts_the_count() -> None:
    class Later(AutoscalingSpec):
        patience: int = 5
        marks: list[int] = Field(default_factory=list)

    assert rules(Later()) == rules(AutoscalingSpec())
    assert rules(Later(patience=6)) == rules(AutoscalingSpec()) + " patience=6"
    assert {*ALWAYS_COUNTED, *NOT_COUNTED} == AutoscalingSpec.model_fields.keys() - {"prior", "late_rises"}


def asked_with(*names: str) -> ForecastRequest:
    points = Points(compute=[1e5 * (i + 1) for i in range(20)], reward=[0.5] * 20)
    runs = [EarlierRun(name=name, points=points) for name in names]
    return ForecastRequest(points=replace(points, compute=[5e4 * (i + 1) for i in range(20)]), earlier=runs)


@pytest.mark.parametrize(
    ("weights", "names", "says"),
    [
        ((0.0, 1.0), ("run-0", "run-1"), ""),
        ((0.5,), ("run-0", "run-1"), "it weighs the earlier runs run-0, asked with run-0, run-1"),
        ((0.5, 0.5), ("run-1", "run-0"), "it weighs the earlier runs run-0, run-1, asked with run-1, run-0"),
        ((0.5,), (), "it weighs the earlier runs run-0, asked with (none)"),
        ((0.5, 1.5), ("run-0", "run-1"), "the weight of the earlier run run-1 is 1.5"),
        ((float("nan"),), ("run-0",), "the weight of the earlier run run-0 is nan"),
    ],
)
def test_response_weighs_exactly_the_requested_runs(
    weights: tuple[float, ...], names: tuple[str, ...], says: str
) -> None:
    assert implausibility(asked_with(*names), with_uses(*weights)) == says


def test_forecast_without_earlier_runs_is_rejected() -> None:
    assert implausibility(asked_with(), answer()) == ""
    assert implausibility(asked_with("a"), answer()) == "it weighs the earlier runs (none), asked with a"
