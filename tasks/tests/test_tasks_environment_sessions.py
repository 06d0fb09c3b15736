"""Episodes and their sessions on a server with OpenEnv's protocol, and the section of the spec."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from openenv_episodes import PROMPT, grading, options, said, steps
from openenv_stand_in import Echo, observed, serving

from scalerl_api.spec import TaskSpec
from scalerl_tasks import Graded, Prompt, Verdict, VerifierError, open_grading_pool
from scalerl_tasks.environments.server_grader import ServerGrader
from scalerl_tasks.environments.server_settings import EnvironmentServer
from scalerl_tasks.open_graders import _environment_server, grading_digest


async def test_session_is_that_of_the_replies():
    arguments: list[dict[str, Any]] = []

    class Recording(Echo):
        def reset(self, given):
            arguments.append(given)
            return super().reset(given)

    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Recording
        assert await steps(grader, ["ab"]) == [said(0.2, "ab")]
        assert await steps(grader, ["ab", "<think>no</think> abc "]) == [said(0.3, "abc")]
        assert (server.opened, server.resets, server.steps) == (1, 1, 2)
        assert await steps(grader, ["ab", "d"]) == [said(0.1, "d")], "another episode, played from its start"
        assert (server.opened, server.resets, server.steps) == (2, 2, 4)
    assert arguments[0] == arguments[1]
    assert arguments[0] | {"seed": 0} == {
        "prompt": "Say it.",
        "answer": "4",
        "seed": 0,
        "episode_id": "row-7",
        "level": 3,
    }


async def test_seed_is_of_the_prompt_or_its_own():
    seeds = []

    class Seeded(Echo):
        def reset(self, given):
            seeds.append(given["seed"])
            return super().reset(given)

    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Seeded
        for prompt in (
            PROMPT,
            PROMPT,
            Prompt("row-8", "", ""),
            Prompt("row-8", "", "", metadata={"seed": 12}),
        ):
            await steps(grader, ["a"], prompt=prompt)
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[3] == 12
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_ended_episode_leaves_its_session_to_another():
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = type("Two", (Echo,), {"turns": 2})
        for first in "abcdef":
            assert await steps(grader, [first]) == [said(0.1, first)]
            assert await steps(grader, [first, "xyz"]) == [Graded(Verdict(0.3))]
        assert (server.opened, server.resets) == (1, 6)


async def test_sessions_are_limited_by_client_and_server():
    async with serving() as (server, url):
        for sessions, capacity in ((3, 64), (64, 3), (64, 1)):
            server.capacity, server.most_sessions = capacity, 0
            async with grading(options(url, sessions=sessions)) as grader:
                replies = [f"{n}" for n in range(40)]
                for _ in range(2):
                    found = await steps(grader, *([one] for one in replies))
                    assert found == [said(round(len(one) * 0.1, 6), one) for one in replies]
                    assert grader.problem == ""
                assert await steps(grader, *([one, "xy"] for one in replies)) == [said(0.2, "xy")] * 40
            assert server.most_sessions == min(sessions, capacity)
            while server.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_idle_sessions_are_closed():
    async with serving() as (server, url):
        server.environment = type("Two", (Echo,), {"turns": 2})

        async def are(count: int) -> None:
            async with asyncio.timeout(120):
                while len(server.sessions) != count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        async with grading(options(url), ended=0.1) as grader:
            await steps(grader, ["over"], ["on"])
            assert len(server.sessions) == 2
            await steps(grader, ["over", "b"])
            await are(1)
            await steps(grader, ["on", "b"])
            assert (server.opened, server.resets) == (2, 2), "that of an episode is there for its next step"
        async with grading(options(url), idle=0.1) as grader:
            await steps(grader, ["on"])
            await are(0)
            assert await steps(grader, ["on", "b"]) == [Graded(Verdict(0.1))]


async def test_sessions_and_connections_end_with_the_grader():
    async with serving() as (server, url):
        async with grading(options(url)) as grader:
            server.on_step = lambda socket: asyncio.sleep(0.05)
            await steps(grader, *([f"{n}"] for n in range(6)))
            hanging = asyncio.create_task(steps(grader, ["x"]))
            await asyncio.sleep(0.02)
            hanging.cancel()
            assert len(server.sessions) >= 6
        async with asyncio.timeout(120):
            while server.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert grader._http is None


async def test_server_whose_sessions_others_hold_is_waited_for():
    async with (
        serving() as (server, url),
        grading(options(url)) as grader,
        grading(options(url)) as other,
    ):
        server.capacity = 1
        await steps(other, ["a"])
        waiting = asyncio.create_task(steps(grader, ["b"]))
        while not grader.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "has no free session; raise its max_concurrent_envs" in grader.problem
        await other._sessions.aclose()
        assert await waiting == [said(0.1, "b")]


async def test_grader_gets_a_session_of_a_server_that_another_one_fills():
    async with (
        serving() as (server, url),
        grading(options(url, sessions=8), full=1.0) as first,
        grading(options(url, sessions=8), full=1.0) as second,
    ):
        server.capacity = 4
        server.on_step = lambda socket: asyncio.sleep(0.002)

        async def work(number: int) -> None:
            for at in range(10_000):
                assert await steps(first, [f"{number}.{at}"], [f"{number}.{at}", "xy"])

        busy = [asyncio.create_task(work(number)) for number in range(8)]
        while server.most_sessions < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with asyncio.timeout(120):
            for at in range(20):
                assert await steps(second, *([f"{at}.{n}"] for n in range(8)))
        assert not any(one.done() for one in busy)
        assert first.counts.errors == second.counts.errors == 0
        for one in busy:
            one.cancel()


async def test_grader_that_fills_a_server_alone_has_its_sessions_nearly_always(monkeypatch):
    seconds = 0.0  # a clock of the test's own: how many steps a machine makes in a time is not of interest
    monkeypatch.setattr(
        "scalerl_tasks.environments.sessions.time", SimpleNamespace(monotonic=lambda: seconds)
    )
    async with (
        serving() as (server, url),
        grading(options(url, sessions=16), full=0.3, spare=0.06, opening=0.03) as grader,
    ):
        server.capacity = 4
        server.on_step = lambda socket: asyncio.sleep(0.001)
        episodes, full = [[f"{number}"] for number in range(16)], list[bool]()
        for at in range(40):
            seconds = at * 0.02
            await steps(grader, *episodes)
            full.append(len(server.sessions) == 4)
        assert sum(full) > 0.6 * len(full)
        assert grader.problem == ""


async def test_rewards_are_of_the_last_step_or_their_sum():
    rewards: list[float | None] = [0.25, None, -0.75]

    class Paid(Echo):
        def step(self, action):
            self.steps += 1
            return observed(
                {"echoed_message": "on", "message_length": 2}, rewards[self.steps - 1], self.steps == 3
            )

    async with serving() as (server, url):
        server.environment = Paid
        bounds = {"range": (-1.0, 1.0)}
        for total, expected in ((False, [0.25, -1.0, -0.75]), (True, [0.25, 0.25, -0.5])):
            async with grading(options(url, total=total, **bounds)) as grader:
                found = [(await steps(grader, ["a"] * turns))[0] for turns in (1, 2, 3)]
                assert [one.verdict and one.verdict.parts["reward"] for one in found] == expected
                assert [one.score for one in found] == [(one + 1) / 2 for one in expected]
                assert [one.turn_reward for one in found] == [0.125 * total, 0.0, 0.0]
        async with grading(options(url)) as grader:
            (one,) = await steps(grader, ["a"] * 3)
            assert "/: gave" not in (one.error or "")
            assert one.error == (
                f"the environment server {url} gave -0.75, which is not in [0, 1] (parameters.range) (prompt row-7)"
            )


async def test_episode_without_a_reward_has_the_lowest():
    class Unpaid(Echo):
        def step(self, action):
            return observed({"echoed_message": "on"})

    async with serving() as (server, url):
        server.environment = Unpaid
        for total in (False, True):
            async with grading(options(url, total=total, range=(-1.0, 1.0))) as grader:
                (found,) = await steps(grader, ["a", "b"])
                assert found.score == 0.0


async def test_tasks_with_equal_ids_have_their_own_episodes():
    class Repeating(Echo):
        def step(self, action):
            text = "|".join(str(self.arguments[name]) for name in ("prompt", "answer", "level"))
            return observed({"echoed_message": text}, 0.5)

    prompts = [
        Prompt("row-1", text, answer, metadata={"level": level})
        for text, answer, level in (("p", "a", 1), ("q", "a", 1), ("p", "b", 1), ("p", "a", 2))
    ]
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Repeating
        for replies in (["x"], ["x", "y"]):
            for prompt in prompts:
                text = f"{prompt.text}|{prompt.answer}|{prompt.metadata['level']}"
                assert await steps(grader, replies, prompt=prompt) == [said(0.5, text)]


@pytest.mark.parametrize("kind", ["one field", "json"])
async def test_actions_and_messages_are_made_by_the_schema(kind):
    class Typed(Echo):
        def step(self, action):
            return observed(
                {"a": 1, "b": ["x"], "metadata": {"t": 0}} if kind == "json" else {"a": "A", "b": "B"}, 0.5
            )

    async with serving() as (server, url):
        server.environment = Typed
        server.schema["action"] = {
            "properties": {"x": {"type": "integer"}, "y": {"type": "string"}},
            "required": ["y"],
        }
        server.schema["observation"] = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
        if kind == "one field":
            async with grading(options(url, message="b")) as grader:
                assert await steps(grader, ["hello"]) == [said(0.5, "B")]
            return
        server.schema["action"]["required"] = ["x", "y"]
        async with grading(options(url)) as grader:
            right, fenced, wrong, missing = await steps(
                grader, ['{"x": 1, "y": "2"}'], ['```json\n{"x": 1, "y": "2"}\n```'], ["x=1"], ['{"x": 1}']
            )
            assert right == fenced == said(0.5, '{"a":1,"b":["x"]}')
            assert wrong == said(0.0, "Reply with one JSON object with the fields x, y.")
            assert missing == said(0.0, "That is no valid action: y: Field required.")
            assert grader.counts.errors == 0


def section(**parameters: Any) -> TaskSpec:
    environment = {"url": "http://game:8000", "turnTimeoutSeconds": 7, "parameters": parameters}
    return TaskSpec.model_validate({"jsonl": {"path": "a.jsonl"}, "environment": environment})


def test_parameters_of_the_spec():
    assert _environment_server(section().environment) == EnvironmentServer("http://game:8000", 7)
    given = {"action": "move", "message": "board", "reward": "sum", "range": ["-1", "0.5"], "sessions": 3}
    assert _environment_server(section(**given).environment) == EnvironmentServer(
        "http://game:8000", 7, "move", "board", True, (-1.0, 0.5), 3
    )
    assert isinstance(open_grading_pool(section()), ServerGrader)


def test_sessions_are_a_limit_in_the_digest():
    plain = grading_digest(section(range=["-1", "1"]))
    assert grading_digest(section(range=["-1", "1"], sessions=3)) == plain
    assert grading_digest(section(range=["-1", "0"], sessions=3)) != plain
    without = TaskSpec.model_validate(
        {"jsonl": {"path": "a.jsonl"}, "environment": {"url": "http://game:8000"}}
    )
    assert grading_digest(section(sessions=3)) == grading_digest(without)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"session": 3}, "has no parameter 'session'; did you mean 'sessions'"),
        ({"sessions": 0}, "correct sessions, an integer from 1"),
        ({"sessions": True}, "correct sessions"),
        ({"reward": "mean"}, "correct reward, which is last or sum"),
        ({"range": ["1", "0"]}, "correct range"),
        ({"range": ["0", "inf"]}, "correct range"),
        ({"range": "01x"}, "correct range"),
        ({"action": 5}, "correct action"),
    ],
)
def test_parameters_that_are_wrong(parameters, says):
    with pytest.raises(VerifierError, match=re.escape(says)):
        open_grading_pool(section(**parameters))
