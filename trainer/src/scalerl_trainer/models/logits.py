"""Models whose logits are more than hidden states times the output embedding: they cannot be trained here.

Their log-probabilities would silently differ from the generator's. What a configuration or a list of weights
says of it is known before anything is loaded, and without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}
_BIASES = ("lm_head.bias", "embed_out.bias", "output.bias")


def transformed_logits(setting: Callable[[str], Any]) -> str | None:
    """What a configuration does to its logits, in words; None when nothing. ``setting`` is its getter."""
    for name, neutral in _TRANSFORMS.items():
        value = setting(name)
        if value not in (None, neutral):
            return f"logits with {name} = {value} are not supported"
    return None


def biased_logits(weights: Iterable[str]) -> str | None:
    """Whether one of the weights' names is a bias of the output embedding, in words."""
    for name in weights:
        if name in _BIASES:
            return f"an output embedding with a bias ({name}) is not supported"
    return None
