"""Ports on loopback that stay this run's own."""

from __future__ import annotations

import socket


class Ports:
    """Free ports, held until :meth:`close`.

    A port is held by a bound socket that does not listen. The server that gets it sets
    ``SO_REUSEADDR``, as HTTP servers and torch's stores do, and may listen there at any time, again
    after a restart too; everybody else finds the port taken, also as a port picked by the kernel.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._held: dict[int, socket.socket] = {}

    def take(self) -> int:
        """A port nobody else has.

        Raises:
            OSError: none is left.
        """
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((self._host, 0))
        except OSError:
            holder.close()
            raise
        port = int(holder.getsockname()[1])
        self._held[port] = holder
        return port

    def give_back(self, port: int) -> None:
        self._held.pop(port).close()

    def close(self) -> None:
        for holder in self._held.values():
            holder.close()
        self._held.clear()
