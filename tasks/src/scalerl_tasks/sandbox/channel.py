"""Messages over a program's socket: a length of four bytes, then the bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")


class ChannelError(Exception):
    """The other end has closed, or a message is too long."""


def send(channel: socket.socket, message: bytes) -> None:
    """Send a message.

    Raises:
        OSError: the other end has closed, or the socket's timeout.
    """
    channel.sendall(_LENGTH.pack(len(message)) + message)


def receive(channel: socket.socket, max_bytes: int) -> bytes:
    """The next message.

    Raises:
        ChannelError: as it says.
        OSError: the other end has closed, or the socket's timeout.
    """
    (size,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if size > max_bytes:
        raise ChannelError(f"a message of {size:,} bytes, over the limit of {max_bytes:,}")
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ChannelError("the other end has closed")
        parts += part
    return bytes(parts)
