"""Paths of a run's files: one directory, with the same layout on a laptop and on a volume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAINED_FILE = "trained"
"""Marker file beside a run file that the runtime keeps: the run has trained steps, so a directory without steps is not
the run's."""


@dataclass(frozen=True)
class RunPaths:
    """The layout of a run's directory.

    >>> RunPaths(Path("/runs/a")).checkpoint(20).as_posix()
    '/runs/a/checkpoints/step-00000020'
    """

    root: Path
    given_run_file: Path | None = None
    """File with the run's spec, if the runtime keeps it outside ``root`` (a mounted ConfigMap)."""

    @property
    def run_file(self) -> Path:
        """The run with every default written out; all roles read it."""
        return self.given_run_file or self.root / "run.yaml"

    @property
    def has_steps(self) -> bool:
        """Whether the runtime has marked the run as having trained steps (:data:`TRAINED_FILE`)."""
        return self.given_run_file is not None and self.given_run_file.with_name(TRAINED_FILE).exists()

    @property
    def base_model(self) -> Path:
        """Config, tokenizer and initial weights, prepared before any role starts."""
        return self.root / "model"

    @property
    def warm_started_weights(self) -> Path:
        """The model's weights after the warm start, the reference of ``recipe.kl``; only in runs with a warm start."""
        return self.root / "warm-started.safetensors"

    @property
    def mid_training(self) -> RunPaths:
        """Directory of the checkpoints of mid-training, named by supervised steps; removed after the first RL checkpoint."""
        return RunPaths(self.root / "mid-training")

    @property
    def supervised_metrics(self) -> Path:
        """One JSON object per supervised step; written by the trainer."""
        return self.root / "mid-training.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def exports(self) -> Path:
        """Exported models in Hugging Face format, one folder per version."""
        return self.checkpoints / "hf"

    @property
    def weights(self) -> Path:
        """Published weights with ``weightSync.backend: Files``, one folder per attempt of the trainer, which writes them."""
        return self.root / "weights"

    @property
    def journal(self) -> Path:
        return self.root / "coordinator"

    @property
    def history(self) -> Path:
        """Past responses to the training prompts; written by the coordinator."""
        return self.root / "history"

    @property
    def history_lines(self) -> Path:
        """One JSON object per training group whose prompt was sampled before; written by the coordinator."""
        return self.root / "history.jsonl"

    @property
    def rollouts(self) -> Path:
        """Parquet files with the recorded rollouts (``spec.rollouts``); written by the coordinator."""
        return self.root / "rollouts"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object per trained step; written by the coordinator."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files, unless the spec names another directory; written by the coordinator."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """Files of the Weights & Biases library; written by the coordinator."""
        return self.root / "wandb"

    @property
    def tracker_id(self) -> Path:
        """The run's id in Weights & Biases and MLflow, drawn once."""
        return self.root / "tracker-id"

    @property
    def curve(self) -> Path:
        """The curve of the forecast's evaluation set, one row per evaluation; written by the coordinator."""
        return self.root / "curve.csv"

    def set_curve(self, name: str) -> Path:
        """The curve of another evaluation set, in the same format."""
        return self.root / f"curve-{name}.csv"

    @property
    def labels(self) -> Path:
        """One row per evaluation and label value, for all evaluation sets; written by the coordinator."""
        return self.root / "labels.csv"

    @property
    def decisions(self) -> Path:
        """One JSON object per decision of the autoscaler, with all its inputs; written by the coordinator, to
        which the runtime sends it."""
        return self.root / "decisions.jsonl"

    @property
    def trace(self) -> Path:
        """One JSON object per event (:mod:`scalerl_api.trace`), if ``spec.trace`` is set; written by the coordinator."""
        return self.root / "trace.jsonl"

    @property
    def curve_picture(self) -> Path:
        return self.root / "curve.png"

    @property
    def status(self) -> Path:
        """Phase, attempts and use of the run, as a cluster has them in its object; written by ``scalerl run``."""
        return self.root / "status.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def fork(self) -> Path:
        """The run and the checkpoint that this run was forked from (:class:`scalerl_api.fork.Fork`)."""
        return self.root / "fork.json"

    @property
    def token(self) -> Path:
        """The run's bearer token, mode 0600."""
        return self.root / "token"
