"""An environment that fails in most episodes: they wait, nothing of them is lost, and they go on when it works again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from scalerl_tasks.environments.gate import EPISODES, MAX_FAILURES, EnvironmentGate
from scalerl_tasks.grading.grading_pool import Graded
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.verdict import Verdict

PROMPT = Prompt("p", "1", "1")


class Environment:
    """Fails on the episodes for which ``fails`` says so; counts the tries of each."""

    def __init__(self, fails: Callable[[str], bool]) -> None:
        self.fails = fails
        self.tries: dict[str, int] = {}

    async def steps(
        self,
        prompt: Prompt,
        episodes: Sequence[Sequence[str]],
        *,
        in_thought: bool = False,
        on_graded: Callable[[], None] | None = None,
    ) -> list[Graded]:
        for (name,) in episodes:
            self.tries[name] = self.tries.get(name, 0) + 1
        return [
            Graded(None, "KeyError: 'db'") if self.fails(name) else Graded(Verdict(1.0))
            for (name,) in episodes
        ]


def gate_of(environment: Environment, where: str) -> EnvironmentGate:
    return EnvironmentGate(environment, where, delays=(0.01, 0.02), waiting_seconds=0.01)


async def play(
    gate: EnvironmentGate, *names: str, on_graded: Callable[[], None] | None = None
) -> list[Graded]:
    found = await gate.steps(PROMPT, [[name] for name in names], on_graded=on_graded)
    gate.ended(sum(one.error is None for one in found))
    return found


async def test_half_of_the_episodes_may_fail() -> None:
    environment = Environment(lambda name: name.startswith("bad"))
    gate = gate_of(environment, "the environment game.py:Game")
    for at in range(2 * EPISODES):
        name = "bad" if at % 2 else "good"
        (found,) = await play(gate, f"{name}-{at}")
        assert (found.error is None) == (name == "good")
    assert (gate.problem, set(environment.tries.values())) == ("", {1})


async def test_fewer_episodes_than_the_share_is_of_close_nothing() -> None:
    gate = gate_of(Environment(lambda name: True), "e")
    for at in range(EPISODES - 1):
        (found,) = await play(gate, str(at))
        assert found.error == "KeyError: 'db'"
    assert gate.problem == ""


@pytest.mark.parametrize("groups", [2, 20])
async def test_lasting_failures_do_not_keep_the_gate_shut(groups: int) -> None:
    """A quarter of the episodes of groups of 16 always fails, and all do in an outage; groups end when it is over."""
    out = True
    environment = Environment(lambda name: out or name.startswith("bad"))
    gate = gate_of(environment, "e")
    for at in range(EPISODES - 1):
        await play(gate, f"bad-earlier-{at}")
    names = [[f"{'good' if at % 4 else 'bad'}-{group}-{at}" for at in range(16)] for group in range(groups)]
    playing = [
        asyncio.gather(*(play(gate, name) for name in of_group), play(gate, f"bad-{group}"))
        for group, of_group in enumerate(names)
    ]
    await asyncio.sleep(0.1)
    assert gate.problem
    assert not any(group.done() for group in playing)
    out = False
    for group in await asyncio.wait_for(asyncio.gather(*playing), 120):
        assert sum(one.error is None for (one,) in group) == 12
    for at in range(MAX_FAILURES):
        await play(gate, f"good-{at}")
    assert gate.problem == ""


async def test_episodes_of_an_environment_that_fails_wait_until_it_works() -> None:
    """Those that succeed go on meanwhile; the lease of those that wait is kept; each has its verdict at the end."""
    broken, kept = True, 0

    def keep() -> None:
        nonlocal kept
        kept += 1

    environment = Environment(lambda name: broken and name.startswith("bad"))
    gate = gate_of(environment, "the environment game.py:Game")
    for at in range(EPISODES - 1):
        await play(gate, f"bad-{at}")
    waiting = asyncio.create_task(play(gate, "good", "bad-a", "bad-b", on_graded=keep))
    async with asyncio.timeout(120):
        while kept < 3 or environment.tries.get("bad-a", 0) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not waiting.done()
    assert gate.problem.startswith("the environment game.py:Game failed in ")
    assert gate.problem.endswith(f"of the last {EPISODES} episodes: KeyError: 'db'")
    assert [one.error for one in await play(gate, "good-2")] == [None]
    broken = False
    found = await asyncio.wait_for(waiting, 120)
    assert [one.verdict for one in found] == [Verdict(1.0)] * 3
    assert environment.tries["good"] == 1, "only what failed is tried again"
    assert gate.problem != "", "three episodes are no half"
    for at in range(MAX_FAILURES):
        await play(gate, f"good-{at}")
    assert gate.problem == ""


async def test_wait_of_a_held_step_is_measured() -> None:
    environment = Environment(lambda name: True)
    gate = EnvironmentGate(environment, "e")
    for at in range(EPISODES):
        (found,) = await play(gate, str(at)) if at < EPISODES - 1 else [Graded(None)]
        assert found.waited == 0.0
    begun = time.monotonic()
    held = asyncio.create_task(play(gate, "held", "too"))
    await asyncio.sleep(0.1)
    assert not held.done()
    environment.fails = lambda name: False
    assert [0.1 <= one.waited <= time.monotonic() - begun for one in await held] == [True, True]
