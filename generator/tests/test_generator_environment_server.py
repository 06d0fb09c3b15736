"""Episodes whose environment is a server that is killed at random moments."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from actor_stand_ins import TOKEN, write_tokenizer
from aiohttp import web
from free_port import free_port
from openenv_stand_in import OpenEnvServer, observed, serving
from test_generator_episodes import MAX_TOKENS, PROMPT_IDS, Echo, ModelServer, check_episode, sampler
from test_generator_streams import Bench

from scalerl_api.spec import PromptSpec
from scalerl_generator.rollouts.occupancy import Occupancy
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_processes.waiting import cancel
from scalerl_tasks import Prompt
from scalerl_tasks.environments.episodes import EnvironmentGrader
from scalerl_tasks.environments.server_grader import ServerGrader
from scalerl_tasks.environments.server_settings import EnvironmentServer
from scalerl_tasks.environments.timings import Timings

EPISODES = 80
TIMINGS = Timings(first_back_off=0.01, max_back_off=0.05)


class Game:
    """The environment of :class:`Echo` with a state: it knows the replies that this session had."""

    def __init__(self) -> None:
        self.replies: list[str] = []

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.replies = []
        return observed({"echoed_message": "ready"})

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.replies.append(action["message"])
        found = Echo.step(self.replies)
        text = found.messages[0].content if found.messages else ""
        return observed({"echoed_message": text}, found.score, not found.messages)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.server = ModelServer(TOKEN, 0.0)
    await bench.start()
    yield bench
    await bench.end()


async def test_outage_is_no_occupancy(bench: Bench, tmp_path: Path) -> None:
    """After it, no more episodes are leased than before: they would all sample at once."""
    write_tokenizer(tmp_path)
    codec = PromptCodec(tmp_path, PromptSpec(template="{prompt}="), context_tokens=4096)
    bench.server.seconds_per_token = 0.01
    port, server = free_port(), OpenEnvServer()
    server.environment = Game
    streams = bench.streams(PROMPT_IDS, 4, max_tokens=MAX_TOKENS)
    started = time.monotonic()
    async with ServerGrader(EnvironmentServer(f"http://127.0.0.1:{port}"), TIMINGS) as grader:
        made = sampler(bench, codec, EnvironmentGrader(grader))
        episodes = asyncio.create_task(made.sample(streams, Prompt("p", "345", "")))
        while not grader.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        async with serving(server, port):
            await episodes
    seconds = time.monotonic() - started
    assert [one.waited_seconds > 2.0 for one in streams.completions] == [True] * 4
    parts = [one.sampling_seconds for one in streams.completions]
    occupancy, of_all = Occupancy(smoothing=1.0), Occupancy(smoothing=1.0)
    occupancy.observe_episodes(streams.completions, seconds)
    of_all.observe(parts, seconds)
    assert occupancy.fraction > 0.5 > of_all.fraction


# A server that is stopped in this process leaves what it accepts at that moment to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_episodes_are_those_of_a_server_that_is_not_killed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, turns and rewards are those of the replies, whatever session had which of them, and no kill counts."""
    step = Echo.step
    monkeypatch.setattr(Echo, "step", staticmethod(lambda replies: step([one.strip() for one in replies])))
    write_tokenizer(tmp_path)
    codec = PromptCodec(tmp_path, PromptSpec(template="{prompt}="), context_tokens=4096)
    draw, kills = random.Random(5), 0
    killed = asyncio.Event()

    async def kill(socket: web.WebSocketResponse) -> None:
        if draw.random() < 1 / 25:
            killed.set()
            await asyncio.sleep(3600)  # the server of this session is gone

    port = free_port()
    url, server = f"http://127.0.0.1:{port}", OpenEnvServer()
    server.environment, server.on_step = Game, kill

    async def serve() -> None:
        nonlocal kills
        while True:
            killed.clear()
            async with serving(server, port):
                await killed.wait()
            kills += 1

    serving_task = asyncio.create_task(serve())
    turns: list[int] = []
    async with ServerGrader(EnvironmentServer(url, timeout_seconds=120.0, sessions=6), TIMINGS) as grader:
        environment, slots = EnvironmentGrader(grader), asyncio.Semaphore(6)

        async def episode(number: int) -> None:
            ids = [*PROMPT_IDS, 2 + number % 40]
            async with slots:
                streams = bench.streams(ids, 1, max_tokens=MAX_TOKENS)
                prompt = Prompt(f"p{number % 40}", "345", "")
                await sampler(bench, codec, environment).sample(streams, prompt)
            (completion,) = streams.completions
            check_episode(completion, codec, ids)
            turns.append(len(completion.turns) + 1)

        await asyncio.gather(*(episode(number) for number in range(EPISODES)))
        assert grader.counts.errors == 0
        assert grader.counts.graded == sum(turns)
    await cancel(serving_task)
    assert kills >= 5
    assert set(turns) == {1, 2, 3, 4}
