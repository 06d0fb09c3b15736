"""The float32 head against float64, with and without its kernels, for ``gpu_check``."""

from __future__ import annotations

import json
from typing import Any

from support.gpu_device import TOLERANCE, Options, open_device, peak_bytes, seconds_of

GRADIENT_TOLERANCE = 0.01
"""Error of a gradient of the float32 head, of its norm: rounding to bfloat16 gives .002."""
AT_ONCE = "float32, gradients of the forward pass"


def check_head(options: Options) -> dict[str, Any]:
    """Of a plain head, and of one with all that a family's may have: a bias, a scale and a cap of logits, a temperature."""
    import torch

    from scalerl_trainer.models.head import kernels_failure
    from scalerl_trainer.models.logits import PLAIN, LogitTransform
    from support.gpu_models import SHAPES, TINY

    device = open_device(options)
    shape = (TINY if options.tiny else SHAPES)["0.5B"]
    count = shape.sequence * shape.rows
    hidden = torch.randn(count, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(shape.vocabulary, (count,), device=device)
    # Weights of single tokens of both signs.
    weights = torch.randn(count, device=device)
    result: dict[str, Any] = {"tokens": count, "vocabulary": shape.vocabulary, "hidden": shape.hidden}
    result["kernels"] = kernels_failure(device) or "used"
    transformed = LogitTransform(scale=0.5, cap=4.0)
    for bias, transform, temperature in ((False, PLAIN, 1.0), (True, transformed, 0.7)):
        linear = torch.nn.Linear(
            shape.hidden, shape.vocabulary, bias=bias, device=device, dtype=torch.bfloat16
        )
        for parameter in linear.parameters():
            torch.nn.init.normal_(parameter, std=0.05 if parameter is linear.weight else 2.0)
        found = _compare_heads(linear, hidden, target, weights, transform, temperature, timed=not bias)
        result |= {"bias, cap, temperature": found} if bias else found
        _judge_heads(found, "bias, cap and temperature" if bias else "no bias, cap or temperature")
    return result


def _compare_heads(
    linear: Any,
    hidden: Any,
    target: Any,
    weights: Any,
    transform: Any,
    temperature: float,
    *,
    timed: bool,
) -> dict[str, dict[str, float]]:
    """Errors of the heads on some tokens against float64, and where ``timed``, seconds and bytes on all."""
    import torch

    from scalerl_trainer.models import head as head_module
    from scalerl_trainer.models.head import LogprobHead

    some, leaves = slice(0, min(len(target), 256)), [hidden, *linear.parameters()]
    exact = _exact_head(
        [hidden.detach()[some], *linear.parameters()], target[some], weights[some], transform, temperature
    )
    own, trial, result = head_module._operand, head_module.kernels_failure, dict[str, dict[str, float]]()
    for name, fp32 in (
        ("bfloat16", False),
        ("float32", True),
        (AT_ONCE, True),
        ("float32 without kernels", True),
        ("cast to float32", True),
    ):
        cast, without = name.startswith("cast"), name.endswith("without kernels")
        head_module._operand = (lambda weight, fp32: weight.float()) if cast else own
        head_module.kernels_failure = (lambda device: "without") if without else trial
        # 101 rows a chunk: the last one is partial, and no later one's outputs are aligned.
        by_rows = 101 * 4 * linear.out_features
        head = LogprobHead(linear, fp32=fp32, chunk_bytes=by_rows, transform=transform)

        def work(
            head: LogprobHead = head, rows: slice = slice(None), at_once: bool = name == AT_ONCE
        ) -> torch.Tensor:
            for leaf in leaves:
                leaf.grad = None
            derivative = (lambda _: weights[rows]) if at_once else None
            logprobs, _ = head(hidden[rows], target[rows], temperature, True, derivative)
            (logprobs * weights[rows]).sum().backward()
            return logprobs

        logprobs = work(rows=some).detach()
        found = [hidden.grad[some], *(leaf.grad for leaf in leaves[1:])]
        names = ("hidden_gradient_error", "weight_gradient_error", "bias_gradient_error")
        result[name] = {"mean_error": float((logprobs - exact[0]).abs().mean())}
        for what, mine, other in zip(names, found, exact[1:], strict=False):
            result[name][what] = float((mine.double() - other).norm() / other.norm())
        head.chunk_bytes = None
        if timed:
            result[name]["seconds"] = seconds_of(work, hidden.device, 3)
            if hidden.device.type == "cuda":
                result[name]["peak_bytes"] = peak_bytes(hidden.device)
                torch.cuda.reset_peak_memory_stats(hidden.device)
    head_module._operand, head_module.kernels_failure = own, trial
    return result


def _judge_heads(result: dict[str, dict[str, float]], kind: str) -> None:
    cast_to = result["cast to float32"]
    for name in ("float32", AT_ONCE, "float32 without kernels"):
        found = result[name]
        if not found["mean_error"] <= min(TOLERANCE, result["bfloat16"]["mean_error"]):
            raise AssertionError(
                f"{kind}: the {name} head is further off than {TOLERANCE} nats or the bfloat16 one: {json.dumps(result)}"
            )
        for what in found:
            limit = min(GRADIENT_TOLERANCE, 1.2 * cast_to[what])
            if what.endswith("gradient_error") and not found[what] <= limit:
                raise AssertionError(
                    f"{kind}: {name}: {what} is more than {GRADIENT_TOLERANCE} or 1.2 times that of operands in float32: "
                    f"{json.dumps(result)}"
                )


def _exact_head(parts: list[Any], target: Any, weights: Any, transform: Any, temperature: float) -> list[Any]:
    """Log-probabilities and the gradients of their weighted sum by hidden states, weight and bias, in float64."""
    import torch

    leaves = [x.detach().double().requires_grad_() for x in parts]
    logits = leaves[0] @ leaves[1].t()
    if len(leaves) > 2:
        logits = logits + leaves[2]
    logits = logits * transform.scale
    if transform.cap is not None:
        logits = transform.cap * (logits / transform.cap).tanh()
    logprobs = (logits / temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]
    return [logprobs.detach(), *torch.autograd.grad((logprobs * weights).sum(), leaves)]
