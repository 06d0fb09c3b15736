"""``trackers``: which experiment trackers get what ``metrics.jsonl`` and ``curve.csv`` hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from scalerl_api.fields import Matches, Model

TrackerName = Annotated[
    str,
    Field(min_length=1, max_length=128),
    AfterValidator(
        Matches(
            r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$",
            "must be letters, digits, spaces, _, . and -, with a letter, a digit or _ first",
        )
    ),
]
"""Of a project or an experiment: what W&B and MLflow both take."""


class TensorBoardSpec(Model):
    """Event files, which ``tensorboard --logdir`` shows."""

    directory: (
        Annotated[str, Field(max_length=1024), AfterValidator(Matches(r"^/.+$", "must be an absolute path"))]
        | None
    ) = None
    """Shared by many runs: each writes into a folder of its name there. None: ``tensorboard`` in the run's directory."""


class WandbSpec(Model):
    """Weights & Biases. The API key is the variable ``WANDB_API_KEY`` of ``coordinator.podTemplate.env``, from a Secret;
    ``WANDB_BASE_URL`` names a server of one's own."""

    project: TrackerName = "scalerl"
    """Project of the tracker's run, which has the name of this one."""
    entity: TrackerName | None = None
    """Team or user that owns the project; none: the API key's default."""
    offline: bool = False
    """Writes to ``wandb`` in the run's directory and sends nothing; ``wandb sync`` uploads it later."""


class MLflowSpec(Model):
    """A tracking server of MLflow, or its database in a file. Credentials are the variables ``MLFLOW_TRACKING_TOKEN``, or
    ``MLFLOW_TRACKING_USERNAME`` and ``MLFLOW_TRACKING_PASSWORD``, of ``coordinator.podTemplate.env``, from a Secret."""

    uri: Annotated[
        str,
        Field(max_length=1024),
        AfterValidator(
            Matches(
                r"^(https?://[A-Za-z0-9._:\[\]-]+(/[^@?#\s]*)?|sqlite:////[^?#\s]+)$",
                "must be http://host/…, https://host/… or sqlite:////absolute/path.db, without a password: that is the "
                "variable MLFLOW_TRACKING_PASSWORD",
            )
        ),
    ]
    """Where the server is (``https://mlflow.example.com``), or the file (``sqlite:////shared/mlflow.db``)."""
    experiment: TrackerName = "scalerl"
    """Created where it does not exist. The tracker's run in it has the name of this one."""


class TrackersSpec(Model):
    """What is given gets every line of ``metrics.jsonl`` and every row of ``curve.csv``. A tracker that fails never ends or
    delays the run."""

    tensor_board: TensorBoardSpec | None = None
    """Event files for TensorBoard; ``{}`` writes them into the run's directory."""
    wandb: WandbSpec | None = None
    """Weights & Biases, online or offline."""
    mlflow: MLflowSpec | None = None
    """MLflow."""

    @property
    def asked_for(self) -> list[str]:
        """Names of the fields that are given.

        >>> TrackersSpec(wandb=WandbSpec()).asked_for
        ['wandb']
        """
        return [
            str(field.alias)
            for name, field in type(self).model_fields.items()
            if getattr(self, name) is not None
        ]
