"""Rewards of score and length, and what the zero-variance filter makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from coordinator_client import make_group
from coordinator_world import World, make_settings
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api.recipe import RecipeSpec
from scalerl_api.wire import MASKED, MessageSpan, NextAction, PushResult, Split, Verdicts, VersionSpan
from scalerl_coordinator.rewards import rewards, turn_returns, zero_variance

LONGEST = 14336


def length(**fields: Any) -> Any:
    return RecipeSpec.model_validate({"length": fields}).length


@pytest.mark.parametrize(
    ("fields", "score", "tokens", "expected"),
    [
        ({"none": {}}, 1.0, LONGEST, 1.0),
        ({"none": {}}, 0.0, 1, -1.0),
        ({"none": {}}, 0.25, 1, -0.5),
        ({"interruption": {}}, 1.0, LONGEST, 1.0),
        # The paper's figures: 12k costs nothing, 14k costs 1.
        ({"penalty": {}}, 1.0, LONGEST - 2048, 1.0),
        ({"penalty": {}}, 1.0, LONGEST - 1024, 0.5),
        ({"penalty": {}}, 1.0, LONGEST, 0.0),
        ({"penalty": {}}, 0.0, LONGEST, -1.0),
        # DAPO's: also wrong answers.
        ({"overlong": {}}, 1.0, LONGEST - 2867, 1.0),
        ({"overlong": {}}, 1.0, LONGEST - 1433, 1433 / 2867),
        ({"overlong": {}}, 0.0, LONGEST, -2.0),
    ],
)
def test_reward_of_score_and_length(
    fields: dict[str, Any], score: float, tokens: int, expected: float
) -> None:
    assert rewards(Verdicts(scores=[score]), [tokens], length(**fields), LONGEST) == [pytest.approx(expected)]


@given(
    st.floats(0, 1),
    st.lists(st.integers(1, LONGEST), min_size=2, max_size=2),
    st.sampled_from(["none", "penalty", "overlong"]),
)
def test_length_penalty_is_monotone_and_bounded_by_one(score: float, lengths: list[int], rule: str) -> None:
    plain = 2 * score - 1
    short, long = rewards(Verdicts(scores=[score] * 2), sorted(lengths), length(**{rule: {}}), LONGEST)
    assert plain >= short >= long >= plain - 1


def test_right_answers_of_different_length_are_not_filtered() -> None:
    shaped = rewards(Verdicts(scores=[1.0, 1.0]), [12000, 13500], length(penalty={}), LONGEST)
    assert zero_variance([1.0, 1.0])
    assert not zero_variance(shaped)


def test_shaped_rewards_reach_the_filter_and_the_trainer() -> None:
    """Groups of right answers: where one is overlong, the group is trained on."""
    world = World(make_settings(length=length(overlong={}), max_completion_tokens=20))
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    for lease in world.lease(world.member, 0):
        group = make_group(lease, version=0, scores=[1.0] * lease.completions, tokens=16)
        if lease.slot == 1 and lease.split is Split.TRAIN:
            longer = make_group(lease, version=0, scores=[1.0], tokens=18).completions
            group = msgspec.structs.replace(group, completions=[*group.completions[:-1], *longer])
        assert world.push(world.member, group) is PushResult.ACCEPTED
    assert world.next("t").action is NextAction.TRAIN
    groups = world.plan("t", 0).groups
    assert [group.rewards for group in groups] == [[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]]
    assert [group.filtered for group in groups] == [True, False, True]
    world.acknowledge()
    world.settings = make_settings()
    world.crash(0)
    assert [world.state.groups[slot].rewards for slot in range(3)] == [[1.0, 1.0], [1.0, 0.5], [1.0, 1.0]]


@given(
    st.floats(-2, 1), st.lists(st.floats(-1, 1), max_size=5), st.sampled_from([1.0, 0.5]), st.integers(0, 5)
)
def test_returns_are_sums_of_later_rewards(
    reward: float, earned: list[float], discount: float, turn: int
) -> None:
    spans = [MessageSpan(2 * at + 1, 2 * at + 2, one) for at, one in enumerate(earned)]
    found = turn_returns(reward, spans, discount)
    rewards = [2 * one for one in earned]
    rewards.append(reward + 1 - sum(rewards))
    assert len(found) == len(rewards)
    turn %= len(rewards)
    later = [one * discount**ahead for ahead, one in enumerate(rewards[turn:])]
    assert found[turn] == pytest.approx(sum(later), abs=1e-9)
    if discount == 1:
        assert found[0] == pytest.approx(reward + 1, abs=1e-9)


def test_rounding_of_sums_is_no_variance() -> None:
    """Each turn before the last earns .04, of two and of three: the second one's return is 1.92 in both, as a sum."""
    spans = [MessageSpan(1, 2, 0.04), MessageSpan(3, 4, 0.04)]
    returns = [turn_returns(1.0, spans[:turns], 1.0) for turns in (1, 2)]
    assert returns[0][1] != returns[1][1], "the case is one"
    assert zero_variance([1.0, 1.0], returns, "Turn")
    assert not zero_variance([1.0, 1.0], returns, "Return")
    assert not zero_variance([1.0, 1.0], [[2.0], [2.0 - 1e-6]], "Turn")


@pytest.mark.parametrize(
    ("credit", "earned", "filtered", "tries"),
    [
        ("Episode", [0.5, None], True, 1),
        ("Return", [0.5, None], False, 1),
        ("Return", [0.5, None], False, 3),
        ("Turn", [0.5, 0.0], False, 1),
        ("Turn", [0.5, 0.0], False, 3),
        # Both are solved, one of them later.
        ("Return", [0.0, None], True, 1),
        ("Return", [0.0, 0.0], True, 1),
        ("Turn", [0.0, None], True, 1),
        ("Return", [0.0, None], True, 3),
        ("Turn", [0.0, None], True, 3),
    ],
)
def test_groups_of_equal_totals_are_kept_if_turns_earned_otherwise(
    credit: Any, earned: list[float | None], filtered: bool, tries: int
) -> None:
    """Nor does refill replace those. ``earned`` by the first of two turns of each episode; None: it has one."""
    world = World(make_settings(credit=credit, discount=0.5, max_tries=tries))
    world.member = world.register("g")
    world.hello("t")
    world.next("t")
    world.publish("t")
    world.beat(world.member, 0)
    for lease in world.lease(world.member, 0):
        group = make_group(lease, version=0, scores=[1.0] * lease.completions)
        spans = [VersionSpan(0, 0), VersionSpan(MASKED, 1), VersionSpan(0, 2)]
        completions = [
            one
            if first is None or lease.split is not Split.TRAIN
            else msgspec.structs.replace(one, turns=[MessageSpan(1, 2, first)], versions=spans)
            for one, first in zip(group.completions, itertools.cycle(earned), strict=False)
        ]
        pushed = msgspec.structs.replace(group, completions=completions)
        assert world.push(world.member, pushed) is PushResult.ACCEPTED
    if filtered and tries > 1:
        assert world.state.counts.refilled == world.state.counts.acknowledged > 0
        return
    assert world.next("t").action is NextAction.TRAIN
    groups = world.plan("t", 0).groups
    assert [group.filtered for group in groups] == [filtered] * len(groups)
    world.acknowledge()
    world.crash(0)
    returns = [[2.0] if q is None else [2 * q + (2 - 2 * q) / 2, 2 - 2 * q] for q in earned]
    assert {str(one.returns) for one in (*groups, *world.state.groups.values())} == {
        "[]" if credit == "Episode" else str(returns)
    }
    assert {one.filtered for one in world.state.groups.values()} == {filtered}
    turns = [1 + (q is not None) for q in earned]
    assert {str(world.state.groups[slot].turns) for slot in range(3)} == {str(turns)}
