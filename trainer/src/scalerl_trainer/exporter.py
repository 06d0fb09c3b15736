"""Exports the evaluated models while the run trains, and keeps the best and the last.

Runs on rank 0. The weights of a version exist only until the next update, so training waits while they are written. One
thread flushes, renames and removes folders; another copies them to ``trainer.export.to``. A failure does not end the run:
it is counted, reported in ``exports.json``, and retried.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import torch

from scalerl_api.exports import EXPORTS_FILE, ExportedModel, Exports, read_exports
from scalerl_api.paths import RunPaths
from scalerl_api.spec import RunSpec
from scalerl_api.wire import EvaluationPoint
from scalerl_trainer.export import STAGED, commit_model, stage_model
from scalerl_trainer.export_targets import Target, TargetError, open_target
from scalerl_trainer.fence import Fence
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.tensor_files import TensorInfo

log = logging.getLogger(__name__)

_NAME = re.compile(r"^step-(\d{8,})$")
WRITE_PAUSES = (1.0, 4.0)
"""Seconds before each retry of a write, during which training waits."""
COPY_PAUSES = (5.0, 20.0, 60.0, 180.0)
"""Seconds before each retry of a copy; after the last retry, the next evaluation starts another copy."""
CLOSE_SECONDS = 600.0
"""Timeout of an export or copy in progress at the end of the run."""
STOPPED_SECONDS = 30.0
"""The same timeout once the trainer is asked to stop."""

Weights = Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class SelectedPoints:
    """The evaluation points whose models are kept."""

    best: EvaluationPoint
    last: EvaluationPoint

    @classmethod
    def of(cls, points: Sequence[EvaluationPoint]) -> SelectedPoints | None:
        """Select the best point of the newest held-out set by reward, and the last point by version.

        Points of mixed versions are candidates for the best only if there are no others. None without a finite reward.
        """
        finite = [p for p in points if math.isfinite(p.reward)]
        if not finite:
            return None
        whole = [p for p in finite if not p.mixed_versions] or finite
        newest = max(whole, key=lambda p: p.version).set_digest
        best = max((p for p in whole if p.set_digest == newest), key=lambda p: (p.reward, p.version))
        return cls(best, max(finite, key=lambda p: p.version))


class Exporter:
    """Maintains ``checkpoints/hf`` and its copy, as ``spec.trainer.export`` says.

    Args:
        fence: of this attempt; None: no other process writes.
        to: target of the copies without ``spec.trainer.export.to``; None for no copies then.
    """

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        metrics: Metrics,
        *,
        fence: Fence | None = None,
        to: str | None = None,
        write_pauses: Sequence[float] = WRITE_PAUSES,
        copy_pauses: Sequence[float] = COPY_PAUSES,
        stopped_seconds: float = STOPPED_SECONDS,
    ) -> None:
        self._paths, self._spec, self._metrics = paths, spec, metrics
        self._to = spec.trainer.export.to or to
        self._write_pauses, self._copy_pauses = write_pauses, copy_pauses
        self._stopped_seconds = stopped_seconds
        self._fenced = fence is not None
        self._staging = paths.exports if fence is None else fence.folder / "exports"
        self._closing = threading.Event()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="export-copy")
        self._tasks: set[Future[None]] = set()
        self._lock = threading.Lock()
        """Guards the state shared by both threads: status, problems, versions in copy."""
        self._points: Sequence[EvaluationPoint] = []
        self._selectable: set[int] = set()
        """Candidates of the last selection. Only these may be removed: a later version may become the best or the last."""
        self._status = read_exports(paths.exports) or Exports()
        self._failures, self._problems = 0, {"write": "", "copy": ""}
        self._copying: frozenset[int] = frozenset()
        self._copy_queued = False
        self._target: Target | None = None
        self._make_staging()
        self._remove_staged()
        self._attempted = -1
        self._unmeasured = set(self._versions())

    def _make_staging(self) -> None:
        """Make the staging folder, also again after it was deleted, but not that of the attempt, which a later one takes."""
        if self._fenced:
            with contextlib.suppress(OSError):  # without it, each export fails and is counted
                self._staging.mkdir(exist_ok=True)

    @property
    def status(self) -> Exports:
        """The models of the last selection."""
        return self._status

    def restore(self, known: Exports) -> None:
        """Begin with the copied models of an earlier trainer, in a directory without its files."""
        with self._lock:
            best, last = (m if m is not None and m.uri else None for m in (known.best, known.last))
            self._status = Exports(best=best, last=last)

    @property
    def waiting(self) -> bool:
        """Whether an exported version still lacks its evaluation."""
        return self._spec.trainer.export.enabled and bool(self._unmeasured)

    def wants(self, version: int) -> bool:
        """Whether this evaluated version is to be exported."""
        return (
            self._spec.trainer.export.enabled
            and version != self._attempted
            and not self._folder(version).is_dir()
        )

    def write(self, version: int, infos: Sequence[TensorInfo], weights: Weights) -> float:
        """Export the present weights as ``version``; returns the seconds that training waited.

        ``weights`` is called for each attempt, and its iterator is always exhausted, because it is a collective.
        """
        begun = time.perf_counter()
        self._attempted = version
        for pause in (*self._write_pauses, None):
            tensors = weights()
            self._make_staging()
            try:
                staged = stage_model(
                    self._folder(version),
                    self._paths.base_model,
                    infos,
                    tensors,
                    self._spec,
                    staging=self._staging,
                )
                self._unmeasured.add(version)
                self._submit(self._disk, "write", partial(self._commit, staged, version))
                break
            except (OSError, ValueError) as error:
                self._count_failure("write", f"version {version}: {error}")
            finally:
                for _ in tensors:
                    pass
            if pause is None or self._closing.wait(pause):
                self._submit(self._disk, "write", self._select_and_remove)
                break
        return time.perf_counter() - begun

    def evaluated(self, points: Sequence[EvaluationPoint]) -> None:
        """Select the best and the last model by ``points``, copy them, and remove the others."""
        if not self._spec.trainer.export.enabled:
            return
        self._unmeasured -= {p.version for p in points}
        if points and points != self._points:
            self._points = points
            self._submit(self._disk, "write", self._select_and_remove)

    def close(self, stopped: Callable[[], bool] = lambda: False, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for tasks in progress, up to ``seconds``, or ``stopped_seconds`` after ``stopped`` returns True.

        Failed copies are not retried.
        """
        deadline = time.monotonic() + seconds
        self._closing.set()
        while under_way := [task for task in tuple(self._tasks) if not task.done()]:
            now = time.monotonic()
            if stopped():
                deadline = min(deadline, now + self._stopped_seconds)
            if now >= deadline:
                log.error("an export or its copy did not finish in time and is abandoned")
                break
            wait(under_way, timeout=min(0.5, deadline - now))
        for thread in (self._disk, self._copier):
            thread.shutdown(wait=False, cancel_futures=True)

    # --- on the threads -----------------------------------------------------------------------------------

    def _submit(self, thread: ThreadPoolExecutor, operation: str, task: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                task()
            except Exception as error:  # the run continues after any failure
                self._count_failure(operation, f"{type(error).__name__}: {error}")

        done = thread.submit(guarded)
        self._tasks.add(done)
        done.add_done_callback(self._tasks.discard)

    def _commit(self, staged: Path, version: int) -> None:
        commit_model(staged, self._folder(version))
        self._metrics.exports.labels("write", "ok").inc()
        self._metrics.export_version.set(version)
        self._problems["write"] = ""
        self._select_and_remove()

    def _select_and_remove(self) -> None:
        """Select, write the status, remove models that are neither best, last nor unevaluated, and queue the copy."""
        with self._lock:
            self._select()
        try:
            self._write_status()
        finally:  # on a full disk the status can be written only after a removal
            self._remove()
        if self._to is not None and not self._copy_queued:
            self._copy_queued = True
            self._submit(self._copier, "copy", self._copy)

    def _remove(self) -> None:
        with self._lock:
            kept = {
                m.version for m in (self._status.best, self._status.last) if m is not None
            } | self._copying
            removed = self._selectable - kept
        for version in removed:
            removed_folder = self._staging / f"{STAGED}removed-{version:08d}-{os.getpid()}"
            with contextlib.suppress(OSError):
                self._folder(version).rename(removed_folder)
                shutil.rmtree(removed_folder)

    def _copy(self) -> None:
        """Copy the models that are selected when an attempt begins.

        Their folders stay until the attempt ends, so that a copy may take longer than the time between two evaluations.
        """
        self._copy_queued = False
        for pause in (*self._copy_pauses, None):
            with self._lock:
                models = {
                    role: m for role in ("best", "last") if (m := getattr(self._status, role)) is not None
                }
                if all(model.uri for model in models.values()):
                    return
                self._copying = frozenset(m.version for m in models.values())
            uris: dict[int, str] = {}
            problem = ""
            try:
                if self._target is None:
                    self._target = open_target(str(self._to))
                uris = self._target.put({role: (m, self._paths.root / m.path) for role, m in models.items()})
                self._metrics.exports.labels("copy", "ok").inc()
            except TargetError as error:
                problem = str(error)
            except Exception as error:  # a bug of a client library: retried like any other failure
                problem = f"{type(error).__name__}: {error}"
                log.exception("a copy of an export failed unexpectedly")
            if problem:
                self._count_failure("copy", problem)
            with self._lock:
                self._problems["copy"] = problem[:1000]
                self._select(uris)
                self._copying = frozenset()
            try:
                self._write_status()
            finally:
                self._submit(self._disk, "write", self._remove)
            if problem and (pause is None or self._closing.wait(pause)):
                return

    def _select(self, uris: dict[int, str] | None = None) -> None:
        """Select the best and the last of the models on disk, and of those of which only the copy is left, so that a failed write
        replaces no model.

        ``uris``: URIs of copied versions.
        """
        known = {m.version: m for m in (self._status.best, self._status.last) if m is not None}
        on_disk = set(self._versions())
        present = on_disk | {version for version, m in known.items() if m.uri}

        def model(point: EvaluationPoint) -> ExportedModel:
            folder = self._folder(point.version)
            if point.version not in on_disk:
                return msgspec.structs.replace(known[point.version], reward=point.reward)
            written = datetime.fromtimestamp(folder.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            before = known.get(point.version)
            copied = before.uri if before is not None and before.time == written else ""
            return ExportedModel(
                version=point.version,
                reward=point.reward,
                path=folder.relative_to(self._paths.root).as_posix(),
                uri=(uris or {}).get(point.version, copied),
                time=written,
            )

        selectable = [p for p in self._points if p.version in present]
        self._selectable = {p.version for p in selectable}
        selected = SelectedPoints.of(selectable)
        self._status = Exports(
            best=self._status.best if selected is None else model(selected.best),
            last=self._status.last if selected is None else model(selected.last),
            failures=self._failures,
            problem="; ".join(filter(None, self._problems.values())),
        )

    def _write_status(self) -> None:
        file = self._paths.exports / EXPORTS_FILE
        staged = self._staging / f"{STAGED}{file.name}"
        with self._lock:
            file.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(msgspec.json.format(msgspec.json.encode(self._status), indent=1))
            staged.replace(file)

    def _count_failure(self, what: str, reason: str) -> None:
        with self._lock:
            self._failures += 1
            self._problems[what] = reason[:1000]
        self._metrics.exports.labels(what, "failed").inc()
        log.error("an export failed and will be retried: %s", reason)

    def _folder(self, version: int) -> Path:
        return self._paths.exports / f"step-{version:08d}"

    def _versions(self) -> list[int]:
        return sorted(int(m[1]) for p in self._paths.exports.glob("step-*") if (m := _NAME.match(p.name)))

    def _remove_staged(self) -> None:
        for folder in {self._paths.exports, self._staging}:
            for path in folder.glob(f"{STAGED}*"):
                shutil.rmtree(path, ignore_errors=True)
