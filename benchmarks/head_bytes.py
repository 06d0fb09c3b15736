"""Bytes that the float32 head moves a token and how exact it is, on any machine, beside the head of an earlier commit.

    python benchmarks/head_bytes.py [--earlier 7c34dfb9]

Bytes are counted on fake tensors of a GPU: of each operation of the forward and backward passes, what it reads and writes
once, without what a cache would save. Fake tensors run no Triton kernel: of those what they read and write is added as their source
has it, the logits once, and the derivative. The shapes are those of Qwen2.5 1.5B and Llama 3 8B, 16,384 tokens, in bfloat16. Errors are
of real tensors on the CPU against float64: there a product of bfloat16 operands that is accumulated in float32 is computed from
the operands cast to float32, whose products are exact. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalerl_trainer.models import head as present
from scalerl_trainer.models.logits import PLAIN

PATH = "trainer/src/scalerl_trainer/models/head.py"
SHAPES = {"1.5B": (151936, 1536), "8B": (128256, 4096)}
TOKENS = 16384
SPARSE = ("gather", "scatter", "index", "index_add")
"""Operations that touch the elements of their smaller operands alone."""


class Bytes(TorchDispatchMode):
    """Sums what operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name.startswith(("empty", "detach")):
            return result
        read = [_size(x) for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        written = [_size(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if not written:
            return result
        if name.rstrip("_").removesuffix("_add") in SPARSE:
            self.moved += 3 * min(size for size in (*read, *written) if size)
        else:
            self.moved += sum(written) + sum(read)
        return result


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of an expanded one those that exist."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def moved(
    module: ModuleType,
    vocabulary: int,
    hidden: int,
    *,
    entropy: bool,
    kernels: bool = False,
    at_once: bool = False,
) -> float:
    """Bytes a token of forward and backward; ``at_once`` with the gradients of the forward pass, where the module has them."""
    forward, backward = module._ChunkedLogprob.forward, module._ChunkedLogprob.backward
    takes = inspect.signature(forward).parameters
    with FakeTensorMode(), Bytes() as counter, ExitStack() as stack:
        weight_vd = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="cuda")
        hidden_md = torch.empty(TOKENS, hidden, dtype=torch.bfloat16, device="cuda")
        target_m = torch.empty(TOKENS, dtype=torch.int64, device="cuda")
        saved = Saved()
        chunk_bytes = getattr(module, "ACCELERATOR_CHUNK_BYTES", 64 * 2**20)
        if kernels:
            from scalerl_trainer.models import head_kernels

            chunk_bytes = module.KERNEL_CHUNK_BYTES

            def statistics(logits: torch.Tensor, *others: Any) -> None:
                counter.moved += sum(_size(x) for x in (logits, *others) if isinstance(x, torch.Tensor))

            def derivative(logits: torch.Tensor, *others: Any) -> torch.Tensor:
                values = torch.empty_like(logits, dtype=torch.bfloat16)
                statistics(logits, values, *others)
                return values

            for kernel in (statistics, derivative):
                stack.enter_context(patch.object(head_kernels, kernel.__name__, kernel))
        chunk = chunk_bytes // (4 * vocabulary)
        given = {
            "hidden_md": hidden_md,
            "weight_vd": weight_vd,
            "bias_v": None,
            "target_m": target_m,
            "temperature": 1.0,
            "transform": PLAIN,
            "fp32": True,
            "chunk": chunk,
            "entropy": entropy,
            "derivative": torch.zeros_like if at_once else None,
            "kernels": kernels,
        }
        forward(saved, **{name: value for name, value in given.items() if name in takes})
        backward(saved, torch.empty(TOKENS, device="cuda"), torch.empty(0, device="cuda"))
    return counter.moved / TOKENS


class Saved:
    """In place of autograd's context."""

    needs_input_grad = (True, True, False)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        del tensors


def emulated(left: torch.Tensor, right: torch.Tensor, **_: Any) -> torch.Tensor:
    """``torch.mm`` of bfloat16 operands, accumulated in float32."""
    return left.float() @ right.float()


def emulated_sum(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, **_: Any
) -> torch.Tensor:
    """The same of ``torch.addmm``."""
    return out.copy_(total + left.float() @ right.float())


def errors(module: ModuleType, spread: float) -> dict[str, float]:
    """Relative errors, in the Euclidean norm, of log-probabilities and both gradients as they are stored, in bfloat16."""
    torch.manual_seed(0)
    vocabulary, width, count = 8192, 256, 512
    weight_vd = (torch.randn(vocabulary, width) * spread).bfloat16().requires_grad_()
    hidden_md = torch.randn(count, width).bfloat16().requires_grad_()
    exact_vd, exact_md = (x.detach().double().requires_grad_() for x in (weight_vd, hidden_md))
    exact_mv = (exact_md @ exact_vd.t()).log_softmax(-1)
    target_m = torch.multinomial(exact_mv.detach().exp(), 1)[:, 0]
    weights_m = torch.randn(count) / count
    exact_m = exact_mv.gather(1, target_m[:, None])[:, 0]
    (exact_m * weights_m).sum().backward()  # type: ignore[no-untyped-call]
    linear = torch.nn.Linear(width, vocabulary, bias=False)
    linear.weight = torch.nn.Parameter(weight_vd)
    own = module.LogprobHead(linear, fp32=True, chunk_bytes=4 * vocabulary * 200)
    own_m, _ = own(hidden_md, target_m, 1.0, False)
    (own_m * weights_m).sum().backward()
    pairs = {
        "log-probability": (own_m, exact_m),
        "hidden states": (hidden_md.grad, exact_md.grad),
        "weight": (linear.weight.grad, exact_vd.grad),
    }
    return {
        name: float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        for name, (a, b) in pairs.items()
        if a is not None and b is not None
    }


def loaded(source: str) -> ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "earlier_head.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("earlier_head", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--earlier", default="7c34dfb9", help="a commit whose head is compared")
    commit = parser.parse_args().earlier
    shown = subprocess.run(["git", "show", f"{commit}:{PATH}"], capture_output=True, text=True, check=True)
    earlier = loaded(shown.stdout)
    figures: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        for entropy in (True, False):
            was, now = (moved(module, *shape, entropy=entropy, at_once=True) for module in (earlier, present))
            least = moved(present, *shape, entropy=entropy, kernels=True, at_once=True)
            row = f"{name}, {'with' if entropy else 'without'} entropies"
            print(
                f"{row}: {was / 1e6:.1f} MB a token at {commit}; now {now / 1e6:.2f} MB without the kernels, 1/{was / now:.1f}, "
                f"and {least / 1e6:.2f} MB with them, 1/{was / least:.1f}"
            )
            figures[row] = {"earlier": was, "now": now, "kernels": least}
    for spread in (0.02, 0.15, 0.4, 1.0):
        was_by = errors(earlier, spread)
        with (
            patch.object(present, "_operand", lambda weight, fp32: weight),
            patch("torch.mm", emulated),
            patch("torch.addmm", emulated_sum),
        ):
            now_by = errors(present, spread)
        for name, was in was_by.items():
            print(
                f"error, weights of {spread}, {name}: {was:.2e}, {now_by[name]:.2e}: {now_by[name] / was:.2f}"
            )
        figures[f"errors {spread}"] = {"earlier": was_by, "now": now_by}
    print(json.dumps({"benchmark": "head_bytes", "figures": figures}))


if __name__ == "__main__":
    main()
