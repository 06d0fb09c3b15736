"""The training engine: updates the weights from batches, on any number of ranks.

``training_step`` has ``Engine``, which combines packing (``train_batch``), policy and loss: ``passes`` runs forward and backward,
``weights`` gathers. ``backend`` is the interface to DeepSpeed and FSDP2 (``trainer.engine``): ``deepspeed_backend``, the only importer of
DeepSpeed, and ``fsdp_backend``. ``distributed`` has the process group, ``state`` what a checkpoint has of it, ``stats`` the results. Losses
and advantages are in ``algo``; the engine knows nothing of HTTP, the coordinator or publishing.

Importing this package takes seconds (torch); DeepSpeed is imported with its engine.
"""

from __future__ import annotations

from scalerl_trainer.engine.distributed import Rank, destroy_process_group, init_process_group
from scalerl_trainer.engine.settings import EngineSettings
from scalerl_trainer.engine.state import EngineState
from scalerl_trainer.engine.stats import FlatLogprobs, ParameterBucket, StepStats
from scalerl_trainer.engine.training_step import Engine
from scalerl_trainer.train_batch import PackedShard, TrainBatch

__all__ = [
    "Engine",
    "EngineSettings",
    "EngineState",
    "FlatLogprobs",
    "PackedShard",
    "ParameterBucket",
    "Rank",
    "StepStats",
    "TrainBatch",
    "destroy_process_group",
    "init_process_group",
]
