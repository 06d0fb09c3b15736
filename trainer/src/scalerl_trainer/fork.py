"""Forks a run: copies the checkpoint of another run, with what belongs to it, into the directory of a new one.

Copied are the checkpoint, the prepared model, the tables of ``task.dataset``, the weights after a warm start (the reference of ``recipe.kl``), and the rows of
``metrics.jsonl`` up to the checkpoint. The curve is in the checkpoint's snapshot of the coordinator. Not copied are the journal,
past responses, the record of decisions, exported models, and the ids of trackers.

The source may train meanwhile, and remove the checkpoint: all its files are opened, or linked, before the first is copied. The
copy is what is verified. It is made in a staging folder, and nothing is committed before all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from scalerl_api.fork import Fork, refused_changes
from scalerl_api.load import SpecError, load_accepted_run
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_tasks.dataset.table_source import FOLDER as DATA
from scalerl_trainer.checkpoints.disk import flush
from scalerl_trainer.checkpoints.manifest import MANIFEST, CheckpointError, Manifest
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.errors import TrainerError

log = logging.getLogger("scalerl_trainer.fork")

STAGED: Final = ".fork"
_TRIES: Final = 3
"""For the newest checkpoint, while the source trains and removes old ones."""


class ForkError(TrainerError):
    """The run cannot be forked; the message says why, and what to do."""


class _Removed(Exception):
    """The source has removed the checkpoint meanwhile."""


def copy_run(source: RunPaths, target: RunPaths, spec: RunSpec, step: int | None, *, link: bool) -> Fork:
    """Copy checkpoint ``step`` (None: the newest) of ``source``, for a run with ``spec``, into the empty directory ``target``.

    Args:
        link: hard-link files where the file system allows it; they never change.

    Raises:
        ForkError: there is no such checkpoint, it is damaged, or the run cannot continue it with ``spec``.
        OSError: ``target`` cannot be written.
    """
    if not source.run_file.exists():
        raise ForkError(
            f"{source.root}: no run ({source.run_file.name} is missing): it has not begun to train, or was deleted with its volume"
        )
    try:
        run = load_accepted_run(source.run_file)
    except SpecError as error:
        raise ForkError(str(error)) from error
    store = CheckpointStore(source, keep=1)
    for attempt in range(1, _TRIES + 1):
        chosen = _choose(store, step)
        if problems := refused_changes(run.spec, spec, chosen):
            raise ForkError("\n".join(problems))
        try:
            _copy_checkpoint(store, target, chosen, link=link)
            break
        except _Removed as error:
            if step is not None or attempt == _TRIES:
                raise ForkError(
                    f"{source.root} has removed the checkpoint of step {chosen} meanwhile, it now has {_shown(store.steps())}; repeat "
                    "with one of them, or raise the source's checkpoint.keep"
                ) from error
    _copy_folder(source.base_model, target.base_model, link=link)
    if (source.root / DATA).exists():
        _copy_folder(source.root / DATA, target.root / DATA, link=link)
    for path, copied in (
        (source.warm_started_weights, target.warm_started_weights),
        (source.supervised_metrics, target.supervised_metrics),
    ):
        if path.exists():
            # The second is written by appending: only a copy of it is the new run's.
            _copy(path, copied, link=link and path == source.warm_started_weights)
    _copy_rows(source.metrics, target.metrics, chosen)
    origin = Fork(run=run.metadata.name, step=chosen)
    target.fork.write_bytes(origin.encode())
    for path in [*sorted(target.root.rglob("*"), reverse=True), target.root]:
        if not path.is_symlink():
            flush(path)
    return origin


def _choose(store: CheckpointStore, step: int | None) -> int:
    steps = store.steps()
    if not steps:
        raise ForkError(
            f"{store.root}: no checkpoint; the first is written after checkpoint.everySteps steps"
        )
    if step is not None and step not in steps:
        raise ForkError(
            f"{store.root}: no checkpoint of step {step}, only of {_shown(steps)}: choose one of them"
        )
    return steps[0] if step is None else step


def _shown(steps: Iterable[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps)) or "none"


def _copy_checkpoint(store: CheckpointStore, target: RunPaths, step: int, *, link: bool) -> None:
    """Raises _Removed, ForkError and OSError."""
    copied = CheckpointStore(target, keep=1)
    folder, into = store.directory(step), copied.directory(step)
    shutil.rmtree(into, ignore_errors=True)
    try:
        manifest = store.manifest(step)
        _copy_files(folder, into, [MANIFEST, *(record.path for record in manifest.files)], link=link)
    except (CheckpointError, _Removed) as error:
        if step not in store.steps():
            raise _Removed from error
        raise ForkError(
            f"checkpoint {step} is damaged: {error}; choose another of {_shown(store.steps())}"
        ) from error
    _verify(copied, manifest)


def _verify(copied: CheckpointStore, manifest: Manifest) -> None:
    try:
        if copied.manifest(manifest.step) != manifest:
            raise CheckpointError(f"{MANIFEST} has changed")
        copied.verify(manifest)
    except CheckpointError as error:
        raise ForkError(f"checkpoint {manifest.step} is damaged: {error}; choose another step") from error


def _copy_files(folder: Path, into: Path, names: list[str], *, link: bool) -> None:
    """Copy files of a folder that may be removed meanwhile. Raises _Removed and OSError."""
    with ExitStack() as opened:
        held = {}
        for name in names:
            try:
                held[name] = opened.enter_context((folder / name).open("rb"))
            except FileNotFoundError as error:
                raise _Removed(f"{folder / name} is missing") from error
        for name, file in held.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (link and _linked(folder / name, path)):
                with path.open("wb") as copied:
                    shutil.copyfileobj(file, copied, 4 << 20)


def _linked(source: Path, target: Path) -> bool:
    """Hard-link a file; False where that is not possible, or the file is gone."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _copy(source: Path, target: Path, *, link: bool) -> None:
    if source.is_symlink():
        # Into the cache of model.cache, which all runs mount at the same path.
        target.symlink_to(os.readlink(source))
    elif not (link and _linked(source, target)):
        shutil.copyfile(source, target)


def _copy_folder(source: Path, target: Path, *, link: bool) -> None:
    target.mkdir()
    try:
        for path in sorted(source.iterdir()):
            _copy(path, target / path.name, link=link)
    except FileNotFoundError as error:
        raise ForkError(f"{error.filename} is missing: the source's directory is not complete") from error


def _copy_rows(source: Path, target: Path, version: int) -> None:
    """Copy the rows of metrics.jsonl of the steps before ``version``; lines that cannot be read are left out."""
    with contextlib.suppress(FileNotFoundError):
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        target.write_text("".join(line for line in lines if _step_of(line) < version), encoding="utf-8")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


# --- into a new directory -----------------------------------------------------------------------------------


def fork_directory(
    source: Path, target: Path, spec: RunSpec, step: int | None, run_file: Callable[[Fork], str]
) -> Fork:
    """Make the directory ``target`` of a new run, which must be empty or not exist. Atomic.

    Args:
        run_file: text of ``run.yaml``.

    Raises:
        ForkError, OSError: as :func:`copy_run`; nothing is made.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ForkError(f"{target}: exists and is not empty; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{STAGED}-{target.name}-*"):
        # Of a fork that was killed.
        if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    staged = target.parent / f"{STAGED}-{target.name}-{os.getpid()}"
    try:
        staged.mkdir()
        paths = RunPaths(staged)
        origin = copy_run(RunPaths(source), paths, spec, step, link=True)
        paths.run_file.write_text(run_file(origin), encoding="utf-8")
        for path in (paths.run_file, staged):
            flush(path)
        staged.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return origin


# --- into the directory of a run that is prepared -----------------------------------------------------------


def take_over(paths: RunPaths, spec: RunSpec, source: Path | None) -> None:
    """Copy the checkpoint of ``spec.from`` into the run's directory, unless the run has one of its own.

    Args:
        source: directory of the other run; None where the runtime gives none, also after the fork has trained and its volume was
            lost. It then continues from its copies in ``spec.checkpoint.to``.

    Raises:
        ForkError, OSError: as :func:`copy_run`.
    """
    given = spec.fork
    if given is None:
        return
    staged = paths.root / STAGED
    shutil.rmtree(staged, ignore_errors=True)  # of a try that was killed, also after its last rename
    if paths.journal.exists() or any(paths.checkpoints.glob("[!.]*")):
        return
    if source is None and spec.checkpoint.to is not None:
        log.info(
            "from %s: the trainer continues from the fork's own copies in %s", given.run, spec.checkpoint.to
        )
        return
    if source is None:
        raise ForkError(
            "from: on one machine, a fork is made by `scalerl fork RUNDIR`, and continued with --resume; on a cluster, the run has "
            "trained before and its volume has no checkpoint"
        )
    staged.mkdir(parents=True)
    try:
        origin = copy_run(RunPaths(source), RunPaths(staged), spec, given.step, link=False)
        # The checkpoint comes last: until then, another try begins again.
        for path in sorted(staged.iterdir(), key=lambda path: path == RunPaths(staged).checkpoints):
            target = paths.root / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.rename(target)
            flush(paths.root)
    except ForkError as error:
        raise ForkError("\n".join(f"from {given.run}: {line}" for line in str(error).splitlines())) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    log.info("continues run %s from step %d", origin.run, origin.step)
