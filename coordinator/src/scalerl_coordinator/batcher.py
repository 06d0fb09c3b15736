"""The zero-variance filter, and the division of a step's sequences over trainer ranks. Pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scalerl_api.recipe import Credit

_DECIMALS: Final = 9


def zero_variance(
    rewards: Sequence[float], returns: Sequence[Sequence[float]] = (), credit: Credit = "Episode"
) -> bool:
    """Whether a group has no gradient, because all its advantages are zero: its rewards are all equal, or it has none.

    This compares rewards, not scores: of two correct answers, the longer one may have the lower reward. ScaleRL drops such
    groups from the effective batch without refilling it (arXiv 2510.13786 §2 [P]). With another ``credit``, the returns of turns
    decide in their place (:func:`~.rewards.turn_returns`): all of them, or those of each turn among themselves. They are given
    without a discount, which is a preference among episodes that differ in their rewards, and no reason to train on others. They
    are sums, so they are compared to nine decimals.

    >>> returns = [[1.0, 0.0], [1.0]]  # the second reply of the first episode earned nothing
    >>> zero_variance([1.0, 1.0], returns), zero_variance([1.0, 1.0], returns, "Return"), zero_variance([1.0, 1.0], returns, "Turn")
    (True, False, True)
    """
    if credit == "Episode" or not returns:
        return len(set(rewards)) <= 1
    if credit == "Return":
        return len({round(one, _DECIMALS) for of_episode in returns for one in of_episode}) <= 1
    at_turn: dict[int, float] = {}
    rounded = ((turn, round(one, _DECIMALS)) for each in returns for turn, one in enumerate(each))
    return all(at_turn.setdefault(turn, one) == one for turn, one in rounded)


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to assign to a rank."""

    group: int
    """Index of its group in the step."""
    sample: int
    """Index of its completion in the group."""
    tokens: int
    """Length of prompt plus completion."""


def balance(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """Assign sequences to ranks so that the ranks' token counts are nearly equal.

    Longest first, each sequence goes to the rank with the fewest tokens so far (Graham's LPT: the largest load is at most 4/3
    of the optimum). Ties are broken by index, so the result does not depend on the order of arrival. Each shard is sorted by
    group and sample.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    shards: list[list[Item]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for item in sorted(items, key=lambda i: (-i.tokens, i.group, i.sample)):
        load, rank = heapq.heappop(loads)
        shards[rank].append(item)
        heapq.heappush(loads, (load + item.tokens, rank))
    for shard in shards:
        shard.sort(key=lambda i: (i.group, i.sample))
    return shards
