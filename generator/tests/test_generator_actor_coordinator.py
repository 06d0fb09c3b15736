"""The actor and the real coordinator: a small run, with the coordinator killed during it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from actor_stand_ins import TOKEN, Generator, TrainerSide, role_environment, write_run
from free_port import free_port

from scalerl_api import endpoints
from scalerl_api.curve import curve_points
from scalerl_api.wire import (
    WIRE_HEADER,
    WIRE_VERSION,
    Ack,
    CheckpointBegin,
    CheckpointCommit,
    CheckpointSnapshot,
    Member,
    Next,
    NextAction,
    NextRequest,
    PublishBegin,
    PublishCommit,
    PublishPermit,
    Shard,
    ShardRequest,
    Status,
    StepReport,
    StepReported,
    TrainerHello,
    TrainerWelcome,
)

STEPS, PROMPTS_PER_STEP, COMPLETIONS = 3, 4, 4


class Coordinator:
    """The coordinator's process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = [sys.executable, "-m", "scalerl_coordinator.main", "--listen", f"127.0.0.1:{self.port}"]
        env = os.environ | role_environment(self.directory, "coordinator-0", self.url)
        with (self.directory / "coordinator.log").open("ab") as log:
            self.process = subprocess.Popen(argv, env=env, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(120)


class Trainer:
    """Rank 0 without a model: says what a trainer says, in its order, until FINISH."""

    def __init__(self, session: aiohttp.ClientSession, coordinator_url: str) -> None:
        self._session, self._url = session, coordinator_url
        self._headers = {"Authorization": f"Bearer {TOKEN}", WIRE_HEADER: str(WIRE_VERSION)}
        self.incarnation, self.version = "t", 0
        self.shards: list[Shard] = []

    async def call(self, path: str, message: Any, kind: type[Any], method: str = "POST") -> Any:
        """Tries on while the coordinator is away."""
        body = None if message is None else msgspec.msgpack.encode(message)
        for _ in range(1200):
            try:
                async with self._session.request(
                    method, self._url + path, data=body, headers=self._headers
                ) as response:
                    content = await response.read()
                    assert response.status == 200, content
                    return msgspec.msgpack.decode(content, type=kind)
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
        raise AssertionError("the coordinator did not come back")

    async def status(self) -> Status:
        status: Status = await self.call(endpoints.STATUS, None, Status, "GET")
        return status

    async def some_acknowledged(self) -> None:
        for _ in range(2400):
            if (await self.status()).counts.acknowledged:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("no group was acknowledged")

    async def run(self) -> None:
        hello = TrainerHello(incarnation=self.incarnation, version=self.version, world_size=1, snapshot=None)
        await self.call(endpoints.TRAINER_HELLO, hello, TrainerWelcome)
        while True:
            request = NextRequest(incarnation=self.incarnation, version=self.version, wait_seconds=5.0)
            answer: Next = await self.call(endpoints.TRAINER_NEXT, request, Next)
            match answer.action:
                case NextAction.PUBLISH:
                    await self.publish()
                case NextAction.TRAIN:
                    await self.train(answer.step)
                    await self.publish()
                case NextAction.FINISH:
                    await self.checkpoint()
                    return

    async def train(self, step: int) -> None:
        request = ShardRequest(incarnation=self.incarnation, step=step, rank=0, world_size=1)
        self.shards.append(await self.call(endpoints.TRAINER_SHARD, request, Shard))
        await self.call(endpoints.TRAINER_STEP, self.report(step), StepReported)
        self.version = step + 1

    def report(self, step: int) -> StepReport:
        return StepReport(
            incarnation=self.incarnation, step=step, stats={"loss": 0.0}, busy_seconds=0.1, trained_tokens=1
        )

    async def publish(self) -> None:
        begin = PublishBegin(incarnation=self.incarnation, version=self.version, wait_seconds=5.0)
        permit: PublishPermit = await self.call(endpoints.PUBLISH_BEGIN, begin, PublishPermit)
        while not permit.ready:
            permit = await self.call(endpoints.PUBLISH_BEGIN, begin, PublishPermit)
        took = [await self.send(member) for member in permit.members]
        commit = PublishCommit(
            incarnation=self.incarnation,
            version=self.version,
            updated=[m.member_id for m, taken in zip(permit.members, took, strict=True) if taken],
            failed=[m.member_id for m, taken in zip(permit.members, took, strict=True) if not taken],
            stats={},
        )
        await self.call(endpoints.PUBLISH_COMMIT, commit, Ack)

    async def send(self, member: Member) -> bool:
        """The present version; whether the member took it."""
        await TrainerSide(self._session, member.control_url).publish(self.version)
        return True

    async def checkpoint(self) -> None:
        step = self.version
        await self.call(
            endpoints.CHECKPOINT_BEGIN,
            CheckpointBegin(incarnation=self.incarnation, step=step),
            CheckpointSnapshot,
        )
        commit = CheckpointCommit(incarnation=self.incarnation, step=step, kept_steps=[step])
        await self.call(endpoints.CHECKPOINT_COMMIT, commit, Ack)


EXACT_WITH_PARTS = """
from scalerl_tasks import Verdict, verifiers

class ExactWithParts(verifiers.ExactVerifier):
    part_names = "double", "constant"

    def score(self, prompt, completion):
        score = super().score(prompt, completion)
        return Verdict(score, {"double": 2 * score, "constant": -1})

verifiers._OPENERS["exact"] = ExactWithParts
"""
"""Read at the start of every Python process of the run."""


@pytest.mark.parametrize("kill", [False, True], ids=["undisturbed", "coordinator-killed"])
async def test_actor_and_coordinator_run_three_steps(
    tmp_path: Path, kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EXACT_WITH_PARTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    write_run(
        tmp_path,
        [f"say {i}" for i in range(30)],
        recipe__promptsPerStep=PROMPTS_PER_STEP,
        recipe__offPolicy__pipeline__maxStalenessSteps=1,
        evaluation={"everySteps": 2, "samplesPerPrompt": 2},
        budget={"maxSteps": STEPS},
    )
    coordinator = Coordinator(tmp_path)
    coordinator.start()
    generator = Generator(tmp_path, coordinator.url, seconds_per_token=0.05)
    await generator.start_server()
    await generator.start_actor()
    try:
        async with aiohttp.ClientSession() as session:
            trainer = Trainer(session, coordinator.url)
            running = asyncio.create_task(trainer.run())
            if kill:
                await trainer.some_acknowledged()
                coordinator.kill()
                coordinator.start()
            async with asyncio.timeout(120):
                await running
            status = await trainer.status()
            assert await generator.exit_code() == 0, "the run is over"
    finally:
        await generator.end()
        coordinator.kill()

    counts = status.counts
    assert counts.acknowledged == counts.trained + counts.filtered + counts.queued
    assert counts.trained + counts.filtered == STEPS * PROMPTS_PER_STEP * COMPLETIONS
    assert (counts.stale, counts.invalid) == (0, 0)
    assert [g.slot for shard in trainer.shards for g in shard.groups] == list(range(STEPS * PROMPTS_PER_STEP))
    assert all(g.scores == [1.0, 0.0, 1.0, 0.0] for shard in trainer.shards for g in shard.groups)
    assert [p.version for p in status.points] == [0, 2, 3]
    assert all((p.reward, p.samples, p.mixed_versions) == (0.5, 8, False) for p in status.points)
    assert [p.parts for p in status.points] == [{"double": 1.0, "constant": -1.0}] * 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["reward_part_double"], row["reward_part_constant"]) for row in rows] == [(1.0, -1.0)] * STEPS
    curve = curve_points((tmp_path / "curve.csv").read_text())
    assert [p.parts for p in curve] == [p.parts for p in status.points]
    assert status.max_staleness_steps <= 1
    if not kill:
        assert (counts.late, counts.expired_leases) == (0, 0)
