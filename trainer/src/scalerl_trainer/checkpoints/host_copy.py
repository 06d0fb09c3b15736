"""The copy of a rank's state in the host's memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial

import torch

from scalerl_trainer.background import in_background, new_stream, on_stream
from scalerl_trainer.checkpoints.engine_files import Piece

_MIB = 1 << 20
CHUNK_BYTES = 256 * _MIB
"""Largest chunk of memory for the copy of a rank's state."""
_ALIGN = 16
"""Elements, so that views of every dtype are aligned."""


@dataclass(frozen=True)
class HostPart:
    """Where elements of a piece are in the host's memory: the values of its keys one after another, each at a multiple of
    ``_ALIGN`` elements."""

    piece: int
    """Its index."""
    start: int
    count: int
    chunk: int
    offset: int
    """Of the first byte in the chunk."""


def place_on_host(pieces: Sequence[tuple[int, int]]) -> tuple[list[int], list[HostPart]]:
    """Sizes of chunks of memory in bytes, and where in them the pieces are.

    torch rounds pinned memory up to a power of two, so the chunks are powers of two; the pieces are split where a chunk ends.

    Args:
        pieces: elements of each, and bytes of one element over all its keys.
    """
    total = sum(_aligned(count) * width for count, width in pieces)
    # Less than one aligned element stays free at the end of a chunk.
    widest = max((width for _, width in pieces), default=0)
    total += _ALIGN * widest * (total // CHUNK_BYTES + 10)
    whole, rest = divmod(math.ceil(total / _MIB), CHUNK_BYTES // _MIB)
    bits = range(rest.bit_length() - 1, -1, -1)
    chunks = [CHUNK_BYTES] * whole + [_MIB << bit for bit in bits if rest >> bit & 1]
    parts, chunk, offset = [], 0, 0
    for index, (size, width) in enumerate(pieces):
        start = 0
        while start < size:
            room = (chunks[chunk] - offset) // width // _ALIGN * _ALIGN
            count = min(size - start, room)
            if count == 0:
                chunk, offset = chunk + 1, 0
                continue
            parts.append(HostPart(index, start, count, chunk, offset))
            start, offset = start + count, offset + _aligned(count) * width
    return chunks, parts


def _aligned(count: int) -> int:
    return math.ceil(count / _ALIGN) * _ALIGN


class HostBuffers:
    """Copies of pieces in memory of the host, which is reserved by the first copy and reused; pinned for an accelerator.

    They are made on a thread, with a stream of its own on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._chunks: list[torch.Tensor] = []
        self._copying: Future[list[Piece]] | None = None

    def copy(self, pieces: Iterable[Piece]) -> Callable[[], list[Piece]]:
        """Start to copy the pieces over those of the last call, and return what waits for the copies; large ones may be split.

        What is returned raises ``RuntimeError`` if there is not enough memory.
        """
        self.wait()
        work = on_stream(partial(self._copy_all, list(pieces)), self._stream)
        self._copying = in_background("copy", work, self._device)
        return self._copying.result

    def wait(self) -> None:
        """Wait until the values of the pieces may change: they are copied, or the copy has failed."""
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    def _copy_all(self, pieces: list[Piece]) -> list[Piece]:
        """The copies; on a thread."""
        on_device = any(values.is_cuda for piece in pieces for values in piece.values.values())
        widths = [sum(values.itemsize for values in piece.values.values()) for piece in pieces]
        sizes, parts = place_on_host(
            [(p.values["weight"].numel(), w) for p, w in zip(pieces, widths, strict=True)]
        )
        if [chunk.numel() for chunk in self._chunks] != sizes:
            self._chunks.clear()
            self._chunks += [torch.empty(size, dtype=torch.uint8, pin_memory=on_device) for size in sizes]
        copies = [self._copy(pieces[part.piece], part) for part in parts]
        if on_device:
            torch.cuda.current_stream().synchronize()  # not the device: a publish may be sending on another stream
        return copies

    def _copy(self, piece: Piece, part: HostPart) -> Piece:
        """Start to copy a part of ``piece``."""
        values, offset = {}, part.offset
        for key, source in piece.values.items():
            flat = self._chunks[part.chunk][offset : offset + part.count * source.itemsize].view(source.dtype)
            flat.copy_(source[part.start : part.start + part.count], non_blocking=True)
            values[key] = flat
            offset += _aligned(part.count) * source.itemsize
        return replace(piece, start=piece.start + part.start, values=values)
