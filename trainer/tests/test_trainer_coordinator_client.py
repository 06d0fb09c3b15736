"""The client of the coordinator while the coordinator's volume is full."""

from __future__ import annotations

import threading

import httpx
import msgspec
import pytest

from scalerl_api import wire
from scalerl_trainer.coordinator_client import Coordinator, CoordinatorUnreachable, VolumeFull

FULL = httpx.Response(507, content=msgspec.msgpack.encode(wire.Problem(error="no-space", message="full")))
DOWN = httpx.Response(503, content=msgspec.msgpack.encode(wire.Problem(error="busy", message="later")))


def answering(*answers: httpx.Response, retry_seconds: float, stop: threading.Event) -> Coordinator:
    left = list(answers)
    coordinator = Coordinator("http://coordinator", "token", "i", retry_seconds, stop.is_set)
    coordinator._http = httpx.Client(
        base_url="http://coordinator", transport=httpx.MockTransport(lambda request: streamed(left.pop(0)))
    )
    return coordinator


def streamed(answer: httpx.Response) -> httpx.Response:
    """Unread, as from a connection."""
    return httpx.Response(answer.status_code, stream=httpx.ByteStream(answer.content))


def ok(message: wire.Struct) -> httpx.Response:
    return httpx.Response(200, content=msgspec.msgpack.encode(message))


def test_full_volume_has_no_deadline_and_keeps_the_ranks_in_sync() -> None:
    coordinator = answering(
        FULL, FULL, FULL, ok(wire.StepReported(publish=True)), retry_seconds=0.15, stop=threading.Event()
    )
    syncs: list[int] = []
    coordinator.while_full = lambda: syncs.append(1)
    assert coordinator.report(0, {}, 1.0, 10)
    assert len(syncs) == 3
    down = answering(DOWN, DOWN, DOWN, retry_seconds=0.15, stop=threading.Event())
    with pytest.raises(CoordinatorUnreachable):
        down.report(0, {}, 1.0, 10)


def test_no_command_is_sent_to_ranks_that_fetch_their_shards() -> None:
    shard = wire.Shard(step=0, groups=[], sequences=[])
    coordinator = answering(FULL, ok(shard), retry_seconds=9.0, stop=threading.Event())
    coordinator.while_full = lambda: pytest.fail("the others are in no collective of commands")
    assert coordinator.shard(0, 0, 2, 0.0) == shard


def test_stop_ends_the_wait_for_a_full_volume() -> None:
    stop = threading.Event()
    coordinator = answering(FULL, FULL, retry_seconds=9.0, stop=stop)
    coordinator.while_full = stop.set
    with pytest.raises(VolumeFull):
        coordinator.report(0, {}, 1.0, 10)
