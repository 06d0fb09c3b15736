"""environment.url: sessions, episodes that are played again, a server that is down, and one that answers something else."""

from __future__ import annotations

import asyncio
import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from free_port import free_port
from openenv_stand_in import Echo, OpenEnvServer, observed, serving

from scalerl_api.spec import TaskSpec
from scalerl_tasks import Graded, Prompt, Verdict, VerifierError, open_grading_pool
from scalerl_tasks.environments.openenv_schema import Schema
from scalerl_tasks.environments.openenv_server import EnvironmentServer
from scalerl_tasks.environments.protocol import Message, write_replies
from scalerl_tasks.environments.server import ServerGrader
from scalerl_tasks.environments.timings import Timings
from scalerl_tasks.open_graders import _environment_server, grading_digest

TIMINGS = Timings(first_back_off=0.02, max_back_off=0.05, waiting=0.02)
PROMPT = Prompt("row-7", "Say it.", "4", metadata={"level": 3})


def said(score: float, text: str) -> Graded:
    return Graded(Verdict(score), None, (Message(text),))


async def steps(
    grader: ServerGrader, *episodes: list[str], prompt: Prompt = PROMPT, **given: Any
) -> list[Graded]:
    found = await grader.score_group(prompt, [write_replies(episode) for episode in episodes], **given)
    return [
        replace(one, verdict=one.verdict and Verdict(round(one.score, 6), one.verdict.parts)) for one in found
    ]


def options(url: str, **changes: Any) -> EnvironmentServer:
    return EnvironmentServer(url, **{"timeout_seconds": 2.0, **changes})


def grading(server: EnvironmentServer, **seconds: float) -> ServerGrader:
    return ServerGrader(server, replace(TIMINGS, **seconds))


# --- episodes -------------------------------------------------------------------------------------


async def test_session_is_that_of_the_replies():
    arguments: list[dict[str, Any]] = []

    class Remembers(Echo):
        def reset(self, given):
            arguments.append(given)
            return super().reset(given)

    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Remembers
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
    async with serving() as (server, url), grading(options(url), ended=0.1, idle=10.0) as grader:
        server.environment = type("Two", (Echo,), {"turns": 2})
        await steps(grader, ["over"], ["on"])
        assert len(server.sessions) == 2
        await steps(grader, ["over", "b"])
        async with asyncio.timeout(9):
            while len(server.sessions) == 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await steps(grader, ["on", "b"])
        assert (server.opened, server.resets) == (2, 2), "that of an episode is there for its next step"
        async with asyncio.timeout(120):
            while server.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
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
        async with asyncio.timeout(10):
            for at in range(20):
                assert await steps(second, *([f"{at}.{n}"] for n in range(8)))
        assert not any(one.done() for one in busy)
        assert first.counts.errors == second.counts.errors == 0
        for one in busy:
            one.cancel()


async def test_grader_that_fills_a_server_alone_has_its_sessions_nearly_always():
    async with (
        serving() as (server, url),
        grading(options(url, sessions=16), full=0.3, spare=0.06, opening=0.03) as grader,
    ):
        server.capacity = 4
        server.on_step = lambda socket: asyncio.sleep(0.001)
        episodes, full = [[f"{number}"] for number in range(16)], list[bool]()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
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
    class Told(Echo):
        def step(self, action):
            text = "|".join(str(self.arguments[name]) for name in ("prompt", "answer", "level"))
            return observed({"echoed_message": text}, 0.5)

    prompts = [
        Prompt("row-1", text, answer, metadata={"level": level})
        for text, answer, level in (("p", "a", 1), ("q", "a", 1), ("p", "b", 1), ("p", "a", 2))
    ]
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Told
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


# --- a server that is down ------------------------------------------------------------------------


def _status(status: int, text: str = "", kind: str = "text/plain") -> Any:
    return lambda server: setattr(
        server, "refuses", web.Response(status=status, text=text, content_type=kind)
    )


def _step(function: Any) -> Any:
    return lambda server: setattr(server, "on_step", function)


async def _hang(socket: web.WebSocketResponse) -> None:
    await asyncio.sleep(30)


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

    async with serving() as (server, url), grading(options(url, timeout_seconds=1.0)) as grader:
        assert await steps(grader, ["a"], ["b"]) == [said(0.1, "a"), said(0.1, "b")]
        break_it(server)
        await server.close_sessions()
        waiting = asyncio.create_task(steps(grader, ["a", "cc"], ["b", "ddd"], on_graded=waits))
        # A busy machine may miss another limit first.
        while not (says in grader.problem and calls > 20):
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.01)
        assert says in caplog.text
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
            await asyncio.sleep(30)
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


# --- an episode that fails ------------------------------------------------------------------------


class Answers(Echo):
    """Answers the second reply of an episode whose first is ``bad`` as told."""

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

    monkeypatch.setattr(ServerGrader, "_works", counted)
    async with serving() as (server, url), grading(options(url)) as grader:
        server.environment = Raises
        server.on_step = lambda socket: asyncio.sleep(0.05)
        await steps(grader, ["a"])
        found = await steps(grader, *([f"bad {n}"] for n in range(20)))
        assert all(one.error for one in found)
        assert probes <= 4, "one for each round of tries"


async def test_message_that_answers_nothing_ends_the_session():
    async with serving() as (server, url), grading(options(url)) as grader:
        assert await steps(grader, ["ab"]) == [said(0.2, "ab")]
        (socket,) = server.sessions
        await socket.send_str('{"type": "observation", "data": {"observation": {"echoed_message": "no"}}}')
        await asyncio.sleep(0.05)
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


# --- kills ----------------------------------------------------------------------------------------


async def test_no_step_counts_twice_when_connections_are_cut():
    """Rewards count the steps of a session: an episode that were continued in a wrong session would have another one."""

    class Counting(Echo):
        def step(self, action):
            self.steps += 1
            self.heard = (
                [*getattr(self, "heard", []), action["message"]] if self.steps > 1 else [action["message"]]
            )
            return observed({"echoed_message": "|".join(self.heard)}, self.steps / 8, self.steps == 8)

    draw = random.Random(3)
    async with (
        serving() as (server, url),
        grading(options(url, timeout_seconds=30.0, sessions=12)) as grader,
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


# --- the section of the spec ----------------------------------------------------------------------


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
