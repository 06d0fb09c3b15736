"""Which tensors of a model change their dtype for training, and which must not.

Parameters are cast. Buffers are not: rotary frequencies and embedding scales lose what they are for in bfloat16 (at
position 4,096 a rotary angle is off by up to 8 radians), and transformers, DeepSpeed and vLLM keep them as they were
made. All of them are made from the config: a model with buffers that belong to its weights, such as routing biases, is
refused when it is loaded (:func:`.load.check_weights_are_parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from scalerl_trainer.errors import EngineError, ModelError


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Every floating parameter to ``dtype``, in place; buffers stay.

    Raises ``ModelError`` when the model keeps a parameter in float32 beside bfloat16 (transformers'
    ``_keep_in_fp32_modules_strict``): DeepSpeed casts all parameters alike.
    """
    if dtype == torch.bfloat16:
        kept = float32_parameters(model)
        if kept:
            raise ModelError(
                f"{type(model).__name__} keeps {len(kept)} of its parameters in float32 ({kept[0]}), which cannot be "
                "trained beside bfloat16: set model.dtype: float32"
            )
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def float32_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that transformers loads in float32 when asked for bfloat16."""
    patterns = {
        pattern.replace("*", ".*")
        for module in model.modules()
        for pattern in getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    }
    if not patterns:
        return []
    kept = re.compile("|".join(sorted(patterns)))
    return [name for name, _ in model.named_parameters() if kept.search(name)]


def buffer_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The floating buffers of ``model`` by name."""
    return {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def check_buffer_dtypes(model: nn.Module, before: Mapping[str, torch.dtype]) -> None:
    """Raise ``EngineError`` when a floating buffer is not of the dtype that ``buffer_dtypes`` found before."""
    for name, dtype in buffer_dtypes(model).items():
        if dtype != before.get(name, dtype):
            raise EngineError(
                f"the buffer {name} was {before[name]} when the model was loaded and is {dtype} in the engine: "
                "log-probabilities would differ from the generator's"
            )
