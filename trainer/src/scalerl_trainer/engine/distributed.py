"""The ranks' common process group, and nothing that needs a compiler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from scalerl_trainer.errors import EngineError


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


def join(rank: Rank, *, device: Literal["cpu", "cuda"], timeout_seconds: float = 600.0) -> torch.device:
    """Open the default process group (gloo on CPUs, NCCL on GPUs) and return this rank's device.

    We open it ourselves: DeepSpeed, given an open group, uses it. Blocks until all ranks came, at most
    ``timeout_seconds``, which is also the limit of every later collective.
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
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{rank.address}:{rank.port}",
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device("cuda", rank.local_rank) if device == "cuda" else None,
    )
    return torch.device(device, rank.local_rank) if device == "cuda" else torch.device("cpu")


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
