"""Copies of checkpoints in an object store, ``spec.checkpoint.to``.

============================= ==================================================================================
``run.json``                  the run that the prefix belongs to; written once
``writer.json``               the start of the trainer that writes; an earlier one stops writing
``step-<step>/…``             a checkpoint's files, as on the volume
``step-<step>/manifest.json`` written last: a folder without it is no checkpoint
``warm-started/…``            the weights after a warm start, as on the volume, in the form of :mod:`.object_store_folders`
============================= ==================================================================================

:mod:`.upload` writes them. Of two attempts of the trainer the later one writes (:meth:`CheckpointCopies.claim`). ``writer.json`` is read
before each file and each manifest, but a bucket has no rename that could fence out an earlier attempt, as on the volume (:mod:`.fence`):
a file that it is sending when the later one claims the prefix may still replace the later one's file of the same step. The manifest
finds that. It has the SHA-256 of every file, and what is read from the store is compared with it before it gets a checkpoint's name:
a checkpoint with files of two attempts is damaged, never loaded, and the next older copy is taken.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from scalerl_api.attempts import Attempt
from scalerl_api.object_store import BucketAbsent, ObjectStore, StoreError
from scalerl_api.spec import ScaleRLRun
from scalerl_trainer.checkpoints.disk import flush
from scalerl_trainer.checkpoints.manifest import MANIFEST, CheckpointError, FileRecord, Manifest
from scalerl_trainer.errors import AttemptSuperseded, TrainerError
from scalerl_trainer.object_store_folders import DamagedError, fetch, is_there, upload

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
WRITER_FILE = "writer.json"
WARM_STARTED = "warm-started"
READ_PAUSES = (2.0, 10.0, 30.0)
"""Seconds before each retry while the trainer starts, and cannot continue without the store."""
READERS = 4
"""Files that a rank reads at a time."""
_NICENESS = 19
"""Beside a thread that computes without a pause, on the same core: 15 of 1,039 parts of the time."""
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
    """Let the compute go before the calling thread and the client library's threads, which the first request of a process starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def check_bucket(field: str, to: str | None) -> None:
    """Raise ``BucketAbsent`` if the bucket of ``field`` does not exist. What fails otherwise, its user reports.

    For the preparation of a run: a gateway may answer so for a moment, and a run that trains tries again.
    """
    if to is None:
        return
    try:
        ObjectStore(to).read(RUN_FILE)
    except BucketAbsent as error:
        raise BucketAbsent(
            f"{field}: {error}, and nothing is written: create it, or correct {field}, or region and endpoint in the trainer's environment"
        ) from error
    except StoreError as error:
        log.warning("%s cannot be read yet: %s", field, error)


def claim_prefix(store: ObjectStore, run: dict[str, object], field: str, allowed: str) -> None:
    """Take a prefix for a run, whose :func:`identity` is ``run``.

    Args:
        field: of the spec, which has the prefix.
        allowed: the condition on which a prefix of another run may be taken, in the error message.

    Raises:
        PrefixTaken: it belongs to another run.
    """
    if store.create(RUN_FILE, json.dumps(run, indent=1).encode()):
        return
    content = store.read(RUN_FILE) or b""
    try:
        owner = json.loads(content)
        differences = sorted(k for k in owner.keys() | run.keys() if owner.get(k) != run.get(k))
    except (ValueError, AttributeError):
        owner, differences = {}, [f"{RUN_FILE} is not readable"]
    if differences:
        raise PrefixTaken(
            f"{store.to} belongs to the run {owner.get('namespace') or '-'}/{owner.get('name')}; this run differs in "
            f"{', '.join(differences)}. Give this run a prefix of its own in {field}, or remove {store.to}/{RUN_FILE} if {allowed}"
        )


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
        self._warm_started_sent = False

    def claim(self) -> None:
        """Take the prefix for this run and this start of the trainer.

        Raises:
            PrefixTaken: it belongs to another run.
            AttemptSuperseded: a later attempt has claimed it.
        """
        claim_prefix(self._store, self._run, "checkpoint.to", "it is to continue from these checkpoints")
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

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint all of whose files are there, with the right size.

        Raises:
            CheckpointError: there is none, it is damaged, or files are missing or have another size.
        """
        folder = folder_of(step)
        content = self._store.read(f"{folder}/{MANIFEST}")
        if content is None:
            raise CheckpointError(f"{self.to}/{folder} has no {MANIFEST}")
        manifest = Manifest.decode(content)
        if manifest.step != step:
            raise CheckpointError(f"{self.to}/{folder} has the manifest of step {manifest.step}")
        for record in manifest.files:
            path = PurePosixPath(record.path)
            if path.is_absolute() or ".." in path.parts:
                raise CheckpointError(f"{MANIFEST} names {record.path}, outside of the checkpoint")
        self._check_sizes(manifest)
        return manifest

    def has(self, manifest: Manifest) -> bool:
        """Whether the store has this checkpoint, by the sizes of its files."""
        try:
            return self.manifest(manifest.step) == manifest
        except CheckpointError:
            return False

    def _check_sizes(self, manifest: Manifest) -> None:
        folder = folder_of(manifest.step)
        sizes = self._store.sizes(folder)
        wrong = [r.path for r in manifest.files if sizes.get(f"{folder}/{r.path}") != r.bytes]
        if wrong:
            raise CheckpointError(f"{self.to}/{folder}: missing or of another size: {', '.join(wrong[:5])}")

    def send(self, directory: Path, step: int, record: FileRecord) -> None:
        """Write a file of a checkpoint.

        Raises:
            OSError: the volume has it no longer.
            AttemptSuperseded, PrefixTaken: see :meth:`check_writer`.
        """
        self.check_writer()
        self._store.put(f"{folder_of(step)}/{record.path}", directory / record.path)

    def send_warm_started(self, path: Path) -> None:
        """Write the weights after a warm start, once, unless they are there. Raises as :meth:`send`."""
        if path.exists() and not self._warm_started_sent:
            self.check_writer()
            upload(self._store, WARM_STARTED, [path])
            self._warm_started_sent = True

    def fetch_warm_started(self, path: Path) -> None:
        """Read the weights after a warm start, if there are some and the volume has none. Raises OSError.

        A damaged copy is left out: only ``recipe.kl.penalty`` needs these weights, and its loading reports that they are missing. The copy
        stays in the store.
        """
        if path.exists():
            return
        folder = path.with_name(f".{WARM_STARTED}")
        try:
            if fetch(self._store, WARM_STARTED, folder):
                flush(folder / path.name)
                (folder / path.name).rename(path)
                flush(path.parent)
        except DamagedError as error:
            log.error("the weights after the warm start are not read: %s", error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, step: int, directory: Path, records: Iterable[FileRecord]) -> None:
        """Read files of a checkpoint.

        Raises:
            CheckpointError: one is missing, or twice does not match its hash.
            OSError: ``directory`` cannot be written.
        """

        def fetch_one(record: FileRecord) -> None:
            path, target = f"{folder_of(step)}/{record.path}", directory / record.path
            if is_there(target, record):
                return
            for _ in range(2):  # what arrived may be at fault, not what is there
                digest = self._store.download(path, record.bytes, target)
                if digest == record.sha256:
                    return
            raise CheckpointError(
                f"{self.to}/{path} {'does not exist' if digest is None else 'does not match its hash'}"
            )

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
            AttemptSuperseded, PrefixTaken: see :meth:`check_writer`.
        """
        self._check_sizes(manifest)
        self.check_writer()
        self._store.put(f"{folder_of(manifest.step)}/{MANIFEST}", manifest.encode())
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
