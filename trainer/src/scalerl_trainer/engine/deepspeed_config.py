"""DeepSpeed's configuration."""

from __future__ import annotations

from typing import Any

import torch

from scalerl_api.engines import BUCKET_ELEMENTS
from scalerl_trainer.engine.settings import EngineSettings


def overlaps(zero_stage: int, device: torch.device) -> bool:
    """Whether gradients are reduced on a stream beside the backward pass: under ZeRO-3 on CUDA, DeepSpeed's own default.

    DeepSpeed 0.19.8 refuses it below stage 2 with accumulation by the caller. At stage 2 its reductions still hold up the backward pass
    (issue 8364), so a second buffer buys little, and it has had four fixes of wrong gradients (5606, 7805, 7965, 8080). At stage 3
    gradients are copied to the buffer on the reducing stream itself, after what computed them, and each backward pass ends with a wait
    for it: so an accumulation, a norm or an update sees all of them. CPUs have no streams. Read, and run on one GPU, where
    nothing is reduced.
    """
    return zero_stage == 3 and device.type == "cuda"


def deepspeed_config(
    settings: EngineSettings, world: int, parameters: int, device: torch.device
) -> dict[str, Any]:
    bfloat16 = settings.dtype == "bfloat16"
    # DeepSpeed allocates whole buckets, so they should not exceed the model, and needs an even number of elements.
    bucket = min(BUCKET_ELEMENTS, parameters + parameters % 2)
    offload: dict[str, Any] = {}
    if settings.offload != "None":
        offload["offload_optimizer"] = {"device": "cpu"}
    if settings.offload == "OptimizerAndParameters":
        offload["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # At stage 0, ClippingAdamW clips instead.
        "gradient_clipping": settings.max_gradient_norm if settings.zero_stage else 0.0,
        # Stage 1 adds each bfloat16 gradient to the float32 ones during the backward pass and frees it. By default it keeps both
        # until the step: 2 bytes more per parameter.
        "bf16": {"enabled": bfloat16, "check_grad_overflow": bfloat16, "immediate_grad_update": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        # The default is the model's dtype; in bfloat16 a rank's addend would be rounded away.
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": settings.zero_stage,
            "overlap_comm": overlaps(settings.zero_stage, device),
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            **offload,
        },
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
