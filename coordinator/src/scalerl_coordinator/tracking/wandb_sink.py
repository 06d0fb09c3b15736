"""Sink for Weights & Biases, online or offline, through the ``wandb`` library."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Final

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_api.trackers import WandbSpec
from scalerl_coordinator.tracking.sink import HELD_OUT, Points, Samples, Steps, hyperparameters, tracker_id
from scalerl_coordinator.tracking.tail import SAMPLE_COLUMNS

# Set before the import, which reads it: the library must not send its errors to W&B.
os.environ["WANDB_ERROR_REPORTING"] = "false"

import wandb

_VERSION: Final = f"{HELD_OUT}version"
_ROLLOUTS: Final = f"{HELD_OUT}rollouts"
_MAX_POINTS: Final = 100_000
"""More evaluations than any run has, because the server samples at random above this limit."""


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    return wandb.Table(
        list(SAMPLE_COLUMNS), [[row[name] for name in SAMPLE_COLUMNS] for row in rows], allow_mixed_types=True
    )


class WandbSink:
    """One W&B run with this run's id, which a later process resumes.

    Offline, each process writes all steps to its own file and deletes the previous file, so ``wandb sync`` finds each step
    once. Online, W&B's own process sends rows and retries; the next tracker process queries the server's newest step and
    evaluated versions, and sends the missing rows. W&B's own step is the row number.

    Args:
        init_seconds: timeout of the first requests.
    """

    def __init__(self, run: ScaleRLRun, paths: RunPaths, spec: WandbSpec, init_seconds: float = 30.0) -> None:
        self._run, self._init_seconds = run, init_seconds
        self._paths = paths
        self._spec = spec
        self._wandb: Any = None
        self._next_row = 0
        self._defined: set[str] = set()
        self.clears_on_open = spec.offline

    def open(self) -> tuple[int, set[int]]:
        id_ = tracker_id(self._paths)
        for old in self._paths.wandb.glob(f"offline-run-*-{id_}"):
            shutil.rmtree(old)
        self._wandb = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            name=self._run.metadata.name,
            id=id_,
            settings=wandb.Settings(
                mode="offline" if self._spec.offline else "online",
                resume=None if self._spec.offline else "allow",
                root_dir=str(self._paths.root),
                init_timeout=self._init_seconds,
                silent=True,
                # Send metrics and spec only: no code, console output or machine metrics.
                console="off",
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        self._wandb.config.update(hyperparameters(self._run), allow_val_change=True)
        self._next_row, self._defined = int(self._wandb.starting_step), set()
        return self._found()

    def _found(self) -> tuple[int, set[int]]:
        """The first step that the server lacks, and the versions whose evaluations it has."""
        if not self._wandb.resumed:
            return 0, set()
        run = wandb.Api(timeout=int(self._init_seconds)).run(self._wandb.path)
        measured = run.history(samples=_MAX_POINTS, keys=[_VERSION], pandas=False)
        return int(run.summary.get("step", -1)) + 1, {int(row[_VERSION]) for row in measured}

    def write(self, steps: Steps, points: Points, samples: Samples) -> None:
        for _, row in steps:
            self._log("step", row)
        for version, row in points:
            table = samples.get(version)
            self._log(_VERSION, row | ({_ROLLOUTS: _table(table)} if table else {}))

    def _log(self, axis: str, row: dict[str, Any]) -> None:
        for name in row.keys() - self._defined - {axis}:
            self._wandb.define_metric(name, step_metric=axis, step_sync=False)
        self._defined |= row.keys()
        self._wandb.log(row, step=self._next_row, commit=True)
        self._next_row += 1

    def close(self) -> None:
        self._wandb.finish()
