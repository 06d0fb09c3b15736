"""Polls of a run's coordinator, and stop requests to it. (How often a run is reconciled: tests/cluster/test_reconcile_calls.py.)"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from coordinator_statuses import status

from operator_tests.manifests import UID, cluster_run
from scalerl_api import endpoints
from scalerl_api.status import RunStatus
from scalerl_api.wire import WIRE_VERSION, Ack, Problem, Stop
from scalerl_lifecycle.coordinator_client import CoordinatorRefused, CoordinatorUnreachable
from scalerl_operator.controller.coordinator_poller import (
    Answer,
    CoordinatorPollers,
    Timings,
    _Poller,
    ensure_token,
)
from scalerl_operator.controller.parts import PodView, Run
from scalerl_operator.controller.run_state import RunState
from scalerl_operator.kube.errors import AlreadyExists, Fenced
from scalerl_operator.kube.types import Key
from scalerl_operator.names import PORTS

_addresses = (f"127.{2 + os.getpid() % 250}.{os.getpid() // 250 % 250}.{n}" for n in itertools.count(1))


class Coordinator:
    """Listens where a coordinator's pod does."""

    def __init__(self) -> None:
        self.address = next(_addresses)
        self.asked: list[Any] = []
        """The connections by which it was asked."""
        self.stop_reasons: list[str] = []
        self.answers, self.refuses = True, ""
        self.reason = ""
        self.slow: asyncio.Event | None = None
        """The next answer, which is made at once, comes only then."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PodView]:
        async def ask(request: web.Request) -> web.Response:
            self.asked.append(request.transport)
            if self.refuses:
                body = msgspec.msgpack.encode(Problem(error="wire-version", message=self.refuses))
                return web.Response(status=426, body=body)
            if not self.answers:
                await asyncio.sleep(3600)
            said = msgspec.structs.replace(status([]), stop_reason=self.reason, wall_seconds=len(self.asked))
            if (slow := self.slow) is not None:
                self.slow = None
                await slow.wait()
            return web.Response(body=msgspec.msgpack.encode(said))

        async def request_stop(request: web.Request) -> web.Response:
            self.stop_reasons.append(msgspec.msgpack.decode(await request.read(), type=Stop).reason)
            return web.Response(body=msgspec.msgpack.encode(Ack()))

        app = web.Application()
        app.router.add_get(endpoints.STATUS, ask)
        app.router.add_post(endpoints.STOP, request_stop)
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
        terminating=False,
        finished=False,
        ready=ready,
        creating=False,
        restarts=0,
        problem=None,
        exits=(),
        bad_input=None,
    )


RUN = ("ns", "u")
SELDOM = Timings(answer=120.0, poll=3600.0, ask_again=3600.0)
"""No poll is repeated while a test counts them, nor given up, however slow the machine is."""


class Tokens:
    def __init__(self) -> None:
        self.read, self.again = 0, 0
        self.token = "t"

    async def __call__(self, again: bool) -> str:
        self.read += 1
        self.again += again
        return self.token


@asynccontextmanager
async def coordinators(
    leads: bool = True,
    wake: Callable[[Key], None] = lambda run: None,
    *,
    background: bool = True,
    timings: Timings = SELDOM,
) -> AsyncIterator[CoordinatorPollers]:
    def fence(what: str) -> None:
        if not leads:
            raise Fenced("does not lead", what=what)

    made = CoordinatorPollers(fence, wake, background=background, timings=timings)
    try:
        yield made
    finally:
        await made.close()


async def coordinator_report(
    ours: CoordinatorPollers, run: Key, pods: list[PodView], token: Tokens, seen: object
) -> Answer:
    """The answer that a reconcile gets once it is known."""
    for _ in range(12000):
        if (answer := await ours.poll(run, pods, token, seen)).known:
            return answer
        await asyncio.sleep(0.01)
    raise AssertionError("no answer in 120 s")


async def asked(there: Coordinator, times: int) -> None:
    """Until it has been asked so often from now."""
    until = len(there.asked) + times
    for _ in range(12000):
        if len(there.asked) >= until:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not asked in 120 s")


async def test_reconciles_with_equal_observations_share_a_poll() -> None:
    first, second, token = Coordinator(), Coordinator(), Tokens()
    woken: list[Key] = []
    async with (
        first.serving() as one,
        second.serving() as two,
        coordinators(wake=woken.append) as ours,
    ):
        assert await ours.poll(RUN, [one], token, 1) == Answer(False)
        for _ in range(3):
            assert (await coordinator_report(ours, RUN, [one], token, 1)).status is not None
        assert (len(first.asked), woken) == (1, [RUN])
        assert await ours.poll(RUN, [one], token, 2) == Answer(False), "the trainer may have ended since"
        assert (await coordinator_report(ours, RUN, [one], token, 2)).status is not None
        assert (len(first.asked), len(set(first.asked))) == (2, 1), "by one connection"
        assert await ours.request_stop(RUN, "interrupted")
        assert (len(first.asked), first.stop_reasons) == (3, ["interrupted"]), "what it said before is past"
        pods = [a_pod(first.address, ready=False), two]
        assert (await coordinator_report(ours, RUN, pods, token, 2)).status is not None
        assert (len(first.asked), len(second.asked)) == (3, 1)
        await ours.forget(RUN)
        assert (await coordinator_report(ours, RUN, [two], token, 2)).status is not None
        assert len(set(second.asked)) == 2


async def test_coordinator_is_polled_periodically() -> None:
    there, token = Coordinator(), Tokens()
    async with there.serving() as pod, coordinators(timings=replace(SELDOM, poll=0.05)) as ours:
        await coordinator_report(ours, RUN, [pod], token, 1)
        for _ in range(12000):
            if len(there.asked) >= 4:
                break
            await asyncio.sleep(0.01)
        assert len(there.asked) >= 4


async def test_unready_coordinator_is_not_polled_and_silent_one_delays_none() -> None:
    silent, token = Coordinator(), Tokens()
    silent.answers = False
    async with silent.serving() as pod, coordinators(timings=replace(SELDOM, answer=0.3)) as ours:
        assert await ours.poll(RUN, [], token, 1) == Answer(True)
        assert await ours.poll(RUN, [a_pod(pod.ip, ready=False), a_pod("")], token, 1) == Answer(True)
        assert not await ours.request_stop(RUN, "interrupted")
        assert (silent.asked, token.read) == ([], 0)
        assert await ours.poll(RUN, [pod], token, 1) == Answer(False), "a reconcile waits for no coordinator"
        assert await coordinator_report(ours, RUN, [pod], token, 1) == Answer(True)
        for seen in range(2, 20):
            assert await ours.poll(RUN, [pod], token, seen) == Answer(True), "nor for one that did not answer"
        assert len(silent.asked) == 1


async def test_started_but_unready_coordinator_is_polled() -> None:
    """It may be that it cannot write its journal, and only it can say so."""
    there, token = Coordinator(), Tokens()
    async with there.serving() as pod, coordinators() as ours:
        assert await ours.poll(RUN, [replace(pod, ready=False)], token, 1) == Answer(True)
        started = replace(pod, ready=False, started=True)
        assert (await coordinator_report(ours, RUN, [started], token, 1)).status is not None


def test_silent_coordinator_is_polled_with_jittered_back_off() -> None:
    poller = _Poller(cast(Any, None), "", "", Timings())
    for failures, longest in enumerate((2.0, 4.0, 8.0, 15.0, 15.0), 1):
        poller.failures = failures
        some = {poller.pause() for _ in range(50)}
        assert len(some) > 40
        assert 0.8 * longest <= min(some) < max(some) < longest


async def test_non_leader_may_read_and_reports_nothing() -> None:
    there = Coordinator()
    async with there.serving() as pod, coordinators(leads=False) as ours:
        assert (await coordinator_report(ours, RUN, [pod], Tokens(), 1)).status is not None
        with pytest.raises(Fenced, match="send a stop request to the coordinator of run ns/u"):
            await ours.request_stop(RUN, "interrupted")
        assert there.stop_reasons == []


async def test_refusal_is_kept_and_wakes_the_run_once(caplog: pytest.LogCaptureFixture) -> None:
    there, token = Coordinator(), Tokens()
    there.refuses = "anything"
    async with there.serving() as pod, coordinators(background=False) as ours:
        assert not (await ours.poll(RUN, [pod], token, 1)).known
        for _ in range(3):
            await ours.refresh(RUN)
            refusal = f"GET /v1/status: HTTP 426 wire-version: it does not accept wire version {WIRE_VERSION}"
            assert await ours.poll(RUN, [pod], token, 1) == Answer(True, refusal=refusal)
        assert [r.levelname for r in caplog.records if "wire version" in r.message] == ["WARNING"]
        assert token.again == 3, "the token may be the reason: it is read again after each refusal"
        assert await ours.poll(RUN, [pod], token, 1) == Answer(True, refusal=refusal)
        assert token.again == 3
        there.refuses = ""
        await ours.refresh(RUN)
        answer = await ours.poll(RUN, [pod], token, 1)
        assert answer.status is not None
        assert answer.refusal == ""
        there.refuses = "no"
        await ours.refresh(RUN)
        answer = await ours.poll(RUN, [pod], token, 1)
        assert answer == Answer(True, refusal=refusal)
        assert await ours.poll(RUN, [], token, 1) == Answer(True), "one that is gone says nothing"


async def test_another_token_is_tried_at_once() -> None:
    there, token = Coordinator(), Tokens()
    there.refuses = "the run's bearer token is missing or wrong"
    async with there.serving() as pod, coordinators() as ours:
        assert (await coordinator_report(ours, RUN, [pod], token, 1)).status is None
        there.refuses, token.token = "", "another"
        assert await ours.poll(RUN, [pod], token, 1) == Answer(False)
        assert (await coordinator_report(ours, RUN, [pod], token, 1)).status is not None


async def test_forty_silent_coordinators_delay_no_other() -> None:
    silent, there, token = Coordinator(), Coordinator(), Tokens()
    silent.answers = False
    timings = replace(SELDOM, answer=3600.0)
    async with silent.serving() as no_word, there.serving() as pod, coordinators(timings=timings) as ours:
        for n in range(40):
            assert await ours.poll(f"silent-{n}", [no_word], token, 1) == Answer(False)
        assert (await coordinator_report(ours, RUN, [pod], token, 1)).status is not None
        for n in range(40):
            assert await ours.poll(f"silent-{n}", [no_word], token, 1) == Answer(False), "it is asked still"


async def test_late_response_of_an_earlier_poll_is_dropped() -> None:
    there, token = Coordinator(), Tokens()
    async with there.serving() as pod, coordinators(background=False) as ours:
        await ours.poll(RUN, [pod], token, 1)
        there.slow = late = asyncio.Event()
        earlier = asyncio.create_task(ours.refresh(RUN))
        await asked(there, 1)
        there.reason = "interrupted"
        await ours.refresh(RUN)
        late.set()
        await earlier
        answer = await ours.poll(RUN, [pod], token, 1)
        assert answer.status is not None
        assert answer.status.stop_reason == "interrupted"


async def test_unawaited_poll_wakes_the_run_only_on_change() -> None:
    there, token, woken = Coordinator(), Tokens(), list[str]()
    timings = replace(SELDOM, poll=0.02, ask_again=0.02)
    async with there.serving() as pod, coordinators(wake=woken.append, timings=timings) as ours:
        await coordinator_report(ours, RUN, [pod], token, 1)
        woken.clear()
        await asked(there, 5)
        assert woken == [], "how long it has run is always another"
        there.reason = "maxSteps"
        await asked(there, 2)
        assert woken
        await coordinator_report(ours, RUN, [pod], token, 1)
        await asked(there, 2)
        woken.clear()
        await asked(there, 5)
        assert woken == []
        assert await ours.poll(RUN, [pod], token, 2) == Answer(False)
        await asked(there, 2)
        assert woken, "a reconcile waits, for the same"


async def test_secret_deleted_meanwhile_is_no_taken_name() -> None:
    class Api:
        """The garbage collector deletes an earlier run's Secret between two calls."""

        async def create(self, obj: Any) -> Any:
            raise AlreadyExists("it exists")

        async def get(self, *_: Any) -> None:
            return None

    state = RunState()
    run = SimpleNamespace(
        deleted=False, state=state, objects={}, namespace="n", name="a", uid=UID, unix_seconds=0.0
    )
    with pytest.raises(AlreadyExists):
        await ensure_token(cast(Any, Api()), cast(Any, run), cluster_run())
    assert not state.token


async def test_secret_of_an_earlier_run_is_said_to_be_one() -> None:
    owner = {"kind": "ScaleRLRun", "name": "a", "uid": "earlier"}
    live = {"kind": "Secret", "metadata": {"name": "a-token", "ownerReferences": [owner]}}

    class Api:
        async def create(self, obj: Any) -> Any:
            raise AlreadyExists("it exists")

        async def get(self, *_: Any) -> Any:
            return live

    run = Run({"metadata": {"name": "a", "namespace": "n", "uid": UID}}, {}, 0.0, RunStatus())
    problem = await ensure_token(cast(Any, Api()), run, cluster_run())
    assert problem is not None
    assert problem.message == "Secret a-token is of an earlier run of this name, and still being removed"


async def test_decisions_go_from_the_leader_to_a_ready_coordinator() -> None:
    there = Coordinator()
    async with there.serving() as pod, coordinators(leads=False) as ours:
        with pytest.raises(CoordinatorUnreachable, match="no pod"):
            await ours.decisions(RUN, 0)
        await coordinator_report(ours, RUN, [pod], Tokens(), 1)
        with pytest.raises(CoordinatorRefused, match="record a decision of run ns/u"):
            await ours.record_decision(RUN, 0, b"{}\n")
        with pytest.raises(CoordinatorRefused, match=r"GET /v1/decisions\?offset=0: HTTP 404"):
            await ours.decisions(RUN, 0)
