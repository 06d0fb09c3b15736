"""How a model's logits follow from hidden states and output embedding, from its config, without torch.

Other transformations than these are found by comparison with the model's own forward pass (:mod:`.policy`): a model that has
one is refused, because its log-probabilities would silently differ from the generator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """``cap · tanh(scale · x / cap)`` of ``x = hidden · weightᵀ + bias``; without a cap ``scale · x``."""

    scale: float = 1.0
    cap: float | None = None


PLAIN = LogitTransform()


def logit_transform(setting: Callable[[str], Any]) -> LogitTransform:
    """The transformation that a config asks for. ``setting``: getter of the config's fields.

    Fields: ``logit_scale`` (Cohere), ``logits_scaling`` (Granite, a divisor), ``lm_head_multiplier`` (Falcon-H1), and the caps
    of Gemma, RecurrentGemma and xLSTM.

    >>> logit_transform({"logits_scaling": 8.0, "final_logit_softcapping": None}.get)
    LogitTransform(scale=0.125, cap=None)
    """
    scale, cap = 1.0, None
    for name in _FACTORS:
        scale *= _number(setting(name))
    for name in _DIVISORS:
        scale /= _number(setting(name))
    for name in _CAPS:
        if value := setting(name):
            cap = float(value)
    return LogitTransform(scale, cap)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value else 1.0
