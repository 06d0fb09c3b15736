"""Copies what the page reads of a run on a cluster, again and again, with the rights of ``scalerl fetch``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_cli.clusters.runs import find, plain
from scalerl_cli.clusters.session import ClusterProblem, CommandFailed, Interrupted, open_session
from scalerl_cli.clusters.volume import Entry, opened
from scalerl_cli.exits import NOT_FOUND
from scalerl_cli.page.runs import Run
from scalerl_operator.kube import errors

NAME: Final = re.compile(r"([a-z0-9][a-z0-9-]*)/([a-z0-9][a-z0-9.-]*)")
"""Namespace and name of a run."""
_SECONDS: Final = 10.0
_PATHS: Final = RunPaths(Path())
_FIRST: Final = tuple(map(str, (_PATHS.metrics, _PATHS.curve, _PATHS.decisions, _PATHS.summary)))
_ALL: Final = (*_FIRST, str(_PATHS.trace), f"{_PATHS.trace}.1", str(_PATHS.rollouts))
_APPENDED: Final = ".jsonl"
_KNOWN: Final = 4096
"""Bytes before the new part of a file that are read again: a run that returns to a checkpoint writes other lines."""
_FAILURES: Final = (errors.ApiError, ClusterProblem, CommandFailed, Interrupted, OSError)


class Files(Protocol):
    """What is read of :class:`scalerl_cli.clusters.volume.Volume`."""

    def list(self, paths: Sequence[str]) -> list[Entry]: ...

    def read(self, entry: Entry, offset: int) -> Iterator[bytes]: ...


def update(files: Files, directory: Path, paths: Sequence[str] = _ALL) -> None:
    """Copy what changed: the new part of files that are appended to, others as a whole, the newest rollouts first."""
    found = files.list(paths)
    for entry in sorted(found, key=lambda one: one.path, reverse=True):
        local = directory / entry.path
        here = local.stat().st_size if local.exists() else 0
        if local.exists() and here == entry.size and local.suffix in (_APPENDED, ".parquet"):
            continue
        local.parent.mkdir(parents=True, exist_ok=True)
        if local.suffix == _APPENDED and 0 < here < entry.size and _continued(files, entry, local, here):
            continue
        staging = local.with_name(f".{local.name}")
        with staging.open("wb") as file:
            file.writelines(files.read(entry, 0))
        if staging.stat().st_size == entry.size:  # otherwise it was cut off: the next time
            os.replace(staging, local)
    if str(_PATHS.rollouts) in paths:
        kept = {entry.path for entry in found}
        for local in (directory / _PATHS.rollouts).glob("*.parquet"):
            if str(local.relative_to(directory)) not in kept:
                local.unlink()


def _continued(files: Files, entry: Entry, local: Path, here: int) -> bool:
    """Append the new part of a file to its copy of ``here`` bytes; False if the file has begun again since."""
    known = min(here, _KNOWN)
    with local.open("r+b") as file:
        file.seek(here - known)
        before = file.read()
        read = b"".join(files.read(entry, here - known))
        if read[:known] != before[: len(read)]:
            return False
        file.write(read[known:])
    return True


def _curves(spec: dict[str, Any]) -> list[str]:
    """Files with the curves of other evaluation sets; none of a spec of another release."""
    try:
        return [str(_PATHS.set_curve(one.name)) for one in RunSpec.model_validate(spec).evaluation_sets]
    except ValueError:
        return []


@contextlib.contextmanager
def mirrored(where: str, arguments: argparse.Namespace) -> Iterator[Run]:
    """The run ``NAMESPACE/NAME``, copied into a temporary directory as it grows.

    Raises:
        ClusterProblem, errors.ApiError: it cannot be read, or has no files yet.
    """
    namespace, name = where.split("/")
    connection = argparse.Namespace(**(vars(arguments) | {"namespace": namespace}))
    session = open_session(connection)
    run = find(session, name)
    with (
        tempfile.TemporaryDirectory(prefix="scalerl-view-", ignore_cleanup_errors=True) as temporary,
        opened(session, run, arguments.image) as volume,
    ):
        directory = Path(temporary) / name
        directory.mkdir()
        update(volume, directory, _FIRST)
        if not any(directory.iterdir()):
            raise ClusterProblem(f"{where} has no trained steps yet", NOT_FOUND)
        shown = Run(directory)
        shown.name = where
        ended = threading.Event()
        paths = (*_ALL, *_curves(run.spec))

        def follow() -> None:
            while not ended.is_set():
                try:
                    update(volume, directory, paths)
                    shown.note = ""
                except _FAILURES as error:
                    shown.note = f"not up to date: {plain(str(error))}"
                ended.wait(_SECONDS)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            ended.set()
            thread.join(_SECONDS)
