"""The proximal policy (``algo.corrections``): the weights that a batch was begun with, kept while several updates share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from scalerl_trainer.checkpoints.engine_files import PROXIMAL, Piece, SavedState
from scalerl_trainer.engine.backend import Frozen
from scalerl_trainer.models.policy import PREFIX


class Proximal:
    """A frozen copy of the policy, of the adapters alone where only those are trained."""

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen
        self.updates: int | None = None
        """Updates since it was set; None if it was never set."""

    @property
    def differing(self) -> Frozen | None:
        """The policy, once its weights differ from the current ones."""
        return self._frozen if self.updates else None

    def set(self, buckets: Iterable[list[tuple[str, torch.nn.Parameter]]]) -> None:
        """Copy the current weights: names and whole parameters. A collective under ZeRO-3."""
        for bucket in buckets:
            self._frozen.copy_from(bucket)
        self.updates = 0

    def values_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """What a checkpoint has of it beside ``piece``, which has the policy's name."""
        if not self.updates:
            return {}
        return {PROXIMAL: self._frozen.part(piece.name, piece.start, piece.values["weight"].numel())}

    def restore(self, saved: SavedState) -> None:
        """Read this rank's part of a checkpoint, which may have been written without one."""
        if not saved.has(PROXIMAL):
            return
        for name, start, flat in self._frozen.parts():
            if (parameter := name.removeprefix(PREFIX)) in saved.header.parameters:  # others are frozen
                saved.read(parameter, PROXIMAL, start, flat)
        self.updates = 1

    def close(self) -> None:
        """Remove the backend's hooks."""
        self._frozen.close()
