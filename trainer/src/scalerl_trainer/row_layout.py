"""Which sequences share rows and micro-batches, by their lengths and prompts alone.

Every function takes the number of positions that each sequence needs, ``length_s``, of which 0 leaves it out, and returns indices
of sequences.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
"""Of any width."""
PAYS = 0.9
"""Prompts are computed apart only where that costs less than this share: rows that attend to them need a mask."""


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows of sequence indices, fullest rows first. Length 0 is left out."""
    rows: list[list[int]] = []
    room: list[int] = []
    shortest = min((length for length in lengths if length), default=0)
    first_open = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        while first_open < len(rows) and room[first_open] < shortest:
            first_open += 1
        for row in range(first_open, len(rows)):
            if room[row] >= length:
                rows[row].append(index)
                room[row] -= length
                break
        else:
            rows.append([index])
            room.append(capacity - length)
    return [rows[row] for row in sorted(range(len(rows)), key=lambda r: (room[r], r))]


def by_length(lengths: list[int], budget: int) -> list[list[list[int]]]:
    """Groups of one-sequence rows, longest first. Length 0 is left out."""
    groups: list[list[list[int]]] = []
    longest = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * longest <= budget:
            groups[-1].append([index])
        else:
            groups.append([[index]])
            longest = lengths[index]
    return groups


def pays(groups: list[list[int]], prompt_s: Ints, length_s: Ints, budget: int) -> Ints:
    """Bool, the sequences whose prompts leave less to compute if they are computed apart, each prompt by itself.

    Args:
        groups: the sequences of each prompt.
    """
    alike_s = np.zeros(len(length_s), np.bool_)
    for group in groups:
        prefix, whole_g = int(prompt_s[group[0]]) - 1, length_s[group]
        at_once = max(1, (budget - prefix) // int(whole_g.max()))
        computed = -(-len(group) // at_once) * prefix + int((whole_g - prefix).sum())
        alike_s[group] = computed < PAYS * int(whole_g.sum())
    return alike_s


def by_prompt(groups: list[list[int]], prompt_s: Ints, length_s: Ints, budget: int) -> list[list[list[int]]]:
    """Micro-batches of prompts of equal length, each prompt with the sequences that have it.

    Args:
        groups: the sequences of each prompt.
    """
    after_s = length_s - prompt_s + 1
    ordered = [sorted(group, key=lambda index: -after_s[index]) for group in groups]
    ordered.sort(key=lambda group: (-prompt_s[group[0]], -after_s[group[0]]))
    micro_batches: list[list[list[int]]] = []
    before = width = rows = 0
    for group in ordered:
        last: list[int] = []
        for index in group:
            prefix, after = int(prompt_s[index]) - 1, int(after_s[index])
            prompts = len(micro_batches[-1]) + (not last) if micro_batches else 0
            if (
                not micro_batches
                or prefix != before
                or prompts * prefix + (rows + 1) * (prefix + max(width, after)) > budget
            ):
                micro_batches.append([])
                before, width, rows, last = prefix, 0, 0, []
            if not last:
                micro_batches[-1].append(last)
            last.append(index)
            width, rows = max(width, after), rows + 1
    return micro_batches
