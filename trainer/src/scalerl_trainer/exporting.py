"""Models of evaluations, exported while the run trains: the best one's and the last one's are kept.

Rank 0's. The weights of a version exist only until the next update, so they are written at once, while training
waits; flushing, renaming and removing what is no longer wanted is a thread's, copying elsewhere another's. Nothing that
fails here ends the run: it is counted, said in ``exports.json``, and tried again.
"""

from __future__ import annotations

import logging
import math
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
from scalerl_trainer.metrics import Metrics
from scalerl_trainer.targets import Target, TargetError, open_target
from scalerl_trainer.tensor_files import TensorInfo

log = logging.getLogger(__name__)

_NAME = re.compile(r"^step-(\d{8,})$")
WRITE_PAUSES = (1.0, 4.0)
"""Seconds before a write that failed is tried again; training waits for them."""
COPY_PAUSES = (5.0, 20.0, 60.0, 180.0)
"""The same of a copy; nobody waits for them. After the last it is tried again with the next evaluation."""
CLOSE_SECONDS = 600.0
"""How long the end of the run waits for a copy under way."""
STOPPED_SECONDS = 30.0
"""The same of a trainer that was told to stop."""

Weights = Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Wanted:
    """The points whose models are kept."""

    best: EvaluationPoint
    last: EvaluationPoint

    @classmethod
    def of(cls, points: Sequence[EvaluationPoint]) -> Wanted | None:
        """Rewards compare within the newest held-out set, and where one version was measured alone; if none was, the
        mixed ones have to do."""
        finite = [p for p in points if math.isfinite(p.reward)]
        if not finite:
            return None
        whole = [p for p in finite if not p.mixed_versions] or finite
        newest = max(whole, key=lambda p: p.version).set_digest
        best = max((p for p in whole if p.set_digest == newest), key=lambda p: (p.reward, p.version))
        return cls(best, max(finite, key=lambda p: p.version))


class Exporter:
    """Keeps ``checkpoints/hf`` and its copy as ``spec.trainer.export`` says.

    ``pauses``: before attempts at writing and at copying.
    """

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        metrics: Metrics,
        *,
        write_pauses: Sequence[float] = WRITE_PAUSES,
        copy_pauses: Sequence[float] = COPY_PAUSES,
    ) -> None:
        self._paths, self._spec, self._metrics = paths, spec, metrics
        self._write_pauses, self._copy_pauses = write_pauses, copy_pauses
        self._closing = threading.Event()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="export-copy")
        self._tasks: set[Future[None]] = set()
        self._lock = threading.Lock()
        """Of what both threads share: what was said, what went wrong, what is being copied."""
        self._points: Sequence[EvaluationPoint] = []
        self._weighed: set[int] = set()
        """Versions that the last choice was between. Only these are ever removed: a version whose evaluation has come
        since that choice may be the new best or last."""
        self._said = read_exports(paths.exports) or Exports()
        self._failures, self._problems = 0, {"write": "", "copy": ""}
        self._copying: frozenset[int] = frozenset()
        self._copy_queued = False
        self._target: Target | None = None
        self._remove_staged()
        self._tried = -1
        self._unmeasured = set(self._versions())

    @property
    def waiting(self) -> bool:
        """Whether there is an export whose evaluation is not known."""
        return self._spec.trainer.export.enabled and bool(self._unmeasured)

    def wants(self, version: int) -> bool:
        """Whether a version that is measured is still to be exported."""
        return (
            self._spec.trainer.export.enabled
            and version != self._tried
            and not self._folder(version).is_dir()
        )

    def write(self, version: int, infos: Sequence[TensorInfo], weights: Weights) -> float:
        """Export the present weights as ``version``; returns how long training was held up, in seconds.

        ``weights`` gives them anew at each call, and is always exhausted: it is a collective.
        """
        begun = time.perf_counter()
        self._tried = version
        for pause in (*self._write_pauses, None):
            tensors = weights()
            try:
                staged = stage_model(
                    self._folder(version), self._paths.base_model, infos, tensors, self._spec
                )
                self._unmeasured.add(version)
                self._do(self._disk, "write", partial(self._commit, staged, version))
                break
            except (OSError, ValueError) as error:
                self._failed("write", f"version {version}: {error}")
            finally:
                for _ in tensors:
                    pass
            if pause is None or self._closing.wait(pause):
                self._do(self._disk, "write", self._settle)
                break
        return time.perf_counter() - begun

    def evaluated(self, points: Sequence[EvaluationPoint]) -> None:
        """Keep what ``points`` call best and last, copy it, remove the rest."""
        if not self._spec.trainer.export.enabled:
            return
        self._unmeasured -= {p.version for p in points}
        if points and points != self._points:
            self._points = points
            self._do(self._disk, "write", self._settle)

    def close(self, stopped: Callable[[], bool] = lambda: False, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for what is under way, not for long once ``stopped``; copies that fail now are not tried again."""
        deadline = time.monotonic() + seconds
        self._closing.set()
        while under_way := [task for task in tuple(self._tasks) if not task.done()]:
            now = time.monotonic()
            if stopped():
                deadline = min(deadline, now + STOPPED_SECONDS)
            if now >= deadline:
                log.error("an export or a copy of one is not done, and given up")
                break
            wait(under_way, timeout=min(0.5, deadline - now))
        for thread in (self._disk, self._copier):
            thread.shutdown(wait=False, cancel_futures=True)

    # --- the threads' -------------------------------------------------------------------------------------

    def _do(self, thread: ThreadPoolExecutor, operation: str, task: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                task()
            except Exception as error:  # whatever it was, the run goes on
                self._failed(operation, f"{type(error).__name__}: {error}")

        done = thread.submit(guarded)
        self._tasks.add(done)
        done.add_done_callback(self._tasks.discard)

    def _commit(self, staged: Path, version: int) -> None:
        commit_model(staged, self._folder(version))
        self._metrics.exports.labels("write", "ok").inc()
        self._metrics.export_version.set(version)
        self._problems["write"] = ""
        self._settle()

    def _settle(self) -> None:
        """Says what is there, removes what is neither best nor last nor still to be measured, copies the rest."""
        with self._lock:
            self._choose()
        try:
            self._say()
        finally:  # on a full disk nothing can be said until something is removed
            self._remove()
        if self._spec.trainer.export.to is not None and not self._copy_queued:
            self._copy_queued = True
            self._do(self._copier, "copy", self._copy)

    def _remove(self) -> None:
        with self._lock:
            kept = {m.version for m in (self._said.best, self._said.last) if m is not None} | self._copying
            removed = self._weighed - kept
        for version in removed:
            shutil.rmtree(self._folder(version), ignore_errors=True)

    def _copy(self) -> None:
        """Copies what is newest at each attempt. What it reads stays until it is done, so that a copy that takes
        longer than the time between two evaluations ends too."""
        self._copy_queued = False
        for pause in (*self._copy_pauses, None):
            with self._lock:
                models = {
                    role: m for role in ("best", "last") if (m := getattr(self._said, role)) is not None
                }
                if all(model.uri for model in models.values()):
                    return
                self._copying = frozenset(m.version for m in models.values())
            uris: dict[int, str] = {}
            problem = ""
            try:
                if self._target is None:
                    self._target = open_target(str(self._spec.trainer.export.to))
                uris = self._target.put({role: (m, self._paths.root / m.path) for role, m in models.items()})
                self._metrics.exports.labels("copy", "ok").inc()
            except TargetError as error:
                problem = str(error)
            except Exception as error:  # a client library's own bug: the copy is tried again like any other
                problem = f"{type(error).__name__}: {error}"
                log.exception("a copy of an export failed unexpectedly")
            if problem:
                self._failed("copy", problem)
            with self._lock:
                self._problems["copy"] = problem[:1000]
                self._choose(uris)
                self._copying = frozenset()
            try:
                self._say()
            finally:
                self._do(self._disk, "write", self._remove)
            if problem and (pause is None or self._closing.wait(pause)):
                return

    def _choose(self, uris: dict[int, str] | None = None) -> None:
        """Best and last are of the models that are there: one that could not be written replaces none."""
        known = {m.version: m for m in (self._said.best, self._said.last) if m is not None}
        present = set(self._versions())

        def model(point: EvaluationPoint) -> ExportedModel:
            folder = self._folder(point.version)
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

        weighed = [p for p in self._points if p.version in present]
        self._weighed = {p.version for p in weighed}
        wanted = Wanted.of(weighed)
        self._said = Exports(
            best=self._said.best if wanted is None else model(wanted.best),
            last=self._said.last if wanted is None else model(wanted.last),
            failures=self._failures,
            problem="; ".join(filter(None, self._problems.values())),
        )

    def _say(self) -> None:
        file = self._paths.exports / EXPORTS_FILE
        aside = file.with_name(f"{STAGED}{file.name}")
        with self._lock:
            file.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.format(msgspec.json.encode(self._said), indent=1))
            aside.replace(file)

    def _failed(self, what: str, reason: str) -> None:
        with self._lock:
            self._failures += 1
            self._problems[what] = reason[:1000]
        self._metrics.exports.labels(what, "failed").inc()
        log.error("an export failed and will be tried again: %s", reason)

    def _folder(self, version: int) -> Path:
        return self._paths.exports / f"step-{version:08d}"

    def _versions(self) -> list[int]:
        return sorted(int(m[1]) for p in self._paths.exports.glob("step-*") if (m := _NAME.match(p.name)))

    def _remove_staged(self) -> None:
        for path in self._paths.exports.glob(f"{STAGED}*"):
            shutil.rmtree(path, ignore_errors=True)
