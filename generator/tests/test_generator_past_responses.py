"""What the server is given of past responses, and what happens where they do not arrive."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from scalerl_api.wire import Lease, PastResponse, PromptRef, Split, prompt_digest
from scalerl_generator.coordinator_client import CoordinatorUnreachable
from scalerl_generator.drafts import past_responses
from scalerl_generator.drafts.draft_protocol import DraftReport, PastResponses
from scalerl_generator.drafts.past_responses import PastResponseFeed
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.prompt_codec import EncodedPrompt
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_replies import Sampled, ServerDown, Span


class FakeCoordinator:
    """Answers with ``past``, or fails, or never answers (an exception, or None)."""

    def __init__(self) -> None:
        self.past: list[PastResponse] | Exception | None = []
        self.requests: list[tuple[PromptRef, bytes]] = []

    async def responses(self, prompt: PromptRef, digest: bytes) -> list[PastResponse]:
        self.requests.append((prompt, digest))
        if self.past is None:
            await asyncio.Event().wait()
        if isinstance(self.past, Exception):
            raise self.past
        return self.past or []


class FakeServer:
    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.down = False
        self.report = DraftReport()

    async def remember(self, past: PastResponses) -> None:
        if self.down:
            raise ServerDown("down")
        assert past.prompt_key == PROMPT.key
        self.given += past.responses

    async def take_draft_tally(self, key: str) -> tuple[list[int], list[int]]:
        if self.down:
            raise ServerDown("down")
        return [4, 3], [3, 2]

    async def draft_report(self) -> DraftReport:
        return self.report


IDS = [5, 6, 7]
PROMPT = EncodedPrompt(IDS, np.array(IDS, "<i4").tobytes())
LEASE = Lease(
    lease_id="l",
    prompt=PromptRef(0, Split.TRAIN, 3),
    slot=0,
    prompt_id="p",
    completions=2,
    max_tokens=10,
    temperature=1.0,
    remaining_seconds=60.0,
    policy_version=1,
)


class World:
    def __init__(self, memory_tokens: int = 100_000, **timings: float) -> None:
        self.coordinator, self.server, self.state = FakeCoordinator(), FakeServer(), ServerState()
        self.metrics = ActorMetrics(self.state, BusyClock())
        self.state.mark_up()
        self.feed = PastResponseFeed(
            self.coordinator,  # type: ignore[arg-type]
            self.server,  # type: ignore[arg-type]
            self.state,
            self.metrics,
            memory_tokens,
            **timings,
        )

    def count(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"scalerl_actor_{name}", labels)


def response(*tokens: int) -> PastResponse:
    return PastResponse(1, np.array(tokens, "<i4").tobytes())


def sampled(*tokens: int) -> Sampled:
    return Sampled(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        masked=np.zeros(len(tokens), np.bool_),
        finish_reason="stop",
        weight_versions=[Span(1, 0, len(tokens))],
    )


@pytest.fixture
def world() -> World:
    return World()


async def test_feed_gives_a_group_once(world: World) -> None:
    world.coordinator.past = [response(1, 2), response(3)]
    for _ in range(2):
        await world.feed.prepare(LEASE, PROMPT)
    assert world.server.given == [one.token_ids for one in world.coordinator.past]
    assert world.coordinator.requests[0] == (LEASE.prompt, prompt_digest(PROMPT.wire))
    assert world.count("past_responses_total") == 2


async def test_feed_leaves_out_what_the_server_sampled(world: World) -> None:
    assert await world.feed.sampled(PROMPT, [sampled(1, 2)]) == ([4, 3], [3, 2])
    world.coordinator.past = [response(1, 2), response(3)]
    await world.feed.prepare(LEASE, PROMPT)
    assert world.server.given == [response(3).token_ids]


async def test_feed_gives_all_again_after_a_restart_of_the_server(world: World) -> None:
    world.coordinator.past = [response(1, 2)]
    await world.feed.prepare(LEASE, PROMPT)
    world.state.mark_down()
    world.state.mark_up()
    await world.feed.prepare(LEASE, PROMPT)
    assert len(world.server.given) == 2


async def test_feed_gives_again_what_the_server_has_overwritten() -> None:
    world = World(memory_tokens=500)
    world.coordinator.past = [response(1, 2)]
    await world.feed.prepare(LEASE, PROMPT)
    await world.feed.sampled(PROMPT, [sampled(*range(at, at + 100)) for at in range(5)])
    await world.feed.prepare(LEASE, PROMPT)
    assert world.server.given == [response(1, 2).token_ids] * 2


async def test_feed_divides_long_responses() -> None:
    world = World(memory_tokens=10**7)
    long = [response(*range(at, at + 30_000)) for at in range(5)]
    calls: list[int] = []
    remember = world.server.remember

    async def count(past: PastResponses) -> None:
        calls.append(sum(map(len, past.responses)))
        await remember(past)

    world.server.remember = count  # type: ignore[method-assign]
    world.coordinator.past = long
    await world.feed.prepare(LEASE, PROMPT)
    assert world.server.given == [one.token_ids for one in long]
    assert len(calls) > 1
    assert max(calls) <= past_responses._BYTES_A_CALL + 120_000


async def test_feed_does_not_ask_for_evaluations(world: World) -> None:
    lease = Lease(
        **{name: getattr(LEASE, name) for name in LEASE.__struct_fields__}
        | {"prompt": PromptRef(0, Split.HELD_OUT, 3)}
    )
    await world.feed.prepare(lease, PROMPT)
    assert not world.coordinator.requests


@pytest.mark.parametrize("past", [CoordinatorUnreachable("away"), None])
async def test_feed_does_not_wait_for_a_coordinator(past: Exception | None) -> None:
    world = World(wait_seconds=0.05)
    world.coordinator.past = past
    for _ in range(3):
        await world.feed.prepare(LEASE, PROMPT)
    assert world.count("past_responses_failures_total") == 3


async def test_feed_survives_a_server_that_is_down(world: World) -> None:
    world.coordinator.past = [response(1, 2)]
    world.server.down = True
    await world.feed.prepare(LEASE, PROMPT)
    assert world.count("past_responses_failures_total") == 1
    assert await world.feed.sampled(PROMPT, [sampled(4)]) is None
    world.server.down = False
    await world.feed.prepare(LEASE, PROMPT)
    assert world.server.given == [response(1, 2).token_ids]


async def test_feed_reports_drafts_of_a_server_that_restarted() -> None:
    """A new server has drafted less, or more in fewer steps: counters only grow."""
    world = World(report_seconds=0.01)
    reports: Sequence[DraftReport] = [
        DraftReport(
            steps=50,
            drafted_tokens=100,
            accepted_tokens=60,
            draft_seconds=1.0,
            threshold=0.3,
            evicted_tokens=640,
            evicted_running_tokens=64,
            gain=0.9,
            paused_steps=7,
        ),
        DraftReport(steps=60, drafted_tokens=20, accepted_tokens=10, draft_seconds=0.1, threshold=0.4),
    ]
    task = asyncio.create_task(world.feed.report())
    for report, expected in zip(reports, (100, 120), strict=True):
        world.server.report = report
        async with asyncio.timeout(120):
            while world.count("drafted_tokens_total") != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        world.state.mark_down()
        world.state.mark_up()
        world.server.report = DraftReport()
    assert not task.done()
    task.cancel()
    assert world.count("accepted_draft_tokens_total") == 70
    assert world.count("draft_paused_steps_total") == 7
    assert world.count("draft_evicted_tokens_total", running="true") == 64
    assert world.count("draft_evicted_tokens_total", running="false") == 640
