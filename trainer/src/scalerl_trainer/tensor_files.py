"""Writes safetensors files as a stream, with one tensor in memory at a time.

The safetensors library is used for reading only: its ``save_file`` needs all tensors of a file at once, and copies those
on an accelerator. The format (https://github.com/huggingface/safetensors#format) is eight bytes with the length of a JSON
header, the header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
_CHUNK_ELEMENTS = 16 << 20
"""Number of elements copied from an accelerator at once."""
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    infos: Sequence[TensorInfo],
    tensors: Iterable[torch.Tensor],
    metadata: dict[str, str],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write ``tensors``, in the order of ``infos`` and on any device, cast to the dtypes of ``infos``.

    Args:
        progress: called with the number of bytes of each part that is written; the file is then flushed as it grows, so that a
            later flush of it does not take minutes.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
        ValueError: a tensor's shape differs from its info's, or the numbers of tensors and infos differ.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for info in infos:
        begin, end = end, end + info.bytes
        header[info.name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    unflushed = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for info, tensor in zip(infos, tensors, strict=True):
            if tuple(tensor.shape) != info.shape:
                raise ValueError(f"{info.name} has shape {tuple(tensor.shape)}, expected {info.shape}")
            flat = tensor.detach().contiguous().view(-1)
            for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
                part = flat[start : start + _CHUNK_ELEMENTS].to("cpu", info.dtype)
                file.write(part.view(torch.uint8).numpy().data)
                if progress is None:
                    continue
                progress(part.nbytes)
                unflushed += part.nbytes
                if unflushed >= _FLUSH_BYTES:
                    unflushed = 0
                    file.flush()
                    os.fsync(file.fileno())
