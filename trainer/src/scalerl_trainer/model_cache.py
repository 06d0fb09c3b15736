"""Models of a hub in a folder that many runs share (``model.cache``): each commit is downloaded once.

    ROOT/OWNER--NAME/COMMIT/            the model's files, complete and verified; ``.files.json`` has their sizes and hashes
    ROOT/OWNER--NAME/.COMMIT.lock       held by the preparation that downloads the commit; the others wait
    ROOT/OWNER--NAME/.COMMIT.partial/   its download, renamed to ``COMMIT`` when all hashes are right

No reader sees a partial download, whatever happens to the downloader: the rename is atomic, and a killed process loses its lock. The
lock saves traffic only: where a file system ignores it, two downloads verify their files, and one of them is kept. Damaged files of a
complete model are replaced one by one, since runs may be using the others. To evict a model, delete its folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from scalerl_trainer.errors import TrainerError, first_line

log = logging.getLogger(__name__)

LIST: Final = ".files.json"
WAIT_SECONDS: Final = 6 * 3600.0
"""Longest wait for the download of another preparation; the Job then retries."""
REPORT_SECONDS: Final = 60.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class CacheError(TrainerError):
    """A model cannot be stored now; a later attempt may succeed."""


class NotCached(TrainerError):
    """A cache that may not be written does not have the model."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of a model, as the hub describes it."""

    size: int
    """In bytes."""
    hash: str
    """``sha256:…`` of a large file, ``git:…`` (git's blob id) of any other."""
    mtime_ns: int = 0
    """Modification time when the file was verified."""


class ModelCache:
    """The cache below ``root``. read_only: nothing is downloaded."""

    def __init__(self, root: Path, *, read_only: bool = False, poll_seconds: float = 1.0) -> None:
        self._root, self._read_only, self._poll_seconds = root, read_only, poll_seconds

    def folder(
        self,
        name: str,
        revision: str,
        patterns: Sequence[str],
        check: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """The folder with the files of a revision that match one of ``patterns``, downloaded if it is not there.

        Args:
            check: called with a folder that has the small files only, before large ones are downloaded.

        Raises:
            NotCached: the cache is read-only and lacks the model.
            CacheError: the download failed verification twice, or another one did not end.
            Exception: of the hub's client.
        """
        commit = revision if _COMMIT.fullmatch(revision) else self._commit(name, revision)
        entry = self._root / name.replace("/", "--") / commit
        if _is_intact(entry):
            return entry
        if self._read_only:
            raise NotCached(
                f"{name} at {commit} is not complete in the cache, which is mounted read-only: store it with a run whose "
                "model.cache.readOnly is false"
            )
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(f".{commit}.lock"), f"{name} at {commit}", self._poll_seconds) as own:
            if not _is_intact(entry):
                staged = entry.with_name(f".{commit}.partial{'' if own else f'-{socket.gethostname()}'}")
                self._store(name, commit, patterns, check, staged, entry)
        return entry

    def _commit(self, name: str, revision: str) -> str:
        from huggingface_hub import HfApi

        found = HfApi().model_info(name, revision=revision).sha
        if found is None or not _COMMIT.fullmatch(found):
            raise CacheError(
                f"the hub names no commit for {name} at {revision}: set model.hub.revision to a commit"
            )
        return found

    def _store(
        self,
        name: str,
        commit: str,
        patterns: Sequence[str],
        check: Callable[[Path], None],
        staged: Path,
        entry: Path,
    ) -> None:
        expected = {
            file: known
            for file, known in listed(name, commit).items()
            if any(fnmatch(file, p) for p in patterns)
        }
        staged.mkdir(exist_ok=True)
        shutil.rmtree(
            staged / ".cache", ignore_errors=True
        )  # of a killed download; the client does not resume within a file
        wanted = [file for file, known in expected.items() if not _is_right(entry / file, known)]
        small = [file for file in wanted if not expected[file].hash.startswith("sha256:")]
        _fetch(name, commit, staged, {file: expected[file] for file in small})
        for file in expected.keys() - {*wanted}:
            if not expected[file].hash.startswith("sha256:"):
                (staged / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry / file, staged / file)
        check(staged)  # not the entry, whose damaged files are not replaced yet
        _fetch(name, commit, staged, {file: expected[file] for file in wanted})
        shutil.rmtree(staged / ".cache", ignore_errors=True)
        for file in {p.relative_to(staged).as_posix() for p in staged.rglob("*") if p.is_file()} - {*wanted}:
            (staged / file).unlink()
        if not entry.exists():
            _write_list(staged, expected)
            with suppress(OSError):  # another download of a file system without locks was faster
                staged.rename(entry)
        if staged.exists():
            for file in wanted:
                (entry / file).parent.mkdir(parents=True, exist_ok=True)
                (staged / file).replace(entry / file)
            _write_list(entry, expected)
            shutil.rmtree(staged, ignore_errors=True)
        _sync(entry.parent)


def listed(name: str, commit: str) -> dict[str, CachedFile]:
    """The files of a commit by path, as the hub lists them."""
    from huggingface_hub import HfApi

    found = {}
    for file in HfApi().model_info(name, revision=commit, files_metadata=True).siblings or ():
        path = Path(file.rfilename)
        if path.is_absolute() or ".." in path.parts:
            raise CacheError(f"the hub lists the file {file.rfilename!r} for {name} at {commit}")
        if file.lfs is not None:
            found[file.rfilename] = CachedFile(file.lfs.size, f"sha256:{file.lfs.sha256}")
        elif file.size is not None and file.blob_id is not None:
            found[file.rfilename] = CachedFile(file.size, f"git:{file.blob_id}")
        else:
            raise CacheError(f"the hub gives neither size nor hash of {file.rfilename} of {name} at {commit}")
    return found


def _fetch(name: str, commit: str, staged: Path, expected: Mapping[str, CachedFile]) -> None:
    """Download the files that are missing or damaged in ``staged``, and verify them; damaged ones once more."""
    from huggingface_hub import hf_hub_download

    wrong = list(expected)
    for _ in range(2):
        wrong = [file for file in wrong if not _is_right(staged / file, expected[file])]
        for file in wrong:
            (staged / file).unlink(missing_ok=True)
            hf_hub_download(name, file, revision=commit, local_dir=staged, force_download=True)
    wrong = [file for file in wrong if not _is_right(staged / file, expected[file])]
    if wrong:
        raise CacheError(
            f"{len(wrong)} files of {name} at {commit} differ from what the hub lists after two downloads: {', '.join(wrong[:3])}"
        )


def _is_right(file: Path, known: CachedFile) -> bool:
    """Whether a file has this size and hash. Reads all of it."""
    try:
        if file.stat().st_size != known.size:
            return False
        kind, _, value = known.hash.partition(":")
        digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
        if kind == "git":
            digest.update(b"blob %d\0" % known.size)
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest() == value


def _is_intact(entry: Path) -> bool:
    """Whether a model is complete. Only files whose time has changed since they were verified are read."""
    try:
        content = json.loads((entry / LIST).read_text(encoding="utf-8"))
        files = {str(name): CachedFile(**known) for name, known in content.items()}
        for name, known in files.items():
            found = (entry / name).stat()
            if found.st_size != known.size:
                return False
            if found.st_mtime_ns != known.mtime_ns and not _is_right(entry / name, known):
                return False
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    return bool(files)


def _write_list(folder: Path, files: Mapping[str, CachedFile]) -> None:
    """Flush the files, and write the list of them, atomically."""
    content = {}
    for name, known in files.items():
        _sync(folder / name)
        content[name] = asdict(known) | {"mtime_ns": (folder / name).stat().st_mtime_ns}
    temporary = folder / f"{LIST}.new"
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _sync(temporary)
    temporary.replace(folder / LIST)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(file: Path, what: str, poll_seconds: float) -> Iterator[bool]:
    """Hold the lock ``file``, which ends with this process. Yields False where the file system has no locks.

    Raises:
        CacheError: after :data:`WAIT_SECONDS`.
    """
    with file.open("ab") as stream:
        start = reported = time.monotonic()
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - start > WAIT_SECONDS:
                    raise CacheError(
                        f"another preparation has been downloading {what} for {(now - start) / 3600:.0f} hours"
                    ) from None
                if reported == start or now - reported > REPORT_SECONDS:
                    log.info("waiting for another preparation to download %s (%.0f s)", what, now - start)
                    reported = now
                time.sleep(poll_seconds)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning(
                    "no locks on the cache's file system (%s): runs may download %s twice",
                    first_line(error),
                    what,
                )
                yield False
                return
        yield True
