"""What is made once and kept: a folder an item, made aside and put in place whole, by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

VARIABLE = "SCALERL_TEST_CACHE"


def folder() -> Path:
    """Where everything is kept: ``SCALERL_TEST_CACHE``, or ``scalerl/cluster`` in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "scalerl" / "cluster"


def lock(path: Path, *, wait: bool = True) -> IO[str]:
    """The lock file ``path``, held until it is closed here and in every process that inherited it.

    Raises BlockingIOError where another holds it and ``wait`` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


def made(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name/key``; where it is missing, ``make`` fills a new one. Earlier keys of ``name`` are removed."""
    final = folder() / name / key
    if final.is_dir():
        return final
    with lock(final.parent / ".lock"):
        if final.is_dir():  # another process made it meanwhile
            return final
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=final.parent))
        try:
            make(aside)
            aside.chmod(0o755)
            for old in final.parent.iterdir():
                if old.is_dir() and old != aside:
                    shutil.rmtree(old)
            aside.rename(final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return final


def is_made(name: str, key: str) -> bool:
    """Whether the folder ``name/key`` is there."""
    return (folder() / name / key).is_dir()


def digest(paths: Iterable[Path], *words: str) -> str:
    """A short hash over files (folders: all their files, by relative name) and words."""
    sum_ = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        for file in sorted(_files(path)):
            sum_.update(f"\0{file.relative_to(path.parent)}\0".encode())
            sum_.update(file.read_bytes())
    return sum_.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for directory, folders, names in os.walk(path):
        folders[:] = [f for f in folders if f != "__pycache__" and not f.endswith(".egg-info")]
        yield from (Path(directory, name) for name in names)
