"""Files of a run in its object store (``checkpoint.to``), for pods whose directory is their own (``storage.mountedBy``).

======================= ========================================================================================
``model/``              the prepared model, written by the preparation, fetched by :mod:`.fetch_model`
``data/``               the tables of ``task.dataset``, likewise
``warm-started/``       the weights after a warm start, by :mod:`.checkpoints.object_store`, as are the checkpoints beside these folders
``hf/``                 exported models without ``trainer.export.to``, by :mod:`.export_targets`
======================= ========================================================================================

The first three have a ``files.json``, written last, with the size and SHA-256 of every file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from scalerl_api.object_store import ObjectStore, StoreError
from scalerl_api.spec import RunSpec
from scalerl_tasks.dataset.table_source import FOLDER as DATA
from scalerl_trainer.checkpoints.disk import Disk, check_space
from scalerl_trainer.checkpoints.manifest import FileRecord

MODEL = "model"
EXPORTS = "hf"
_INDEX = "files.json"
_FILES_AT_A_TIME = 4


class DamagedError(StoreError):
    """What a folder in the store has is not what was written."""


class StoredFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a folder in the store."""

    files: list[FileRecord]
    links: dict[str, str]
    """Target by name of each link: to the volume of ``model.cache``, which has the file."""


def of_run(spec: RunSpec) -> tuple[str, ...]:
    """The folders that the preparation uploads."""
    return (MODEL, DATA) if spec.has_dataset else (MODEL,)


def upload(store: ObjectStore, folder: str, files: Iterable[Path]) -> None:
    """Upload files as ``folder``; files that are there already with the same content are not sent again.

    Raises:
        OSError: a file cannot be read.
        StoreError: an upload failed; :func:`fetch` finds the earlier content, or none.
    """
    ordered = sorted(files)
    links = {file.name: os.readlink(file) for file in ordered if file.is_symlink()}
    plain = [file for file in ordered if file.name not in links]
    records = [FileRecord(file.name, file.stat().st_size, Disk().sha256(file)) for file in plain]
    content = StoredFolder(records, links)
    try:
        before = index_of(store, folder)
    except DamagedError:
        before = StoredFolder([], {})
    if before == content:
        return
    if before is not None:  # an index must not name files that are replaced below
        store.delete([f"{folder}/{_INDEX}"])
    for file in plain:
        store.put(f"{folder}/{file.name}", file)
    store.put(f"{folder}/{_INDEX}", msgspec.json.format(msgspec.json.encode(content), indent=1))


def index_of(store: ObjectStore, folder: str) -> StoredFolder | None:
    """The content of a folder; None if it was never uploaded as a whole. Raises ``DamagedError``."""
    found = store.read(f"{folder}/{_INDEX}")
    try:
        return None if found is None else msgspec.json.decode(found, type=StoredFolder)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{store.to}/{folder}/{_INDEX} cannot be read: {error}") from error


def fetch(store: ObjectStore, folder: str, target: Path, *, leave_out: str = "") -> bool:
    """Fetch a folder as ``target``, atomically; False if it was never uploaded as a whole.

    An existing ``target`` is kept if it has these files, and replaced otherwise.

    Args:
        leave_out: suffix of files that are not fetched; empty for none.

    Raises:
        OSError: the files cannot be written, or have no space.
        DamagedError: a file is missing or does not match its SHA-256.
    """
    content = index_of(store, folder)
    if content is None:
        return False

    def wanted(name: str) -> bool:
        return not (leave_out and name.endswith(leave_out))

    records = [record for record in content.files if wanted(record.path)]
    links = {name: link for name, link in content.links.items() if wanted(name)}
    for name in (*(record.path for record in records), *links):
        if Path(name).name != name:
            raise DamagedError(f"{store.to}/{folder}/{_INDEX} has {name!r}, which is not the name of a file")
    if all(is_there(target / record.path, record) for record in records):
        return True
    staged = target.with_name(f".{target.name}-{os.getpid()}")
    for path in (staged, target):
        shutil.rmtree(path, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_space(target.parent, sum(record.bytes for record in records), f"{store.to}/{folder}")
    staged.mkdir()

    def download(record: FileRecord) -> None:
        file = staged / record.path
        digest = store.download(f"{folder}/{record.path}", record.bytes, file)
        if digest != record.sha256:
            problem = "is missing" if digest is None else "does not match its SHA-256"
            raise DamagedError(f"{store.to}/{folder}/{record.path} {problem}")

    try:
        with ThreadPoolExecutor(_FILES_AT_A_TIME) as threads:
            list(threads.map(download, records))
        for name, link in links.items():
            (staged / name).symlink_to(link)
        staged.rename(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return True


def is_there(file: Path, record: FileRecord) -> bool:
    """Whether the file of an earlier attempt is complete."""
    return file.is_file() and file.stat().st_size == record.bytes and Disk().sha256(file) == record.sha256
