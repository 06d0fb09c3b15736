"""Vectorised form of :func:`scalerl_api.weight_layout.checksum`."""

from __future__ import annotations

import torch

_COLUMNS = 1 << 14


def checksum_u8(payload: torch.Tensor) -> int:
    """Checksum of a flat uint8 tensor, computed on its device as ``scalerl_trainer.publish.buckets`` does.

    With a number of operations that does not depend on the size: generation is paused meanwhile, and on a GPU each one is a launch.
    """
    words = payload.view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    rows, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    total = (
        _weighted_sum(rows.sum(0), 1, 2)
        + _weighted_sum(rows.sum(1), 0, 2 * _COLUMNS)
        + _weighted_sum(rest, 2 * whole + 1, 2)
    )
    return int(total.item())


def _weighted_sum(values: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """``Σ (first + step·i) values_i``."""
    stop = first + step * values.numel()
    return (values * torch.arange(first, stop, step, device=values.device)).sum()
