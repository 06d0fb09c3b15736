"""A receiver that its group has no place for, and what one does first in its group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_connections_of_broadcasts_over_nccl_open_with_the_group(backend: str) -> None:
    """NCCL opens them in the first broadcast, and waits for all ranks on the host: it is not that of the first bucket."""
    done: list[str] = []
    work = SimpleNamespace(is_completed=lambda: True, wait=lambda *_: None)

    def operation(name: str) -> Any:
        def start(tensors: list[torch.Tensor], *_: Any) -> Any:
            done.append(name)
            tensors[0].fill_(3)
            return work

        return start

    group = ReceiverGroup.__new__(ReceiverGroup)
    group._on_gpu, group._device = backend == "nccl", torch.device("cpu")
    pg = SimpleNamespace(allreduce=operation("allreduce"), broadcast=operation("broadcast"))
    join = SimpleNamespace(timeout_seconds=1.0, world_size=3)
    group._sync(pg, join)  # type: ignore[arg-type]
    assert done == ["allreduce", "broadcast"][: 1 + group._on_gpu]


def test_group_over_nccl_has_no_stream_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
            made.append(options)

    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # restored after the test
    join = SimpleNamespace(
        timeout_seconds=1.0, world_size=2, epoch=1, store_host="", store_port=1, backend="nccl"
    )
    ReceiverGroup._construct(ReceiverGroup.__new__(ReceiverGroup), join, 1)  # type: ignore[arg-type]
    assert [options.is_high_priority_stream for options in made] == [True]
