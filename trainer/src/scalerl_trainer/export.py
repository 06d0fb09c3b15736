"""Exports Hugging Face models: safetensors, config, tokenizer and chat template in one folder, atomically.

``python -m scalerl_trainer.export DIR --to PATH`` (``scalerl export`` runs it) exports a checkpoint, on any machine with
the run's directory: no accelerator, no process group, one parameter in memory at a time (of a run with adapters: the base model). Tensors have the names and layouts
of the base model's files (:mod:`.models.checkpoint_names`). While a run trains,
:mod:`.exporter` exports the model of each evaluation.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scalerl_api.load import SpecError, load_accepted_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_trainer.checkpoints.disk import flush
from scalerl_trainer.checkpoints.engine_files import SavedState
from scalerl_trainer.checkpoints.manifest import CheckpointError
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.errors import EngineError, ModelError, TrainerError
from scalerl_trainer.models.checkpoint_names import CheckpointNames, skeleton, stored_names
from scalerl_trainer.models.files import weights_digest
from scalerl_trainer.models.load import load_model
from scalerl_trainer.models.lora import Lora, adapter_config, adapter_names, merged, peft_name
from scalerl_trainer.tensor_files import TensorInfo, write_tensors

log = logging.getLogger("scalerl_trainer.export")

STAGED = ".tmp-"
SHARD_BYTES = 5 * 10**9
"""Maximum size of a weights file, unless one tensor is larger, as hubs and loaders expect."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's
_SOURCES = ("*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_NOT_COPIED = {"prepared.json", _INDEX, "config.json"}


class ExportError(TrainerError):
    """The checkpoint cannot be exported, or the target is invalid."""


def write_model(
    target: Path,
    base_model: Path,
    infos: Sequence[TensorInfo],
    tensors: Iterable[torch.Tensor],
    spec: RunSpec,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder ``target`` atomically, with :func:`stage_model` and :func:`commit_model`."""
    commit_model(stage_model(target, base_model, infos, tensors, spec, shard_bytes=shard_bytes), target)


def stage_model(
    target: Path,
    base_model: Path,
    infos: Sequence[TensorInfo],
    tensors: Iterable[torch.Tensor],
    spec: RunSpec,
    *,
    shard_bytes: int = SHARD_BYTES,
    staging: Path | None = None,
) -> Path:
    """Write the model into a folder in ``staging``, by default beside ``target``, and return that folder.

    ``tensors`` are in the order of ``infos``, which have the names and shapes of the base model's files; tied tensors appear
    once. All other files are ``base_model``'s. The config has the run's dtype and, if ``recipe.fp32Logits`` includes the
    generator, vLLM's ``head_dtype``, so that ``vllm serve`` computes the same as the run's generators.

    With ``trainer.lora.export: Adapter``, the folder has the tokenizer and the adapters, which ``infos`` and ``tensors`` then are.

    Raises:
        OSError: disk full, …; the staging folder is removed.
    """
    staged = (staging or target.parent) / f"{STAGED}{target.name}-{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir()
        adapter = exports_adapter(spec)
        if adapter is None:
            _write_weights(staged, infos, iter(tensors), shard_bytes)
        else:
            write_tensors(staged / _ADAPTER, infos, tensors, {"format": "pt"})
        for file in sorted({f for pattern in _SOURCES for f in base_model.glob(pattern) if f.is_file()}):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, staged / file.name)
        if adapter is None:
            config = json.loads((base_model / "config.json").read_text(encoding="utf-8"))
            _write_json(staged / "config.json", exported_config(config, spec))
        else:
            hub, names = spec.model.hub, [info.name for info in infos]
            base = (spec.model.path or str(base_model), None) if hub is None else (hub.name, hub.revision)
            _write_json(staged / _ADAPTER_CONFIG, adapter_config(adapter, names, *base))
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return staged


def commit_model(staged: Path, target: Path) -> None:
    """Flush ``staged`` and rename it to ``target``, replacing an existing folder.

    Raises:
        OSError: the staging folder is removed.
    """
    old = staged.with_name(f"{STAGED}old-{target.name}-{os.getpid()}")
    try:
        for path in [*staged.iterdir(), staged]:
            flush(path)
        if target.exists():
            target.rename(old)
        staged.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def exports_adapter(spec: RunSpec) -> Lora | None:
    """Settings of the adapters that exports contain; None if they contain models."""
    lora = spec.trainer.lora
    return Lora.of(spec) if lora is not None and lora.exports_adapters else None


def exported_config(config: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """``config.json`` of the base model with the dtypes of the exported weights."""
    kept = {name: value for name, value in config.items() if name not in ("torch_dtype", "head_dtype")}
    kept["dtype"] = spec.model.dtype
    if spec.recipe.fp32_logits in ("Both", "Generator") and spec.model.dtype != "float32":
        kept["head_dtype"] = "float32"
    return kept


def _write_weights(
    directory: Path, infos: Sequence[TensorInfo], tensors: Iterator[torch.Tensor], shard_bytes: int
) -> None:
    shards: list[list[TensorInfo]] = [[]]
    for info in infos:
        if shards[-1] and sum(i.bytes for i in shards[-1]) + info.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(info)
    names = [_WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        _write_json(
            directory / _INDEX,
            {
                "metadata": {"total_size": sum(info.bytes for info in infos)},
                "weight_map": {
                    info.name: name for name, shard in zip(names, shards, strict=True) for info in shard
                },
            },
        )
    for name, shard in zip(names, shards, strict=True):
        write_tensors(directory / name, shard, islice(tensors, len(shard)), {"format": "pt"})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# --- from a checkpoint -----------------------------------------------------------------------------------


def copy_run_file(paths: RunPaths) -> None:
    """Copy the run's spec into its directory: an export from the volume needs it, and on a cluster it is in a ConfigMap."""
    kept = RunPaths(paths.root).run_file
    if paths.run_file == kept:
        return
    staged = kept.with_name(f"{STAGED}{kept.name}")
    try:
        shutil.copyfile(paths.run_file, staged)
        staged.replace(kept)
    except OSError as error:
        log.error("%s could not be written, `scalerl export` of this volume needs it: %s", kept, error)


def export_checkpoint(paths: RunPaths, target: Path, step: int | None = None) -> int:
    """Export checkpoint ``step`` (None: the newest) to ``target``; returns the step.

    Raises:
        ExportError: ``target`` exists, or the checkpoint is missing or damaged.
        SpecError: the run's spec cannot be parsed; it is not validated.
        OSError: ``target`` cannot be written.
    """
    if target.exists():
        raise ExportError(f"{target} exists already: choose a new folder, or remove it")
    store = CheckpointStore(paths, keep=1)
    steps = store.steps()
    if not steps:
        raise ExportError(f"{paths.checkpoints} holds no checkpoint")
    if step is None:
        step = steps[0]
    if step not in steps:
        kept = ", ".join(map(str, sorted(steps)))
        raise ExportError(
            f"{paths.checkpoints} holds no checkpoint of step {step}, only of {kept}: choose one of them"
        )
    try:
        store.verify(store.manifest(step))
        saved = SavedState(store.directory(step))
    except (CheckpointError, EngineError) as error:
        raise ExportError(str(error)) from error
    spec = load_accepted_run(paths.run_file).spec
    infos, tensors = _saved_tensors(paths, spec, saved)
    write_model(target, paths.base_model, infos, tensors, spec)
    return step


def _saved_tensors(
    paths: RunPaths, spec: RunSpec, saved: SavedState
) -> tuple[list[TensorInfo], Iterator[torch.Tensor]]:
    """What an export of a checkpoint contains. Raises ``ExportError``."""
    dtype = getattr(torch, spec.model.dtype)
    parameters = saved.header.parameters
    if exports_adapter(spec) is not None:
        adapters = [TensorInfo(peft_name(name), dtype, tuple(shape)) for name, shape in parameters.items()]
        return adapters, (saved.whole(name) for name in parameters)
    weights: dict[str, torch.Tensor] = {}
    try:
        if saved.header.lora is not None:  # the checkpoint has adapters only
            saved.check_base(weights_digest(paths.base_model))
            model = load_model(str(paths.base_model), dtype=spec.model.dtype, attention=spec.model.attention)
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            parameters = {name: list(weight.shape) for name, weight in weights.items()}
        shapes = [(name, tuple(shape)) for name, shape in parameters.items()]
        names = CheckpointNames(skeleton(paths.base_model), shapes, stored_names(paths.base_model))
    except (EngineError, ModelError) as error:
        raise ExportError(str(error)) from error

    def whole(name: str) -> torch.Tensor:
        if saved.header.lora is None:
            return saved.whole(name)
        a, b = adapter_names(name)
        if a not in saved.header.parameters:
            return weights[name]
        # In the model's dtype first, as publishes and the exporter have them.
        a_ri, b_or = (saved.whole(adapter).to(dtype) for adapter in (a, b))
        return merged(weights[name], a_ri, b_or, saved.header.lora.scale, dtype)

    infos = [TensorInfo(n, dtype, shape) for group in names.groups for n, shape in group.tensors.items()]
    return infos, (
        tensor
        for group in names.groups
        for tensor in names.convert(group, {name: whole(name) for name in group.parameters})
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if the target cannot be written, 2 for bad input."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="scalerl export", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="PATH", help="a folder that does not exist yet"
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint (default: the newest)")
    arguments = parser.parse_args(argv)
    try:
        step = export_checkpoint(RunPaths(arguments.directory), arguments.to, arguments.step)
    except (ExportError, SpecError) as problem:
        log.error("%s", problem)
        return 2
    except OSError as problem:
        log.error("%s: %s", problem.filename or arguments.to, problem.strerror or problem)
        return 1
    log.info("step %d is in %s", step, arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
