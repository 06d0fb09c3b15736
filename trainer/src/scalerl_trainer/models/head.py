"""Log-probabilities of given tokens from hidden states, without all logits in memory.

With a vocabulary of V and M trainable tokens, logits and softmax would be several tensors of M × V floats, each 10 GB for
16,384 tokens and a vocabulary of 150,000. Here the positions are processed in chunks: the forward pass keeps only the
log-normaliser of each token, and the backward pass recomputes a chunk's logits. This costs one more matrix product and
bounds a chunk's logits to ``chunk_bytes``.

``fp32`` casts hidden states and weight to float32 before the product. ScaleRL (arXiv 2510.13786) reports an asymptote of
.61 with float32 logits in trainer and generator, and of .52 without [P]. Without ``fp32`` the product has the model's
dtype and its result is cast to float32, as in inference servers.

Log-probabilities are those of ``softmax(logits / temperature)``, the distribution that the generator sampled from. Logits are
``cap(scale · (hidden · weightᵀ + bias))``, see :mod:`.logits`.

Shapes: ``m`` trainable tokens, ``d`` hidden size, ``v`` vocabulary, ``c`` a chunk of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scalerl_trainer.models.logits import PLAIN, LogitTransform

DEFAULT_CHUNK_BYTES = 64 * 2**20


class LogprobHead(nn.Module):
    """Computes log-probabilities with the output embedding's parameters.

    A module, so that ZeRO-3 gathers them for its forward and backward passes.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    transform: LogitTransform
    fp32: bool
    chunk_bytes: int

    def __init__(
        self,
        output: nn.Linear,
        *,
        fp32: bool,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        transform: LogitTransform = PLAIN,
    ) -> None:
        super().__init__()
        self.weight = output.weight
        self.bias = output.bias
        self.transform = transform
        self.fp32 = fp32
        self.chunk_bytes = chunk_bytes

    def forward(
        self, hidden_md: torch.Tensor, target_m: torch.Tensor, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, nats, float32 ``[M]``.

        The entropies have no gradient; the tensor is empty without ``entropy``.
        """
        vocabulary = self.weight.shape[0]
        chunk = max(1, self.chunk_bytes // (4 * vocabulary))
        result: tuple[torch.Tensor, torch.Tensor] = _ChunkedLogprob.apply(  # type: ignore[no-untyped-call]
            hidden_md,
            self.weight,
            self.bias,
            target_m,
            temperature,
            self.transform,
            self.fp32,
            chunk,
            entropy,
        )
        return result


class _ChunkedLogprob(torch.autograd.Function):
    """d log p(target) / d logits = (onehot(target) - softmax) / temperature, recomputed chunk by chunk.

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden_md.shape[0]
        logprob_m = torch.empty(count, dtype=torch.float32, device=hidden_md.device)
        normalizer_m = torch.empty_like(logprob_m)
        entropy_m = torch.empty_like(logprob_m) if entropy else logprob_m.new_empty(0)
        matrix_vd = weight_vd.float() if fp32 else weight_vd
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits_cv = _logits(hidden_md[part], matrix_vd, bias_v, transform)
            if temperature != 1.0:
                logits_cv.div_(temperature)
            largest_c = logits_cv.amax(-1)
            logits_cv.sub_(largest_c[:, None])
            weight_cv = logits_cv.exp()
            sum_c = weight_cv.sum(-1)
            logprob_m[part] = logits_cv.gather(1, target_m[part, None]).squeeze(1) - sum_c.log()
            normalizer_m[part] = largest_c + sum_c.log()
            if entropy:
                # H = log Z - Σ p·logit, of logits without their largest: a product of two vectors a token, without a copy.
                mean_c = torch.bmm(weight_cv[:, None, :], logits_cv[:, :, None]).view(-1) / sum_c
                entropy_m[part] = sum_c.log() - mean_c
        # Saves the parameters and not their float32 copies, because ZeRO-3 gathers and frees the parameters' storage.
        ctx.save_for_backward(hidden_md, weight_vd, bias_v, target_m, normalizer_m)
        ctx.temperature, ctx.transform, ctx.fp32, ctx.chunk = temperature, transform, fp32, chunk
        ctx.mark_non_differentiable(entropy_m)
        return logprob_m, entropy_m

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_md, weight_vd, bias_v, target_m, normalizer_m = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        upstream_m = gradients[0]
        matrix_vd = weight_vd.float() if ctx.fp32 else weight_vd
        grad_hidden_md = torch.empty_like(hidden_md)
        # Float32 for every model dtype, because the gradient is a sum over chunks. None of frozen parameters (LoRA).
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        grad_weight_vd = torch.zeros_like(weight_vd, dtype=torch.float32) if trains_weight else None
        grad_bias_v = torch.zeros_like(bias_v, dtype=torch.float32) if trains_bias else None
        for start in range(0, hidden_md.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            states_cd = hidden_md[part]
            logits_cv = _logits(states_cd, matrix_vd, bias_v, transform)
            slope_cv = None
            if transform.cap is not None:
                slope_cv = (logits_cv / transform.cap).square_().neg_().add_(1.0)
            if ctx.temperature != 1.0:
                logits_cv.div_(ctx.temperature)
            scale_c = (upstream_m[part] / ctx.temperature)[:, None]
            delta_cv = logits_cv.sub_(normalizer_m[part, None]).exp_().mul_(-scale_c)
            delta_cv.scatter_add_(1, target_m[part, None], scale_c)
            if slope_cv is not None:
                delta_cv.mul_(slope_cv)
            if transform.scale != 1.0:
                delta_cv.mul_(transform.scale)
            if grad_bias_v is not None:
                grad_bias_v += delta_cv.sum(0)
            delta_cv = delta_cv.to(matrix_vd.dtype)
            grad_hidden_md[part] = (delta_cv @ matrix_vd).to(hidden_md.dtype)
            if grad_weight_vd is not None and delta_cv.dtype == torch.float32:
                grad_weight_vd.addmm_(delta_cv.t(), states_cd.float())
            elif (
                grad_weight_vd is not None
            ):  # a product in bfloat16 cannot be added to float32 by the same call
                grad_weight_vd += delta_cv.t() @ states_cd.to(matrix_vd.dtype)
        grad_weight = None if grad_weight_vd is None else grad_weight_vd.to(weight_vd.dtype)
        grad_bias = None if grad_bias_v is None else grad_bias_v.to(bias_v.dtype)
        return grad_hidden_md, grad_weight, grad_bias, *[None] * 6


def _logits(
    states_cd: torch.Tensor, matrix_vd: torch.Tensor, bias_v: torch.Tensor | None, transform: LogitTransform
) -> torch.Tensor:
    logits_cv = (states_cd.to(matrix_vd.dtype) @ matrix_vd.t()).float()
    if bias_v is not None:
        logits_cv += bias_v
    if transform.scale != 1.0:
        logits_cv.mul_(transform.scale)
    if transform.cap is not None:
        logits_cv.div_(transform.cap).tanh_().mul_(transform.cap)
    return logits_cv
