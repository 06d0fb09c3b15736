"""Loading of a run file with absolute paths, and the checks that need more than its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from scalerl_api.load import SpecError, SpecProblem, load_run, parse_run, to_yaml
from scalerl_api.source import SourcesSpec
from scalerl_api.spec import ModelSpec, RunSpec, ScaleRLRun
from scalerl_cli.machine import WEIGHTS, gpu_problem, memory_problem, vllm_problem
from scalerl_cli.output import say
from scalerl_coordinator.tracking.supervisor import missing_package
from scalerl_operator.local.devices import NotEnoughDevices, check, machine_devices
from scalerl_operator.role_containers import plan

Section = TypeVar("Section", bound=SourcesSpec)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load(file: Path, changes: Mapping[str, Any] | None = None) -> ScaleRLRun:
    """Load a run file; paths in it are relative to its own folder.

    changes: values by path in ``spec`` (``recipe.loss``) that replace those of the file; None removes a field.

    Raises:
        SpecError: see :func:`scalerl_api.load.load_run`.
    """
    run = load_run(file)
    if changes:
        documents = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        document = next(d for d in documents if d is not None)
        for path, value in changes.items():
            _replace(document["spec"], path, value, str(file))
        changed = ", ".join(changes)
        run = parse_run(to_yaml(document), f"{file} with another {changed}")
    base = file.resolve().parent
    spec = run.spec
    if spec.model.path is not None:
        model = spec.model.model_copy(update={"path": _absolute(base, spec.model.path)})
        spec = spec.model_copy(update={"model": model})
    task = _with_absolute_path(base, spec.task)
    if task.mix is not None:
        task = task.model_copy(update={"mix": [_with_absolute_path(base, one) for one in task.mix]})
    spec = spec.model_copy(update={"task": task})
    if spec.evaluation.sets is not None:
        sets = [
            one if one.task is None else one.model_copy(update={"task": _with_absolute_path(base, one.task)})
            for one in spec.evaluation.sets
        ]
        spec = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"sets": sets})})
    if spec.warm_start is not None and (own := spec.warm_start.jsonl) is not None:
        own = own.model_copy(update={"path": _absolute(base, own.path)})
        spec = spec.model_copy(update={"warm_start": spec.warm_start.model_copy(update={"jsonl": own})})
    return run.model_copy(update={"spec": spec})


def _replace(spec: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set ``value`` at a dotted path. It replaces the whole previous value, so that a one-of keeps one alternative."""
    *sections, last = path.split(".")
    for name in sections:
        if spec.get(name) is None:
            spec[name] = {}
        spec = spec[name]
        if not isinstance(spec, dict):
            raise SpecError(source, [SpecProblem(f"spec.{path}", f"{name} has no fields")])
    if value is None:
        spec.pop(last, None)
    else:
        spec[last] = value


def _with_absolute_path(base: Path, task: Section) -> Section:
    if task.jsonl is None:
        return task
    jsonl = task.jsonl.model_copy(update={"path": _absolute(base, task.jsonl.path)})
    return task.model_copy(update={"jsonl": jsonl})


def _absolute(base: Path, path: str) -> str:
    return str((base / Path(path).expanduser()).resolve())


def quick_problems(run: ScaleRLRun) -> list[SpecProblem]:
    """Problems that can be found in milliseconds, before any process starts: files, devices, memory.

    Checks that need the libraries of the task are done by the ``prepare`` process, the first of a run, and by
    :func:`task_problems`.
    """
    return [
        *_suspended(run.spec),
        *model_problems(run.spec.model, run.spec),
        *_file_problems(run.spec),
        *machine_problems(run),
    ]


def _suspended(spec: RunSpec) -> Iterator[SpecProblem]:
    if spec.suspend:
        yield SpecProblem("spec.suspend", "a suspended run is not started", "set it to false")


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's ``CPUAttentionBackend`` supports; with any other size, its server exits after it has started."""


def head_problem(spec: RunSpec) -> SpecProblem | None:
    """An unsupported size of the attention heads, where generators run on CPUs and the configuration gives the size.

    Models with another kind of attention (MLA), and configurations with other keys for the size, are not checked.
    """
    if spec.generator.devices > 0:
        return None
    field, size = "spec.model.path", None
    if spec.model.scratch is not None:
        field, size = (
            "spec.model.scratch",
            spec.model.scratch.hidden_size // spec.model.scratch.attention_heads,
        )
    elif spec.model.path is not None:
        config = _json_file(Path(spec.model.path) / "config.json") or {}
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        size = config.get("head_dim")
        if not size and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            size = hidden // heads
        if "kv_lora_rank" in config or "hidden_size_per_head" in config:
            size = None
    if not isinstance(size, int) or size in CPU_HEAD_SIZES:
        return None
    return SpecProblem(
        field,
        f"its attention heads have {size} dimensions each, and vLLM on CPUs supports {', '.join(map(str, CPU_HEAD_SIZES))}",
        "hiddenSize / attentionHeads has to be one of these"
        if spec.model.scratch
        else "take another model, or GPUs",
    )


def model_problems(model: ModelSpec, spec: RunSpec) -> Iterator[SpecProblem]:
    """Problems of the model, and files that are missing in the folder of ``model.path``."""
    if (problem := head_problem(spec)) is not None:
        yield problem
    if model.path is None:
        return
    where, folder = "spec.model.path", Path(model.path)
    if not folder.is_dir():
        yield SpecProblem(
            where, f"{folder}: no such directory", "a relative path starts at the run file's folder"
        )
        return
    config = _json_file(folder / "config.json")
    if config is None:
        yield SpecProblem(
            where, f"{folder}: no readable config.json", "point to a model saved by transformers"
        )
    if not any(folder.glob(WEIGHTS)):
        yield SpecProblem(where, f"{folder}: no weights ({WEIGHTS})", "save the model there as safetensors")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield SpecProblem(
            where, f"{folder}: no tokenizer ({', '.join(_TOKENIZER_FILES)})", "save the tokenizer there too"
        )
        return
    if config is None:
        return
    from scalerl_tasks.errors import TokenizerError
    from scalerl_tasks.text import ModelTokenizer, TokenizerConfig

    try:
        tokenizer = TokenizerConfig.read(folder)
    except TokenizerError as error:
        yield SpecProblem(where, f"{folder}: {error}", "save the tokenizer there again")
        return
    if "eos_token" not in tokenizer.special and not tokenizer.end_token_ids:
        yield SpecProblem(
            where,
            f"{folder}: the tokenizer has no end-of-sequence token, so no completion could end",
            "set eos_token in tokenizer_config.json",
        )
    for one in spec.task.tasks:
        prompt, field = one.section.prompt, f"{one.field}.prompt"
        if prompt.format == "Chat" and not (tokenizer.chat_template or prompt.chat_template):
            yield SpecProblem(
                f"spec.{field}.format",
                f"Chat needs a chat template, and the tokenizer in {folder} has none",
                "use format: Raw, give chatTemplate, or a model with a template",
            )
        elif prompt.chat_template is not None:
            try:
                ModelTokenizer(folder, prompt, field)
            except TokenizerError as error:
                yield SpecProblem(
                    f"spec.{field}.chatTemplate", str(error).removeprefix(f"{field}.chatTemplate: ")
                )
    length = config.get("max_position_embeddings")
    if isinstance(length, int) and model.context_tokens > length:
        yield SpecProblem(
            "spec.model.contextTokens",
            f"{model.context_tokens} is more than the model's {length}",
            "lower it",
        )


def _json_file(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def machine_problems(run: ScaleRLRun) -> Iterator[SpecProblem]:
    """Devices, packages and memory that the run needs and this machine does not have."""
    made = plan(run)
    if made.devices():
        try:
            check(made, machine_devices())
        except NotEnoughDevices as error:
            role = "generator" if run.spec.generator.devices else "trainer"
            yield SpecProblem(f"spec.{role}.devices", str(error))
    for name in run.spec.trackers.asked_for:
        if (missing := missing_package(name)) is not None:
            yield SpecProblem(f"spec.trackers.{name}", missing)
    for problem in (vllm_problem(run.spec), gpu_problem(run.spec), memory_problem(run.spec)):
        if problem is not None:
            yield problem


def _file_problems(spec: RunSpec) -> Iterator[SpecProblem]:
    own = spec.warm_start is not None and spec.warm_start.jsonl is not None
    if own or any(task.jsonl is not None for task in spec.tasks):
        yield from task_problems(spec, answers=False)


def task_problems(spec: RunSpec, *, answers: bool) -> Iterator[SpecProblem]:
    """Problems of the tasks, as the preparation of the run finds them; ``answers``: check the reference answers too."""
    import scalerl_tasks as tasks

    try:
        found = tasks.task_problems(spec, answers=answers, progress=lambda text: say(text, error=True))
    except tasks.GradingError as error:
        yield SpecProblem("spec.task.verifier", str(error))
        return
    for problem in found:
        yield SpecProblem(f"spec.{problem.field}", problem.text)
