"""Model FLOP utilisation of a training step (Chowdhery et al., arXiv 2204.02311, appendix B [P])."""

from __future__ import annotations

import re
from typing import Any, Final

import torch

PEAK_TFLOPS: Final = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "RTX A6000": 154.8,
}
"""Peak TFLOP/s, dense bfloat16 with float32 accumulation, by words of the device's name; the first match counts. From the
manufacturers' data sheets."""
_SMALLER: Final = re.compile(r"\b(MIG|Laptop)\b")
"""Names of a part of a device, and of a smaller one."""


def peak_tflops(name: str) -> float | None:
    """Peak TFLOP/s of a device; None if the table does not have it."""
    if _SMALLER.search(name):
        return None
    return next((peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def flops_per_token(causal_lm: Any, *, frozen: bool = False) -> float | None:
    """Floating-point operations of forward and backward pass for each token, without attention: six for each parameter, except
    those of an embedding that is not tied to the head, which are looked up. None if a token does not use all parameters.

    Args:
        causal_lm: a transformers model whose parameters are whole.
        frozen: the parameters get no gradients (LoRA): four operations each, and those of adapters are not counted.
    """
    if any("expert" in name for name, _ in causal_lm.named_parameters()):
        return None
    head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parameters = sum(int(parameter.numel()) for parameter in causal_lm.parameters())
    looked_up = 0 if tied else int(embedding.weight.numel())
    return (4.0 if frozen else 6.0) * (parameters - looked_up)


def utilization(
    flops: float | None, tokens: int, seconds: float, devices: int, dtype: str, device: torch.device
) -> float | None:
    """Utilisation of ``devices`` like this one that compute ``tokens`` in ``seconds``; None where the peak is not known.

    Args:
        flops: :func:`flops_per_token`.
        tokens: of all devices.
    """
    if flops is None or seconds <= 0 or device.type != "cuda" or dtype == "float32":
        return None
    peak = peak_tflops(torch.cuda.get_device_name(device))
    return None if peak is None else flops * tokens / (seconds * devices * peak * 1e12)
