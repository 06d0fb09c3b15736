"""``python -m scalerl_trainer.prepare``: writes the run's model to ``DIR/model`` and checks the run before it starts.

The write is atomic; if the model exists, only the checks (:mod:`.checks`) run. For a fork, the model is the source's
(:mod:`.fork`). Exit code: 0 on success; 2 for bad input, with a line for each problem that names the field; 1 if no grader could
be started, a download failed its verification, or the object store failed.

If the directory is this pod's alone (``storage.mountedBy: Coordinator``), model and tables are uploaded to ``checkpoint.to``; a
repeated preparation fetches them from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from scalerl_api.load import SpecError
from scalerl_api.memory.model_size import ModelSize
from scalerl_api.object_store import BucketAbsent, ObjectStore, StoreError
from scalerl_api.paths import RunPaths
from scalerl_api.process import MODEL_CACHE, REPORT_FILE, SOURCE_DIR, EnvironmentProblem, ProcessEnvironment
from scalerl_api.spec import HubModel, ModelSpec, RunSpec
from scalerl_api.status import ModelStatus
from scalerl_tasks import GradingError, PromptSource, RunTasks, Task, TaskError, open_tasks, open_warm_start
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.tokenizer import ModelTokenizer
from scalerl_trainer.checkpoints.disk import flush
from scalerl_trainer.checkpoints.object_store import check_bucket
from scalerl_trainer.checks import (
    PrepareError,
    check_length,
    check_memory,
    check_mid_training_file,
    check_model,
    check_plugins,
    check_prompts,
    check_set_prompts,
    check_tasks,
    refuse,
    worked_solution,
)
from scalerl_trainer.errors import ModelError, first_line
from scalerl_trainer.fork import ForkError, take_over
from scalerl_trainer.model_cache import CacheError, ModelCache, NotCached
from scalerl_trainer.model_checks import config_problems, model_problems, spec_problems
from scalerl_trainer.models.files import read_json, stored_tensors, weight_files
from scalerl_trainer.object_store_folders import fetch, of_run, upload

log = logging.getLogger("scalerl_trainer.prepare")

MARKER_FILE = "prepared.json"
TOKENIZER_TEXTS = 2000
"""Number of prompts of the training split that the tokenizer of a scratch model is trained on."""
_WEIGHTS = "*.safetensors"
_PATTERNS = ("*.json", _WEIGHTS, "*.model", "*.jinja", "merges.txt", "vocab.txt")


def main() -> int:
    """Run the command; returns the exit code (see the module)."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        environment = ProcessEnvironment.read()
        spec = environment.load_run().spec
        source = os.environ.get(SOURCE_DIR)
        take_over(environment.paths, spec, Path(source) if source else None)
        one_machine, to = "KUBERNETES_SERVICE_HOST" not in os.environ, spec.checkpoint.to
        check_bucket("checkpoint.to", to)
        check_bucket("weightSync.to", spec.weight_sync.to)
        store = None if to is None or not environment.own_directory else ObjectStore(to)
        folders = () if store is None else tuple((store, folder) for folder in of_run(spec))
        for given, folder in folders:
            if fetch(given, folder, environment.paths.root / folder):
                log.info("%s/%s is that of an earlier preparation", to, folder)
        prepare(environment.paths, spec, one_machine=one_machine)
        for given, folder in folders:
            upload(given, folder, (environment.paths.root / folder).iterdir())
        report_model(environment.paths.base_model, os.environ.get(REPORT_FILE))
    except (GradingError, CacheError, StoreError) as problem:
        log.error("%s", problem)
        return 2 if isinstance(problem, BucketAbsent) else 1
    except PrepareError as problem:
        for line in problem.args:
            log.error("%s", line)
        return 2
    except (EnvironmentProblem, SpecError, TaskError, ForkError) as problem:
        log.error("%s", problem)
        return 2
    except OSError as problem:
        log.error("%s: %s", problem.filename or "file", problem.strerror)
        return 2
    return 0


def report_model(directory: Path, file: str | None) -> None:
    """Write the size of the prepared model to ``file``, for the operator. A failure is logged only: requests have defaults."""
    if not file:
        return
    tensors = stored_tensors(directory).values()
    size = ModelSize.of_config(
        read_json(directory / "config.json"),
        sum(tensor.elements for tensor in tensors),
        max((tensor.elements for tensor in tensors), default=0),
    )
    if size is None:
        log.warning(
            "config.json has no sizes: the memory requests of the run's pods do not depend on the model"
        )
        return
    report = ModelStatus(
        **{name: value for name, value in asdict(size).items() if name in ModelStatus.model_fields},
        checkpoint_bytes=sum(weights.stat().st_size for weights in weight_files(directory)),
        dtype=", ".join(sorted({tensor.dtype for tensor in tensors}))[:64],
    )
    try:
        Path(file).write_text(report.model_dump_json(by_alias=True), encoding="utf-8")
    except OSError as error:
        log.warning("the model's size cannot be reported in %s: %s", file, error.strerror)


def prepare(paths: RunPaths, spec: RunSpec, *, one_machine: bool) -> None:
    """Write ``spec.model`` to ``paths.base_model``, and check the run.

    ``one_machine``: all roles share this machine's memory.

    Raises:
        PrepareError: the model cannot be used at all, for this task or on this machine.
        TaskError: the task or the model's tokenizer cannot be used.
        OSError: the folder cannot be written.
    """
    target = paths.base_model
    check_plugins(spec, one_machine=one_machine)
    check_tasks(spec, paths.root, answers=not _answers_are_checked(target, spec))
    tasks = open_tasks(spec, paths.root)
    if spec.model.scratch is not None:
        refuse(spec_problems(spec))
        # Checked before the weights are written, which already needs this memory.
        check_memory("model.scratch", ModelSize.of_scratch(spec.model.scratch), spec, one_machine)
    identity = _identity(spec, tasks)
    if target.exists():
        _check_prepared(target, identity)
        _restore_cached(target, spec)
        _check(target, paths.root, spec, tasks, one_machine)
        log.info("%s is ready", target)
        return
    staged = target.with_name(f".{target.name}-{os.getpid()}")
    # Of a preparation that was killed, maybe with a copy of the model.
    for left in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _write_model(staged, paths.root, spec, tasks)
        _check(staged, paths.root, spec, tasks, one_machine)
        (staged / MARKER_FILE).write_text(
            json.dumps({"identity": identity, "answers": _answers_identity(spec, tasks)}) + "\n",
            encoding="utf-8",
        )
        for file in [*staged.iterdir(), staged]:
            flush(file)
        staged.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    log.info("%s is made", target)


def _check(directory: Path, root: Path, spec: RunSpec, tasks: RunTasks, one_machine: bool) -> None:
    # What transformers makes of the files was checked in their own folder, before they were linked here.
    check_model(directory, spec, one_machine, structure=False)
    given = spec.task.tasks
    tokenizers = [
        ModelTokenizer(
            directory, one.section.prompt, f"{one.field}.prompt", tools_of(one.section.environment)
        )
        for one in given
    ]
    check_length(tokenizers[0], spec)
    for one, task, tokenizer in zip(given, tasks.tasks, tokenizers, strict=True):
        if one.section.environment is not None:
            tokenizer.check_turns()
        check_prompts(tokenizer, spec, one, task, root)
    for of_set in tasks.sets:
        field, tools = f"{of_set.field}.task.prompt", tools_of(of_set.spec.environment)
        tokenizer = ModelTokenizer(directory, of_set.prompt, field, tools)
        if of_set.spec.environment is not None:
            tokenizer.check_turns()
        check_set_prompts(tokenizer, spec, of_set)
    check_mid_training_file(tokenizers[0], spec, tasks.tasks[0], root)


def _identity(spec: RunSpec, tasks: RunTasks) -> str:
    """SHA-256 of all settings that the prepared model depends on."""
    model = spec.model.model_dump(mode="json", exclude={"attention", "cache"})
    if spec.model.scratch is not None:
        model["task"], model["seed"] = tasks.digest, spec.seed
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def _answers_identity(spec: RunSpec, tasks: RunTasks) -> str:
    """SHA-256 of all that decides whether the reference answers can be graded."""
    parts = [(task.train.digest, task.held_out.digest) for task in tasks.tasks]
    verifiers = [[one.model_dump_json() for one in task.scoring] for task in spec.tasks]
    identity = (parts, [one.digest for one in tasks.sets], verifiers, tasks.grading)
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _answers_are_checked(target: Path, spec: RunSpec) -> bool:
    """Whether an earlier preparation of the run has checked the same answers with the same verifiers."""
    try:
        checked = json.loads((target / MARKER_FILE).read_text(encoding="utf-8"))["answers"]
        return bool(checked == _answers_identity(spec, open_tasks(spec, target.parent)))
    except (OSError, ValueError, KeyError, TypeError, TaskError):
        return False


def _check_prepared(target: Path, identity: str) -> None:
    try:
        found = json.loads((target / MARKER_FILE).read_text(encoding="utf-8"))["identity"]
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


def _write_model(directory: Path, root: Path, spec: RunSpec, tasks: RunTasks) -> None:
    model = spec.model
    if model.scratch is not None:
        from scalerl_trainer.models.scratch import write_scratch

        own = open_warm_start(spec, root)
        solved = spec.warm_start is not None and own is None
        texts = chain.from_iterable(_texts(task, task.train, with_solutions=solved) for task in tasks.tasks)
        if own is not None:
            texts = chain(texts, _texts(tasks.tasks[0], own, with_solutions=True))
        try:
            write_scratch(
                directory,
                model.scratch,
                texts,
                seed=spec.seed,
                dtype=model.dtype,
                context_tokens=model.context_tokens,
            )
        except ModelError as error:
            raise PrepareError(f"model.scratch.vocabularySize: {error}") from error
    elif model.path is not None:
        _link_or_copy(Path(model.path), directory, spec)
    elif model.hub is not None and (cache := _cache(model)) is not None:
        folder = _cached(cache, model.hub, model.hub.revision, spec)
        _link_or_copy(folder, directory, spec, linked=True)
    elif model.hub is not None:
        refuse(config_problems(_download(model, [p for p in _PATTERNS if p != _WEIGHTS]), spec))
        _link_or_copy(_download(model, _PATTERNS), directory, spec)


def _texts(task: Task, source: PromptSource, *, with_solutions: bool) -> Iterator[str]:
    for index in range(min(TOKENIZER_TEXTS, len(source))):
        prompt = source[index]
        yield task.render(prompt).user
        if with_solutions:
            yield worked_solution(prompt)
        elif prompt.answer:
            yield prompt.answer


def _download(model: ModelSpec, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    hub = model.hub
    assert hub is not None
    try:
        folder: str = huggingface_hub.snapshot_download(
            hub.name, revision=hub.revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # the client raises from several trees: its own, requests' and OSError
        raise _hub_problem(hub, error) from error
    return Path(folder)


def _hub_problem(hub: HubModel, error: Exception) -> PrepareError:
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    advice = (
        "HF_HUB_OFFLINE is set and it is not in the cache: download it first, or unset the variable"
        if offline
        else "check name, revision, network and access token"
    )
    return PrepareError(f"model.hub: {hub.name} at revision {hub.revision}: {first_line(error)}; {advice}")


def _cache(model: ModelSpec) -> ModelCache | None:
    """The cache of ``model.cache``, where the runtime mounts it; None on one machine, where the hub's client has its own."""
    root = os.environ.get(MODEL_CACHE)
    return (
        None if model.cache is None or not root else ModelCache(Path(root), read_only=model.cache.read_only)
    )


def _cached(cache: ModelCache, hub: HubModel, revision: str, spec: RunSpec) -> Path:
    try:
        return cache.folder(
            hub.name, revision, _PATTERNS, check=lambda folder: refuse(config_problems(folder, spec))
        )
    except (PrepareError, CacheError):
        raise
    except NotCached as problem:
        raise PrepareError(f"model.cache: {problem}") from problem
    except Exception as error:  # as in _download()
        advice = _hub_problem(hub, error)
        # After any other error, such as of an unreachable hub or a full volume, the Job tries again.
        raise (advice if _is_permanent(error) else CacheError(str(advice))) from error


def _is_permanent(error: Exception) -> bool:
    """Whether the hub's client would fail again: no such model, no access, or no connection by its settings."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in (400, 401, 403, 404)
    return isinstance(error, HFValidationError | OfflineModeIsEnabled)


def _restore_cached(target: Path, spec: RunSpec) -> None:
    """Store the commit of a prepared model again if it was evicted from the cache, or damaged there."""
    links = (Path(os.readlink(file)) for file in sorted(target.iterdir()) if file.is_symlink())
    cache, linked = _cache(spec.model), next(links, None)
    if cache is not None and linked is not None and spec.model.hub is not None:
        _cached(cache, spec.model.hub, linked.parent.name, spec)


def _link_or_copy(source: Path, directory: Path, spec: RunSpec, *, linked: bool = False) -> None:
    """Hard-link the model's files, or copy them where the file system does not allow links.

    Of weights only those that transformers loads: vLLM would read all, such as the second copy in Mistral's repositories.

    Args:
        linked: weights become symbolic links, to a volume that all that read them mount; the small files are copied.

    Raises:
        PrepareError: the model cannot be used.
    """
    refuse(model_problems(source, spec))
    others = (f for pattern in _PATTERNS if pattern != _WEIGHTS for f in source.glob(pattern))
    weights = {*weight_files(source)}
    for file in sorted({*weights, *(f for f in others if f.is_file())}):
        if file.name == MARKER_FILE or file.name.startswith("."):
            continue
        target = directory / file.name
        if linked:
            if file in weights:
                target.symlink_to(file)
            else:
                shutil.copyfile(file, target)
            continue
        try:
            os.link(file.resolve(), target)
        except OSError:
            shutil.copyfile(file, target)


if __name__ == "__main__":
    sys.exit(main())
