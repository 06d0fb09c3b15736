"""Errors of this package."""

from __future__ import annotations

from scalerl_api.attempts import AttemptSuperseded as AttemptSuperseded
from scalerl_api.object_store import first_line as first_line  # of all libraries


class TrainerError(Exception):
    """Base of all errors of this package."""


class BadBatchError(TrainerError):
    """A batch that cannot be trained on, with any weights."""


class SequenceTooLongError(BadBatchError):
    """A sequence has more tokens than a micro-batch may hold."""

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        self.index, self.tokens, self.limit = index, tokens, limit
        super().__init__(
            f"sequence {index} has {tokens} tokens, but a micro-batch holds {limit}: raise trainer.microBatchTokens, or "
            "limit the length of prompt plus completion"
        )


class NonFiniteLogprobError(BadBatchError):
    """The generator's log-probabilities of trainable tokens include NaN or an infinity."""

    def __init__(self, count: int, total: int, first: int) -> None:
        self.count, self.total, self.first = count, total, first
        super().__init__(
            f"{count} of {total} generator log-probabilities are not finite (first at flat token {first}): "
            "the rollout is damaged, or forced tokens are not masked"
        )


class DivergedError(TrainerError):
    """Training diverged: several steps in a row, or one of mid-training, could not be applied, or most log-probabilities of a
    step are not numbers."""


class PublishRefusedError(TrainerError):
    """Generators cannot load the weights, or compute something else with them."""


class ModelError(TrainerError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """No model at the given folder or hub name and revision."""


class EngineError(TrainerError):
    """The engine's settings or state do not allow the operation."""


class Stopped(TrainerError):
    """A stop was requested before the training loop. Mid-training has saved its state."""


class MidTrainingError(TrainerError):
    """The task's solutions cannot be trained on, with any weights."""
