"""Folders to which published weights are written: of the run's volume, or of an object store.

Of both, a file has its name once it is whole, and never changes under it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from scalerl_api.attempts import Attempt
from scalerl_api.object_store import NewObject, ObjectStore, StoreError
from scalerl_api.weight_files import FILE_NAME, STORED, stored_path
from scalerl_trainer.errors import AttemptSuperseded
from scalerl_trainer.fence import Fence

log = logging.getLogger(__name__)


class NewFile(Protocol):
    """A file that has no name yet. Every method raises OSError."""

    def write(self, content: bytes | memoryview) -> None:
        """Add to it. ``content`` may change afterwards."""

    def sync(self) -> None:
        """Wait until most of what was added is where it is to be, so that :meth:`complete` does not have to."""

    def complete(self) -> int:
        """Give it its name; returns its size in bytes."""

    def discard(self) -> None:
        """Remove what was added."""


class WeightFolder(Protocol):
    """A folder of one attempt of the trainer. Every method raises OSError."""

    name: str
    to: str
    """The store's prefix (``weightSync.to``); empty for the volume."""
    kind: str
    """Of its storage, in error messages."""
    advice: str
    """What to do if it cannot be written."""
    open_files_stay: bool
    """Whether a reader that has opened a file reads on after it is deleted."""

    def __str__(self) -> str:
        """Its path or URL."""

    def exists(self) -> bool:
        """Whether :meth:`make` was called, and no one has removed it since."""

    def make(self) -> None:
        """Create it."""

    def others(self) -> list[WeightFolder]:
        """The folders beside it."""

    def names(self) -> list[str]:
        """Its files, also those that are not complete."""

    def create(self, name: str, max_bytes: int) -> NewFile:
        """Begin to write a file of at most ``max_bytes``."""

    def delete(self, name: str) -> None:
        """Delete a file."""

    def remove(self) -> None:
        """Delete it with its files; one that is not there is no error."""


class _NewVolumeFile:
    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._staged = folder / f".{name}"
        self._file = self._staged.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def complete(self) -> int:
        with self._file:
            self.sync()
            size = self._file.tell()
        self._staged.rename(self._path)
        return size

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # what is buffered may not fit either
            self._file.close()
        self._staged.unlink()


class VolumeFolder:
    """A folder of the run's directory."""

    to = ""
    kind = "volume"
    advice = "Check the volume of the run"
    open_files_stay = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name

    def __str__(self) -> str:
        return str(self._path)

    def exists(self) -> bool:
        return self._path.is_dir()

    def make(self) -> None:
        self._path.mkdir(parents=True)

    def others(self) -> list[WeightFolder]:
        return [VolumeFolder(path) for path in self._path.parent.glob("*") if path != self._path]

    def names(self) -> list[str]:
        return [path.name for path in self._path.iterdir()]

    def create(self, name: str, max_bytes: int) -> NewFile:
        return _NewVolumeFile(self._path, name)

    def delete(self, name: str) -> None:
        (self._path / name).unlink()

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class _NewStoredFile:
    """Parts of one that is not completed are of no object; only a lifecycle rule of the bucket removes them."""

    def __init__(self, new: NewObject) -> None:
        self._new = new

    def write(self, content: bytes | memoryview) -> None:
        with _os_errors():
            self._new.write(content)

    def sync(self) -> None:  # few parts are under way at a time
        pass

    def complete(self) -> int:
        with _os_errors():
            return self._new.close()

    def discard(self) -> None:
        pass


class StoredFolder:
    """A folder of a prefix that :func:`begin_attempt` has claimed for the run. It has no existence of its own without files.

    Of the objects below ``weights/``, it knows ``ATTEMPT/base-…`` and ``ATTEMPT/delta-…`` alone, and deletes no others.
    """

    kind = "object store"
    advice = "Check the object store, its quota and the trainer's credentials"
    open_files_stay = False

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self.name = name
        self.to = store.to

    def __str__(self) -> str:
        return f"{self.to}/{STORED}/{self.name}"

    def exists(self) -> bool:
        return bool(self.names())

    def make(self) -> None:
        pass

    def others(self) -> list[WeightFolder]:
        folders = {folder for folder, _ in self._files(STORED) if Attempt.parse(folder) is not None}
        return [StoredFolder(self._store, folder) for folder in sorted(folders - {self.name})]

    def names(self) -> list[str]:
        return [name for _, name in self._files(f"{STORED}/{self.name}")]

    def _files(self, below: str) -> list[tuple[str, str]]:
        """Folder and name of each weight file."""
        with _os_errors():
            paths = [path.split("/") for path in self._store.sizes(below)]
        return [(path[1], path[2]) for path in paths if len(path) == 3 and FILE_NAME.fullmatch(path[2])]

    def create(self, name: str, max_bytes: int) -> NewFile:
        with _os_errors():
            return _NewStoredFile(self._store.new(stored_path(self.name, name), max_bytes))

    def delete(self, name: str) -> None:
        with _os_errors():
            self._store.delete([stored_path(self.name, name)])

    def remove(self) -> None:
        paths = [stored_path(self.name, name) for name in self.names()]
        with _os_errors():
            self._store.delete(paths)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise OSError(errno.EIO, str(error)) from error


def begin_attempt(
    folder: WeightFolder,
    fence: Fence,
    claim: Callable[[], None] = lambda: None,
    attempt: Attempt | None = None,
) -> Callable[[], None]:
    """What :class:`~.weight_writer.WeightWriter` calls first: deletes the folders of earlier attempts beside ``folder``.

    They are listed before the check, so none is of a later attempt: that one had begun before it made its folder. In a store, a trainer of
    an equal run in another directory passes the claim and the check. The one that began first finds its folder deleted and the other's, and
    writes nothing while that is there.

    Args:
        claim: called before; raises if the prefix is another run's. That it raises ``StoreError`` is as a write that fails.
        attempt: the trainer's own, if each attempt has another number: in a directory of its own, the fence does not find later ones.
    """

    found: set[str] | None = None

    def begin() -> None:
        nonlocal found
        with _os_errors():
            claim()
        others = folder.others()
        fence.check()
        for other in others:
            later = Attempt.parse(other.name)
            if attempt is not None and later is not None and later > attempt:
                raise AttemptSuperseded(
                    f"attempt {later} publishes to {other}, and this one is {attempt}. Once no process of attempt {later} can write "
                    "any more, remove that folder if this one is to continue"
                )
        names = {other.name for other in others}
        found = names if found is None else found
        if folder.to and attempt is None and (foreign := names - found):
            raise OSError(
                errno.EBUSY,
                f"another trainer publishes there ({min(foreign)}), and has deleted this one's files: give each run a weightSync.to of "
                "its own, or stop the other; if it was killed, remove its folder",
            )
        for other in others:
            log.info("removing the weights that an earlier attempt published: %s", other)
            with contextlib.suppress(OSError):
                other.remove()

    return begin
