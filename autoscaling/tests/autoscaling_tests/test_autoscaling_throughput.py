"""decide: when a run grows, by how much, and when that is taken back."""

from __future__ import annotations

from typing import Any

import pytest
from autoscaler_inputs import answer, chain, progress, seen, spec
from msgspec.structs import replace

from scalerl_autoscaling.decide import decide
from scalerl_autoscaling.models import Action, Decision, Generators, History, Limits, State

GROWING = {"generators": {"min": 1, "max": 4}, "cooldownSeconds": 600}
SHORT = Limits(seconds=2500.0)
"""500 s at 1,000 tokens/s: half of the 10⁶ more tokens that the horizon asks for."""


def grown(**changes: Any) -> Decision:
    rules = changes.pop("rules", GROWING)
    observation = seen(200, 0.9, **{"limits": SHORT, "generators": Generators(wanted=2, ready=2)} | changes)
    history = replace(History(), generators=observation.generators.wanted, ready_since=0.0)
    return decide(spec(**rules), observation, history)


def test_grow_when_continuing_pays_and_time_is_short() -> None:
    decision = grown()
    assert (decision.state, decision.action) == (State.GROW, Action(kind="scale", scale_to=3))
    assert decision.affordable_compute == pytest.approx(5e5)
    assert decision.worthwhile_compute == pytest.approx(1e6)
    assert decision.history.change is not None
    assert decision.history.change.exploratory


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"limits": Limits(seconds=1e9)}, "P(gain"),
        ({"limits": Limits()}, "nothing limits"),
        ({"forecast": answer(0.4)}, "P(gain"),
        ({"rules": {}}, "no range"),
        ({"generators": Generators(wanted=4, ready=4)}, "the most"),
        ({"generators": Generators(wanted=2, ready=1)}, "under way"),
        ({"generators": Generators(wanted=2, ready=2, quota=2)}, "room for 2"),
        ({"recent": progress(3)}, "not known"),
        ({"limits": Limits(device_hours=4 * 2500 / 3600)}, "would not bring more"),
        ({"limits": Limits(seconds=2500.0, steps=210)}, "would not bring more"),
        ({"trouble": "no forecast: down", "forecast": None}, "down"),
    ],
)
def test_scaling_refusals(changes: dict[str, Any], says: str) -> None:
    if "trouble" in changes:
        changes = changes | {"forecast": None}
    decision = grown(**changes)
    assert decision.action == Action()
    assert decision.state is not State.GROW
    assert any(says in reason for reason in decision.reasons), decision.reasons


def test_staleness_beyond_k_keeps_a_run_from_growing() -> None:
    observation = seen(200, 0.9, limits=SHORT)
    observation = replace(observation, staleness=replace(observation.staleness, most=9))
    assert "steps old" in " ".join(decide(spec(**GROWING), observation, History()).reasons)


def test_deadline_limits_time_despite_a_clock_set_back() -> None:
    rules = GROWING | {"deadline": "2023-11-14T22:55:00Z"}  # 1.7e9 + 2500 s
    observation = seen(200, 0.9)
    history = replace(History(), generators=1, ready_since=0.0)
    assert decide(spec(**rules), observation, history).state is State.GROW
    ahead = replace(history, unix_seconds=observation.unix_seconds + 60)
    doubted = decide(spec(**rules), observation, ahead)
    assert doubted.state is State.CONTINUE
    assert any("clock went back" in reason for reason in doubted.reasons)


def after_growing(tokens: float, devices: float = 5.0) -> list[Decision]:
    """A step from one generator to two is followed by evaluations at another pace."""
    first = seen(200, 0.9, limits=SHORT)
    decisions = chain(decide, spec(**GROWING), [first])
    history = decisions[0].history
    joined = replace(
        first, generators=Generators(wanted=2, ready=2), spent=replace(first.spent, seconds=2100.0)
    )
    decisions.append(decide(spec(**GROWING), joined, history))
    later = seen(
        260,
        0.9,
        seconds=2700.0,
        limits=Limits(seconds=3000.0),
        generators=Generators(wanted=2, ready=2),
        recent=progress(6, tokens=tokens, devices=devices, start=2000.0),
    )
    decisions.append(decide(spec(**GROWING), later, decisions[-1].history))
    return decisions


def test_successful_trial_step_is_followed_by_more() -> None:
    first, joined, later = after_growing(tokens=1250.0)
    assert first.action.scale_to == 2
    assert (joined.state, joined.action) == (State.CONTINUE, Action())
    assert later.history.elasticity == pytest.approx(1.0)
    assert (later.state, later.action.scale_to) == (State.GROW, 4)
    assert later.history.change is not None
    assert not later.history.change.exploratory


def test_failed_trial_step_is_reverted_and_not_repeated() -> None:
    *_, later = after_growing(tokens=1050.0)
    assert later.history.elasticity == pytest.approx(0.2187, abs=1e-3)
    assert later.action == Action(kind="scale", scale_to=1)
    back = seen(
        270, 0.9, seconds=9000.0, limits=Limits(seconds=9500.0), generators=Generators(wanted=1, ready=1)
    )
    again = decide(spec(**GROWING), back, later.history)
    assert again.action == Action()
    assert any("elasticity of 0.22" in reason for reason in again.reasons)


def test_cooldown_holds_back_the_next_step() -> None:
    decision = grown()
    observation = seen(
        210, 0.9, seconds=2599.0, limits=Limits(seconds=2700.0), generators=Generators(wanted=3, ready=3)
    )
    waits = decide(spec(**GROWING), observation, decision.history)
    assert any("1 s of cooldown" in reason for reason in waits.reasons)
