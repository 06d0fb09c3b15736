"""The interface of the publishers of weights, their limits of time, and what they measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from scalerl_api import wire
from scalerl_trainer.publish.published_weights import WeightSource

MAX_TIMEOUTS = 3.0
"""Limit of a publish with all its attempts, in multiples of the timeout; for files, of one call of the volume."""
WRITE_TIMEOUTS = 8.0
"""Limit of a write to files with all its attempts, which may read the weights for as long as it makes progress."""


@dataclass(frozen=True)
class Outcome:
    """Result of a publish."""

    version: int
    updated: list[str]
    """Ids of the members that received the version."""
    failed: list[str]
    """Ids of the members that did not."""
    error: str
    """Why the first of them did not; empty if all did."""
    stats: dict[str, float]
    """Statistics for the coordinator and metrics.jsonl."""
    kept: list[str] = field(default_factory=list)
    """Ids of the members that could not read the version, and generate with the one they have."""
    slow: bool = False
    """Whether one of these continues to read the version."""


@dataclass
class PhaseSeconds:
    """Duration of the sender's phases in one attempt, in seconds."""

    open: float = 0.0
    gather: float = 0.0
    send: float = 0.0


class Publisher(Protocol):
    """Executes the publishes of a run on rank 0; one for each ``weightSync.backend``."""

    def publish(
        self,
        version: int,
        weights: WeightSource,
        members: list[wire.Member],
        have_read: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Publish ``version`` to ``members``.

        Args:
            have_read: called once the weights may change.

        Raises:
            SourceError: the stream of weights differs from its manifest.
        """
        ...

    def close(self) -> None:
        """End what the publisher keeps from one publish to the next. At the end of the attempt."""
        ...


def decode_received(body: bytes) -> wire.WeightReceived:
    return msgspec.msgpack.decode(body, type=wire.WeightReceived)


def stats_of(
    received: list[wire.WeightReceived], clock: PhaseSeconds, total_seconds: float
) -> dict[str, float]:
    """Durations of the last attempt's phases, in seconds, for metrics.jsonl.

    ``open``, ``gather`` and ``send`` are measured by the sender, the others by each member, of which the slowest counts.
    ``gather`` overlaps with ``transfer`` except for the first bucket.
    """

    def slowest(seconds: Callable[[wire.WeightReceived], float]) -> float:
        return max((seconds(r) for r in received), default=0.0)

    return {
        "publish_seconds": total_seconds,
        "publish_open_seconds": clock.open,
        "publish_gather_seconds": clock.gather,
        "publish_send_seconds": clock.send,
        "publish_pause_seconds": slowest(lambda r: r.pause_seconds),
        "publish_transfer_seconds": slowest(lambda r: r.transfer_seconds),
        "publish_load_seconds": slowest(lambda r: r.load_seconds),
        "publish_resume_seconds": slowest(lambda r: r.resume_seconds),
    }
