"""Loading of a run file with absolute paths, and the checks that need more than its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from scalerl_api.load import SpecError, SpecProblem, load_run, parse_run, to_yaml
from scalerl_api.source import SourcesSpec
from scalerl_api.spec import RunSpec, ScaleRLRun, TaskSpec
from scalerl_cli.machine import memory_problem, vllm_problem
from scalerl_coordinator.tracking.supervisor import missing_package
from scalerl_operator.local.devices import NotEnoughDevices, check, machine_devices
from scalerl_operator.role_containers import plan

if TYPE_CHECKING:
    from scalerl_tasks import PromptSource

Section = TypeVar("Section", bound=SourcesSpec)


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

    Checks that need the libraries of the task or of the model are done by the ``prepare`` process, the first of a run, and by
    ``validate``.
    """
    return [
        *_suspended(run.spec),
        *model_problems(run.spec, structure=False),
        *_jsonl_problems(run.spec),
        *machine_problems(run),
    ]


def _suspended(spec: RunSpec) -> Iterator[SpecProblem]:
    if spec.suspend:
        yield SpecProblem("spec.suspend", "a suspended run is not started", "set it to false")


def model_problems(spec: RunSpec, *, structure: bool) -> Iterator[SpecProblem]:
    """Problems of the model; of one that has to be downloaded or made first, only what the spec says.

    structure: see :func:`scalerl_trainer.model_checks.model_problems`.
    """
    from scalerl_trainer import model_checks

    if spec.model.path is not None:
        yield from model_checks.model_problems(Path(spec.model.path), spec, structure=structure)
    else:
        yield from model_checks.spec_problems(spec)


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
