"""The trainer's log-probabilities beside plain transformers, by position, for ``gpu_check``."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from support.gpu_device import TOLERANCE, Options, open_device

POSITIONS = (0, 256, 1024, 4096, 8192)


def check_positions(options: Options) -> dict[str, Any]:
    import torch

    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.precision import buffer_dtypes, cast_parameters, check_buffer_dtypes
    from support.gpu_models import make, policy_logprobs, positions_shape

    device = open_device(options)
    result: dict[str, Any] = {"tolerance": TOLERANCE}
    for kind in ("qwen2", "llama3", "gemma3"):
        shape = positions_shape(kind, options.tiny)
        model = make(shape, device, torch.bfloat16).eval()
        ids = torch.randint(3, shape.vocabulary, (shape.sequence,)).tolist()
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device)).logits[0, :-1].float()
        target = torch.tensor(ids[1:], device=device)[:, None]
        expected = logits.log_softmax(-1).gather(1, target)[:, 0]
        buffers = buffer_dtypes(model)
        cast_parameters(model, torch.bfloat16)
        for fp32 in (False, True):
            policy = Policy(model, fp32_head=fp32).eval()
            difference = (policy_logprobs(policy, ids, device) - expected).abs()
            edges = [edge for edge in POSITIONS if edge < shape.sequence] + [shape.sequence]
            result[f"{kind} {'float32' if fp32 else 'bfloat16'} head"] = {
                f"{low}-{high}": float(difference[low:high].mean()) for low, high in pairwise(edges)
            }
        check_buffer_dtypes(model, buffers)
    worst = max(max(v.values()) for k, v in result.items() if k.endswith("bfloat16 head"))
    if not worst < TOLERANCE:
        raise AssertionError(f"log-probabilities differ by {worst:.3g} nats: {json.dumps(result)}")
    return result
