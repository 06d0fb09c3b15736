"""The limit on sequences at the server follows its KV cache."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_generator.rollouts.concurrency import CachePressure, Concurrency, read_cache_pressure
from scalerl_generator.vllm_replies import BadReply

CONTEXT, CACHE = 1000, 8000
"""Tokens of the longest sequence, and of the cache."""


@given(
    st.integers(1, 300),
    st.integers(1, 32),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 300), st.integers(0, 50)), max_size=50),
)
def test_concurrency_stays_between_a_group_and_the_most(
    most: int, least: int, seen: list[tuple[float, int, int]]
) -> None:
    concurrency = Concurrency(most, least, adaptive=True)
    assert concurrency.limit == min(least, most)
    for used, running, ended in seen:
        concurrency.follow(CachePressure(used, running, ended, 3.0))
        assert min(least, most) <= concurrency.limit <= most


def test_concurrency_that_is_not_adaptive_is_the_most() -> None:
    assert Concurrency(256, 8, adaptive=False).limit == 256


@pytest.mark.parametrize(("mean", "low", "high"), [(100, 72, 90), (400, 23, 29), (1000, 17, 21)])
def test_concurrency_fills_the_cache_with_sequences_of_all_ages(mean: float, low: int, high: int) -> None:
    """Exponential lengths, cut at the context. A sequence that runs has 100, 310 or 418 tokens in the mean (E[L²] / 2 E[L]): 72, 23 or 17
    of them fill 0.9 of the cache."""
    draw = random.Random(1)
    concurrency = Concurrency(most=256, least=8, adaptive=True)
    running: list[tuple[int, int]] = []
    ended, limits, full = 0, [], 0
    for reading in range(3000):
        grown = [(age + 10, length) for age, length in running]
        running = [one for one in grown if one[0] < one[1]]
        ended += len(grown) - len(running)
        while len(running) < concurrency.limit:
            running.append((0, min(int(draw.expovariate(1 / mean)) + 1, CONTEXT)))
        used = sum(age for age, _ in running) / CACHE
        full += used > 1
        concurrency.follow(CachePressure(min(used, 1.0), len(running), ended, CACHE / CONTEXT))
        if reading >= 500:
            limits.append(concurrency.limit)
    assert low <= sum(limits) / len(limits) <= high
    assert full < 1500


def test_concurrency_outlasts_the_end_of_a_batch() -> None:
    """Where each batch is generated to its end before the next, the last to run are the longest."""
    draw = random.Random(1)
    concurrency = Concurrency(most=256, least=8, adaptive=True)
    ended, first = 0, []
    for _ in range(6):
        waiting = [min(int(draw.expovariate(1 / 400)) + 1, CONTEXT) for _ in range(200)]
        running: list[tuple[int, int]] = []
        first.append(concurrency.limit)
        while waiting or running:
            grown = [(age + 10, length) for age, length in running]
            running = [one for one in grown if one[0] < one[1]]
            ended += len(grown) - len(running)
            while waiting and len(running) < concurrency.limit:
                running.append((0, waiting.pop()))
            used = min(sum(age for age, _ in running) / CACHE, 1.0)
            concurrency.follow(CachePressure(used, len(running), ended, CACHE / CONTEXT))
    assert min(first[1:]) >= 18


def test_concurrency_does_not_grow_before_sequences_have_ended() -> None:
    """All are young, and would fit many times."""
    concurrency = Concurrency(most=256, least=8, adaptive=True)
    for used in (0.0, 0.01, 0.02):
        concurrency.follow(CachePressure(used, 14, 0, CACHE / CONTEXT))
        assert concurrency.limit == 14


def test_concurrency_stays_when_a_new_server_counts_from_nothing() -> None:
    concurrency = Concurrency(most=256, least=8, adaptive=True)
    for pressure in (CachePressure(0.6, 40, 4000, 8.0), CachePressure(0.0, 0, 0, 8.0)):
        concurrency.follow(pressure)
        assert concurrency.limit == 60
    concurrency.follow(CachePressure(0.0, 40, 0, 8.0))
    assert concurrency.limit == 60


METRICS = b"""\
vllm:num_requests_running{engine="0"} 19.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop"} 3.0
vllm:request_success_total{engine="0",finished_reason="length"} 125.0
vllm:cache_config_info{block_size="128",kv_cache_max_concurrency="4.5",num_gpu_blocks="256"} 1.0
"""


def test_cache_pressure_is_read_from_metrics() -> None:
    assert read_cache_pressure(METRICS) == CachePressure(used=0.25, running=19, ended=128, longest=4.5)


@pytest.mark.parametrize(
    "missing", [b"num_requests_running", b"request_success", b"kv_cache_max_concurrency"]
)
def test_cache_pressure_of_a_server_without_stats_is_refused(missing: bytes) -> None:
    with pytest.raises(BadReply, match="--stats"):
        read_cache_pressure(METRICS.replace(missing, b"other"))
