"""Loads a model from a folder or from the Hugging Face hub.

With ``HF_HUB_OFFLINE=1`` the hub client reads its cache only; the message of ``ModelNotFoundError`` then says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from scalerl_api.memory.model_size import Dtype
from scalerl_trainer.errors import ModelError, ModelNotFoundError, first_line
from scalerl_trainer.models.files import named

_SAVED_BUFFERS = re.compile(r"(attn|attention)\.masked_bias$")
"""What transformers' own patterns (``_keys_to_ignore_on_load_unexpected``) leave out for some families."""


def load_model(
    name_or_path: str, *, revision: str | None = None, dtype: Dtype = "bfloat16", attention: str = "sdpa"
) -> Any:
    """Load a causal language model in ``dtype``, on the CPU, in training mode.

    ``name_or_path`` is a folder if one of that name exists, otherwise a hub repository.

    Raises:
        ModelNotFoundError: the model does not exist, or its files are not a model.
        ModelError: a package that the model needs is missing, tensors are missing, unknown or of another shape, or the model
            has weights that are neither trained nor published.
    """
    import torch
    from transformers import AutoModelForCausalLM

    check_source(name_or_path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            revision=revision or "main",
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=False,
            # Reported by name below, with missing tensors, which transformers draws at random.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except ImportError as error:
        raise ModelError(
            f"the model of {name_or_path} with model.attention: {attention} needs a package that is missing: "
            f"{first_line(error)}"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelNotFoundError(_advice(name_or_path, revision, error)) from error
    check_loaded(model, info, name_or_path)
    check_weights_are_parameters(model, name_or_path)
    model.config.use_cache = False
    return model.train()


def check_loaded(model: Any, info: Mapping[str, Any], name: str) -> None:
    """Raise ``ModelError`` unless every tensor of the model was in its files, in its shape, and every tensor there was used.

    ``info``: transformers' report of the load.
    """
    misshapen = [f"{n} is {list(found)}, not {list(wanted)}" for n, found, wanted in info["mismatched_keys"]]
    kinds = {
        "missing": info["missing_keys"],
        "not part of the model": unknown_tensors(model, info["unexpected_keys"]),
        "of the wrong shape": misshapen,
    }
    wrong = [f"{len(names)} {kind} ({named(names)})" for kind, names in kinds.items() if names]
    if info.get("error_msgs"):
        wrong.append(str(info["error_msgs"][0]))
    if wrong:
        raise ModelError(f"the tensors in the files of {name} are not those of the model: {'; '.join(wrong)}")


def unknown_tensors(model: Any, names: Iterable[str]) -> list[str]:
    """``names`` without those of buffers that the model computes and that earlier releases of transformers saved."""
    buffers = {name for name, _ in model.named_buffers()}
    return [name for name in names if name not in buffers and not _SAVED_BUFFERS.search(name)]


def check_weights_are_parameters(model: Any, name: str) -> None:
    """Raise ``ModelError`` if floating-point buffers are part of the weights (DeepSeek-V3's ``e_score_correction_bias``),
    because publishes and exports contain parameters only."""
    saved = model.state_dict().keys()
    lost = [n for n, buffer in model.named_buffers() if n in saved and buffer.is_floating_point()]
    if lost:
        raise ModelError(
            f"the model of {name} has weights that are buffers and not parameters, which are neither published nor "
            f"exported: {', '.join(lost[:3])}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}; choose another model"
        )


def check_source(name_or_path: str) -> None:
    """Raise ``ModelNotFoundError`` for a folder that does not exist, or is not a model's."""
    path = Path(name_or_path)
    looks_like_path = path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ModelNotFoundError(f"{name_or_path} is not a folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{name_or_path} holds no config.json: is it a model folder?")


def _advice(name: str, revision: str | None, error: Exception) -> str:
    place = name if Path(name).is_dir() else f"{name} at revision {revision or 'main'}"
    if Path(name).is_dir():
        hint = "check the folder's files"
    elif os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        hint = "HF_HUB_OFFLINE is set and it is not in the cache: download it first, or unset the variable"
    else:
        hint = "check name, revision, network and access token"
    return f"cannot load the model of {place}: {first_line(error)}; {hint}"
