"""The sender's side of a weight group: a process group with a separate store, besides the default group.

When the membership changes, a new group is opened. The store's server is separate from the group's store client, so that
closing the server ends the wait of all joining members immediately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from scalerl_api.wire.control import GroupBackend
from scalerl_trainer.background import device_of_thread, new_stream
from scalerl_trainer.errors import TrainerError, first_line

log = logging.getLogger(__name__)

c10d: Any = torch.distributed  # untyped: torch's typed exports lack these classes

POLL_SECONDS = 0.001
CHECK_SECONDS = 0.05
"""A wait that ends with what it waits for is interrupted so often, for its check and its deadline."""
Check = Callable[[], None]
"""A function that is called while waiting, and raises to end the wait."""


class GroupError(TrainerError):
    """The process group could not be opened or an operation on it failed; its members may be healthy."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int


class Store:
    """The TCP store server of a group's rendezvous, bound to one address."""

    def __init__(self, host: str, timeout_seconds: float) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family)
        self.address = Address(host, int(listening.getsockname()[1]))
        self._server: Any = c10d.TCPStore(
            host,
            self.address.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def close(self) -> None:
        """Stop the server. Members that wait for it get an error now instead of at their timeout."""
        self._server = None


class SenderGroup:
    """Rank 0 of a group with ``world_size - 1`` receivers. :func:`open_group` constructs it.

    Args:
        process_groups: a list with the process group, which must be the only reference to it (:func:`_release_in_thread`).
    """

    def __init__(
        self, epoch: int, backend: GroupBackend, world_size: int, store: Store, process_groups: list[Any]
    ) -> None:
        self.epoch = epoch
        self.world_size = world_size
        self._on_gpu = backend == "nccl"
        self._store = store
        self._opened = process_groups
        self.busy_until = 0.0
        """Time (monotonic) by which the last operation has ended, for its peers too."""

    def start_broadcast(self, buffer_u8: torch.Tensor, timeout_seconds: float) -> Any:
        """Start a broadcast; pass the result to :meth:`wait` before writing to the buffer again."""
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_seconds)
        self.busy_until = time.monotonic() + timeout_seconds
        try:
            return self._opened[0].broadcast([buffer_u8], options)
        except RuntimeError as error:
            raise GroupError(f"group epoch {self.epoch}: {first_line(error)}") from error

    def wait(self, work: Any, deadline: float, check: Check) -> None:
        """Wait until ``work`` is done.

        Raises:
            GroupError: a peer is lost, or ``deadline`` (monotonic) has passed.
        """
        try:
            while not work.is_completed():
                check()
                if time.monotonic() > deadline:
                    raise GroupError(f"group epoch {self.epoch}: a broadcast timed out")
                _wait_briefly(work, self._on_gpu)
            work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise GroupError(f"group epoch {self.epoch}: {first_line(error)}") from error

    def close(self) -> None:
        """Close without blocking. Peers in an operation get an error: over NCCL at once, over gloo at its timeout."""
        process_groups, self._opened = self._opened, []
        self._store.close()
        _release_in_thread(process_groups, self._on_gpu)


def open_group(
    epoch: int,
    backend: GroupBackend,
    world_size: int,
    store: Store,
    device: torch.device,
    timeout_seconds: float,
    check: Check,
) -> SenderGroup:
    """Join as rank 0; returns when all ``world_size`` ranks have completed the first operations.

    They open the connections before generation is paused. NCCL creates its communicator in the first one, and has no timeout for
    that.

    Args:
        check: called while waiting; its exception ends the wait.

    Raises:
        GroupError: not all ranks joined within ``timeout_seconds``. The caller closes the store, which ends the peers' wait.
    """
    process_groups: list[Any] = []
    failed: list[Exception] = []

    def construct() -> None:
        try:
            # Not on the stream of the steps: the first operation ends with that of the last peer.
            with device_of_thread(device), torch.cuda.stream(new_stream(device)):
                process_groups.append(
                    _new_process_group(epoch, backend, world_size, store.address, timeout_seconds)
                )
                _first_operations(process_groups[0], world_size, device, timeout_seconds)
        except Exception as error:
            failed.append(error)

    # In a thread, because the constructor blocks and only closing the store interrupts it.
    thread = threading.Thread(target=construct, name=f"open-group-{epoch}", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_seconds
    try:
        while thread.is_alive():
            check()
            if time.monotonic() > deadline:
                raise GroupError(f"group epoch {epoch}: not all of {world_size} ranks joined in time")
            thread.join(timeout=CHECK_SECONDS)
        if failed:
            raise GroupError(f"group epoch {epoch}: {first_line(failed[0])}")
    except BaseException:
        _release_in_thread(process_groups, backend == "nccl")
        raise
    return SenderGroup(epoch, backend, world_size, store, process_groups)


def _first_operations(pg: Any, world_size: int, device: torch.device, timeout_seconds: float) -> None:
    """The group's first operations, on a number (:class:`scalerl_api.wire.GroupJoin`)."""
    ones = torch.ones(1, device=device)
    options, on_gpu = c10d.AllreduceOptions(), device.type == "cuda"
    options.timeout = timedelta(seconds=timeout_seconds)
    deadline = time.monotonic() + timeout_seconds
    starts: list[Callable[[], Any]] = [lambda: pg.allreduce([ones], options)]
    if on_gpu:
        starts.append(lambda: pg.broadcast([ones]))
    for start in starts:
        work = start()
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the first operations did not end in time")
            _wait_briefly(work, on_gpu)
        work.wait()
    if int(ones) != world_size:
        raise RuntimeError(f"{int(ones)} ranks took part in the first operation, not {world_size}")


def _wait_briefly(work: Any, on_gpu: bool) -> None:
    """Wait for ``work``, at most until the next check. Raises nothing: the caller's last wait raises the error of ``work``.

    NCCL's ``wait`` only synchronizes streams, and a CUDA event has no timeout: without a poll, a lost peer would block for ever.
    """
    if on_gpu:
        time.sleep(POLL_SECONDS)
        return
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=CHECK_SECONDS))


def _release_in_thread(process_groups: list[Any], on_gpu: bool) -> None:
    """Release the process group, if there is one, on a new thread.

    Gloo's destructor waits for the operation in progress until its timeout. It runs where the last reference is dropped, so
    the thread takes the group out of the list.
    """

    def release() -> None:
        pg = process_groups.pop()
        if on_gpu:
            pg.abort()

    if process_groups:
        threading.Thread(target=release, name="close-group", daemon=True).start()


def _new_process_group(
    epoch: int, backend: GroupBackend, world_size: int, address: Address, timeout_seconds: float
) -> Any:
    timeout = timedelta(seconds=timeout_seconds)
    client = c10d.TCPStore(
        address.host, address.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    store = c10d.PrefixStore(f"scalerl-{epoch}", client)
    if backend == "gloo":
        gloo = c10d.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=address.host)]
        return c10d.ProcessGroupGloo(store, 0, world_size, gloo)
    # If a peer is lost in an operation, PyTorch ends the process by default. With 2 it only aborts the group, and the
    # operation raises. A group reads this variable when it is constructed; the trainer's own groups exist already.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # torch hands out 32 streams of each priority in turn. On the stream that fills buckets, a broadcast that a lost peer never ends would
    # block the next bucket's checksum, before `wait` with its deadline.
    nccl = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Only a fallback: the deadline of `wait` is earlier.
    nccl._timeout = 4 * timeout + timedelta(minutes=1)
    return c10d.ProcessGroupNCCL(store, 0, world_size, nccl)
