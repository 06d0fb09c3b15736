"""What the policies are asked with: pace and reach, the question to the forecast, the load."""

from __future__ import annotations

from typing import Any

import pytest
from autoscaler_inputs import progress, run, seen, spec
from coordinator_statuses import EVERY, TOKENS, evaluations, flat_curve, status
from msgspec import to_builtins
from msgspec.structs import replace

from scalerl_api.forecast import ForecastRequest
from scalerl_api.wire import EvaluationPoint, Status
from scalerl_autoscaling.balance import LoadMeter
from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.forecast_request import build_request
from scalerl_autoscaling.models import Change, Generators, History, Pace, Progress
from scalerl_autoscaling.observation import observe, point
from scalerl_autoscaling.throughput import Remaining, pace, reach, remaining

ONE = Generators(wanted=1, ready=1)
NOW = Pace(tokens_per_second=1000.0, devices=4.0, tokens_per_step=500.0, intervals=3)


def test_pace_takes_three_intervals() -> None:
    assert pace(progress(3)) is None
    assert pace(progress(4)) == Pace(
        tokens_per_second=1000.0, devices=4.0, tokens_per_step=10_000.0, intervals=3
    )


@pytest.mark.parametrize("jump", [-250.0, -50.0, 1e7])
def test_clock_jump_does_not_change_the_pace(jump: float) -> None:
    steady = progress(8)
    jumped = [*steady[:5], *(replace(p, seconds=p.seconds + jump) for p in steady[5:])]
    found = pace(jumped)
    assert found is not None
    assert (found.tokens_per_second, found.devices) == (1000.0, 4.0)


def test_pace_leaves_out_the_interval_of_a_change() -> None:
    slow, fast = progress(4), progress(8, tokens=2000.0)[4:]
    mixed = [*slow, *fast]
    since = pace(mixed, since=401.0)
    assert since is not None
    assert (since.tokens_per_second, since.intervals) == (2000.0, 3)


def test_two_evaluations_of_one_moment_are_no_interval() -> None:
    same = Progress(version=10, tokens=1, seconds=1.0, device_seconds=1.0)
    assert pace([same] * 9) is None


@pytest.mark.parametrize(
    ("rest", "more", "elastic", "expected"),
    [
        (Remaining(None, None, None), 0, 1.0, None),
        (Remaining(None, 100.0, None), 0, 1.0, 100_000.0),
        (Remaining(None, 100.0, None), 4, 1.0, 200_000.0),
        (Remaining(None, 100.0, None), 4, 0.5, 141_421.4),
        (Remaining(None, None, 400.0), 0, 1.0, 100_000.0),
        (Remaining(None, None, 400.0), 4, 1.0, 100_000.0),  # as fast as it is dear
        (Remaining(None, None, 400.0), 4, 0.5, 70_710.7),
        (Remaining(20.0, 100.0, None), 4, 1.0, 10_000.0),
        (Remaining(None, 100.0, None, tokens=9000.0), 4, 0.5, 9000.0),  # neither speed nor devices change it
    ],
)
def test_reach(rest: Remaining, more: float, elastic: float, expected: float | None) -> None:
    found = reach(NOW, rest, more, elastic)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))


def asked(
    curve: list[EvaluationPoint], autoscaling: dict[str, Any], generators: Generators = ONE
) -> ForecastRequest:
    whole = run(autoscaling, budget={"maxSeconds": 10_000})
    points = [point(e) for e in curve]
    observation = observe(whole, status(curve), points, generators, unix_seconds=1.7e9)
    found = build_request(whole.autoscaling, points, observation, History())
    assert isinstance(found, ForecastRequest)
    return found


def test_forecast_request_is_in_tokens() -> None:
    request = asked(flat_curve(), {"minGain": "0.03", "horizon": "4", "target": "0.7"})
    assert (request.horizon, request.min_gain, request.target) == (4.0, 0.03, 0.7)
    assert (request.value, request.price) == (None, None)
    assert request.points.compute[:2] == [0.0, TOKENS * EVERY]
    assert (request.points.samples, request.points.eval_version) == (4000.0, "first set")
    # 4,000 s are used of 10,000, at 1,000 tokens a second.
    assert request.max_compute == pytest.approx(10_000 * TOKENS)


def test_prices_are_of_tokens_at_the_measured_pace() -> None:
    request = asked(flat_curve(), {"pricePerDeviceHour": "2", "valuePerPoint": "50"})
    assert request.value == 5000.0  # of a reward of 1, a hundred points
    assert request.price == pytest.approx(2 / (3600 * TOKENS / 4))


def test_reach_assumes_all_allowed_generators() -> None:
    spec_ = {"target": "0.7", "generators": {"max": 9}}
    assert asked(flat_curve(), spec_).max_compute == pytest.approx((4000 + 3 * 6000) * TOKENS)
    few = Generators(wanted=1, ready=1, quota=3)
    assert asked(flat_curve(), spec_, few).max_compute == pytest.approx((4000 + 1.5 * 6000) * TOKENS)


def test_changed_evaluation_settings_are_labelled_per_point() -> None:
    curve = flat_curve()
    curve[30:] = [replace(p, set_digest="other", samples=100) for p in curve[30:]]
    request = asked(curve, {})
    assert request.points.eval_version == ["first set"] * 30 + ["other"] * 11
    assert request.points.samples == [4000.0] * 30 + [100.0] * 11


def test_no_price_without_a_measured_pace() -> None:
    request = asked(flat_curve()[:3], {"pricePerDeviceHour": "2", "valuePerPoint": "50", "target": "0.7"})
    assert (request.value, request.price, request.max_compute) == (None, None, None)


def measure(meter: LoadMeter, seconds: float, generators: Generators = ONE, **changes: Any) -> Any:
    values = {"wall_seconds": seconds, "device_seconds": 2 * seconds, "step": int(seconds)} | changes
    return meter.measure(run(), status(evaluations([0.2]), **values), generators)


def test_load_covers_window_and_restarts() -> None:
    meter = LoadMeter()
    assert measure(meter, 100.0) is None
    window = measure(meter, 160.0)
    assert (window.seconds, window.steps, window.trainer_busy, window.generator_busy) == (60.0, 60, 0.5, 0.5)
    assert measure(meter, 90.0) is None, "the clock went back"
    assert measure(meter, 100.0).seconds == 10.0
    assert measure(meter, 110.0, Generators(wanted=2, ready=1)) is None, "one is joining"
    assert measure(meter, 120.0, Generators(wanted=2, ready=2)) is None, "it begins when all are there"
    assert measure(meter, 130.0, Generators(wanted=2, ready=2)).seconds == 10.0
    assert measure(meter, 140.0, Generators(wanted=2, ready=2), step=3) is None, "the trainer went back"
    meter.restart()
    assert measure(meter, 150.0, Generators(wanted=2, ready=2)) is None


@pytest.mark.parametrize("field", ["environment_problem", "reward_problem"])
def test_outage_belongs_to_its_window(field: str) -> None:
    meter = LoadMeter()
    measure(meter, 100.0)
    assert not measure(meter, 110.0).outage
    assert measure(meter, 120.0, **{field: "generator-0: down"}).outage
    assert measure(meter, 130.0).outage, "it is over, and its idle time is in the window"
    meter.restart()
    assert measure(meter, 140.0, **{field: "generator-0: down"}) is None
    assert measure(meter, 150.0).outage, "it began before the window"
    meter.restart()
    measure(meter, 160.0)
    assert not measure(meter, 170.0).outage


def test_clock_set_back_costs_one_cooldown_at_most() -> None:
    change = Change(before=2, after=1, at=1e6, exploratory=False, measuring=False, pace=None)
    rules, history = spec(generators={"max": 4}, cooldownSeconds=600), History(generators=1, change=change)
    history = decide(rules, seen(seconds=2000.0), history).history
    assert history.change is not None
    assert history.change.at == 2000.0


def test_compute_limits_in_completion_tokens() -> None:
    """With a reference policy one costs 5/3; 3,000 are 1,800 of them, of which 600 are used."""
    limited = run(budget={"maxComputeTokens": 3000}, recipe={"kl": {"penalty": {"coefficient": "0.04"}}})
    found = observe(limited, status([], compute_tokens=1000.0), [], ONE, unix_seconds=1.7e9)
    rest = remaining(limited.autoscaling, found, History())
    assert rest == Remaining(None, None, None, tokens=pytest.approx(1200.0))
    assert reach(NOW, rest) == rest.tokens
    steps = run(budget={"maxSteps": 9})
    unlimited = observe(steps, status([], compute_tokens=1000.0), [], ONE, unix_seconds=1.7e9)
    assert remaining(steps.autoscaling, unlimited, History()).tokens is None
    assert "tokens" not in to_builtins(unlimited.limits) | to_builtins(unlimited.spent)


def test_autoscaler_counts_a_fork_s_own_use() -> None:
    """Its points, which the source's are a part of, count from the source's first step."""
    forked = status(
        [],
        wall_seconds=1030.0,
        device_seconds=5060.0,
        forked_step=7,
        inherited_seconds=1000.0,
        inherited_device_seconds=5000.0,
    )
    spec = run({"maxDeviceHours": "0.02"}, budget={"maxSeconds": 100})
    generators = Generators(wanted=1, ready=1, quota=1, devices_each=1)

    def left(status: Status) -> tuple[float | None, float | None]:
        found = observe(spec, status, [], generators, unix_seconds=1e9)
        assert (found.spent.seconds, found.spent.device_seconds) == (
            status.wall_seconds,
            status.device_seconds,
        )
        rest = remaining(spec.autoscaling, found, History())
        return rest.seconds, rest.device_seconds

    assert left(forked) == pytest.approx((70.0, 12.0))
    assert left(replace(forked, inherited_seconds=0.0, inherited_device_seconds=0.0)) == (0.0, 0.0)
