"""A run's directory on this machine: created or resumed, and locked by one runtime at a time."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import yaml

from scalerl_api import process as api
from scalerl_api.forecast import EarlierRun
from scalerl_api.load import SpecError, accepted_run, lost_data_fields, to_yaml
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec, ScaleRLRun
from scalerl_autoscaling.earlier_runs import select
from scalerl_local.resume_changes import accepted_changes, forbidden_changes
from scalerl_processes.process_table import kill_marked

LOCK_FILE: Final = "lock"
MAX_CURVE_BYTES: Final = 16 * 1024 * 1024
"""Largest curve of a finished run that is read: 100,000 evaluations."""
LEFTOVER_SECONDS: Final = 45.0
"""How long the processes of a killed run may take to end: the grace and the sweep of their subreapers."""


class DirectoryProblem(Exception):
    """The directory cannot be used. Nothing in it was changed."""


class DirectoryLost(Exception):
    """The directory of a run that is going on was moved, replaced or removed."""


class RunDirectory:
    """A locked directory. The lock ends with :meth:`release`, or with this process and all its subreapers, which share the lock.

    Args:
        resumed: it had a run before.
        edits: the changes of its spec since, as text.
    """

    def __init__(self, root: Path, lock_fd: int, *, resumed: bool = False, edits: Sequence[str] = ()) -> None:
        self.paths = RunPaths(root)
        self.lock_fd = lock_fd
        self.resumed = resumed
        self.edits = edits
        self._made = root.stat()

    @classmethod
    def create(cls, root: Path, run: ScaleRLRun) -> Self:
        """Locks an empty or new directory and writes the files that the roles read.

        Raises:
            DirectoryProblem: it is not empty, is in use, or cannot be written.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any(entry.name != LOCK_FILE for entry in root.iterdir()):
                raise DirectoryProblem(
                    f"{root}: not empty; add --resume to resume the run in it, or give another --dir"
                )
            directory = cls(root.resolve(), _lock(root, wait_seconds=0.0))
            try:
                directory._write(run)
            except OSError:
                shutil.rmtree(directory.paths.root, ignore_errors=True)  # what was written: it was empty
                directory.release()
                raise
        except OSError as error:
            raise DirectoryProblem(f"{root}: {error.strerror}; give a --dir that can be written") from error
        return directory

    @classmethod
    def resume(cls, root: Path, run: ScaleRLRun) -> Self:
        """Locks the directory of a run that has ended or was killed, once the processes of a killed run have ended.

        Raises:
            DirectoryProblem: it has no run, is in use, the spec has a change that a started run refuses, or the stored one a field of an
                earlier release that chose other data.
        """
        try:
            # Without fields that this release does not have.
            stored = stored_manifest(root)
            before = accepted_run(stored).to_manifest()
        except SpecError as error:
            raise DirectoryProblem(f"{root}: {error}; start a new run with another --dir") from error
        if lost := lost_data_fields(stored["spec"]):
            raise DirectoryProblem(f"{root}: cannot resume:\n  " + "\n  ".join(map(str, lost)))
        after = run.to_manifest()
        if changes := forbidden_changes(before, after):
            raise DirectoryProblem(
                f"{root}: cannot resume with a changed spec:\n  "
                + "\n  ".join(changes)
                + "\nundo the change, or start a new run with another --dir"
            )
        try:
            lock, edits = _lock(root, wait_seconds=LEFTOVER_SECONDS), accepted_changes(before, after)
            directory = cls(root.resolve(), lock, resumed=True, edits=edits)
            # The lock is free, so the runtime and the subreapers of any process that still uses this directory were killed.
            kill_marked(api.DIR, str(directory.paths.root), directory.paths.logs)
            directory._write(run)
        except (OSError, TimeoutError) as error:
            raise DirectoryProblem(f"{root}: {error}") from error
        return directory

    def check(self) -> None:
        """Checks that the directory is where it was. Elsewhere, its processes would write to that of another run, or to none.

        Raises:
            DirectoryLost: it is not.
        """
        root = self.paths.root
        try:
            there = os.path.samestat(root.stat(), self._made)
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:  # of a network's file system, which may come back
            return
        if not there:
            raise DirectoryLost(
                f"{root}: moved, replaced or removed while the run used it; its processes are ended. It continues from its last "
                "checkpoint with --resume and the --dir where the directory is now; what they wrote here since can be removed"
            )

    def release(self) -> None:
        """Unlocks the directory."""
        os.close(self.lock_fd)

    def _write(self, run: ScaleRLRun) -> None:
        self.paths.logs.mkdir(exist_ok=True)
        replace_file(self.paths.run_file, to_yaml(run.to_manifest()), 0o644)
        if not self.paths.token.exists():
            replace_file(self.paths.token, secrets.token_urlsafe(32) + "\n", 0o600)

    @property
    def token(self) -> str:
        return self.paths.token.read_text().strip()


def stored_manifest(root: Path) -> dict[str, Any]:
    """The manifest of the last start of the run in ``root``.

    Raises:
        DirectoryProblem: there is no run in ``root``, or its file cannot be read.
    """
    path = RunPaths(root).run_file
    try:
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DirectoryProblem(
            f"{root}: no run to resume there ({path.name} is missing); leave out --resume to start one"
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DirectoryProblem(f"{path}: {error}") from error
    if not isinstance(manifest, dict):
        raise DirectoryProblem(f"{path}: not a run file; start a new run with another --dir")
    return manifest


def in_use(root: Path) -> bool:
    """Whether the process that locked ``root`` last is alive. Takes no lock, which would make others fail."""
    try:
        holder = (root / LOCK_FILE).read_text().strip()
    except (OSError, ValueError):
        return False
    return _is_alive(holder)


def next_directory(parent: Path, name: str) -> Path:
    """``parent/name-n`` for the smallest n above all that exist.

    >>> next_directory(Path("/nowhere"), "tiny").as_posix()
    '/nowhere/tiny-1'
    """
    return parent / f"{name}-{max(_numbers(parent, name), default=0) + 1}"


def latest_directory(parent: Path, name: str) -> Path:
    """The directory with the largest n (see :func:`next_directory`).

    Raises:
        DirectoryProblem: there is none.
    """
    numbers = _numbers(parent, name)
    if not numbers:
        raise DirectoryProblem(
            f"{parent}/{name}-*: no run to resume there; leave out --resume to start one, or say which with --dir"
        )
    return parent / f"{name}-{max(numbers)}"


def _numbers(parent: Path, name: str) -> list[int]:
    suffixes = [path.name.removeprefix(f"{name}-") for path in parent.glob(f"{name}-*")]
    return [int(suffix) for suffix in suffixes if suffix.isdecimal()]


def _is_alive(holder: str) -> bool:
    return holder.isdecimal() and Path(f"/proc/{holder}").exists()


def _lock(root: Path, *, wait_seconds: float) -> int:
    """Locks the directory and returns the descriptor. Processes that inherit it share the lock.

    Waits for holders whose main process is dead: their subreapers end them.
    """
    fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode().strip()
                alive = _is_alive(holder)
                if alive or time.monotonic() >= deadline:
                    who = f"process {holder}" if alive else "processes of a killed run"
                    raise DirectoryProblem(
                        f"{root}: in use by {who}; wait for that run to end, or give another --dir"
                    ) from None
                time.sleep(0.1)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
    except BaseException:
        os.close(fd)
        raise


def replace_file(path: Path, text: str, mode: int) -> None:
    """Writes a file, or replaces it, at once and durably."""
    staging = path.with_name(path.name + ".new")
    fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)


@dataclass(frozen=True)
class DirectoryRuns:
    """Reads the finished runs beside ``root`` as a prior of its forecast.

    A run is finished if it has a ``summary.json`` and no process has locked its directory.

    Attributes:
        root: directory of the run with the forecast.
        on_read: called with a summary of what was found.
    """

    root: Path
    on_read: Callable[[str], None]

    async def __call__(self, spec: RunSpec) -> list[EarlierRun]:
        """The runs that may be a prior of a run of this spec, the newest first, at most ``MAX_EARLIER_RUNS``."""
        roots = await asyncio.to_thread(lambda: sorted(self._finished(), reverse=True))
        runs = ((root.name, functools.partial(_load_finished, root)) for _, root in roots)
        return await select(runs, spec, self.on_read)

    def _finished(self) -> Iterator[tuple[float, Path]]:
        """The time of their end, and their directories."""
        for root in self.root.parent.iterdir():
            if root.is_symlink():  # runs/latest would count a run twice
                continue
            try:
                ended = RunPaths(root).summary.stat().st_mtime
            except OSError:
                continue
            if root != self.root and not in_use(root):
                yield ended, root


def _load_finished(root: Path) -> tuple[RunSpec, str]:
    path = RunPaths(root).curve
    if path.stat().st_size > MAX_CURVE_BYTES:
        raise ValueError(f"its curve has more than {MAX_CURVE_BYTES} bytes")
    return accepted_run(stored_manifest(root)).spec, path.read_text(encoding="utf-8")
