"""A run's coordinator: its polled status, stop requests, and the Secret with its token.

A background poller per run keeps the coordinator's last response. A reconcile reads it and never waits, so coordinators that do
not respond delay no other runs. A response only counts if it was requested after the current observation of the run's pods: only
such a response tells whether the end of a trainer was the end of the run.

The operator may not watch Secrets: it reads this one by name periodically, and when a pod or the coordinator reports a problem.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from scalerl_api.reasons import Reason
from scalerl_api.spec import ScaleRLRun
from scalerl_api.wire import DecisionLines, Status
from scalerl_lifecycle.coordinator_client import CoordinatorClient, CoordinatorRefused, CoordinatorUnreachable
from scalerl_lifecycle.lifecycle_types import ASK_AGAIN_SECONDS, POLL_SECONDS, Problem
from scalerl_lifecycle.workloads import Role
from scalerl_operator.controller.coordinator_problems import update_faults
from scalerl_operator.controller.parts import Accepted, Observed, PodView, Run
from scalerl_operator.controller.refusals import name_taken, refused
from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Key, Object
from scalerl_operator.manifests import secret
from scalerl_operator.names import PORTS, TOKEN_KEY, Names
from scalerl_processes.waiting import cancel, pause

log = logging.getLogger(__name__)

OLDEST_ANSWER_SECONDS: Final = 30.0
"""An older response is out of date: the poller was delayed, as on a machine that was suspended."""
_JITTER: Final = (0.8, 0.95)
"""Range of factors on a pause: a poll precedes the run's next reconcile, and pollers do not synchronize."""
MAX_PAUSE_SECONDS: Final = 15.0
"""Longest back-off of a coordinator that does not respond."""
CHECK_SECONDS: Final = 120.0
"""Between two reads of a run's Secret."""


@dataclass(frozen=True)
class Timings:
    """Times of the pollers, in seconds."""

    answer: float = 3.0
    """Timeout of a request."""
    poll: float = POLL_SECONDS
    ask_again: float = ASK_AGAIN_SECONDS
    """Between two requests to a coordinator that ends, and the first back-off of one that does not respond."""


TIMINGS: Final = Timings()


@dataclass(frozen=True)
class Answer:
    """The result of a poll.

    Attributes:
        known: the coordinator was polled after the current observation; otherwise the run is woken when it has been.
        status: None if the coordinator does not respond.
        refusal: why it refused the last request; empty if it did not.
    """

    known: bool
    status: Status | None = None
    refusal: str = ""


class _Poller:
    """The poller of one run. answer: the last response; None: the coordinator does not respond."""

    def __init__(self, client: CoordinatorClient, url: str, token: str, timings: Timings) -> None:
        self.client, self.url, self.token, self._timings = client, url, token, timings
        self.answer: Status | None = None
        self.answered_at = 0.0
        self.failures = 0
        """Consecutive requests without a response."""
        self.refusal = ""
        self.token_reread = False
        """The token was read again after the last refusal."""
        self.observation: object = None
        """The current observation of the run."""
        self.answered_for: object = self
        """The observation at the last request; at first one that differs from every other."""
        self.requests = self.last_answered = 0
        """Number of requests, and of the last one with a result: a background poll and one of a reconcile can overlap."""
        self.reported: object = None
        """:meth:`significant` at the last reconcile; None: that reconcile waits for a response."""
        self.wake_up = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def known(self) -> bool:
        # While the coordinator does not respond, no reconcile waits for it.
        return self.failures > 0 or self.answered_for == self.observation

    def current(self) -> Status | None:
        recent = time.monotonic() - self.answered_at <= OLDEST_ANSWER_SECONDS
        return self.answer if recent else None

    def significant(self) -> object:
        """The part of the response whose change wakes the run. The rest changes with every response."""
        now = self.current()
        status = None if now is None else (now.phase, now.stop_reason, len(now.points), now.journal_error)
        return status, self.refusal

    def pause(self) -> float:
        """Seconds to the next request."""
        times = self._timings
        if self.failures:
            longest = min(times.ask_again * 2.0 ** min(self.failures - 1, 10), MAX_PAUSE_SECONDS)
        else:
            ending = self.answer is not None and bool(self.answer.stop_reason)
            longest = times.ask_again if ending else times.poll
        return longest * random.uniform(*_JITTER)


class CoordinatorPollers:
    """The pollers of all runs.

    Args:
        fence: called before a write; raises if this process may not write.
        wake: called for a run with a response that a reconcile waits for, or with a significant change.
        background: poll periodically; otherwise only :meth:`refresh` does.
    """

    def __init__(
        self,
        fence: Callable[[str], None],
        wake: Callable[[Key], None] = lambda run: None,
        *,
        background: bool = True,
        timings: Timings = TIMINGS,
    ) -> None:
        self._fence, self._timings = fence, timings
        self._wake = wake
        self._background = background
        self._pollers: dict[Key, _Poller] = {}

    async def forget(self, run: Key) -> None:
        """Stops polling a run's coordinator."""
        poller = self._pollers.pop(run, None)
        if poller is None:
            return
        try:
            if poller.task is not None:
                await cancel(poller.task)
        finally:
            await poller.client.aclose()

    async def close(self) -> None:
        for run in list(self._pollers):
            await self.forget(run)

    async def poll(
        self, run: Key, pods: Sequence[PodView], token: Callable[[bool], Awaitable[str]], observation: object
    ) -> Answer:
        """The coordinator's last response. observation: of the run, for comparison.

        ``token(again)`` returns the run's token; again: read it from the Secret, as the coordinator refused the known one.
        """
        poller = await self._poller(run, pods, token)
        if poller is None:
            return Answer(True)
        if observation != poller.observation:
            poller.observation = observation
            poller.wake_up.set()
        poller.reported = poller.significant() if poller.known else None
        return Answer(poller.known, poller.current() if poller.known else None, poller.refusal)

    async def refresh(self, run: Key) -> None:
        """Requests the status now. The result is dropped if a later request has one already."""
        poller = self._pollers.get(run)
        if poller is None:
            return
        poller.requests += 1
        observation, number = poller.observation, poller.requests
        answer: Status | CoordinatorUnreachable | CoordinatorRefused
        try:
            answer = await poller.client.status()
        except (CoordinatorUnreachable, CoordinatorRefused) as problem:
            answer = problem
        if number < poller.last_answered:
            return
        poller.last_answered = number
        if isinstance(answer, Status):
            poller.answer, poller.failures, poller.refusal = answer, 0, ""
        else:
            self._record_failure(run, poller, "the coordinator did not respond", answer)
        poller.answered_for, poller.answered_at = observation, time.monotonic()

    async def request_stop(self, run: Key, reason: str) -> bool:
        """Requests the coordinator to stop for ``reason``; empty: cancels the request. False: the request failed.

        Raises:
            Fenced: another replica may lead.
        """
        poller = self._pollers.get(run)
        if poller is None:
            return False
        self._fence(f"send a stop request to the coordinator of run {_name(run)}")
        try:
            await poller.client.stop(reason)
        except (CoordinatorUnreachable, CoordinatorRefused) as problem:
            self._record_failure(run, poller, "the stop request failed", problem)
            return False
        await self.refresh(run)  # the last response is older than the request
        return True

    async def decisions(self, run: Key, offset: int) -> DecisionLines:
        """A page of the decision log; see :meth:`.CoordinatorClient.decisions`."""
        return await self._client(run).decisions(offset)

    async def record_decision(self, run: Key, offset: int, line: bytes) -> None:
        """Appends to the decision log; see :meth:`.CoordinatorClient.record_decision`.

        Raises:
            CoordinatorRefused: also if it was not sent, since another replica may lead.
        """
        try:
            self._fence(f"record a decision of run {_name(run)}")
        except errors.Fenced as error:
            raise CoordinatorRefused(str(error)) from error
        await self._client(run).record_decision(offset, line)

    def _client(self, run: Key) -> CoordinatorClient:
        if run not in self._pollers:
            raise CoordinatorUnreachable("no pod of the coordinator is up")
        return self._pollers[run].client

    async def _run(self, run: Key, poller: _Poller) -> None:
        """Polls periodically until cancelled, and at once after a new observation."""
        while True:
            poller.wake_up.clear()
            try:
                await self.refresh(run)
            except Exception:
                log.exception("run %s: polling its coordinator failed", _name(run))
                poller.answer, poller.failures = None, poller.failures + 1
            if poller.known and poller.significant() != poller.reported:
                self._wake(run)
            if poller.failures:
                await asyncio.sleep(poller.pause())
            else:
                await pause(poller.pause(), until=poller.wake_up)

    def _record_failure(
        self, run: Key, poller: _Poller, text: str, problem: CoordinatorUnreachable | CoordinatorRefused
    ) -> None:
        """Logs a new refusal as a warning; a missing response is usually temporary."""
        poller.answer, poller.failures, poller.token_reread = None, poller.failures + 1, False
        refusal = str(problem) if isinstance(problem, CoordinatorRefused) else ""
        if not refusal or refusal != poller.refusal:
            level = logging.WARNING if refusal else logging.INFO
            log.log(level, "run %s: %s: %s", _name(run), text, problem)
        poller.refusal = refusal

    async def _poller(
        self, run: Key, pods: Sequence[PodView], token: Callable[[bool], Awaitable[str]]
    ) -> _Poller | None:
        # A coordinator that cannot write its journal is not ready, and reports that in its status.
        pod = next((p for p in pods if (p.ready or p.started) and p.ip), None)
        if pod is None:
            await self.forget(run)
            return None
        # By address: a failed lookup of a name is cached for half a minute.
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url, poller = f"http://{host}:{PORTS['http']}", self._pollers.get(run)
        reread = poller is not None and bool(poller.refusal) and not poller.token_reread
        if poller is not None and reread:
            poller.token_reread = True
        current_token = await token(reread)
        if poller is None or (poller.url, poller.token) != (url, current_token):
            await self.forget(run)
            client = CoordinatorClient(url, current_token, timeout_seconds=self._timings.answer)
            poller = self._pollers[run] = _Poller(client, url, current_token, self._timings)
            if self._background:
                name = f"coordinator of run {_name(run)}"
                poller.task = asyncio.create_task(self._run(run, poller), name=name)
        return poller


def _name(run: Key) -> str:
    return "/".join(run)


# --- in a reconcile -----------------------------------------------------------------------------


async def ask_coordinator(
    api: KubeApi, pollers: CoordinatorPollers, run: Run, accepted: Accepted, observed: Observed
) -> Observed | None:
    """The observation with the coordinator's status. None: there is no response since the current observation of the pods; the
    poller wakes the run after a response or a failure."""
    faults = run.before.faults
    if run.persisted.outcome is not None or (accepted.found is None and not run.deleted):
        await pollers.forget(run.key)
        return replace(observed, faults=faults)
    pods = observed.of(Role.COORDINATOR)
    answer = await pollers.poll(
        run.key, pods, lambda again: read_token(api, run, again=again), (pods, observed.trainer)
    )
    if not answer.known:
        return None
    if answer.status is not None:
        faults = update_faults(faults, answer.status, run.unix_seconds)
    return replace(observed, coordinator=answer.status, refusal=answer.refusal, faults=faults)


async def request_stop(api: KubeApi, pollers: CoordinatorPollers, run: Run, reason: str | None) -> None:
    """Requests the coordinator to stop, or cancels the request, if decided."""
    if reason is not None and await pollers.request_stop(run.key, reason):
        text = f"Requested the coordinator to stop: {reason}" if reason else "Cancelled the stop request"
        event = Reason.STOPPING if reason else Reason.STOP_CANCELLED
        await api.event(run.obj, "Normal", event, text)


async def read_token(api: KubeApi, run: Run, *, again: bool = False) -> str:
    """The run's token; empty while it has none. again: read the Secret though a token is known."""
    state = run.state
    if again or not state.token:
        live = await api.get("Secret", run.namespace, Names(run.name).token)
        state.token_checked = run.unix_seconds
        if live is not None and run.owns(live):
            state.token = _token(live)
        elif live is None and again:
            state.token_unverified = True
    return state.token


async def ensure_token(api: KubeApi, run: Run, accepted: ScaleRLRun) -> Problem | None:
    """Creates the Secret if there is none. Not for a run that is being deleted, whose Secret the garbage collector may have
    deleted."""
    if run.deleted:
        return None
    state, name = run.state, Names(run.name).token
    # A run without objects has no Secret to read.
    known = bool(state.token) if not run.objects else bool(await read_token(api, run))
    if known and not 0 <= run.unix_seconds - state.token_checked < CHECK_SECONDS:
        state.token_checked = run.unix_seconds
        state.token_unverified |= await api.get("Secret", run.namespace, name) is None
    if known and not state.token_unverified:
        return None
    # A deleted Secret is restored with the same token, which running pods use.
    wanted = secret(accepted, run.uid, state.token or secrets.token_urlsafe(32))
    try:
        live = await api.create(wanted)
    except errors.AlreadyExists:
        found = await api.get("Secret", run.namespace, name)
        if found is None:
            raise  # deleted meanwhile: the next reconcile creates it
        live = found
    except (errors.Invalid, errors.Forbidden) as error:
        return refused(error, wanted, run)
    if not run.owns(live):
        return name_taken(live, run)
    state.token, state.token_checked, state.token_unverified = _token(live), run.unix_seconds, False
    return None


def _token(live: Object) -> str:
    data = live.get("data") or {}
    return base64.b64decode(data.get(TOKEN_KEY, "")).decode()
