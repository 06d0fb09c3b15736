"""Servers of environments that are down, slow or wrong: episodes wait, and no step counts twice."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from aiohttp import web
from free_port import free_port
from openenv_episodes import grading, options, said, steps
from openenv_stand_in import Echo, OpenEnvServer, observed, serving

from scalerl_tasks import Graded, Prompt, Verdict
from scalerl_tasks.environments.protocol import Message
from scalerl_tasks.environments.server_grader import ServerGrader


def _status(status: int, text: str = "", kind: str = "text/plain") -> Any:
    return lambda server: setattr(
        server, "refuses", web.Response(status=status, text=text, content_type=kind)
    )


def _step(function: Any) -> Any:
    return lambda server: setattr(server, "on_step", function)


async def _hang(socket: web.WebSocketResponse) -> None:
    await asyncio.sleep(3600)


async def _close(socket: web.WebSocketResponse) -> None:
    await socket.close()


async def _garbage(socket: web.WebSocketResponse) -> None:
    await socket.send_str('{"type": "observation", "data": {"observation": 5}}')


async def _nan(socket: web.WebSocketResponse) -> None:
    await socket.send_str('{"type": "observation", "data": {"observation": {}, "reward": NaN}}')


def _raise(socket: web.WebSocketResponse) -> None:
    raise ValueError("secret")


def _version(server: OpenEnvServer) -> None:
    server.schema["action"]["properties"]["more"] = {"type": "string"}


FAULTS = {
    "500": (_status(500, "Traceback"), "answered /schema with status 500"),
    "html": (_status(200, "<html></html>", "text/html"), "answered HTML, not a schema of OpenEnv"),
    "token": (
        lambda server: setattr(server, "token", "other"),
        "status 401; its token is the variable ENVIRONMENT_TOKEN",
    ),
    "hangs": (_step(_hang), "did not answer a step within 1 s (environment.turnTimeoutSeconds)"),
    "closes": (_step(_close), "closed a session"),
    "garbage": (_step(_garbage), "answered a step with something else than OpenEnv's messages"),
    "nan": (_step(_nan), "answered a step with something else than OpenEnv's messages"),
    "raises": (_step(_raise), "failed in a step; see its log"),
    "version": (_version, "has other actions or observations than before: another version?"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_server_that_fails_makes_episodes_wait(fault, caplog):
    break_it, says = FAULTS[fault]
    calls = 0

    def waits() -> None:
        nonlocal calls
        calls += 1

    hangs = fault == "hangs"
    seconds = 1.0 if hangs else 120.0
    async with serving() as (server, url), grading(options(url, timeout_seconds=seconds)) as grader:
        assert await steps(grader, ["a"], ["b"]) == [said(0.1, "a"), said(0.1, "b")]
        break_it(server)
        await server.close_sessions()
        waiting = asyncio.create_task(steps(grader, ["a", "cc"], ["b", "ddd"], on_graded=waits))
        # A busy machine may miss another limit first.
        while not (says in grader.problem and calls > 20):
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.01)
        assert says in caplog.text or hangs
        assert "secret" not in grader.problem + caplog.text
        assert "Traceback" not in caplog.text
        server.refuses, server.on_step, server.token, server.schema = None, None, "", OpenEnvServer().schema
        assert await waiting == [said(0.2, "cc"), said(0.3, "ddd")]
        assert (grader.problem, grader.counts.errors) == ("", 0)


@pytest.mark.parametrize(
    ("where", "says"),
    [("_session", "opened no session within 0.2 s"), ("_answer", "did not answer a reset within 0.2 s")],
)
async def test_time_limit_holds_for_openings_and_resets(where, says, monkeypatch):
    answers = getattr(OpenEnvServer, where)
    hangs = True

    async def slow(*given: Any) -> Any:
        if hangs:
            await asyncio.sleep(3600)
        return await answers(*given)

    monkeypatch.setattr(OpenEnvServer, where, slow)
    async with serving() as (_, url), grading(options(url, timeout_seconds=0.2)) as grader:
        waiting = asyncio.create_task(steps(grader, ["a"]))
        while says not in grader.problem:
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.01)
        hangs = False
        assert await waiting == [said(0.1, "a")]
        assert (grader.problem, grader.counts.errors) == ("", 0)


async def test_token_is_sent(monkeypatch):
    monkeypatch.setenv("ENVIRONMENT_TOKEN", "secret")
    async with serving() as (server, url), grading(options(url)) as grader:
        server.token = "secret"
        assert await steps(grader, ["a"]) == [said(0.1, "a")]


async def test_server_that_is_not_there_yet():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with grading(options(url)) as grader:
        begun = time.monotonic()
        waiting = asyncio.create_task(steps(grader, ["a"], ["a", "b"]))
        while not grader.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert f"the environment server {url} does not answer" in grader.problem
        await asyncio.sleep(0.3)
        async with serving(port=port):
            found = await waiting
            assert found == [said(0.1, "a"), said(0.1, "b")]
            assert [0.3 <= one.waited <= time.monotonic() - begun for one in found] == [True] * 2
            (found,) = await steps(grader, ["c"])
            assert found.waited == 0.0


async def test_server_that_is_not_repeatable_is_no_outage():
    class Random(Echo):
        def step(self, action):
            if action["message"] == "bad":
                raise ValueError
            return observed({"echoed_message": f"{random.random()}"}, 0.5)

    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Random
        await steps(grader, ["a"])
        async with asyncio.timeout(120):
            (bad,) = await steps(grader, ["bad"])
        assert "failed in a step; see its log" in (bad.error or "")


async def test_failures_beside_answered_episodes_are_not_probed(monkeypatch):
    class Raises(Echo):
        def step(self, action):
            if action["message"].startswith("bad"):
                raise ValueError
            return super().step(action)

    probes, works = 0, ServerGrader._works

    async def counted(self: ServerGrader) -> bool:
        nonlocal probes
        probes += 1
        await steps(self, [f"other {probes}"])  # answered while the other failures wait for the lock
        return await works(self)

    all_bad, answer = asyncio.Barrier(20), OpenEnvServer._answer

    async def together(self: OpenEnvServer, socket: Any, environment: Any, message: dict[str, Any]) -> Any:
        if str(message["data"].get("message")).startswith("bad"):
            await all_bad.wait()  # a slow machine opens sessions for longer than a probe takes
        return await answer(self, socket, environment, message)

    monkeypatch.setattr(ServerGrader, "_works", counted)
    monkeypatch.setattr(OpenEnvServer, "_answer", together)
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Raises
        await steps(grader, ["a"])
        found = await steps(grader, *([f"bad {n}"] for n in range(20)))
        assert all(one.error for one in found)
        assert probes <= 4, "one for each round of tries"


async def test_no_step_counts_twice_when_connections_are_cut():
    """Rewards count the steps of a session: an episode that were continued in a wrong session would have another one."""

    class Counting(Echo):
        def step(self, action):
            self.steps += 1
            self.messages = (
                [*getattr(self, "messages", []), action["message"]] if self.steps > 1 else [action["message"]]
            )
            return observed({"echoed_message": "|".join(self.messages)}, self.steps / 8, self.steps == 8)

    draw = random.Random(3)
    async with (
        serving() as (server, url),
        grading(options(url, sessions=12)) as grader,
    ):
        server.environment = Counting

        async def episode(number: int) -> None:
            prompt, replies = Prompt(f"p{number % 5}", "", ""), []
            for turn in range(1, 9):
                replies.append(f"{number}.{turn}")
                (found,) = await steps(grader, replies, prompt=prompt)
                expected = () if turn == 8 else (Message("|".join(replies)),)
                assert found == Graded(Verdict(turn / 8), None, expected)
                await asyncio.sleep(draw.random() * 0.01)

        async def cut(socket: web.WebSocketResponse) -> None:
            if draw.random() < 1 / 200:
                await server.close_sessions()

        server.on_step = cut
        await asyncio.gather(*(episode(number) for number in range(60)))
        assert server.opened > 24
        assert grader.counts.graded == 480
        assert grader.counts.errors == 0
