"""What a publish raises."""

from __future__ import annotations

from scalerl_trainer.errors import TrainerError


class PublishError(TrainerError):
    """A publish, or one attempt at it, did not work."""


class SourceError(PublishError):
    """The stream of weights is not what its manifest says; no attempt can mend that."""


class GroupError(PublishError):
    """A process group could not be opened or an operation on it failed; its members may still be well."""
