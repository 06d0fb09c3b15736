"""Runs the head's kernels on the CPU in Triton's interpreter, which is chosen when Triton is imported. Prints a JSON object.

Products are computed from operands cast to float32, as in ``test_trainer_head_products.py``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import interpreter

from scalerl_trainer.models import head, head_kernels
from scalerl_trainer.models.head import LogprobHead
from scalerl_trainer.models.logits import PLAIN, LogitTransform

BF16 = torch.bfloat16
INF, NAN = float("inf"), float("nan")
convert = interpreter._convert_float


def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """The interpreter cuts numbers off where they become bfloat16. Devices round them."""
    if (source.name, target.name) != ("fp32", "bf16"):
        return convert(data, source, target, mode)
    return torch.from_numpy(data).to(BF16).view(torch.uint16).numpy()


def product(left: torch.Tensor, right: torch.Tensor, **_: Any) -> torch.Tensor:
    return left.float() @ right.float()


def add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, **_: Any
) -> torch.Tensor:
    return out.copy_(total + left.float() @ right.float())


def gradients(linear: torch.nn.Linear, hidden: torch.Tensor, head: Any, direction: torch.Tensor) -> Any:
    """Log-probabilities, entropies, and the gradients by hidden states, weight and bias."""
    logprobs, entropies = head(hidden)
    found = torch.autograd.grad((logprobs * direction).sum(), [hidden, *linear.parameters()])
    return [logprobs.detach(), entropies, *found]


def whole(vocabulary: int, bias: bool, transform: LogitTransform, temperature: float, tokens: int) -> Any:
    """Errors of both paths of the head against float64: the largest of values, relative ones of gradients."""
    torch.manual_seed(5)
    linear = torch.nn.Linear(64, vocabulary, bias=bias).to(BF16)
    torch.nn.init.normal_(linear.weight, std=0.3)
    hidden = torch.randn(tokens, 64).to(BF16).requires_grad_()
    best = (linear(hidden) * transform.scale).argmax(-1)
    target = torch.where(torch.arange(tokens) % 2 == 0, best, torch.randint(vocabulary, (tokens,)))
    direction = torch.randn(tokens)
    direction[1] = 0.0
    double = torch.nn.Linear(64, vocabulary, bias=bias).double()
    double.load_state_dict(linear.state_dict())

    def exact(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = double(states) * transform.scale
        if transform.cap is not None:
            logits = transform.cap * (logits / transform.cap).tanh()
        all_of = (logits / temperature).log_softmax(-1)
        return all_of.gather(1, target[:, None])[:, 0], -(all_of.exp() * all_of).sum(-1).detach()

    states = hidden.detach().double().requires_grad_()
    expected = gradients(double, states, exact, direction)
    own = LogprobHead(linear, fp32=True, chunk_bytes=4 * vocabulary * 4, transform=transform)
    result = {}
    for path, problem in (("kernels", None), ("eager", "not in this test")):
        with patch.object(head, "kernels_failure", lambda _, problem=problem: problem):
            found, at_once = (
                gradients(linear, hidden, lambda x, d=d: own(x, target, temperature, True, d), direction)
                for d in (None, lambda _: direction)
            )
        values, by = found[:2], [found[2], *found[3:]]
        result[path] = {
            "logprob": max_error(values[0], expected[0]),
            "entropy": max_error(values[1], expected[1]),
            **{
                name: float((mine.double() - other).norm() / other.norm())
                for name, mine, other in zip(("hidden", "weight", "bias"), by, expected[2:], strict=False)
            },
            "weightless": float(found[2][1].abs().max()),
            "at once": all(map(torch.equal, found, at_once)),
        }
    return result


def max_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def values_of(logits: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Log-probabilities, normalisers, entropies, most likely tokens and their log-probabilities."""
    outs = [torch.empty(len(logits)) for _ in range(5)]
    outs[3] = torch.empty(len(logits), dtype=torch.long)
    head_kernels.statistics(logits, None, PLAIN, 1.0, target, *outs)
    return outs


def broken(vocabulary: int) -> Any:
    """Rows with a logit that is no number, at the target or elsewhere, in the first block or the last; and of what is in reach."""
    rows = [
        {2: NAN},
        {vocabulary - 1: NAN},
        {5: NAN},
        {2: -INF},
        {5: -INF},
        {2: INF},
        {5: INF},
        dict.fromkeys(range(vocabulary), -INF),
        dict.fromkeys(range(vocabulary), NAN),
        {2: 3e4, 5: -3e4},
        dict.fromkeys(range(vocabulary), -3e4),
    ]
    torch.manual_seed(6)
    logits = torch.randn(len(rows), vocabulary)
    for row, changes in enumerate(rows):
        logits[row, list(changes)] = torch.tensor(list(changes.values()))
    target = torch.full((len(rows),), 5)
    eager = logits.log_softmax(-1)
    logprob, normalizer, _, top, _ = values_of(logits, target)
    index = torch.stack([target, top], 1)
    delta = head_kernels.derivative(logits, None, PLAIN, 1.0, normalizer, index)
    expected = (logits - (logits[:, 5] - eager[:, 5])[:, None]).exp().scatter(1, index, 0.0)
    close = {"rtol": 1e-2, "atol": 1e-30, "equal_nan": True}
    return {
        "logprob": torch.allclose(logprob, eager[:, 5], rtol=1e-6, atol=1e-5, equal_nan=True),
        "nan": logprob.isnan().tolist() == eager[:, 5].isnan().tolist(),
        "nans": logprob.isnan().tolist(),
        "derivative": [torch.allclose(a.float(), b, **close) for a, b in zip(delta, expected, strict=True)],
        "top": bool(((top >= 0) & (top < vocabulary)).all()),
    }


def ties(vocabulary: int) -> Any:
    logits = torch.zeros(4, vocabulary)
    logits[1, [7, vocabulary - 1]] = 2.0
    logits[2, [vocabulary - 2, vocabulary - 1]] = 2.0
    logits[3, [0, 3000]] = 2.0
    return values_of(logits, torch.zeros(4, dtype=torch.long))[3].tolist()


def main() -> None:
    torch.set_num_threads(1)
    cases = {
        "plain": (5003, False, PLAIN, 1.0, 9),
        "temperature": (5003, False, PLAIN, 0.6, 9),
        "negative scale": (100, False, LogitTransform(-0.5), 1.0, 9),
        "bias": (5003, True, LogitTransform(0.5), 0.7, 9),
        "cap": (5003, True, LogitTransform(1.5, 4.0), 0.7, 9),
        "large": (151936, False, PLAIN, 1.0, 3),
    }
    with (
        patch.object(head, "_operand", lambda weight, fp32: weight),
        patch("torch.mm", product),
        patch("torch.addmm", add_product),
        patch.object(interpreter, "_convert_float", rounded),
    ):
        result = {name: whole(*case) for name, case in cases.items()}
        json.dump({"whole": result, "broken": broken(5003), "ties": ties(5003)}, sys.stdout)


if __name__ == "__main__":
    main()
