"""A receiver that its group has no place for."""

from __future__ import annotations

import pytest
import torch

from scalerl_api.wire import GroupJoin
from scalerl_generator.weights.receiver_group import ReceiverGroup


@pytest.mark.parametrize("rank", [0, 3, 4])
def test_rank_outside_of_the_group_is_refused_at_once(rank: int) -> None:
    """Also that of a second worker whose server was counted as one member."""
    join = GroupJoin(
        epoch=1,
        store_host="127.0.0.1",
        store_port=9,
        rank=1,
        world_size=3,
        backend="gloo",
        timeout_seconds=1.0,
    )
    with pytest.raises(ValueError, match=rf"^rank must be in 1\.\.2 \(rank 0 sends\), got {rank}$"):
        ReceiverGroup(join, rank, torch.device("cpu"))
