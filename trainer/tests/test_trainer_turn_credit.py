"""``recipe.advantage.credit``: advantages of turns, and which tokens get them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.algo.advantages import Baseline, Normalization, advantages, turn_advantages
from scalerl_trainer.errors import BadBatchError
from scalerl_trainer.publish.probe import probe_sequences
from scalerl_trainer.shard_conversion import rank_batch

Credit = Literal["Return", "Turn"]
NORMALIZATIONS: list[Normalization] = ["Batch", "Group", "None"]
BASELINES: list[Baseline] = ["GroupMean", "LeaveOneOut"]
STEP = 3


def of_episodes(
    returns: list[list[float]], groups: list[int], credit: Credit, *options: Any
) -> list[list[float]]:
    counts = [len(one) for one in returns]
    found = turn_advantages(
        torch.tensor([r for one in returns for r in one], dtype=torch.float64),
        torch.repeat_interleave(torch.tensor(counts)),
        torch.tensor([turn for count in counts for turn in range(count)]),
        torch.tensor(groups),
        credit,
        *options,
    )
    return [part.tolist() for part in found.split(counts)]


@pytest.mark.parametrize(
    ("credit", "normalization", "baseline", "expected"),
    [
        # Return: the mean is (1.5 + 1 + 0) / 3. Turn: the means are (2 + 1 + 0) / 3 and (1 + 0) / 2.
        ("Return", "None", "GroupMean", [[1.1667, 0.1667], [0.1667], [-0.8333, -0.8333]]),
        ("Return", "None", "LeaveOneOut", [[1.5, 0.5], [0.25], [-1.25, -1.25]]),
        ("Return", "Group", "GroupMean", [[1.6977, 0.2425], [0.2425], [-1.2127, -1.2127]]),
        ("Turn", "None", "GroupMean", [[1.0, 0.5], [0.0], [-1.0, -0.5]]),
        ("Turn", "None", "LeaveOneOut", [[1.5, 1.0], [0.0], [-1.5, -1.0]]),
        ("Turn", "Group", "GroupMean", [[1.2247, 1.0], [0.0], [-1.2247, -1.0]]),
        # The mean square of a turn counts once an episode: (.625 + 0 + .625) / 3.
        ("Turn", "Batch", "GroupMean", [[1.5492, 0.7746], [0.0], [-1.5492, -0.7746]]),
    ],
)
def test_turn_advantages_golden(
    credit: Credit, normalization: str, baseline: str, expected: list[list[float]]
) -> None:
    found = of_episodes([[2.0, 1.0], [1.0], [0.0, 0.0]], [4, 4, 4], credit, normalization, baseline)
    for mine, values in zip(found, expected, strict=True):
        assert mine == pytest.approx(values, abs=1e-4)


episodes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.sampled_from([0.0, 0.5, 2.0])), min_size=1, max_size=9
)
"""Group, turns and reward of each episode."""


@given(episodes, st.sampled_from(NORMALIZATIONS), st.sampled_from(BASELINES))
def test_final_rewards_alone_give_each_turn_the_advantage_of_its_episode(
    of: list[tuple[int, int, float]], normalization: Normalization, baseline: Baseline
) -> None:
    """Return in any case; Turn if all episodes have as many turns."""
    groups, rewards = [group for group, _, _ in of], [reward for *_, reward in of]
    plain = advantages(torch.tensor(rewards), torch.tensor(groups), normalization, baseline).tolist()
    uneven = [[reward] * turns for _, turns, reward in of]
    even = [[reward] * 3 for reward in rewards]
    cases: list[tuple[list[list[float]], Credit]] = [(uneven, "Return"), (even, "Return"), (even, "Turn")]
    for returns, credit in cases:
        for mine, one in zip(
            of_episodes(returns, groups, credit, normalization, baseline), plain, strict=True
        ):
            assert mine == pytest.approx([one] * len(mine), abs=1e-5)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4)),
        min_size=1,
        max_size=9,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(["Return", "Turn"]),
    st.sampled_from(NORMALIZATIONS),
    st.sampled_from(BASELINES),
)
def test_order_of_episodes_changes_no_advantage(
    of: list[tuple[int, list[float]]],
    random: Any,
    credit: Credit,
    normalization: Normalization,
    baseline: Baseline,
) -> None:
    options = normalization, baseline
    order = list(range(len(of)))
    random.shuffle(order)
    found = of_episodes([r for _, r in of], [g for g, _ in of], credit, *options)
    shuffled = of_episodes([of[at][1] for at in order], [7 - of[at][0] for at in order], credit, *options)
    for at, mine in zip(order, shuffled, strict=True):
        assert mine == pytest.approx(found[at], abs=1e-5)


def episode(sample: int, turns: list[tuple[int, int]]) -> wire.Sequence:
    """Replies and the messages after them, by their numbers of tokens; the last reply has no message."""
    spans, messages, at = list[wire.VersionSpan](), list[wire.MessageSpan](), 0
    for reply, message in turns:
        spans.append(wire.VersionSpan(STEP, at))
        at += reply
        if message:
            spans.append(wire.VersionSpan(wire.MASKED, at))
            messages.append(wire.MessageSpan(at, at + message))
            at += message
    return wire.Sequence(
        group=0,
        sample=sample,
        prompt_token_ids=np.array([1, 2], "<i4").tobytes(),
        token_ids=np.arange(at).astype("<i4").tobytes(),
        logprobs=np.zeros(at, "<f4").tobytes(),
        versions=spans,
        turns=messages,
    )


def shard(returns: list[list[float]], ungraded: list[int] | None = None) -> wire.Shard:
    of = [episode(0, [(3, 2), (1, 1), (2, 0)]), episode(1, [(4, 0)])]
    group = wire.GroupMeta(
        slot=0,
        scores=[1.0, 0.0],
        rewards=[1.0, -1.0],
        completion_tokens=[9, 4],
        filtered=False,
        masked_tokens=[3, 0],
        returns=returns,
        ungraded=ungraded or [],
    )
    return wire.Shard(
        step=STEP, groups=[group], sequences=[one for one in of if one.sample not in (ungraded or [])]
    )


def recipe(credit: str, normalization: str = "None") -> RecipeSpec:
    return RecipeSpec.model_validate({"advantage": {"credit": credit, "normalization": normalization}})


def test_tokens_have_the_advantage_of_their_turn() -> None:
    batch = rank_batch(shard([[3.0, 2.0, 1.0], [0.0]]), recipe("Turn")).batch
    assert batch.advantages_n is not None
    assert batch.advantages_n.tolist() == [1.5, 1.5, 1.5, 0, 0, 0, -1.5, -1.5, -1.5, -1.5]
    assert batch.advantages_s.tolist() == pytest.approx([0.75, -1.5])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_return_of_final_rewards_is_episode(normalization: str) -> None:
    plain = rank_batch(shard([]), recipe("Episode", normalization)).batch
    of = rank_batch(shard([[2.0, 2.0, 2.0], [0.0]]), recipe("Return", normalization)).batch
    assert plain.advantages_n is None
    assert of.advantages_n is not None
    torch.testing.assert_close(
        of.advantages_n, plain.advantages_s.repeat_interleave(torch.tensor([6, 4])), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(of.advantages_s, plain.advantages_s, rtol=0, atol=1e-6)


def test_groups_without_returns_have_the_advantage_of_their_rewards() -> None:
    """Accepted before the recipe was edited; the other way round, their returns are not used."""
    old = rank_batch(shard([]), recipe("Turn")).batch
    assert old.advantages_n is None
    assert old.advantages_s.tolist() == [1.0, -1.0]
    assert rank_batch(shard([[3.0, 2.0, 1.0], [0.0]]), recipe("Episode")).batch.advantages_n is None


def test_ungraded_episode_has_no_part_in_the_baseline() -> None:
    batch = rank_batch(shard([[3.0, 2.0, 1.0], [9.0]], ungraded=[1]), recipe("Turn")).batch
    assert batch.advantages_n is not None
    assert batch.advantages_n.tolist() == [0.0] * 6


def test_fewer_returns_than_turns_are_refused() -> None:
    with pytest.raises(BadBatchError, match="sample 0: 2 returns for 3 turns"):
        rank_batch(shard([[3.0, 2.0], [0.0]]), recipe("Turn"))


def test_probe_compares_the_longest_reply_of_an_episode() -> None:
    """After all tokens before it, and without those after it; a sequence without a sampled token is left out."""
    of = [episode(0, [(3, 2), (5, 1), (4, 0)]), episode(1, [(2, 7), (1, 1)]), episode(2, [(0, 3)])]
    found = probe_sequences(wire.Shard(step=STEP, groups=[], sequences=of), 8, 100, min_tokens=1)
    assert [(len(one.token_ids), one.prompt_tokens) for one in found] == [(2 + 10, 2 + 5), (2 + 2, 2)]
    assert found[0].token_ids.tolist() == [1, 2, *range(10)]
    assert probe_sequences(wire.Shard(step=STEP, groups=[], sequences=of), 8, 4, min_tokens=1) == []
