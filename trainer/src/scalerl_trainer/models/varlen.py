"""Attention by torch's variable-length kernel: several sequences in a row, no mask, no product of tokens of different ones.

The kernel (``torch.nn.attention.varlen``, FlashAttention in torch itself) runs on CUDA devices of capability 8.0 or newer, in
bfloat16, for heads of up to 256. It is registered with transformers as an attention function; transformers makes no mask for a
function that it does not know. The boundaries of sequences travel as the keyword arguments that transformers has for such
kernels, so that recomputing a layer (activation checkpointing) gets them too.

That a whole model keeps the sequences of a row apart is for the engine to check (:meth:`.start_checks.StartChecks.shares_rows`).

Shapes: ``t`` tokens of all rows, one row after the other, ``h`` heads of queries, ``g`` of keys and values, ``d`` size of a head.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from scalerl_trainer.errors import ModelError, first_line
from scalerl_trainer.models.structure import forward_source
from scalerl_trainer.packing import to_device

NAME = "torch_varlen"
"""In ``config._attn_implementation``."""
_LARGEST_HEAD = 256
_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments by which layers ask for what the kernel does not compute."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
"""Of ``config.layer_types``."""


def problem(model: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a causal language model cannot use the kernel on ``device``; None if it can. Ranks of other devices may differ."""
    config = model.config
    if config._attn_implementation not in ("sdpa", NAME):
        return f"model.attention is {config._attn_implementation}"
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype != torch.bfloat16:
        return "it needs bfloat16"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"it needs a device of capability 8.0, not {capability[0]}.{capability[1]}"
    text = config.get_text_config()
    sizes = {_head_size(text)} | {m.head_dim for m in _attentions(model) if hasattr(m, "head_dim")}
    for size in sizes:
        if size % 8 or size > _LARGEST_HEAD:
            return f"it needs heads of a multiple of 8, at most {_LARGEST_HEAD}, not {size}"
    if not passes_boundaries(model):
        return f"layers of {config.model_type} do not pass boundaries of sequences to their attention"
    if unknown := _not_computed(model, text):
        return f"{config.model_type} has {unknown}, which it does not compute"
    try:
        kernel()
    except ImportError as error:
        return f"this torch has none ({error})"
    return None


def failure(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a call of the kernel with heads as of ``config`` fails, forward and backward; None if it works. Not a collective."""
    text = config.get_text_config()
    heads, size = text.num_attention_heads, _head_size(text)
    groups = getattr(text, "num_key_value_heads", None) or heads
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    try:
        ends_s = torch.tensor([0, 1, 8], dtype=torch.int32, device=device)
        states = [torch.ones(8, n, size, **options, requires_grad=True) for n in (heads, groups, groups)]
        out_thd = kernel()(*states, ends_s, ends_s, 7, 7, scale=None, window_size=(-1, 0))
        torch.autograd.grad(out_thd.float().sum(), states)
        right = bool(((out_thd - 1).abs() < 0.01).all())
    except torch.OutOfMemoryError:
        raise
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        return f"a call of it fails: {first_line(error)}"
    return None if right else "the mean of ones is not one by it"


def _head_size(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _attentions(model: Any) -> list[Any]:
    """Modules that call transformers' attention interface."""
    return [module for module in model.modules() if "ALL_ATTENTION_FUNCTIONS" in forward_source(module)]


def _not_computed(model: Any, text: Any) -> str | None:
    """What attention has, by config and source, that the kernel does not compute or that no argument says.

    transformers makes no mask for the kernel, so that a window or chunk which only the mask has would be lost, and no check of short
    sequences would find it.
    """
    layers = _attentions(model)
    sources = [forward_source(layer) for layer in layers]
    types = set(getattr(text, "layer_types", None) or ())
    if other := types - _KNOWN_LAYERS:
        return f"layers of {', '.join(sorted(other))}"
    sizes = {n: v for n, v in text.to_dict().items() if isinstance(v, int) and v > 0 and v is not True}
    if chunks := [name for name in sizes if "chunk" in name and name != "chunk_size_feed_forward"]:
        return str(chunks[0])
    windows = [name for name in sizes if "window" in name and name != "max_window_layers"]
    windowed = windows or "sliding_attention" in types
    if windowed and not all("sliding_window=" in source for source in sources):
        return f"{', '.join(windows) or 'a window'} in its mask alone"
    for name in _UNKNOWN:
        if any(re.search(rf"\b{name}=", source) for source in sources):
            return name
    if any(hasattr(layer, "v_head_dim") for layer in layers):
        return "values of a size of their own"
    return None if all(getattr(layer, "is_causal", True) for layer in layers) else "attention to later tokens"


def passes_boundaries(model: Any) -> bool:
    """Whether keyword arguments of the model reach transformers' attention interface in every layer, by the source."""
    calls = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "ALL_ATTENTION_FUNCTIONS" in forward_source(child)
    ]
    given = forward_source(model.base_model).count("**kwargs") > 1  # in the signature, and to the layers
    return (
        given
        and bool(calls)
        and all(
            re.search(rf"self\.{name}\((?:[^()]|\([^()]*\))*\*\*kwargs", forward_source(parent))
            for parent, name in calls
        )
    )


def use(config: Any) -> None:
    """Make the layers of a model with ``config`` call the kernel."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    config._attn_implementation = NAME


@cache
def kernel() -> Callable[..., torch.Tensor]:
    """torch's ``varlen_attn``. Raises ``ImportError``."""
    from torch.nn.attention.varlen import varlen_attn

    found: Callable[..., Any] = varlen_attn
    # Of torch 2.11 it takes fewer heads of keys as they are, later ones ask for a flag.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(found, enable_gqa=True) if grouped else found


def boundaries(position_ids_bt: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """transformers' keyword arguments, on ``device``, for sequences that begin where a position is 0. Waits for the device of the
    position ids."""
    starts = (position_ids_bt.flatten() == 0).nonzero().flatten()
    ends_s = torch.cat([starts, starts.new_full((1,), position_ids_bt.numel())]).int()
    longest = int(ends_s.diff().max())
    ends_s = to_device(ends_s, device)
    return {
        "cu_seq_lens_q": ends_s,
        "cu_seq_lens_k": ends_s,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: ``query`` ``[B, H, T, D]``, ``key`` and ``value`` ``[B, G, T, D]``; returns ``[B, T, H, D]``.

    Raises ``ModelError`` for a layer that asks for more than the kernel computes.
    """
    asked = [name for name in _UNKNOWN if more.get(name) is not None]
    if attention_mask is not None:
        asked.append("a mask")
    if cu_seq_lens_q is None or max_length_q is None:
        asked.append("no boundaries of sequences")
    if more.get("is_causal") is False or not getattr(module, "is_causal", True):
        asked.append("attention to later tokens")
    if asked:
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which torch's variable-length kernel does not compute: set "
            "model.attention to eager or flash_attention_2, or choose another model"
        )
    rows, heads, width, size = query.shape
    q_thd, k_tgd, v_tgd = (x.transpose(1, 2).reshape(rows * width, -1, size) for x in (query, key, value))
    # A window of n tokens has the token itself and n - 1 before it.
    left = -1 if sliding_window is None else sliding_window - 1
    out_thd = kernel()(
        q_thd,
        k_tgd,
        v_tgd,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(left, 0),
    )
    return out_thd.view(rows, width, heads, size), None
