"""Models of evaluations, exported while the run trains: the best one's and the last one's are kept.

Rank 0's. The weights of a version exist only until the next update, so they are written at once, while training
waits; flushing, renaming, copying elsewhere and removing what is no longer wanted is a thread's. Nothing that fails
here ends the run: it is counted, said in ``exports.json``, and tried again.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

Weights = Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Wanted:
    """The points whose models are kept."""

    best: EvaluationPoint
    last: EvaluationPoint

    @classmethod
    def of(cls, points: Sequence[EvaluationPoint]) -> Wanted | None:
        if not points:
            return None
        return cls(max(points, key=lambda p: (p.reward, p.version)), max(points, key=lambda p: p.version))


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._tasks: list[Future[None]] = []
        self._wanted: Wanted | None = None
        self._newest = -1
        self._said = read_exports(paths.exports) or Exports()
        self._failures, self._problem = 0, ""
        self._target: Target | None = None
        self._remove_staged()

    def due(self, version: int) -> bool:
        """Whether an evaluation measures ``version``, as the coordinator decides it."""
        return self._spec.trainer.export.enabled and (
            version % self._spec.evaluation.every_steps == 0 or version == self._spec.budget.max_steps
        )

    @property
    def waiting(self) -> bool:
        """Whether the newest export has no evaluation yet."""
        return self._newest > (-1 if self._wanted is None else self._wanted.last.version)

    def has(self, version: int) -> bool:
        """Whether that version is there, or on its way."""
        return version == self._newest or self._folder(version).is_dir()

    def write(self, version: int, infos: Sequence[TensorInfo], weights: Weights) -> float:
        """Export the present weights as ``version``; returns how long training was held up, in seconds.

        ``weights`` gives them anew at each call, and is always exhausted: it is a collective.
        """
        begun = time.perf_counter()
        for pause in (*self._write_pauses, None):
            tensors = weights()
            try:
                staged = stage_model(
                    self._folder(version), self._paths.base_model, infos, tensors, self._spec
                )
                self._newest = version
                self._do(partial(self._commit, staged, version))
                break
            except (OSError, ValueError) as error:
                self._failed("write", f"version {version}: {error}")
            finally:
                for _ in tensors:
                    pass
            if pause is None or self._closing.wait(pause):
                self._do(self._settle)
                break
        return time.perf_counter() - begun

    def evaluated(self, points: Sequence[EvaluationPoint]) -> None:
        """Keep what ``points`` call best and last, copy it, remove the rest."""
        wanted = Wanted.of(points)
        if wanted is not None and wanted != self._wanted:
            self._wanted = wanted
            self._do(self._settle)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for what is under way; copies that fail now are not tried again."""
        deadline = time.monotonic() + seconds
        self._closing.set()
        for task in self._tasks:
            try:
                task.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                log.error("an export is not done after %.0f s, and given up", seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- the thread's -------------------------------------------------------------------------------------

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks = [t for t in self._tasks if not t.done()]

        def guarded() -> None:
            try:
                task()
            except Exception as error:  # whatever it was, the run goes on
                self._failed("write", f"{type(error).__name__}: {error}")

        self._tasks.append(self._thread.submit(guarded))

    def _commit(self, staged: Path, version: int) -> None:
        commit_model(staged, self._folder(version))
        self._metrics.exports.labels("write", "ok").inc()
        self._metrics.export_version.set(version)
        self._problem = ""
        log.info("version %d is exported to %s", version, self._folder(version))
        self._settle()

    def _settle(self) -> None:
        """Removes what is neither best nor last nor still to be measured, says what is there, copies it."""
        wanted = self._wanted
        self._say(wanted)
        if wanted is None:
            return
        kept = {wanted.best.version, wanted.last.version}
        for version in self._versions():
            if version not in kept and version < wanted.last.version:
                shutil.rmtree(self._folder(version), ignore_errors=True)
        if self._spec.trainer.export.to is not None:
            self._copy(wanted)

    def _copy(self, wanted: Wanted) -> None:
        models = {role: m for role in ("best", "last") if (m := getattr(self._said, role)) is not None}
        if all(model.uri for model in models.values()):
            return
        for pause in (*self._copy_pauses, None):
            try:
                if self._target is None:
                    self._target = open_target(str(self._spec.trainer.export.to))
                uris = self._target.put({role: (m, self._paths.root / m.path) for role, m in models.items()})
                self._metrics.exports.labels("copy", "ok").inc()
                self._problem = ""
                self._say(wanted, uris)
                return
            except TargetError as error:
                self._failed("copy", str(error))
                self._say(wanted)
                if pause is None or self._closing.wait(pause):
                    return

    def _say(self, wanted: Wanted | None, uris: dict[int, str] | None = None) -> None:
        known = {m.version: m for m in (self._said.best, self._said.last) if m is not None}

        def model(point: EvaluationPoint) -> ExportedModel | None:
            folder = self._folder(point.version)
            if not folder.is_dir():
                return None
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

        self._said = Exports(
            best=self._said.best if wanted is None else model(wanted.best),
            last=self._said.last if wanted is None else model(wanted.last),
            failures=self._failures,
            problem=self._problem,
        )
        file = self._paths.exports / EXPORTS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f"{STAGED}{file.name}")
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(self._said), indent=1))
        aside.replace(file)

    def _failed(self, what: str, reason: str) -> None:
        self._failures += 1
        self._problem = reason[:1000]
        self._metrics.exports.labels(what, "failed").inc()
        log.error("an export failed and will be tried again: %s", reason)

    def _folder(self, version: int) -> Path:
        return self._paths.exports / f"step-{version:08d}"

    def _versions(self) -> list[int]:
        return sorted(int(m[1]) for p in self._paths.exports.iterdir() if (m := _NAME.match(p.name)))

    def _remove_staged(self) -> None:
        for path in self._paths.exports.glob(f"{STAGED}*"):
            shutil.rmtree(path, ignore_errors=True)
