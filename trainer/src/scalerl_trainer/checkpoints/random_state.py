"""Writes and restores a rank's random states in a checkpoint, as plain values: a volume may be shared, and a pickle is code."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from scalerl_trainer.errors import TrainerError


class RandomStateError(TrainerError):
    """The file of a checkpoint has something else than random states."""


class _State(msgspec.Struct, frozen=True):
    """The states of Python's, numpy's and torch's generators."""

    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: bytes
    cuda: bytes | None


def save_random_state(directory: Path, rank: int, state: bytes | None = None) -> Path:
    """Write ``state``, of :func:`random_state`; None for the present one. Returns the file. Raises ``OSError``."""
    file = _file(directory, rank)
    file.write_bytes(random_state() if state is None else state)
    return file


def random_state() -> bytes:
    """The present states of this process's generators."""
    version, values, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=True)
    cuda = bytes(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_available() else None
    state = _State(
        python=(version, list(values), gauss),
        numpy=(numpy[0], numpy[1].tolist(), *numpy[2:]),
        torch=bytes(torch.get_rng_state().numpy()),
        cuda=cuda,
    )
    return msgspec.msgpack.encode(state)


def load_random_state(directory: Path, rank: int) -> None:
    """Restore the random states. A rank that did not exist at the checkpoint gets a seed derived from rank 0's state.

    Raises:
        RandomStateError
    """
    state, is_new_rank = _read(directory, rank), False
    if state is None:
        state, is_new_rank = _read(directory, 0), True
    if state is None:
        raise RandomStateError(f"{_file(directory, 0)} is missing")
    try:
        random.setstate((state.python[0], tuple(state.python[1]), state.python[2]))
        name, keys, position, has_gauss, cached = state.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(state.torch))
        if state.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(state.cuda))
    except Exception as error:
        raise RandomStateError(f"{_file(directory, rank)}: not random states: {error}") from error
    if is_new_rank:
        seed = random.getrandbits(31) ^ rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # also seeds the accelerator


def _file(directory: Path, rank: int) -> Path:
    return directory / f"random-rank{rank:05d}.msgpack"


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _read(directory: Path, rank: int) -> _State | None:
    """The rank's states; None without its file."""
    file = _file(directory, rank)
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=_State) if file.is_file() else None
    except Exception as error:
        raise RandomStateError(f"{file}: not random states: {error}") from error
