"""What answers the trainer may be hostile: the coordinator's address, and those that members register."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest
from hostile_server import MARK, REDIRECTS, Hostile

from scalerl_api import wire
from scalerl_api.process import COORDINATOR_TIMEOUT_SECONDS
from scalerl_trainer.coordinator_client import Coordinator, CoordinatorError
from scalerl_trainer.publish.actor_control import ActorControl
from scalerl_trainer.publish.make_publisher import MIN_COLLECTIVE_SECONDS

ATTACKS = ("gzip", "deflate", "endless", "endless-error", "announced", "deep", *REDIRECTS)


def ask_coordinator(url: str, answer_seconds: float = 60.0) -> str:
    message = wire.NextRequest(incarnation="i", version=0, wait_seconds=0.0)
    coordinator = Coordinator(url, "t", "i", answer_seconds=answer_seconds)
    with pytest.raises(CoordinatorError) as refused:
        coordinator._once("/v1/trainer/next", message, wire.Next, 0.0, 2**20)
    coordinator.close()
    return str(refused.value)


def ask_actor(url: str) -> str:
    member = wire.Member(member_id="m", name="m", control_url=url, weight_version=0)
    control = ActorControl("t", late_answer_seconds=0.5, max_answer_bytes=2**20)
    calls = control.start([member], "/v1/weights/probe", {"m": wire.Ack()}, 30.0)
    answer = calls.wait()["m"]
    control.close()
    # The body is decoded by the caller.
    return answer.error or "not decoded"


@pytest.mark.parametrize(
    ("ask", "attack"),
    [
        *((ask_coordinator, attack) for attack in ATTACKS),
        (partial(ask_coordinator, answer_seconds=1.0), "slow"),  # of 100 s
        *((ask_actor, attack) for attack in ATTACKS),  # its deadline is that of a publish
    ],
)
async def test_answer_is_bounded_and_no_redirect_is_followed(ask: Callable[[str], str], attack: str) -> None:
    other, began = Hostile("valid"), time.monotonic()
    async with other.serving() as target, Hostile(attack, f"{target}/x").serving() as url:
        said = await asyncio.to_thread(ask, url)
    assert other.requests == 0
    assert MARK not in said
    assert len(said) < 300
    assert time.monotonic() - began < 90.0
    if attack in ("gzip", "deflate"):
        assert "compressed" in said
    if attack in ("endless", "announced"):
        assert "more than 1048576 bytes" in said
    if attack == "slow":
        assert "not complete in time" in said


async def test_shard_that_trickles_in_ends_with_the_call() -> None:
    """Its limit of 8 GiB would allow more than two hours, in which the other ranks report a lost rank."""
    assert COORDINATOR_TIMEOUT_SECONDS + 2 * 30.0 < MIN_COLLECTIVE_SECONDS
    began = time.monotonic()
    async with Hostile("slow").serving() as url:
        coordinator = Coordinator(url, "t", "i", retry_seconds=2.0)
        with pytest.raises(CoordinatorError, match="not complete in time"):
            await asyncio.to_thread(coordinator.shard, 0, 0, 2, 0.0)
        coordinator.close()
    assert 1.9 < time.monotonic() - began < 90.0
