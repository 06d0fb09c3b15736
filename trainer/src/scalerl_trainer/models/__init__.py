"""The policy: where it comes from, what runs on top of its hidden states, which ones cannot be trained.

What lives here: loading (``load``), making a small model from scratch (``scratch``), the head that turns hidden
states into log-probabilities (``head``), the module that the engine trains (``policy``), what its logits must not
be (``logits``), which of its tensors change their dtype (``precision``), prompts counted in tokens (``tokens``).
What never lives here: ranks, optimizers, DeepSpeed; rewards or losses.

torch and transformers are imported where they are needed, not here: they take seconds, and what prepares a
run has no use for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl_trainer.models.head import LogprobHead
    from scalerl_trainer.models.load import check_tokenizer, load_model, load_tokenizer
    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.scratch import write_scratch

_HOME = {
    "LogprobHead": "head",
    "check_tokenizer": "load",
    "load_model": "load",
    "load_tokenizer": "load",
    "Policy": "policy",
    "write_scratch": "scratch",
}

__all__ = [
    "LogprobHead",
    "Policy",
    "check_tokenizer",
    "load_model",
    "load_tokenizer",
    "write_scratch",
]


def __getattr__(name: str) -> Any:
    """The module of ``name`` is imported when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
