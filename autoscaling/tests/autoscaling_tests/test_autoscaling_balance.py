"""balance: a table, and what never happens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from autoscaler_inputs import chain, seen, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scalerl_autoscaling.balance import balance
from scalerl_autoscaling.models import Action, Change, Generators, History, Load, Observation, State

STEADY = Load(seconds=600, steps=20, trainer_busy=0.8, generator_busy=0.9, queued_steps=0.5, stale_share=0.0)
RULES = {"generators": {"min": 1, "max": 4}, "cooldownSeconds": 600}


def observed(
    wanted: int = 2, seconds: float = 2000.0, ready: int | None = None, quota: int | None = None, **load: Any
) -> Observation:
    generators = Generators(wanted=wanted, ready=wanted if ready is None else ready, quota=quota)
    return seen(seconds=seconds, generators=generators, load=replace(STEADY, **load))


WAITS = {"trainer_busy": 0.5}
IDLE = {"generator_busy": 0.3}
STALE = {"stale_share": 0.06}


@pytest.mark.parametrize(
    ("observation", "to", "says"),
    [
        (observed(), None, "in balance"),
        (observed(**WAITS), 3, "trainer waits"),
        (observed(**WAITS, queued_steps=1.0), None, "in balance"),
        (observed(**WAITS, generator_busy=0.7), None, "in balance"),
        (observed(**WAITS, steps=2), None, "too few"),
        (observed(4, **WAITS), None, "the most"),
        (observed(2, ready=1, **WAITS), None, "under way"),
        (observed(2, quota=2, **WAITS), None, "room for 2"),
        (observed(**IDLE), 1, "wait for leases"),
        (observed(**IDLE, outage=True), None, "waited for an environment"),
        (observed(**WAITS, outage=True), 3, "trainer waits"),
        (observed(generator_busy=0.4), None, "in balance"),  # one alone would be busy for .8
        (observed(3, generator_busy=0.4), 2, "wait for leases"),
        (observed(1, **IDLE), None, "in balance"),
        (observed(**IDLE, **WAITS), None, "in balance"),  # neither side is at work: not a matter of numbers
        (observed(**STALE), 1, "too old"),
        (observed(1, **STALE), None, "the fewest"),
        (observed(**STALE, **WAITS), 1, "too old"),
        (observed(6), 5, "outside"),
        (observed(6, **WAITS), 5, "outside"),
    ],
)
def test_table(observation: Observation, to: int | None, says: str) -> None:
    decision = balance(spec(**RULES), observation, History())
    assert decision.action == (Action() if to is None else Action(kind="scale", scale_to=to))
    assert says in decision.reasons[0]


@pytest.mark.parametrize("state", [State.STOP, State.BROKEN])
def test_stopping_or_broken_run_is_not_balanced(state: State) -> None:
    assert balance(spec(**RULES), observed(**WAITS), History(state=state)).action == Action()


def test_without_a_range_there_is_nothing_to_balance() -> None:
    assert balance(spec(), observed(**WAITS), History()).action == Action()


def test_trial_step_is_measured_before_the_next() -> None:
    trial = Change(before=1, after=2, at=0.0, exploratory=True, measuring=True, pace=None)
    history = History(change=trial, generators=2, ready_since=0.0)
    assert "being measured" in balance(spec(**RULES), observed(**WAITS), history).reasons[0]


def test_each_change_back_waits_twice_as_long() -> None:
    """A load between two numbers of generators: one more than needed, one less than needed."""
    wanted, changes, history = 2, [], History()
    for minute in range(600):
        load = WAITS if wanted == 2 else IDLE
        observation = observed(wanted, seconds=60.0 * minute, **load)
        decision = balance(spec(**RULES), observation, history)
        history = decision.history
        if decision.action.scale_to is not None:
            wanted = decision.action.scale_to
            changes.append(minute)
    waits = [b - a for a, b in pairwise(changes)]
    assert waits[:5] == [10, 20, 40, 80, 160]


@given(
    st.lists(
        st.builds(
            observed,
            st.integers(1, 6),
            st.integers(0, 60).map(lambda s: s * 100.0),
            ready=st.sampled_from([None, 1]),
            trainer_busy=st.sampled_from([0.1, 0.9]),
            generator_busy=st.sampled_from([0.1, 0.95]),
            stale_share=st.sampled_from([0.0, 0.2]),
        ),
        max_size=20,
    )
)
@settings(max_examples=100, deadline=None)
def test_invariants(observations: list[Observation]) -> None:
    last: float | None = None
    for observation, decision in zip(observations, chain(balance, spec(**RULES), observations), strict=True):
        now, wanted, to = observation.spent.seconds, observation.generators.wanted, decision.action.scale_to
        last = None if last is None else min(last, now)
        assert decision.state is State.INSUFFICIENT
        if to is None:
            continue
        assert abs(to - wanted) == 1
        assert 1 <= to <= 4 or abs(to - 2) < abs(wanted - 2)
        assert observation.generators.ready == wanted
        assert last is None or now - last >= 600
        last = now
