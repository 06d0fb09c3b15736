"""Where a run keeps its files: one directory, the same layout on a laptop and on a volume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAINED_FILE = "trained"
"""Beside a run file that the runtime keeps: the run has trained steps, so a directory without any is not its own."""


@dataclass(frozen=True)
class RunPaths:
    """The layout of a run's directory.

    given_run_file: where the run's spec is, if the runtime keeps it elsewhere (a mounted ConfigMap).

    >>> RunPaths(Path("/runs/a")).checkpoint(20).as_posix()
    '/runs/a/checkpoints/step-00000020'
    """

    root: Path
    given_run_file: Path | None = None

    @property
    def run_file(self) -> Path:
        """The run with every default written out; what all roles read."""
        return self.given_run_file or self.root / "run.yaml"

    @property
    def has_steps(self) -> bool:
        """Whether the runtime says that the run has trained steps before."""
        return self.given_run_file is not None and self.given_run_file.with_name(TRAINED_FILE).exists()

    @property
    def base_model(self) -> Path:
        """Config, tokenizer and initial weights, as prepared before any role starts."""
        return self.root / "model"

    @property
    def warm_started_weights(self) -> Path:
        """The model's weights after the warm start, the reference of ``recipe.kl``; only of a run with a warm start."""
        return self.root / "warm-started.safetensors"

    @property
    def mid_training(self) -> RunPaths:
        """Where mid-training keeps its checkpoints, named by supervised steps; removed once the run has one of its own."""
        return RunPaths(self.root / "mid-training")

    @property
    def supervised_metrics(self) -> Path:
        """One JSON object a supervised step; written by the trainer."""
        return self.root / "mid-training.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def exports(self) -> Path:
        """Models in the form that others load, one folder a version."""
        return self.checkpoints / "hf"

    @property
    def journal(self) -> Path:
        """The coordinator's own directory."""
        return self.root / "coordinator"

    @property
    def history(self) -> Path:
        """Past responses to the training prompts; written by the coordinator."""
        return self.root / "history"

    @property
    def history_lines(self) -> Path:
        """One JSON object a training group whose prompt was sampled before; written by the coordinator."""
        return self.root / "history.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object a trained step; written by the coordinator."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files, unless the spec names another directory; written by the coordinator."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """What the library of Weights & Biases keeps; written by the coordinator."""
        return self.root / "wandb"

    @property
    def tracker_id(self) -> Path:
        """The run's id in Weights & Biases and MLflow, drawn once."""
        return self.root / "tracker-id"

    @property
    def curve(self) -> Path:
        """One row an evaluation; written by the coordinator."""
        return self.root / "curve.csv"

    def set_curve(self, name: str) -> Path:
        """The same of another evaluation set than the forecast's."""
        return self.root / f"curve-{name}.csv"

    @property
    def labels(self) -> Path:
        """One row an evaluation and value of a label, of all evaluation sets; written by the coordinator."""
        return self.root / "labels.csv"

    @property
    def decisions(self) -> Path:
        """One JSON object a decision of the autoscaler, with all its inputs; written by the operator, on a cluster by way of the coordinator."""
        return self.root / "decisions.jsonl"

    @property
    def trace(self) -> Path:
        """One JSON object an event (:mod:`scalerl_api.trace`), with ``spec.trace``; written by the coordinator."""
        return self.root / "trace.jsonl"

    @property
    def curve_picture(self) -> Path:
        return self.root / "curve.png"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def token(self) -> Path:
        """The run's bearer token, mode 0600."""
        return self.root / "token"
