"""Published adapters (LoRA) in a vLLM worker that holds several versions of them, beside base weights that never change: the worker's
side of :mod:`.adapters_in_flight` (``trainer.lora.inFlight: FinishOnOwn``). Other adapters are merged: :func:`.vllm_weight_engine.merged_weights`.

vLLM's manager moves adapters in and out of its slots by the requests of a step, and drops all of them after a weight update. It reads
what it lacks with ``_load_adapter``, which :class:`PublishedAdapters` replaces: from memory, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_supported_lora_modules
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager


class PublishedAdapters:
    """The adapters by name. There is one instance in a worker's process.

    Args:
        model: with LoRA layers.
        dtype: of the adapters in vLLM's slots.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model: Any = model
        self._dtype = dtype
        self._held: dict[str, tuple[dict[str, torch.Tensor], float]] = {}
        """For each name, A and B on the host by peft's names, and the scale of their product."""
        LRUCacheWorkerLoRAManager._load_adapter = self._load

    def add(
        self, name: str, adapters: Mapping[str, torch.Tensor], scale: float, needed: Iterable[str]
    ) -> None:
        """Hold the adapters, and drop those that are not ``needed``.

        Args:
            adapters: as for :func:`.vllm_weight_engine.merged_weights`.

        Raises:
            RuntimeError: an adapter is of no layer of the model that can have one. What is held stays.
        """
        # A copy: tensors that were read from files lie in memory into which the next version is read.
        tensors = {_peft_name(key): tensor.to("cpu", copy=True) for key, tensor in adapters.items()}
        self._held[name] = tensors, scale
        try:
            self._check(self._build(name, 1))
        except Exception:
            del self._held[name]
            raise
        kept = {name, *needed}
        self._held = {key: value for key, value in self._held.items() if key in kept}

    def _load(self, request: LoRARequest) -> LoRAModel:
        if request.lora_name not in self._held:
            raise RuntimeError(f"the adapters {request.lora_name} are not held: {', '.join(self._held)} are")
        return self._build(request.lora_name, request.lora_int_id)

    def _build(self, name: str, number: int) -> LoRAModel:
        tensors, scale = self._held[name]
        rank = next(tensor.shape[0] for key, tensor in tensors.items() if key.endswith("lora_A.weight"))
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            number,
            # vLLM multiplies B by the scale in place.
            {key: tensor.clone() for key, tensor in tensors.items()},
            PEFTHelper(r=rank, lora_alpha=scale * rank, target_modules=[]),
            device="cpu",
            dtype=self._dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        lora.is_3d_lora_weight = False
        return lora

    def _check(self, lora: Any) -> None:
        """vLLM ignores adapters of layers that it does not know."""
        layers = {name for name, one in self._model.named_modules() if isinstance(one, BaseLayerWithLoRA)}
        packed = {
            part: whole for whole, parts in self._model.packed_modules_mapping.items() for part in parts
        }
        for name in lora.loras:
            parent, _, last = name.rpartition(".")
            if name not in layers and f"{parent}.{packed.get(last)}" not in layers:
                raise RuntimeError(
                    f"vLLM's {type(self._model).__name__} has no layer {name} that can have an adapter: name others in "
                    "trainer.lora.targetModules, or set trainer.lora.inFlight: Continue"
                )


def leave_out_embeddings() -> None:
    """Have vLLM, without ``--lora-target-modules``, give no adapters to embeddings, before it loads a model.

    Published adapters are of none. A slot of the output embedding's is as wide as the vocabulary, which vLLM limits then (to 258,048), and
    with it vLLM fails for log-probabilities of the prompts of several requests, of which a probe consists (0.32).
    """
    model_manager.get_supported_lora_modules = _linear_layers


def _linear_layers(model: torch.nn.Module) -> list[str]:
    embeddings = {name for one in model.modules() for name in getattr(one, "embedding_modules", None) or ()}
    return [name for name in get_supported_lora_modules(model) if name not in embeddings]


def _peft_name(key: str) -> str:
    """
    >>> _peft_name("model.layers.0.self_attn.q_proj.weight/lora_A")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    weight, _, which = key.rpartition("/")
    return f"base_model.model.{weight.removesuffix('.weight')}.{which}.weight"
