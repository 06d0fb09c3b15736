"""Concurrent groups: the effect of one's failure, or of slow grading, on the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from actor_stand_ins import TOKEN, until
from test_generator_actor_parts import empty_group

from scalerl_api.wire import Group, Lease, PromptRef, Split
from scalerl_generator.coordinator_client import CoordinatorClient
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration
from scalerl_generator.rollouts import leasing
from scalerl_generator.rollouts.concurrency import Concurrency
from scalerl_generator.rollouts.delivery import Delivery
from scalerl_generator.rollouts.episodes import Grading
from scalerl_generator.rollouts.generation import Generated, RolloutGenerator
from scalerl_generator.rollouts.leasing import Leasing
from scalerl_generator.rollouts.partial_reports import PartialReports
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_replies import GenerationFailed

Grow = Callable[[int], None]


class Maker:
    """Generates as each test says, and grades one group at a time, four completions of ``grading_seconds`` each."""

    def __init__(self) -> None:
        self.generators: dict[str, Callable[[Grow], Awaitable[None]]] = {}
        self.grading_seconds = 0.0
        self.grading: dict[str, Grading] = {}
        self._grader = asyncio.Lock()

    async def generate(self, lease: Lease, on_tokens: Grow, grading: Grading) -> Generated:
        self.grading[lease.lease_id] = grading
        await self.generators[lease.lease_id](on_tokens)
        unused = cast(Any, None)
        return Generated(lease, unused, unused, unused, [], 0.0)

    async def grade(self, generated: Generated, on_graded: Callable[[], None], *_: Any) -> Group:
        async with self._grader:
            for _ in range(4):
                await asyncio.sleep(self.grading_seconds)
                on_graded()
        return empty_group(generated.lease.lease_id)


class Hands:
    """A :class:`Leasing` whose leases the test gives out."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        server, busy = ServerState(), BusyClock()
        server.mark_up()
        metrics = ActorMetrics(server, busy)
        client = CoordinatorClient(session, "http://127.0.0.1:1", TOKEN)
        self.membership = Registration(client, server, busy, metrics, name="g", control_url="http://h:1")
        self.delivery = Delivery(client, self.membership, metrics)
        self.maker = Maker()
        maker = cast(RolloutGenerator, self.maker)
        monitor = cast(Any, None)
        partials = PartialReports(
            *(client, self.membership, monitor, server, metrics), vocabulary_size=9, max_staleness_steps=1
        )
        parts = client, self.membership, server, maker, self.delivery, metrics, partials
        concurrency = Concurrency(most=16, least=4, adaptive=False)
        self.leasing = Leasing(*parts, concurrency=concurrency, per_group=4, release_seconds=0.5)

    def take(
        self, name: str, generate: Callable[[Grow], Awaitable[None]], slot: int = 0, seconds: float = 600.0
    ) -> None:
        self.maker.generators[name] = generate
        lease = Lease(
            lease_id=name,
            prompt=PromptRef(0, Split.TRAIN, 0),
            slot=slot,
            prompt_id="p",
            completions=4,
            max_tokens=32,
            temperature=1.0,
            remaining_seconds=seconds,
            policy_version=0,
        )
        self.leasing._start_lease(lease, "m1", leasing.time.monotonic())

    async def served(self) -> None:
        await until(lambda: not self.leasing._held)

    @property
    def failure(self) -> BaseException | None:
        return self.leasing._failure


@pytest.fixture
async def hands() -> AsyncIterator[Hands]:
    async with aiohttp.ClientSession() as session:
        hands = Hands(session)
        yield hands
        for task in hands.leasing._releases:
            task.cancel()


@pytest.fixture
async def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only when nothing can run, at once: no lease ends because the machine is slow."""
    loop: Any = asyncio.get_running_loop()
    now, select = loop.time(), loop._selector.select

    def jump(timeout: float | None) -> Any:
        nonlocal now
        events = select(None if timeout is None else 0)
        if not events and timeout:
            now += timeout
        return events

    monkeypatch.setattr(loop._selector, "select", jump)
    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(leasing, "time", SimpleNamespace(monotonic=lambda: now))


async def refuse(_: Grow) -> None:
    raise GenerationFailed("refused")


async def test_failed_group_beside_progress_is_released(hands: Hands) -> None:
    turn = asyncio.Event()

    async def fail(_: Grow) -> None:
        await turn.wait()
        raise GenerationFailed("refused")

    async def grow(on_tokens: Grow) -> None:
        await turn.wait()
        on_tokens(1)

    hands.take("bad", fail, 0)
    hands.take("good", grow, 1)
    await asyncio.sleep(0.01)
    turn.set()
    await hands.served()
    assert hands.membership.held_leases == {"good"}
    assert len(hands.delivery) == 1


async def test_few_failing_slots_do_not_end_actor(hands: Hands) -> None:
    hands.take("slow", lambda _: asyncio.Event().wait(), 100)
    for attempt in range(5):
        for slot in range(4):
            hands.take(f"{slot}.{attempt}", refuse, slot)
    await until(lambda: len(hands.leasing._held) == 1)
    assert hands.failure is None


async def test_many_refused_slots_beside_progress_do_not_end_actor(hands: Hands) -> None:
    async def grow(on_tokens: Grow) -> None:
        while True:
            on_tokens(1)
            await asyncio.sleep(0)

    hands.take("slow", grow, 100)
    for slot in range(40):
        hands.take(f"{slot}", refuse, slot)
        await asyncio.sleep(0.001)
    assert len(hands.leasing._held) == 1
    assert hands.failure is None


@pytest.mark.parametrize("begun", [False, True], ids=["at-once", "after-tokens"])
async def test_leasing_raises_if_every_slot_fails(hands: Hands, begun: bool) -> None:
    async def fail(on_tokens: Grow) -> None:
        if begun:
            on_tokens(1)
        raise GenerationFailed("no log-probabilities")

    for slot in range(16):
        assert hands.failure is None
        hands.take(f"{slot}", fail, slot)
        await hands.served()
    assert isinstance(hands.failure, GenerationFailed)


@pytest.mark.usefixtures("jumping_clock")
async def test_lease_continues_while_grading_progresses(hands: Hands) -> None:
    async def generate(_: Grow) -> None:
        await asyncio.sleep(0)

    hands.maker.grading_seconds = 0.1
    for n in range(4):
        hands.take(f"{n}", generate, n, seconds=0.7)
    await hands.served()
    assert hands.membership.held_leases == {"0", "1", "2", "3"}
    assert len(hands.delivery) == 4
    assert hands.membership._progress["3"] >= 15, "heartbeats tell the coordinator"


@pytest.mark.usefixtures("jumping_clock")
async def test_lease_continues_while_steps_of_its_pool_progress(hands: Hands) -> None:
    """Episodes wait for a step of others, made one at a time, and for the reply after it, behind others' tokens."""
    pool, first = asyncio.Lock(), asyncio.Event()

    def episode(name: str) -> Callable[[Grow], Awaitable[None]]:
        async def play(on_tokens: Grow) -> None:
            on_tokens(1)
            with hands.maker.grading[name]() as on_graded:
                async with pool:
                    for _ in range(4):
                        await asyncio.sleep(0.1)
                        on_graded()
            if name == "0":
                await first.wait()

        return play

    async def grow(on_tokens: Grow) -> None:
        for _ in range(30):
            await asyncio.sleep(0.1)
            on_tokens(1)
        first.set()

    hands.maker.grading_seconds = 0.01
    for n in range(4):
        hands.take(f"{n}", episode(f"{n}"), n, seconds=0.7)
    hands.take("plain", grow, 4, seconds=0.7)
    await hands.served()
    assert hands.membership.held_leases == {"0", "1", "2", "3", "plain"}
    assert hands.membership._progress["3"] >= 15, "heartbeats tell the coordinator"


@pytest.mark.usefixtures("jumping_clock")
async def test_step_that_hangs_ends_its_lease(hands: Hands) -> None:
    async def play(on_tokens: Grow) -> None:
        with hands.maker.grading["stuck"]():
            await asyncio.Event().wait()

    async def grow(on_tokens: Grow) -> None:
        on_tokens(1)
        hands.take("stuck", play, 1, seconds=0.3)
        for _ in range(10):
            await asyncio.sleep(0.06)
            on_tokens(1)
        assert "stuck" not in hands.membership.held_leases, "tokens of others do not renew it"

    hands.take("plain", grow, 0)
    await hands.served()
    assert hands.membership.held_leases == {"plain"}


async def test_group_that_ends_with_the_drain_is_delivered_and_not_released(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task ends after the wait has timed out and before the drain continues: a blocked event loop finds both due."""
    graded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def grade(generated: Generated, *_: Any) -> Group:
        await graded
        return empty_group(generated.lease.lease_id)

    monkeypatch.setattr(hands.maker, "grade", grade)
    hands.take("late", lambda _: asyncio.sleep(0))
    await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    loop.call_later(0.4, time.sleep, 0.5)
    loop.call_later(0.45, graded.set_result, None)
    await hands.leasing.close(0.0, "drain")
    await until(lambda: graded.done())
    assert len(hands.delivery) == 1
    assert hands.membership.held_leases == {"late"}
    assert not hands.leasing._releases


async def test_groups_end_with_an_actor_that_ends_at_once(hands: Hands) -> None:
    """Later they would find closed what they use, and release their leases as failed."""
    ended = asyncio.Event()

    async def generate(_: Grow) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    hands.take("slow", generate)
    running = asyncio.create_task(hands.leasing.run())
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert ended.is_set()
    assert not hands.leasing._releases
