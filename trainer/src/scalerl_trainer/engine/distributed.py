"""The ranks' common process group, and nothing that needs a compiler."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from scalerl_trainer.errors import EngineError, Stopped

POLL_SECONDS = 0.05
FAREWELL_SECONDS = 1.0
"""Rank 0 keeps the store open for so long after a stop, for the others to read why."""
_WORD, _GO, _STOPPED = "word", "go", "stopped"


@dataclass(frozen=True, slots=True)
class Rank:
    """Who this process is among the trainer's ranks, and where they meet."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Rank:
        """From the variables that torchrun, an Indexed Job's template and our local runtime all set.

        Raises ``EngineError`` naming what is missing or no number.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environment.get(name)]
        if missing:
            raise EngineError(f"{', '.join(missing)} not set: ranks are started with {', '.join(names)}")
        try:
            rank, world, local, port = (int(environment[name]) for name in (*names[:3], names[4]))
        except ValueError as error:
            raise EngineError(
                f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers: {error}"
            ) from error
        if not 0 <= rank < world:
            raise EngineError(f"RANK {rank} is not below WORLD_SIZE {world}")
        return cls(rank, world, local, environment["MASTER_ADDR"], port)


def join(
    rank: Rank,
    *,
    device: Literal["cpu", "cuda"],
    timeout_seconds: float = 600.0,
    stopped: Callable[[], bool] = lambda: False,
) -> torch.device:
    """Open the default process group (gloo on CPUs, NCCL on GPUs) and return this rank's device.

    We open it ourselves: DeepSpeed, given an open group, uses it. Blocks until all ranks came, at most
    ``timeout_seconds``, which is also the limit of every later collective.

    Raises:
        Stopped: ``stopped`` is true on this rank, or was on another that has come.
        EngineError: this rank's device is missing.
        OSError: not all ranks came in time.
    """
    # DeepSpeed insists on reading this one from the environment.
    os.environ["LOCAL_RANK"] = str(rank.local_rank)
    if device == "cuda":
        if rank.local_rank >= torch.cuda.device_count():
            raise EngineError(
                f"local rank {rank.local_rank} needs a GPU of its own, this machine shows "
                f"{torch.cuda.device_count()}"
            )
        torch.cuda.set_device(rank.local_rank)
    store = _rendezvous(rank, timeout_seconds, stopped)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device("cuda", rank.local_rank) if device == "cuda" else None,
    )
    return torch.device(device, rank.local_rank) if device == "cuda" else torch.device("cpu")


def _rendezvous(rank: Rank, timeout_seconds: float, stopped: Callable[[], bool]) -> Any:
    """A store that all ranks have come to.

    Torch's own wait for the others runs no signal handler, so what blocks is on a thread of its own.
    """
    stores: list[Any] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            stores.append(
                dist.TCPStore(  # type: ignore[attr-defined]  # absent from its __all__
                    rank.address,
                    rank.port,
                    rank.world,
                    is_master=rank.rank == 0,
                    timeout=timedelta(seconds=timeout_seconds),
                    wait_for_workers=False,
                )
            )
        except Exception as error:
            failed.append(error)

    deadline = time.monotonic() + timeout_seconds
    connecting = threading.Thread(target=connect, name="rendezvous", daemon=True)
    connecting.start()
    while connecting.is_alive():
        connecting.join(POLL_SECONDS)
        if stopped():
            raise Stopped("stopped while connecting to rank 0")
    if failed:
        raise ConnectionError(f"no rendezvous at {rank.address}:{rank.port}: {failed[0]}") from failed[0]
    store = stores[0]
    store.set(f"here/{rank.rank}", "")
    everyone = [f"here/{other}" for other in range(rank.world)]
    while True:
        # The first word holds for all: who goes on can count on the others, who leaves takes them with it.
        if stopped():
            store.compare_set(_WORD, "", _STOPPED)
        elif store.check(everyone):
            store.compare_set(_WORD, "", _GO)
        if store.check([_WORD]):
            if store.get(_WORD).decode() == _GO:
                return store
            if rank.rank == 0:
                time.sleep(FAREWELL_SECONDS)
            raise Stopped("this rank or another was stopped while the ranks were gathering")
        if time.monotonic() > deadline:
            missing = [other for other in range(rank.world) if not store.check([f"here/{other}"])]
            raise TimeoutError(f"ranks {missing} of {rank.world} did not come within {timeout_seconds:g} s")
        time.sleep(POLL_SECONDS)


def leave() -> None:
    """Close the process group; harmless when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_vectors(vector: torch.Tensor) -> torch.Tensor:
    """Every rank's copy of ``vector`` ``[K]``, on every rank, ``[world, K]`` on the CPU. One collective."""
    world = dist.get_world_size()
    gathered = [torch.empty_like(vector) for _ in range(world)]
    dist.all_gather(gathered, vector.contiguous())
    return torch.stack(gathered).cpu()
