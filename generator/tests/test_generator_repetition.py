"""Completions that end in a loop, against a search token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_generator.rollouts.group_packing import (
    MAX_PATTERN_TOKENS,
    MIN_LOOP_TOKENS,
    MIN_REPEATS,
    ends_in_loop,
)


def slow(ids: list[int]) -> bool:
    """The definition, as vLLM's ``check_sequence_repetition``, with a minimum of tokens."""
    for pattern in range(1, MAX_PATTERN_TOKENS + 1):
        copies = max(MIN_REPEATS, -(-MIN_LOOP_TOKENS // pattern))
        if copies * pattern <= len(ids) and all(
            ids[-1 - at] == ids[-1 - at - pattern] for at in range((copies - 1) * pattern)
        ):
            return True
    return False


@st.composite
def completions(draw: st.DrawFn) -> list[int]:
    """Some text, copies of a pattern of which the last may be cut off, and perhaps a token that breaks them."""
    few = st.integers(0, 2)
    text = draw(st.lists(few, max_size=40))
    pattern = draw(st.lists(few, min_size=1, max_size=40))
    copies = draw(st.integers(0, 2 + MIN_LOOP_TOKENS // len(pattern)))
    ids = text + pattern * copies + pattern[: draw(st.integers(0, len(pattern)))]
    if ids and draw(st.booleans()):
        ids[draw(st.integers(0, len(ids) - 1))] += 1
    return ids


@given(completions())
def test_as_the_search_token_by_token(ids: list[int]) -> None:
    assert ends_in_loop(np.array(ids, np.int32)) == slow(ids)


@pytest.mark.parametrize("pattern", [1, 3, 16, 17, MAX_PATTERN_TOKENS, MAX_PATTERN_TOKENS + 1])
def test_bounds_of_a_loop(pattern: int) -> None:
    tokens = pattern * max(MIN_REPEATS, -(-MIN_LOOP_TOKENS // pattern))
    ids = 7 + np.arange(20_000, dtype=np.int32)
    ids[-tokens:] = np.resize(ids[:pattern], tokens)
    assert ends_in_loop(ids) == (pattern <= MAX_PATTERN_TOKENS) == slow(ids.tolist())
    ids[-tokens] = 3
    assert not ends_in_loop(ids)
    ids[-tokens], ids[-1] = ids[0], 3
    assert not ends_in_loop(ids)


@pytest.mark.parametrize("tokens", [0, 1, MIN_LOOP_TOKENS - 1])
def test_short_completions_have_no_loop(tokens: int) -> None:
    assert not ends_in_loop(np.zeros(tokens, np.int32))
    assert ends_in_loop(np.zeros(MIN_LOOP_TOKENS, np.int32))
