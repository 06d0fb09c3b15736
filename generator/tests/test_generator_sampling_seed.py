"""Seeds of a server's starts, and the seeds that vLLM's model runner V2 derives from them for requests."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl_generator.server.sampling_seed import seed_generators, start_seed, vllm_seed


class Buffer:
    """``UvaBackedTensor`` without its mapping into the memory of a GPU."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.np = torch.zeros(size, dtype=dtype).numpy()

    def copy_to_uva(self) -> None:
        pass


def request_seeds(seed: bytes, requests: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of vLLM's own state of a batch, after a worker is seeded."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample import states

    monkeypatch.setattr(states, "UvaBackedTensor", Buffer)
    seed_generators(seed)
    batch = states.SamplingStates(requests, vocab_size=64)
    for row in range(requests):
        batch.add_request(row, SamplingParams(temperature=1.0))
    return [int(one) for one in batch.seeds.np]


@pytest.fixture(autouse=True)
def _restored_generators() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_requests_of_two_starts_have_different_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [("generator-0", "a"), ("generator-0", "b"), ("generator-1", "a")]
    drawn = [request_seeds(start_seed(0, *start), 64, monkeypatch) for start in starts]
    assert len({one for seeds in drawn for one in seeds}) == 3 * 64
    assert request_seeds(start_seed(0, *starts[0]), 64, monkeypatch) == drawn[0], (
        "tensor-parallel workers must agree"
    )


def test_seed_generators_seeds_all_of_vllms_generators() -> None:
    def draws(seed: bytes) -> tuple[float, int, float]:
        seed_generators(seed)
        return random.random(), int(np.random.randint(2**62)), float(torch.rand(()))

    one, other = start_seed(0, "g", "1"), start_seed(0, "g", "2")
    assert draws(one) == draws(one)
    assert all(a != b for a, b in zip(draws(one), draws(other), strict=True))
    # Starts that are equal in the bits of vLLM's --seed, of which torch's generator for CPUs takes no more.
    alike = one[:4] + other[4:]
    assert all(a != b for a, b in zip(draws(one)[:2], draws(alike)[:2], strict=True))


def test_start_seeds_do_not_collide() -> None:
    """4,096 members with 64 starts each; of 32 bits alone, eight pairs would be equal."""
    seeds = {start_seed(7, f"generator-{m}", str(s)) for m in range(4096) for s in range(64)}
    assert len(seeds) == 4096 * 64


identity = st.tuples(
    st.integers(0, 2**31 - 1), st.from_regex(r"[a-z0-9-]*", fullmatch=True), st.uuids().map(str)
)


@given(one=identity, other=identity)
def test_start_seed_identifies_its_start(one: tuple[int, str, str], other: tuple[int, str, str]) -> None:
    assert (start_seed(*one) == start_seed(*other)) == (one == other)
    assert 0 <= vllm_seed(start_seed(*one)) < 2**32
