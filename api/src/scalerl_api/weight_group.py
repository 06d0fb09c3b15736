"""The process group of a publish, which trainer (rank 0) and generators construct alike.

``torch.distributed`` is an argument, ``c10d``: this member does not depend on torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from scalerl_api.wire.control import GroupJoin


def new_process_group(c10d: Any, join: GroupJoin, rank: int, hostname: str) -> Any:
    """The group, with a store of its own besides the default group; blocks until all ranks have connected to each other.

    Args:
        hostname: address of this machine, to which gloo binds.
    """
    timeout = timedelta(seconds=join.timeout_seconds)
    client = c10d.TCPStore(
        join.store_host, join.store_port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    store = c10d.PrefixStore(f"scalerl-{join.epoch}", client)
    if join.backend == "gloo":
        gloo = c10d.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=hostname)]
        return c10d.ProcessGroupGloo(store, rank, join.world_size, gloo)
    # If a peer is lost in an operation, PyTorch ends the process by default. With 2 it only aborts the group, and the operation
    # raises. A group reads this variable when it is constructed; the process' own groups exist already.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # torch hands out 32 streams of each priority in turn. The group's must be neither that of the model, which generates while a group
    # opens, nor that which fills buckets: there, a broadcast that a lost peer never ends would block the next bucket's checksum, before
    # the sender's wait with its deadline.
    nccl = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Only a fallback: the deadlines of both sides' waits are earlier.
    nccl._timeout = 4 * timeout + timedelta(minutes=1)
    return c10d.ProcessGroupNCCL(store, rank, join.world_size, nccl)


def first_operations(c10d: Any, group: Any, join: GroupJoin, ones: Any, wait: Callable[[Any], None]) -> None:
    """The group's first operations (:class:`.GroupJoin`), which open the connections.

    Args:
        ones: tensor with the number 1, on the device of the buffers.
        wait: waits for an operation, and raises after a timeout: over NCCL it has none of its own.

    Raises:
        RuntimeError: not all ranks took part.
    """
    options = c10d.AllreduceOptions()
    options.timeout = timedelta(seconds=join.timeout_seconds)
    wait(group.allreduce([ones], options))
    if join.backend == "nccl":
        wait(group.broadcast([ones]))
    if int(ones) != join.world_size:
        raise RuntimeError(f"{int(ones)} ranks took part in the first operation, not {join.world_size}")
