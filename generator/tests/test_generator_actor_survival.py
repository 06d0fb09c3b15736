"""Kills at random moments, with bad items mixed in: the run ends at its budget and the counts add up exactly.

The coordinator's process, two actors and their graders are real; the servers and the trainer speak the real wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from pathlib import Path

import aiohttp
import pytest
import stand_in_vllm
from actor_stand_ins import CHARACTERS, Generator, write_run
from test_generator_actor_coordinator import Coordinator, Trainer

from scalerl_api.load import load_run
from scalerl_api.wire import Member, StepReport
from scalerl_coordinator.sampler_interface import SeededEpochs
from scalerl_tasks.sources import open_task

VICTIMS = ["coordinator", "actor", *["trainer"] * 2, *["server"] * 3, *["grader"] * 3]
PROMPTS_PER_STEP, COMPLETIONS, HELD_OUT = 4, 4, 4
GOOD = [f"say {i}" for i in range(40)]
CLAMPED = [f"so {i}!" for i in range(3)]
REFUSED = [f"why {i}?" for i in range(2)]
TOO_LONG = [f"{i}" + "x" * 40 for i in range(3)]


def test_bad_prompts_match_stand_in_tokens() -> None:
    assert CHARACTERS.index("?") + 2 == stand_in_vllm.REFUSED
    assert CHARACTERS.index("!") + 2 == stand_in_vllm.CLAMPED
    assert CHARACTERS.index("|") + 2 == stand_in_vllm.ENDLESS


class MortalTrainer(Trainer):
    """Restarts from its last checkpoint; its last step waits for the planned number of kills."""

    def __init__(self, session: aiohttp.ClientSession, url: str, steps: int, over: asyncio.Event) -> None:
        super().__init__(session, url)
        self.steps, self.over = steps, over
        self.saved = 0
        self.begun = 0

    async def live(self) -> None:
        self.begun += 1
        self.incarnation, self.version = f"t{self.begun}", self.saved
        self.shards = [shard for shard in self.shards if shard.step < self.saved]
        await self.run()

    async def train(self, step: int) -> None:
        if step == self.steps - 1:
            await self.over.wait()
        await super().train(step)
        if self.version % 4 == 0:
            await self.checkpoint()

    def report(self, step: int) -> StepReport:
        """Every fifth step has a loss that is not finite."""
        if step % 5 != 3:
            return super().report(step)
        return StepReport(
            incarnation=self.incarnation,
            step=step,
            stats={},
            busy_seconds=0.1,
            trained_tokens=0,
            skipped="the loss is nan",
        )

    async def send(self, member: Member) -> bool:
        try:
            return await super().send(member)
        except (aiohttp.ClientError, AssertionError):
            return False  # it was killed meanwhile

    async def checkpoint(self) -> None:
        await super().checkpoint()
        self.saved = self.version


async def came_further(trainer: Trainer, done: int) -> int:
    """Wait for another slot to be done, a few seconds at most; how many rollouts are. So kills meet work."""
    for _ in range(60):
        counts = (await trainer.status()).counts
        if counts.acknowledged + counts.given_up > done:
            break
        await asyncio.sleep(0.05)
    return counts.acknowledged + counts.given_up


def hang_the_graders() -> None:
    """Kills it at its next completion."""
    graders: list[int] = []
    for server in _children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"scalerl_tasks.grading.fork_server" in Path(f"/proc/{server}/cmdline").read_bytes():
                graders += _children(server)
    for pid in graders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rounds", "steps"), [(1, 12), pytest.param(5, 40, marks=pytest.mark.full)], ids=["ten", "fifty"]
)
async def test_random_kills_with_bad_items(tmp_path: Path, rounds: int, steps: int) -> None:
    dice = random.Random(50)
    victims = VICTIMS * rounds
    dice.shuffle(victims)
    write_run(
        tmp_path,
        [*GOOD, *CLAMPED, *REFUSED, *TOO_LONG],
        task__verifier={"name": "exact", "timeoutSeconds": 1},
        recipe__offPolicy__pipeline__maxStalenessSteps=2,
        generator__maxConcurrentSequences=COMPLETIONS,
        evaluation={"everySteps": 8, "samplesPerPrompt": 2, "holdSeconds": 5},
        budget={"maxSteps": steps},
    )
    spec = load_run(tmp_path / "run.yaml").spec
    task = open_task(spec.task)
    coordinator = Coordinator(tmp_path)
    coordinator.start()
    generators = [Generator(tmp_path, coordinator.url, 0.03, name=f"generator-{i}") for i in range(2)]
    for generator in generators:
        await generator.start_server()
        await generator.start_actor()
    over = asyncio.Event()
    try:
        async with aiohttp.ClientSession() as session:
            trainer = MortalTrainer(session, coordinator.url, steps, over)
            training = asyncio.create_task(trainer.live())
            done = 0
            for number, kind in enumerate(victims):
                done = await came_further(trainer, done)
                await asyncio.sleep(dice.uniform(0, 0.2))
                victim = dice.choice(generators)
                match kind:
                    case "coordinator":
                        coordinator.kill()
                        coordinator.start()
                    case "trainer":
                        training.cancel()
                        await asyncio.wait([training])
                        training = asyncio.create_task(trainer.live())
                    case "server":
                        await victim.kill_server()
                        await victim.start_server()
                    case "actor":
                        await victim.kill_actor()
                        await victim.start_actor()
                    case "grader":
                        hang_the_graders()
                assert not training.done(), (number, training)
            over.set()
            async with asyncio.timeout(120):
                await training
            status = await trainer.status()
            assert [await g.exit_code() for g in generators] == [0, 0]
    finally:
        for generator in generators:
            await generator.end()
        coordinator.kill()

    print(status.counts)
    counts, slots = status.counts, steps * PROMPTS_PER_STEP
    chosen = SeededEpochs(len(task.train), spec.seed)
    texts = [task.train[chosen.choose(slot)].text for slot in range(slots)]
    metas = [meta for shard in trainer.shards for meta in shard.groups]
    assert [meta.slot for meta in metas] == list(range(slots))
    given_up = [text for text, meta in zip(texts, metas, strict=True) if not meta.scores]
    assert given_up == [text for text in texts if text in TOO_LONG or text in REFUSED]
    assert counts.given_up == COMPLETIONS * len(given_up) > 0
    assert counts.too_long == COMPLETIONS * sum(text in TOO_LONG for text in given_up) > 0
    assert counts.trained + counts.filtered + counts.skipped + counts.given_up == COMPLETIONS * slots
    assert counts.acknowledged == counts.trained + counts.filtered + counts.skipped
    skipped = [
        len(meta.scores) for s in trainer.shards if s.step % 5 == 3 for meta in s.groups if not meta.filtered
    ]
    assert counts.skipped == sum(skipped) > 0
    assert (counts.queued, counts.leased, counts.invalid) == (0, 0, 0)
    assert counts.ungraded == sum(len(meta.ungraded) for meta in metas)
    assert counts.ungraded > 0 or rounds == 1, "no hang met a completion"
    masked = [sum(meta.masked_tokens) for meta in metas]
    assert masked == [COMPLETIONS * (text in CLAMPED) for text in texts]
    assert counts.masked_tokens == sum(masked) > 0
    bad = sum(task.held_out[i].text in (*TOO_LONG, *REFUSED) for i in range(HELD_OUT))
    assert [(p.version, p.prompts, p.given_up_prompts) for p in status.points] == [
        (version, HELD_OUT, bad) for version in sorted({*range(0, steps + 1, 8), steps})
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps))
    assert sum(row["given_up_groups"] for row in rows) == len(given_up)
    assert sum(row["rollouts"] for row in rows) == counts.acknowledged
