"""Asking and telling a run's coordinator. (How often a run is looked at: tests/cluster/test_reconcile_calls.py.)"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from operator_tests.scaling import status
from scalerl_api import endpoints
from scalerl_api.wire import Ack, Problem, Stop
from scalerl_operator.cluster import hearing
from scalerl_operator.cluster.errors import Fenced
from scalerl_operator.cluster.hearing import Coordinators
from scalerl_operator.cluster.names import PORTS
from scalerl_operator.cluster.observed import PodView

_addresses = (f"127.{2 + os.getpid() % 250}.{os.getpid() // 250 % 250}.{n}" for n in itertools.count(1))


class Coordinator:
    """Listens where a coordinator's pod does."""

    def __init__(self) -> None:
        self.address = next(_addresses)
        self.asked: list[Any] = []
        """The connections by which it was asked."""
        self.told: list[str] = []
        self.answers, self.refuses = True, ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PodView]:
        async def ask(request: web.Request) -> web.Response:
            self.asked.append(request.transport)
            if self.refuses:
                body = msgspec.msgpack.encode(Problem(error="wire-version", message=self.refuses))
                return web.Response(status=426, body=body)
            if not self.answers:
                await asyncio.sleep(60)
            return web.Response(body=msgspec.msgpack.encode(status([])))

        async def tell(request: web.Request) -> web.Response:
            self.told.append(msgspec.msgpack.decode(await request.read(), type=Stop).reason)
            return web.Response(body=msgspec.msgpack.encode(Ack()))

        app = web.Application()
        app.router.add_get(endpoints.STATUS, ask)
        app.router.add_post(endpoints.STOP, tell)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, self.address, PORTS["http"]).start()
        try:
            yield a_pod(self.address)
        finally:
            await runner.cleanup()


def a_pod(ip: str, *, ready: bool = True) -> PodView:
    return PodView(
        name="c-0",
        uid="p",
        role="coordinator",
        job="",
        ip=ip,
        created=0.0,
        leaving=False,
        over=False,
        ready=ready,
        creating=False,
        restarts=0,
        problem=None,
        ends=(),
        bad_input=None,
    )


class Tokens:
    def __init__(self) -> None:
        self.read = 0

    async def __call__(self) -> str:
        self.read += 1
        return "t"


@asynccontextmanager
async def coordinators(leads: bool = True) -> AsyncIterator[Coordinators]:
    def fence(what: str) -> None:
        if not leads:
            raise Fenced("does not lead", what=what)

    made = Coordinators(fence)
    try:
        yield made
    finally:
        await made.close()


async def test_looks_share_a_connection_until_the_pod_is_another() -> None:
    first, second, token = Coordinator(), Coordinator(), Tokens()
    async with first.serving() as one, second.serving() as two, coordinators() as ours:
        for _ in range(3):
            assert await ours.hear("u", [one], token) is not None
        assert await ours.tell("u", [one], token, "interrupted")
        assert (len(first.asked), len(set(first.asked)), first.told) == (3, 1, ["interrupted"])
        assert token.read == 1
        assert await ours.hear("u", [a_pod(first.address, ready=False), two], token) is not None
        assert (len(first.asked), len(second.asked), token.read) == (3, 1, 2)
        await ours.forget("u")
        assert await ours.hear("u", [two], token) is not None
        assert len(set(second.asked)) == 2


async def test_one_that_cannot_answer_is_not_asked_and_one_that_does_not_costs_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hearing, "ANSWER_SECONDS", 0.3)
    silent, token = Coordinator(), Tokens()
    silent.answers = False
    async with silent.serving() as pod, coordinators() as ours:
        assert await ours.hear("u", [], token) is None
        assert await ours.hear("u", [a_pod(pod.ip, ready=False), a_pod("")], token) is None
        assert not await ours.tell("u", [], token, "interrupted")
        assert (silent.asked, token.read) == ([], 0)
        began = time.monotonic()
        assert await ours.hear("u", [pod], token) is None
        assert time.monotonic() - began < 5.0
        assert len(silent.asked) == 1


async def test_one_that_has_started_and_is_not_ready_is_asked() -> None:
    """It may be that it cannot write its journal, and only it can say so."""
    there = Coordinator()
    async with there.serving() as pod, coordinators() as ours:
        assert await ours.hear("u", [replace(pod, ready=False)], Tokens()) is None
        assert await ours.hear("u", [replace(pod, ready=False, started=True)], Tokens()) is not None


async def test_who_does_not_lead_may_ask_and_tells_nothing() -> None:
    there = Coordinator()
    async with there.serving() as pod, coordinators(leads=False) as ours:
        assert await ours.hear("u", [pod], Tokens()) is not None
        with pytest.raises(Fenced, match="tell the coordinator of run u"):
            await ours.tell("u", [pod], Tokens(), "interrupted")
        assert there.told == []


async def test_why_it_was_not_listened_to_is_kept_and_is_news_once(caplog: pytest.LogCaptureFixture) -> None:
    there, token = Coordinator(), Tokens()
    there.refuses = "you speak wire version 2, the coordinator 1"
    async with there.serving() as pod, coordinators() as ours:
        for _ in range(3):
            assert await ours.hear("u", [pod], token) is None
            assert (
                ours.refusal("u") == "GET /v1/status: HTTP 426: you speak wire version 2, the coordinator 1"
            )
        assert [r.levelname for r in caplog.records if "wire version" in r.message] == ["WARNING"]
        there.refuses = ""
        assert await ours.hear("u", [pod], token) is not None
        assert ours.refusal("u") == ""
        there.refuses = "no"
        assert await ours.hear("u", [pod], token) is None
        assert await ours.hear("u", [], token) is None
        assert ours.refusal("u") == "", "one that is gone says nothing"
