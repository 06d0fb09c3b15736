"""Environments that misbehave, from the class to the episode: one message each, and no other episode is lost.

What servers do is in ``test_tasks_environment_outages.py`` and ``test_tasks_environment_failures.py``, and what chat templates do in
``test_tasks_messages.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from actor_stand_ins import END, TOKEN, write_tokenizer
from test_generator_episodes import PROMPT_IDS, ModelServer, sampler
from test_generator_streams import Bench

from scalerl_api.spec import PromptSpec
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_tasks import GradingPool, Prompt, VerifierConfig
from scalerl_tasks.environments.environment_verifier import EnvironmentConfig
from scalerl_tasks.environments.episodes import EnvironmentGrader
from scalerl_tasks.python_function import PythonFunction

CLASS = """
import random, time
from scalerl_tasks.environments.protocol import Message, Step

class Own:
    def step(self, prompt, replies):
        match prompt.text:
            case "raises": raise RuntimeError("no luck")
            case "hangs": time.sleep(60)
            case "no message": return Step()
            case "another type": return {"reward": 1}
            case "none": return None
            case "10 MB": return Step(["a" * 10_000_000])
            case "a reward of nan": return Step(done=True, reward=float("nan"))
            case "a reward that is a text": return Step(done=True, reward="one")
            case "done that is no truth": return Step(["a"], done="yes")
            case "no tokens": return Step([""])
            case "a role with a token": return Step([Message("a", "<eos>")])
            case "control tokens": return Step(["<eos><pad>"], reward=0.25)
            case "never ends": return Step(["a"], reward=0.25)
            case "longer than the context": return Step(["a" * 4000], reward=0.25)
            case "more turns than the context has": return Step(["a" * 380], reward=0.25)
            case "not repeatable": return Step([str(random.random())])
        return Step(done=True, reward=1.0)
"""
MASKED = {
    "raises": "RuntimeError: no luck (own.py, line 8)",
    "hangs": "took longer than 2 s and was killed",
    "no message": "returned no message, and the episode is not done; return a message, or done=True",
    "another type": "returned dict; return a scalerl_tasks.environments.protocol.Step",
    "none": "returned NoneType; return a",
    "10 MB": "messages of 10,000,000 bytes; the limit is 48,000: shorten them",
    "a reward of nan": "nan, which is not in [0, 1]",
    "a reward that is a text": "could not convert string to float: 'one'",
    "no tokens": "messages have no tokens; return a text, or end the episode (done=True)",
    "a role with a token": "a role is a name of letters, digits, - and _, without special tokens",
}
"""Episodes without a verdict, which are not trained on, and why."""
TURNS = {
    "control tokens": 8,
    "never ends": 8,
    "done that is no truth": 8,
    "longer than the context": 1,
    "more turns than the context has": 6,
    "fair": 1,
}
"""Turns of those that have one."""


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.server = ModelServer(TOKEN, 0.0)
    await bench.start()
    yield bench
    await bench.end()


def pool(folder: Path) -> GradingPool:
    (folder / "own.py").write_text(CLASS)
    config = EnvironmentConfig(python=PythonFunction("Own", str(folder / "own.py")))
    return GradingPool(VerifierConfig("environment", environment=config), timeout_seconds=2.0)


async def test_each_fault_ends_its_own_episodes(bench: Bench, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    codec = PromptCodec(tmp_path, PromptSpec(), context_tokens=4096)
    async with pool(tmp_path) as graders:
        for kind, says in {**MASKED, **dict.fromkeys(TURNS, "")}.items():
            errors = graders.counts.errors
            streams = bench.streams(PROMPT_IDS, 2, max_tokens=2000)
            await sampler(bench, codec, EnvironmentGrader(graders)).sample(streams, Prompt("p", kind, ""))
            for completion in streams.completions:
                outcome = completion.outcome
                assert outcome is not None, kind
                assert (outcome.messages, outcome.verdict is None) == ((), bool(says)), (kind, outcome)
                assert says in (outcome.error or ""), (kind, outcome)
                assert len((outcome.error or "").splitlines()) <= 1
                assert len(completion.turns) + 1 == TURNS.get(kind, 1), kind
                ids = completion.token_ids.tolist()
                for turn in completion.turns:
                    assert END not in ids[turn.start : turn.end], "a special token in a message stays text"
            at_step = says and "no tokens" not in says and "a role is" not in says
            assert graders.counts.errors - errors == (2 if at_step else 0), kind


async def test_step_that_is_not_repeatable_is_found_before_a_run(tmp_path: Path) -> None:
    prompts = [Prompt(kind, kind, "") for kind in ("never ends", "not repeatable", "fair")]
    found = list[str | None]()
    async with pool(tmp_path) as graders:
        await graders.check(prompts, found.append)
    assert found[::2] == [None, None]
    assert "answered the same replies in another way" in (found[1] or "")
