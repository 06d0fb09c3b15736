"""The limit on sequences at the server follows its KV cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_generator.concurrency import Concurrency
from scalerl_generator.vllm_replies import BadReply, CachePressure, read_cache_pressure


@given(
    st.integers(1, 300),
    st.integers(1, 32),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5), st.integers(0, 300)), max_size=50),
)
def test_concurrency_stays_between_a_group_and_the_most(
    most: int, least: int, seen: list[tuple[float, int, int]]
) -> None:
    concurrency = Concurrency(most, least)
    for used, preemptions, running in seen:
        concurrency.follow(CachePressure(used, preemptions, running))
        assert min(least, most) <= concurrency.limit <= most


@pytest.mark.parametrize("room", [20, 100, 180])
def test_concurrency_settles_where_the_cache_is_used_and_not_full(room: int) -> None:
    """``room`` sequences fill the cache; those beyond it are preempted."""
    concurrency = Concurrency(most=256, least=8)
    preemptions, used, limits = 0, 0.0, []
    for look in range(100):
        running = concurrency.limit
        preemptions += max(running - room, 0)
        used = min(running / room, 1.0)
        concurrency.follow(CachePressure(used, preemptions, running))
        if look >= 50:
            limits.append(concurrency.limit)
            assert running <= room
    assert 0.5 * room < min(limits) <= max(limits) < 0.95 * room


def test_concurrency_is_not_cut_again_before_the_sequences_of_the_cut_have_ended() -> None:
    """256 are at a server whose cache holds 60, and one in 30 ends between two measurements."""
    concurrency = Concurrency(most=256, least=8)
    sent, preemptions, limits = 256, 0, []
    for _ in range(200):
        running = min(sent, 60)
        preemptions += sent > 60
        concurrency.follow(CachePressure(running / 60, preemptions, running))
        limits.append(concurrency.limit)
        sent = max(sent - -(-running // 30), concurrency.limit)
    assert 30 < min(limits) <= limits[-1] < 57


def test_concurrency_is_not_lowered_by_a_new_server() -> None:
    concurrency = Concurrency(most=64, least=8)
    concurrency.follow(CachePressure(0.9, 10, 64))
    before = concurrency.limit
    concurrency.follow(CachePressure(0.7, 0, 40))
    assert concurrency.limit == before


def test_cache_pressure_of_a_server_without_stats_is_refused() -> None:
    with pytest.raises(BadReply, match="--stats"):
        read_cache_pressure(b"process_cpu_seconds_total 3\n")
