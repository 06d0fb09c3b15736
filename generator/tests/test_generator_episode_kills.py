"""50 kills while episodes have one to eight turns: their lengths and turns are those without kills, and each step counts once.

Each reply earns a reward of its own, by its length, so that one that is missing, counted twice or another's is seen in the returns.

The environment is a class in grading processes, or a server with a state a session, which is killed too.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import stand_in_vllm
from actor_stand_ins import CHARACTERS, END, write_run
from free_port import free_port
from openenv_stand_in import OpenEnvServer, observed, serving
from scipy.stats import ks_2samp
from test_generator_length_bias import COMPLETIONS, PROMPTS_PER_STEP, accepted, run_under_kills

from scalerl_api.paths import RunPaths
from scalerl_api.wire import Counts
from scalerl_coordinator import frames
from scalerl_coordinator import journal_records as r
from scalerl_generator.rollouts import partial_reports
from scalerl_tasks import open_graders
from scalerl_tasks.environments.server_grader import ServerGrader
from scalerl_tasks.environments.timings import Timings

MAX_TURNS, STEPS, LONGEST, MEAN = 8, 40, 1100, 30
VICTIMS = ["coordinator"] * 5 + ["trainer"] * 6 + ["server"] * 12 + ["actor"] * 27
OTHERS = 12
"""Of the kills, those of the environment's server, in place of as many of actors."""
MIN_P = 0.05 / 4
"""The comparisons together reject what is sound once in twenty."""
CLASS = """
import zlib
from scalerl_tasks.environments.protocol import Step

class Own:
    def step(self, prompt, replies):
        texts = [reply.strip() for reply in replies]
        done = zlib.crc32(repr(texts).encode()) % 4 == 0
        earned = [(1 + len(text) % 4) / 40 for text in texts]
        return Step([f"no. {len(replies)}"], done, sum(earned), turn_reward=earned[-1])
"""
DISCOUNT = 0.5


def earned(reply: str) -> float:
    """What a reply earns."""
    return (1 + len(reply) % 4) / 40


def ends(replies: Sequence[str]) -> bool:
    """The rule of the environment: one reply in four ends its episode."""
    return zlib.crc32(repr([reply.strip() for reply in replies]).encode()) % 4 == 0


class Game:
    """The same environment with a state: the replies of this session. Each step is paid, and the sum is the episode's reward."""

    paid: ClassVar[dict[tuple[str, ...], float]] = {}
    """The reward of the last of some replies, over all sessions."""

    def __init__(self) -> None:
        self.replies: list[str] = []

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.replies = []
        return observed({"echoed_message": "ready"})

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.replies.append(action["message"])
        reward = self.paid[tuple(self.replies)] = earned(self.replies[-1])
        return observed({"echoed_message": f"no. {len(self.replies)}"}, reward, ends(self.replies))


def without_kills(count: int) -> tuple[list[int], list[int]]:
    """Lengths and turns of episodes of the same model and environment."""
    lengths, turns = [], []
    for _ in range(count):
        length, replies = 0, list[str]()
        while True:
            reply = stand_in_vllm.drawn()
            length += len(reply)
            replies.append(CHARACTERS[0] * (len(reply) - 1))
            if ends(replies) or len(replies) == MAX_TURNS:
                break
            length += len("no. 1")
        lengths.append(length)
        turns.append(len(replies))
    return lengths, turns


class MortalServer:
    """An environment server that is killed, and comes back."""

    def __init__(self) -> None:
        self.port, self.kills = free_port(), 0
        self._running = AsyncExitStack()

    async def start(self) -> None:
        server = OpenEnvServer()
        server.environment = Game
        await self._running.enter_async_context(serving(server, self.port))

    async def kill(self) -> None:
        self.kills += 1
        await self._running.aclose()
        await asyncio.sleep(0.3)
        await self.start()

    async def end(self) -> None:
        await self._running.aclose()


@pytest.fixture
async def environment_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MortalServer]:
    soon = Timings(first_back_off=0.05, max_back_off=0.5)
    monkeypatch.setattr(open_graders, "ServerGrader", partial(ServerGrader, timings=soon))
    server = MortalServer()
    await server.start()
    yield server
    await server.end()


def check_rewards(directory: Path, kind: str) -> int:
    """Check that each reply of each accepted episode is paid once, in its turn; returns the number of replies."""
    count = 0
    segments = sorted(RunPaths(directory).journal.glob("segment-*"))
    for number, segment in enumerate(segments, start=1):
        data = memoryview(segment.read_bytes())
        for frame in frames.read_segment(data, segment.name, number, last=number == len(segments)):
            record = r.decode(frame.header)
            if not isinstance(record, r.GroupAccepted):
                continue
            completions = r.decode_stored(frame.blob).completions
            for one, score, returns in zip(completions, record.scores, record.returns, strict=True):
                replies = replies_of(one)
                paid = [earned(reply) for reply in replies]
                if kind == "server":
                    assert paid == [Game.paid[tuple(replies[: at + 1])] for at in range(len(replies))]
                assert [turn.reward for turn in one.turns] == paid[:-1]
                assert score == pytest.approx(sum(paid))
                discounted = [
                    sum(2 * reward * DISCOUNT**at for at, reward in enumerate(paid[turn:]))
                    for turn in range(len(paid))
                ]
                assert returns == pytest.approx(discounted)
                count += len(replies)
    return count


def replies_of(completion: r.StoredCompletion) -> list[str]:
    ids = np.frombuffer(completion.token_ids, "<i4")
    starts = [0, *(turn.end for turn in completion.turns)]
    ends = [*(turn.start for turn in completion.turns), len(ids)]
    spans = (ids[start:end] for start, end in zip(starts, ends, strict=True))
    return [CHARACTERS[0] * int((span != END).sum()) for span in spans]


async def run_episodes(
    directory: Path,
    kind: str,
    environment_server: MortalServer,
    steps: int,
    victims: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Counts:
    """A run of episodes of an environment, which ends once all victims were killed."""
    monkeypatch.setattr(stand_in_vllm, "DRAWN_MEAN", MEAN)
    monkeypatch.setattr(partial_reports, "REPORT_HEARTBEATS", 0.1)
    Game.paid.clear()
    dice = random.Random(f"episodes {kind}")
    dice.shuffle(victims)
    (directory / "own.py").write_text(CLASS)
    given: dict[str, Any] = {"python": {"path": str(directory / "own.py"), "className": "Own"}}
    if kind == "server":
        url = f"http://127.0.0.1:{environment_server.port}"
        given = {"url": url, "parameters": {"reward": "sum"}}
    write_run(
        directory,
        [f"say {i}}}" for i in range(40)],
        model__contextTokens=1200,
        recipe__promptsPerStep=PROMPTS_PER_STEP,
        recipe__completionsPerPrompt=COMPLETIONS,
        recipe__maxCompletionTokens=LONGEST,
        recipe__offPolicy={"pipeline": {"maxStalenessSteps": 2}},
        recipe__advantage={"credit": "Turn", "discount": str(DISCOUNT)},
        task__verifier=None,
        task__environment={**given, "maxTurns": MAX_TURNS},
        evaluation={"everySteps": 1000, "samplesPerPrompt": 1},
        budget={"maxSteps": steps},
    )
    counts = await run_under_kills(directory, steps, victims, dice, environment_server.kill)
    assert environment_server.kills == victims.count("other")
    assert counts.acknowledged == COMPLETIONS * PROMPTS_PER_STEP * steps == counts.trained + counts.filtered
    assert (counts.queued, counts.leased, counts.skipped, counts.given_up) == (0, 0, 0, 0)
    assert (counts.invalid, counts.ungraded) == (0, 0)
    return counts


# A server that is stopped in this process leaves what it accepts at that moment to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_each_step_is_paid_once_under_kills(
    environment_server: MortalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = ["actor", "other", "coordinator"]
    await run_episodes(tmp_path, "server", environment_server, 4, victims, monkeypatch)
    assert check_rewards(tmp_path, "server") > 4 * COMPLETIONS * PROMPTS_PER_STEP


# A server that is stopped in this process leaves what it accepts at that moment to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["class", "server"])
async def test_kills_bias_no_episode(
    kind: str, environment_server: MortalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = VICTIMS[: -OTHERS if kind == "server" else None]
    victims += ["other"] * (len(VICTIMS) - len(victims))
    counts = await run_episodes(tmp_path, kind, environment_server, STEPS, victims, monkeypatch)
    groups = list(accepted(tmp_path))
    groups = list(accepted(tmp_path))
    lengths = [length for group in groups for length in group.lengths]
    messages = [tokens for group in groups for tokens in group.masked_tokens or [0] * COMPLETIONS]
    turns = [1 + tokens // len("no. 1") for tokens in messages]
    assert check_rewards(tmp_path, kind) == sum(turns)
    expected_lengths, expected_turns = without_kills(20_000)
    found = ks_2samp(lengths, expected_lengths), ks_2samp(turns, expected_turns)
    print(
        f"{kind}: {len(lengths)} episodes, {np.mean(lengths):.1f} tokens ({np.mean(expected_lengths):.1f}), "
        f"{np.mean(turns):.3f} turns ({np.mean(expected_turns):.3f}), expired {counts.expired_leases}, late {counts.late}; "
        f"p {found[0].pvalue:.3f} and {found[1].pvalue:.3f}"
    )
    assert set(turns) == set(range(1, MAX_TURNS + 1))
    assert min(one.pvalue for one in found) > MIN_P
