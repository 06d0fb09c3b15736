"""torch's variable-length attention on CPUs, which have no kernel for it: the definition, one sequence at a time.

The signature is that of ``torch.nn.attention.varlen.varlen_attn``, and what that refuses is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention within each sequence; tensors ``[T, heads, size]``, boundaries int32 ``[S + 1]``."""
    assert query.dim() == key.dim() == value.dim() == 3
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[1]
    ends = cu_seq_q.tolist()
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    assert ends[0] == 0
    assert ends[-1] == len(query)
    assert min(lengths) > 0
    assert max(lengths) == max_q == max_k
    left, right = window_size
    assert right == 0, "only causal attention"
    found = []
    for start, length in zip(ends[:-1], lengths, strict=True):
        at = torch.arange(length)
        back = at[:, None] - at[None, :]
        mask = (back >= 0) & (back <= (length if left < 0 else left))
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        group = q.shape[0] // k.shape[0]
        scores = (
            q
            @ k.repeat_interleave(group, 0).transpose(1, 2)
            * (q.shape[-1] ** -0.5 if scale is None else scale)
        )
        weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
        found.append((weights @ v.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(found)


def grouped(*tensors: Any, **options: Any) -> torch.Tensor:
    """:func:`varlen_attn` with fewer heads of keys than of queries."""
    return varlen_attn(*tensors, **options, enable_gqa=True)
