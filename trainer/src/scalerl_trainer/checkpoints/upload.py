"""Copies each checkpoint of the volume to the object store, while training continues.

Each rank sends its part of the files on a thread. The ranks exchange their states in the collective
that precedes each step (:meth:`.worker.Worker.sync`), and all draw the same conclusions from them (:meth:`Uploader.advance`):

1. rank 0 opens the upload: it claims the prefix, and removes manifests of a lost lineage;
2. all ranks send their files;
3. rank 0 writes the manifest, and removes superfluous checkpoints.

A checkpoint that becomes due meanwhile waits, and replaces one that waits already. A failure is retried;
after three in a row, a checkpoint that waits takes the place of the failed one.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from scalerl_api.object_store import StoreError
from scalerl_trainer.checkpoints.manifest import CheckpointError, Manifest
from scalerl_trainer.checkpoints.object_store import CheckpointCopies, PrefixTaken, lower_priority
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.errors import AttemptSuperseded, TrainerError
from scalerl_trainer.metrics import Metrics

log = logging.getLogger(__name__)

PAUSES = (5.0, 20.0, 60.0, 180.0)
"""Seconds before each retry; the last one again and again."""
GIVE_UP_FAILURES = 3
"""Consecutive failures after which a checkpoint that waits takes the place of the failed one."""


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

        Args:
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
                text = str(error) if isinstance(error, (TrainerError, StoreError, OSError)) else repr(error)
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
        if manifest.step in steps and not self.copies.has(manifest):
            lost.add(manifest.step)
        if lost:
            log.warning(
                "%s: checkpoints %s are damaged or of a lost lineage, and are replaced",
                self.copies.to,
                sorted(lost),
            )
        self.copies.remove_manifests(lost)
