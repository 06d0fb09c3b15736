"""Collectives of messages between ranks: plain values in MessagePack, decoded as the type that the caller expects.

torch's collectives of objects unpickle what they receive, so a process that joined the group could execute code in rank 0, which
has the tokens of hubs and buckets. Here a peer can send wrong values, but nothing else.

They use a separate gloo process group, which needs no accelerator and has its own timeout. If a rank dies, the calls of the
others raise at once, because its connections close; if a rank hangs, they raise after the timeout.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch
import torch.distributed

from scalerl_trainer.errors import TrainerError

dist: Any = torch.distributed

MAX_BYTES: Final = 2**26
"""Maximum size of a message."""

T = TypeVar("T")


class RankLost(TrainerError):
    """Another rank died, did not call the collective in time, or sent something else than the expected message."""


class Ranks:
    """Collectives between the ranks of the default process group. ``kind`` is the type of the message: anything that msgspec
    decodes."""

    def __init__(self, rank: int, world: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_seconds = timeout_seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T | None, kind: type[T]) -> T:
        """Rank 0's ``value``.

        Raises:
            RankLost
        """
        content, problem = _encode(value) if self.is_leader else (b"", None)
        size = torch.tensor([len(content)])
        try:
            dist.broadcast(size, src=0, group=self._group)
            buffer = _padded(content, _checked(0, int(size)))
            dist.broadcast(buffer, src=0, group=self._group)
        except RuntimeError as error:
            raise problem or _lost(error) from error
        return _decode(0, buffer, kind)

    def all_gather(self, value: T, kind: type[T]) -> list[T]:
        """Every rank's ``value``, in the order of ranks.

        Raises:
            RankLost
        """
        content, problem = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        try:
            dist.all_gather(sizes, torch.tensor([len(content)]), group=self._group)
            lengths = [_checked(rank, int(size)) for rank, size in enumerate(sizes)]
            own = _padded(content, max(lengths))
            buffers = [torch.empty_like(own) for _ in lengths]
            dist.all_gather(buffers, own, group=self._group)
        except RuntimeError as error:
            raise problem or _lost(error) from error
        return [
            _decode(rank, buffer[:length], kind)
            for rank, (buffer, length) in enumerate(zip(buffers, lengths, strict=True))
        ]


def _encode(value: Any) -> tuple[bytes, Exception | None]:
    """A value that cannot be encoded is sent as an empty message, which all ranks refuse: none waits for this one."""
    try:
        content = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as problem:
        return b"", problem
    return content, None


def _checked(rank: int, size: int) -> int:
    if not 0 < size <= MAX_BYTES:
        raise RuntimeError(f"rank {rank} announces a message of {size} bytes, not 1 to {MAX_BYTES}")
    return size


def _padded(content: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)


def _decode(rank: int, buffer: torch.Tensor, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(buffer.numpy().tobytes(), type=kind)
    except (ValueError, RecursionError) as error:
        raise RankLost(f"rank {rank} of the trainer sent something else than {kind}: {error}") from error


def _lost(error: RuntimeError) -> RankLost:
    reason = (str(error).strip().splitlines() or ["unknown"])[0]
    return RankLost(f"lost a rank of the trainer: {reason}")
