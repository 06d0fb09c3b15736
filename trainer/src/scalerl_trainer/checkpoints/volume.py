"""Atomic checkpoints on disk.

A checkpoint is a folder ``step-<step>`` with the engine state and the random state of each rank, the coordinator's
snapshot, and ``manifest.json``, which has the size and SHA-256 of every file and its own digest. It is written to a staging
folder ``.tmp-…``; every file and folder is flushed, and a rename commits it. A crash between any two system calls
leaves the earlier checkpoints intact, and a staging folder that the next start removes.

The staging folder is in the folder of the attempt that writes (:mod:`.fence`), and so is what a checkpoint is renamed to before it is
removed. An attempt that has been superseded, on a node that was lost, cannot rename a checkpoint into or out of its place: all that it
committed was committed before the next attempt listed the checkpoints, and is of the lineage which that one continues.

The newest checkpoint whose files all match its manifest is loaded; one that does not match is quarantined as ``damaged-…``, until
one of the same or a later step is committed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.disk import Disk, VolumeState, check_space
from scalerl_trainer.checkpoints.manifest import FORMAT, MANIFEST, CheckpointError, FileRecord, Manifest
from scalerl_trainer.fence import DAMAGED, STAGED, Fence

log = logging.getLogger(__name__)

SNAPSHOT = "coordinator.snapshot"
STAGE = "stage.json"
"""State of mid-training; only in mid-training's checkpoints, in which the coordinator's snapshot is empty."""
_NAME = re.compile(r"^step-(\d{8,})$")
_DAMAGED_NAME = re.compile(rf"^{DAMAGED}step-(\d{{8,}})")


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint in its staging folder."""

    step: int
    directory: Path


class CheckpointStore:
    """The checkpoints of one run. Only rank 0 calls it, except where noted.

    Args:
        fence: of this attempt; None: nothing is written, or no other process writes.
        removes_aside: remove superfluous checkpoints on threads, which takes .2 s a GB; :meth:`close` waits for them.
    """

    def __init__(
        self,
        paths: RunPaths,
        keep: int,
        disk: Disk | None = None,
        fence: Fence | None = None,
        *,
        removes_aside: bool = False,
    ) -> None:
        self._removals: list[threading.Thread] | None = [] if removes_aside else None
        self._paths = paths
        self._keep = keep
        self._disk = disk or Disk()
        self._fence = fence
        self._staging = paths.checkpoints if fence is None else fence.folder

    # --- writing ------------------------------------------------------------------------------------------

    def stage(self, step: int) -> StagedCheckpoint:
        """Create the staging folder of ``step``.

        Raises:
            OSError: the volume is read-only, full, or otherwise not writable.
            AttemptSuperseded: see :meth:`.Fence.check`.
        """
        directory = self._staging / f"{STAGED}{step:08d}-{os.getpid()}"
        self.check()
        self._paths.checkpoints.mkdir(parents=True, exist_ok=True)
        if directory.exists():
            self._disk.remove(directory)
        self._disk.make_directory(directory)
        return StagedCheckpoint(step, directory)

    def check(self) -> None:
        """Raise ``AttemptSuperseded`` if a later attempt has begun."""
        if self._fence is not None:
            self._fence.check()

    def flush_and_hash(
        self,
        staged: StagedCheckpoint,
        files: Iterable[Path],
        progress: Callable[[int], None] | None = None,
    ) -> list[FileRecord]:
        """Flush and hash ``files`` of ``staged``, which is slow. Any rank and any thread may call it.

        Args:
            progress: called with numbers of bytes as they are hashed.

        Raises:
            OSError
        """
        records = []
        for path in files:
            self._disk.sync(path)
            size = path.stat().st_size
            records.append(
                FileRecord(
                    path.relative_to(staged.directory).as_posix(), size, self._disk.sha256(path, progress)
                )
            )
        return records

    def commit(
        self,
        staged: StagedCheckpoint,
        snapshot: bytes,
        records: list[FileRecord],
        shape: dict[str, str],
        *,
        best: int = -1,
        uploading: int | None = None,
    ) -> list[int]:
        """Commit ``staged``, remove superfluous checkpoints, and return the steps of the newest ``keep``.

        Args:
            snapshot: the coordinator's state.
            records: records of all ranks; every file of the folder must have one.
            shape: number of ranks, ZeRO stage and dtype.
            best: best version so far. The newest checkpoint up to it is kept as well, so that the run can be returned to it by
                hand. It is not among the returned steps: the coordinator may discard its state of that time, which the
                checkpoint's snapshot has.
            uploading: step of a checkpoint that is being copied, which is kept as well.

        Raises:
            OSError: the checkpoint is not committed; earlier checkpoints are unchanged.
            CheckpointError: files and records differ.
            AttemptSuperseded: a later attempt has begun; this one has changed nothing since.
        """
        try:
            return self._commit(staged, snapshot, records, shape, best, uploading)
        except OSError:
            self.check()  # the later attempt has taken the staging folder
            raise

    def _commit(
        self,
        staged: StagedCheckpoint,
        snapshot: bytes,
        records: list[FileRecord],
        shape: dict[str, str],
        best: int,
        uploading: int | None,
    ) -> list[int]:
        path = staged.directory / SNAPSHOT
        self._disk.write(path, snapshot)
        records = sorted([*records, *self.flush_and_hash(staged, [path])], key=lambda r: r.path)
        known = {r.path for r in records}
        present = {f.relative_to(staged.directory).as_posix() for f in files_in(staged.directory)}
        if known != present:
            raise CheckpointError(
                f"step {staged.step}: files and records differ: {sorted(known ^ present)[:5]}"
            )
        manifest = staged.directory / MANIFEST
        self._disk.write(manifest, Manifest(FORMAT, staged.step, shape, records).encode())
        self._disk.sync(manifest)
        for folder in sorted(f for f in staged.directory.rglob("*") if f.is_dir()):
            self._disk.sync(folder)
        self._disk.sync(staged.directory)
        self._put_in_place(staged)
        return self._prune(best, uploading)

    def _put_in_place(self, staged: StagedCheckpoint) -> None:
        target = self._paths.checkpoint(staged.step)
        self.check()
        if target.exists():
            # It belongs to a lost lineage (an earlier checkpoint has been loaded since), or is damaged and could not be set
            # aside. It is renamed, not removed, until the new one is in place.
            self._disk.rename(target, self._staging / f"{STAGED}old-{target.name}-{os.getpid()}")
        self._disk.rename(staged.directory, target)
        self._disk.sync(self._paths.checkpoints)

    def discard(self, staged: StagedCheckpoint) -> None:
        """Remove a staging folder; best effort."""
        with contextlib.suppress(OSError):
            self._disk.remove(staged.directory)

    def remove_staged(self) -> None:
        """Remove the staging folders of crashed processes; best effort."""
        for path in self._folders(STAGED, self._staging):
            with contextlib.suppress(OSError):
                self._disk.remove(path)

    def stage_copy(self, manifest: Manifest) -> StagedCheckpoint:
        """Create the folders for a checkpoint that is read from elsewhere. Raises OSError, also if there is no space for it."""
        staged = self.stage(manifest.step)
        needed_bytes = sum(record.bytes for record in manifest.files)
        check_space(self._paths.checkpoints, needed_bytes, f"the copy of checkpoint {manifest.step}")
        for folder in {str(Path(record.path).parent) for record in manifest.files} - {"."}:
            (staged.directory / folder).mkdir(parents=True, exist_ok=True)
        return staged

    def commit_copy(self, staged: StagedCheckpoint, manifest: Manifest) -> None:
        """Give a checkpoint that was read from elsewhere its name; it is verified like any other.

        Raises:
            OSError, AttemptSuperseded
        """
        self._disk.write(staged.directory / MANIFEST, manifest.encode())
        for path in sorted(staged.directory.rglob("*"), reverse=True):
            self._disk.sync(path)
        self._disk.sync(staged.directory)
        self._put_in_place(staged)

    def _prune(self, best: int, uploading: int | None) -> list[int]:
        steps = self.steps()
        kept, others = steps[: self._keep], steps[self._keep :]
        spared = next((step for step in steps if step <= best), None)
        for step in others:
            if step in (spared, uploading):
                continue
            self._remove(self._paths.checkpoint(step))
        for name, step in self.quarantined().items():
            if step <= max(kept):  # the run has gone beyond it, without it
                self._remove(self._paths.checkpoints / name)
        return sorted(kept)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; best effort."""
        self._remove(self._paths.checkpoint(step))

    def _remove(self, path: Path) -> None:
        # Rename it first, because a partially removed folder must not have a checkpoint's name.
        staged = self._staging / f"{STAGED}old-{path.name}-{os.getpid()}"
        try:
            self._disk.rename(path, staged)
            if self._removals is None:
                self._disk.remove(staged)
            else:
                self._removals = [one for one in self._removals if one.is_alive()]
                removal = threading.Thread(target=self._remove_renamed, args=(staged,), daemon=True)
                self._removals.append(removal)
                removal.start()
        except OSError as error:
            log.error("cannot remove superfluous %s: %s", path, error)

    def _remove_renamed(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # the next checkpoint tries again
            self._disk.remove(path)

    def close(self) -> None:
        """Wait for the removal of superfluous checkpoints, which the next start would remove otherwise."""
        for removal in self._removals or ():
            removal.join()

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """The folder of the checkpoints."""
        return self._paths.checkpoints

    @property
    def warm_started_weights(self) -> Path:
        return self._paths.warm_started_weights

    def volume(self) -> VolumeState:
        """The state of the volume; of one that cannot be read, full and read-only."""
        try:
            folder = self._paths.checkpoints
            stat = os.statvfs(folder if folder.exists() else self._paths.root)
        except OSError:
            return VolumeState(0, read_only=True)
        return VolumeState(stat.f_bavail * stat.f_frsize, bool(stat.f_flag & os.ST_RDONLY))

    def steps(self) -> list[int]:
        """Steps of all folders with a checkpoint's name, newest first, without verification."""
        found = (_NAME.match(path.name) for path in self._folders("step-"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """The manifest of ``step``. Any rank may call it.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        directory = self._paths.checkpoint(step)
        try:
            manifest = Manifest.decode((directory / MANIFEST).read_bytes())
        except OSError as error:
            raise CheckpointError(f"{directory / MANIFEST}: {error.strerror}") from error
        if manifest.step != step:
            raise CheckpointError(f"{directory} has the manifest of step {manifest.step}")
        return manifest

    def verify(self, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
        """Verify files ``part``, ``part + parts``, … of a checkpoint, so that ranks can share the work. Any rank may call it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        directory = self._paths.checkpoint(manifest.step)
        for record in manifest.files[part::parts]:
            path = directory / record.path
            try:
                size = path.stat().st_size
                if size != record.bytes:
                    raise CheckpointError(f"{path} has {size} bytes, but {record.bytes} in the manifest")
                if self._disk.sha256(path) != record.sha256:
                    raise CheckpointError(f"{path} does not match its hash")
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error

    def quarantine(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint, and log it."""
        path = self._paths.checkpoint(step)
        log.error("checkpoint %d is damaged and is not used: %s", step, reason)
        # Not the process id: a copy that replaces the checkpoint may be damaged too.
        target = path.with_name(f"{DAMAGED}{path.name}-{uuid.uuid4().hex[:12]}")
        staged = self._staging / target.name
        try:
            self._disk.rename(path, staged)
            if self._fence is not None:
                self._disk.rename(staged, target)
        except OSError as error:
            log.error("cannot rename damaged checkpoint %d: %s", step, error)

    def quarantined(self) -> dict[str, int]:
        """Steps of the folders renamed by :meth:`quarantine` by their names, which are sorted."""
        found = sorted(path.name for path in self._folders(DAMAGED))
        return {name: int(match[1]) for name in found if (match := _DAMAGED_NAME.match(name))}

    def snapshot(self, step: int) -> bytes:
        """The coordinator's state of a verified checkpoint."""
        return (self._paths.checkpoint(step) / SNAPSHOT).read_bytes()

    def directory(self, step: int) -> Path:
        return self._paths.checkpoint(step)

    def _folders(self, prefix: str, root: Path | None = None) -> list[Path]:
        try:
            found = (root or self._paths.checkpoints).iterdir()
            return [p for p in found if p.name.startswith(prefix) and p.is_dir()]
        except FileNotFoundError:
            return []


def files_in(directory: Path) -> Iterator[Path]:
    """All files below ``directory`` except the manifest, sorted."""
    return (f for f in sorted(directory.rglob("*")) if f.is_file() and f != directory / MANIFEST)
