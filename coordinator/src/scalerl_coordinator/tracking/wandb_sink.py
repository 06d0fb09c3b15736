"""Weights & Biases, online or offline, by its own library."""

from __future__ import annotations

import os
import shutil
from typing import Any, Final

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_api.trackers import WandbSpec
from scalerl_coordinator.accounting import Row
from scalerl_coordinator.tracking.sink import HELD_OUT, Points, Steps, hyperparameters, tracker_id

# Read when the library is imported: no reports of its own errors to its maker.
os.environ["WANDB_ERROR_REPORTING"] = "false"

import wandb

_INIT_SECONDS: Final = 30.0
_ROWS_A_STEP: Final = 10
"""W&B's own step, the number of a row, only goes up. A trained step has each tenth row, evaluations come between."""
_MOST_POINTS: Final = 100_000
"""More evaluations than any run has: the server draws at random from more than it is asked for."""


class WandbSink:
    """One run of W&B under this run's id, which a later process resumes.

    Offline, every process writes all steps into a file of its own, and the one before goes: ``wandb sync`` then finds each
    step once. Online, W&B's own process sends and tries again; what it has not sent when it ends, the next one sends, which
    continues after the last step that the server has, and asks it whose evaluations it has.
    """

    def __init__(self, run: ScaleRLRun, paths: RunPaths, spec: WandbSpec) -> None:
        self._run = run
        self._paths = paths
        self._spec = spec
        self._wandb: Any = None
        self._row = -1
        """Number of the last row, here or on the server."""
        self._waiting: list[tuple[int, Row]] = []
        """Evaluations for which there is no row yet."""
        self._defined: set[str] = set()
        self.begins_anew = spec.offline

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
                init_timeout=_INIT_SECONDS,
                silent=True,
                # Figures and spec alone: no code, no output, no measurements of the machine.
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
        self._row, self._waiting, self._defined = int(self._wandb.starting_step) - 1, [], set()
        return self._trained, self._measured()

    @property
    def _trained(self) -> int:
        """Steps for which there is a row."""
        return max(self._row, 0) // _ROWS_A_STEP

    def _measured(self) -> set[int]:
        if not self._wandb.resumed:
            return set()
        name = f"{HELD_OUT}version"
        run = wandb.Api(timeout=int(_INIT_SECONDS)).run(self._wandb.path)
        return {int(row[name]) for row in run.history(samples=_MOST_POINTS, keys=[name], pandas=False)}

    def write(self, steps: Steps, points: Points) -> None:
        self._waiting = sorted([*self._waiting, *points], key=lambda point: point[0])
        self._write_points()
        for step, row in steps:
            self._log((step + 1) * _ROWS_A_STEP, "step", row)
            self._write_points()

    def _write_points(self) -> None:
        """Those of versions that are there, as long as there is a row before the next step's."""
        next_step = (self._trained + 1) * _ROWS_A_STEP
        while self._waiting and self._waiting[0][0] <= self._trained and self._row + 1 < next_step:
            self._log(self._row + 1, f"{HELD_OUT}version", self._waiting.pop(0)[1])

    def _log(self, number: int, axis: str, row: Row) -> None:
        for name in row.keys() - self._defined - {axis}:
            self._wandb.define_metric(name, step_metric=axis, step_sync=False)
        self._defined |= row.keys()
        self._wandb.log(row, step=number, commit=True)
        self._row = number

    def close(self) -> None:
        self._wandb.finish()
