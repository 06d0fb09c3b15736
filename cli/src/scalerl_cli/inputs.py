"""Loading of a run file with absolute paths, and the checks that need more than its fields."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from scalerl_api import plugins
from scalerl_api.environment import EnvironmentSpec
from scalerl_api.environment_server import EnvironmentServerSpec
from scalerl_api.load import SpecError, SpecProblem, data_paths, load_run, parse_run, to_yaml
from scalerl_api.source import ProblemSpec, PromptSpec
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_api.spec_warnings import past_deadline
from scalerl_cli.machine import declared_memory_problem, gpu_problem, memory_problem, vllm_problem
from scalerl_cli.output import echo
from scalerl_coordinator.tracking.supervisor import missing_package
from scalerl_lifecycle.role_containers import plan
from scalerl_local.devices import NotEnoughDevices, check, machine_devices

Section = TypeVar("Section", bound=BaseModel)


def load(file: Path, changes: Mapping[str, Any] | None = None) -> ScaleRLRun:
    """Load a run file; paths in it are relative to its own folder.

    Args:
        changes: values by path in ``spec`` (``recipe.loss``) that replace those of the file; None removes a field.

    Raises:
        SpecError: see :func:`scalerl_api.load.load_run`.
    """
    run = load_run(file)
    if changes:
        documents = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        document = next(d for d in documents if d is not None)
        for path, value in changes.items():
            replace_value(document["spec"], path, value, str(file))
        run = parse_run(to_yaml(document), f"{file} with another {', '.join(changes)}")
    return _placed(file.resolve().parent, run)


def replace_value(spec: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set ``value`` at a dotted path. It replaces the whole previous value, so that a one-of keeps one alternative."""
    *sections, last = path.split(".")
    for name in sections:
        spec[name] = {} if spec.get(name) is None else spec[name]
        spec = spec[name]
        if not isinstance(spec, dict):
            raise SpecError(source, [SpecProblem(f"spec.{path}", f"{name} has no fields")])
    if value is None:
        spec.pop(last, None)
    else:
        spec[last] = value


def _placed(base: Path, section: Section) -> Section:
    """A part of a run file with absolute paths: all fields ``path`` and ``files`` name files of this machine, and so do words of
    ``environment.command`` for which there is a file."""
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = new = getattr(section, name)
        if name == "path" and value is not None:
            new = _absolute(base, value)
        elif name == "files" and value is not None:
            new = [_absolute(base, one) for one in value]
        elif name == "command" and isinstance(section, EnvironmentServerSpec):
            # Not resolved: the Python of a virtual environment is a link.
            new = [str(base / word) if os.path.isfile(base / word) else word for word in value]
        elif name == "parameters" and isinstance(section, EnvironmentSpec) and section.has_tools:
            new = _with_paths(base, value)
        elif isinstance(value, BaseModel):
            new = _placed(base, value)
        elif isinstance(value, list):
            new = [_placed(base, one) if isinstance(one, BaseModel) else one for one in value]
        if new != value:
            changed[name] = new
    return section.model_copy(update=changed) if changed else section


def _with_paths(base: Path, value: Any) -> Any:
    """Parameters in which each ``path`` is absolute."""
    if isinstance(value, dict):
        return {
            name: _absolute(base, one) if name == "path" and isinstance(one, str) else _with_paths(base, one)
            for name, one in value.items()
        }
    return [_with_paths(base, one) for one in value] if isinstance(value, list) else value


def _absolute(base: Path, path: str) -> str:
    return os.path.realpath(base / os.path.expanduser(path))


def problems(
    run: ScaleRLRun, *, thorough: bool, machine: bool = True, files: bool = True
) -> list[SpecProblem]:
    """Problems of a run before it starts, each once. Of a hub, data sets are downloaded, models are not.

    Args:
        thorough: with the checks that take seconds to minutes (classes of the model, reference answers, parameters of plugins),
            which the ``prepare`` process of a run repeats; else what milliseconds can find.
        machine: whether this machine is to run it.
        files: whether paths of the spec are those of this machine.
    """
    spec = tasks = run.spec
    if not files and spec.warm_start is not None and spec.warm_start.own:
        # Its problems are in files of the pods; the other tasks can be checked here.
        tasks = spec.model_copy(update={"warm_start": None})
    late = past_deadline(spec, time.time()) if thorough else None
    suspended = SpecProblem("spec.suspend", "a suspended run is not started", "set it to false")
    found = [
        *([] if late is None else [late]),
        *([suspended] if spec.suspend and not thorough else []),
        *(plugin_problems(spec, load=thorough) if files else ()),
        *(model_problems(spec, structure=thorough) if files or spec.model.path is None else ()),
        *(task_problems(tasks, answers=thorough) if _reads_tasks(tasks, thorough, files) else ()),
        *(machine_problems(run) if machine else ()),
    ]
    return list(dict.fromkeys(found))


def _reads_tasks(spec: RunSpec, thorough: bool, files: bool) -> bool:
    """Whether the tasks can be read here: of files of pods none, of a hub only thoroughly, and no more than files in milliseconds."""
    if not files:
        # A data set of a hub may be too large to be read here.
        return not any(path is not None for path in data_paths(spec).values()) and not spec.has_dataset
    return thorough or any(source.paths and not source.is_table for source in spec.prompt_sources)


def plugin_problems(spec: RunSpec, *, load: bool = False) -> Iterator[SpecProblem]:
    """Names of the spec that no package installed here has; ``load``: also parameters that they do not take, if what a run needs
    is installed."""
    load = load and find_spec("scalerl_trainer") is not None
    yield from (SpecProblem(path, problem) for path, problem in plugins.problems(spec, load=load))


def model_problems(spec: RunSpec, *, structure: bool) -> Iterator[SpecProblem]:
    """Problems of the model; of one that has to be downloaded or made first, only what the spec says.

    Args:
        structure: see :func:`scalerl_trainer.model_checks.model_problems`.
    """
    if find_spec("scalerl_trainer") is None:
        text = "the model is not checked: that needs the trainer's packages (scalerl[cpu] or scalerl[gpu])"
        echo(text, error=True)
        return
    from scalerl_trainer import model_checks

    if (problem := declared_memory_problem(spec)) is not None:
        yield problem
    if spec.model.path is not None:
        yield from model_checks.model_problems(Path(spec.model.path), spec, structure=structure)
    else:
        yield from model_checks.spec_problems(spec)


def machine_problems(run: ScaleRLRun) -> Iterator[SpecProblem]:
    """Devices, packages and memory that the run needs and this machine does not have."""
    environment = run.spec.environment
    if environment is not None and not environment.command:
        yield SpecProblem(
            "spec.environment.command", "no image is started on one machine", "give the command of the server"
        )
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
    yield from filter(None, (vllm_problem(run.spec), gpu_problem(run.spec), memory_problem(run.spec)))


def problem_sections(spec: RunSpec) -> list[tuple[str, str, ProblemSpec, PromptSpec]]:
    """Name, field, section and prompt of each task, and of each evaluation set with problems of its own."""
    return [(one.name, one.field, one.section, one.section.prompt) for one in spec.task.tasks] + [
        (one.name, f"evaluation.sets.{at}.task", one.task, one.task.prompt or spec.task.prompt)
        for at, one in enumerate(spec.evaluation.sets or ())
        if one.task is not None
    ]


def task_problems(spec: RunSpec, *, answers: bool) -> Iterator[SpecProblem]:
    """Problems of the tasks, as the preparation of the run finds them; ``answers``: check the reference answers too."""
    import scalerl_tasks as tasks

    try:
        found = tasks.task_problems(spec, answers=answers, progress=lambda text: echo(text, error=True))
    except tasks.GradingError as error:
        yield SpecProblem("spec.task.verifier", str(error))
        return
    for problem in found:
        yield SpecProblem(f"spec.{problem.field}", problem.text)
