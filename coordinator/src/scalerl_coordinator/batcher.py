"""Zero-variance filter, and the split of a step over trainer ranks. Pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether a group has no gradient: its rewards are all equal, or it has none, so every advantage is zero. Not its
    scores: of two right answers the longer may be worth less.

    ScaleRL drops such prompts from the effective batch without refilling it (arXiv 2510.13786 §2 [P]).
    """
    return len(set(rewards)) <= 1


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to assign to a rank: its group, its sample, and its length with the prompt."""

    group: int
    sample: int
    tokens: int


def balance(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """Split sequences over ranks so that their token counts are nearly equal.

    Longest first, each to the rank with the fewest tokens so far (Graham's LPT: at most 4/3 of the best possible largest
    load). Ties are broken by index, so the split does not depend on the arrival order. Each shard is sorted by group and
    sample.
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
