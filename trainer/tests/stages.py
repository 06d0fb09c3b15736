"""How a model is partitioned in a test: a ZeRO stage of DeepSpeed, or FSDP2."""

from __future__ import annotations

from typing import Any, Literal

Stage = int | Literal["FSDP2"]


def engine_of(stage: Stage) -> dict[str, Any]:
    """Its settings of the engine."""
    return {"engine": "FSDP2", "zero_stage": 3} if stage == "FSDP2" else {"zero_stage": stage}


def trainer_of(stage: Stage) -> dict[str, Any]:
    """Its fields of ``spec.trainer``."""
    return {"engine": "FSDP2", "zeroStage": 3} if stage == "FSDP2" else {"zeroStage": stage}
