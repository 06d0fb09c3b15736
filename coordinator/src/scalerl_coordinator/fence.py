"""The right of one coordinator to write a run's journal, on a cluster.

A coordinator on a lost node may still run, and write, when the next one starts. In ``coordinator/`` are::

    owner-ATTEMPT-POD/   of each pod, with one file: ``held`` or ``held~`` while its process has the right, ``ended`` after it has given it
                         up, ``lost`` after another has taken it
    journal-NUMBER/      the journal; the highest number counts. ``writer-POD`` in it names the pod that writes it

After each group commit, and before it acknowledges anything, a process renames its file from one of the first two names to the other. A
process that begins renames those of all others to ``lost``, and only then reads the journal: what another has acknowledged was on
disk before. A late write of the other changes files of its own only, since the new process writes to a copy, in a folder of the next
number. No copy is needed after the other has ended, or where an earlier process of the same pod wrote the journal: a kubelet starts no
container before the last one has ended.

Each of these steps is a rename, which is atomic at the server of a shared volume, and fails there, whatever its client has cached. None
relies on a lock, or on the clock. A process that is lower than another, or has lost the right, does not get it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from scalerl_api.attempts import Attempt, AttemptSuperseded
from scalerl_coordinator.disk import sync

log = logging.getLogger(__name__)

_OWNER: Final = "owner-"
_HELD: Final = ("held", "held~")
_ENDED: Final = "ended"
_LOST: Final = "lost"
_JOURNAL: Final = "journal-"
_WRITER: Final = "writer-"
_STAGED: Final = ".tmp-"
_RETRY_SECONDS: Final = 0.02


class Fence:
    """The right to write the journal in :attr:`folder`, until another process takes it.

    Args:
        root: the run's ``coordinator``.
        pod: the pod's uid.
    """

    def __init__(self, root: Path, attempt: Attempt, pod: str) -> None:
        self._root, self._attempt, self._pod = root, attempt, pod
        self._owner = root / f"{_OWNER}{attempt}-{pod}"
        self._held, self._next = (self._owner / name for name in _HELD)
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        """Pods that had given the right up when this process began."""
        self.folder = root

    @classmethod
    def begin(cls, root: Path, attempt: Attempt, pod: str) -> Fence:
        """Take the right from all other coordinators.

        Raises:
            AttemptSuperseded: one with a later attempt, or that has replaced this pod, has begun.
            OSError: the volume cannot be written.
        """
        fence = cls(root, attempt, pod)
        root.mkdir(parents=True, exist_ok=True)
        fence._hold()
        fence._take()
        fence._remove(path for path in root.iterdir() if path.name.startswith(_STAGED))
        while True:
            fence.check()
            # Another process, which begins or ends too, may rename something meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if fence._adopt():
                    break
            time.sleep(_RETRY_SECONDS)
        fence._clean()
        fence.check()
        return fence

    def check(self) -> None:
        """Check that no other coordinator has taken the right. Thread-safe.

        Raises:
            AttemptSuperseded: one has.
            OSError: the volume cannot be written.
        """
        with self._lock:
            # The server may have done a rename whose answer was lost; the other way round it proves the same.
            for _ in range(2):
                self._held, self._next = self._next, self._held
                with contextlib.suppress(FileNotFoundError):
                    self._next.rename(self._held)
                    return
            raise self._superseded("another coordinator has taken its right to write")

    def end(self) -> None:
        """Give the right up, after the last write."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            self._held.rename(self._owner / _ENDED)

    def _superseded(self, why: str) -> AttemptSuperseded:
        return AttemptSuperseded(
            f"{self._root}: attempt {self._attempt} of the coordinator ({self._pod}) ends, and acknowledges nothing more: {why}"
        )

    # --- beginning ------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Make this pod's file, whose folder appears with it, or use that of an earlier process of the pod."""
        while not self._owner.exists():
            with contextlib.suppress(FileNotFoundError):  # another, which begins too, has removed it
                staged = self._staged()
                (staged / self._held.name).touch(0o600)
                staged.rename(self._owner)
        for name in (self._next.name, _ENDED):
            with contextlib.suppress(FileNotFoundError):
                (self._owner / name).rename(self._held)
        sync(self._owner)
        sync(self._root)

    def _take(self) -> None:
        """Take the right from all others, unless one of them is later."""
        owners = {
            path: Attempt.parse(path.name.removeprefix(_OWNER)) for path in self._root.glob(f"{_OWNER}*")
        }
        others = {path: attempt for path, attempt in owners.items() if attempt and path != self._owner}
        later = [path.name for path, attempt in others.items() if attempt > self._attempt]
        if later:
            raise self._superseded(
                f"{', '.join(later)} is later. Once no process of it can write any more (its pod is gone, or its machine is off), remove "
                "that folder if this one is to continue"
            )
        self.check()
        for owner in others:
            if _take_from(owner):
                self._ended.add(owner.name.removeprefix(f"{_OWNER}{others[owner]}-"))
            sync(owner)

    def _adopt(self) -> bool:
        """Make the journal this process's own. Returns False if another process has changed it meanwhile."""
        number, source = _current(self._root)
        writer = None if source is None else next(source.glob(f"{_WRITER}*"), None)
        pod = "" if writer is None else writer.name.removeprefix(_WRITER)
        if source is not None and writer is not None and pod in {*self._ended, self._pod}:
            writer.rename(source / f"{_WRITER}{self._pod}")
            self.folder = source
            sync(source)
            return True
        staged = self._staged()
        try:
            (staged / f"{_WRITER}{self._pod}").touch(0o600)
            copied = _copy(source or self._root, staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if not copied:
            shutil.rmtree(staged, ignore_errors=True)
            return False
        # Without this check, a process that has lost the right could place a copy beside the journal that is written by now.
        self.check()
        self.folder = self._root / f"{_JOURNAL}{number + 1:08d}"
        try:
            staged.rename(self.folder)
        except OSError as error:
            log.info("%s: %s", self.folder, error.strerror)
            return False
        sync(self._root)
        return True

    def _staged(self) -> Path:
        staged = self._root / f"{_STAGED}{uuid.uuid4().hex}"
        staged.mkdir()
        return staged

    def _clean(self) -> None:
        """Remove what is not this process's."""
        found, own = list(self._root.iterdir()), self.folder.name
        self._remove(
            path
            for path in found
            if path.name.startswith(_STAGED) or (path.name.startswith(_JOURNAL) and path.name < own)
        )
        for path in found:
            if _is_journal_file(path.name):
                path.unlink(missing_ok=True)

    def _remove(self, folders: Iterable[Path]) -> None:
        """Remove folders. Of one that another process still fills, the rename ends that."""
        for path in list(folders):
            staged = self._root / f"{_STAGED}{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                path.rename(staged)
                shutil.rmtree(staged, ignore_errors=True)


def _take_from(owner: Path) -> bool:
    """Take one pod's right. Returns whether it had given it up."""
    lost = owner / _LOST
    while True:
        for name in (*_HELD, _ENDED):
            with contextlib.suppress(FileNotFoundError):
                (owner / name).rename(lost)
                if name != _ENDED:
                    log.warning("took the right to write the journal from %s", owner.name)
                return name == _ENDED
        if lost.exists():
            return False
        time.sleep(_RETRY_SECONDS)  # its process renames the file meanwhile


def current_folder(root: Path) -> Path:
    """The folder with a run's journal, for a process that a lock file protects."""
    return _current(root)[1] or root


def _current(root: Path) -> tuple[int, Path | None]:
    """Number and path of the journal's folder; 0 without one, where its files, if any, are in ``root``."""
    numbers = [p.name.removeprefix(_JOURNAL) for p in root.glob(f"{_JOURNAL}*")]
    last = max((int(number) for number in numbers if number.isdigit()), default=0)
    return last, root / f"{_JOURNAL}{last:08d}" if last else None


def _is_journal_file(name: str) -> bool:
    return name.startswith(("segment-", "snapshot-")) and name.rpartition("-")[2].isdigit()


def _copy(source: Path, target: Path) -> bool:
    """Copy a journal's files and sync them. Returns False if files have come meanwhile. Raises FileNotFoundError if some have gone."""
    before = {name for name in os.listdir(source) if _is_journal_file(name)}
    for name in sorted(before):
        shutil.copyfile(source / name, target / name)
        sync(target / name)
    sync(target)
    return before == {name for name in os.listdir(source) if _is_journal_file(name)}
