"""Free ports on loopback for the servers that tests start."""

from __future__ import annotations

import socket
from typing import Final

_HELD: Final[list[socket.socket]] = []


def free_port() -> int:
    """A free port, which a bound socket that does not listen holds until this process ends.

    A server with ``SO_REUSEADDR`` (vLLM, aiohttp, torch's stores, Go) can listen there all the same, however late it starts;
    no other process gets the port meanwhile, neither by asking for a free one nor for an outgoing connection.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
