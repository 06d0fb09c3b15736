"""The sender's side of the process group of a publish (:mod:`scalerl_api.weight_group`; the other:
:mod:`scalerl_generator.weights.receiver_group`).

When the membership changes, a new group is opened. The store's server is separate from the group's store client, so that
closing the server ends the wait of all joining members immediately.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from scalerl_api.weight_group import first_operations, new_process_group
from scalerl_api.wire.control import GroupBackend, GroupJoin
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


class Store:
    """The TCP store server of a group's rendezvous, bound to one address."""

    def __init__(self, host: str, timeout_seconds: float) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family)
        self.host, self.port = host, int(listening.getsockname()[1])
        self._server: Any = c10d.TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def join(
        self, epoch: int, backend: GroupBackend, world_size: int, timeout_seconds: float, rank: int = 0
    ) -> GroupJoin:
        """What ``rank`` joins the group with."""
        return GroupJoin(
            epoch=epoch,
            store_host=self.host,
            store_port=self.port,
            rank=rank,
            world_size=world_size,
            backend=backend,
            timeout_seconds=timeout_seconds,
        )

    def close(self) -> None:
        """Stop the server. Members that wait for it get an error now instead of at their timeout."""
        self._server = None


class SenderGroup:
    """Rank 0 of a group. :func:`open_group` constructs it.

    Args:
        process_groups: a list with the process group, which must be the only reference to it (:func:`_release_in_thread`).
    """

    def __init__(self, join: GroupJoin, store: Store, process_groups: list[Any]) -> None:
        self.epoch = join.epoch
        self._on_gpu = join.backend == "nccl"
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


def open_group(join: GroupJoin, store: Store, device: torch.device, check: Check) -> SenderGroup:
    """Join as rank 0; returns when all ranks have completed the first operations.

    They open the connections before generation is paused. NCCL creates its communicator in the first one, and has no timeout for
    that.

    Args:
        check: called while waiting; its exception ends the wait.

    Raises:
        GroupError: not all ranks joined within the timeout of ``join``. The caller closes the store, which ends the peers' wait.
    """
    process_groups: list[Any] = []
    failed: list[Exception] = []

    def construct() -> None:
        try:
            # Not on the stream of the steps: the first operation ends with that of the last peer.
            with device_of_thread(device), torch.cuda.stream(new_stream(device)):
                process_groups.append(new_process_group(c10d, join, 0, store.host))
                _first_operations(process_groups[0], join, device)
        except Exception as error:
            failed.append(error)

    # In a thread, because the constructor blocks and only closing the store interrupts it.
    thread = threading.Thread(target=construct, name=f"open-group-{join.epoch}", daemon=True)
    thread.start()
    deadline = time.monotonic() + join.timeout_seconds
    try:
        while thread.is_alive():
            check()
            if time.monotonic() > deadline:
                raise GroupError(
                    f"group epoch {join.epoch}: not all of {join.world_size} ranks joined in time"
                )
            thread.join(timeout=CHECK_SECONDS)
        if failed:
            raise GroupError(f"group epoch {join.epoch}: {first_line(failed[0])}")
    except BaseException:
        _release_in_thread(process_groups, join.backend == "nccl")
        raise
    return SenderGroup(join, store, process_groups)


def _first_operations(group: Any, join: GroupJoin, device: torch.device) -> None:
    deadline, on_gpu = time.monotonic() + join.timeout_seconds, join.backend == "nccl"

    def wait(work: Any) -> None:
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the first operations did not end in time")
            _wait_briefly(work, on_gpu)
        work.wait()

    first_operations(c10d, group, join, torch.ones(1, device=device), wait)


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
