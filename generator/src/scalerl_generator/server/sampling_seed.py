"""The random numbers of one start of a vLLM server.

vLLM seeds every process with 0 unless it is given a seed, and its model runner V2 seeds each request from that generator
(``vllm/v1/worker/gpu/sample/states.py``). The n-th requests of all replicas, and of all starts of a replica, would then get
the same noise. vLLM's ``--seed`` has 32 bits, so that of a thousand starts two are equal with probability 1e-4; therefore
each worker is also seeded with as many bits as each generator takes: 256 of Python's and numpy's, 64 of a GPU's, 32 of torch's for CPUs.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np


def start_seed(run_seed: int, member: str, start: str) -> bytes:
    """The 32-byte seed of one start.

    Args:
        run_seed: ``spec.seed``.
        member: name of the replica.
        start: unique to the start: random, because neither a pod nor its container counts starts across nodes and restores.
    """
    return hashlib.sha256(f"{run_seed}\n{member}\n{start}".encode()).digest()


def vllm_seed(seed: bytes) -> int:
    """The value of vLLM's ``--seed``: the part of ``seed`` that numpy accepts as an integer, below 2**32.

    >>> vllm_seed(bytes([1, 0, 0, 0]) + bytes(28))
    1
    """
    return int.from_bytes(seed[:4], "little")


def seed_generators(seed: bytes) -> None:
    """Seed the process's generators, as ``vllm.utils.torch_utils.set_random_seed`` does, with all bits that each takes."""
    import torch

    random.seed(seed)
    np.random.seed(np.frombuffer(seed, np.uint32))  # the generator that vLLM draws from
    torch.manual_seed(int.from_bytes(seed[:8], "little"))  # and all devices
