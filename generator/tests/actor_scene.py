"""An actor as a process, with a coordinator, a trainer and a server that can all fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from actor_stand_ins import CoordinatorStandIn, Generator, GeneratorProcesses, TrainerSide, until, write_run

from scalerl_api import endpoints
from scalerl_api.load import load_run
from scalerl_tasks.sources import open_task

PROMPTS = [f"say {i}" for i in range(12)]


@dataclass
class Scene:
    coordinator: CoordinatorStandIn
    generator: Generator
    trainer: TrainerSide
    session: aiohttp.ClientSession
    train: list[str]
    """Ids of the training prompts, by index."""
    held_out: list[str]

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.generator.control_url + path) as response:
            return response.status, await response.text()

    async def server(self, **failure: Any) -> dict[str, Any]:
        """Set how the fake server fails next, or read its state."""
        url = self.generator.server_url + "/stand-in"
        async with self.session.request("POST" if failure else "GET", url, json=failure or None) as response:
            return dict(await response.json())

    async def shows(self, *metrics: str) -> None:
        """Wait until the actor's metrics have these lines."""
        async with asyncio.timeout(120):
            text = ""
            while not all(line in text for line in metrics):
                await asyncio.sleep(0.01)
                _, text = await self.get(endpoints.METRICS)

    async def held(self, tokens: int) -> None:
        """Wait until the fake server has decoded so many tokens."""
        async with asyncio.timeout(120):
            while (await self.server())["tokens"] < tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def paused(self) -> None:
        """Wait until the fake server is paused, for an update."""
        async with asyncio.timeout(120):
            while (await self.server())["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def member(self, known: int = 0) -> None:
        """Wait until the actor has registered more than ``known`` times and is ready."""
        await until(lambda: self.coordinator._registered > known and self.coordinator.members)


@asynccontextmanager
async def playing(
    directory: Path,
    seconds_per_token: float = 0.0,
    prompts: list[str] = PROMPTS,
    processes: bool = False,
    **sections: Any,
) -> AsyncIterator[Scene]:
    """``sections`` are those of the run file; with ``processes`` the actor is a process of its own."""
    coordinator = CoordinatorStandIn()
    write_run(directory, prompts, **sections)
    task = open_task(load_run(directory / "run.yaml").spec.task)
    await coordinator.start()
    kind = GeneratorProcesses if processes else Generator
    generator = kind(directory, coordinator.url, seconds_per_token)
    await generator.start_server()
    await generator.start_actor()
    train = [task.train[i].id for i in range(len(task.train))]
    held_out = [task.held_out[i].id for i in range(len(task.held_out))]
    try:
        async with aiohttp.ClientSession() as session:
            trainer = TrainerSide(session, generator.control_url)
            yield Scene(coordinator, generator, trainer, session, train, held_out)
    finally:
        await generator.end()
        await coordinator.kill()


def decoded(data: bytes, dtype: str = "<i4") -> list[Any]:
    return np.frombuffer(data, dtype=dtype).tolist()
