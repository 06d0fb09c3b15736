"""The ranks' default process group."""

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
STORE_GRACE_SECONDS = 1.0
"""After a stop, rank 0 keeps the store open for this time, so that the others can read the decision."""
_DECISION, _PROCEED, _STOPPED = "decision", "proceed", "stopped"


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's rank and the rendezvous address."""

    rank: int
    world: int
    """Number of ranks."""
    local_rank: int
    """Rank within the pod, and index of the GPU."""
    address: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Rank:
        """Read torchrun's environment variables. Raises ``EngineError`` if one is missing or not a number."""
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


def init_process_group(
    rank: Rank,
    *,
    device: Literal["cpu", "cuda"],
    timeout_seconds: float = 600.0,
    stopped: Callable[[], bool] = lambda: False,
) -> torch.device:
    """Initialise the default process group (gloo on CPUs, NCCL on GPUs) and return this rank's device.

    Blocks until all ranks have joined, at most ``timeout_seconds``, which is also the limit of every later collective.
    DeepSpeed uses a clone of the group (:func:`limit_as_default`).

    Raises:
        Stopped: ``stopped`` is true on this rank or on another that has joined.
        EngineError: this rank's device is missing.
        OSError: not all ranks joined in time.
    """
    # DeepSpeed reads LOCAL_RANK from the environment.
    os.environ["LOCAL_RANK"] = str(rank.local_rank)
    if device == "cuda":
        if rank.local_rank >= torch.cuda.device_count():
            raise EngineError(
                f"local rank {rank.local_rank} needs a GPU of its own, but this process sees "
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
    """Connect to a store, and return it once all ranks have joined.

    Signal handlers do not run during torch's blocking call, so another thread makes it.
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
    all_ranks = [f"here/{other}" for other in range(rank.world)]
    while True:
        # The first decision is valid for all ranks: either all proceed or all stop.
        if stopped():
            store.compare_set(_DECISION, "", _STOPPED)
        elif store.check(all_ranks):
            store.compare_set(_DECISION, "", _PROCEED)
        if store.check([_DECISION]):
            if store.get(_DECISION).decode() == _PROCEED:
                return store
            if rank.rank == 0:
                time.sleep(STORE_GRACE_SECONDS)
            raise Stopped("this rank or another was stopped during the rendezvous")
        if time.monotonic() > deadline:
            missing = [other for other in range(rank.world) if not store.check([f"here/{other}"])]
            raise TimeoutError(f"ranks {missing} of {rank.world} did not join within {timeout_seconds:g} s")
        time.sleep(POLL_SECONDS)


def destroy_process_group() -> None:
    """Close the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def limit_as_default(group: Any, device: torch.device) -> None:
    """Give ``group`` the timeout of the default group. ``device`` is this rank's in both."""
    c10d: Any = dist.distributed_c10d
    default = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    c10d._set_pg_timeout(default.options._timeout, group)


def gather_vectors(vector: torch.Tensor) -> torch.Tensor:
    """Gather every rank's ``vector`` of shape ``[K]``; returns ``[world, K]`` on the CPU of every rank. One collective."""
    world = dist.get_world_size()
    gathered = [torch.empty_like(vector) for _ in range(world)]
    dist.all_gather(gathered, vector.contiguous())
    return torch.stack(gathered).cpu()
