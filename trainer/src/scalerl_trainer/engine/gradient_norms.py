"""Norms of the gradient by kind of parameter: which part of the model a large gradient comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Final

import torch

from scalerl_api.metrics_fields import GRADIENT_KINDS
from scalerl_trainer.engine.distributed import gather_vectors

_KINDS: Final = tuple(GRADIENT_KINDS)
_PATTERNS: Final = {
    "head": re.compile(r"lm_head|embed_out"),
    "embedding": re.compile(r"embed|\bw[tp]e\b"),
    "norm": re.compile(r"norm|\bln_"),
    "attention": re.compile(r"attn|attention"),
    "mlp": re.compile(r"mlp|ffn|feed_forward|moe|experts"),
}
"""In the order in which they are tried: an attention layer may have a norm of its own. Tied weights have the embedding's name."""


def kind_of(name: str) -> str:
    """The kind of a parameter, by its name in the model.

    >>> [kind_of(name) for name in ("lm_head.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.gate.weight")]
    ['head', 'norm', 'mlp']
    >>> [kind_of(name) for name in ("transformer.wte.weight", "h.0.attn.c_attn.weight", "h.0.ln_1.weight", "layers.0.conv1d.weight")]
    ['embedding', 'attention', 'norm', 'other']
    """
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), "other")


class GradientNorms:
    """Measures the gradient as the optimizer gets it: reduced, in float32, in parts of one tensor for many parameters.

    Args:
        parts: for each of this rank's parts of a parameter, its kind, the optimizer's tensor and the elements in it.
        shared: every rank has the whole gradient (ZeRO 0), not a part that no other has.
        device: that of the process group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Iterable[tuple[str, torch.Tensor, slice]],
        *,
        shared: bool,
        device: torch.device,
    ) -> None:
        self._shared, self._device = shared, device
        self._parts: dict[torch.Tensor, list[tuple[int, slice]]] = {}
        for kind, flat, elements in parts:
            self._parts.setdefault(flat, []).append((_KINDS.index(kind), elements))
        held = next(
            iter(self._parts), torch.empty(0, device=device)
        ).device  # the host's if the optimizer is offloaded
        self._squares = torch.zeros(len(_KINDS), dtype=torch.float64, device=held)
        # DeepSpeed steps its optimizer once for each group of parameters, and frees a group's gradient after its step.
        optimizer.register_step_pre_hook(self._measure)

    def reset(self) -> None:
        """Begin a step."""
        self._squares.zero_()

    @torch.no_grad()
    def _measure(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"]:
                parts = self._parts.get(flat)
                if flat.grad is not None and parts:
                    gradient = flat.grad.flatten()
                    norms = torch.stack(torch._foreach_norm([gradient[elements] for _, elements in parts]))
                    kinds = torch.tensor([kind for kind, _ in parts], device=norms.device)
                    self._squares.index_add_(0, kinds, norms.double() ** 2)

    def by_kind(self, norm: float) -> dict[str, float]:
        """Norms of the step's gradient before clipping, by kind; kinds without a gradient are left out. A collective, but for ``shared``.

        Args:
            norm: the global norm before clipping, to which the squares are scaled: what was measured may be clipped.
        """
        squares = (
            self._squares.cpu() if self._shared else gather_vectors(self._squares.to(self._device)).sum(0)
        )
        total = float(squares.sum())
        return {
            kind: norm * math.sqrt(square / total)
            for kind, square in zip(_KINDS, squares.tolist(), strict=True)
            if square > 0 and total > 0
        }
