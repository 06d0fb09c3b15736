"""Weights & Biases, online or offline, by its own library."""

from __future__ import annotations

import os
import shutil
from typing import Any, Final

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ScaleRLRun
from scalerl_api.trackers import WandbSpec
from scalerl_coordinator.tracking.sink import Steps, hyperparameters, tracker_id

# Read when the library is imported: no reports of its own errors to its maker.
os.environ["WANDB_ERROR_REPORTING"] = "false"

import wandb

_INIT_SECONDS: Final = 30.0


class WandbSink:
    """One run of W&B under this run's id, which a later process resumes.

    Offline, every process writes all steps into a file of its own, and the one before goes: ``wandb sync`` then finds each
    step once. Online, W&B's own process sends and tries again; what it has not sent when it ends, the next one sends, which
    continues after the last step that the server has.
    """

    def __init__(self, run: ScaleRLRun, paths: RunPaths, spec: WandbSpec) -> None:
        self._run = run
        self._paths = paths
        self._spec = spec
        self._wandb: Any = None
        self.begins_anew = spec.offline

    def open(self) -> int:
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
        return int(self._wandb.step)

    def write(self, steps: Steps) -> None:
        for step, row in steps:
            self._wandb.log(row, step=step, commit=True)

    def close(self) -> None:
        self._wandb.finish()
