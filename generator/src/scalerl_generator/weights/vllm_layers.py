"""Installs a version in the layers of vLLM's model, while requests wait with their KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class ModelLayers:
    """The layers of a worker's model. A version replaces their weights between :meth:`start` and :meth:`finish` or :meth:`abort`."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig) -> None:
        self._model: Any = model
        self._config = config
        self._parameter_names = frozenset(name for name, _ in model.named_parameters())
        self._loaded: set[str] = set()
        self._tied = _tied_layers(model)
        _repack_experts_after_updates(model)

    def start(self) -> None:
        initialize_layerwise_reload(self._model)
        self._loaded = set()

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by their names in the checkpoint. vLLM keeps them until their layer is complete.

        Raises:
            RuntimeError: the model refuses a tensor, which the message names.
        """
        current = ""

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in tensors:
                current = name
                yield name, tensor

        try:
            self._loaded |= self._model.load_weights(named()) or set()
        except Exception as error:
            raise RuntimeError(
                f"vLLM's {type(self._model).__name__} cannot load the tensor {current!r} (an unknown name, or another shape): "
                f"{type(error).__name__}: {error}"
            ) from error

    def check_complete(self) -> None:
        """Raise RuntimeError if a parameter was not loaded since :meth:`start`."""
        if missing := sorted(self._parameter_names - self._loaded):
            raise RuntimeError(f"the manifest left {len(missing)} parameter(s) unset: {_listed(missing)}")

    def finish(self) -> None:
        """Process the loaded weights into the form in which layers use them, those of tied layers included.

        A layer that shares another's parameter (a tied LM head) is loaded through that other layer, so vLLM's reload does not
        process it, and its packed copy for the matrix product would keep the old weights.
        """
        finalize_layerwise_reload(self._model, self._config)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)

    def abort(self) -> None:
        """Finish every layer with its present weights.

        An incomplete layer buffers the weights that it received. They are dropped first, because the next update would count
        them and finish the layer too early.
        """
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish()


def _repack_experts_after_updates(model: torch.nn.Module) -> None:
    """Pack fused experts for the CPU's kernel whenever they were loaded.

    vLLM (0.32) does so after the first load only, and the kernel would then read weights in the checkpoint's layout as packed
    ones: the model would compute something else, without an error. On GPUs the layout is converted after every load.

    The replaced method runs once for each loaded layer, before vLLM copies the result into the parameters that the kernel
    reads. It does not run for the layers of an aborted update, which keep their packed weights.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None:
            continue
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        if isinstance(method, UnquantizedFusedMoEMethod):
            method.process_weights_after_loading = partial(
                _process_and_pack, method.process_weights_after_loading, method.moe_kernel.fused_experts
            )


def _process_and_pack(process: Callable[[Any], None], experts: Any, layer: torch.nn.Module) -> None:
    process(layer)
    experts.process_weights_after_loading(layer)


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """The layers that share a parameter with an earlier layer and keep a processed copy of it."""
    seen: set[int] = set()
    tied: list[Any] = []
    for layer in model.modules():
        own = {id(p) for p in layer._parameters.values() if p is not None}
        if own & seen and hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading"):
            tied.append(layer)
        seen |= own
    return tied


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest
