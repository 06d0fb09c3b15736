"""The update: batches in, new weights out, on one rank or thousands.

What lives here: the only imports of DeepSpeed in this project (``deepspeed_engine``), the process group
(``distributed``), settings, what a step reports (``stats``), and ``Engine``, which ties packing, policy and loss
together. What never lives here: the form of a loss, advantages (``algo``), HTTP, the coordinator, publishing.

Importing this package costs seconds (torch, DeepSpeed); processes that need no engine do not import it.
"""

from __future__ import annotations

from scalerl_trainer.engine.distributed import Rank, join, leave
from scalerl_trainer.engine.engine import Engine
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.engine.stats import FlatLogprobs, ParameterBucket, StepStats, TrainBatch

__all__ = [
    "Engine",
    "EngineSettings",
    "FlatLogprobs",
    "ParameterBucket",
    "Rank",
    "StepStats",
    "TrainBatch",
    "join",
    "leave",
]
