"""Which tokens of a sequence are trained, without :func:`scalerl_trainer.packing.pack`."""

from __future__ import annotations

from scalerl_trainer.packing import Sequence


def trainable_places(sequence: Sequence) -> list[int]:
    """Indices of the trainable tokens in the completion."""
    if sequence.trainable is None:
        return list(range(len(sequence.completion)))
    return [place for place, keep in enumerate(sequence.trainable) if keep]
