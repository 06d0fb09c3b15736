"""The policy: where it comes from, what runs on top of its hidden states, how many bytes its training needs.

What lives here: loading (``load``), making a small model from scratch (``scratch``), the head that turns hidden
states into log-probabilities (``head``), the module that the engine trains (``policy``), sizes (``memory``).
What never lives here: ranks, optimizers, DeepSpeed; rewards or losses.

transformers is imported where it is needed, not here: it takes seconds.
"""

from __future__ import annotations

from scalerl_trainer.models.head import LogprobHead
from scalerl_trainer.models.load import check_tokenizer, load_model, load_tokenizer
from scalerl_trainer.models.memory import MemoryEstimate, estimate_memory_bytes, parameter_count
from scalerl_trainer.models.policy import Policy
from scalerl_trainer.models.scratch import ScratchSettings, make_scratch

__all__ = [
    "LogprobHead",
    "MemoryEstimate",
    "Policy",
    "ScratchSettings",
    "check_tokenizer",
    "estimate_memory_bytes",
    "load_model",
    "load_tokenizer",
    "make_scratch",
    "parameter_count",
]
