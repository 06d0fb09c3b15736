"""A run's coordinator: its last status, which is polled in the background, stop requests, and the Secret to authenticate with.

One poller a run keeps the coordinator's last answer. A reconcile reads that and never waits for it, so runs whose
coordinators do not answer delay no others. An answer counts for what was observed of the run's pods before it was requested:
whether a trainer's end was the run's end is decided by an answer that is younger than the end.

The operator may not watch Secrets: it reads this one by name, now and then, and when a pod or the coordinator gives a reason.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from scalerl_api.conditions import Reason
from scalerl_api.wire import DecisionLines, Status
from scalerl_operator.build import secret
from scalerl_operator.controller.conditions import update_trouble
from scalerl_operator.controller.observe import PodView
from scalerl_operator.controller.refusals import refused
from scalerl_operator.controller.run_context import RunContext
from scalerl_operator.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnreachable
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.names import PORTS, TOKEN_KEY, Names
from scalerl_operator.policy.lifecycle import ASK_AGAIN_SECONDS, POLL_SECONDS
from scalerl_operator.policy.problems import Problem
from scalerl_operator.workloads import Role

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 3.0
LONGEST_PAUSE_SECONDS: Final = 15.0
"""Between two questions to a coordinator that does not answer; the first pause is of two seconds."""
OLDEST_ANSWER_SECONDS: Final = 30.0
"""An older one says nothing of now: the poller is late, as on a machine that was suspended."""
_SOONER: Final = (0.8, 0.95)
"""Factors on a pause: a poll comes somewhat before the run's next reconcile, and pollers do not fall into step."""
CHECK_SECONDS: Final = 120.0
"""Between two reads of a run's Secret."""


@dataclass(frozen=True)
class Answer:
    """One poll.

    known: it was requested after what is observed now; if not, the run is woken as soon as there is such an answer.
    status: None where the coordinator does not answer. refusal: why it refused the last request; empty where it did not.
    """

    known: bool
    status: Status | None = None
    refusal: str = ""


class _Poller:
    """One run's coordinator. answer: the last one; None: it does not answer."""

    def __init__(self, client: CoordinatorClient, url: str, token: str) -> None:
        self.client, self.url, self.token = client, url, token
        self.answer: Status | None = None
        self.refusal = ""
        self.reread = False
        """The token was read again since the last refusal."""
        self.failures = 0
        self.at = 0.0
        self.seen: object = None
        self.answered_for: object = self
        """What was seen when it was last asked; first nothing that anybody can see."""
        self.asked = self.newest = 0
        """Number of polls so far, and of the last one that counts: a background poll and one by a reconcile may overlap."""
        self.given: object = None
        """:meth:`significant` as the last reconcile got it; None: that reconcile waits for an answer."""
        self.now = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def known(self) -> bool:
        # Of one that does not answer, the next answer is as far away as it is.
        return self.failures > 0 or self.answered_for == self.seen

    def current(self) -> Status | None:
        fresh = time.monotonic() - self.at <= OLDEST_ANSWER_SECONDS
        return self.answer if fresh else None

    def significant(self) -> object:
        """The part of an answer whose change wakes the run. The rest changes all the time and waits for the next reconcile."""
        now = self.current()
        said = None if now is None else (now.phase, now.stop_reason, len(now.points), now.journal_error)
        return said, self.refusal

    def pause(self) -> float:
        """Seconds to the next question."""
        if self.failures:
            longest = min(ASK_AGAIN_SECONDS * 2.0 ** min(self.failures - 1, 10), LONGEST_PAUSE_SECONDS)
        else:
            ending = self.answer is not None and bool(self.answer.stop_reason)
            longest = ASK_AGAIN_SECONDS if ending else POLL_SECONDS
        return longest * random.uniform(*_SOONER)


class CoordinatorPollers:
    """One poller a run, kept between reconciles.

    fence: called before a stop request; raises where this process may not act.
    wake: called with the name of a run when an answer has come that a reconcile waits for, or that differs in what is
        significant.
    background: ask without being asked to; else only :meth:`ask` does.
    """

    def __init__(
        self,
        fence: Callable[[str], None],
        wake: Callable[[Key], None] = lambda run: None,
        *,
        background: bool = True,
    ) -> None:
        self._fence = fence
        self._wake = wake
        self._background = background
        self._pollers: dict[Key, _Poller] = {}

    async def forget(self, run: Key) -> None:
        """Stops polling a run's coordinator."""
        held = self._pollers.pop(run, None)
        if held is None:
            return
        try:
            if held.task is not None:
                held.task.cancel()
                await asyncio.gather(held.task, return_exceptions=True)
        finally:
            await held.client.aclose()

    async def close(self) -> None:
        for run in list(self._pollers):
            await self.forget(run)

    async def poll(
        self, run: Key, pods: Sequence[PodView], token: Callable[[bool], Awaitable[str]], seen: object
    ) -> Answer:
        """The coordinator's last answer. ``seen``: what was observed of the run beside it, comparable.

        ``token(again)``: the run's; ``again``: the one known was refused, so it is to be read again.
        """
        held = await self._poller(run, pods, token)
        if held is None:
            return Answer(True)
        if seen != held.seen:
            held.seen = seen
            held.now.set()
        held.given = held.significant() if held.known else None
        return Answer(held.known, held.current() if held.known else None, held.refusal)

    async def ask(self, run: Key) -> None:
        """Ask now; the answer, or that there is none, is the last one, unless one that was asked for later has come."""
        held = self._pollers.get(run)
        if held is None:
            return
        held.asked += 1
        seen, number = held.seen, held.asked
        answer: Status | CoordinatorUnreachable | CoordinatorRefused
        try:
            answer = await held.client.status()
        except (CoordinatorUnreachable, CoordinatorRefused) as problem:
            answer = problem
        if number < held.newest:
            return
        held.newest = number
        if isinstance(answer, Status):
            held.answer, held.failures, held.refusal = answer, 0, ""
        else:
            self._note(run, held, "the coordinator did not answer", answer)
        held.answered_for, held.at = seen, time.monotonic()

    async def request_stop(self, run: Key, reason: str) -> bool:
        """Asks the coordinator to stop for ``reason`` (empty: cancels the request). False: it did not answer; ask again.

        Raises:
            Fenced: another replica may lead by now, and decide otherwise.
        """
        held = self._pollers.get(run)
        if held is None:
            return False
        self._fence(f"send a stop request to the coordinator of run {_name(run)}")
        try:
            await held.client.stop(reason)
        except (CoordinatorUnreachable, CoordinatorRefused) as problem:
            self._note(run, held, "the coordinator did not take the stop request", problem)
            return False
        await self.ask(run)  # the answer from before the request is out of date
        return True

    async def decisions(self, run: Key, offset: int) -> DecisionLines:
        """A page of the decision log; see :meth:`.CoordinatorClient.decisions`."""
        return await self._client(run).decisions(offset)

    async def record_decision(self, run: Key, offset: int, line: bytes) -> None:
        """Write a line of the decision log; see :meth:`.CoordinatorClient.record_decision`.

        Raises:
            Fenced: another may lead by now.
        """
        self._fence(f"record a decision of run {_name(run)}")
        await self._client(run).record_decision(offset, line)

    def _client(self, run: Key) -> CoordinatorClient:
        held = self._pollers.get(run)
        if held is None:
            raise CoordinatorUnreachable("no pod of the coordinator is up")
        return held.client

    async def _run(self, run: Key, held: _Poller) -> None:
        """Polls until cancelled: periodically, and at once when something else is observed of the run."""
        while True:
            held.now.clear()
            try:
                await self.ask(run)
            except Exception:
                log.exception("run %s: asking its coordinator failed", _name(run))
                held.answer, held.failures = None, held.failures + 1
            if held.known and held.significant() != held.given:
                self._wake(run)
            pause = held.pause()
            if held.failures:
                await asyncio.sleep(pause)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await held.now.wait()

    def _note(
        self, run: Key, held: _Poller, what: str, problem: CoordinatorUnreachable | CoordinatorRefused
    ) -> None:
        """Logs a refusal once as a warning; that nothing answers is temporary."""
        held.answer, held.failures, held.reread = None, held.failures + 1, False
        if not isinstance(problem, CoordinatorRefused):
            held.refusal = ""
            log.info("run %s: %s: %s", _name(run), what, problem)
        elif held.refusal != str(problem):
            held.refusal = str(problem)
            log.warning("run %s: %s: %s", _name(run), what, problem)

    async def _poller(
        self, run: Key, pods: Sequence[PodView], token: Callable[[bool], Awaitable[str]]
    ) -> _Poller | None:
        # One that cannot write its journal is not ready, and says why when asked.
        pod = next((p for p in pods if (p.ready or p.started) and p.ip), None)
        if pod is None:
            await self.forget(run)
            return None
        # By address, not by name: a name that was looked up too early stays unknown for half a minute.
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url, held = f"http://{host}:{PORTS['http']}", self._pollers.get(run)
        refused = held is not None and bool(held.refusal) and not held.reread
        if held is not None and refused:
            held.reread = True
        given = await token(refused)
        if held is None or (held.url, held.token) != (url, given):
            await self.forget(run)
            client = CoordinatorClient(url, given, timeout_seconds=ANSWER_SECONDS)
            held = self._pollers[run] = _Poller(client, url, given)
            if self._background:
                held.task = asyncio.create_task(self._run(run, held), name=f"coordinator of run {_name(run)}")
        return held


def _name(run: Key) -> str:
    return "/".join(run)


# --- in a reconcile -----------------------------------------------------------------------------


async def ask_coordinator(api: KubeApi, pollers: CoordinatorPollers, context: RunContext) -> bool:
    """Notes the coordinator's last status in ``context``. False: no answer is as new as what is observed of the pods; the
    poller wakes the run when there is one, or when it is clear that there is none."""
    if context.memory.outcome is not None or (context.accepted is None and not context.deleted):
        await pollers.forget(context.key)
        return True
    pods = context.observed.of(Role.COORDINATOR)
    answer = await pollers.poll(
        context.key,
        pods,
        lambda again: read_token(api, context, again=again),
        (pods, context.observed.trainer),
    )
    context.coordinator, context.coordinator_refusal = answer.status, answer.refusal
    if answer.status is not None:
        trouble = update_trouble(context.before.trouble, answer.status, context.unix_seconds)
        context.before = context.before.model_copy(update={"trouble": trouble})
    return answer.known


async def request_stop(api: KubeApi, pollers: CoordinatorPollers, context: RunContext) -> None:
    """Asks the coordinator to stop, or cancels that, where the decision says so."""
    reason = context.decision.request_stop
    if reason is not None and await pollers.request_stop(context.key, reason):
        text = f"Asked the coordinator to stop: {reason}" if reason else "Cancelled the stop request"
        event = Reason.STOPPING if reason else Reason.STOP_CANCELLED
        await api.event(context.obj, "Normal", event, text)


async def read_token(api: KubeApi, context: RunContext, *, again: bool = False) -> str:
    """The run's token; empty while it has none. ``again``: as the Secret has it now."""
    state = context.state
    if again or not state.token:
        held = await api.get("Secret", context.namespace, Names(context.name).token)
        state.token_checked = context.unix_seconds
        if held is not None and context.owns(held):
            state.token = _token(held)
        elif held is None and again:
            state.token_doubted = True
    return state.token


async def ensure_token(api: KubeApi, context: RunContext) -> Problem | None:
    """Creates the Secret where there is none. Not for a run that is being deleted, whose Secret the garbage collector may
    have deleted already: no new pod is to read it."""
    if context.deleted:
        return None
    state, name = context.state, Names(context.name).token
    # Of a run that has nothing yet, there is no token to ask for.
    known = bool(state.token) if not context.objects else bool(await read_token(api, context))
    if known and not 0 <= context.unix_seconds - state.token_checked < CHECK_SECONDS:
        state.token_checked = context.unix_seconds
        state.token_doubted |= await api.get("Secret", context.namespace, name) is None
    if known and not state.token_doubted:
        return None
    # One that somebody has deleted comes back as it was: running pods still hold it.
    wanted = secret(context.run, context.uid, state.token or secrets.token_urlsafe(32))
    try:
        held: Object | None = await api.create(wanted)
    except errors.AlreadyExists:
        held = await api.get("Secret", context.namespace, name)
    except (errors.Invalid, errors.Forbidden) as error:
        return refused(error, wanted, context)
    if held is None or not context.owns(held):
        return Problem(Reason.NAME_TAKEN, f"Secret {name} exists and is not this run's")
    state.token, state.token_checked, state.token_doubted = _token(held), context.unix_seconds, False
    return None


def _token(held: Object) -> str:
    data = held.get("data") or {}
    return base64.b64decode(data.get(TOKEN_KEY, "")).decode()
