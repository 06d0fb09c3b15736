"""``python -m scalerl_trainer.prepare``: the run's model into ``DIR/model``, checked, before anything starts.

One shot, all or nothing, and nothing to do when it was done before. What a role would find out only
minutes later is found out here: a task that cannot be opened, a model that is not there, a tokenizer
without an end token, a context that is too long, more parameters than memory. Exit code 0, or 2 with one
line that names the field.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scalerl_api.load import SpecError, load_run
from scalerl_api.paths import RunPaths
from scalerl_api.process import EnvironmentProblem, ProcessEnvironment
from scalerl_api.spec import ModelSpec, RunSpec
from scalerl_tasks import Task, TaskError, open_task
from scalerl_trainer.errors import ModelError, ModelTooLargeError, TokenizerError, TrainerError
from scalerl_trainer.models.memory import BYTES, estimate_memory_bytes

log = logging.getLogger("scalerl_trainer.prepare")

MARK = "prepared.json"
TOKENIZER_TEXTS = 2000
"""Texts of the training split that a scratch tokenizer is trained on."""
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_GIB = 2.0**30


class PrepareError(TrainerError):
    """The run's model cannot be made ready; names the field."""


def main() -> int:
    """The process: 0, or 2 for bad input."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        environment = ProcessEnvironment.read()
        spec = load_run(environment.paths.run_file).spec
        prepare(environment.paths, spec, one_machine="KUBERNETES_SERVICE_HOST" not in os.environ)
    except (EnvironmentProblem, SpecError, PrepareError, TaskError) as problem:
        log.error("%s", problem)
        return 2
    except OSError as problem:
        log.error("%s: %s", problem.filename or "file", problem.strerror)
        return 2
    return 0


def prepare(paths: RunPaths, spec: RunSpec, *, one_machine: bool) -> None:
    """``spec.model`` into ``paths.base_model``.

    ``one_machine``: all roles share this machine's memory.

    Raises:
        PrepareError: the model cannot be used; what, and what to do.
        TaskError: neither can the task.
        OSError: the folder cannot be written.
    """
    task = open_task(spec.task)
    identity = _identity(spec, task)
    target = paths.base_model
    if target.exists():
        _check_prepared(target, identity)
        log.info("%s is ready", target)
        return
    if spec.model.scratch is not None:
        _require_scratch_memory(spec, one_machine)
    aside = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _fill(aside, spec, task)
        _check(aside, spec, one_machine)
        (aside / MARK).write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
        for file in [*aside.iterdir(), aside]:
            _flush(file)
        aside.rename(target)
        _flush(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("%s is made", target)


def _identity(spec: RunSpec, task: Task) -> str:
    """What the prepared model depends on."""
    model = spec.model.model_dump(mode="json", exclude={"attention"})
    if spec.model.scratch is not None:
        model["task"], model["seed"] = task.train.digest, spec.seed
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def _check_prepared(target: Path, identity: str) -> None:
    try:
        found = json.loads((target / MARK).read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrepareError(
            f"model: {target} exists but was not made by prepare ({error}); use another run directory"
        ) from error
    if found != identity:
        raise PrepareError(
            f"model: {target} was made from another model, task or seed; a run keeps its model: use another run "
            "directory, or put the spec back"
        )


# --- the three sources -----------------------------------------------------------------------------------


def _fill(directory: Path, spec: RunSpec, task: Task) -> None:
    model = spec.model
    if model.scratch is not None:
        from scalerl_trainer.models.scratch import write_scratch

        texts = _texts(task, with_solutions=spec.warm_start is not None)
        try:
            write_scratch(
                directory,
                model.scratch,
                texts,
                seed=spec.seed,
                dtype=model.dtype,
                context_tokens=model.context_tokens,
            )
        except TokenizerError as error:
            raise PrepareError(f"model.scratch.vocabularySize: {error}") from error
    elif model.path is not None:
        source = Path(model.path)
        if not source.is_dir():
            raise PrepareError(f"model.path: {source} is not a folder")
        _bring(source, directory, "model.path")
    elif model.hub is not None:
        _bring(_download(model), directory, "model.hub")


def _texts(task: Task, with_solutions: bool) -> Iterator[str]:
    for index in range(min(TOKENIZER_TEXTS, len(task.train))):
        prompt = task.train[index]
        yield task.render(prompt).user
        if with_solutions:
            yield prompt.worked_solution
        elif prompt.answer:
            yield prompt.answer


def _download(model: ModelSpec) -> Path:
    import huggingface_hub

    hub = model.hub
    assert hub is not None
    try:
        folder: str = huggingface_hub.snapshot_download(
            hub.name, revision=hub.revision, allow_patterns=list(_PATTERNS)
        )
    except Exception as error:  # the client raises from several trees: its own, requests' and OSError
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        advice = (
            "HF_HUB_OFFLINE is set and it is not in the cache: download it first, or unset the variable"
            if offline
            else "check name, revision, network and access token"
        )
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PrepareError(f"model.hub: {hub.name} at revision {hub.revision}: {reason}; {advice}") from error
    return Path(folder)


def _bring(source: Path, directory: Path, field: str) -> None:
    """Link the files where the file system allows it, else copy."""
    files = sorted({f for pattern in _PATTERNS for f in source.glob(pattern) if f.is_file()})
    names = {f.name for f in files}
    if "config.json" not in names:
        raise PrepareError(f"{field}: {source} holds no config.json: is it a model folder?")
    if not any(name.endswith(".safetensors") for name in names):
        raise PrepareError(f"{field}: {source} holds no *.safetensors; convert the weights to safetensors")
    for file in files:
        if file.name == MARK:
            continue
        target = directory / file.name
        try:
            os.link(file.resolve(), target)
        except OSError:
            shutil.copyfile(file, target)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- checks ----------------------------------------------------------------------------------------------


def _check(directory: Path, spec: RunSpec, one_machine: bool) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < spec.model.context_tokens:
        raise PrepareError(
            f"model.contextTokens: {spec.model.context_tokens} asked for, the model was made for {longest}"
        )
    chat = spec.task.prompt.format == "Chat"
    if spec.model.scratch is not None:
        if chat:
            raise PrepareError("task.prompt.format: a scratch model has no chat template; use Raw")
        return
    from scalerl_trainer.models.load import load_tokenizer

    try:
        load_tokenizer(str(directory), chat=chat)
    except TokenizerError as error:
        raise PrepareError(f"{'task.prompt.format' if chat else 'model'}: {error}") from error
    except ModelError as error:
        raise PrepareError(f"model: {error}") from error
    _require_memory("model", config, _stored_parameters(directory), spec, one_machine)


def _require_scratch_memory(spec: RunSpec, one_machine: bool) -> None:
    """Before the weights are made, which would need the memory already."""
    from scalerl_trainer.models.scratch import llama_config, parameter_count

    model = spec.model.scratch
    assert model is not None
    config = llama_config(model, model.vocabulary_size, spec.model.dtype, spec.model.context_tokens)
    count = parameter_count(model, model.vocabulary_size)
    _require_memory("model.scratch", config, count, spec, one_machine)


def _require_memory(field: str, config: dict[str, Any], count: int, spec: RunSpec, one_machine: bool) -> None:
    """Only what runs on CPUs: how much memory an accelerator has is not known here."""
    available = memory_bytes()
    ranks, servers = spec.trainer.replicas, spec.generator.replicas
    text = config.get("text_config", config)
    sizes = {
        key: text.get(key) for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    }
    needs: list[tuple[int, str]] = []
    if spec.trainer.devices == 0 and all(isinstance(size, int) for size in sizes.values()):
        rank = estimate_memory_bytes(
            SimpleNamespace(**sizes),
            dtype=spec.model.dtype,
            zero_stage=spec.trainer.zero_stage,
            world=ranks,
            micro_batch_tokens=spec.micro_batch_tokens,
            activation_checkpointing=spec.trainer.activation_checkpointing,
            count=count,
        )
        try:
            rank.require(available, "one trainer rank")
        except ModelTooLargeError as error:
            raise PrepareError(f"{field}: {count / 1e6:,.0f} M parameters: {error}") from error
        needs.append((ranks * rank.total, f"{ranks} trainer ranks {ranks * rank.total / _GIB:.1f}"))
    if spec.generator.devices == 0:
        server = count * BYTES[spec.model.dtype]
        needs.append((servers * server, f"{servers} servers {servers * server / _GIB:.1f}"))
    if one_machine and sum(need for need, _ in needs) > available:
        raise PrepareError(
            f"{field}: {count / 1e6:,.0f} M parameters need about {sum(n for n, _ in needs) / _GIB:.1f} GiB on this "
            f"machine ({', '.join(text for _, text in needs)}), there are {available / _GIB:.1f}: choose a smaller "
            "model, fewer replicas, a higher trainer.zeroStage, or accelerators"
        )


def _stored_parameters(directory: Path) -> int:
    """Elements of all tensors in the folder's safetensors, from their headers."""
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total


def memory_bytes() -> int:
    """What this process may use: the machine's memory, or its container's limit."""
    readers: list[Callable[[], int]] = [
        lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        lambda: int(Path("/sys/fs/cgroup/memory.max").read_text()),
    ]
    limits = []
    for read in readers:
        try:
            limits.append(read())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return min(limits)


if __name__ == "__main__":
    sys.exit(main())
