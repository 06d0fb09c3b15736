"""Log-probabilities of given tokens from hidden states, without all logits in memory.

With a vocabulary of V and M trainable tokens, logits and softmax would be several tensors of M × V floats, each 10 GB for
16,384 tokens and a vocabulary of 150,000. Here the positions are processed in chunks: the forward pass keeps only the
log-normaliser of each token, and the backward pass recomputes a chunk's logits. This costs one more matrix product and
bounds a chunk's logits to ``chunk_bytes``. Where a token's part of the loss depends on no other token's log-probability, the forward
pass knows its derivative g as soon as it has the chunk's log-probabilities, and computes the gradients from the same logits::

    Δ = g · (onehot(target) - softmax) [c, v]      d hidden = Δ · weight [c, d]      d weight += Δᵀ · hidden [v, d]

It keeps them instead of the hidden states, and needs three products instead of four.

``fp32`` computes logits in float32. ScaleRL (arXiv 2510.13786) reports an asymptote of .61 with float32 logits in trainer and
generator, and of .52 without [P]. Without ``fp32`` the product has the model's dtype and its result is cast to float32, as in
inference servers.

The product of two bfloat16 numbers is exact in float32, so on an accelerator ``fp32`` takes hidden states and weight as they
are and accumulates in float32 (``torch.mm(…, out_dtype=torch.float32)``), which its matrix units do at the speed of bfloat16.
CPUs have no such product: both are cast. In the backward pass the derivative of the logits becomes an operand, and is rounded
to bfloat16 for that, except its largest elements, those of the target and of the most likely token, which are added in float32:
gradients are then at most 1.2 times as far from exact ones as where nothing but the result is rounded
(``benchmarks/head_bytes.py``).

On CUDA devices the passes over logits are two kernels (:mod:`.head_kernels`) where a trial of them works. Elsewhere they are
operations of PyTorch, and on an accelerator the entropy is then of every eighth token of a large chunk, because exponentials of all
logits are a quarter of the bytes that such a head moves.

Log-probabilities are those of ``softmax(logits / temperature)``, the distribution that the generator sampled from. Logits are
``cap(scale · (hidden · weightᵀ + bias))``, see :mod:`.logits`.

Shapes: ``m`` trainable tokens, ``d`` hidden size, ``v`` vocabulary, ``c`` a chunk of positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from scalerl_trainer.errors import first_line
from scalerl_trainer.models.head_gradients import Delta, Gradients, product
from scalerl_trainer.models.logits import PLAIN, LogitTransform

log = logging.getLogger(__name__)

Derivative = Callable[[torch.Tensor], torch.Tensor]
"""The derivative of a loss by each log-probability ``[M]``, from these; those of later chunks are 0 when a chunk's are asked for."""

ENTROPY_STRIDE = 8
"""On an accelerator without the kernels, entropies are of every eighth token of a chunk."""
_SMALL_CHUNK = 64
"""Tokens of a chunk below which entropies are of each: every eighth of a short completion would be mostly its first."""
CPU_CHUNK_BYTES = 64 * 2**20
ACCELERATOR_CHUNK_BYTES = 2**30
"""1,766 tokens with a vocabulary of 152,000. Each chunk reads the weight three times, and its gradient is read and written."""
KERNEL_CHUNK_BYTES = 5 * 2**30 // 3
"""With the kernels, which keep one and a half times a chunk, and not two and a half times."""


class LogprobHead(nn.Module):
    """Computes log-probabilities with the output embedding's parameters.

    A module, so that ZeRO-3 gathers them for its forward and backward passes.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    transform: LogitTransform
    fp32: bool
    chunk_bytes: int | None
    """Of a chunk's logits; None to choose by device."""

    def __init__(
        self,
        output: nn.Linear,
        *,
        fp32: bool,
        chunk_bytes: int | None = None,
        transform: LogitTransform = PLAIN,
    ) -> None:
        super().__init__()
        self.weight = output.weight
        self.bias = output.bias
        self.transform = transform
        self.fp32 = fp32
        self.chunk_bytes = chunk_bytes

    def forward(
        self,
        hidden_md: torch.Tensor,
        target_m: torch.Tensor,
        temperature: float,
        entropy: bool,
        derivative: Derivative | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, nats, float32 ``[M]``.

        With ``derivative``, which no other token's log-probability may change, the forward pass computes the gradients. The backward
        pass returns them, for that derivative alone.

        The entropies have no gradient; the tensor is empty without ``entropy``. On an accelerator without the kernels they are the
        means of chunks, those of 64 tokens or more estimated from every eighth token.
        """
        weight, fp32, device = self.weight, self.fp32, self.weight.device
        kernels = fp32 and weight.dtype == torch.bfloat16 and kernels_failure(device) is None
        by_device = CPU_CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
        if kernels:
            by_device = KERNEL_CHUNK_BYTES
        chunk = max(1, (self.chunk_bytes or by_device) // (4 * weight.shape[0]))
        result: tuple[torch.Tensor, torch.Tensor] = _ChunkedLogprob.apply(  # type: ignore[no-untyped-call]
            hidden_md,
            weight,
            self.bias,
            target_m,
            temperature,
            self.transform,
            fp32,
            chunk,
            entropy,
            derivative,
            kernels,
        )
        return result


@cache
def kernels_failure(device: torch.device) -> str | None:
    """Why the kernels do not work on ``device``, by a trial of both; None if they do. Not a collective."""
    if device.type != "cuda":
        return "they need a CUDA device"
    try:
        # Each compiles kernels of its own.
        right = _trial(device, 5008, PLAIN) and _trial(device, 5003, LogitTransform(cap=4.0))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # of Triton, of a compiler or linker, or of a file that cannot be written
        reason = f"a call of them fails: {type(error).__name__}: {first_line(error)}"
    else:
        if right:
            return None
        reason = "they compute something else"
    log.warning("the output head has no kernels on %s: %s", device, reason)
    return reason


def _trial(device: torch.device, vocabulary: int, transform: LogitTransform) -> bool:
    """Whether the kernels compute for three tokens what the head without them does, with a cap also with a bias."""
    from scalerl_trainer.models import head_kernels

    states_cd, matrix_vd = (
        torch.linspace(-4.0, 4.0, 8 * n, device=device).view(n, 8).sin_() for n in (3, vocabulary)
    )
    bias_v = None if transform.cap is None else matrix_vd[:, 0].bfloat16()
    logits_cv, slope_cv = _sloped(
        states_cd, matrix_vd, bias_v, _HeadConfig(transform, 1.0, True, False, False)
    )
    expected_cv = logits_cv.log_softmax(-1)
    target_c = torch.tensor([7, vocabulary - 1, 0], device=states_cd.device)
    outs = [expected_cv.new_empty(3, dtype=torch.long if at == 3 else None) for at in range(5)]
    arguments = (states_cd @ matrix_vd.t(), bias_v, transform, 1.0)
    head_kernels.statistics(*arguments, target_c, *outs)
    values_cv = head_kernels.derivative(*arguments, outs[1], target_c.new_full((3, 2), -1))
    right = torch.allclose(outs[0], expected_cv.gather(1, target_c[:, None])[:, 0], atol=1e-4)
    slope = 1.0 if slope_cv is None else slope_cv
    return right and torch.allclose(values_cv.float(), expected_cv.exp() * slope, rtol=0.01)


@dataclass(frozen=True, slots=True)
class _HeadConfig:
    """How logits and derivatives of a chunk are computed."""

    transform: LogitTransform
    temperature: float
    fp32: bool
    rounded: bool
    """Whether products of float32 logits have bfloat16 operands."""
    kernels: bool


class _ChunkedLogprob(torch.autograd.Function):
    """d log p(target) / d logits = (onehot(target) - softmax) / temperature, chunk by chunk.

    Below the cap, d cap·tanh(z / cap) / dz = 1 - (logit / cap)².
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_md: torch.Tensor,
        weight_vd: torch.Tensor,
        bias_v: torch.Tensor | None,
        target_m: torch.Tensor,
        temperature: float,
        transform: LogitTransform,
        fp32: bool,
        chunk: int,
        entropy: bool,
        derivative: Derivative | None,
        kernels: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden_md.shape[0]
        logprob_m = torch.zeros(count, dtype=torch.float32, device=hidden_md.device)
        normalizer_m, entropy_m, top_logprob_m = (torch.empty_like(logprob_m) for _ in range(3))
        top_m, derivative_m = torch.empty_like(target_m), torch.empty_like(logprob_m)
        matrix_vd = _operand(weight_vd, fp32)
        rounded = fp32 and matrix_vd.dtype != torch.float32
        config = _HeadConfig(transform, temperature, fp32, rounded, kernels and rounded)
        gradients = None
        if derivative is not None:
            gradients = Gradients(ctx.needs_input_grad, hidden_md, weight_vd, bias_v)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            states_cd = hidden_md[part]
            own = [x[part] for x in (target_m, normalizer_m, logprob_m, top_m, top_logprob_m)]
            logits_cv, slope_cv = _sloped(states_cd, matrix_vd, bias_v, config, derivative is not None)
            logprobs_cv = _statistics(logits_cv, bias_v, config, entropy_m[part], *own)
            if derivative is not None and gradients is not None:
                derivative_m[part] = derivative(logprob_m)[part]
                scale_c = derivative_m[part] * (transform.scale / temperature)
                delta = _delta(logits_cv, slope_cv, matrix_vd.dtype, bias_v, config, scale_c, *own)
                gradients.add(part, delta, states_cd, matrix_vd, fp32)
                del delta
            if entropy and logprobs_cv is not None:
                entropy_m[part] = _entropies(logprobs_cv, logits_cv)
            del logits_cv, slope_cv, logprobs_cv  # before the next chunk's are computed
        if gradients is not None:
            ctx.save_for_backward(derivative_m, *gradients.finished())
        else:
            # Saves the parameters and not their float32 copies, because ZeRO-3 gathers and frees the parameters' storage.
            ctx.save_for_backward(
                hidden_md, weight_vd, bias_v, target_m, normalizer_m, logprob_m, top_m, top_logprob_m
            )
        ctx.config, ctx.chunk, ctx.computed = config, chunk, gradients is not None
        entropy_m = entropy_m if entropy else logprob_m.new_empty(0)
        ctx.mark_non_differentiable(entropy_m)
        return logprob_m, entropy_m

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.computed:
            derivative_m, *found = ctx.saved_tensors
            same_m = torch.isclose(gradients[0], derivative_m, rtol=0.0, atol=0.0, equal_nan=True)
            # Does not wait for the device.
            torch._assert_async(same_m.all(), "the loss has another derivative than in the forward pass")
            return *found, *[None] * 8
        hidden_md, weight_vd, bias_v, *saved = ctx.saved_tensors
        config: _HeadConfig = ctx.config
        scale_m = gradients[0] * (config.transform.scale / config.temperature)
        matrix_vd = _operand(weight_vd, config.fp32)
        total = Gradients(ctx.needs_input_grad, hidden_md, weight_vd, bias_v)
        for start in range(0, hidden_md.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            states_cd, own = hidden_md[part], [x[part] for x in saved]
            logits_cv, slope_cv = _sloped(states_cd, matrix_vd, bias_v, config)
            delta = _delta(logits_cv, slope_cv, matrix_vd.dtype, bias_v, config, scale_m[part], *own)
            del logits_cv, slope_cv
            total.add(part, delta, states_cd, matrix_vd, config.fp32)
            del delta
        return *total.finished(), *[None] * 8


def _statistics(
    logits_cv: torch.Tensor,
    bias_v: torch.Tensor | None,
    config: _HeadConfig,
    entropy_c: torch.Tensor,
    target_c: torch.Tensor,
    normalizer_c: torch.Tensor,
    logprob_c: torch.Tensor,
    top_c: torch.Tensor,
    top_logprob_c: torch.Tensor,
) -> torch.Tensor | None:
    """Write the vectors but ``target_c``, and return all log-probabilities; None with kernels, which alone write the entropies."""
    if config.kernels:
        from scalerl_trainer.models import head_kernels

        outs = logprob_c, normalizer_c, entropy_c, top_c, top_logprob_c
        head_kernels.statistics(logits_cv, bias_v, config.transform, config.temperature, target_c, *outs)
        return None
    logprobs_cv = functional.log_softmax(logits_cv, -1)
    torch.gather(logprobs_cv, 1, target_c[:, None], out=logprob_c[:, None])
    torch.sub(logits_cv.gather(1, target_c[:, None])[:, 0], logprob_c, out=normalizer_c)
    if config.rounded:
        torch.max(logprobs_cv, -1, out=(top_logprob_c, top_c))
    return logprobs_cv


def _delta(
    logits_cv: torch.Tensor,
    slope_cv: torch.Tensor | None,
    dtype: torch.dtype,
    bias_v: torch.Tensor | None,
    config: _HeadConfig,
    scale_c: torch.Tensor,
    target_c: torch.Tensor,
    normalizer_c: torch.Tensor,
    logprob_c: torch.Tensor,
    top_c: torch.Tensor,
    top_logprob_c: torch.Tensor,
) -> Delta:
    """The derivative by raw logits, in ``dtype``, from what :func:`_sloped` returned, which it overwrites.

    In bfloat16, the factor of each token is part of the exponent, which saves a pass over the logits.
    """
    if not config.rounded:
        logits_cv.sub_(normalizer_c[:, None]).exp_().mul_(-scale_c[:, None])
        logits_cv.scatter_add_(1, target_c[:, None], scale_c[:, None])
        if slope_cv is not None:
            logits_cv.mul_(slope_cv)
        return Delta(logits_cv.to(dtype))
    index_ck = torch.stack([target_c, top_c], 1)
    other_c = top_logprob_c.exp().masked_fill(top_c == target_c, 0.0)
    value_ck = torch.stack([-torch.expm1(logprob_c), -other_c], 1) * scale_c[:, None]
    if config.transform.cap is not None:
        logit_ck = torch.stack([logprob_c, top_logprob_c], 1) + normalizer_c[:, None]
        value_ck *= 1.0 - (logit_ck * (config.temperature / config.transform.cap)).square()
    shift_c = normalizer_c - scale_c.abs().log()
    if config.kernels:
        from scalerl_trainer.models import head_kernels

        values_cv = head_kernels.derivative(
            logits_cv, bias_v, config.transform, config.temperature, shift_c, index_ck
        )
    else:
        logits_cv.sub_(shift_c[:, None])
        values_cv = torch.empty_like(logits_cv, dtype=torch.bfloat16)
        if slope_cv is None:
            torch.exp(logits_cv, out=values_cv)
        else:
            values_cv.copy_(logits_cv.exp_().mul_(slope_cv))
        values_cv.scatter_(1, index_ck, 0.0)
    return Delta(values_cv, torch.where(scale_c < 0, 1.0, -1.0), (index_ck, value_ck))


def _entropies(logprobs_cv: torch.Tensor, spare_cv: torch.Tensor) -> torch.Tensor:
    """-Σ p·log p of a chunk's tokens, ``[C]``: a product of two vectors a token. Overwrites ``spare_cv``."""
    stride = _stride(logprobs_cv)
    some_cv, spare_cv = logprobs_cv[::stride], spare_cv[::stride]
    weight_cv = torch.exp(some_cv, out=spare_cv)
    entropy_c = -torch.bmm(weight_cv[:, None, :], some_cv[:, :, None]).view(-1)
    return entropy_c if stride == 1 else entropy_c.mean().expand(logprobs_cv.shape[0])


def _stride(logprobs_cv: torch.Tensor) -> int:
    """Entropies of a chunk are of one token of so many."""
    every = logprobs_cv.device.type == "cpu" or len(logprobs_cv) < _SMALL_CHUNK
    return 1 if every else ENTROPY_STRIDE


def _operand(weight_vd: torch.Tensor, fp32: bool) -> torch.Tensor:
    """The weight as products take it."""
    accumulates = weight_vd.dtype == torch.bfloat16 and weight_vd.device.type != "cpu"
    return weight_vd.float() if fp32 and not accumulates else weight_vd


def _logits(
    states_cd: torch.Tensor, matrix_vd: torch.Tensor, bias_v: torch.Tensor | None, config: _HeadConfig
) -> torch.Tensor:
    logits_cv = product(states_cd.to(matrix_vd.dtype), matrix_vd.t(), config.fp32).float()
    if bias_v is not None:
        logits_cv += bias_v
    if config.transform.scale != 1.0:
        logits_cv.mul_(config.transform.scale)
    if config.transform.cap is not None:
        logits_cv.div_(config.transform.cap).tanh_().mul_(config.transform.cap)
    return logits_cv


def _sloped(
    states_cd: torch.Tensor,
    matrix_vd: torch.Tensor,
    bias_v: torch.Tensor | None,
    config: _HeadConfig,
    slope: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits over the temperature, and with a cap and ``slope`` its derivative by the capped logits; for kernels only the product."""
    if config.kernels:
        return product(states_cd.to(matrix_vd.dtype), matrix_vd.t(), True), None
    logits_cv, slope_cv = _logits(states_cd, matrix_vd, bias_v, config), None
    if slope and config.transform.cap is not None:
        slope_cv = (logits_cv / config.transform.cap).square_().neg_().add_(1.0)
    if config.temperature != 1.0:
        logits_cv.div_(config.temperature)
    return logits_cv, slope_cv
