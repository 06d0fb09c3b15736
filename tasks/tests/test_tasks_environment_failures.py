"""Episodes that fail alone, while their server answers others."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
from aiohttp import web
from openenv_episodes import grading, options, said, steps
from openenv_stand_in import Echo, OpenEnvServer, observed, serving

from scalerl_tasks import Prompt, VerifierError
from scalerl_tasks.environments.openenv_schema import Schema

FENCED = '{"x": 1, "y": "`"}'


@pytest.mark.parametrize(
    "reply",
    [
        FENCED,
        f"```json\n{FENCED}\n```",
        f"```\n{FENCED}\n```",
        f" \n```json {FENCED}``` \n",
        f"<think>```json\n{{}}\n```</think>\n```json\n{FENCED}\n```",
    ],
)
def test_action_may_be_in_a_fence(reply):
    schema = Schema(b"", None, None, ("x", "y"))
    assert schema.action_of(reply) == {"x": 1, "y": "`"}
    assert schema.action_of(f"Here it is:\n{reply}") is None or "<think>" in reply
    assert Schema(b"", "x", None, ("x",)).action_of("```json\n{}\n```") == {"x": "```json\n{}\n```"}


class Answers(Echo):
    """Answers the second reply of an episode whose first is ``bad`` as it is given."""

    answer: Any = None
    reset_answer: Any = None

    def reset(self, arguments):
        return type(self).reset_answer or super().reset(arguments)

    def step(self, action):
        self.bad = getattr(self, "bad", False) or action["message"] == "bad"
        found = super().step(action)
        if self.bad and self.steps == 2:
            return type(self).answer() if callable(type(self).answer) else type(self).answer
        return found


LONG = {"echoed_message": "x" * 60_000}
HUGE = {"echoed_message": "x" * (10 << 20)}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (observed(LONG, 0.5), "returned messages of 60"),
        (observed(HUGE, 0.5), "answered more than 4 MiB"),
        (observed({"echoed_message": "x"}, 1.5), "gave 1.5, which is not in [0, 1] (parameters.range)"),
        (observed({"echoed_message": "x"}, None, True), "ended an episode without a reward"),
        (lambda: 1 / 0, "failed in a step; see its log"),
        (
            lambda: observed({"echoed_message": f"{random.random()}"}, 0.5),
            "answered the same replies in another way",
        ),
    ],
    ids=["long", "10 MiB", "range", "no reward", "raises", "random"],
)
async def test_episode_that_fails_is_the_only_one_without_a_verdict(answer, says):
    environment = type("One", (Answers,), {"answer": staticmethod(answer) if callable(answer) else answer})
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = environment
        await steps(grader, ["bad"], ["good"])
        if says.endswith("in another way"):
            await steps(grader, ["bad", "b"])
        bad, good = await steps(grader, ["bad", "b"], ["good", "b"])
        assert bad.verdict is None
        assert says in (bad.error or "")
        assert (bad.error or "").endswith("(prompt row-7)")
        assert good == said(0.1, "b")
        assert (grader.problem, grader.counts.errors) == ("", 1)


DEEP = '{"message": ' + "[" * 100_000 + "]" * 100_000 + "}"


async def test_deep_json_of_a_reply_is_no_action():
    async with serving() as (server, url), grading(options(url)) as grader:
        server.schema["action"]["required"] = []
        server.schema["action"]["properties"]["other"] = {"type": "string"}
        deep, right = await steps(grader, [DEEP], ['{"message": "ab"}'])
        assert deep == said(0.0, "Reply with one JSON object with the fields message, other.")
        assert right == said(0.2, "ab")


async def test_deep_json_of_a_server_ends_the_episode_alone():
    async def answer(socket: web.WebSocketResponse) -> None:
        await socket.send_str('{"type": "observation", "data": {"observation": ' + DEEP + "}}")

    async with serving() as (server, url), grading(options(url)) as grader:
        await steps(grader, ["a"])
        server.on_step = answer
        (deep,) = await steps(grader, ["b"])
        assert "nested too deeply (prompt row-7)" in (deep.error or "")


async def test_lone_surrogates_end_the_episode_alone():
    async with serving() as (_, url), grading(options(url)) as grader:
        for prompt in (Prompt("a", "\ud800", ""), Prompt("b", "", "", metadata={"x": ["\ud800"]})):
            (found,) = await steps(grader, ["a"], prompt=prompt)
            assert "cannot be written as JSON" in (found.error or "")
        assert await steps(grader, ["\ud800"]) == [said(0.1, "?")]
        assert grader.problem == ""


async def test_episode_on_which_the_environment_raises_is_tried_twice():
    tries = 0

    class Raises(Echo):
        def step(self, action):
            nonlocal tries
            if action["message"] == "bad":
                tries += 1
                raise ValueError
            return super().step(action)

    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Raises
        await steps(grader, ["a"])
        (bad,) = await steps(grader, ["bad"])
        assert "failed in a step" in (bad.error or "")
        assert tries == 2


async def test_message_that_answers_nothing_ends_the_session():
    async with serving() as (server, url), grading(options(url)) as grader:
        assert await steps(grader, ["ab"]) == [said(0.2, "ab")]
        (socket,) = server.sessions
        await socket.send_str('{"type": "observation", "data": {"observation": {"echoed_message": "no"}}}')
        for _ in range(20):
            await asyncio.sleep(0)  # turns of the loop, in which the message arrives
        assert await steps(grader, ["ab", "abc"]) == [said(0.3, "abc")]
        assert (server.opened, server.resets) == (2, 2)


async def test_parameters_that_do_not_fit_end_the_run():
    async with serving() as (server, url):
        for given, says in (
            (
                {"message": "echoed_mesage"},
                "did you mean 'echoed_message'?; correct environment.parameters.message",
            ),
            (
                {"action": "move"},
                "has no field 'move'; correct environment.parameters.action (known: message)",
            ),
        ):
            async with grading(options(url, **given)) as grader:
                with pytest.raises(VerifierError, match=re.escape(says)):
                    await steps(grader, ["a"], ["b"])
                assert grader.problem == ""
        async with grading(options(url, message="echoed_message")) as grader:
            await steps(grader, ["a"])
            del server.schema["observation"]["properties"]["echoed_message"]
            await server.close_sessions()
            waiting = asyncio.create_task(steps(grader, ["a", "b"]))
            while not grader.problem:
                assert not waiting.done(), "another version is waited for"
                await asyncio.sleep(0.01)
            server.schema = OpenEnvServer().schema
            assert await waiting == [said(0.1, "b")]


async def test_episode_that_ends_at_its_reset_has_no_verdict():
    ended = observed({"echoed_message": ""}, 0.0, True)
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = type("Over", (Answers,), {"reset_answer": ended})
        (one,) = await steps(grader, ["a"])
        assert "ended the episode at its reset" in (one.error or "")


async def test_cancelled_steps_leave_their_sessions():
    async with serving() as (server, url), grading(options(url, sessions=2)) as grader:
        gate = asyncio.Event()
        server.on_step = lambda socket: gate.wait()
        lost = asyncio.create_task(steps(grader, *([f"{n}"] for n in range(6))))
        await asyncio.sleep(0.1)
        lost.cancel()
        gate.set()
        assert await steps(grader, *([f"{n}"] for n in range(6))) == [said(0.1, f"{n}") for n in range(6)]
