"""FSDP2 (``torch.distributed.fsdp.fully_shard``): the engine without a package beside torch.

Everything is partitioned, as under ZeRO-3: each parameter by its first dimension, so that a rank's part is contiguous in the
flattened parameter. The units that are gathered at a time are the elements of the model's outermost lists of layers, and the rest
of the model, which holds the embeddings.

The trained partitions are float32 and are the master weights. With a bfloat16 model they are cast before they are gathered, and
gradients are reduced and accumulated in float32: the numerics of DeepSpeed's bfloat16 without the bfloat16 partition that it keeps
beside the master weights. The optimizer has the local tensors, so it never dispatches on distributed ones.

With offload, partitions, gradients and optimizer are in the host's memory: FSDP2 copies a unit's partition to the device before it
gathers it, and reduced gradients back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from scalerl_trainer.checkpoints.engine_files import Piece
from scalerl_trainer.engine import adamw
from scalerl_trainer.engine.distributed import gather_vectors
from scalerl_trainer.engine.gradient_norms import GradientNorms, kind_of
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models.weight_stream import WeightStream


class FsdpBackend:
    """The :class:`.backend.Backend` of FSDP2."""

    def __init__(
        self,
        module: torch.nn.Module,
        settings: EngineSettings,
        device: torch.device,
        weights: WeightStream | None = None,
    ) -> None:
        check_unreached(module)
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        # Embeddings and head are needed at the end of the forward pass and at the begin of the backward pass.
        self._module = place(
            module, self._dtype, device, weights, keep_root=True, offload=settings.offload != "None"
        )
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            self._module.set_reduce_scatter_unused_params(True)
        self._rank = dist.get_rank()
        self._max_norm = settings.max_gradient_norm
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._trained = [(name, parameter, local(parameter)) for name, parameter in trained]
        # The fused kernel takes no tensor without elements, which is a rank's part where a parameter has fewer rows than there are ranks.
        held = [flat for _, _, flat in self._trained if flat.numel()] or [torch.zeros(1)]
        self._optimizer = torch.optim.AdamW(
            held,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        parts = [(kind_of(name), flat, slice(0, flat.numel())) for name, _, flat in self._trained]
        self._norms = GradientNorms(self._optimizer, parts, shared=False, device=device)
        self._device = device

    def __call__(self, *arguments: Any) -> Any:
        output = self._module(*arguments)
        if not torch.is_grad_enabled():
            self._module.reshard()  # no backward pass will
        return output

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of ``loss``, averaged over ranks."""
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Apply the update; returns the global gradient norm before clipping.

        If the norm is NaN or infinite, no weight changes.
        """
        self._norms.reset()
        for _, parameter, flat in self._trained:
            gradient = parameter.grad
            flat.grad = None if gradient is None or not flat.numel() else gradient.to_local()  # type: ignore[attr-defined]
        flats = [flat for _, _, flat in self._trained if flat.grad is not None]
        square = torch.zeros(1, dtype=torch.float64, device=self._device)
        if flats:
            norms = torch._foreach_norm([flat.grad for flat in flats])  # type: ignore[misc]
            square += torch.stack(norms).double().square().sum().to(self._device)
        norm = math.sqrt(float(gather_vectors(square).sum()))
        if math.isfinite(norm):
            if self._max_norm > 0:
                total = torch.tensor(norm, device=self._device)
                torch.nn.utils.clip_grads_with_norm_(flats, self._max_norm, total, foreach=True)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._clear()
        return norm

    def _clear(self) -> None:
        for _, parameter, flat in self._trained:
            parameter.grad = flat.grad = None

    def discard(self, output: Callable[[], torch.Tensor]) -> None:
        """Discard the accumulated gradients. Not a collective."""
        del output
        self._clear()

    def gradient_norms(self, norm: float) -> dict[str, float]:
        """The global norm that :meth:`step` returned, by kind of parameter. A collective."""
        return self._norms.by_kind(norm)

    def reset_optimizer(self) -> None:
        """Reset the moments and their step count to zero."""
        adamw.reset(self._optimizer)

    @torch.no_grad()
    def whole(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Whole parameters in the model's dtype on rank 0, nothing on others. A collective."""
        found: list[torch.Tensor] = []
        for parameter in parameters:
            # The values that the forward pass computes with.
            part = parameter.detach().to(self._device, self._dtype)
            tensor = _distributed(part).full_tensor()
            found += [tensor] if self._rank == 0 else []
        return found

    def shape(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The full shape of a parameter."""
        return tuple(parameter.shape)

    def pieces(self, *, owned: bool) -> Iterator[Piece]:
        """Yield the pieces of parameters whose float32 weights and moments this rank holds, as views; it owns all of them."""
        del owned
        for name, parameter, flat in self._trained:
            if flat.numel():
                state = adamw.moments(self._optimizer, flat)
                values = {"weight": flat, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                yield Piece(name, start_of(parameter), {key: v.data.view(-1) for key, v in values.items()})

    @property
    def optimizer_steps(self) -> float:
        """AdamW's step count, which is equal for all parameters."""
        return adamw.steps(self._optimizer)

    @contextmanager
    def restoring(self, optimizer_steps: float) -> Iterator[None]:
        """A context in which the caller writes to the views of ``pieces``, from which later passes gather."""
        yield
        adamw.set_steps(self._optimizer, optimizer_steps)

    def close(self) -> None:
        """There is nothing to remove."""


class FsdpFrozen:
    """A module without gradients and optimizer, partitioned over the ranks in the model's dtype. Calls are collectives."""

    def __init__(
        self,
        module: torch.nn.Module,
        settings: EngineSettings,
        device: torch.device,
        weights: WeightStream | None = None,
    ) -> None:
        module.requires_grad_(False)
        dtype, offload = getattr(torch, settings.dtype), settings.offload != "None"
        self._module = place(module, dtype, device, weights, keep_root=False, offload=offload)
        self._parameters = {name: _distributed(p) for name, p in module.named_parameters()}

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> Any:
        return self._module(*arguments)

    @torch.no_grad()
    def copy_from(self, sources: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Copy parameters of a module of the same architecture, by name. Not a collective: the parts are the same."""
        for name, source in sources:
            local(self._parameters[name]).copy_(local(source))

    def part(self, name: str, start: int, count: int) -> torch.Tensor:
        """A view of elements of a flattened parameter, which must be of this rank's part."""
        parameter = self._parameters[name]
        begin = start - start_of(parameter)
        return local(parameter).view(-1)[begin : begin + count]

    def parts(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Of each parameter, the part that this rank holds: name, start, and a flat view."""
        for name, parameter in self._parameters.items():
            if local(parameter).numel():
                yield name, start_of(parameter), local(parameter).view(-1)

    def close(self) -> None:
        """There is nothing to remove."""


def _distributed(parameter: torch.Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter


@torch.no_grad()
def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, in the parameter's memory, without padding and history."""
    part: torch.Tensor = _distributed(parameter).to_local()
    return part.detach()


def start_of(parameter: torch.Tensor) -> int:
    """Index of the first element of this rank's part in the flattened parameter."""
    rows, width = parameter.shape[0], math.prod(parameter.shape[1:])
    return min(dist.get_rank() * math.ceil(rows / dist.get_world_size()), rows) * width


def place(
    module: torch.nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightStream | None,
    *,
    keep_root: bool,
    offload: bool = False,
) -> Any:
    """Partition ``module`` over the ranks and fill it with ``weights``, or with rank 0's own values. A collective.

    The memory of a unit is reserved, partitioned and freed before that of the next one, and so are the weights: no rank and no
    device holds the model.

    Args:
        dtype: in which the module computes.
        keep_root: keep what is in no unit whole between a forward and a backward pass.
        offload: keep the partitions in the host's memory, page-locked beside an accelerator.

    Raises:
        ModelError: rank 0 cannot read the weights, on all ranks; or the module cannot be partitioned.
    """
    originals = list(module.parameters())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # positions and rotary angles are for the model to cast
    )
    pinned = device.type == "cuda"
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
    }
    for unit in units(module):
        _reserve(unit, device)
        fully_shard(unit, **policy, reshard_after_forward=True)
    _reserve(module, device)
    fully_shard(module, **policy, reshard_after_forward=not keep_root)
    parts = {id(whole): part for whole, part in zip(originals, module.parameters(), strict=True)}
    _fill(originals, parts, device, weights)
    return module


def units(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The elements of the outermost lists of modules.

    Raises:
        ModelError: a parameter is in several of them, or has no dimension.
    """
    found: list[torch.nn.Module] = []
    inner = [module]
    while inner:
        for child in inner.pop().children():
            if isinstance(child, torch.nn.ModuleList):
                found += [one for one in child if next(one.parameters(), None) is not None]
            else:
                inner.append(child)
    within = [parameter for unit in found for parameter in unit.parameters()]
    if len(within) != len(set(within)):
        raise ModelError(
            "layers of this model share parameters, which FSDP2 cannot: set trainer.engine: DeepSpeed"
        )
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ModelError(f"{name} has no dimension to partition by: set trainer.engine: DeepSpeed")
    return found


def check_unreached(module: torch.nn.Module) -> None:
    """Check that parameters which a rank's pass may not reach can be trained.

    Experts that are modules of their own may have tokens on some ranks only. Releases of torch before 2.13 leave out the reduction of
    a parameter without a gradient, so ranks would reduce different ones. Experts in one parameter are always reached.

    Raises:
        ModelError: the module has such experts and torch cannot.
    """
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return
    for unit in units(module):
        for name, child in unit.named_modules():
            if isinstance(child, torch.nn.ModuleList) and len(child) > 1 and "expert" in name:
                path = next(n for n, m in module.named_modules() if m is child)
                raise ModelError(
                    f"{path} has experts that may be without tokens on a rank, which FSDP2 has from torch 2.13 on, here is "
                    f"{torch.__version__}: set trainer.engine: DeepSpeed"
                )


def _reserve(unit: torch.nn.Module, device: torch.device) -> None:
    """Give the parameters that are not partitioned yet memory without values on the device; float32 if they are trained."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                dtype = torch.float32 if parameter.requires_grad else parameter.dtype
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[parameter] = torch.nn.Parameter(memory, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])


@torch.no_grad()
def _fill(
    originals: list[torch.nn.Parameter],
    parts: dict[int, torch.nn.Parameter],
    device: torch.device,
    weights: WeightStream | None,
) -> None:
    """Broadcast rank 0's values of each of ``originals``, keep this rank's part, and free it."""
    filled: set[int] = set()

    def take(tensor: torch.Tensor) -> None:
        whole = tensor.data.to(device).contiguous()
        dist.broadcast(whole, src=0)
        if (part := parts.get(id(tensor))) is None:  # a buffer
            tensor.data.copy_(whole)
            return
        own = local(part).view(-1)
        own.copy_(whole.view(-1)[start_of(part) :][: own.numel()])
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
        filled.add(id(tensor))

    problem = ""
    try:
        for tensors in weights.parameters(device, reads=dist.get_rank() == 0) if weights is not None else ():
            for tensor in tensors:
                take(tensor)
    except ModelError as error:
        problem = str(error)
    if bool(gather_vectors(torch.tensor([float(bool(problem))], device=device)).any()):
        raise ModelError(problem or "rank 0 cannot read the model's weights: see its log")
    for original in originals:
        if id(original) not in filled:
            take(original)
