"""What an engine allocates on the device in the parts of a step, beside what ``prepare`` asks for, for ``gpu_check``."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch

from scalerl_api.memory.model_size import Adapters, ModelSize
from scalerl_api.memory.trainer_rank import rank_moments
from scalerl_trainer.engine import Engine, EngineSettings


class Peaks:
    """Bytes that torch has allocated at most in the parts of an engine's steps.

    *forward* is that of the layers, *head* both passes of the head, *backward* that of the layers and the embedding. Each part of the
    estimate (:func:`.rank_moments`) is in one of them: its *layer* and *embedding* are in *backward*.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        gc.collect()
        torch.cuda.empty_cache()  # what loading has left would be given back where memory is short
        self._device = device
        self.allocated: dict[str, int] = {}
        self._reserved = 0
        backend: Any = engine._backend
        engine._policy.head.register_forward_pre_hook(self._before_head)
        engine._policy.head.register_forward_hook(self._after_head)
        backend.backward = self._then(backend.backward, "backward")
        backend.step = self._then(backend.step, "update")
        torch.cuda.reset_peak_memory_stats(device)

    def _end(self, part: str) -> None:
        self.allocated[part] = max(self.allocated.get(part, 0), torch.cuda.max_memory_allocated(self._device))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def _before_head(self, head: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        del head
        self._end("forward")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._end("head"))

    def _after_head(self, head: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        del head, outputs
        if not inputs[0].requires_grad:
            self._end("head")

    def _then(self, work: Any, part: str) -> Any:
        def both(*arguments: Any) -> Any:
            result = work(*arguments)
            self._end(part)
            return result

        return both

    def device_bytes(self) -> dict[str, int]:
        """What torch's allocator had at most, what the device has in use beside it (CUDA's context, NCCL), and both."""
        free, total = torch.cuda.mem_get_info(self._device)
        outside = total - free - torch.cuda.memory_reserved(self._device)
        return {"reserved": self._reserved, "outside": outside, "both": self._reserved + outside}


def memory_of(
    engine: Engine, settings: EngineSettings, parameters: int, peaks: Peaks | None
) -> dict[str, Any]:
    """The estimate by its moments, the parts of the largest, and on a GPU what was measured, with the ratios of the former to it.

    *tensors* compares the estimate without its allowance with the bytes of tensors, *device* all of it with those of the device.
    """
    size = ModelSize.of_config(engine.config.to_dict(), parameters)
    assert size is not None
    lora = settings.lora
    moments = rank_moments(
        size,
        dtype=settings.dtype,
        zero_stage=settings.zero_stage,
        world=1,
        micro_batch_tokens=settings.micro_batch_tokens,
        engine=settings.engine,
        offload=settings.offload,
        activation_checkpointing=settings.activation_checkpointing,
        adapters=None if lora is None else Adapters(lora.rank, lora.targets),
        accelerator=peaks is not None,
    )
    largest = max(moments.values(), key=lambda one: one.total)
    result: dict[str, Any] = {
        "estimated_bytes": largest.total,
        "estimated_tensors": {name: one.total - one.allowance for name, one in moments.items()},
        "estimated_parts": {name: value for name, value in asdict(largest).items() if value},
    }
    if peaks is None:
        return result
    device = peaks.device_bytes()
    most = max(peaks.allocated.values())
    return result | {
        "peak_bytes": most,
        "measured_tensors": peaks.allocated,
        "measured_device": device,
        "estimate_by_measured": {
            "tensors": (largest.total - largest.allowance) / most,
            "device": largest.total / device["both"],
        },
    }
