"""Opens what scores the completions of a task section: verifiers and environments, in grading processes or on servers."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl_api.built_in import DEFAULT_SESSIONS
from scalerl_api.registry import Kind
from scalerl_tasks.code_digest import code_digest
from scalerl_tasks.environments.environment_verifier import EnvironmentConfig
from scalerl_tasks.environments.episodes import EnvironmentGrader, EpisodeGrader, Retry, ToolsGrader
from scalerl_tasks.environments.server_grader import ServerGrader
from scalerl_tasks.environments.server_settings import EnvironmentServer
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.errors import VerifierError, did_you_mean
from scalerl_tasks.grading.combined import CombinedGrader, GroupGrader
from scalerl_tasks.grading.grading_pool import MIN_MEMORY_BYTES, GradingPool
from scalerl_tasks.grading.http_grader import HttpGrader, RewardService
from scalerl_tasks.gym import gym_task
from scalerl_tasks.plugins import Plugin, entry_of
from scalerl_tasks.programs.verifier import SHARE_OF_TIMEOUT, CodeConfig
from scalerl_tasks.python_function import PythonFunction
from scalerl_tasks.sandbox.confinement import Limits
from scalerl_tasks.verifiers import VERIFIERS, VerifierConfig

if TYPE_CHECKING:
    from scalerl_api.environment import EnvironmentSpec
    from scalerl_api.spec import ProblemSpec, PromptSpec
    from scalerl_api.verifier import VerifierSpec


def verifier_config(
    spec: ProblemSpec,
    given: VerifierSpec | None = None,
    prompt: PromptSpec | None = None,
    directory: Path | None = None,
) -> VerifierConfig | RewardService:
    """A verifier of a task section, for a grading process to open, or the service that is asked.

    Args:
        given: one of the verifiers; default: the environment if it has processes, else the first verifier.
        prompt: the prompt format; default: that of the section.
        directory: base of a relative ``verifier.python.path``.
    """
    if given is None and (environment := spec.stepping_environment) is not None:
        return VerifierConfig("environment", environment=_environment_config(environment, directory))
    given, prompt = given or spec.scoring[0], prompt or spec.prompt
    low, high = map(float, given.range)
    if (own := given.python) is not None:
        path = None if own.path is None else (directory or Path()) / own.path
        return VerifierConfig(
            "python",
            python=PythonFunction(
                function=own.function,
                path=None if path is None else str(path),
                module=own.module,
                signature=own.signature,
                parameters=own.parameters,
                chat=prompt is not None and prompt.format == "Chat",
                template=None if prompt is None else prompt.template,
                system=None if prompt is None else prompt.system,
                range=(low, high),
                digest=_digest_or_empty(path, own.module),
            ),
        )
    if given.code is not None:
        limits = Limits(given.code.cpu_seconds, _bytes(given.code.memory))
        seconds = given.timeout_seconds * SHARE_OF_TIMEOUT
        return VerifierConfig("code", code=CodeConfig(given.code.partial, limits, seconds))
    if given.http is not None:
        return RewardService(
            given.http.url,
            given.http.batch,
            given.http.concurrency,
            given.timeout_seconds,
            (low, high),
            None if prompt is None else prompt.template,
            None if prompt is None else prompt.system,
        )
    assert given.name is not None
    if given.installed is not None:
        digest = _digest_or_empty(module=entry_of(Kind.VERIFIER, given.name).module)
        return VerifierConfig(
            given.name, plugin=Plugin(given.name, given.installed.parameters, (low, high), digest)
        )
    return VerifierConfig(given.name, task=gym_task(spec) if given.name == "reasoning-gym" else None)


def _environment_config(given: EnvironmentSpec, directory: Path | None) -> EnvironmentConfig:
    parameters = given.parameters or {}
    if given.has_tools:
        seconds = given.turn_timeout_seconds * SHARE_OF_TIMEOUT
        parameters = _with_paths(parameters, directory or Path())
        parameters |= {"seconds": seconds, "memory_bytes": _bytes(given.memory)}
    if given.installed is not None:
        entry = entry_of(Kind.ENVIRONMENT, given.installed.name)
        digest = _digest_or_empty(module=entry.module)
        function = PythonFunction(entry.attr, module=entry.module, digest=digest)
        return EnvironmentConfig(python=function, parameters=parameters)
    if (own := given.python) is None:
        return EnvironmentConfig(given.name or "", parameters=parameters)
    path = None if own.path is None else (directory or Path()) / own.path
    function = PythonFunction(
        own.class_name,
        None if path is None else str(path),
        own.module,
        digest=_digest_or_empty(path, own.module),
    )
    return EnvironmentConfig(python=function, parameters=parameters)


def _with_paths(value: Any, directory: Path) -> Any:
    """Parameters in which each ``path`` is absolute."""
    if isinstance(value, Mapping):
        return {
            name: str((directory / one).absolute())
            if name == "path" and isinstance(one, str)
            else _with_paths(one, directory)
            for name, one in value.items()
        }
    return [_with_paths(one, directory) for one in value] if isinstance(value, list) else value


def _environment_server(given: EnvironmentSpec) -> EnvironmentServer:
    """The server of ``environment.url``, or those of ``spec.environment``, whose address the runtime gives.

    Raises:
        VerifierError: there is no such parameter, or it has another value.
    """
    from scalerl_api.process import ENVIRONMENT_URL  # as in _bytes

    url = given.url or os.environ.get(ENVIRONMENT_URL, "")
    parameters = dict(given.parameters or {})
    action, message = parameters.pop("action", None), parameters.pop("message", None)
    reward, bounds = parameters.pop("reward", "last"), parameters.pop("range", ["0", "1"])
    sessions = parameters.pop("sessions", DEFAULT_SESSIONS)
    if parameters:
        name, known = next(iter(parameters)), ("action", "message", "reward", "range", "sessions")
        raise VerifierError(
            f"an environment's server has no parameter {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        low = high = 0.0
    wrong = {
        "action, the name of a field": not isinstance(action, str | None),
        "message, the name of a field": not isinstance(message, str | None),
        "reward, which is last or sum": reward not in ("last", "sum"),
        'range, the lowest and the highest reward, such as ["-1", "1"]': not -math.inf
        < low
        < high
        < math.inf,
        "sessions, an integer from 1": type(sessions) is not int or sessions < 1,
    }
    if found := next((text for text, is_wrong in wrong.items() if is_wrong), ""):
        raise VerifierError(f"environment.parameters: correct {found}")
    return EnvironmentServer(
        url, given.turn_timeout_seconds, action, message, reward == "sum", (low, high), sessions
    )


def open_episodes(spec: ProblemSpec, grader: GroupGrader) -> EpisodeGrader | None:
    """What makes the steps of a section's episodes, by the section's grader; None without an environment.

    Raises:
        VerifierError: the environment has no such parameter, or its verifier compares the completions of a prompt.
    """
    if (given := spec.environment) is None:
        return None
    if problem := group_problem(spec):
        raise VerifierError(problem)
    tools_of(given)
    if given.name != "retry":
        return EnvironmentGrader(grader)
    parameters = given.parameters or {}
    known = ("wrong", "unanswered")
    for name, value in parameters.items():
        if name not in known or not isinstance(value, str):
            raise VerifierError(
                f"retry has no text {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
            )
    return Retry(grader, **parameters)


def group_problem(spec: ProblemSpec) -> str:
    """Why the verifiers of an environment cannot score its episodes; empty if they can."""
    if not any(one.python is not None and one.python.signature == "group" for one in spec.scoring):
        return ""
    name = "" if spec.environment is None else spec.environment.title
    return (
        f"{name} scores each reply when it comes, and a verifier of the signature group compares all completions of a prompt: use the "
        "signature score"
    )


def _bytes(quantity: str) -> int:
    from scalerl_api.fields import quantity_bytes  # a caller with a spec has imported it already

    return quantity_bytes(quantity)


def grading_digest(spec: ProblemSpec, directory: Path | None = None) -> str:
    """Digest of all that scores the completions of a section, with the code; empty for one verifier with a name.

    Raises:
        VerifierError: the code cannot be read.
    """
    if spec.environment is None and spec.verifier is not None and spec.verifier.name in VERIFIERS:
        return ""
    directory, limits = directory or Path(), {"timeout_seconds", "memory", "workers"}
    parts: list[object] = [spec.combine]
    for given in spec.scoring:
        # Without defaults, so that a field of a later release does not begin another curve.
        kept = given.model_dump(mode="json", exclude=limits, exclude_defaults=True)
        if (own := given.python) is not None:
            kept["python"] |= {"path": "", "module": ""}
            kept["code"] = code_digest(None if own.path is None else directory / own.path, own.module)
        if given.http is not None:
            kept["http"] = {"url": given.http.url}
        if given.installed is not None:
            kept["code"] = code_digest(module=entry_of(Kind.VERIFIER, given.installed.name).module)
        parts.append(sorted(kept.items()))
    if spec.environment is not None:
        kept = spec.environment.model_dump(
            mode="json", exclude={"turn_timeout_seconds", "memory", "workers"}, exclude_defaults=True
        )
        if spec.environment.is_server and "sessions" in kept.get("parameters", {}):  # a limit
            del kept["parameters"]["sessions"]
            if not kept["parameters"]:
                del kept["parameters"]
        if (own_class := spec.environment.python) is not None:
            kept["python"] |= {"path": "", "module": ""}
            path = None if own_class.path is None else directory / own_class.path
            kept["code"] = code_digest(path, own_class.module, "environment.python")
        if (named := spec.environment.installed) is not None:
            kept["code"] = code_digest(module=entry_of(Kind.ENVIRONMENT, named.name).module)
        if files := spec.environment.tool_files:
            for tool in kept["parameters"]["tools"]:  # the content counts, not its place
                if isinstance(tool, dict) and isinstance(tool.get("search"), dict):
                    tool["search"] = tool["search"] | {"path": ""}
            kept["files"] = [_file_digest(directory / path, field) for field, path in files.items()]
        parts.append(("environment", sorted(kept.items())))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _file_digest(path: Path, field: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise VerifierError(f"environment.{field}: {path} cannot be read: {error}") from error


def _digest_or_empty(path: Path | None = None, module: str | None = None) -> str:
    """The digest of code; empty if it cannot be read, which the process that opens it explains."""
    try:
        return code_digest(path, module)
    except VerifierError:
        return ""


def open_grading_pool(
    spec: ProblemSpec,
    workers: int | None = None,
    *,
    prompt: PromptSpec | None = None,
    directory: Path | None = None,
    show_output: bool = False,
) -> GroupGrader:
    """The grader of a task section, with the section's number of processes or ``workers``; not started yet. ``prompt`` and
    ``directory``: as in :func:`verifier_config`; ``show_output``: as in :class:`GradingPool`.

    Raises:
        VerifierError: ``verifier.memory`` is too small to grade anything, or see :func:`_environment_server`.
    """
    if spec.own_environment is not None and spec.own_environment.is_server:
        return ServerGrader(_environment_server(spec.own_environment))
    pool: GradingPool | None = None
    if (environment := spec.stepping_environment) is not None:
        config = verifier_config(spec, directory=directory)
        assert isinstance(config, VerifierConfig)
        pool = GradingPool(
            config,
            workers=workers or environment.workers,
            timeout_seconds=environment.turn_timeout_seconds,
            memory_bytes=_bytes(environment.memory),
            show_output=show_output,
        )
        if not environment.uses_verifier:
            return pool
    grader = _open_verifiers(spec, workers, prompt, directory, show_output)
    return grader if pool is None else ToolsGrader(pool, grader)


def _open_verifiers(
    spec: ProblemSpec,
    workers: int | None,
    prompt: PromptSpec | None,
    directory: Path | None,
    show_output: bool,
) -> GroupGrader:
    graders: list[GroupGrader] = []
    for given in spec.scoring:
        config = verifier_config(spec, given, prompt, directory)
        if isinstance(config, RewardService):
            graders.append(HttpGrader(config))
            continue
        memory_bytes = _bytes(given.memory)
        if memory_bytes < MIN_MEMORY_BYTES:
            raise VerifierError(f"task.verifier.memory is {given.memory}; a grader needs at least 64Mi")
        graders.append(
            GradingPool(
                config,
                workers=workers or given.workers,
                timeout_seconds=given.timeout_seconds,
                memory_bytes=memory_bytes,
                show_output=show_output,
            )
        )
    if spec.verifiers is None:
        return graders[0]
    labels = [one.part for one in spec.verifiers]
    weights = [float(one.weight) for one in spec.verifiers]
    return CombinedGrader(graders, labels, weights, product=spec.combine == "Product")
