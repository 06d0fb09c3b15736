"""Ports on loopback, reserved for one run."""

from __future__ import annotations

import socket
from typing import Final

HOST: Final = "127.0.0.1"


class Ports:
    """Free ports, reserved until :meth:`close`.

    A bound socket that does not listen reserves each port. A server with ``SO_REUSEADDR`` (HTTP servers, torch's stores) can
    still listen on it, also after a restart; the kernel assigns the port to no other process.
    """

    def __init__(self) -> None:
        self._reserved: dict[int, socket.socket] = {}

    def take(self) -> int:
        """A free port.

        Raises:
            OSError: no port is free.
        """
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((HOST, 0))
        except OSError:
            holder.close()
            raise
        port = int(holder.getsockname()[1])
        self._reserved[port] = holder
        return port

    def give_back(self, port: int) -> None:
        self._reserved.pop(port).close()

    def close(self) -> None:
        for holder in self._reserved.values():
            holder.close()
        self._reserved.clear()
