"""Copies of checkpoints in an object store, ``spec.checkpoint.to``.

============================= ==================================================================================
``run.json``                  the run that the prefix belongs to; written once
``writer.json``               the start of the trainer that writes; an earlier one stops writing
``step-<step>/…``             a checkpoint's files, as on the volume
``step-<step>/manifest.json`` written last: a folder without it is no checkpoint
``warm-started.safetensors``  the weights after a warm start, as on the volume
============================= ==================================================================================

Each rank sends its part of the files on a thread while training continues. The ranks exchange their states in the collective
that precedes each step (:meth:`.worker.Worker.sync`), and all draw the same conclusions from them (:meth:`Uploader.advance`):

1. rank 0 opens the upload: it claims the prefix, and removes manifests of a lost lineage;
2. all ranks send their files;
3. rank 0 writes the manifest, and removes superfluous checkpoints.

A checkpoint that becomes due meanwhile waits, and replaces one that waits already. A failure is retried;
after three in a row, a checkpoint that waits takes the place of the failed one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from scalerl_api.attempts import Attempt
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.checkpoint import MANIFEST, CheckpointError, CheckpointStore, FileRecord, Manifest
from scalerl_trainer.errors import AttemptSuperseded, TrainerError
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.object_store import ObjectStore, StoreError

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
WRITER_FILE = "writer.json"
PAUSES = (5.0, 20.0, 60.0, 180.0)
"""Seconds before each retry; the last one again and again."""
GIVE_UP_FAILURES = 3
"""Consecutive failures after which a checkpoint that waits takes the place of the failed one."""
READ_PAUSES = (2.0, 10.0, 30.0)
"""Seconds before each retry while the trainer starts, and cannot continue without the store."""
READERS = 4
"""Files that a rank reads at a time."""
_NICENESS = 10
_FILE = re.compile(r"^step-(\d{8,})/")
_MANIFEST = re.compile(rf"^step-(\d{{8,}})/{re.escape(MANIFEST)}$")


class PrefixTaken(TrainerError):
    """The prefix belongs to another run, or a later start of the trainer writes to it."""


def identity(run: ScaleRLRun) -> dict[str, object]:
    """What a run shares with one that continues from its checkpoints. The coordinator compares the rest with the snapshot."""
    # Without defaults: a later release may have another field.
    # Without what the weights do not depend on, as in the preparation; a folder may have another path on another cluster.
    model = run.spec.model.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"attention", "cache", "path"}
    )
    return {
        "namespace": run.metadata.namespace or "",
        "name": run.metadata.name,
        "seed": run.spec.seed,
        "model": model,
    }


def folder_of(step: int) -> str:
    """
    >>> folder_of(20)
    'step-00000020'
    """
    return f"step-{step:08d}"


def lower_priority() -> None:
    """Let the compute go before the calling thread and the client library's threads, which it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class CheckpointCopies:
    """The checkpoints of a run in its prefix. Every method raises ``StoreError``.

    Args:
        writer: identifies this start of the trainer.
    """

    def __init__(self, store: ObjectStore, run: dict[str, object], writer: str) -> None:
        self.to = store.to
        self._store, self._run = store, run
        self._incarnation = writer
        self._writer = json.dumps({"incarnation": writer}).encode()

    def claim(self) -> None:
        """Take the prefix for this run and this start of the trainer.

        Raises:
            PrefixTaken: it belongs to another run.
            AttemptSuperseded: a later attempt has claimed it.
        """
        if not self._store.create(RUN_FILE, json.dumps(self._run, indent=1).encode()):
            content = self._store.read(RUN_FILE) or b""
            try:
                owner = json.loads(content)
                differences = sorted(
                    k for k in owner.keys() | self._run.keys() if owner.get(k) != self._run.get(k)
                )
            except (ValueError, AttributeError):
                owner, differences = {}, [f"{RUN_FILE} is not readable"]
            if differences:
                raise PrefixTaken(
                    f"{self.to} belongs to the run {owner.get('namespace') or '-'}/{owner.get('name')}; this run differs in "
                    f"{', '.join(differences)}. Give this run a prefix of its own in checkpoint.to, or remove "
                    f"{self.to}/{RUN_FILE} if it is to continue from these checkpoints"
                )
        self._order(self._store.read(WRITER_FILE))
        self._store.put(WRITER_FILE, self._writer)

    def _order(self, found: bytes | None) -> bool:
        """Whether ``found``, the content of writer.json, is of an earlier attempt. Raises ``AttemptSuperseded`` if of a later one."""
        own = Attempt.parse(self._incarnation)
        try:
            other = Attempt.parse(json.loads(found or b"")["incarnation"])
        except (ValueError, KeyError, TypeError):
            return False
        if own is None or other is None:
            return False
        if other > own:
            raise AttemptSuperseded(
                f"attempt {other} writes to {self.to}, and this one is {own}. Once no process of attempt {other} can write any more, "
                f"remove {self.to}/{WRITER_FILE} if this one is to continue"
            )
        return other < own

    def check_writer(self) -> None:
        """Check that this start has the prefix, and take it again from an earlier attempt that was late to claim it.

        Raises:
            AttemptSuperseded: a later attempt has claimed it.
            PrefixTaken: another start, of which it is not known whether it is later, has.
        """
        found = self._store.read(WRITER_FILE)
        if found == self._writer:
            return
        if self._order(found):
            log.warning("%s: an earlier attempt has claimed the prefix, taking it again", self.to)
            self._store.put(WRITER_FILE, self._writer)
        else:
            raise PrefixTaken(
                f"another trainer writes to {self.to}: a later start of this run, or a run of the same name elsewhere"
            )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        return _complete(self._store.sizes())

    def manifest(self, step: int) -> bytes:
        """Raises ``CheckpointError`` if there is none."""
        content = self._store.read(f"{folder_of(step)}/{MANIFEST}")
        if content is None:
            raise CheckpointError(f"{self.to}/{folder_of(step)} has no {MANIFEST}")
        return content

    def send(self, directory: Path, step: int, record: FileRecord) -> None:
        """Write a file of a checkpoint. Raises OSError if the volume has it no longer."""
        self._store.put(f"{folder_of(step)}/{record.path}", directory / record.path)

    def send_warm_started(self, path: Path) -> None:
        """Write the weights after a warm start, unless they are there."""
        if path.exists() and self._store.sizes().get(path.name) != path.stat().st_size:
            self._store.put(path.name, path)

    def fetch_warm_started(self, path: Path) -> None:
        """Read the weights after a warm start, if there are some and the volume has none."""
        size = self._store.sizes().get(path.name)
        if size is not None and not path.exists():
            staged = path.with_name(f".{path.name}")
            self._store.download(path.name, size, staged)
            staged.rename(path)

    def fetch(self, step: int, directory: Path, records: Iterable[FileRecord]) -> None:
        """Read files of a checkpoint. Raises ``CheckpointError`` if one is missing."""

        def fetch_one(record: FileRecord) -> None:
            path, target = f"{folder_of(step)}/{record.path}", directory / record.path
            if target.exists() and target.stat().st_size == record.bytes:
                return  # of an earlier try; all files are verified later
            if not self._store.download(path, record.bytes, target):
                raise CheckpointError(f"{self.to}/{path} does not exist")

        with ThreadPoolExecutor(READERS, thread_name_prefix="fetch") as pool:
            for _ in pool.map(fetch_one, records):
                pass

    def remove_manifests(self, steps: Iterable[int]) -> None:
        """Make checkpoints that belong to a lost lineage, or are damaged, none."""
        self._store.delete(f"{folder_of(step)}/{MANIFEST}" for step in steps)

    def commit(self, manifest: Manifest, keep: int, best: int) -> None:
        """Write the manifest of a checkpoint, after all its files. Then remove others, except the newest ``keep`` and the
        newest up to ``best``, and older folders that are none.

        Raises:
            CheckpointError: files are missing or have another size.
            PrefixTaken
        """
        folder = folder_of(manifest.step)
        sizes = self._store.sizes(folder)
        wrong = [r.path for r in manifest.files if sizes.get(f"{folder}/{r.path}") != r.bytes]
        if wrong:
            raise CheckpointError(f"{self.to}/{folder}: missing or of another size: {', '.join(wrong[:5])}")
        self.check_writer()
        self._store.put(f"{folder}/{MANIFEST}", manifest.encode())
        paths = list(self._store.sizes())
        complete = _complete(paths)
        kept = {*complete[:keep], *[step for step in complete if step <= best][:1]}
        self.remove_manifests(step for step in complete if step not in kept)
        # Not the newer ones: other ranks may be sending the next checkpoint.
        self._store.delete(
            p for p in paths if (step := _step(p)) is not None and step < manifest.step and step not in kept
        )


def _step(path: str) -> int | None:
    """The step of the checkpoint that a file belongs to."""
    match = _FILE.match(path)
    return None if match is None else int(match[1])


def _complete(paths: Iterable[str]) -> list[int]:
    return sorted((int(match[1]) for path in paths if (match := _MANIFEST.match(path))), reverse=True)


def check_paths(manifest: Manifest) -> None:
    """Check that all files of a manifest from a store lie in the checkpoint's folder. Raises ``CheckpointError``."""
    for record in manifest.files:
        path = PurePosixPath(record.path)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{MANIFEST} names {record.path}, outside of the checkpoint")


@dataclass(frozen=True)
class UploadState:
    """The state of a rank's upload, for the other ranks."""

    opened: bool = False
    """On rank 0: the prefix is this run's, and the other ranks may write."""
    sent: bool = False
    """All files of the rank are there."""
    committed: bool = False
    """On rank 0: the manifest is there."""
    error: str = ""
    """Why the last attempt failed."""
    failures: int = 0
    """Consecutive failures of this upload."""
    ended: bool = False
    """No attempt can succeed: another run or another trainer has the prefix."""


@dataclass
class _Upload:
    step: int
    best: int
    opened: threading.Event = field(default_factory=threading.Event)
    others_sent: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: UploadState = field(default_factory=UploadState)

    def cancel(self) -> None:
        for event in (self.cancelled, self.opened, self.others_sent):
            event.set()


class Uploader:
    """Sends the checkpoints of the volume to the store. All ranks call each method at the same point, except where noted."""

    def __init__(
        self,
        copies: CheckpointCopies,
        volume: CheckpointStore,
        *,
        rank: int,
        world: int,
        keep: int,
        metrics: Metrics,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self.copies = copies
        self._volume = volume
        self._rank, self._world, self._keep = rank, world, keep
        self._metrics, self._pauses = metrics, pauses
        self._current: _Upload | None = None
        self._waiting: tuple[int, int] | None = None
        self._ended = False
        self._version = -1
        """Step of the loaded checkpoint, -1 without one."""
        self._own: set[int] = set()
        """Steps uploaded since. Any other after the loaded one is damaged, or of a lost lineage."""
        self._opened = False
        self._one = threading.Lock()
        """Held by the upload that sends: one that is cancelled may be in the middle of a file."""
        self.uploaded = -1
        """Step of the newest complete checkpoint in the store, -1 for none."""
        self.kept: list[int] = []
        """Steps of the newest ``keep`` complete checkpoints in the store."""
        self.problem = ""
        """Why the newest checkpoint on the volume is not there; empty while no attempt has failed."""

    def resumed(self, version: int | None, steps: list[int], *, opened: bool) -> None:
        """The run begins at ``version``; the store has the checkpoints ``steps``.

        opened: whether the store answered, and the prefix is this run's.
        """
        self._version = -1 if version is None else version
        self._opened = opened and all(step <= self._version for step in steps)
        self.kept = sorted(step for step in steps if step <= self._version)[-self._keep :]
        self.uploaded = max(self.kept, default=-1)
        self._metrics.uploaded_step.set(self.uploaded)
        if version is not None and version != self.uploaded:
            self.offer(version, -1)

    def offer(self, step: int, best: int) -> None:
        """A checkpoint has been committed on the volume. ``best``: best version so far; used on rank 0 only."""
        if not self._ended:
            self._waiting = (step, best)
            self._start_waiting()

    @property
    def uploading(self) -> int | None:
        """The step that is being sent, which must stay on the volume. Not a collective."""
        return None if self._current is None else self._current.step

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def state(self) -> UploadState:
        """Of this rank; the states of all go to :meth:`advance`. Not a collective."""
        return UploadState() if self._current is None else self._current.state

    def advance(self, states: list[UploadState]) -> None:
        """Continue with the states of all ranks."""
        upload = self._current
        if upload is None:
            return
        errors = [s.error for s in states if s.error]
        if states[0].opened:
            upload.opened.set()
            self._opened = True
        if all(s.sent for s in states[1:]):
            upload.others_sent.set()
        if states[0].committed:
            self.uploaded, self.problem, self._current = upload.step, "", None
            self._own.add(upload.step)
            self.kept = sorted({*self.kept, upload.step})[-self._keep :]
            self._metrics.uploaded_step.set(upload.step)
        elif errors:
            self.problem = errors[0]
            self._ended = any(s.ended for s in states)
            given_up = max(s.failures for s in states) >= GIVE_UP_FAILURES
            if self._ended or (given_up and self._waiting is not None):
                upload.cancel()
                self._current = None
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._current is None and self._waiting is not None and not self._ended:
            (step, best), self._waiting = self._waiting, None
            self._current = upload = _Upload(step, best)
            if self._opened:
                upload.opened.set()
            threading.Thread(target=self._run, args=(upload,), name="upload", daemon=True).start()

    # --- on the thread ------------------------------------------------------------------------------------

    def _run(self, upload: _Upload) -> None:
        lower_priority()
        with self._one:
            self._send(upload)

    def _send(self, upload: _Upload) -> None:
        sent: set[str] = set()
        failures = 0
        while not upload.cancelled.is_set():
            try:
                self._attempt(upload, sent)
                return
            except (PrefixTaken, AttemptSuperseded) as error:
                upload.state = UploadState(error=str(error), ended=True)
                log.error("checkpoints are no longer copied: %s", error)
                return
            except (
                Exception
            ) as error:  # training continues after any failure, also after a bug of the client library
                text = str(error) if isinstance(error, (TrainerError, OSError)) else repr(error)
            if upload.cancelled.is_set():
                return
            pause = self._pauses[min(failures, len(self._pauses) - 1)]
            failures += 1
            upload.state = UploadState(
                opened=upload.state.opened,
                error=f"checkpoint {upload.step}: {text}"[:1000],
                failures=failures,
            )
            self._metrics.uploads.labels("failed").inc()
            log.error(
                "checkpoint %d was not copied, another attempt follows in %g s: %s", upload.step, pause, text
            )
            upload.cancelled.wait(pause)

    def _attempt(self, upload: _Upload, sent: set[str]) -> None:
        leader, manifest = self._rank == 0, self._volume.manifest(upload.step)
        if leader and not upload.opened.is_set():
            self._open(manifest)
            upload.state = UploadState(opened=True)
        elif not leader:
            upload.opened.wait()
        if leader:
            self.copies.send_warm_started(self._volume.warm_started_weights)
        directory = self._volume.directory(upload.step)
        for record in manifest.files[self._rank :: self._world]:
            if record.path in sent:
                continue
            if upload.cancelled.is_set():
                return
            self.copies.send(directory, upload.step, record)
            sent.add(record.path)
            self._metrics.uploaded_bytes.inc(record.bytes)
        upload.state = UploadState(opened=True, sent=True)
        if not leader:
            return
        if self._world > 1:
            upload.others_sent.wait()
        if upload.cancelled.is_set():
            return
        self._volume.check()
        try:
            self.copies.commit(manifest, self._keep, upload.best)
        except CheckpointError:
            sent.clear()
            raise
        self._metrics.uploads.labels("ok").inc()
        log.info("checkpoint %d is complete in %s", upload.step, self.copies.to)
        upload.state = UploadState(opened=True, sent=True, committed=True)

    def _open(self, manifest: Manifest) -> None:
        """Claim the prefix, and make checkpoints none that a later start must not take for this lineage's."""
        self._volume.check()
        self.copies.claim()
        steps = self.copies.steps()
        lost = {step for step in steps if step > self._version and step not in self._own}
        if manifest.step in steps and self.copies.manifest(manifest.step) != manifest.encode():
            lost.add(manifest.step)
        if lost:
            log.warning(
                "%s: checkpoints %s are damaged or of a lost lineage, and are replaced",
                self.copies.to,
                sorted(lost),
            )
        self.copies.remove_manifests(lost)


def read_with_retries(
    read: Callable[[], None], stopped: Callable[[], bool], pauses: tuple[float, ...] = READ_PAUSES
) -> None:
    """Call ``read`` until it raises no ``StoreError``; the last one is raised."""
    for pause in (*pauses, None):
        try:
            read()
        except StoreError as error:
            if pause is None or stopped():
                raise
            log.warning("another attempt follows in %g s: %s", pause, error)
            time.sleep(pause)
        else:
            return
