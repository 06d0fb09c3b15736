"""Loading of a run file with absolute paths, and the checks that need more than its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from scalerl_api.load import SpecError, SpecProblem, load_run, parse_run, to_yaml
from scalerl_api.source import SourcesSpec
from scalerl_api.spec import ModelSpec, RunSpec, ScaleRLRun, TaskSpec
from scalerl_cli.machine import WEIGHTS, declared_memory_problem, memory_problem, vllm_problem
from scalerl_coordinator.tracking.supervisor import missing_package
from scalerl_operator.local.devices import NotEnoughDevices, check, machine_devices
from scalerl_operator.role_containers import plan

if TYPE_CHECKING:
    from scalerl_tasks import PromptSource

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
        *_jsonl_problems(run.spec),
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
    for problem in (head_problem(spec), declared_memory_problem(spec)):
        if problem is not None:
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
    for problem in (vllm_problem(run.spec), memory_problem(run.spec)):
        if problem is not None:
            yield problem


def _jsonl_problems(spec: RunSpec) -> Iterator[SpecProblem]:
    if any(task.jsonl is not None for task in spec.tasks):
        yield from task_problems(spec, answers=0)


def task_problems(spec: RunSpec, *, answers: int) -> Iterator[SpecProblem]:
    """Problems of the tasks: source, held-out set and template, and as many as ``answers`` reference answers of each set."""
    import scalerl_tasks as tasks

    try:
        every = tasks.open_tasks(spec)
    except tasks.EvaluationSetError as error:
        yield SpecProblem(f"spec.{error.field}", str(error.problem))
        return
    except tasks.MixedTaskError as error:
        at = int(error.field.rpartition(".")[2])
        yield _source_problem(f"spec.{error.field}", spec.task.tasks[at].section, error.problem)
        return
    except tasks.TaskError as error:
        yield _source_problem("spec.task", spec.task.tasks[0].section, error)
        return
    for given, opened in zip(every.sections, every.tasks, strict=True):
        if spec.recipe.curriculum.sec is not None and opened.train.difficulty(0) is None:
            yield SpecProblem(
                "spec.recipe.curriculum.sec",
                f"the task's prompts have no difficulty: give each line of {given.field}.jsonl.path one, or use "
                "edgeOfCompetence, which measures it",
            )
        try:
            tasks.open_grading_pool(given.section)
            if answers:
                verifier = tasks.open_verifier(tasks.verifier_config(given.section))
                tasks.check_answers(opened.held_out, verifier, answers)
                tasks.check_answers(opened.train, verifier, answers)
        except tasks.TaskError as error:
            yield _source_problem(f"spec.{given.field}", given.section, error)
    # warmStart.jsonl is one file for all tasks, so it is checked once.
    own = spec.warm_start is not None and spec.warm_start.jsonl is not None
    for opened in every.tasks[: 1 if own else None]:
        yield from _mid_training_problems(spec, opened.train)
    for one in every.sets:
        if problem := every.overlap(one):
            yield SpecProblem(f"spec.{one.field}.task", problem)
        try:
            tasks.open_grading_pool(one.spec)
            if answers:
                verifier = tasks.open_verifier(tasks.verifier_config(one.spec))
                tasks.check_answers(one.prompts, verifier, answers)
        except tasks.VerifierError as error:
            yield SpecProblem(f"spec.{one.field}.task.verifier.name", str(error))


def _source_problem(where: str, task: TaskSpec, error: Exception) -> SpecProblem:
    """The problem of the task at ``where``, with the field that has to be corrected."""
    import scalerl_tasks as tasks

    field = f".{task.source_field}" + (".path" if task.jsonl is not None else "")
    match error:
        case tasks.UnknownTaskError():
            field = ".reasoningGym.name"
        case tasks.ParameterError():
            section = "reasoningGym.parameters" if task.reasoning_gym is not None else "opGraph"
            field = f".{section}" + (f".{error.parameter}" if error.parameter else "")
        case tasks.SplitError():
            field = ".heldOut.size"
        case tasks.TemplateError():
            field = ".prompt.template"
        case tasks.VerifierError():
            field = ".verifier.name"
        case tasks.SourceError() if task.jsonl is None:
            field = ""
    return SpecProblem(where + field, str(error))


def _mid_training_problems(spec: RunSpec, train: PromptSource) -> Iterator[SpecProblem]:
    """The first mid-training prompt that has no solution."""
    import scalerl_tasks as tasks

    if spec.warm_start is None:
        return
    own = spec.warm_start.jsonl
    if own is None:
        try:
            train[0].worked_solution  # noqa: B018
        except ValueError as error:
            yield SpecProblem("spec.warmStart", str(error), "leave it out, or take a task with solutions")
        return
    try:
        source = tasks.JsonlSource(Path(own.path))
        missing = next((p for i in range(len(source)) if not (p := source[i]).solution), None)
    except tasks.TaskError as error:
        yield SpecProblem("spec.warmStart.jsonl.path", str(error))
        return
    if missing is not None:
        yield SpecProblem(
            "spec.warmStart.jsonl.path",
            f"{own.path}: prompt {missing.id!r} has no solution",
            "give each line a solution, or leave jsonl out to train on the task's own",
        )
