"""The float32 head with bfloat16 operands, as on a GPU: values, gradients and bytes.

The products run on the CPU from operands cast to float32, which multiplies bfloat16 numbers exactly, as the GPU's do.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl_trainer.models import head as module
from scalerl_trainer.models.head import LogprobHead
from scalerl_trainer.models.logits import PLAIN, LogitTransform

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "head_bytes.py"
BF16 = torch.bfloat16


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which products with float32 results were asked for. They refuse what CUDA's refuse."""
    calls: list[str] = []

    def mm(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        assert (left.dtype, right.dtype, out_dtype) == (BF16, BF16, torch.float32)
        calls.append("mm")
        return left.float() @ right.float()

    def addmm(
        total: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert (left.dtype, right.dtype, out_dtype) == (BF16, BF16, torch.float32)
        assert out is total
        assert out.dtype == torch.float32
        calls.append("addmm")
        return out.add_(left.float() @ right.float())

    monkeypatch.setattr(module, "_operand", lambda weight, fp32: weight)
    monkeypatch.setattr("torch.mm", mm)
    monkeypatch.setattr("torch.addmm", addmm)
    return calls


def exact(
    linear: torch.nn.Linear, hidden: torch.Tensor, target: torch.Tensor, transform: LogitTransform, t: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities in float64, and the leaves: hidden states, weight, bias."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, *linear.parameters())]
    logits = leaves[0] @ leaves[1].t() * transform.scale
    if len(leaves) > 2:
        logits = logits + leaves[2] * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    return (logits / t).log_softmax(-1).gather(1, target[:, None])[:, 0], leaves


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("transform", "temperature"),
    [(PLAIN, 1.0), (PLAIN, 0.6), (LogitTransform(0.25), 1.0), (LogitTransform(-4.0, 6.0), 0.6)],
)
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_rounded_operands_give_gradients_of_float64(
    products: list[str], bias: bool, transform: LogitTransform, temperature: float, spread: float
) -> None:
    """Factors of both signs and of zero; targets that are the most likely token and that are not; a last chunk of one token."""
    torch.manual_seed(5)
    linear = torch.nn.Linear(64, 96, bias=bias).to(BF16)
    torch.nn.init.normal_(linear.weight, std=spread)
    hidden = torch.randn(57, 64).to(BF16).requires_grad_()
    logits = hidden.detach().float() @ linear.weight.detach().float().t() * transform.scale
    target = torch.randint(96, (57,))
    target[::2] = logits.argmax(-1)[::2]
    direction = torch.randn(57) * 1e-6
    direction[3:5] = 0.0
    expected, leaves = exact(linear, hidden, target, transform, temperature)
    theirs = torch.autograd.grad((expected * direction).sum(), leaves)
    head = LogprobHead(linear, fp32=True, chunk_bytes=4 * 96 * 8, transform=transform)
    got, entropies = head(hidden, target, temperature, True)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5)
    assert entropies.isfinite().all()
    ours = torch.autograd.grad((got * direction).sum(), [hidden, *linear.parameters()])
    assert products.count("mm") == 3 * 8 + (8 if bias else 0)
    assert products.count("addmm") == 8
    assert not ours[0][3:5].any(), "tokens of weight zero have no gradient"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == BF16
        # Half a unit in the last place of bfloat16 is 2e-3 on average.
        assert float((mine.double() - other).norm() / other.norm()) < 2.2e-3


@pytest.mark.parametrize("trained", ["all", "states"])
@pytest.mark.parametrize("transform", [PLAIN, LogitTransform(-4.0, 6.0)])
@pytest.mark.parametrize(("dtype", "fp32"), [(torch.float32, True), (BF16, True), (BF16, False)])
@pytest.mark.parametrize("accelerator", [False, True])
def test_gradients_of_the_forward_pass_are_those_of_the_backward_pass(
    accelerator: bool, dtype: torch.dtype, fp32: bool, transform: LogitTransform, trained: str, request: Any
) -> None:
    """Bit for bit, as values and entropies, from three products a chunk; the derivative is asked for when a chunk's values are there."""
    calls = request.getfixturevalue("products") if accelerator else []
    torch.manual_seed(5)
    linear = torch.nn.Linear(64, 96).to(dtype).requires_grad_(trained == "all")
    hidden = torch.randn(57, 64).to(dtype).requires_grad_()
    target, weight = torch.randint(96, (57,)), torch.randn(57)
    head = LogprobHead(linear, fp32=fp32, chunk_bytes=4 * 96 * 8, transform=transform)
    leaves = [hidden, *(p for p in linear.parameters() if p.requires_grad)]
    asked: list[int] = []

    def derivative(logprobs: torch.Tensor) -> torch.Tensor:
        asked.append(int(logprobs.count_nonzero()))
        return weight * logprobs.exp()

    found, products = [], []
    for given in (None, derivative):
        calls.clear()
        logprobs, entropies = head(hidden, target, 0.6, True, given)
        gradients = torch.autograd.grad((logprobs * derivative(logprobs.detach())).sum(), leaves)
        found.append([logprobs.detach(), entropies, *gradients])
        products.append(calls.count("mm"))
    assert asked == [57, *range(8, 57, 8), 57, 57]
    assert all(map(torch.equal, *found))
    assert products[0] - products[1] == (8 if calls else 0)


def test_another_derivative_than_in_the_forward_pass_is_refused() -> None:
    """Its gradients are those of one derivative; but one that is no number is equal to itself."""
    head = LogprobHead(torch.nn.Linear(8, 9), fp32=True)
    hidden, target = torch.randn(4, 8, requires_grad=True), torch.arange(4)
    given = torch.tensor([0.5, torch.nan, torch.inf, 0.0])
    head(hidden, target, 1.0, False, lambda _: given)[0].backward(given)
    for at, other in ((0, 0.50001), (1, 0.0), (2, torch.nan)):
        changed = given.index_fill(0, torch.tensor(at), other)
        with pytest.raises(RuntimeError, match="another derivative than in the forward pass"):
            head(hidden, target, 1.0, False, lambda _: given)[0].backward(changed)


def test_errors_and_bytes_are_those_of_the_page(products: list[str]) -> None:
    """At most 1.2 times the errors of the head that casts to float32, and an eighth of the bytes of the first one."""
    benchmark: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    rounded = benchmark["errors"](module, 1.0)
    assert products
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_operand", lambda weight, fp32: weight.float())
        cast = benchmark["errors"](module, 1.0)
    assert {name: rounded[name] / cast[name] < 1.2 for name in cast} == dict.fromkeys(cast, True)
    assert rounded["weight"] != cast["weight"]


@pytest.mark.parametrize(("name", "limit"), [("1.5B", 71.4e6 / 8), ("8B", 124.7e6 / 8)])
def test_bytes_a_token_on_a_gpu(name: str, limit: float) -> None:
    benchmark: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    shape = benchmark["SHAPES"][name]
    without = benchmark["moved"](module, *shape, entropy=True)
    assert 5e6 < without < limit
    # With the kernels 22 bytes of each token and entry of the vocabulary, and the weight's.
    with_kernels = benchmark["moved"](module, *shape, entropy=True, kernels=True)
    assert 22 * shape[0] < with_kernels < 0.65 * without
    # Four less for logits that are not computed again, and the weight once less.
    at_once = benchmark["moved"](module, *shape, entropy=True, kernels=True, at_once=True)
    assert 18 * shape[0] < at_once < with_kernels - 4 * shape[0]


@pytest.mark.parametrize(("tokens", "stride"), [(1, 1), (63, 1), (64, module.ENTROPY_STRIDE)])
def test_entropies_of_a_short_chunk_are_of_all_tokens(tokens: int, stride: int) -> None:
    """Every eighth token of short completions would be mostly the first, which is unlike the others."""
    assert module._stride(torch.empty(tokens, 3, device="meta")) == stride


def test_entropy_of_some_tokens_is_the_mean_of_all() -> None:
    """On an accelerator, one of eight tokens is computed; the sum over tokens is that of all within its sampling error."""
    torch.manual_seed(3)
    logprobs = (3 * torch.randn(4096, 50)).log_softmax(-1)
    every = module._entropies(logprobs, torch.empty_like(logprobs))
    torch.testing.assert_close(every, -(logprobs.exp() * logprobs).sum(-1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_stride", lambda _: 8)
        some = module._entropies(logprobs, torch.empty_like(logprobs))
    assert some.shape == every.shape
    assert abs(float(some.mean() - every.mean())) < 4 * float(every.std()) / 512**0.5
