"""DeepSpeed's engine and optimizer. No other module imports DeepSpeed.

This needs no compiler, although DeepSpeed would compile two extensions at its first start:

- a shared-memory helper for inference collectives on CPUs, which an accelerator object without compiled operations
  avoids (DeepSpeed's extension point, ``set_accelerator``);
- fused Adam, which ``torch.optim.AdamW`` replaces: its fused kernels are part of torch, for CPUs too. So does it replace
  ``DeepSpeedCPUAdam`` where the optimizer is offloaded.

``managed_gradient_accumulation`` is off, so every ``step`` ends an accumulation of any number of micro-batches. DeepSpeed
averages gradients over ranks, so the caller multiplies losses by the number of ranks.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from scalerl_trainer.checkpoints.engine_files import Piece
from scalerl_trainer.engine import adamw
from scalerl_trainer.engine.deepspeed_config import deepspeed_config, overlaps
from scalerl_trainer.engine.distributed import gather_vectors, limit_as_default
from scalerl_trainer.engine.gradient_norms import GradientNorms, kind_of
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.errors import EngineError, ModelError
from scalerl_trainer.models.weight_stream import WeightStream

# Without this, DeepSpeed warns on a machine without GPUs that it guesses the accelerator.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class CompilerFreeCpu(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's CPU accelerator without compiled operations; communicates over gloo."""

    def __init__(self) -> None:
        super().__init__()
        self._communication_backend_name = "gloo"

    def create_op_builder(self, op_name: str) -> None:
        """Return None, so that DeepSpeed continues without the operation."""
        del op_name

    def device_count(self) -> int:
        """1, because each process is one rank."""
        return 1


class ClippingAdamW(torch.optim.AdamW):
    """AdamW over whole, reduced gradients (ZeRO 0): computes their norm, skips non-finite ones, clips."""

    max_norm: float = 0.0
    gradient_norm: float = 0.0
    refused: bool = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights. If the gradient norm is not finite, set ``refused`` and change nothing."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self.gradient_norm = float(norm)
        self.refused = not math.isfinite(self.gradient_norm)
        if self.refused:
            return None
        if self.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm, foreach=True)
        return super().step(closure)


def finish_writes(overlaps: bool) -> None:
    """Wait for writes to ZeRO-3's partitions: with ``overlap_comm`` the next pass gathers them on a stream that does not wait for them."""
    if overlaps:
        torch.cuda.current_stream().synchronize()


class DeepSpeedBackend:
    """The operations on DeepSpeed that ``Engine`` needs."""

    def __init__(
        self,
        module: torch.nn.Module,
        settings: EngineSettings,
        device: torch.device,
        weights: WeightStream | None = None,
    ) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self._stage = settings.zero_stage
        self._overlaps = overlaps(settings.zero_stage, device)
        self._offloaded = settings.offload != "None"
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        parameters = [p for p in module.parameters() if p.requires_grad]
        config = deepspeed_config(settings, self._world, sum(p.numel() for p in parameters), device)
        self._module = module = place(module, config, device, weights)
        kind = ClippingAdamW if self._stage == 0 else torch.optim.AdamW
        optimizer = kind(
            parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if isinstance(optimizer, ClippingAdamW):
            optimizer.max_norm = settings.max_gradient_norm
        self._base_optimizer = optimizer
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=config,
            dist_init_required=False,
        )
        self._norms = GradientNorms(optimizer, self._held_by_kind(), shared=self._stage == 0, device=device)
        # Otherwise its collectives, such as those of a publish under ZeRO-3, would have torch's default timeout: ten minutes
        # over NCCL.
        limit_as_default(self.engine.seq_data_parallel_group, device)

    def __call__(self, *arguments: Any) -> Any:
        return self.engine(*arguments)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of ``loss``, averaged over ranks."""
        self.engine.backward(loss)

    def step(self, learning_rate: float) -> float:
        """Apply the update; returns the global gradient norm before clipping.

        If the norm is NaN or infinite, no weight changes.
        """
        self._norms.reset()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        finish_writes(self._overlaps)
        if isinstance(self._base_optimizer, ClippingAdamW):
            return self._base_optimizer.gradient_norm
        self._clear()
        if not self.engine.was_step_applied():
            return math.inf
        return float(self.engine.get_global_grad_norm())

    def _clear(self) -> None:
        """Set stage 3's gradients to zero, which would be applied again of a parameter that no pass until the next step reaches.

        With offload there are two of each: what passes accumulate, and what the optimizer takes of it.
        """
        optimizer: Any = self.engine.optimizer
        if self._stage == 3:
            optimizer.grad_partitions_flat_buffer.zero_()
        if self._offloaded:
            for flat in optimizer.fp32_partitioned_groups_flat:
                flat.grad.zero_()

    def discard(self, output: Callable[[], torch.Tensor]) -> None:
        """Discard the accumulated gradients, at every ZeRO stage.

        DeepSpeed discards them only if it skips a step itself, because of a gradient that is not finite. So this adds one.
        """
        self.backward(output().sum() * math.nan)
        if math.isfinite(self.step(0.0)):
            raise EngineError("DeepSpeed applied an update whose gradient is not a number")

    def gradient_norms(self, norm: float) -> dict[str, float]:
        """The global norm that :meth:`step` returned, by kind of parameter. A collective, but for ZeRO 0."""
        return self._norms.by_kind(norm)

    def _held_by_kind(self) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """The parts of the optimizer's tensors that belong to parameters of a kind, in no particular order."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                for flat, offset, _, count in self._held(parameter):
                    yield kind_of(name), flat, slice(offset, offset + count)

    def reset_optimizer(self) -> None:
        """Reset the moments and their step count to zero."""
        adamw.reset(self._base_optimizer)

    def whole(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Whole parameters on rank 0, nothing on others. A collective under ZeRO-3, else they are the live ones."""
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3):
            if self._rank != 0:
                return []
            # Under ZeRO-3 the gathered storage is freed after the block, so it is copied.
            return [p.detach().clone() if self._stage == 3 else p.detach() for p in parameters]

    def shape(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        """The full shape of a parameter, also while ZeRO-3 partitions it."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    # --- state --------------------------------------------------------------------------------------------

    def pieces(self, *, owned: bool) -> Iterator[Piece]:
        """Yield the pieces of parameters whose float32 weights and moments this rank holds, as views.

        Args:
            owned: only pieces that this rank owns, which partition the state over ranks. Under ZeRO 0 every rank holds all
                state and owns an equal part of it.
        """
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad:
                continue
            for flat, offset, start, count in self._held(parameter):
                state = adamw.moments(self._base_optimizer, flat)
                begin, end = 0, count
                if owned and self._stage == 0:
                    begin, end = (count * r // self._world for r in (self._rank, self._rank + 1))
                if begin < end:
                    part = slice(offset + begin, offset + end)
                    values = {"weight": flat, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                    yield Piece(
                        name, start + begin, {key: value.data.view(-1)[part] for key, value in values.items()}
                    )

    @property
    def optimizer_steps(self) -> float:
        """AdamW's step count, which is equal for all parameters."""
        return adamw.steps(self._base_optimizer)

    @contextmanager
    def restoring(self, optimizer_steps: float) -> Iterator[None]:
        """A context in which the caller writes to the views of ``pieces``; its exit updates the model's weights from them."""
        optimizer = self.engine.optimizer
        if self._stage == 3:
            optimizer.checkpoint_event_prologue()
        yield
        adamw.set_steps(self._base_optimizer, optimizer_steps)
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            for flat, master in zip(
                optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
            ):
                flat.data.copy_(master.data)
            optimizer.checkpoint_event_epilogue()
        finish_writes(self._overlaps)

    def _held(self, parameter: torch.nn.Parameter) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """The part of ``parameter`` that this rank's optimizer holds, at most one, in elements.

        Yields ``(optimizer tensor, offset in it, start in the flattened parameter, count)``.
        """
        optimizer: Any = self.engine.optimizer
        if self._stage == 0:
            yield parameter, 0, 0, parameter.numel()
        elif self._stage == 3:
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = self._rank * size
            # The parts of the last ranks are padded, or padding only.
            count = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if count > 0:
                yield optimizer.fp32_partitioned_groups_flat[group], offset, start, count
        else:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                # BF16_Optimizer (stage 1 of a bfloat16 model) and the ZeRO optimizer have different attribute names.
                flats = getattr(optimizer, "fp32_groups_flat_partition", None)
                if flats is None:
                    flats = optimizer.single_partition_of_fp32_groups
                whole, part = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield flats[mapping.param_group_index], part.start, whole.start, whole.numel

    def close(self) -> None:
        """Remove DeepSpeed's hooks and references."""
        self.engine.destroy()


class FrozenModule:
    """A module without gradients and optimizer. Under ZeRO-3 it is partitioned over the ranks, and calls are collectives."""

    def __init__(
        self,
        module: torch.nn.Module,
        settings: EngineSettings,
        device: torch.device,
        weights: WeightStream | None = None,
    ) -> None:
        module.requires_grad_(False)
        self._engine: Any = None
        self._overlaps = overlaps(settings.zero_stage, device)
        parameters = sum(p.numel() for p in module.parameters())
        config = deepspeed_config(settings, torch.distributed.get_world_size(), parameters, device)
        module = place(module, config, device, weights)
        if settings.zero_stage == 3:
            self._engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
        self._module: Any = self._engine or module
        self._parameters = dict(module.named_parameters())

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> Any:
        return self._module(*arguments)

    @torch.no_grad()
    def copy_from(self, sources: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Copy whole parameters of a module of the same architecture, by name. A collective under ZeRO-3."""
        own = [self._parameters[name] for name, _ in sources]
        others = [parameter for _, parameter in sources]
        zero3 = self._engine is not None
        with (
            deepspeed.zero.GatheredParameters(others, enabled=zero3),
            deepspeed.zero.GatheredParameters(own, modifier_rank=0, enabled=zero3),
        ):
            if not zero3 or torch.distributed.get_rank() == 0:
                for target, source in zip(own, others, strict=True):
                    target.copy_(source)
        finish_writes(self._overlaps)

    def part(self, name: str, start: int, count: int) -> torch.Tensor:
        """A view of elements of a flattened parameter; under ZeRO-3 they must be of this rank's part."""
        for _, begin, flat in self.parts(name):
            return flat[start - begin : start - begin + count]
        raise KeyError(name)

    def parts(self, name: str | None = None) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Of one parameter or of all, the part that this rank holds: name, start, and a flat view without padding."""
        rank = torch.distributed.get_rank()
        for each, parameter in self._parameters.items():
            if name not in (None, each):
                continue
            if self._engine is None:
                yield each, 0, parameter.data.view(-1)
                continue
            flat: torch.Tensor = parameter.ds_tensor.data.view(-1)  # type: ignore[attr-defined]
            start = rank * flat.numel()
            count = min(flat.numel(), parameter.ds_numel - start)  # type: ignore[attr-defined]
            if count > 0:
                yield each, start, flat[:count]

    def close(self) -> None:
        """Remove DeepSpeed's hooks and references."""
        if self._engine is not None:
            self._engine.destroy()


def place(
    module: torch.nn.Module, config: dict[str, Any], device: torch.device, weights: WeightStream | None
) -> torch.nn.Module:
    """Put ``module`` on the device, with ``weights``. A collective with weights, and under ZeRO-3.

    Under ZeRO-3 each parameter is partitioned before the next one is read: no rank and no device holds the model.

    Raises:
        ModelError: on all ranks, if rank 0 cannot read the weights.
    """
    if device.type == "cpu" and not isinstance(get_accelerator(), CompilerFreeCpu):
        set_accelerator(CompilerFreeCpu())
    zero3 = config["zero_optimization"]["stage"] == 3
    if zero3:
        deepspeed.init_distributed(dist_init_required=False)  # otherwise zero.Init sees one rank
    if weights is not None:
        _fill(weights, config if zero3 else None, device)
    if not zero3:
        return module.to(device)
    deepspeed.zero.Init(module=module, config_dict_or_path=config)  # those that no file has
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, buffer.to(device))
    return module


def _fill(weights: WeightStream, partition: dict[str, Any] | None, device: torch.device) -> None:
    dist = torch.distributed
    reads, problem = dist.get_rank() == 0, ""
    try:
        for tensors in weights.parameters(device, reads=reads):
            if partition is None:
                whole = tensors
            else:
                whole = [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
                parameters = torch.nn.ParameterList(t for t in tensors if isinstance(t, torch.nn.Parameter))
                deepspeed.zero.Init(module=parameters, config_dict_or_path=partition)  # broadcasts rank 0's
            for tensor in whole:
                dist.broadcast(tensor.data, src=0)
    except ModelError as error:
        problem = str(error)
    if bool(gather_vectors(torch.tensor([float(bool(problem))], device=device)).any()):
        raise ModelError(problem or "rank 0 cannot read the model's weights: see its log")
