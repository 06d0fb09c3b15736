"""Environments of objects with a state, and what docs/environments.md says to those who have one."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_tasks import GradingPool, Prompt, VerifierConfig
from scalerl_tasks.environments.environment_verifier import EnvironmentConfig
from scalerl_tasks.environments.episodes import EnvironmentGrader
from scalerl_tasks.environments.protocol import Message, Step
from scalerl_tasks.environments.replayed import Replayed
from scalerl_tasks.python_function import PythonFunction

DOCS = Path(__file__).parents[2] / "docs/environments.md"
SKYRL = '''
class MultiplyEnv:
    """The shape of SkyRL-gym's BaseTextEnv."""

    def __init__(self, env_config, extras=None):
        self.answer, self.most = extras["reward_spec"]["ground_truth"], extras["max_turns"]
        self.turns = 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        right = action.strip() == self.answer
        if right or self.turns == self.most:
            return {"observations": [], "reward": float(right), "done": True, "metadata": {}}
        said = {"role": "user", "content": f"{action} is wrong, {self.turns}"}
        return {"observations": [said], "reward": 0.0, "done": False, "metadata": {}}

    def close(self):
        pass
'''


class Count(Replayed):
    """A game with a state; each step is paid a tenth."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    def open(self, prompt: Prompt) -> Any:
        self.opened += 1
        return self.Game(self)

    class Game:
        def __init__(self, of: Count) -> None:
            self.of, self.actions = of, list[str]()

        def step(self, action: str) -> Any:
            self.actions.append(action)
            done = len(self.actions) == 5
            return SimpleNamespace(observations=["|".join(self.actions)], reward=0.1, done=done)

        def close(self) -> None:
            self.of.closed += 1


PROMPT = Prompt("p", "six by seven", "42")


def expected(replies: list[str]) -> Step:
    return Step(["|".join(replies)], len(replies) == 5, sum([0.1] * len(replies)), turn_reward=0.1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_steps_are_those_of_one_play(moves: list[tuple[int, bool]]) -> None:
    """Of four episodes with equal replies in part, whatever objects are lost between their steps."""
    environment = Count()
    episodes: list[list[str]] = [[] for _ in range(4)]
    for number, lost in moves:
        replies = episodes[number]
        replies.append("ab"[len(replies) // 3 % 2 and number % 2])
        if lost:
            for kept in environment.__dict__.pop("_kept", {}).values():
                kept.close()
        assert environment.step(PROMPT, list(replies)) == expected(replies)
        if len(replies) == 5:
            episodes[number] = []
    assert environment.opened == environment.closed + len(environment.__dict__.get("_kept", ()))


def test_object_is_kept_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, replies = Count(), list[str]()
    for at in range(5):
        replies.append(f"{at}")
        environment.step(PROMPT, replies)
    assert (environment.opened, environment.closed) == (1, 1)
    monkeypatch.setattr(Count, "kept", 2)
    for at in range(6):
        environment.step(Prompt(f"{at}", "", ""), ["a"])
    assert (environment.opened, environment.closed) == (7, 5)


def test_episode_that_ends_too_early_is_not_repeatable() -> None:
    class Draws(Count):
        class Game(Count.Game):
            def step(self, action: str) -> Any:
                return SimpleNamespace(observations=["a"], reward=0, done=random.random() < 2)

    environment = Draws()
    with pytest.raises(ValueError, match="steps are not repeatable"):
        environment.step(PROMPT, ["a", "b"])
    assert (environment.opened, environment.closed) == (1, 1)


def test_object_that_raises_is_closed() -> None:
    class Raises(Count):
        class Game(Count.Game):
            def step(self, action: str) -> Any:
                raise KeyError(action)

    environment = Raises()
    with pytest.raises(KeyError):
        environment.step(PROMPT, ["a", "b"])
    assert (environment.opened, environment.closed) == (1, 1)


def test_object_whose_close_raises_ends_as_others_do() -> None:
    class Stubborn(Count):
        class Game(Count.Game):
            def close(self) -> None:
                super().close()
                raise OSError("busy")

    environment = Stubborn()
    assert environment.step(PROMPT, list("aaaaa")) == expected(list("aaaaa"))
    assert (environment.opened, environment.closed) == (1, 1)


def test_turns_of_another_total_have_no_reward() -> None:
    class Last(Count):
        range = (-0.02, 0.02)

        def total(self, rewards: Sequence[float]) -> float:
            return rewards[-1]

    class Sum(Count):
        range = (-0.02, 0.02)

    assert Last().step(PROMPT, ["a"]).turn_reward == 0.0
    assert Sum().step(PROMPT, ["a"]).turn_reward == 0.04, "no more than the width of the range"


@pytest.fixture
def skyrl(tmp_path: Path) -> Path:
    """The code of the documentation, beside the module that it imports."""
    (code,) = re.findall(r"```python\n([^`]*?Replayed\):.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/multiply.py").write_text(SKYRL)
    file = tmp_path / "multiply_for_scalerl.py"
    file.write_text(code)
    return file


async def test_environment_of_skyrl_runs_as_documented(skyrl: Path) -> None:
    function = PythonFunction("Multiply", str(skyrl))
    config = VerifierConfig("environment", environment=EnvironmentConfig(python=function))
    async with GradingPool(config) as pool:
        grader = EnvironmentGrader(pool)
        one, two, right, out = await grader.steps(
            PROMPT, [["41"], ["41", "43"], ["41", "42"], ["1", "2", "3", "4", "5"]]
        )
    assert one.messages == (Message("41 is wrong, 1"),)
    assert two.messages == (Message("43 is wrong, 2"),)
    assert [(step.score, step.messages) for step in (right, out)] == [(1.0, ()), (0.0, ())]
