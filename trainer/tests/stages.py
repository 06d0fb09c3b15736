"""How a model is partitioned in a test: a ZeRO stage of DeepSpeed, or FSDP2, with or without offload."""

from __future__ import annotations

from typing import Any, Final, Literal

Stage = int | Literal["FSDP2", "3 offload", "FSDP2 offload"]
_ENGINES: Final[dict[Stage, dict[str, Any]]] = {
    "FSDP2": {"engine": "FSDP2", "zero_stage": 3},
    "3 offload": {"zero_stage": 3, "offload": "OptimizerAndParameters"},
    "FSDP2 offload": {"engine": "FSDP2", "zero_stage": 3, "offload": "OptimizerAndParameters"},
}


def engine_of(stage: Stage) -> dict[str, Any]:
    """Its settings of the engine."""
    return _ENGINES.get(stage, {"zero_stage": stage})


def trainer_of(stage: Stage) -> dict[str, Any]:
    """Its fields of ``spec.trainer``."""
    return {name.replace("_stage", "Stage"): value for name, value in engine_of(stage).items()}
