"""Free ports on loopback for the servers that tests start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

_HELD: Final[list[socket.socket]] = []


def free_port() -> int:
    """A free port, reserved by a bound socket that does not listen until this process ends.

    A server with ``SO_REUSEADDR`` (vLLM, aiohttp, torch's stores, Go) can listen on the port at any later time. The kernel
    gives the port to no other process, either as a free port or for an outgoing connection.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])


@contextlib.contextmanager
def full_port() -> Iterator[int]:
    """A port whose queue of connections is full, so that the kernel answers no further one."""
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(listening.getsockname())
        yield listening.getsockname()[1]
