"""How a model is partitioned in a test: a ZeRO stage of DeepSpeed, or FSDP2, with or without offload."""

from __future__ import annotations

from typing import Any, Final, Literal

Stage = int | Literal["FSDP2", "3 optimizer", "3 offload", "FSDP2 offload"]
SKIPPED: list[tuple[Stage, Literal["float32", "bfloat16"]]] = [
    *((stage, "float32") for stage in (*range(4), "FSDP2")),
    *((stage, "bfloat16") for stage in (1, 2, 3, "FSDP2", "3 offload", "FSDP2 offload")),
]
"""Stages and dtypes in which steps are skipped."""
COPIED: list[tuple[Stage, Literal["float32", "bfloat16"]]] = [
    *((stage, "float32") for stage in (0, 3)),
    *((stage, "bfloat16") for stage in (1, "FSDP2", "3 offload")),
]
"""Stages and dtypes in which the state is copied beside a step; in float32, it is what passes compute with."""
_ENGINES: Final[dict[Stage, dict[str, Any]]] = {
    "FSDP2": {"engine": "FSDP2", "zero_stage": 3},
    "3 optimizer": {"zero_stage": 3, "offload": "Optimizer"},
    "3 offload": {"zero_stage": 3, "offload": "OptimizerAndParameters"},
    "FSDP2 offload": {"engine": "FSDP2", "zero_stage": 3, "offload": "OptimizerAndParameters"},
}


def engine_of(stage: Stage) -> dict[str, Any]:
    """Its settings of the engine."""
    return _ENGINES.get(stage, {"zero_stage": stage})


def trainer_of(stage: Stage) -> dict[str, Any]:
    """Its fields of ``spec.trainer``."""
    return {name.replace("_stage", "Stage"): value for name, value in engine_of(stage).items()}
