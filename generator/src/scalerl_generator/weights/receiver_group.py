"""The receiver's side of the process group of a publish, over gloo or NCCL (:mod:`scalerl_api.weight_group`; the other:
:mod:`scalerl_trainer.publish.sender_group`).

It has a store of its own and is not torch's default group, so that a new group can replace it when the membership changes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from scalerl_api.weight_group import first_operations, new_process_group
from scalerl_api.wire import GroupJoin

_POLL_SECONDS = 0.002


class ReceiverGroup:
    """A process group that opens in a thread, while the engine generates.

    Its operations have a timeout. Neither the constructor nor :meth:`close` blocks: an open waits for the slowest member, and
    NCCL's abort and gloo's destructor wait for operations in progress.

    Args:
        rank: of this worker; that in ``init`` is of the server's first worker.
        device: of the buffers.

    Raises:
        ValueError: the group has no receiver of that rank; the other members would wait for it until their time is over.
    """

    def __init__(self, init: GroupJoin, rank: int, device: torch.device) -> None:
        if not 1 <= rank < init.world_size:
            raise ValueError(f"rank must be in 1..{init.world_size - 1} (rank 0 sends), got {rank}")
        self.epoch = init.epoch
        self._on_gpu = init.backend == "nccl"
        self._device = device
        self._pg: Any = None
        self._closed = False
        self._timeout_seconds = init.timeout_seconds
        self._deadline = time.monotonic() + init.timeout_seconds
        self._problem: str | None = None
        threading.Thread(
            target=self._open, args=(init, rank), name=f"open-group-{init.epoch}", daemon=True
        ).start()

    def problem(self) -> str | None:
        """Why the group was not opened; empty if it is open, None while it opens."""
        if self._problem is None and time.monotonic() > self._deadline:
            self.close()  # NCCL creates its communicator in the first operation, which has no timeout of its own
        if self._closed:
            return f"the process group of epoch {self.epoch} was not opened in {self._timeout_seconds:g} s"
        return self._problem

    def _open(self, init: GroupJoin, rank: int) -> None:
        try:
            with self._device_of_thread():
                address = _local_address_for(init.store_host, init.store_port)
                self._pg = new_process_group(dist, init, rank, address)
                ones = torch.ones(1, device=self._device)
                first_operations(
                    dist, self._pg, init, ones, lambda work: self._wait(work, init.timeout_seconds)
                )
        except Exception as error:
            self._problem = f"the process group of epoch {self.epoch} was not opened: {error}"
        else:
            self._problem = ""
        if self._closed or self._problem:
            self._release()

    @contextlib.contextmanager
    def _device_of_thread(self) -> Iterator[None]:
        """Run on the worker's device: a new thread's is the first one, where NCCL would create its communicator. The stream is
        the thread's own, so that it does not wait for the model's."""
        if not self._on_gpu:
            yield
            return
        cuda: Any = torch.cuda  # its streams are untyped
        with cuda.device(self._device), cuda.stream(cuda.Stream()):
            yield

    def broadcast(self, buffer: torch.Tensor, timeout_seconds: float) -> None:
        """Receive rank 0's buffer into ``buffer``, once the group is open.

        Raises:
            RuntimeError: a peer is lost, or the timeout has passed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_seconds)
        self._wait(self._pg.broadcast([buffer], options), timeout_seconds)

    def _wait(self, work: Any, timeout_seconds: float) -> None:
        if not self._on_gpu:
            work.wait(timedelta(seconds=timeout_seconds))
            return
        deadline = time.monotonic() + timeout_seconds
        while not work.is_completed():  # NCCL's `wait` only synchronizes streams and has no timeout
            if time.monotonic() > deadline:
                raise RuntimeError(f"an NCCL operation did not complete in {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """Leave the group, also while it opens."""
        self._closed = True
        threading.Thread(target=self._release, name=f"close-group-{self.epoch}", daemon=True).start()

    def _release(self) -> None:
        pg, self._pg = self._pg, None
        if self._on_gpu and pg is not None:
            with self._device_of_thread():
                pg.abort()


def _local_address_for(host: str, port: int) -> str:
    """This machine's address on the route to ``host``. Gloo binds to it, so that it does not resolve the hostname."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: this sends nothing
        return str(ipaddress.ip_address(probe.getsockname()[0]))
