"""Three servers behind one name: where sessions are placed, and what becomes of them when one is full, fails, dies or comes back."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from free_port import free_port
from openenv_stand_in import Echo, OpenEnvServer, observed, serving

from scalerl_tasks import Graded, Prompt, Verdict
from scalerl_tasks.environments.protocol import Message, write_replies
from scalerl_tasks.environments.server_grader import ServerGrader
from scalerl_tasks.environments.server_settings import EnvironmentServer
from scalerl_tasks.environments.timings import Timings

TIMINGS = Timings(
    first_back_off=0.02,
    max_back_off=0.05,
    first_avoided=0.05,
    max_avoided=0.2,
    resolved=0.05,
    ended=600.0,
    idle=600.0,
)
NAME = "environment.test"
LOOKED_UP = socket.getaddrinfo


class Replicas:
    """Servers at addresses of their own and one port, and what their name resolves to."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://{NAME}:{self.port}"
        self.servers = [OpenEnvServer() for _ in range(3)]
        self.names: list[str] = [self.host(at) for at in range(3)]
        self.hosts: set[str] = set()
        self._running = [AsyncExitStack() for _ in range(3)]

    @staticmethod
    def host(at: int) -> str:
        return f"127.0.0.{at + 2}"

    async def start(self, *which: int) -> None:
        for at in which:
            await self._running[at].enter_async_context(serving(self.servers[at], self.port, self.host(at)))

    async def end(self, *which: int) -> None:
        for at in which:
            await self._running[at].aclose()

    @property
    def open(self) -> list[int]:
        """Number of sessions of each."""
        return [len(server.sessions) for server in self.servers]

    def looked_up(self, host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if host != NAME:
            return LOOKED_UP(host, port, *given, **named)
        if not self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for name in self.names for found in LOOKED_UP(name, port, *given, **named)]


@pytest.fixture
async def replicas(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replicas]:
    found = Replicas()
    monkeypatch.setattr(socket, "getaddrinfo", found.looked_up)
    await found.start(0, 1, 2)
    yield found
    await found.end(0, 1, 2)


def options(url: str, sessions: int = 64, timeout_seconds: float = 120.0) -> EnvironmentServer:
    return EnvironmentServer(url, timeout_seconds=timeout_seconds, sessions=sessions)


PROMPT = Prompt("row-7", "Say it.", "4")


async def steps(grader: ServerGrader, *episodes: list[str], prompt: Prompt = PROMPT) -> list[Graded]:
    return await grader.score_group(prompt, [write_replies(episode) for episode in episodes])


def episodes(count: int, label: str = "") -> list[list[str]]:
    return [[f"{label}{number:04}"] for number in range(count)]


def grading(server: EnvironmentServer, **seconds: float) -> ServerGrader:
    return ServerGrader(server, replace(TIMINGS, **seconds))


async def answered(grader: ServerGrader, count: int, label: str = "") -> None:
    """Let so many episodes step at once, and check their answers."""
    asked = episodes(count, label)
    found = await steps(grader, *asked)
    assert [one.messages for one in found] == [(Message(one),) for (one,) in asked]
    assert (grader.problem, grader.counts.errors) == ("", 0)


async def test_sessions_are_spread_over_replicas(replicas: Replicas) -> None:
    async with grading(options(replicas.url, sessions=12)) as grader:
        for server in replicas.servers:
            server.on_step = lambda socket: asyncio.sleep(0.05)
        await answered(grader, 12)
        assert replicas.open == [4, 4, 4]
        await answered(grader, 40, "more")
        assert sum(replicas.open) == 12


async def test_full_replica_takes_no_session_from_others(replicas: Replicas) -> None:
    first, second, third = replicas.servers
    first.capacity, second.capacity, third.capacity = 0, 6, 7
    for server in replicas.servers:
        server.on_step = lambda socket: asyncio.sleep(0.02)
    async with grading(options(replicas.url, sessions=12)) as grader:
        for round_ in range(5):
            await answered(grader, 30, f"{round_}")
            assert sum(replicas.open) == 12, "a refusal at one address has no effect on the others"
        assert [first.opened, first.most_sessions] == [0, 0]
        assert second.most_sessions + third.most_sessions <= 13


async def test_replica_that_fills_up_gets_less_alone(replicas: Replicas) -> None:
    """Others take its sessions, except one: the generator goes on with what the two others have."""
    for server in replicas.servers:
        server.on_step = lambda socket: asyncio.sleep(0.02)
    async with grading(options(replicas.url, sessions=12)) as grader:
        await answered(grader, 12)
        replicas.servers[0].capacity = 1
        await replicas.servers[0].close_sessions()
        for round_ in range(4):
            await answered(grader, 30, f"{round_}")
        assert replicas.open[0] <= 1
        assert sum(replicas.open) >= 11


async def test_replicas_that_others_fill_are_all_asked_again(replicas: Replicas) -> None:
    for server in replicas.servers:
        server.capacity = 0
    async with grading(options(replicas.url, sessions=12)) as grader:
        waiting = asyncio.create_task(steps(grader, *episodes(12)))
        while not grader.problem:
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.01)
        assert "has no free session" in grader.problem
        replicas.servers[2].capacity = 12
        async with asyncio.timeout(120):
            assert len(await waiting) == 12
        await answered(grader, 12, "more")
        assert replicas.servers[2].most_sessions == 12, "all that it has, not one after the other"


# A server that is stopped in this process leaves what it accepts at that moment to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_replica_that_dies_is_avoided_until_it_comes_back(replicas: Replicas) -> None:
    for server in replicas.servers:
        server.on_step = lambda socket: asyncio.sleep(0.02)
    async with grading(options(replicas.url, sessions=9), first_avoided=0.2) as grader:
        await answered(grader, 9)
        kept = [set(server.sessions) for server in replicas.servers]
        await replicas.end(1)
        for round_ in range(4):
            await answered(grader, 12, f"dead {round_}")
        assert [kept[at] <= replicas.servers[at].sessions for at in (0, 2)] == [True, True]
        assert sum(replicas.open) == 9
        await replicas.end(2)
        await answered(grader, 12, "two dead")
        assert replicas.open[0] == 9

        await replicas.start(1, 2)
        replicas.servers[0].capacity = 3
        await replicas.servers[0].close_sessions()
        await asyncio.sleep(0.25)
        for round_ in range(2):  # one session is tried, and all follow
            await answered(grader, 12, f"back {round_}")
        assert sum(replicas.open) == 9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_all_replicas_are_waited_for(replicas: Replicas) -> None:
    async with grading(options(replicas.url)) as grader:
        await answered(grader, 6)
        await replicas.end(0, 1, 2)
        waiting = asyncio.create_task(steps(grader, *episodes(6, "x")))
        while not grader.problem:
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.01)
        assert "does not answer" in grader.problem
        await replicas.start(2)
        async with asyncio.timeout(120):
            assert len(await waiting) == 6
        assert replicas.open[:2] == [0, 0]
        await answered(grader, 6, "y")


@pytest.mark.parametrize("fault", ["hangs", "version", "500"])
async def test_replica_that_fails_is_avoided(replicas: Replicas, fault: str) -> None:
    """No episode waits for the others, and none loses its verdict; what is of another version answers none."""
    seconds = 1.0 if fault == "hangs" else 120.0
    async with grading(options(replicas.url, timeout_seconds=seconds, sessions=9)) as grader:
        await answered(grader, 3)
        bad = replicas.servers[0]
        if fault == "hangs":
            bad.on_step = lambda socket: asyncio.sleep(3600)
        elif fault == "500":
            bad.refuses = web.Response(status=500)
        else:
            bad.schema["action"]["properties"]["more"] = {"type": "string"}
        await bad.close_sessions()
        before = bad.steps
        for round_ in range(3):
            await answered(grader, 20, f"{round_}")
        assert bad.steps == before


async def test_addresses_follow_the_name(replicas: Replicas) -> None:
    names, replicas.names = replicas.names, []
    for server in replicas.servers:
        server.on_step = lambda socket: asyncio.sleep(0.02)
    async with grading(options(replicas.url, sessions=12)) as grader:
        waiting = asyncio.create_task(steps(grader, ["a"]))
        while not grader.problem:
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.01)
        assert f"the name {NAME} has no address" in grader.problem
        replicas.names = names[:1]
        assert [one.messages for one in await waiting] == [(Message("a"),)]
        replicas.servers[0].capacity = 4
        await answered(grader, 8)
        assert replicas.open == [4, 0, 0]
        replicas.names = names  # more servers were started
        await asyncio.sleep(0.06)
        for round_ in range(3):
            await answered(grader, 20, f"{round_}")
        assert sum(replicas.open) >= 11
        replicas.names = []  # the name server fails: what is known is used
        await asyncio.sleep(0.06)
        await answered(grader, 20, "z")


async def test_name_is_sent_and_numbers_are_not_looked_up(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[str] = []
    app = OpenEnvServer.app

    async def on_response(request: web.Request, response: web.StreamResponse) -> None:
        hosts.append(request.headers["host"])

    def watched(self: OpenEnvServer) -> web.Application:
        found = app(self)
        found.on_response_prepare.append(on_response)
        return found

    monkeypatch.setattr(OpenEnvServer, "app", watched)
    await replicas.end(0, 1, 2)
    await replicas.start(0, 1, 2)
    async with grading(options(replicas.url)) as grader:
        await answered(grader, 3)
    assert set(hosts) == {f"{NAME}:{replicas.port}"}
    hosts.clear()
    replicas.names = []
    async with grading(options(f"http://{replicas.host(1)}:{replicas.port}")) as grader:
        await answered(grader, 3)
    assert set(hosts) == {f"{replicas.host(1)}:{replicas.port}"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_no_step_counts_twice_when_replicas_die(replicas: Replicas) -> None:
    """Rewards count the steps of a session; replicas are ended, come back, and fill up at random."""

    class Counting(Echo):
        def reset(self, arguments: dict[str, Any]) -> Any:
            self.said: list[str] = []
            return super().reset(arguments)

        def step(self, action: dict[str, Any]) -> Any:
            self.said.append(action["message"])
            text = {"echoed_message": "|".join(self.said)}
            return observed(text, len(self.said) / 6, len(self.said) == 6)

    draw, over = random.Random(11), False
    for server in replicas.servers:
        server.environment = Counting
        server.on_step = lambda socket: asyncio.sleep(0.003)

    async def faults(grader: ServerGrader) -> int:
        count = 0
        while not over:
            at = draw.randrange(3)
            replicas.servers[at].capacity = draw.choice([0, 1, 3, 64])
            await replicas.end(at)
            await asyncio.sleep(draw.random() * 0.1)
            await replicas.start(at)
            steps = grader.counts.graded + draw.randrange(20)
            # Not by time: a slow machine would make no step between two faults.
            while grader.counts.graded < steps and not over and any(s.capacity for s in replicas.servers):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            count += 1
        return count

    async with grading(options(replicas.url, sessions=10)) as grader:

        async def episode(number: int) -> None:
            replies: list[str] = []
            for turn in range(1, 7):
                replies.append(f"{number}.{turn}")
                (found,) = await steps(grader, replies, prompt=Prompt(f"p{number % 5}", "", ""))
                expected = () if turn == 6 else (Message("|".join(replies)),)
                assert found == Graded(Verdict(turn / 6), None, expected)
                await asyncio.sleep(draw.random() * 0.05)

        breaking = asyncio.create_task(faults(grader))
        async with asyncio.timeout(240):
            await asyncio.gather(*(episode(number) for number in range(60)))
        over = True
        assert await breaking > 5
        assert (grader.counts.graded, grader.counts.errors) == (360, 0)
