"""Errors of a publish."""

from __future__ import annotations

from scalerl_trainer.errors import TrainerError


class PublishError(TrainerError):
    """A publish, or one attempt at it, failed."""


class SourceError(PublishError):
    """The stream of weights differs from its manifest; retrying does not help."""


class GroupError(PublishError):
    """A process group could not be opened or an operation on it failed; its members may be healthy."""
