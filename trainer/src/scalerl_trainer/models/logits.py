"""Detects models whose logits are not hidden states times the output embedding, from config and weights, without torch.

Such models are not supported, because their log-probabilities would silently differ from the generator's.
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
    """A message if the config scales or caps the logits, else None. ``setting``: getter of the config's fields."""
    for name, neutral in _TRANSFORMS.items():
        value = setting(name)
        if value not in (None, neutral):
            return f"logits with {name} = {value} are not supported"
    return None


def biased_logits(weights: Iterable[str]) -> str | None:
    """A message if one of these weight names is a bias of the output embedding, else None."""
    for name in weights:
        if name in _BIASES:
            return f"an output embedding with a bias ({name}) is not supported"
    return None
