"""Low-rank adapters of linear layers (LoRA, Hu et al., arXiv 2106.09685): ``y = x Wᵀ + b + (alpha / rank) · (x Aᵀ) Bᵀ``.

Only A and B are trained. They begin as in the paper and in peft: A uniform as that of a linear layer, B zero, so that the model
with new adapters is the base model. Names in files are peft's. ``W`` keeps its name in the model, so publishes and exports of
merged weights, ``W + (alpha / rank) · B A``, have the base model's names and layouts.

Shapes: ``r`` rank, ``i`` and ``o`` the inputs and outputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch
from torch import nn
from torch.nn import functional

from scalerl_api.spec import RunSpec
from scalerl_trainer.errors import ModelError

_A, _B = ".lora_A", ".lora_B"
AdapterNames = Literal["peft", "published"]
PEFT: Final = "peft"
"""Names in peft's files."""
PUBLISHED: Final = "published"
"""Names of :class:`scalerl_api.wire.WeightReceive`."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings of adapters."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    """Names of linear layers, or ends of their names after a dot; empty for all but the output embedding."""

    @classmethod
    def of(cls, spec: RunSpec) -> Self | None:
        """Those of ``trainer.lora``; None without it."""
        lora = spec.trainer.lora
        return None if lora is None else cls(lora.rank, lora.alpha, tuple(lora.target_modules))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha}, targetModules {', '.join(self.targets) or 'left out'}"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It has the parameters of the layer that it replaces, and two more."""

    def __init__(self, layer: nn.Linear, settings: Lora, generator: torch.Generator) -> None:
        bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = settings.scale
        self.active = True
        # Real values also where the layer is on the meta device: its own come from files, these from nowhere else.
        a_ri = torch.empty(settings.rank, layer.in_features, device="cpu")
        nn.init.kaiming_uniform_(a_ri, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(a_ri)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, settings.rank, device="cpu"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = functional.linear(input, self.weight, self.bias)
        if not self.active:
            return output
        return output + functional.linear(functional.linear(input, self.lora_A), self.lora_B) * self.scale

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight with the adapter, ``[o, i]``. Parameters must be whole."""
        return merged(self.weight, self.lora_A, self.lora_B, self.scale, dtype)


class Adapters:
    """The adapters of a model, which this adds to it; all its other parameters are frozen.

    Raises:
        ModelError: a target names no linear layer, or the output embedding.
    """

    def __init__(self, causal_lm: Any, settings: Lora, seed: int = 0) -> None:
        self.settings = settings
        head = causal_lm.get_output_embeddings()
        # Exactly linear layers: a subclass computes something else.
        layers = {name: m for name, m in causal_lm.named_modules() if type(m) is nn.Linear and m is not head}
        causal_lm.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self._layers: dict[str, LoraLinear] = {}
        for name in _chosen(layers, settings.targets, causal_lm.config.model_type):
            adapter = LoraLinear(layers[name], settings, generator)
            parent, _, child = name.rpartition(".")
            setattr(causal_lm.get_submodule(parent), child, adapter)
            self._layers[f"{name}.weight"] = adapter

    def of(self, parameter: str) -> LoraLinear | None:
        """The layer whose weight has this name; None if it has no adapter."""
        return self._layers.get(parameter)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model, while the context lasts."""
        for layer in self._layers.values():
            layer.active = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.active = True


def merged(
    weight_oi: torch.Tensor, a_ri: torch.Tensor, b_or: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """``W + scale · B A``, ``[o, i]``, computed in float32."""
    return weight_oi.float().add(b_or.float() @ a_ri.float(), alpha=scale).to(dtype)


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of A and B of the layer with the weight of this name."""
    layer = weight.removesuffix(".weight")
    return f"{layer}{_A}", f"{layer}{_B}"


def is_adapter(parameter: str) -> bool:
    """Whether the parameter of this name is an adapter's."""
    return parameter.endswith((_A, _B))


def peft_name(parameter: str) -> str:
    """The name of an adapter's parameter in peft's files.

    >>> peft_name("model.layers.0.mlp.up_proj.lora_A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{parameter}.weight"


def adapter_config(
    settings: Lora, parameters: Iterable[str], base_model: str, revision: str | None = None
) -> dict[str, Any]:
    """peft's ``adapter_config.json``.

    Args:
        parameters: the adapters' names of :func:`peft_name`.
        base_model: where loaders find the model that the adapters are of.
        revision: of it, on a hub.
    """
    layers = {name.split(".")[-3] for name in parameters}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": list(settings.targets) or sorted(layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _chosen(layers: dict[str, Any], targets: tuple[str, ...], model_type: str) -> list[str]:
    """The names of ``layers`` that ``targets`` names."""
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    if not layers:
        raise ModelError(f"trainer.lora: {model_type} has no linear layers: leave trainer.lora out")
    chosen = list(layers) if not targets else []
    for target in targets:
        matching = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matching:
            raise ModelError(
                f"trainer.lora.targetModules: {target!r} names no linear layer of {model_type}; there are "
                f"{', '.join(kinds)}"
            )
        chosen += matching
    return list(dict.fromkeys(chosen))
