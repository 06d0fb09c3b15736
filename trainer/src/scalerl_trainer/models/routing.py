"""Statistics of the routers of a mixture of experts, from forward passes that are computed anyway.

Axes: ``l`` layer with experts, ``e`` expert of it, ``x`` position of a micro-batch, ``m`` trained token, ``k`` chosen expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ROUTER_ENTROPY = "router_entropy"
LOAD_MAX = "expert_load_max"
LOAD_MIN = "expert_load_min"


def routers_of(causal_lm: Any) -> tuple[list[tuple[str, Any]], int]:
    """The routers of a transformers model by name, and the index of their logits in their outputs.

    They are those of which transformers records ``router_logits``: modules that return logits over experts and the chosen ones. A
    model whose routers are recorded in another way has none here.
    """
    recorder = (getattr(causal_lm.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    part = getattr(recorder, "layer_name", None) or ""
    routers = [
        (name, module)
        for name, module in causal_lm.base_model.named_modules()
        if kind is not None and isinstance(module, kind) and part in name and hasattr(module, "num_experts")
    ]
    return routers, getattr(recorder, "index", 0)


class Routing:
    """Sums over the routers of a transformers model; a model without routers has none.

    They are read by hooks, which do nothing outside :meth:`counted`: neither in a frozen model's pass nor when
    activation checkpointing computes a layer again.
    """

    def __init__(self, causal_lm: Any) -> None:
        routers, self._index = routers_of(causal_lm)
        self._at_m: torch.Tensor | None = None
        self._load: dict[int, torch.Tensor] = {}
        self._entropy: dict[int, torch.Tensor] = {}
        self._layers = len(routers)
        self._experts = max((int(router.num_experts) for _, router in routers), default=0)
        for layer, (_, router) in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

    @property
    def experts(self) -> int:
        """The largest number of experts of a layer; 0 without routers."""
        return self._experts

    def _hook(self, layer: int) -> Any:
        @torch.no_grad()
        def count(_: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
            # Some families return scores alone, or those of each sequence apart: they have no figures.
            if self._at_m is None or not isinstance(output, tuple):
                return
            chosen_xk = next((each for each in output if not each.is_floating_point()), None)
            logits_xe = output[self._index]
            if chosen_xk is None or logits_xe.ndim != 2:
                return
            self._at_m = at_m = self._at_m.to(logits_xe.device)
            log_me = logits_xe.index_select(0, at_m).float().log_softmax(-1)
            entropy = -(log_me.exp() * log_me).sum(dtype=torch.float64)
            chosen = chosen_xk.index_select(0, at_m).flatten()
            # bincount would wait for the device.
            load_e = entropy.new_zeros(self._experts).scatter_add_(0, chosen, entropy.new_ones(chosen.shape))
            self._entropy[layer] = self._entropy.get(layer, 0) + entropy
            self._load[layer] = self._load.get(layer, 0) + load_e

        return count

    @contextmanager
    def counted(self, at_m: torch.Tensor | None) -> Iterator[None]:
        """A context whose forward pass is counted, at these positions; None for none."""
        self._at_m = at_m
        try:
            yield
        finally:
            self._at_m = None

    def take(self, device: torch.device) -> torch.Tensor:
        """The sums since the last call, float64 ``[L * (1 + E)]``: of each layer, entropy in nats and choices of each expert."""
        sums = torch.zeros(self._layers, 1 + self._experts, dtype=torch.float64, device=device)
        for layer, entropy in self._entropy.items():
            sums[layer, 0], sums[layer, 1:] = entropy, self._load[layer]
        self._entropy, self._load = {}, {}
        return sums.flatten()

    def figures(self, sums: torch.Tensor, tokens: int) -> dict[str, float]:
        """Figures of a step by name, from the sums of all ranks over ``tokens``; empty without routers.

        The entropy is the mean over tokens and layers. Loads are in units of the mean over a layer's experts: 1 for all of them
        if they are even; the largest and the smallest of any layer. The largest minus 1 is MaxVio of arXiv 2408.15664.
        """
        table = sums.view(self._layers, 1 + self._experts)
        table = table[table[:, 1:].sum(1) > 0]
        if not len(table):
            return {}
        load_le = table[:, 1:] / table[:, 1:].mean(1, keepdim=True).clamp_min(1e-9)
        return {
            ROUTER_ENTROPY: float(table[:, 0].mean()) / tokens,
            LOAD_MAX: float(load_le.max()),
            LOAD_MIN: float(load_le.min()),
        }
