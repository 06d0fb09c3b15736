"""What a step is made of: the zero-variance filter and the split over trainer ranks. Pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def zero_variance(scores: Sequence[float]) -> bool:
    """Whether a group tells nothing: all its verdicts are equal, or it has none, so every advantage is zero.

    ScaleRL drops such prompts from the effective batch without refilling it (arXiv 2510.13786 §2 [P]).
    """
    return len(set(scores)) <= 1


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to be placed: whose it is, and its length with its prompt."""

    group: int
    sample: int
    tokens: int


def balance(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """Split sequences over ranks so that the loads in tokens are near equal.

    Longest first, each to the rank with the least so far (Graham's LPT: at most 4/3 of the best possible
    largest load). Equal lengths and equal loads are ordered by index, so that every caller gets the same split
    whatever the arrival order was. Within a rank, by group and sample.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    shares: list[list[Item]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for item in sorted(items, key=lambda i: (-i.tokens, i.group, i.sample)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + item.tokens, rank))
    for share in shares:
        share.sort(key=lambda i: (i.group, i.sample))
    return shares
