"""Casts a model's parameters for training, and checks that its buffers keep their dtype.

Buffers such as rotary frequencies and embedding scales are useless in bfloat16 (at position 4,096 a rotary angle has an
error of up to 8 radians), and transformers, DeepSpeed and vLLM keep their dtype. Their values are computed from the
config; a model with buffers that are part of its weights, such as routing biases, is refused
(:func:`.load.check_weights_are_parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from scalerl_api.memory.model_size import Dtype
from scalerl_trainer.errors import EngineError, ModelError


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating-point parameter to ``dtype``, in place; buffers are unchanged.

    Raises ``ModelError``, see :func:`check_dtype`.
    """
    check_dtype(model, "bfloat16" if dtype == torch.bfloat16 else "float32")
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def check_dtype(model: nn.Module, dtype: Dtype) -> None:
    """Raise ``ModelError`` if ``dtype`` is bfloat16 and the model needs parameters in float32 (transformers'
    ``_keep_in_fp32_modules_strict``), because DeepSpeed has one dtype for all parameters."""
    if dtype == "bfloat16":
        kept = float32_parameters(model)
        if kept:
            raise ModelError(
                f"{type(model).__name__} keeps {len(kept)} of its parameters in float32 ({kept[0]}), which cannot be "
                "trained beside bfloat16: set model.dtype: float32"
            )


def float32_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that transformers loads in float32 even if the dtype is bfloat16."""
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
    """Dtypes of the floating-point buffers of ``model``, by name."""
    return {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def check_buffer_dtypes(model: nn.Module, before: Mapping[str, torch.dtype]) -> None:
    """Raise ``EngineError`` if a floating-point buffer's dtype differs from ``before``, from :func:`buffer_dtypes`."""
    for name, dtype in buffer_dtypes(model).items():
        if dtype != before.get(name, dtype):
            raise EngineError(
                f"the buffer {name} was {before[name]} when the model was loaded and is {dtype} in the engine: "
                "log-probabilities would differ from the generator's"
            )
