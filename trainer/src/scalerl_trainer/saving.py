"""Checkpoints as all ranks make them together; :mod:`.checkpoint` has the files.

A checkpoint has two halves. ``start`` writes the state as it is now, which holds up training. ``finish``
makes it count, once every rank has flushed and hashed its share of the files, which a thread does while
training goes on. Whatever fails on any rank fails the checkpoint as a whole, on all ranks, and training
goes on with the one before.
"""

from __future__ import annotations

import logging
import pickle
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalerl_trainer.checkpoint import (
    FIXED_SHAPE,
    Aside,
    CheckpointError,
    CheckpointStore,
    FileRecord,
    files_in,
)
from scalerl_trainer.engine import Engine
from scalerl_trainer.errors import TrainerError
from scalerl_trainer.ranks import Ranks

log = logging.getLogger(__name__)

SEAL_SHARE = 0.5
"""Flushing and hashing take no longer than this share of what ranks wait for each other, or the checkpoint has
failed: the others wait meanwhile, and one slow disk must not look like a lost rank."""


class Unusable(TrainerError):
    """There are checkpoints, but none that this run can go on from; starting again would not help."""


@dataclass
class _Pending:
    aside: Aside
    snapshot: bytes
    best: int
    records: list[FileRecord] = field(default_factory=list)
    error: str | None = None
    thread: threading.Thread | None = None


@dataclass(frozen=True)
class Saved:
    """``kept_steps`` of a checkpoint that counts now, or why there is none."""

    step: int
    kept_steps: list[int]
    error: str | None = None


class Saver:
    """Every method is a collective unless it says otherwise."""

    def __init__(self, store: CheckpointStore, ranks: Ranks, engine: Engine) -> None:
        self._store, self._ranks, self._engine = store, ranks, engine
        settings = engine.settings
        self._shape = {
            "ranks": str(ranks.world),
            "zeroStage": str(settings.zero_stage),
            "dtype": settings.dtype,
        }
        self._seal_seconds = SEAL_SHARE * ranks.timeout_seconds
        self._pending: _Pending | None = None
        self.last_step: int | None = None
        """The newest step that is on disk or on its way there."""
        self.stall_seconds = 0.0
        """How long the last ``start`` held up training."""

    @property
    def pending(self) -> bool:
        return self._pending is not None

    @property
    def sealed(self) -> bool:
        """Not a collective: whether this rank's share of the pending checkpoint is flushed and hashed."""
        return self._pending is not None and not (
            self._pending.thread is not None and self._pending.thread.is_alive()
        )

    # --- writing ------------------------------------------------------------------------------------------

    def start(self, step: int, snapshot: bytes | None, best: int = -1) -> str | None:
        """Write the state of ``step`` aside; None, or why it could not be. ``snapshot`` and ``best`` (see
        :meth:`CheckpointStore.commit`) are rank 0's."""
        begun = time.perf_counter()
        aside, error = self._ranks.from_leader(self._begin(step) if self._ranks.leads else None)
        if aside is None:
            return error
        failure: str | None = None
        try:
            self._engine.save(aside.directory)
            _save_random_state(aside.directory, self._ranks.rank)
        except (OSError, RuntimeError, TrainerError) as problem:
            failure = f"rank {self._ranks.rank}: {type(problem).__name__}: {problem}"
        failures = [f for f in self._ranks.all(failure) if f is not None]
        if failures:
            if self._ranks.leads:
                self._store.abandon(aside)
            return failures[0]
        pending = _Pending(aside, snapshot or b"", best)
        files = list(files_in(aside.directory))[self._ranks.rank :: self._ranks.world]
        pending.thread = threading.Thread(target=self._seal, args=(pending, files), name="seal", daemon=True)
        pending.thread.start()
        self._pending = pending
        self.last_step = step
        self.stall_seconds = time.perf_counter() - begun
        return None

    def finish(self) -> Saved:
        """Make the pending checkpoint count, waiting for it if need be."""
        pending, self._pending = self._pending, None
        assert pending is not None
        assert pending.thread is not None
        pending.thread.join(timeout=self._seal_seconds)
        if pending.thread.is_alive():
            pending.error = f"not flushed within {self._seal_seconds:g} s"
        results = self._ranks.all((pending.records, pending.error))
        saved = self._ranks.from_leader(self._commit(pending, results) if self._ranks.leads else None)
        if saved.error is not None:
            self.last_step = None
        return saved

    def _begin(self, step: int) -> tuple[Aside | None, str | None]:
        try:
            return self._store.begin(step), None
        except OSError as error:
            return None, str(error)

    def _seal(self, pending: _Pending, files: list[Path]) -> None:
        try:
            pending.records = self._store.record(pending.aside, files)
        except Exception as error:  # whatever it was, this rank's share is not known to be on disk
            pending.error = f"rank {self._ranks.rank}: {error}"

    def _commit(self, pending: _Pending, results: list[tuple[list[FileRecord], str | None]]) -> Saved:
        step = pending.aside.step
        error = next((e for _, e in results if e is not None), None)
        if error is None:
            try:
                records = [record for records, _ in results for record in records]
                kept = self._store.commit(
                    pending.aside, pending.snapshot, records, self._shape, best=pending.best
                )
                return Saved(step, kept)
            except (OSError, CheckpointError) as problem:
                error = f"{type(problem).__name__}: {problem}"
        self._store.abandon(pending.aside)
        return Saved(step, [], error)

    # --- reading ------------------------------------------------------------------------------------------

    def load(self) -> int | None:
        """Load the newest checkpoint that is whole; its step, or None when there is none at all.

        Raises:
            Unusable: there are some, and none is whole (those that an earlier start set aside count too: a
                run that had checkpoints never begins anew unasked), or the newest whole one does not fit.
        """
        if self._ranks.leads:
            self._store.clean()
        steps = self._ranks.from_leader(self._store.steps() if self._ranks.leads else None)
        for step in steps:
            errors = [e for e in self._ranks.all(self._verify(step)) if e is not None]
            if not errors:
                directory = self._store.directory(step)
                self._engine.load(directory)
                _load_random_state(directory, self._ranks.rank)
                self.last_step = step
                return step
            if self._ranks.leads:
                self._store.set_aside(step, errors[0])
        damaged = self._ranks.from_leader(self._store.damaged() if self._ranks.leads else None)
        if steps or damaged:
            raise Unusable(
                f"no checkpoint is whole, and there were some: {', '.join(damaged) or sorted(steps)} (the log of the "
                "start that set them aside says why): put a good copy in place as step-*, or begin a new run"
            )
        return None

    def snapshot(self, step: int) -> bytes:
        """The coordinator's state of a loaded checkpoint. Not a collective."""
        return self._store.snapshot(step)

    def _verify(self, step: int) -> str | None:
        try:
            manifest = self._store.manifest(step)
            self._store.verify(manifest, self._ranks.rank, self._ranks.world)
        except CheckpointError as error:
            return str(error)
        if manifest.format == FIXED_SHAPE and manifest.shape != self._shape:
            raise Unusable(
                f"checkpoint {step} was written by an earlier release with {manifest.shape}, this run has "
                f"{self._shape}: resume with the same trainer.replicas, trainer.devices, trainer.zeroStage and model.dtype, and change "
                "them after the next checkpoint"
            )
        return None


def _random_file(directory: Path, rank: int) -> Path:
    return directory / f"random-rank{rank:05d}.pickle"


def _save_random_state(directory: Path, rank: int) -> None:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    _random_file(directory, rank).write_bytes(pickle.dumps(state))


def _load_random_state(directory: Path, rank: int) -> None:
    """A rank that was not there when the checkpoint was written continues rank 0's state with a seed of its own."""
    file, new = _random_file(directory, rank), False
    if not file.is_file():
        file, new = _random_file(directory, 0), True
    state = pickle.loads(file.read_bytes())  # noqa: S301  # hash checked, our own file
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if new:
        seed = random.getrandbits(31) ^ rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # of the accelerator too
