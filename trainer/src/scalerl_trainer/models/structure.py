"""``python -m scalerl_trainer.models.structure DIR``: compares a model folder with the model that transformers makes of it.

The model is built on the meta device and gets tensors without data, of the names and shapes in the headers of its files, by
transformers' own conversion of names. So it takes the seconds of the imports and the memory of none of the weights, and a
checkpoint with the names of its publisher (experts one by one, Pythia's ``embed_out``) is complete.

A process of its own, because its callers do without torch. It prints a JSON object with ``problems``, a list of sentences.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl_api.memory.model_size import Dtype
from scalerl_trainer.errors import ModelError, first_line
from scalerl_trainer.models.files import FLOATS, StoredTensor, named, read_json, stored_tensors
from scalerl_trainer.models.lora import Adapters, Lora
from scalerl_trainer.models.served import registry


def problems(
    folder: Path,
    dtype: Dtype,
    attention: str,
    targets: Sequence[str] | None = None,
    *,
    replay: bool = False,
) -> list[str]:
    """Why the trainer could not load or train the model of ``folder``; empty if it can.

    Args:
        dtype: that the run trains in.
        attention: ``model.attention``.
        targets: ``trainer.lora.targetModules``; None without adapters.
        replay: ``trainer.routerReplay``.
    """
    try:
        model = _meta_model(folder, dtype, attention)
        found = list(_model_problems(model, stored_tensors(folder), dtype))
        if targets is not None:
            Adapters(model, Lora(1, 1, tuple(targets)))
        if replay:
            from scalerl_trainer.models.router_replay import RouterReplay

            RouterReplay(model)
        return found
    except ModelError as error:
        return [str(error)]


def _meta_model(folder: Path, dtype: Dtype, attention: str) -> Any:
    import torch
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    given = read_json(folder / "config.json")
    kind = given.get("model_type")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: unknown types, missing keys, values that a config refuses
        if "auto_map" in given:
            raise ModelError(
                f"model_type {kind!r} needs code from the model's repository (auto_map in config.json), which is never run: "
                "choose a model that transformers has"
            ) from error
        raise ModelError(f"transformers cannot use config.json: {first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model_type {kind!r} is not a causal language model in transformers: choose another model"
        )
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(cls, tuple):
        cls = next((one for one in cls if one.__name__ in (given.get("architectures") or ())), cls[0])
    architectures = given.get("architectures") or [cls.__name__]
    if cls.__name__.lower() not in [str(name).lower() for name in architectures]:
        raise ModelError(
            f"its architecture is {named(map(str, architectures))}, and the causal language model of {kind!r} is "
            f"{cls.__name__}: choose a causal language model"
        )
    served = any(str(name) in registry().served for name in architectures)
    if not (served or cls.is_backend_compatible() or cls._can_set_attn_implementation()):
        raise ModelError(
            f"vLLM cannot serve {named(map(str, architectures))}: it has no class for it, and that of transformers has no "
            "attention that vLLM can replace: choose another model"
        )
    if attention == "flash_attention_2" and not cls._supports_flash_attn:
        raise ModelError(f"transformers has no flash_attention_2 for {kind!r} (model.attention): use sdpa")
    if attention == "sdpa" and not cls._supports_sdpa:
        other = "flash_attention_2 on GPUs, or " if cls._supports_flash_attn else ""
        raise ModelError(
            f"transformers has no sdpa for {kind!r} (model.attention): its layers have terms that the kernel does not compute, "
            f"such as ALiBi, sinks or a recurrence: use {other}another model"
        )
    try:
        with torch.device("meta"):
            # The package of the kernels may be missing where this runs.
            shown = "eager" if attention == "flash_attention_2" else attention
            model = cls._from_config(config, dtype=getattr(torch, dtype), attn_implementation=shown)
    except Exception as error:  # what a model's constructor raises, for sizes that do not fit
        said = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise ModelError(f"transformers cannot make the model of config.json: {said}") from error
    layers = config.get_text_config().num_hidden_layers
    if not served and (replaced := _replaceable_attentions(model)) < layers:
        raise ModelError(
            f"vLLM cannot serve {cls.__name__}: it has no class for it, and in the code of transformers only {replaced} of "
            f"{layers} layers have an attention that vLLM can replace: choose another model"
        )
    return model


def _replaceable_attentions(model: Any) -> int:
    """Modules that call transformers' attention interface, by which vLLM finds them (its ``AttentionFuser``)."""
    return sum("ALL_ATTENTION_FUNCTIONS" in forward_source(module) for module in model.modules())


def forward_source(module: Any) -> str:
    """Source of a module's ``forward``; empty where there is none."""
    try:
        return inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return ""


def _model_problems(model: Any, tensors: Mapping[str, StoredTensor], dtype: Dtype) -> Iterator[str]:
    from scalerl_trainer.models.load import check_weights_are_parameters
    from scalerl_trainer.models.policy import Policy
    from scalerl_trainer.models.precision import check_dtype

    yield from loading_problems(model, tensors)
    for check in (
        lambda: check_weights_are_parameters(model, "this folder"),
        lambda: check_dtype(model, dtype),
        lambda: Policy(model, fp32_head=True),
    ):
        try:
            check()
        except ModelError as error:
            yield str(error)


def loading_problems(model: Any, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Tensors that the model, on the meta device, lacks, does not know or has in another shape."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
    from transformers.modeling_utils import LoadStateDictConfig

    from scalerl_trainer.models.load import unknown_tensors

    own = model.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    stored = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta")
        for name, tensor in tensors.items()
    }
    settings = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model, None, None),
        dtype=torch.bfloat16,
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
    )
    info, _ = convert_and_load_state_dict_in_model(model, stored, settings)
    model.mark_tied_weights_as_initialized(info)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    info.unexpected_keys = set(unknown_tensors(model, info.unexpected_keys))
    model._weight_conversions = None  # those that were used; for the names, all of the model's count

    def origins(name: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes in a complete checkpoint of what becomes this tensor of the model."""
        if name not in expected:
            return {}
        whole = {name: torch.empty(expected[name], device="meta")}
        try:
            return {n: tuple(t.shape) for n, t in revert_weight_conversion(model, whole).items()}
        except Exception:  # not every conversion can be reverted, and not for a tensor by itself
            return {name: expected[name]}

    yield from mismatches(info, origins, {name: tensor.shape for name, tensor in tensors.items()})
    whole_numbers = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype not in FLOATS}
    if whole_numbers:  # of old masks, which are ignored, or of weights
        weights = {n for name in own if own[name].is_floating_point() for n in origins(name)}
        if wrong := [f"{n} ({dtype})" for n, dtype in whole_numbers.items() if n in weights]:
            yield f"{len(wrong)} tensors have a dtype that cannot be trained: {named(wrong)}"


def mismatches(
    info: Any, origins: Callable[[str], Mapping[str, tuple[int, ...]]], stored: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Sentences on transformers' report of a load, with the names in the files where a conversion has others.

    Args:
        origins: names and shapes, in a complete checkpoint, of what becomes a tensor of the model.
        stored: names and shapes in the files.
    """
    missing, unexpected = set[str](), set(info.unexpected_keys)
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    other: set[str] = set()
    found = {name: (tuple(has), tuple(wanted)) for name, has, wanted in info.mismatched_keys}
    for name in {*info.missing_keys, *found, *info.conversion_errors}:
        parts = origins(name)
        lacking = parts.keys() - stored.keys()
        wrong = {
            n: (tuple(stored[n]), shape)
            for n, shape in parts.items()
            if n in stored and tuple(stored[n]) != shape
        }
        surplus = set[str]()
        if parts.keys() != {name}:
            group = _layer(next(iter(parts)))
            surplus = {
                n for n in stored if _layer(n) == group and _sibling(n) in map(_sibling, parts)
            } - parts.keys()
        missing |= lacking
        misshapen |= wrong
        unexpected |= surplus
        if not (lacking or wrong or surplus):
            if name in found:
                misshapen[name] = found[name]
            else:
                other.add(name)
    if missing:
        yield f"{_count(missing)} missing: {named(missing)}"
    if unexpected:
        yield f"{_count(unexpected)} not part of the model: {named(unexpected)}"
    if misshapen:
        shown = [f"{n} is {list(has)}, not {list(wanted)}" for n, (has, wanted) in misshapen.items()]
        yield f"{_count(misshapen)} of the wrong shape: {named(shown)}"
    if other:
        yield f"{_count(other)} not made of the tensors in the files: {named(other)}"


def _sibling(name: str) -> str:
    """A tensor's name without its numbers: equal for the same tensor of all layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _layer(name: str) -> str:
    """The beginning of a tensor's name, up to the number of its layer.

    >>> _layer("model.layers.11.mlp.experts.3.w1.weight")
    'model.layers.11'
    """
    found = re.match(r".*?\.\d+(?=\.|$)", name)
    return found[0] if found else name


def _count(names: Any) -> str:
    return f"{len(names)} tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the problems of a folder; returns 0."""
    parser = argparse.ArgumentParser(prog="scalerl_trainer.models.structure", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--attention", required=True)
    parser.add_argument("--lora", nargs="*", metavar="TARGET")
    parser.add_argument("--router-replay", action="store_true")
    given = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = problems(given.folder, given.dtype, given.attention, given.lora, replay=given.router_replay)
    print(json.dumps({"problems": found}))
    return 0


if __name__ == "__main__":
    gc.disable()  # most of its objects are those of imports, which stay
    sys.exit(main())
