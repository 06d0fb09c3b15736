"""Checkpoints on disk: whole or not there.

One checkpoint is a folder ``step-<step>``: what each rank's engine saved, each rank's random state, the
coordinator's snapshot, and ``manifest.json`` with every file's size and SHA-256 and a digest of itself.
It is written aside under a name that starts with ``.tmp-``, every file and folder is flushed to the
disk, then one rename makes it a checkpoint. So a crash between any two system calls leaves the
checkpoints of before, and a folder that is not looked at and is removed at the next start.

A checkpoint counts only if every file is there with its size and hash. The newest that does is loaded;
one that does not is set aside as ``damaged-…``, loudly.

Hashes are SHA-256 because processors have instructions for it (1.7 GB/s a core here, BLAKE2b .9) and
``sha256sum`` checks one by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scalerl_api.paths import RunPaths
from scalerl_trainer.errors import TrainerError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SNAPSHOT = "coordinator.snapshot"
FORMAT = 2
FIXED_SHAPE = 1
"""An earlier format, which loads only at the shape it was written with."""
ASIDE = ".tmp-"
DAMAGED = "damaged-"
_NAME = re.compile(r"^step-(\d{8,})$")
_CHUNK_BYTES = 4 << 20


class CheckpointError(TrainerError):
    """A checkpoint could not be written, or none of those that exist can be read."""


class Disk:
    """The system calls that a checkpoint is made of; tests make them fail one by one."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Flush a file, or the entries of a folder, to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)

    def sha256(self, path: Path) -> str:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            buffer = bytearray(_CHUNK_BYTES)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        return digest.hexdigest()


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint; ``path`` is relative to it."""

    path: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What belongs to a checkpoint. ``shape``: ranks, ZeRO stage and dtype that it was written with."""

    format: int
    step: int
    shape: dict[str, str]
    files: list[FileRecord]

    def encode(self) -> bytes:
        """The manifest with its own digest, as JSON that a person can read."""
        body = msgspec.to_builtins(self)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps({**body, "digest": digest}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises ``CheckpointError`` when it is not a manifest, or not the one that was written."""
        try:
            body: dict[str, Any] = json.loads(data)
            digest = body.pop("digest")
            manifest = msgspec.convert(body, cls)
        except (ValueError, KeyError, AttributeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from error
        if digest != hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest():
            raise CheckpointError(f"{MANIFEST} does not match its own digest")
        if manifest.format not in (FIXED_SHAPE, FORMAT):
            raise CheckpointError(
                f"{MANIFEST} has format {manifest.format}, this trainer reads {FIXED_SHAPE} and {FORMAT}"
            )
        return manifest


@dataclass(frozen=True)
class Aside:
    """A checkpoint that is being written."""

    step: int
    directory: Path


class CheckpointStore:
    """The checkpoints of one run. Calls are rank 0's unless they say otherwise."""

    def __init__(self, paths: RunPaths, keep: int, disk: Disk | None = None) -> None:
        self._paths = paths
        self._keep = keep
        self._disk = disk or Disk()

    # --- writing ------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Aside:
        """A folder to write ``step``'s state into.

        Raises:
            OSError: read-only, full, …
        """
        directory = self._paths.checkpoints / f"{ASIDE}{step:08d}-{os.getpid()}"
        if directory.exists():
            self._disk.remove(directory)
        self._disk.make_directory(directory)
        return Aside(step, directory)

    def record(self, aside: Aside, files: Iterable[Path]) -> list[FileRecord]:
        """Flush and hash ``files`` of ``aside``. Any rank, any thread; the slow part of a checkpoint.

        Raises:
            OSError
        """
        records = []
        for path in files:
            self._disk.sync(path)
            size = path.stat().st_size
            records.append(
                FileRecord(path.relative_to(aside.directory).as_posix(), size, self._disk.sha256(path))
            )
        return records

    def commit(
        self,
        aside: Aside,
        snapshot: bytes,
        records: list[FileRecord],
        shape: dict[str, str],
        *,
        best: int = -1,
    ) -> list[int]:
        """Make ``aside`` a checkpoint, remove those too many, and return the newest, which a run goes on from.

        Beside them the newest one not after step ``best`` is kept, for a person to take the run back to: it is not
        among those returned, so what the coordinator remembers of its time may go (its snapshot has what is needed).

        ``records`` are those of all ranks together, and every file of the folder must be among them.

        Raises:
            OSError: the checkpoint was not made; those of before are as they were.
            CheckpointError: a file has no record.
        """
        path = aside.directory / SNAPSHOT
        self._disk.write(path, snapshot)
        records = sorted([*records, *self.record(aside, [path])], key=lambda r: r.path)
        known = {r.path for r in records}
        present = {f.relative_to(aside.directory).as_posix() for f in files_in(aside.directory)}
        if known != present:
            raise CheckpointError(
                f"step {aside.step}: files and records differ: {sorted(known ^ present)[:5]}"
            )
        manifest = aside.directory / MANIFEST
        self._disk.write(manifest, Manifest(FORMAT, aside.step, shape, records).encode())
        self._disk.sync(manifest)
        for folder in sorted(f for f in aside.directory.rglob("*") if f.is_dir()):
            self._disk.sync(folder)
        self._disk.sync(aside.directory)
        target = self._paths.checkpoint(aside.step)
        if target.exists():
            # Of a line that was given up (a checkpoint before it had to be loaded). Older ones remain
            # until the new one is in place.
            self._disk.rename(target, self._paths.checkpoints / f"{ASIDE}old-{target.name}-{os.getpid()}")
        self._disk.rename(aside.directory, target)
        self._disk.sync(self._paths.checkpoints)
        return self._prune(best)

    def abandon(self, aside: Aside) -> None:
        """Remove what was written of a checkpoint that will not be; best effort."""
        with contextlib.suppress(OSError):
            self._disk.remove(aside.directory)

    def clean(self) -> None:
        """Remove what crashes have left behind; best effort."""
        for path in self._folders(ASIDE):
            with contextlib.suppress(OSError):
                self._disk.remove(path)

    def _prune(self, best: int) -> list[int]:
        steps = self.steps()
        kept, others = steps[: self._keep], steps[self._keep :]
        spared = next((step for step in steps if step <= best), None)
        for step in others:
            if step == spared:
                continue
            # Renamed first: a folder that is half removed must not look like a checkpoint.
            path = self._paths.checkpoint(step)
            aside = path.with_name(f"{ASIDE}old-{path.name}-{os.getpid()}")
            try:
                self._disk.rename(path, aside)
                self._disk.remove(aside)
            except OSError as error:
                log.error("checkpoint %d is too many but cannot be removed: %s", step, error)
        return sorted(kept)

    # --- reading ------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps with a folder of a checkpoint's name, newest first."""
        found = (_NAME.match(path.name) for path in self._folders("step-"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """Any rank.

        Raises:
            CheckpointError: missing or damaged.
        """
        directory = self._paths.checkpoint(step)
        try:
            manifest = Manifest.decode((directory / MANIFEST).read_bytes())
        except OSError as error:
            raise CheckpointError(f"{directory / MANIFEST}: {error.strerror}") from error
        if manifest.step != step:
            raise CheckpointError(f"{directory} says that it is step {manifest.step}")
        return manifest

    def verify(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Check files ``part``, ``part + parts``, … of a checkpoint; ranks share the work.

        Raises:
            CheckpointError: says which file is missing or damaged, and how.
        """
        directory = self._paths.checkpoint(manifest.step)
        for record in manifest.files[part::parts]:
            path = directory / record.path
            try:
                size = path.stat().st_size
                if size != record.bytes:
                    raise CheckpointError(f"{path} has {size} bytes, the manifest says {record.bytes}")
                if self._disk.sha256(path) != record.sha256:
                    raise CheckpointError(f"{path} does not match its hash")
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error

    def set_aside(self, step: int, reason: str) -> None:
        """Take a damaged checkpoint out of the way, and say so."""
        path = self._paths.checkpoint(step)
        log.error("checkpoint %d is damaged and will not be used: %s", step, reason)
        target = path.with_name(f"{DAMAGED}{path.name}-{os.getpid()}")
        try:
            self._disk.rename(path, target)
        except OSError as error:
            log.error("and cannot be set aside: %s", error)

    def damaged(self) -> list[str]:
        """Names of the folders that :meth:`set_aside` has made, sorted."""
        return sorted(path.name for path in self._folders(DAMAGED))

    def snapshot(self, step: int) -> bytes:
        """The coordinator's state of a verified checkpoint."""
        return (self._paths.checkpoint(step) / SNAPSHOT).read_bytes()

    def directory(self, step: int) -> Path:
        return self._paths.checkpoint(step)

    def _folders(self, prefix: str) -> list[Path]:
        try:
            return [p for p in self._paths.checkpoints.iterdir() if p.name.startswith(prefix) and p.is_dir()]
        except FileNotFoundError:
            return []


def files_in(directory: Path) -> Iterator[Path]:
    """All files below ``directory``, in a fixed order; the manifest is not among them."""
    return (f for f in sorted(directory.rglob("*")) if f.is_file() and f != directory / MANIFEST)
