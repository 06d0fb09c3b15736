"""The policy model; no ranks, optimizers, DeepSpeed, rewards or losses.

- ``load``: loads a whole model;
- ``weight_stream``: loads one without holding it;
- ``scratch``: writes small, randomly initialised models;
- ``head``: computes log-probabilities from hidden states; ``head_gradients``: sums of its gradients;
- ``policy``: the module that the engine trains;
- ``lora``: adapters of linear layers;
- ``routing``: entropy of routers and loads of experts; ``router_replay``: experts that are given;
- ``logits``: scale and cap of the logits, from the config;
- ``files``: config and headers of a model folder, without torch;
- ``structure``: compares them with the model that transformers makes;
- ``precision``: dtypes;
- ``checkpoint_names``: names and layouts of checkpoint files.

Modules are imported on first use, because torch and transformers take seconds to import and ``prepare`` does not need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl_trainer.models.head import LogprobHead
    from scalerl_trainer.models.load import load_model
    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.scratch import write_scratch
    from scalerl_trainer.models.weight_stream import WeightStream, open_model

_HOME = {
    "LogprobHead": "head",
    "load_model": "load",
    "Policy": "policy",
    "write_scratch": "scratch",
    "WeightStream": "weight_stream",
    "open_model": "weight_stream",
}

__all__ = [
    "LogprobHead",
    "Policy",
    "WeightStream",
    "load_model",
    "open_model",
    "write_scratch",
]


def __getattr__(name: str) -> Any:
    """Import the module of ``name`` on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
