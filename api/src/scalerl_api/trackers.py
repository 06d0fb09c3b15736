"""``spec.trackers``: experiment trackers that receive the content of ``metrics.jsonl`` and ``curve.csv``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from scalerl_api.fields import Matches, Model
from scalerl_api.plugins import TrackerPlugin

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
"""Name of a project or an experiment, with characters that both W&B and MLflow accept."""


class TensorBoardSpec(Model):
    """Event files for ``tensorboard --logdir``."""

    directory: (
        Annotated[str, Field(max_length=1024), AfterValidator(Matches(r"^/.+$", "must be an absolute path"))]
        | None
    ) = None
    """Directory shared by several runs, each with a subdirectory of its name. Default: ``tensorboard`` in the run
    directory."""


class WandbSpec(Model):
    """Weights & Biases. Provide the API key as the variable ``WANDB_API_KEY`` in ``coordinator.podTemplate.env``,
    from a Secret, and ``WANDB_BASE_URL`` for a self-hosted server."""

    project: TrackerName = "scalerl"
    """Project of the tracker's run, which has the name of this run."""
    entity: TrackerName | None = None
    """Team or user that owns the project; default: that of the API key."""
    offline: bool = False
    """Writes to ``wandb`` in the run directory and sends nothing; upload later with ``wandb sync``."""


class MLflowSpec(Model):
    """An MLflow tracking server or database file. Provide credentials as the variables ``MLFLOW_TRACKING_TOKEN``,
    or ``MLFLOW_TRACKING_USERNAME`` and ``MLFLOW_TRACKING_PASSWORD``, in ``coordinator.podTemplate.env``, from a
    Secret."""

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
    """Address of the server (``https://mlflow.example.com``) or path of the database
    (``sqlite:////shared/mlflow.db``)."""
    experiment: TrackerName = "scalerl"
    """Name of the experiment, which is created if it does not exist. The tracker's run has the name of this run."""


class TrackersSpec(Model):
    """Each tracker receives every line of ``metrics.jsonl`` and every row of ``curve.csv``. A failing tracker
    never ends or delays the run."""

    tensor_board: TensorBoardSpec | None = None
    """Event files for TensorBoard; ``{}`` writes them to the run directory."""
    wandb: WandbSpec | None = None
    """Weights & Biases, online or offline."""
    mlflow: MLflowSpec | None = None
    """MLflow."""
    plugin: TrackerPlugin | None = None
    """A tracker of the entry points ``scalerl.trackers``."""

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
