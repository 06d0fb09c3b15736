"""Being a member: the server is waited for and watched, the coordinator is registered with and kept informed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from scalerl_api.wire import Heartbeat, Register
from scalerl_generator.coordinator_client import (
    Backoff,
    CoordinatorClient,
    CoordinatorDown,
    CoordinatorError,
    UnknownMember,
)
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.state import NO_WEIGHTS, BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient

logger = logging.getLogger("scalerl.actor.join")

SERVER_START_SECONDS = 1800.0
"""A server that does not answer for so long will not: the actor leaves with an error and is started anew."""

_CHECK_SECONDS = 2.0
_CHECKS = 3
_CHECK_AGAIN_SECONDS = 0.3


class ServerNeverUp(Exception):
    """The vLLM server did not answer within :data:`SERVER_START_SECONDS`."""


async def wait_set(event: asyncio.Event, seconds: float) -> None:
    """Return when ``event`` is set or ``seconds`` are over; clears it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


class ServerWatch:
    """Owns the up and down of :class:`ServerState`: waits for the server, and notices when it is gone."""

    def __init__(self, server: VllmClient, state: ServerState, metrics: ActorMetrics) -> None:
        self._server, self._state, self._metrics = server, state, metrics
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            ServerNeverUp: see :data:`SERVER_START_SECONDS`.
        """
        while True:
            if not self._state.up:
                await self._until_up()
            elif await self.alive():
                await asyncio.sleep(_CHECK_SECONDS)

    async def alive(self) -> bool:
        """Ask the server, a few times before giving it up. During an update, its outcome decides instead."""
        async with self._lock:
            for attempt in range(_CHECKS):
                if not self._state.up:
                    return False
                if self._state.updating:
                    return True
                if await self._server.health():
                    return True
                if attempt + 1 < _CHECKS:
                    await asyncio.sleep(_CHECK_AGAIN_SECONDS)
            self.lost("it does not answer")
            return False

    def lost(self, reason: str) -> None:
        """The server, or the weights it held, are gone: nothing in flight there comes back."""
        if self._state.up:
            logger.error("server lost: %s", reason)
            self._metrics.server_losses.inc()
            self._state.went_down()

    async def _until_up(self) -> None:
        started = time.monotonic()
        backoff = Backoff(0.2, 2.0)
        while not await self._server.health():
            waited = time.monotonic() - started
            if waited > SERVER_START_SECONDS:
                raise ServerNeverUp(
                    f"the vLLM server has not answered for {waited:.0f} s; its own log says why"
                )
            await backoff.wait()
        logger.info("the server answers, after %.1f s", time.monotonic() - started)
        self._state.came_up()


class Membership:
    """This actor's place among the run's generators; owns registration and heartbeats.

    A new registration is made when the server has come up (again) and when the coordinator no longer
    knows the member. Work in hand is not touched here: after a restart of the coordinator its leases
    may still be open.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        state: ServerState,
        busy: BusyClock,
        metrics: ActorMetrics,
        *,
        name: str,
        control_url: str,
    ) -> None:
        self._coordinator, self._state, self._busy, self._metrics = coordinator, state, busy, metrics
        self._name, self._control_url = name, control_url
        self._wake = state.subscribe()
        self._registered = asyncio.Event()
        self._life = 0
        self._interval_seconds = 1.0
        self._busy_before = 0.0
        self._tokens_before = 0
        self.member_id: str | None = None
        """None while not registered."""
        self.generated_tokens = 0
        """Since the process began; whoever generates adds to it."""
        self.held_leases: set[str] = set()
        """From the answer that brought them to the answer to their push, or until they are given back."""
        self._progress: dict[str, int] = {}

    async def member(self) -> str:
        """Wait until registered; the member id. The caller bounds the wait."""
        while self.member_id is None:
            await self._registered.wait()
        return self.member_id

    def progress(self, lease_id: str, tokens: int) -> None:
        """The lease came further by ``tokens``; the next heartbeat says so."""
        self._progress[lease_id] = self._progress.get(lease_id, 0) + tokens

    def not_ready(self) -> str | None:
        """Why the actor takes no work yet, or None when it does (weights are work: it needs none to be ready)."""
        if not self._state.up:
            return "the vLLM server does not answer"
        return None if self.member_id is not None else "not registered with the coordinator"

    def disown(self, member_id: str) -> None:
        """``member_id`` was refused as unknown, or is no longer trusted: register again."""
        if self.member_id == member_id:
            self._forget()
            self._wake.set()

    async def run(self, task_digest: str) -> None:
        """Register and keep the heart beating, until cancelled.

        Args:
            task_digest: names this actor's training prompts; the coordinator refuses others than its own.

        Raises:
            Refused: the coordinator will not have this actor (token, wire version, another task).
        """
        backoff = Backoff()
        while True:
            try:
                await self._once(task_digest)
            except UnknownMember as error:
                logger.warning("no longer a member: %s", error)
                self._forget()
            except CoordinatorDown as error:
                if backoff.fresh:
                    logger.warning("coordinator does not answer, trying on: %s", error)
                    self._metrics.coordinator_losses.inc()
                await backoff.wait()
            else:
                backoff.reset()
                await wait_set(self._wake, self._interval_seconds)

    async def leave(self, timeout_seconds: float) -> None:
        """Say that nothing more is to be expected from here; best effort within ``timeout_seconds``."""
        if self.member_id is not None:
            with contextlib.suppress(CoordinatorError, TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._coordinator.heartbeat(self._heartbeat(self.member_id, healthy=False))

    async def _once(self, task_digest: str) -> None:
        if self._life != self._state.lives:
            self._forget()
        if self.member_id is None:
            if self._state.up:
                await self._register(task_digest)
            return
        await self._coordinator.heartbeat(self._heartbeat(self.member_id, healthy=self._state.up))

    async def _register(self, task_digest: str) -> None:
        life = self._state.lives
        reply = await self._coordinator.register(
            Register(
                name=self._name,
                control_url=self._control_url,
                task_digest=task_digest,
                held_leases=sorted(self.held_leases),
            )
        )
        logger.info("registered as %s (%s)", self._name, reply.member_id)
        self._metrics.registrations.inc()
        self._life = life
        self._interval_seconds = reply.heartbeat_seconds
        self._busy_before, self._tokens_before = self._busy.seconds, self.generated_tokens
        self.member_id = reply.member_id
        self._registered.set()
        self._wake.set()  # the first heartbeat says at once which weights are held

    def _heartbeat(self, member_id: str, healthy: bool) -> Heartbeat:
        self._progress = {i: n for i, n in self._progress.items() if i in self.held_leases}
        return Heartbeat(
            member_id=member_id,
            weight_version=self._state.version if healthy else NO_WEIGHTS,
            healthy=healthy,
            busy_seconds=self._busy.seconds - self._busy_before,
            generated_tokens=self.generated_tokens - self._tokens_before,
            held_leases=sorted(self.held_leases),
            progress=self._progress,
        )

    def _forget(self) -> None:
        self.member_id = None
        self._registered.clear()
