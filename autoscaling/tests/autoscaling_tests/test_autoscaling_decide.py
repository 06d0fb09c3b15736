"""decide: each state, each transition, and what can never be."""

from __future__ import annotations

from typing import Any

import pytest
from autoscaler_inputs import answer, chain, progress, round_trips, seen, spec, states
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scalerl_api import forecast as wire
from scalerl_autoscaling.decide import advice, decide
from scalerl_autoscaling.models import (
    Action,
    Generators,
    History,
    Limits,
    Observation,
    Recipe,
    State,
)

STOP = Action(kind="stop", on_stop="Suspend")


def voted(*p_gains: float | None, **rules: Any) -> list[str]:
    """States over new evaluations with these P(gain > minGain); None: the sidecar is down."""
    observations = [
        seen(200 + 10 * i, trouble="no forecast: down") if p is None else seen(200 + 10 * i, p)
        for i, p in enumerate(p_gains)
    ]
    return [state[:4] for state in states(chain(decide, spec(**rules), observations))]


@pytest.mark.parametrize(
    ("p_gains", "expected"),
    [
        ([0.05] * 3, ["CONT", "CONT", "STOP"]),
        ([0.05, 0.05, 0.3, 0.05, 0.05, 0.05], ["CONT"] * 5 + ["STOP"]),
        # Between .13 and .25 an evaluation neither agrees nor takes agreement back.
        ([0.05, 0.15, 0.05, 0.15, 0.05], ["CONT"] * 4 + ["STOP"]),
        ([0.05, 0.05, 0.12, 0.14, 0.24, 0.25], ["CONT", "CONT", "STOP", "STOP", "STOP", "CONT"]),
        ([0.13] * 6, ["CONT"] * 6),
        # An evaluation without a forecast says nothing either way.
        ([0.05, None, 0.05, None, 0.05], ["CONT", "INSU", "CONT", "INSU", "STOP"]),
        ([None] * 6, ["INSU"] * 6),
    ],
)
def test_stop_takes_agreement_of_new_evaluations(p_gains: list[float | None], expected: list[str]) -> None:
    assert voted(*p_gains) == expected


def test_stop_after_and_on_stop_are_the_specs() -> None:
    assert voted(0.05, 0.05, stopAfter=2) == ["CONT", "STOP"]
    last = chain(decide, spec(stopAfter=1, onStop="Complete"), [seen(200, 0.01)])[-1]
    assert last.action == Action(kind="stop", on_stop="Complete")


def flat(p_gain: float, share: float = 0.5, gained: float = 0.0) -> wire.Flat:
    slope = wire.Interval(median=0.001, low=-0.01, high=0.012)
    return wire.Flat(share=share, gained=gained, slope=slope, p_trend=p_gain, p_late=0.05, p_gain=p_gain)


def shown(*p_gains: float, share: float = 0.5, **fit: Any) -> list[Observation]:
    """New evaluations of a run whose fit cannot be believed, and that is as flat as these say."""
    doubtful = answer(0.15, **{"width": 0.5, **fit})
    return [
        seen(200 + 10 * i, forecast=replace(doubtful, flat=flat(p, share))) for i, p in enumerate(p_gains)
    ]


def test_flat_run_stops_without_a_reliable_fit() -> None:
    decisions = chain(decide, spec(), shown(0.07, 0.12, 0.07, 0.07))
    assert states(decisions) == ["INSUFFICIENT"] * 3 + ["STOP"]
    assert decisions[-1].action == STOP
    assert (
        decisions[-1]
        .reasons[0]
        .startswith(
            "nothing happens: +0.001 (-0.010 to +0.012) with each doubling of compute, at 50% of what may be used"
        )
    )
    assert "2 of 3 new evaluations in a row agree" in decisions[2].reasons
    released = chain(decide, spec(), shown(0.07, 0.07, 0.16, 0.07, 0.07))
    assert states(released) == ["INSUFFICIENT"] * 5


@pytest.mark.parametrize(
    "observations",
    [
        shown(0.01, 0.01, 0.01, share=0.49),
        shown(0.01, 0.01, 0.01, points=9),
        [seen(200 + 10 * i, forecast=answer(0.01, width=0.5)) for i in range(3)],
    ],
)
def test_flat_run_has_time(observations: list[Observation]) -> None:
    """Before half of what may be used, with fewer than 10 evaluations, or where nothing limits the run."""
    assert states(chain(decide, spec(), observations)) == ["INSUFFICIENT"] * 3


def test_run_with_expected_gain_is_not_flat() -> None:
    """A rise that gains speed has a low mean trend, and no believable asymptote."""
    forecast = replace(answer(0.2, width=0.5), flat=flat(0.05))
    decisions = chain(decide, spec(), [seen(v, forecast=forecast) for v in (200, 210, 220)])
    assert states(decisions) == ["INSUFFICIENT"] * 3
    assert "nothing happens" not in "; ".join(decisions[-1].reasons)


def test_price_overrides_the_flat_run_rule() -> None:
    rules = spec(pricePerDeviceHour="2", valuePerPoint="10")
    assert states(chain(decide, rules, shown(0.01, 0.01, 0.01))) == ["INSUFFICIENT"] * 3


@pytest.mark.parametrize(
    ("share", "gained", "slope", "state", "says"),
    [
        (0.4, 0.01, 0.012, "CONTINUE", "but it has gained nothing yet at 40% of what may be used"),
        (0.4, 0.1, 0.04, "CONTINUE", "but it still gained up to 0.040 a doubling at 40% of what may be used"),
        (0.4, 0.1, 0.039, "STOP", ""),
        (0.5, 0.01, 0.04, "STOP", ""),
    ],
)
def test_fit_alone_stops_nothing_before_half_the_budget(
    share: float, gained: float, slope: float, state: str, says: str
) -> None:
    still = flat(0.01, share, gained)
    forecast = replace(answer(0.05), flat=replace(still, slope=replace(still.slope, high=slope)))
    last = chain(decide, spec(), [seen(v, forecast=forecast) for v in (200, 210, 220)])[-1]
    assert last.state.value == state
    assert says in last.reasons[0]


@pytest.mark.parametrize("mode", ["Auto", "Advisory"])
def test_stop_reports_the_cost_of_being_wrong(mode: str) -> None:
    late = wire.Interval(median=0.11, low=0.028, high=0.267)
    forecast = answer(0.05, p_late_rise=0.06, late_rise=late)
    decision = chain(decide, spec(mode=mode), [seen(v, forecast=forecast) for v in (200, 210, 220)])[-1]
    assert decision.state is State.STOP
    assert "that of an unannounced rise, 0.06, included" in decision.reasons[0]
    assert decision.reasons[-1] == (
        "where this is wrong: the forecast's 95th percentile is +0.020; late rises in public curves gained 0.03 to 0.27; "
        "resuming takes it back"
    )


def test_stop_states_its_price() -> None:
    forecast = answer(0.05, expected_gain=0.006, decidable_gain=0.03)
    looks = [seen(v, forecast=forecast) for v in (200, 210, 220)]
    reasons = chain(decide, spec(), looks)[-1].reasons
    assert (
        "a stop forgoes an expected gain of +0.006 (90 %: +0.020 to +0.020) at 2× the compute, P(gain > 0.04) 0.05, and saves "
        "1e+06 more tokens, 1.1 device-hours at the present pace"
    ) in reasons
    unpriced = chain(decide, spec(), [replace(look, recent=[]) for look in looks])[-1].reasons
    assert any(text.endswith("saves 1e+06 more tokens") for text in unpriced)
    block = wire.BestBlock(compute=0.0, gain=0.0, net=0.0)
    priced = answer(0.05, expected_gain=0.006, decidable_gain=0.03, best_block=block)
    rules = spec(pricePerDeviceHour="2", valuePerPoint="1")
    reasons = chain(decide, rules, [seen(v, forecast=priced) for v in (200, 210, 220)])[-1].reasons
    assert any(text.endswith("a cost of 2.22") for text in reasons)


@pytest.mark.parametrize("samples", [900, None])
def test_gain_below_the_noise_of_an_evaluation_is_undecidable(samples: int | None) -> None:
    more = {} if samples is None else {"samples_needed": samples}
    forecast = answer(0.0, decidable_gain=0.051, expected_gain=0.0, **more)
    looks = [seen(v, forecast=forecast) for v in (200, 210, 220)]
    decisions = chain(decide, spec(), looks)
    assert states(decisions) == ["INSUFFICIENT"] * 3
    text = decisions[-1].reasons[0]
    assert text.startswith("minGain 0.04 is below three standard deviations of an evaluation, 0.051")
    assert ("evaluations of 900 samples" in text) == (samples is not None)
    assert states(chain(decide, spec(minGain="0.06"), looks))[-1] == "STOP"
    priced = replace(
        forecast, outlook=replace(forecast.outlook, best_block=wire.BestBlock(compute=0.0, gain=0.0, net=0.0))
    )
    rules = spec(pricePerDeviceHour="2", valuePerPoint="1")
    assert states(chain(decide, rules, [seen(v, forecast=priced) for v in (200, 210, 220)]))[-1] == "STOP"


def test_repeated_evaluation_counts_once_and_repeats_the_stop() -> None:
    decisions = chain(decide, spec(), [seen(200, 0.05)] * 9)
    assert states(decisions) == ["CONTINUE"] * 9
    assert decisions[-1].history.consecutive_votes == 1
    decisions = chain(decide, spec(), [seen(v, 0.05) for v in (200, 210, 220, 220, 220)])
    assert [d.action for d in decisions[2:]] == [STOP] * 3


def test_evaluations_made_again_after_a_restart_count_once() -> None:
    decisions = chain(decide, spec(), [seen(v, 0.05) for v in (200, 210, 200, 210, 200, 210)])
    assert states(decisions) == ["CONTINUE"] * 6
    assert decisions[-1].history.consecutive_votes == 2


@pytest.mark.parametrize(
    ("forecast", "says"),
    [
        (answer(0.0, points=9), "9 evaluations that can be used"),
        (answer(0.0, width=0.16), "0.16 wide"),
        (answer(0.0, before_cmid=0.21), "probability 0.21"),
        (replace(answer(0.0), outlook=None), "no outlook"),
        (
            replace(answer(0.0), fit=replace(answer().fit, identifiable=False, warnings=["an edge"])),
            "an edge",
        ),
    ],
)
def test_implausible_forecast_is_insufficient(forecast: wire.ForecastAnswer, says: str) -> None:
    agreed = [seen(v, 0.05) for v in (200, 210)]
    doubted = [seen(v, forecast=forecast) for v in (220, 230, 240)]
    *_, last = chain(decide, spec(), [*agreed, *doubted])
    assert (last.state, last.action, last.history.consecutive_votes) == (State.INSUFFICIENT, Action(), 0)
    assert says in last.reasons[0]


@pytest.mark.parametrize(
    ("bad", "over", "not_over"),
    [
        ({"truncated": 0.10}, {"truncated": 0.049}, {"truncated": 0.05}),
        ({"reward": None}, {"reward": 0.5}, {"truncated": None}),
        ({"forecast": answer(broken=0.02), "reward": 0.53}, {}, {"forecast": answer(broken=0.011)}),
        (
            {"forecast": answer(broken=0.02), "reward": 0.53},
            {"reward": 0.55},
            {"trouble": "no forecast: down"},
        ),
    ],
)
def test_broken_stands_until_what_broke_is_well_again(
    bad: dict[str, Any], over: dict[str, Any], not_over: dict[str, Any]
) -> None:
    agreed = [seen(v, 0.05) for v in (200, 210)]
    observations = [*agreed, seen(220, 0.05, **bad), seen(230, 0.05, **not_over), seen(240, 0.05, **over)]
    decisions = chain(decide, spec(), observations)
    assert states(decisions)[2:] == ["BROKEN", "BROKEN", "CONTINUE"]
    assert [d.action.kind for d in decisions] == ["none"] * 5
    assert [d.history.consecutive_votes for d in decisions[2:]] == [1, 1 if "trouble" in not_over else 2, 1]
    assert all(d.reasons for d in decisions[2:4])


FALLEN: dict[str, Any] = {"forecast": answer(broken=0.02), "reward": 0.53}
HOLD = Action(kind="hold")


def kinds(rules: Any, observations: list[Observation]) -> list[str]:
    return [decision.action.kind for decision in chain(decide, rules, observations)]


@pytest.mark.parametrize("bad", [FALLEN, {"truncated": 0.1}, {"reward": None}])
def test_lasting_alarm_holds_the_run_and_is_repeated(bad: dict[str, Any]) -> None:
    observations = [seen(190, 0.5), *(seen(v, 0.5, **bad) for v in (200, 200, 210, 210, 220, 220, 230))]
    assert kinds(spec(), observations) == ["none"] * 5 + ["hold"] * 3
    assert kinds(spec(stopAfter=1), observations) == ["none", *["hold"] * 7]
    assert kinds(spec(onBroken="Alert"), observations) == ["none"] * 8
    assert states(chain(decide, spec(onBroken="Alert"), observations))[1:] == ["BROKEN"] * 7
    well = seen(215, 0.5, reward=0.56)
    assert set(kinds(spec(), [*observations[:5], well, *observations[5:]])) == {"none"}, (
        "what is well in between begins again"
    )


def test_votes_for_stop_and_hold_are_counted_apart() -> None:
    observations = [seen(v, 0.05) for v in (170, 180)] + [seen(v, **FALLEN) for v in (190, 200)]
    observations += [seen(v, 0.05) for v in (210, 220)]
    assert kinds(spec(), observations) == ["none"] * 6
    assert chain(decide, spec(), observations)[-1].history.consecutive_votes == 2


def test_unread_evaluation_does_not_count_for_a_hold() -> None:
    down = {"trouble": "no forecast: down", "reward": 0.53}
    observations = [
        seen(200, **FALLEN),
        seen(210, **FALLEN),
        seen(220, **down),
        seen(220, **down),
        seen(230, **down),
    ]
    assert kinds(spec(), observations) == ["none"] * 5
    assert kinds(spec(), [*observations, seen(230, **FALLEN), seen(240, **down)]) == ["none"] * 5 + [
        "hold",
        "none",
    ]


def test_model_that_never_ends_its_answers_is_not_held() -> None:
    observations = [seen(v, trouble="too few points", truncated=0.4) for v in range(0, 60, 10)]
    decisions = chain(decide, spec(), observations)
    assert states(decisions) == ["BROKEN"] * 6
    assert {d.action.kind for d in decisions} == {"none"}
    learnt = seen(60, trouble="too few points", truncated=0.04)
    worse = [seen(v, trouble="too few points", truncated=0.2) for v in (70, 80, 90)]
    assert kinds(spec(), [*observations, learnt, *worse])[-3:] == ["none", "none", "hold"]


@pytest.mark.parametrize("bad", [FALLEN, {"truncated": 0.1}, {"reward": None}])
def test_resumed_run_is_not_held_for_known_alarm(bad: dict[str, Any]) -> None:
    """The fall stays for good: a false alarm, or one that somebody lives with. The sidecar leaves out what is known."""

    def observed(version: int, **more: Any) -> Observation:
        return seen(version, 0.5, **({} if version > 220 and "forecast" in bad else bad), **more)

    held = [seen(190, 0.5), *(observed(v) for v in (200, 210, 220))]
    back = [observed(220, resumed=True), observed(220)]
    assert kinds(spec(), [*held, *back])[-3:] == ["hold", "none", "none"]
    later = kinds(spec(), [*held, *back, *(observed(v) for v in (230, 240, 250, 260, 270))])[6:]
    if "reward" not in bad or "forecast" in bad:
        assert later == ["none"] * 5
    else:
        assert later == ["none", "none", "hold", "hold", "hold"]
    well = [seen(v, 0.5, reward=0.54) for v in (230, 240, 250, 260)]
    assert set(states(chain(decide, spec(), [*held, *back, *well]))[6:]) == {"CONTINUE"}


def test_new_evaluation_set_clears_the_alarm() -> None:
    fallen = seen(200, forecast=answer(broken=0.1), reward=0.45)
    other = replace(fallen.points, eval_version="other", version=210)
    decisions = chain(decide, spec(), [fallen, seen(210, 0.5, reward=0.3, points=other)])
    assert states(decisions) == ["BROKEN", "CONTINUE"]


@pytest.mark.parametrize(
    ("p_gain", "p_target", "expected"),
    [(0.9, 0.04, "STOP"), (0.9, 0.06, "CONTINUE"), (0.05, 0.9, "STOP"), (0.9, 0.9, "CONTINUE")],
)
def test_unreachable_target_stops_a_gaining_run(p_gain: float, p_target: float, expected: str) -> None:
    forecast = answer(p_gain, p_asymptote_above_target=0.9, p_target_at_max_compute=p_target)
    observations = [seen(200 + 10 * i, forecast=forecast) for i in range(3)]
    assert states(chain(decide, spec(target="0.7"), observations))[-1] == expected


@pytest.mark.parametrize(
    ("gain", "net", "expected"),
    [(0.0, 0.0, "STOP"), (0.01, 50.0, "CONTINUE"), (0.01, 9.0, "CONTINUE")],
)
def test_price_and_value_decide_by_cost(gain: float, net: float, expected: str) -> None:
    """A gain that minGain would stop pays if it is cheap, and one that it would not may be too dear."""
    block = wire.BestBlock(compute=1e5 if net else 0.0, gain=gain, net=net)
    for p_gain in (0.01, 0.9):
        observations = [seen(200 + 10 * i, forecast=answer(p_gain, best_block=block)) for i in range(3)]
        rules = spec(pricePerDeviceHour="2", valuePerPoint="100")
        assert states(chain(decide, rules, observations))[-1] == expected


def test_no_costs_without_measured_rate() -> None:
    rules = spec(pricePerDeviceHour="2", valuePerPoint="100")
    (decision,) = chain(decide, rules, [seen()])
    assert (decision.state, "device-hour" in decision.reasons[0]) == (State.INSUFFICIENT, True)


def test_cancelled_stop_needs_new_evaluations() -> None:
    observations = [seen(v, 0.05) for v in (200, 210, 220)]
    observations += [seen(220, 0.05, resumed=True), *(seen(v, 0.05) for v in (220, 230, 240, 250))]
    assert [s[:4] for s in states(chain(decide, spec(), observations))][2:] == [
        "STOP",
        "CONT",
        "CONT",
        "CONT",
        "CONT",
        "STOP",
    ]


def test_other_policy_resets_counts() -> None:
    *_, second = chain(decide, spec(), [seen(v, 0.05) for v in (200, 210)])
    assert second.history.consecutive_votes == 2
    assert decide(spec(minGain="0.03"), seen(220, 0.05), second.history).history.consecutive_votes == 1
    assert decide(spec(cooldownSeconds=5), seen(220, 0.05), second.history).state is State.STOP


@pytest.mark.parametrize(
    ("loss", "advised"),
    [("ppoClip", True), ("cispo", False), ("gspo", False), ("dppo", False)],
)
def test_advice_replaces_only_a_clipped_loss(loss: str, advised: bool) -> None:
    recipe = Recipe(batch_completions=2048, context_tokens=32768, fp32_head=True, loss=loss)
    assert any("in place of a clipped one" in line for line in advice(recipe)) == advised


def test_flat_curve_advice_names_its_source() -> None:
    (decision,) = chain(decide, spec(), [seen(200, 0.05)])
    assert any("batch of 2048" in line and "[P]" in line for line in decision.advice)
    assert not any("fp32Logits" in line for line in decision.advice)
    assert chain(decide, spec(), [seen(200, 0.5)])[0].advice == []


# --- what can never be ---------------------------------------------------------------------------

forecasts = st.one_of(
    st.none(),
    st.builds(
        answer,
        st.sampled_from([0.0, 0.05, 0.1, 0.15, 0.2, 0.6, 1.0]),
        width=st.sampled_from([0.05, 0.05, 0.2]),
        points=st.sampled_from([4, 20, 20]),
        broken=st.sampled_from([None, None, None, 0.002, 0.1]),
        p_target_at_max_compute=st.sampled_from([None, 0.01, 0.9]),
        best_block=st.sampled_from(
            [
                None,
                wire.BestBlock(compute=0.0, gain=0.0, net=0.0),
                wire.BestBlock(compute=1e6, gain=0.1, net=5.0),
            ]
        ),
    ),
)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    forecast = draw(forecasts)
    return seen(
        draw(st.integers(0, 30)) * 10,
        forecast=forecast,
        trouble="" if forecast else "no forecast: down",
        seconds=draw(st.integers(0, 40)) * 100.0,
        reward=draw(st.sampled_from([0.56, 0.56, 0.2, None])),
        truncated=draw(st.sampled_from([0.0, 0.0, 0.07, 0.3])),
        limits=Limits(seconds=draw(st.sampled_from([None, 1000.0, 4500.0]))),
        recent=progress(draw(st.sampled_from([0, 3, 16]))),
        generators=draw(
            st.builds(
                Generators,
                wanted=st.integers(1, 5),
                ready=st.integers(0, 5),
                quota=st.sampled_from([None, 3]),
            )
        ),
        resumed=draw(st.sampled_from([False, False, False, True])),
    )


rules = st.builds(
    spec,
    generators=st.sampled_from([None, {"min": 1, "max": 4}, {"min": 2, "max": 3}]),
    cooldownSeconds=st.sampled_from([1, 600]),
    stopAfter=st.sampled_from([1, 2, 3]),
    onBroken=st.sampled_from(["Hold", "Alert"]),
    target=st.sampled_from([None, "0.7"]),
)


def believed(p_gain: float, by_trend: float, horizon: float = 2.0, late: float = 0.064) -> list[str]:
    """States over four evaluations of a run with a believable fit; late: P of a late rise within the horizon."""
    said = replace(answer(p_gain, p_late_rise=late), flat=flat(by_trend))
    observations = [seen(200 + 10 * i, forecast=said) for i in range(4)]
    return states(chain(decide, spec(horizon=str(horizon)), observations))


def test_between_the_bounds_the_points_own_trend_votes() -> None:
    assert believed(0.15, by_trend=0.07) == ["CONTINUE", "CONTINUE", "STOP", "STOP"]
    assert believed(0.15, by_trend=0.2) == ["CONTINUE"] * 4
    assert believed(0.26, by_trend=0.07) == ["CONTINUE"] * 4


def test_vote_bounds_follow_late_rises() -> None:
    """At 4 times the compute late rises alone are .124: what would stop at 2 times still does."""
    assert believed(0.15, by_trend=0.9) == ["CONTINUE"] * 4
    assert believed(0.15, by_trend=0.9, horizon=4.0, late=1 - 0.936**2)[-1] == "STOP"


@given(rules, st.lists(observations(), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_invariants(rules: Any, observations: list[Observation]) -> None:
    history = History()
    changed_at: float | None = None
    agreed: set[tuple[bool, int]] = set()
    for observation in observations:
        decision = decide(rules, observation, history)
        assert decide(rules, observation, history) == decision
        assert round_trips(decision)
        assert round_trips(observation)
        assert decision.reasons
        action = decision.action
        if decision.state in (State.INSUFFICIENT, State.BROKEN):
            assert action.kind != "stop"
            assert action.scale_to is None or action.scale_to < observation.generators.wanted
        if action.kind == "hold":
            assert (decision.state, rules.on_broken) == (State.BROKEN, "Hold")
            assert decision.history.consecutive_votes >= rules.stop_after
            assert not observation.resumed or rules.stop_after == 1
        assert (decision.state is State.STOP) == (action.kind == "stop")
        if decision.state is State.GROW:
            assert action.scale_to > observation.generators.wanted
        if decision.history.consecutive_votes > history.consecutive_votes:
            assert (decision.state is State.BROKEN, observation.points.version) not in agreed
            agreed.add((decision.state is State.BROKEN, observation.points.version))
        assert decision.history.consecutive_votes <= len(agreed)
        if action.kind == "stop":
            assert decision.history.consecutive_votes >= rules.stop_after
        if action.kind == "scale":
            assert rules.generators.min <= action.scale_to <= rules.generators.max
            assert observation.generators.quota is None or action.scale_to <= max(
                observation.generators.quota, observation.generators.wanted
            )
            assert observation.generators.ready == observation.generators.wanted
            # The run's clock only goes back when a coordinator lost its journal: the wait begins again then.
            if changed_at is not None:
                assert observation.spent.seconds - changed_at >= rules.cooldown_seconds
            changed_at = observation.spent.seconds
        elif changed_at is not None:
            changed_at = min(changed_at, observation.spent.seconds)
        history = decision.history
