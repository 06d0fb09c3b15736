"""Golden vectors: the checksum of weights that every implementation must compute."""

from __future__ import annotations

from array import array


def vector_payload(name: str) -> bytes:
    """The payload of a golden vector in :data:`CHECKSUM_VECTORS`."""
    match name:
        case "empty":
            return b""
        case "zeros":
            return bytes(64)
        case "bytes-0-255":
            return bytes(range(256))
        case "high-bits":
            return b"\xff" * 8 + b"\x80" * 8 + b"\x00" * 7 + b"\x80" + b"\x01" * 8
        case "long":  # 3 MiB and a bit: longer than any chunk a fast implementation works in
            state, words = 1, array("Q")
            for _ in range(393_218):
                state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
                words.append(state)
            return words.tobytes()
    raise KeyError(name)


CHECKSUM_VECTORS: dict[str, int] = {
    "empty": 0,
    "zeros": 0,
    "bytes-0-255": 3832894412608838272,
    "high-bits": 614891469123651718,
    "long": 328064344275046861,
}
"""By name of the payload."""
