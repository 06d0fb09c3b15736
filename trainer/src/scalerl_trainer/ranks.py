"""What the ranks say to each other besides gradients: rank 0 gives an order, all report.

A group of its own over gloo, so that talk needs no accelerator and has its own time-out. A rank that is
killed closes its connections, which ends the others' wait at once; one that hangs ends it at the
time-out. Either way the call raises, and the process leaves with an error.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from scalerl_trainer.errors import TrainerError

dist: Any = torch.distributed

T = TypeVar("T")


class RankLost(TrainerError):
    """Another rank is gone, or did not come to where all have to meet in time."""


class Ranks:
    """Collective calls between the ranks of the default process group; objects travel pickled."""

    def __init__(self, rank: int, world: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_seconds = timeout_seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def from_leader(self, value: T | None) -> T:
        """Rank 0's ``value``, on every rank.

        Raises:
            RankLost
        """
        box = [value]
        try:
            dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        received: Any = box[0]
        return received  # type: ignore[no-any-return]

    def all(self, value: T) -> list[T]:
        """Every rank's ``value``, in the order of ranks, on every rank.

        Raises:
            RankLost
        """
        gathered: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(gathered, value, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        return gathered


def _lost(error: RuntimeError) -> RankLost:
    reason = (str(error).strip().splitlines() or ["unknown"])[0]
    return RankLost(f"a rank of the trainer is lost: {reason}")
