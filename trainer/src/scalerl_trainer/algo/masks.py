"""Which tokens are trained on, and flat order.

A completion token is trainable when the policy chose it. Forced tokens (the interruption phrase of ScaleRL's
length control, arXiv 2510.13786 [P]) were put there by the actor: they are context, not actions, and carry no
gradient. Prompt tokens and padding are never trainable. Tokens that are not trainable leave the flat arrays
altogether instead of being multiplied by zero, so what a generator reports for them (a NaN, or nothing) can do no
harm.

Shapes: see the package's legend; ``c`` runs over all completion tokens, flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from scalerl_trainer.errors import BadBatchError


def trainable_mask(completion_tokens: int, forced_spans: Iterable[tuple[int, int]] = ()) -> list[bool]:
    """True where the policy chose the token. ``forced_spans`` are half-open [start, end) in the completion.

    Raises ``BadBatchError`` when a span lies outside the completion.

    >>> trainable_mask(4, [(1, 3)])
    [True, False, False, True]
    """
    mask = [True] * completion_tokens
    for start, end in forced_spans:
        if not 0 <= start <= end <= completion_tokens:
            raise BadBatchError(
                f"forced span [{start}, {end}) lies outside a completion of {completion_tokens} tokens"
            )
        mask[start:end] = [False] * (end - start)
    return mask


def select(values: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> torch.Tensor:
    """Values at trainable tokens in flat order, float32 ``[N]``.

    Raises ``BadBatchError`` when a sequence has not one value per completion token.

    >>> select([[-1., -2.], [-3.]], [[True, False], [True]]).tolist()
    [-1.0, -3.0]
    """
    flat: list[float] = []
    for index, (row, mask) in enumerate(zip(values, masks, strict=True)):
        if len(row) != len(mask):
            raise BadBatchError(f"sequence {index} has {len(mask)} completion tokens but {len(row)} values")
        flat.extend(value for value, keep in zip(row, mask, strict=True) if keep)
    return torch.tensor(flat, dtype=torch.float32)
