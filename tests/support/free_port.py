"""Free ports on loopback for the servers that tests start."""

from __future__ import annotations

import socket
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
