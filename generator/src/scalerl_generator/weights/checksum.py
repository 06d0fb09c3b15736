"""Vectorised form of :func:`scalerl_api.weight_layout.checksum`."""

from __future__ import annotations

import torch

_CHUNK_WORDS = 1 << 18


def checksum_u8(payload: torch.Tensor) -> int:
    """Checksum of a flat uint8 tensor, computed on its device.

    Processes chunks of 2 MiB, so that a large bucket needs no temporary of its own size.
    """
    words = payload.view(torch.int64)
    weights = torch.arange(1, 2 * min(_CHUNK_WORDS, words.numel()) + 1, 2, device=payload.device)
    total = torch.zeros((), dtype=torch.int64, device=payload.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        total += (chunk * weights[: chunk.numel()]).sum() + 2 * start * chunk.sum()
    return int(total.item())
