"""verifier.http: batches, a service that is down, and one that answers something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from scalerl_tasks import Graded, Prompt, Verdict
from scalerl_tasks.environments.timings import Timings
from scalerl_tasks.grading.http_grader import HttpGrader, RewardService

PROMPT = Prompt("row-7", "2 + 2?", "4", metadata={"level": 3})
Handler = Callable[[list[dict[str, Any]]], Awaitable[web.Response] | web.Response]


class Service:
    """A service whose ``handler`` can be replaced at any time."""

    def __init__(self) -> None:
        self.handler: Handler = right
        self.requests: list[list[dict[str, Any]]] = []
        self.tokens: set[str] = set()
        self.running = self.most = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("authorization", ""))
        rows = json.loads(await request.read())["completions"]
        self.requests.append(rows)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self.handler(rows)
            return answer if isinstance(answer, web.Response) else await answer
        finally:
            self.running -= 1


def scores(values: list[Any]) -> web.Response:
    return web.json_response({"scores": values})


def right(rows: list[dict[str, Any]]) -> web.Response:
    return scores([float(row["completion"] == row["answer"]) for row in rows])


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[tuple[Service, str]]:
    service, app = Service(), web.Application()
    app.router.add_post("/score", service.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield service, f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()


def grading(url: str, **service: Any) -> HttpGrader:
    """A grader with short pauses."""
    return HttpGrader(
        RewardService(url, **service), Timings(first_back_off=0.02, max_back_off=0.05, waiting=0.02)
    )


async def test_completions_of_groups_share_requests(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    async with serving() as (service, url), grading(url, batch=8, concurrency=2) as grader:
        found = await asyncio.gather(*(grader.score_group(PROMPT, ["4", "5", "4"]) for _ in range(10)))
        assert found == [[Graded(Verdict(1.0)), Graded(Verdict(0.0)), Graded(Verdict(1.0))]] * 10
        assert len(service.requests) < 10
        assert max(map(len, service.requests)) == 8
        assert service.most <= 2
        assert service.tokens == {"Bearer secret"}
        assert service.requests[0][0] == {
            "id": "row-7",
            "messages": [{"role": "user", "content": "2 + 2?"}],
            "answer": "4",
            "metadata": {"level": 3},
            "completion": "4",
            "index": 0,
        }


async def test_range_null_and_wrong_scores():
    async with serving() as (service, url), grading(url, range=(-1.0, 1.0)) as grader:
        service.handler = lambda rows: scores([-1, 0.5, None, 3])
        low, high, none, wrong = await grader.score_group(PROMPT, ["a", "b", "c", "d"])
    assert (low, high) == (Graded(Verdict(0.0, {"reward": -1.0})), Graded(Verdict(0.75, {"reward": 0.5})))
    assert none == Graded(None, "not applicable: the verifier gave None")
    assert wrong.verdict is None
    assert "/score gave 3, which is not in [-1, 1] (verifier.range)" in (wrong.error or "")


def _html(rows: list[dict[str, Any]]) -> web.Response:
    return web.Response(text="<html>no</html>", content_type="text/html")


async def _slow(rows: list[dict[str, Any]]) -> web.Response:
    await asyncio.sleep(1)
    return right(rows)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (lambda rows: web.Response(status=500, text="Traceback"), "answered with status 500"),
        (lambda rows: web.Response(status=401), "status 401; its token is the variable REWARD_TOKEN"),
        (
            lambda rows: web.Response(status=302, headers={"location": "http://127.0.0.1:1/"}),
            "with status 302",
        ),
        (_html, 'answered HTML, not {"scores": [numbers or null]}'),
        (lambda rows: web.json_response({"rewards": []}), "answered something else"),
        (lambda rows: web.Response(text='{"scores": [NaN]}'), "answered something else"),
        (lambda rows: scores([0.5] * (len(rows) + 1)), "answered 3 scores for 2 completions"),
        (_slow, "did not answer 2 completions within 0.5 s; raise verifier.timeoutSeconds"),
        (lambda rows: web.Response(body=b" " * (3 << 20)), "the answer has more than"),
    ],
    ids=["500", "401", "redirect", "html", "keys", "nan", "too many", "slow", "large"],
)
async def test_service_that_fails_makes_groups_wait(handler, says, caplog):
    calls = 0

    def waits() -> None:
        nonlocal calls
        calls += 1

    async with (
        serving() as (service, url),
        grading(url, timeout_seconds=0.5 if handler is _slow else 120) as grader,
    ):
        service.handler = handler
        group = asyncio.create_task(grader.score_group(PROMPT, ["4", "5"], on_graded=waits))
        while not (grader.problem and calls > 3):
            assert not group.done()
            await asyncio.sleep(0.01)
        assert says in caplog.text
        assert "Traceback" not in grader.problem
        service.handler = right
        found = await group
        assert [one.score for one in found] == [1.0, 0.0]
        assert [one.waited > 0 for one in found] == [True, True]
        assert [one.waited for one in await grader.score_group(PROMPT, ["4"])] == [0.0]
        assert grader.problem == ""
        assert grader.counts.errors == 0


async def test_service_that_is_not_there_yet():
    async with serving() as (_, url):
        port = int(url.split(":")[2].partition("/")[0])
    async with grading(url) as grader:
        group = asyncio.create_task(grader.score_group(PROMPT, ["4"]))
        while not grader.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert f"the reward service {url} does not answer" in grader.problem
        async with serving(port):
            assert [one.score for one in await group] == [1.0]


async def test_completion_that_the_service_fails_on_is_the_only_one_without_a_verdict():
    def broken(rows: list[dict[str, Any]]) -> web.Response:
        return web.Response(status=500) if any(row["completion"] == "bad" for row in rows) else right(rows)

    async with serving() as (service, url), grading(url, retries=2) as grader:
        service.handler = broken
        found = await grader.score_group(PROMPT, ["4", "bad", "5"])
    assert [one.score for one in found] == [1.0, 0.0, 0.0]
    assert [one.verdict is None for one in found] == [False, True, False]
    assert "answered with status 500 (prompt row-7)" in (found[1].error or "")
    assert grader.counts.errors == 1


@pytest.mark.parametrize("before", [False, True], ids=["from the start", "later"])
async def test_service_whose_model_is_down_makes_groups_wait(before):
    """It answers a request without completions, as examples/judge does, and no other."""

    def down(rows: list[dict[str, Any]]) -> web.Response:
        return web.Response(status=500 if rows else 200, text='{"scores": []}')

    async with serving() as (service, url), grading(url, retries=2) as grader:
        if before:
            await grader.score_group(PROMPT, ["5"])
        service.handler = down
        group = asyncio.create_task(grader.score_group(PROMPT, ["4", "5"]))
        while len(service.requests) < 12 and not group.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not group.done()
        assert "answered with status 500" in grader.problem
        service.handler = right
        assert [one.score for one in await group] == [1.0, 0.0]
        assert grader.counts.errors == 0


async def test_completion_that_the_service_refuses():
    def refuses(rows: list[dict[str, Any]]) -> web.Response:
        return web.Response(status=422) if any(row["completion"] == "bad" for row in rows) else right(rows)

    async with serving() as (service, url), grading(url, retries=50) as grader:
        service.handler = refuses
        found = await grader.score_group(PROMPT, ["4", "bad"])
        assert [one.verdict is None for one in found] == [False, True]
        assert grader.problem == ""
        assert len(service.requests) <= 4


async def test_cancelled_group_does_not_disturb_others():
    async with serving() as (service, url), grading(url, batch=1, concurrency=1) as grader:
        gate = asyncio.Event()

        async def wait(rows: list[dict[str, Any]]) -> web.Response:
            await gate.wait()
            return right(rows)

        service.handler = wait
        lost = asyncio.create_task(grader.score_group(PROMPT, ["4"] * 5))
        kept = asyncio.create_task(grader.score_group(PROMPT, ["4"]))
        await asyncio.sleep(0.05)
        lost.cancel()
        gate.set()
        assert [one.score for one in await kept] == [1.0]
        assert len(service.requests) <= 3
