"""The trainer's step on tensors of an accelerator that does not exist: ``python accelerator_worker.py`` prints one JSON object.

The tensors are torch's fake tensors: they have shape, dtype and device, and no values. Operations that mix them with tensors on
the CPU raise, as on a GPU. So do operations that need a value (``item``, ``float``, ``bool``), and operations whose result's shape
depends on values; transfers to the CPU are recorded with the function of the trainer that made them. The device is torch's
private backend, because torch built for CUDA runs no backward pass of fake CUDA tensors without a driver. The backend stays
registered in the process, so the tests start one. A copy to the device waits as well unless it is of page-locked
memory, changes no dtype and does not block, as on a GPU.

Tensors on the CPU are real and have values.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from trainable_places import trainable_places
from transformers import LlamaConfig, LlamaForCausalLM

import scalerl_trainer
from scalerl_api.weight_layout import lay_out
from scalerl_trainer.algo.aggregation import sequence_weights
from scalerl_trainer.algo.corrections import Corrected, OffPolicyMasked
from scalerl_trainer.algo.distillation import Distilled
from scalerl_trainer.algo.gradient_guard import GradientGuard
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import (
    Cispo,
    Dppo,
    Gspo,
    Loss,
    LossOutput,
    PpoClip,
    Reinforce,
    Supervised,
    TokenBatch,
)
from scalerl_trainer.engine import (
    Engine,
    EngineSettings,
    TrainBatch,
    attention,
    passes,
    start_checks,
    training_step,
)
from scalerl_trainer.engine.deepspeed_backend import ClippingAdamW
from scalerl_trainer.engine.distributed import exchange_sizes
from scalerl_trainer.models import head as head_module
from scalerl_trainer.models import varlen
from scalerl_trainer.packing import Sequence
from scalerl_trainer.publish.published_weights import fill, tensor_spec

ACCELERATOR = "pretend"
SOURCE = str(Path(scalerl_trainer.__file__).parent)
VOCABULARY, HIDDEN = 64, 16

MAY_WAIT = {
    "engine/training_step.py:logprobs": "the log-probabilities are returned on the CPU, once per micro-batch",
    "engine/passes.py:outlier_counts": "only in skipped steps",
    "engine/deepspeed_backend.py:step": "the gradient norm decides whether the step is applied",
    "publish/published_weights.py:fill": "the checksum goes into the trailer, which is written by the CPU, once per bucket",
}
"""Functions of the trainer that may wait for the device, each with its reason."""


COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Wait(Exception):
    """A function that is not in :data:`MAY_WAIT` waits for the device."""


class Accelerator(TorchDispatchMode):
    """Runs operations on fake tensors of the accelerator, and raises ``Wait`` for those that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        there = [x for x in leaves if isinstance(x, FakeTensor)]
        if not there and not any(isinstance(x, torch.device) and x.type == ACCELERATOR for x in leaves):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        on_device = any(x.device.type == ACCELERATOR for x in there)
        if func is torch.ops.aten._local_scalar_dense.default:
            self._wait("a value is read")
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.index.Tensor and on_device:
            mask = args[1][0]
            if mask is not None and mask.dtype == torch.bool:
                self._wait("a mask selects")
                return args[0].clone()
        source = args[func is torch.ops.aten.copy_.default] if func in COPIES else None
        pinned = getattr(source, "pinned", False) and (kwargs.get("non_blocking") or args[2:] == (True,))
        args, kwargs = tree_map(self._faked, (args, kwargs))
        result = func(*args, **kwargs)
        if source is not None and result.device.type == ACCELERATOR and source.device.type == "cpu":
            own = any(f.filename.startswith(SOURCE) for f in traceback.extract_stack())
            if own and not (pinned and result.dtype == source.dtype):
                self._wait("a tensor is moved to the device")
        if on_device and func is not torch.ops.aten.detach.default:
            changed = args[0] if func is torch.ops.aten.copy_.default else result
            if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in tree_leaves(changed)):
                self._wait("a tensor is moved to the CPU")
        return result

    def _faked(self, value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self.fake.from_tensor(value) if real else value

    def _wait(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(SOURCE)]
        at = f"{frames[-1].filename[len(SOURCE) + 1 :]}:{frames[-1].name}" if frames else "a test's own code"
        if at not in MAY_WAIT:
            raise Wait(f"{what} in {at}")
        self.waits[at] += 1


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """In place of the method of tensors, which needs a real accelerator."""
    assert tensor.device.type == "cpu"
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


class PlainEngine:
    """In place of DeepSpeed: one rank, torch's AdamW."""

    def __init__(
        self, module: torch.nn.Module, settings: EngineSettings, device: torch.device, weights: object = None
    ) -> None:
        del device
        self.module = module
        self.optimizer = ClippingAdamW(module.parameters(), lr=settings.learning_rate)
        self.optimizer.max_norm = settings.max_gradient_norm

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        del learning_rate
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        assert gradients
        assert all(g.device.type == ACCELERATOR for g in gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.gradient_norm

    def gradient_norms(self, norm: float) -> dict[str, float]:
        del norm
        return {}

    def whole(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        return [p.detach() for p in parameters]

    def shape(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        return tuple(parameter.shape)


def model(tied: bool) -> Any:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    made = LlamaForCausalLM(config).to(torch.bfloat16)
    made.config.use_cache = False
    moved: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = torch.nn.Parameter(parameter.detach().to(ACCELERATOR))
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(ACCELERATOR)
    return made.train()


def batch() -> TrainBatch:
    """Four sequences in three micro-batches, one with forced tokens, fresh and stale ones, with a teacher's log-probabilities."""
    sequences = [
        Sequence([3, 4], list(range(5, 14))),
        Sequence([3], list(range(9, 14)), [True, False, True, True, True]),
        Sequence([6, 7, 8], list(range(20, 31))),
        Sequence([9], [10, 11]),
    ]
    count = sum(len(trainable_places(s)) for s in sequences)
    lengths_s = torch.tensor([len(trainable_places(s)) for s in sequences])
    return TrainBatch(
        sequences,
        sequence_weights(lengths_s, torch.tensor([0, 0, 1, 1])).float(),
        torch.tensor([1.0, -1.0, 0.5, -0.5]),
        torch.full((count,), -4.0),
        torch.arange(count) % 3 == 0,
        torch.full((count,), -3.0),
    )


def gathered_vectors(vector: torch.Tensor) -> torch.Tensor:
    """In place of the collective, which is the one place of a step where the CPU waits for the device: 1 rank, no values."""
    assert vector.device.type == ACCELERATOR, vector.device
    return torch.zeros(1, *vector.shape, dtype=vector.dtype)


def engine(*, fp32_head: bool = True, frozen: bool = False) -> Engine:
    """With ``frozen``, it has a reference policy and a proximal one.

    Without activation checkpointing: the private backend's thread cannot run its Python code in the backward pass.
    """
    settings = EngineSettings(
        micro_batch_tokens=16,
        fp32_head=fp32_head,
        ratio_guard=None,
        gradient_guard=GradientGuard(min_tokens=1),
    )
    made = Engine(model(tied=True), settings, torch.device(ACCELERATOR))
    if frozen:
        made.set_reference(model(tied=False))
        made.keep_proximal(model(tied=True))
        made._proximal.updates = 1
    return made


def boundaries() -> list[str]:
    """Devices of what the variable-length kernel takes."""
    ends = varlen.boundaries(torch.tensor([[0, 1, 2, 0, 1]]), torch.device(ACCELERATOR))
    return [x.device.type for x in ends.values() if isinstance(x, torch.Tensor)]


LOSSES: dict[str, Loss] = {
    "cispo": Cispo(),
    "dppo": Dppo(),
    "gspo": Gspo(),
    "ppoClip": PpoClip(),
    "reinforce": Reinforce(),
    "supervised": Supervised(),
    "truncated": Corrected(Cispo(), 2.0, "truncate"),
    "masked": Corrected(PpoClip(), 2.0, "mask"),
    "masked, geometric": Corrected(Dppo(), 5.0, "mask", "Geometric", 0.5),
    "dual clip": PpoClip(dual_clip=3.0),
    "off-policy mask": OffPolicyMasked(Corrected(Cispo(), 2.0, "truncate", "Sequence"), 0.5),
    "distilled": Distilled(Cispo(), 0.5),
    "distilled gspo, corrected": Distilled(Corrected(Gspo(), 2.0, "mask"), 0.5),
    **{f"kl {name}": WithKl(Cispo(), name, 0.1) for name in ("k1", "k2", "k3")},
}


class Planted:
    """A loss with a fault."""

    def __init__(self, fault: Callable[[TokenBatch], object]) -> None:
        self.fault = fault

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        self.fault(tokens)
        return Cispo()(tokens)


FAULTS: dict[str, Callable[[TokenBatch], object]] = {
    "cpu": lambda tokens: tokens.logprobs_n.detach().cpu(),
    "to": lambda tokens: tokens.advantages_n.to("cpu", torch.float64),
    "copy": lambda tokens: torch.empty_like(tokens.weights_n, device="cpu").copy_(tokens.weights_n),
    "on": lambda tokens: torch.ones(2).to(tokens.weights_n.device),
    "unpinned": lambda tokens: torch.ones(2).to(tokens.weights_n.device, non_blocking=True),
    "cast": lambda tokens: (
        torch.ones(2).pin_memory().to(tokens.weights_n.device, torch.bfloat16, non_blocking=True)
    ),
    "item": lambda tokens: tokens.logprobs_n.sum().item(),
    "float": lambda tokens: float(tokens.advantages_n.max()),
    "if": lambda tokens: bool((tokens.weights_n > 0).all()),
    "tolist": lambda tokens: tokens.sequence_n.tolist(),
    "device": lambda tokens: tokens.logprobs_n + torch.ones(len(tokens.logprobs_n)),
    "unique": lambda tokens: torch.unique(tokens.sequence_n),
    "mask": lambda tokens: tokens.logprobs_n[tokens.advantages_n > 0].sum(),
}


def publish(made: Engine) -> int:
    """Fill every bucket of a publish; returns their number."""
    tensors = [
        (name, tensor)
        for bucket in made.weights.gather_parameters(1 << 12)
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True)
    ]
    stream = iter(tensors)
    buckets = lay_out([tensor_spec(*one) for one in tensors], 1 << 12)
    buffer = torch.empty(max(b.total_bytes for b in buckets), dtype=torch.uint8, device=ACCELERATOR)
    for one in buckets:
        assert fill(one, 7, stream, buffer).device.type == ACCELERATOR
    return len(buckets)


def outcome(mode: Accelerator, work: Callable[[], object]) -> dict[str, Any]:
    """What ``work`` returned or raised, and where it waited."""
    mode.waits.clear()
    try:
        result = work()
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error).splitlines()[0][:300]}
    return {"result": result, "waits": dict(mode.waits)}


def stepped(loss: Loss, **settings: bool) -> dict[str, Any]:
    stats = engine(**settings).step(batch(), loss)
    return {"applied": stats.applied, "micro_batches": stats.micro_batches}


def main() -> None:
    torch.manual_seed(0)
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment,method-assign]
    _setup_privateuseone_for_python_backend(ACCELERATOR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training_step.open_backend = PlainEngine  # type: ignore[assignment]
    training_step.open_frozen = lambda module, *_: torch.no_grad()(module)  # type: ignore[assignment,return-value]
    for each in (training_step, attention, passes):
        each.gather_vectors = gathered_vectors  # type: ignore[attr-defined]
    # It exchanges the shard's sizes, which have values, in tensors of the device.
    training_step.exchange_sizes = lambda shard, device: exchange_sizes(shard, torch.device("cpu"))
    start_checks.StartChecks._all = lambda checks, good: good  # type: ignore[method-assign]  # likewise
    found: dict[str, Any] = {}
    with Accelerator() as mode:
        for name, loss in LOSSES.items():
            found[f"loss {name}"] = outcome(mode, lambda loss=loss: stepped(loss, frozen=True))
        found["bfloat16 head"] = outcome(mode, lambda: stepped(Cispo(), fp32_head=False))
        found["logprobs"] = outcome(mode, lambda: len(engine().logprobs(batch().sequences).logprobs_n))
        found["boundaries"] = outcome(mode, boundaries)
        found["publish"] = outcome(mode, lambda: publish(engine()))
        for name, fault in FAULTS.items():
            found[f"fault {name}"] = outcome(mode, lambda fault=fault: stepped(Planted(fault)))
        plain = head_module._logits

        def moved(*arguments: Any) -> torch.Tensor:
            logits_cv = plain(*arguments)
            return logits_cv.cpu() if sys._getframe(1).f_code.co_name == "_sloped" else logits_cv

        head_module._logits = moved
        found["fault head"] = outcome(mode, lambda: stepped(Cispo()))
    print(json.dumps(found), flush=True)
    # Threads of autograd dispatch to Python here; one that asks for the interpreter's lock while it ends aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
