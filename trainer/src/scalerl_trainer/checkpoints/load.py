"""Finds and loads the checkpoint that a start continues from, on all ranks: the newest valid one of the volume and the object store.

A damaged one on the volume is quarantined, and read from the store if that has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_api.object_store import StoreError
from scalerl_trainer.checkpoints.manifest import CheckpointError, Manifest
from scalerl_trainer.checkpoints.object_store import PrefixTaken, lower_priority, read_with_retries
from scalerl_trainer.checkpoints.random_state import RandomStateError, load_random_state
from scalerl_trainer.checkpoints.upload import Uploader
from scalerl_trainer.checkpoints.volume import CheckpointStore, StagedCheckpoint
from scalerl_trainer.checkpoints.write import TIMINGS
from scalerl_trainer.engine import Engine
from scalerl_trainer.errors import AttemptSuperseded, Stopped, TrainerError
from scalerl_trainer.ranks import Ranks

log = logging.getLogger(__name__)


class NoUsableCheckpoint(TrainerError):
    """Checkpoints exist, but none can be loaded; a restart does not help."""


@dataclass(frozen=True)
class _Remote:
    """The checkpoints in the object store, or why they are not known."""

    steps: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class _Fetch:
    """A checkpoint that is read from the object store."""

    manifest: Manifest | None = None
    directory: str = ""


@dataclass(frozen=True)
class _Outcome:
    """What a rank's part of a task came to."""

    ended: bool = False
    failure: str = ""
    """One of ``_FAILURES``, ``damaged``, or empty."""
    message: str = ""


_FAILURES: dict[str, type[Exception]] = {
    "superseded": AttemptSuperseded,
    "taken": PrefixTaken,
    "disk": CheckpointError,
    "store": StoreError,
}
"""Errors of a task that are raised on all ranks; the first counts."""
_EXPECTED = (TrainerError, AttemptSuperseded, StoreError, OSError)
"""Errors whose text says enough."""


class CheckpointLoader:
    """Loads a run's newest checkpoint. Only :meth:`load` is public, a collective.

    Args:
        otherwise: what to do without a good copy of a damaged checkpoint, for the error message.
        uploader: has the checkpoints in the object store, and is given the step that the run continues from.
        stopped: whether this rank is to stop, which ends the reading of a checkpoint from the store.
        exchange_seconds: between two exchanges of the ranks' states while they read from the store.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        engine: Engine,
        otherwise: str = "start a new run",
        uploader: Uploader | None = None,
        stopped: Callable[[], bool] = lambda: False,
        exchange_seconds: float = TIMINGS.exchange,
    ) -> None:
        self._store, self._ranks, self._engine = store, ranks, engine
        self._otherwise, self._uploader, self._stopped = otherwise, uploader, stopped
        self._exchange_seconds = exchange_seconds

    def load(self) -> int | None:
        """Load the newest valid checkpoint, of the volume or the object store; returns its step, or None if the run never had a
        checkpoint.

        Raises:
            NoUsableCheckpoint: all checkpoints are damaged, including those quarantined by an earlier start (a run that had
                checkpoints never restarts from step 0 by itself), or the newest valid one does not fit this run.
            PrefixTaken: the object store has another run's checkpoints under the prefix.
            AttemptSuperseded: a later attempt has begun.
            StoreError: the object store cannot be read, and the volume has no valid checkpoint, or a damaged one that is newer.
            CheckpointError: a checkpoint of the object store cannot be written to the volume.
            Stopped: a rank is to stop.
        """
        if self._ranks.is_leader:
            self._store.remove_staged()
        steps = self._ranks.broadcast(self._store.steps() if self._ranks.is_leader else None, list[int])
        remote = self._remote_steps()
        for step in sorted({*steps, *remote.steps}, reverse=True):
            if (step in steps and self._is_valid(step)) or (
                step in remote.steps and self._fetch(step) and self._is_valid(step, copied=True)
            ):
                if remote.error:
                    self._check_none_newer(step, steps, remote.error)
                directory = self._store.directory(step)
                self._engine.load(directory)
                load_random_state(directory, self._ranks.rank)  # again: loading may have drawn numbers
                self._resumed(step, remote)
                return step
        if remote.error:
            raise StoreError(f"{self._store.root} has no valid checkpoint, and {remote.error}")
        quarantined = self._quarantined()
        if steps or quarantined or remote.steps:
            raise NoUsableCheckpoint(
                f"{self._store.root}: all checkpoints are damaged: {', '.join(quarantined) or sorted({*steps, *remote.steps})} (the "
                "log of the start that found it has the reasons). Restore a good copy as step-*, or "
                f"{self._otherwise}"
            )
        self._resumed(None, remote)
        return None

    def _check_none_newer(self, step: int, steps: list[int], error: str) -> None:
        """Raise ``StoreError`` if a checkpoint after ``step`` is damaged, of which the store, which failed with ``error``, may have a copy."""
        newer = {name: found for name, found in self._quarantined().items() if found > step}
        newer |= {
            f"step-{found:08d}": found for found in steps if found > step and found not in newer.values()
        }
        if newer:
            raise StoreError(
                f"checkpoint {max(newer.values())} in {self._store.root} is damaged, and the store, which may have a copy, cannot be read. "
                "The trainer continues from that copy once the store answers. To continue from checkpoint "
                f"{step} instead, and train the steps since again, remove {', '.join(newer)}. {error}"
            )

    def _quarantined(self) -> dict[str, int]:
        return self._ranks.broadcast(
            self._store.quarantined() if self._ranks.is_leader else None, dict[str, int]
        )

    def _is_valid(self, step: int, *, copied: bool = False) -> bool:
        """Whether a checkpoint on the volume is valid; one that is not is quarantined, or removed if the store has it."""
        errors = [e for e in self._ranks.all_gather(self._verify(step), str) if e]
        if errors and self._ranks.is_leader:
            if copied:
                log.error("checkpoint %d is damaged in its copy and is not used: %s", step, errors[0])
                self._store.remove(step)
            else:
                self._store.quarantine(step, errors[0])
        return not errors

    # --- the object store -----------------------------------------------------------------------------------

    def _resumed(self, step: int | None, remote: _Remote) -> None:
        if self._uploader is not None:
            self._uploader.resumed(step, remote.steps, opened=not remote.error)

    def _remote_steps(self) -> _Remote:
        """Claim the prefix, and list its checkpoints. Raises ``PrefixTaken``, ``Stopped``."""
        if self._uploader is None:
            return _Remote()
        copies, found = self._uploader.copies, [_Remote()]

        def list_steps() -> None:
            if self._ranks.is_leader:
                self._store.check()
                copies.claim()
                found[0] = _Remote(copies.steps())

        try:
            self._read_together(list_steps)
        except StoreError as error:
            log.error("continuing without the copies of checkpoints, if the volume has some: %s", error)
            return _Remote(error=str(error))
        return self._ranks.broadcast(found[0] if self._ranks.is_leader else None, _Remote)

    def _fetch(self, step: int) -> bool:
        """Read a checkpoint from the store, each rank its part, and put it on the volume; False, and nothing, if it is damaged.

        Raises:
            CheckpointError: the volume cannot be written, or has no space.
            StoreError: the store could not be read.
            Stopped
        """
        assert self._uploader is not None
        copies, begun = self._uploader.copies, [_Fetch()]

        def begin() -> None:
            if self._ranks.is_leader:
                manifest = copies.manifest(step)
                copies.fetch_warm_started(self._store.warm_started_weights)
                begun[0] = _Fetch(manifest, str(self._store.stage_copy(manifest).directory))

        log.info("reading checkpoint %d from %s", step, copies.to)
        damaged = self._read_together(begin)
        fetched = self._ranks.broadcast(begun[0] if self._ranks.is_leader else None, _Fetch)
        if fetched.manifest is not None:
            manifest, staged = fetched.manifest, StagedCheckpoint(step, Path(fetched.directory))
            records = manifest.files[self._ranks.rank :: self._ranks.world]

            def commit() -> None:
                if self._ranks.is_leader:
                    self._store.commit_copy(staged, manifest)

            try:
                damaged = self._read_together(lambda: copies.fetch(step, staged.directory, records))
                if not damaged:
                    self._read_together(commit)
            finally:
                if self._ranks.is_leader:  # after a commit it is gone
                    self._store.discard(staged)
        if damaged:
            log.error("checkpoint %d in %s is damaged and is not used: %s", step, copies.to, damaged)
            return False
        return True

    def _read_together(self, read: Callable[[], None]) -> str:
        """Call ``read`` on all ranks, with retries while the store fails; returns why the checkpoint is damaged.

        Raises:
            AttemptSuperseded, PrefixTaken, CheckpointError, StoreError: see ``_FAILURES``; on all ranks.
            Stopped
        """
        outcomes = self._together(lambda: read_with_retries(read, self._stopped))
        messages = {o.failure: o.message for o in reversed(outcomes)}
        for failure, error in _FAILURES.items():
            if failure in messages:
                raise error(messages[failure])
        return messages.get("damaged", "")

    def _together(self, task: Callable[[], None]) -> list[_Outcome]:
        """Call ``task`` on all ranks; returns their outcomes. It may take longer than the timeout of a collective.

        Raises:
            Stopped: a rank is to stop; its task is abandoned.
        """
        outcome = [_Outcome()]

        def guarded() -> None:
            lower_priority()
            try:
                task()
                outcome[0] = _Outcome(ended=True)
            except CheckpointError as error:
                outcome[0] = _Outcome(ended=True, failure="damaged", message=str(error) or "damaged")
            except Exception as error:
                kinds = (kind for kind, raised in _FAILURES.items() if isinstance(error, raised))
                failure = next(kinds, "disk" if isinstance(error, OSError) else "store")
                text = str(error) if isinstance(error, _EXPECTED) else repr(error)
                outcome[0] = _Outcome(ended=True, failure=failure, message=text)

        thread = threading.Thread(target=guarded, name="read", daemon=True)
        thread.start()
        while True:
            thread.join(self._exchange_seconds)
            states = self._ranks.all_gather((outcome[0], self._stopped()), tuple[_Outcome, bool])
            if all(o.ended for o, _ in states):
                return [o for o, _ in states]
            if any(stopped for _, stopped in states):
                raise Stopped("stopped while a checkpoint was read from the object store")

    def _verify(self, step: int) -> str:
        """Why the checkpoint is damaged; empty if it is not. Restores this rank's random states, which shows that they are some."""
        try:
            manifest = self._store.manifest(step)
            self._store.verify(manifest, self._ranks.rank, self._ranks.world)
        except CheckpointError as error:
            return str(error) or "damaged"
        try:
            load_random_state(self._store.directory(step), self._ranks.rank)
        except RandomStateError as error:
            return f"rank {self._ranks.rank}: {error}"
        return ""
