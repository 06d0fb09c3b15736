"""Finds absurd and contradictory sizes in a model's config, by name, before anything is built from it.

Takes microseconds for any values; what else is wrong with a config is found by transformers (:mod:`.structure`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH: Final = ("hidden_size", "n_embd", "d_model")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(_LAYERS, 10_000),
    **dict.fromkeys((*_WIDTH, "head_dim"), 2**20),
    **dict.fromkeys((*HEADS, *KEY_HEADS, *_EXPERTS, *_CHOSEN), 2**16),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "vocab_size"), 2**24
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"), 2**31),
}
"""Sizes by name, with limits that no model comes near."""
_MAY_BE_ZERO: Final = frozenset((*_EXPERTS, *_CHOSEN))
"""Of dense models among the families of experts."""
_POSITIVE: Final = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rope_theta", "rotary_emb_base",
)  # fmt: skip
_SHARES: Final = ("partial_rotary_factor", "rotary_pct")
_ROPES: Final = ("rope_parameters", "rope_scaling")


def first_of(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, int] | None:
    """The first of these names that the config has as a whole number, with it."""
    return next(((name, config[name]) for name in names if type(config.get(name)) is int), None)


def routed_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of the experts of a token, one for each layer and chosen expert, two with more than 256 experts; 0 of a dense model.

    >>> routed_bytes({"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8})
    384
    """
    layers, experts, chosen = (first_of(config, names) for names in (_LAYERS, _EXPERTS, _CHOSEN))
    if layers is None or experts is None or chosen is None:
        return 0
    return layers[1] * chosen[1] * (1 if experts[1] <= 256 else 2) if experts[1] else 0


def value_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on values that no model has; ``config`` is that of the text model."""
    found = list(_single(config))
    yield from found
    if found:
        return
    width, heads, keys = (first_of(config, names) for names in (_WIDTH, HEADS, KEY_HEADS))
    if width and heads and config.get("head_dim") is None and width[1] % heads[1]:
        yield f"{width[0]} is {width[1]}, no multiple of {heads[0]} ({heads[1]})"
    if heads and keys and heads[1] % keys[1]:
        yield f"{heads[0]} is {heads[1]}, no multiple of {keys[0]} ({keys[1]})"
    experts, chosen = first_of(config, _EXPERTS), first_of(config, _CHOSEN)
    if experts and chosen and experts[1] and not 1 <= chosen[1] <= experts[1]:
        yield f"{chosen[0]} is {chosen[1]}, and there are {experts[1]} experts ({experts[0]})"


def _single(config: Mapping[str, Any]) -> Iterator[str]:
    for name, limit in _SIZES.items():
        value = config.get(name)
        low = 0 if name in _MAY_BE_ZERO else 1
        for one in value if isinstance(value, list) else [value]:  # some families have a size for each layer
            if one is not None and (type(one) is not int or not low <= one <= limit):
                yield f"{name} is {_shown(value)}, not a whole number from {low} to {limit:,}"
                break
    for name in _POSITIVE:
        if (value := config.get(name)) is not None and not _positive(value):
            yield f"{name} is {_shown(value)}, not a positive number"
    for name in _SHARES:
        if (value := config.get(name)) is not None and not (_positive(value) and value <= 1):
            yield f"{name} is {_shown(value)}, not a number above 0 and up to 1"
    for name in _ROPES:
        given = config.get(name)
        parts = given.values() if isinstance(given, Mapping) else ()
        for rope in (given, *(part for part in parts if isinstance(part, Mapping))):
            for key in ("factor", "rope_theta", "original_max_position_embeddings"):
                if (
                    isinstance(rope, Mapping)
                    and (value := rope.get(key)) is not None
                    and not _positive(value)
                ):
                    yield f"{key} of {name} is {_shown(value)}, not a positive number"


def layer_problem(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """More layers in the config than the names in the files have, or None."""
    layers = first_of(config, _LAYERS)
    if layers is None or layers[1] > _SIZES[layers[0]]:  # which value_problems() reports
        return None
    stored: dict[str, set[str]] = {}
    for name in tensors:
        if found := re.match(r"(.*?)\.(\d+)\.", f".{name}"):
            stored.setdefault(found[1], set()).add(found[2])
    most = max(map(len, stored.values()), default=0)
    if not most or layers[1] <= most:
        return None
    return f"{layers[0]} is {layers[1]}, and the weights have {most} layers"


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
