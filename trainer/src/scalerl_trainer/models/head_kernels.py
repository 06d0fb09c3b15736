# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The head's two passes over logits as Triton kernels: each reads a chunk's float32 logits once.

They compute what :mod:`.head` computes without them, except that the entropy is of every token. Transform and temperature are
applied to each logit as it is read. Triton comes with PyTorch for GPUs; without it the import raises ``ImportError``. Triton
compiles a kernel when it is first used, and its launcher with a C compiler.

Shapes: those of :mod:`.head`; ``k`` the two tokens whose derivative is computed apart, the target and the most likely one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from scalerl_trainer.models.logits import LogitTransform

STATISTICS_BLOCK, STATISTICS_WARPS = 2048, 4
DERIVATIVE_BLOCK, DERIVATIVE_WARPS = 4096, 8
_LOWEST = tl.constexpr(-1e30)
"""Below every logit but -inf, and finite: what is subtracted from it is a number."""


@triton.jit
def _read(logits, bias, at, vocabulary, inner, outer, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Logits over the temperature, -inf from ``vocabulary`` on, and with a cap their hyperbolic tangents."""
    z = tl.load(logits + at, at < vocabulary, 0.0)
    if HAS_BIAS:
        z += tl.load(bias + at, at < vocabulary, 0.0).to(tl.float32)
    z *= inner
    tanh = z
    if HAS_CAP:
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
        z = outer * tanh
    return tl.where(at < vocabulary, z, -float("inf")), tanh


@triton.jit
def _statistics(
    logits,
    bias,
    target,
    logprob,
    normalizer,
    entropy,
    top,
    top_logprob,
    vocabulary,
    inner,
    outer,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    largest, at_largest = tl.full((), _LOWEST, tl.float32), tl.full((), 0, tl.int32)
    # Of e^(z - largest), and of that times z - largest.
    total, weighted = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z, _ = _read(logits, bias, at, vocabulary, inner, outer, HAS_BIAS, HAS_CAP)
        most = tl.max(z, 0)
        # Never of a NaN. Its exponential makes the sum NaN.
        if most > largest:
            at_largest = tl.min(tl.where(z == most, at, vocabulary), 0)
            factor = tl.exp(largest - most)
            weighted = factor * (weighted + total * (largest - most))
            total *= factor
            largest = most
        power = tl.exp(z - largest)
        total += tl.sum(power, 0)
        weighted += tl.sum(tl.where(power > 0.0, power * (z - largest), 0.0), 0)
    log_total = tl.log(total)
    z, _ = _read(logits, bias, tl.load(target + row), vocabulary, inner, outer, HAS_BIAS, HAS_CAP)
    tl.store(logprob + row, z - largest - log_total)
    tl.store(normalizer + row, largest + log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(top + row, at_largest)
    tl.store(top_logprob + row, -log_total)


@triton.jit
def _derivative(
    logits,
    bias,
    shift,
    apart,
    values,
    vocabulary,
    inner,
    outer,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z, tanh = _read(logits + row * vocabulary, bias, at, vocabulary, inner, outer, HAS_BIAS, HAS_CAP)
    value = tl.exp(z - tl.load(shift + row))
    if HAS_CAP:
        value *= 1.0 - tanh * tanh
    zero = (at == tl.load(apart + 2 * row)) | (at == tl.load(apart + 2 * row + 1))
    value = tl.where(zero, 0.0, value).to(tl.bfloat16)
    tl.store(values + row * vocabulary + at, value, at < vocabulary)


def statistics(
    logits_cv: torch.Tensor,
    bias_v: torch.Tensor | None,
    transform: LogitTransform,
    temperature: float,
    target_c: torch.Tensor,
    *out: torch.Tensor,
) -> None:
    """Write log-probabilities, log-normalisers, entropies, the most likely tokens and their log-probabilities, each ``[C]``.

    ``logits_cv``: the product of hidden states and weight. Of equal logits the first is the most likely token.
    """
    numbers = _numbers(logits_cv, transform, temperature)
    kind = {"HAS_BIAS": bias_v is not None, "HAS_CAP": transform.cap is not None, "BLOCK": STATISTICS_BLOCK}
    _statistics[(len(logits_cv),)](
        logits_cv, bias_v, target_c, *out, *numbers, **kind, num_warps=STATISTICS_WARPS
    )


def derivative(
    logits_cv: torch.Tensor,
    bias_v: torch.Tensor | None,
    transform: LogitTransform,
    temperature: float,
    shift_c: torch.Tensor,
    apart_ck: torch.Tensor,
) -> torch.Tensor:
    """``e^(logit / temperature - shift)`` in bfloat16 ``[C, V]``, times the slope of the cap, and 0 at the tokens ``apart_ck``."""
    values_cv = torch.empty_like(logits_cv, dtype=torch.bfloat16)
    numbers = _numbers(logits_cv, transform, temperature)
    kind = {"HAS_BIAS": bias_v is not None, "HAS_CAP": transform.cap is not None, "BLOCK": DERIVATIVE_BLOCK}
    grid = (len(logits_cv), triton.cdiv(logits_cv.shape[1], DERIVATIVE_BLOCK))
    _derivative[grid](
        logits_cv, bias_v, shift_c, apart_ck, values_cv, *numbers, **kind, num_warps=DERIVATIVE_WARPS
    )
    return values_cv


def _numbers(logits_cv: torch.Tensor, transform: LogitTransform, temperature: float) -> tuple[Any, ...]:
    """Vocabulary, and the factors before and after the hyperbolic tangent of a cap."""
    if transform.cap is None:
        return logits_cv.shape[1], transform.scale / temperature, 1.0
    return logits_cv.shape[1], transform.scale / transform.cap, transform.cap / temperature
