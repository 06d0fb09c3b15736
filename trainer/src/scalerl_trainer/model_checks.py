"""Checks the folder of a model for everything that would end a run of it later, without torch in this process.

``scalerl validate`` and ``prepare`` call the same function, so what passes one passes the other. The checks are in the order of
their cost: config, weights by their headers, tokenizer (:mod:`.tokenizer_checks`), and last, in a process with torch, the model itself
(:mod:`.models.structure`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalerl_api.load import SpecProblem
from scalerl_api.memory.model_size import Dtype
from scalerl_api.spec import RunSpec
from scalerl_api.wire import MAX_ROUTED_BYTES
from scalerl_trainer.errors import ModelError
from scalerl_trainer.models.config_values import (
    HEADS,
    KEY_HEADS,
    first_of,
    layer_problem,
    routed_bytes,
    value_problems,
)
from scalerl_trainer.models.files import (
    named,
    quantisation,
    read_json,
    stored_tensors,
)
from scalerl_trainer.models.served import serving_problem
from scalerl_trainer.tokenizer_checks import tokenizer_problems

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's ``CPUAttentionBackend`` supports; with any other size, its server exits after it has started."""
STRUCTURE_SECONDS = 600.0
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_ATTENTION_CAPS = ("attn_logit_softcapping", "attention_logit_cap", "conf_attention_logit_cap")


def model_problems(folder: Path, spec: RunSpec, *, structure: bool = True) -> Iterator[SpecProblem]:
    """Problems of the model in ``folder``, which is ``spec.model``'s.

    Args:
        structure: also compare the files with the model that transformers makes of them, where torch is installed and if no
            other check found a problem; it takes seconds.
    """
    where = f"spec.model.{_source(spec)}"
    try:
        if not folder.is_dir():
            wrong = "not a folder" if folder.exists() else "no such directory"
            yield SpecProblem(where, f"{folder}: {wrong}", "a relative path starts at the run file's folder")
            return
        found = [*config_problems(folder, spec), *_file_problems(folder, spec, where)]
    except OSError as error:  # of a folder that may not be read, or a name that is too long
        found = [
            SpecProblem(where, f"{folder}: cannot be read: {error.strerror}", "check path and permissions")
        ]
    yield from found
    if structure and not found and _has_torch():
        lora = spec.trainer.lora
        targets = None if lora is None else tuple(lora.target_modules)
        given = spec.model.dtype, spec.model.attention, targets, spec.trainer.router_replay
        for problem in _structure(folder.resolve(), *given):
            yield SpecProblem(where, f"{folder}: {problem}")


def _source(spec: RunSpec) -> str:
    if spec.model.scratch is not None:
        return "scratch"
    return "path" if spec.model.path is not None else "hub"


# --- config.json -----------------------------------------------------------------------------------------


def config_problems(folder: Path, spec: RunSpec) -> Iterator[SpecProblem]:
    """Problems of the model's config alone; a folder without weights is enough."""
    where = f"spec.model.{_source(spec)}"
    if (folder / "adapter_config.json").is_file():
        yield SpecProblem(
            where,
            f"{folder}: adapter_config.json: this is an adapter, not a model",
            "merge it into its base model and save that",
        )
        return
    try:
        config = read_json(folder / "config.json")
    except ModelError as error:
        yield SpecProblem(where, f"{folder}: {error}", "point to a model saved by transformers")
        return
    text = config.get("text_config")
    settings = {**config, **text} if isinstance(text, Mapping) else config
    unusable = _kind_problem(folder, config, where) or _settings_problem(folder, config, settings, spec)
    if unusable is not None:
        yield unusable
        return
    for name in _ATTENTION_CAPS:
        if settings.get(name) and spec.model.attention == "sdpa":
            yield SpecProblem(
                "spec.model.attention",
                f"the model caps its attention's logits ({name} = {settings[name]}), which sdpa does not compute",
                "use flash_attention_2 on GPUs, or choose another model",
            )
    yield from spec_problems(spec)
    if spec.model.scratch is None:
        yield from head_problems(settings, spec)
    if spec.trainer.router_replay and spec.model.scratch is None:
        yield from replay_problems(routed_bytes(settings))
    for name in _LENGTHS:
        length = settings.get(name)
        if type(length) is int and spec.model.context_tokens > length:
            yield SpecProblem(
                "spec.model.contextTokens",
                f"{spec.model.context_tokens} is more than the model's {length} ({name})",
                "lower it",
            )
            break


def _kind_problem(folder: Path, config: Mapping[str, Any], where: str) -> SpecProblem | None:
    """A kind of checkpoint or model that cannot be trained or served."""
    if method := quantisation(config, folder, {}):
        return _quantised_problem(folder, method, where)
    if kind := _other_kind(config):
        return SpecProblem(where, f"{folder}: {kind}", "choose a causal language model of text")
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return SpecProblem(
            where,
            f"{folder}: config.json has no list of architectures, by which vLLM chooses its own class",
            'add it, such as "architectures": ["LlamaForCausalLM"]',
        )
    if served := serving_problem(names):
        return SpecProblem(where, f"{folder}: {served}", "choose a model that vLLM serves")
    return None


def _quantised_problem(folder: Path, method: str, where: str) -> SpecProblem:
    return SpecProblem(
        where,
        f"{folder}: the checkpoint is quantised ({method}), and only unquantised weights can be trained",
        "take the original model, or save it dequantised",
    )


def _settings_problem(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], spec: RunSpec
) -> SpecProblem | None:
    """A setting in config.json with which no run can use the model; ``settings`` are those of its text model."""
    where = f"spec.model.{_source(spec)}"
    if (own := config.get("_attn_implementation")) not in (None, spec.model.attention):
        return SpecProblem(
            where,
            f"{folder}: config.json sets _attn_implementation = {own!r}, which loaders prefer to model.attention",
            "remove it there",
        )
    if wrong := list(value_problems(settings)):
        return SpecProblem(where, f"{folder}: config.json: {'; '.join(wrong)}", "correct config.json")
    if settings.get("kv_lora_rank"):
        return SpecProblem(
            where,
            f"{folder}: its attention is multi-head latent attention (kv_lora_rank in config.json), whose weights in vLLM cannot "
            "be updated",
            "choose a model with another attention",
        )
    return None


def spec_problems(spec: RunSpec) -> Iterator[SpecProblem]:
    """Problems of ``spec.model`` that no file is needed for."""
    if spec.model.attention == "flash_attention_2" and spec.trainer.devices == 0:
        yield SpecProblem(
            "spec.model.attention",
            "flash_attention_2 needs an accelerator (trainer.devices above 0)",
            "use sdpa",
        )
    scratch = spec.model.scratch
    if scratch is not None:
        sizes = {"hidden_size": scratch.hidden_size, "num_attention_heads": scratch.attention_heads}
        yield from head_problems(sizes, spec)
        if spec.trainer.router_replay:
            yield from replay_problems(scratch.layers * scratch.experts.per_token if scratch.experts else 0)
        prompts = [(one.field, one.section.prompt) for one in spec.task.tasks]
        prompts += [
            (f"evaluation.sets.{at}.task", one.task.prompt)
            for at, one in enumerate(spec.evaluation.sets or ())
            if one.task is not None and one.task.prompt is not None
        ]
        for field, prompt in prompts:
            if prompt.format == "Chat" and prompt.chat_template is None:
                yield SpecProblem(
                    f"spec.{field}.prompt.format",
                    "a scratch model has no chat template",
                    f"use Raw, or give {field}.prompt.chatTemplate",
                )


def replay_problems(of_token: int) -> Iterator[SpecProblem]:
    """Problems of ``trainer.routerReplay``, by :func:`.config_values.routed_bytes`."""
    if not of_token:
        yield SpecProblem(
            "spec.trainer.routerReplay", "the model is dense: no router chooses experts", "leave it out"
        )
    elif of_token > MAX_ROUTED_BYTES:
        yield SpecProblem(
            "spec.trainer.routerReplay",
            f"the experts of a token take {of_token} bytes, more than the {MAX_ROUTED_BYTES} that a group may have",
            "leave it out",
        )


def _other_kind(config: Mapping[str, Any]) -> str | None:
    """Why a model of this kind is not a causal language model of text, else None."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return f"{kind} is an encoder-decoder model"
    media = [
        name
        for name in ("vision_config", "audio_config", "video_config", "vq_config")
        if config.get(name) is not None
    ]
    if media:
        return f"{kind} has a part for other media than text ({media[0]})"
    names = config.get("architectures")
    if isinstance(names, list) and names:
        if any("ConditionalGeneration" in str(name) for name in names):
            return f"its architecture is {named(map(str, names))}, for other inputs than a text"
        if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
            return f"its architecture is {named(map(str, names))}, which has no output of tokens"
    return None


def head_problems(config: Mapping[str, Any], spec: RunSpec) -> Iterator[SpecProblem]:
    """Attention heads that vLLM cannot compute, or cannot divide among the workers of a server."""
    if (size := head_problem(config, spec)) is not None:
        yield size
    heads, keys = (found[1] if (found := first_of(config, names)) else 0 for names in (HEADS, KEY_HEADS))
    most = spec.generator.workers
    # Workers share one head for keys where there are fewer of them.
    numbers = [n for n in range(1, most + 1) if not heads % n and (not keys % n or not n % keys)]
    if numbers[-1] != most:
        yield SpecProblem(
            f"spec.generator.{'devices' if spec.generator.devices else 'cpuWorkers'}",
            f"vLLM cannot divide the model's {heads} attention heads ({keys or heads} for keys) among {most} workers",
            f"choose {' or '.join(map(str, numbers))}",
        )


def head_problem(config: Mapping[str, Any], spec: RunSpec) -> SpecProblem | None:
    """An unsupported size of the attention heads, where generators run on CPUs and the configuration gives the size.

    Models with another kind of attention (MLA), and configurations with other keys for the size, are not checked.
    """
    if spec.generator.devices > 0:
        return None
    hidden, heads = first_of(config, ("hidden_size", "n_embd", "d_model")), first_of(config, HEADS)
    size = config.get("head_dim")
    if not size and hidden and heads and heads[1] > 0:
        size = hidden[1] // heads[1]
    if "kv_lora_rank" in config or "hidden_size_per_head" in config:
        size = None
    if not isinstance(size, int) or size in CPU_HEAD_SIZES:
        return None
    return SpecProblem(
        f"spec.model.{_source(spec)}",
        f"its attention heads have {size} dimensions each, and vLLM on CPUs supports {', '.join(map(str, CPU_HEAD_SIZES))}",
        "hiddenSize / attentionHeads has to be one of these"
        if spec.model.scratch
        else "take another model, or GPUs",
    )


# --- weights ---------------------------------------------------------------------------------------------


def _file_problems(folder: Path, spec: RunSpec, where: str) -> Iterator[SpecProblem]:
    if (folder / "adapter_config.json").is_file():
        return
    try:
        tensors = stored_tensors(folder)
    except ModelError as error:
        yield SpecProblem(where, f"{folder}: {error}", "download it again, or save it there as safetensors")
        tensors = {}
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        return  # config_problems() reports it
    text = config.get("text_config")
    if wrong := layer_problem({**config, **text} if isinstance(text, Mapping) else config, tensors):
        yield SpecProblem(where, f"{folder}: config.json: {wrong}", "download config.json and weights again")
    if tensors and not quantisation(config, folder, {}) and (method := quantisation({}, folder, tensors)):
        yield _quantised_problem(folder, method, where)
    yield from tokenizer_problems(folder, spec, config, where)


# --- the model itself ------------------------------------------------------------------------------------


def _has_torch() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


@functools.cache
def _structure(
    folder: Path, dtype: Dtype, attention: str, targets: tuple[str, ...] | None, replay: bool
) -> tuple[str, ...]:
    """Problems from :mod:`.models.structure`, in a process of its own; that it fails is one."""
    command = [sys.executable, "-m", "scalerl_trainer.models.structure", str(folder)]
    command += ["--dtype", dtype, "--attention", attention]
    command += [] if targets is None else ["--lora", *targets]
    command += ["--router-replay"] if replay else []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=STRUCTURE_SECONDS, check=True
        )
        return tuple(json.loads(done.stdout.splitlines()[-1])["problems"])
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
        return (f"the model could not be checked: {lines[-1]}",)
    except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        return (f"the model could not be checked: {error}",)
