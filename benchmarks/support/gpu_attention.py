"""Attention by torch's variable-length kernel beside ``sdpa`` of each sequence alone, for ``gpu_check``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from scalerl_trainer.models import Policy, varlen
from scalerl_trainer.models.precision import cast_parameters
from scalerl_trainer.packing import MicroBatch, Sequence, pack
from support.gpu_device import TOLERANCE, CannotRun, Options, open_device, peak_bytes, seconds_of
from support.gpu_models import SHAPES, TINY, make

HEADS = ((14, 2, 64, None), (32, 8, 128, None), (8, 4, 256, 512))
"""Heads of queries and of keys, their size, and a window: those of Qwen2.5 0.5B, Llama 3 8B and Gemma 3 1B."""
LENGTHS = (1, 4095, 700, 2048, 3, 1345)


def check_attention(options: Options) -> dict[str, Any]:
    device = open_device(options)
    if options.device == "cpu":
        sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
        try:
            import varlen_kernel
        except ImportError as error:
            raise CannotRun("CPUs have no variable-length kernel, and its definition is not here") from error
        varlen.kernel = lambda: varlen_kernel.grouped
    lengths = (1, 20, 7, 3) if options.tiny else LENGTHS
    result: dict[str, Any] = {"lengths": list(lengths)}
    for heads, groups, size, window in HEADS:
        name = f"{heads} heads of {size}, {groups} of keys{f', window {window}' if window else ''}"
        result[name] = _kernel(device, lengths, heads, groups, size, 6 if window and options.tiny else window)
    result |= _model(options, device, lengths)
    return result


def _kernel(
    device: torch.device, lengths: tuple[int, ...], heads: int, groups: int, size: int, window: int | None
) -> dict[str, float]:
    """Relative errors of outputs and gradients, in the Euclidean norm, against float32."""
    torch.manual_seed(1)
    tokens = sum(lengths)
    leaves = [
        torch.randn(tokens, n, size, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, groups, groups)
    ]
    weights = torch.randn(tokens, heads, size, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    ends = varlen.boundaries(positions, positions.device)["cu_seq_lens_q"]
    at = varlen.kernel()
    left = -1 if window is None else window - 1

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return at(q, k, v, ends, ends, max(lengths), max(lengths), window_size=(left, 0))

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found, start = [], 0
        for length in lengths:
            own = [x[start : start + length].transpose(0, 1)[None] for x in (q, k, v)]
            mask = None
            if window is not None and window < length:
                back = torch.arange(length, device=device)
                back = back[:, None] - back[None, :]
                mask = (back >= 0) & (back < window)
            done = functional.scaled_dot_product_attention(
                *own, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            found.append(done[0].transpose(0, 1))
            start += length
        return torch.cat(found)

    def with_gradients(way: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        output = way(*inputs)
        return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), inputs)]

    exact = with_gradients(alone, [x.detach().float().requires_grad_() for x in leaves])
    result: dict[str, float] = {}
    for name, way in (("varlen", packed), ("sdpa", alone)):
        found = with_gradients(way, leaves)
        errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        result |= {f"{name}_error": errors[0], f"{name}_gradient_error": max(errors[1:])}
        result[f"{name}_seconds"] = seconds_of(lambda way=way: with_gradients(way, leaves), device, 3)
    for what in ("error", "gradient_error"):
        if not result[f"varlen_{what}"] < 2 * result[f"sdpa_{what}"] + 1e-3:
            raise AssertionError(f"{heads}, {groups}, {size}, {window}: {json.dumps(result)}")
    return result


def _model(options: Options, device: torch.device, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Log-probabilities of a whole model, and a forward and backward pass of it."""
    shape = (TINY if options.tiny else SHAPES)["0.5B"]
    model = make(shape, device, torch.bfloat16)
    if options.device == "cuda" and (problem := varlen.problem(model, torch.bfloat16, device)):
        raise CannotRun(f"the kernel cannot be used: {problem}")
    cast_parameters(model, torch.bfloat16)
    policy = Policy(model, fp32_head=True).train()
    ids = [torch.randint(3, shape.vocabulary, (length + 1,)).tolist() for length in lengths]
    sequences = [Sequence(row[:1], row[1:]) for row in ids]
    result: dict[str, Any] = {}
    logprobs: dict[str, torch.Tensor] = {}
    for name in ("sdpa", "varlen"):
        if name == "varlen":
            varlen.use(model.config)
        batch = pack(sequences, sum(lengths) + len(lengths), shared_rows=name == "varlen")

        def run(micro_batches: tuple[MicroBatch, ...] = batch.micro_batches) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            flat = torch.zeros(sum(lengths), device=device)
            for micro in micro_batches:
                inputs = (micro.input_ids_bt, micro.position_ids_bt, micro.predict_at_m, micro.target_m)
                found, _ = policy(*(x.to(device) for x in inputs))
                found.sum().backward()
                flat[micro.flat_m.to(device)] = found.detach()
            return flat

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        logprobs[name] = run()
        result[name] = {
            "seconds": seconds_of(run, device, 2),
            "padding": batch.padding,
            "peak_bytes": peak_bytes(device),
        }
    result["mean_difference"] = float((logprobs["sdpa"] - logprobs["varlen"]).abs().mean())
    if not result["mean_difference"] < TOLERANCE:
        raise AssertionError(f"sequences that share rows differ from each alone: {json.dumps(result)}")
    return result
