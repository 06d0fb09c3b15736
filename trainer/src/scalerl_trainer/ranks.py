"""Collectives of Python objects between ranks.

They use a separate gloo process group, which needs no accelerator and has its own timeout. If a rank dies, the calls of the
others raise at once, because its connections close; if a rank hangs, they raise after the timeout.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from scalerl_trainer.errors import TrainerError

dist: Any = torch.distributed

T = TypeVar("T")


class RankLost(TrainerError):
    """Another rank died, or did not call the collective in time."""


class Ranks:
    """Collectives between the ranks of the default process group; objects are pickled."""

    def __init__(self, rank: int, world: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_seconds = timeout_seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T | None) -> T:
        """Rank 0's ``value``.

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

    def all_gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in the order of ranks.

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
    return RankLost(f"lost a rank of the trainer: {reason}")
