"""Whether each rank's accelerator has the memory that a rank needs: ``prepare`` sees the GPUs of one machine, or what the spec declares.
And what to do where it, or the host, had not."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from scalerl_api.memory.model_size import ModelSize
from scalerl_api.memory.trainer_rank import trainer_rank_memory
from scalerl_api.spec import RunSpec
from scalerl_trainer.errors import EngineError, first_line
from scalerl_trainer.models.files import read_json, stored_tensors
from scalerl_trainer.ranks import Ranks

REPORTED: Final = 0.98
"""Least share of a GPU's memory, as ``nvidia-smi`` reports it, that CUDA reports: a GPU that ``prepare`` accepts is not refused here."""
_GIB: Final = 2.0**30


def check_device_memory(ranks: Ranks, device: torch.device, folder: Path, spec: RunSpec) -> None:
    """Check the memory of all ranks' accelerators. A collective, without accelerators too.

    Args:
        folder: of the model, of which headers are read.

    Raises:
        EngineError: on all ranks, if an accelerator is too small; the message names each with its rank.
    """
    card = None
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        card = (found.name, found.total_memory)
    cards = ranks.all_gather(card, tuple[str, int] | None)  # type: ignore[arg-type]
    if not any(cards):
        return
    elements = sum(tensor.elements for tensor in stored_tensors(folder).values())
    size = ModelSize.of_config(read_json(folder / "config.json"), elements)
    if size is None:
        return
    need = trainer_rank_memory(size, spec)
    small = [
        f"rank {rank} ({one[0]}) has {one[1] / _GIB:.1f} GiB"
        for rank, one in enumerate(cards)
        if one is not None and one[1] < REPORTED * need.total
    ]
    if small:
        raise EngineError(
            f"trainer: a rank needs about {need}, and {', '.join(small)}: place all ranks on GPUs with that memory "
            "(trainer.podTemplate), set trainer.deviceMemory to that of the smallest, or reduce trainer.microBatchTokens"
        )


def out_of_memory(error: Exception) -> str:
    """What failed and what to do, if ``error`` is of an allocation; empty for another error."""
    text = first_line(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(
        error
    ):  # NCCL has it in a later line
        place, advice = (
            "the accelerator",
            "lower trainer.microBatchTokens, set trainer.activationCheckpointing",
        )
        advice += ", raise trainer.zeroStage, or set trainer.offload"
    elif isinstance(error, MemoryError) or "can't allocate memory" in text:
        place, advice = "this rank's host", "give it more memory, or use more trainer.replicas"
        advice += ", or less of trainer.offload"
    else:
        return ""
    return (
        f"{place} is out of memory: {advice}. scalerl validate --memory prints what a rank needs. All ranks restart from the last "
        f"checkpoint ({text})"
    )
