"""50 kills under each way to batch and to be off-policy: long completions are trained on as often as without kills.

The coordinator is a process that gets SIGKILL. Two actors run in the test's process and are cancelled; the servers and the
trainer are stand-ins. Completions take seconds rather than minutes, so actors report unfinished ones as much more often.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import stand_in_vllm
from actor_stand_ins import CHARACTERS, Generator, write_run
from scipy.stats import ks_2samp
from test_generator_actor_coordinator import Coordinator
from test_generator_actor_survival import MortalTrainer, came_further

from scalerl_api import endpoints
from scalerl_api.paths import RunPaths
from scalerl_api.wire import Ack, CheckpointBegin, CheckpointCommit, CheckpointSnapshot, Counts, StepReport
from scalerl_coordinator import frames
from scalerl_coordinator import journal_records as r
from scalerl_generator.rollouts import partial_reports

PROMPTS_PER_STEP, COMPLETIONS = 4, 4
STEPS = {"fixed": 40, "refill": 20, "episodes": 12}
LONGEST = 1100
VICTIMS = ["coordinator"] * 6 + ["trainer"] * 8 + ["server"] * 12 + ["actor"] * 24
DOWN_SECONDS = 3.0
"""A vLLM server takes longer to start than its actor takes to notice that it is gone."""
MAX_TURNS, MESSAGE = 4, "no. try again."
BATCHES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "refill": {"recipe__refill": {}},
    "episodes": {
        "task__environment": {"name": "retry", "maxTurns": MAX_TURNS, "parameters": {"wrong": MESSAGE}}
    },
}
"""Of episodes, no reply is right, so they have all turns unless they fill the length."""
SCHEMES: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": {"maxStalenessSteps": 2}},
    "ppo": {"ppo": {"stepsPerBatch": 3}},
}
MIN_P = 0.05 / (len(BATCHES) * len(SCHEMES))
"""The comparisons together reject what is sound once in twenty."""


class KeepingTrainer(MortalTrainer):
    """Every step is trained, and its checkpoints keep all groups in the journal."""

    def report(self, step: int) -> StepReport:
        return super(MortalTrainer, self).report(step)

    async def checkpoint(self) -> None:
        begin = CheckpointBegin(incarnation=self.incarnation, step=self.version)
        await self.call(endpoints.CHECKPOINT_BEGIN, begin, CheckpointSnapshot)
        commit = CheckpointCommit(
            incarnation=self.incarnation, step=self.version, kept_steps=[0, self.version]
        )
        await self.call(endpoints.CHECKPOINT_COMMIT, commit, Ack)
        self.saved = self.version


def accepted(directory: Path) -> Iterator[r.GroupAccepted]:
    segments = sorted(RunPaths(directory).journal.glob("segment-*"))
    for number, segment in enumerate(segments, start=1):
        data = memoryview(segment.read_bytes())
        for frame in frames.read_segment(data, segment.name, number, last=number == len(segments)):
            record = r.decode(frame.header)
            if isinstance(record, r.GroupAccepted):
                yield record


def expected_lengths(batch: str, count: int) -> Iterator[int]:
    """Lengths without kills."""
    dice = np.random.default_rng(0)
    for _ in range(count):
        length, turns = int(dice.geometric(1 / stand_in_vllm.DRAWN_MEAN)), 1
        while batch == "episodes" and turns < MAX_TURNS and length + len(MESSAGE) < LONGEST:
            length += len(MESSAGE) + int(dice.geometric(1 / stand_in_vllm.DRAWN_MEAN))
            turns += 1
        yield min(length, LONGEST)


async def restart_server(generator: Generator) -> None:
    await generator.kill_server()
    await asyncio.sleep(DOWN_SECONDS)
    await generator.start_server()


async def run_under_kills(
    directory: Path,
    steps: int,
    victims: Sequence[str],
    dice: random.Random,
    kill_other: Callable[[], Awaitable[None]] | None = None,
) -> Counts:
    """A run of two generators, which ends once all victims were killed; of ``other``, by ``kill_other``."""
    coordinator = Coordinator(directory)
    coordinator.start()
    generators = [Generator(directory, coordinator.url, 0.01, name=f"generator-{i}") for i in range(2)]
    for generator in generators:
        await generator.start_server()
        await generator.start_actor()
    over = asyncio.Event()
    restarts: dict[str, asyncio.Task[None]] = {}
    try:
        async with aiohttp.ClientSession() as session:
            trainer = KeepingTrainer(session, coordinator.url, steps, over)
            training = asyncio.create_task(trainer.live())
            await trainer.some_acknowledged()
            done = 0
            for kind in victims:
                done = await came_further(trainer, done)
                await asyncio.sleep(dice.uniform(0, 1))
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
                        if victim.name in restarts:
                            await restarts[victim.name]
                        restarts[victim.name] = asyncio.create_task(restart_server(victim))
                    case "actor":
                        await victim.kill_actor()
                        await victim.start_actor()
                    case _:
                        assert kill_other is not None
                        await kill_other()
            over.set()
            await asyncio.gather(*restarts.values())
            async with asyncio.timeout(240):
                await training
            counts = (await trainer.status()).counts
            assert [await g.exit_code() for g in generators] == [0, 0]
    finally:
        for generator in generators:
            await generator.end()
        coordinator.kill()
    return counts


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("batch", BATCHES)
async def test_lengths_are_not_biased_by_kills(
    batch: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHARACTERS.index("}") + 2 == stand_in_vllm.DRAWN
    monkeypatch.setattr(partial_reports, "REPORT_HEARTBEATS", 0.1)
    dice = random.Random(f"{batch} {scheme}")
    # Groups of short completions have equal rewards, and are dropped or refilled.
    (tmp_path / "long.py").write_text("def long(completion):\n    return 0.5 * (len(completion) > 300)\n")
    victims = list(VICTIMS)
    dice.shuffle(victims)
    write_run(
        tmp_path,
        [f"say {i}}}" for i in range(40)],
        model__contextTokens=1200,
        recipe__promptsPerStep=PROMPTS_PER_STEP,
        recipe__completionsPerPrompt=COMPLETIONS,
        recipe__maxCompletionTokens=LONGEST,
        recipe__offPolicy=SCHEMES[scheme],
        task__verifier={"python": {"path": str(tmp_path / "long.py"), "function": "long"}},
        recipe__length={"none": {}},
        generator__maxConcurrentSequences=16,
        evaluation={"everySteps": 1000, "samplesPerPrompt": 1},
        budget={"maxSteps": STEPS[batch]},
        **BATCHES[batch],
    )
    counts = await run_under_kills(tmp_path, STEPS[batch], victims, dice)
    groups = list(accepted(tmp_path))
    lengths = [length for group in groups for length in group.lengths]
    assert counts.acknowledged == len(lengths) == counts.trained + counts.filtered
    assert counts.acknowledged == COMPLETIONS * PROMPTS_PER_STEP * STEPS[batch] + counts.refilled
    assert (counts.refilled > 0) == (batch == "refill")
    assert (counts.queued, counts.leased, counts.skipped, counts.given_up, counts.invalid) == (0, 0, 0, 0, 0)
    expected = np.array(list(expected_lengths(batch, 20_000)))
    test = ks_2samp(lengths, expected)
    print(
        f"{len(lengths)} lengths, mean {np.mean(lengths):.1f} ({expected.mean():.1f}); "
        f"expired {counts.expired_leases}, late {counts.late}; D {test.statistic:.4f}, p {test.pvalue:.4f}"
    )
    assert test.pvalue > MIN_P
