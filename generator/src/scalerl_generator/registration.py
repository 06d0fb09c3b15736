"""Monitors the vLLM server, registers the actor with the coordinator, and sends heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_api.http_client import Backoff
from scalerl_api.wire import Heartbeat, Register
from scalerl_generator.coordinator_client import (
    CoordinatorClient,
    CoordinatorError,
    CoordinatorUnreachable,
    UnknownMember,
)
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import NO_WEIGHTS, BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import UNVERSIONED, VllmError
from scalerl_processes.waiting import pause

logger = logging.getLogger("scalerl.actor.join")

SERVER_START_SECONDS = 1800.0
"""The actor exits with an error, and is restarted, if its server does not answer for this long."""

_CHECK_SECONDS = 2.0
"""Interval of the health checks."""
_CHECKS = 3
"""Failed checks after which the server counts as lost."""
_CHECK_AGAIN_SECONDS = 0.3


class ServerStartTimeout(Exception):
    """The vLLM server did not answer within :data:`SERVER_START_SECONDS`."""


class ServerMonitor:
    """Sets :class:`ServerState` to up or down, by health checks of the vLLM server."""

    def __init__(self, server: VllmClient, state: ServerState, metrics: ActorMetrics) -> None:
        self._server, self._state, self._metrics = server, state, metrics
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Monitor the server until cancelled.

        Raises:
            ServerStartTimeout: the server did not answer for :data:`SERVER_START_SECONDS`.
        """
        while True:
            if not self._state.up:
                await self._until_up()
            elif await self.check_alive():
                await asyncio.sleep(_CHECK_SECONDS)

    async def check_alive(self) -> bool:
        """Check the server's health, with retries, and set it down if all fail.

        During a weight update this returns True: the update's outcome decides. It returns False if the server was lost during
        the checks, even if it has started again, because the checks do not apply to the new start.
        """
        start = self._state.start_count
        async with self._lock:
            for attempt in range(_CHECKS):
                if not self._state.is_up_since(start):
                    return False
                if self._state.updating:
                    return True
                if await self._server.health():
                    return True
                if attempt + 1 < _CHECKS:
                    await asyncio.sleep(_CHECK_AGAIN_SECONDS)
            if self._state.is_up_since(start):
                self.server_lost("it does not answer")
            return False

    async def check_same_server(self, start: int) -> bool:
        """Check that the server is alive and has not restarted, which would have lost its weights.

        Args:
            start: the server's ``start_count`` when the caller sent its request.
        """
        if not self._state.is_up_since(start):
            return False
        alive = await self.check_alive()
        if not alive or self._state.updating or self._state.version == NO_WEIGHTS:
            return alive
        try:
            version = await self._server.weight_version()
        except VllmError:
            return await self.check_alive() and self._state.is_up_since(start)
        # If a restart has been detected during the call, having no weights is expected.
        if version == UNVERSIONED and self._state.is_up_since(start):
            self.server_lost("it has restarted and has lost the weights published to it", unpublished=True)
        return self._state.is_up_since(start)

    def server_lost(self, reason: str, *, unpublished: bool = False) -> None:
        """Set the server down: the server or its weights, and all requests in flight, are lost.

        ``unpublished``: it answers with weights that were not published to it.
        """
        if self._state.up:
            logger.error("server lost: %s", reason)
            self._metrics.server_losses.inc()
            self._state.mark_down(unpublished)

    async def _until_up(self) -> None:
        started = time.monotonic()
        backoff = Backoff(0.2, 2.0)
        while not await self._server.health():
            waited = time.monotonic() - started
            if waited > SERVER_START_SECONDS:
                raise ServerStartTimeout(f"the vLLM server has not answered for {waited:.0f} s; see its log")
            await backoff.wait()
        logger.info("the server answers, after %.1f s", time.monotonic() - started)
        self._state.mark_up()


class Registration:
    """Registers this actor with the coordinator and sends its heartbeats.

    It registers again after a restart of the server, and when the coordinator does not know the member any more. It keeps
    its leases, because they may still be open after a restart of the coordinator.

    Args:
        name: of the actor, the same after a restart.
        control_url: where the trainer reaches the actor.
        problems: returns the fields of a heartbeat that say why groups wait.
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
        problems: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._coordinator, self._state, self._busy, self._metrics = coordinator, state, busy, metrics
        self._name, self._control_url, self._problems = name, control_url, problems
        self._wake = state.subscribe()
        self._registered = asyncio.Event()
        self._registered_start = 0
        self.interval_seconds = 1.0
        """Seconds between two heartbeats."""
        self._busy_before = 0.0
        """Busy seconds of the process before this registration."""
        self._tokens_before = 0
        """Tokens generated before this registration."""
        self.member_id: str | None = None
        """None while not registered."""
        self.generated_tokens = 0
        """Tokens generated since the process began; :class:`~.leasing.Leasing` updates it."""
        self.held_leases: set[str] = set()
        """Leases from their arrival until their group's push is answered or they are released."""
        self.generated_leases: set[str] = set()
        """Held leases whose completions are sampled completely; :class:`~.leasing.Leasing` updates it."""
        self._progress: dict[str, int] = {}
        """Tokens of each held lease, as reported with the heartbeats."""

    async def member(self) -> str:
        """Wait until registered; returns the member id. The caller bounds the wait."""
        while self.member_id is None:
            await self._registered.wait()
        return self.member_id

    def progress(self, lease_id: str, tokens: int) -> None:
        """Add ``tokens`` to the lease's progress, which the next heartbeat reports."""
        self._progress[lease_id] = self._progress.get(lease_id, 0) + tokens

    def not_ready(self) -> str | None:
        """Why the actor is not ready; None if it is. It is ready without weights, since it must be ready to receive them."""
        if not self._state.up:
            return "the vLLM server does not answer"
        return None if self.member_id is not None else "not registered with the coordinator"

    def invalidate(self, member_id: str) -> None:
        """Register again: ``member_id`` is unknown to the coordinator, or its leases were reassigned."""
        if self.member_id == member_id:
            self._clear_member()
            self._wake.set()

    async def run(self, task_digest: str, grading: Sequence[str] = ()) -> None:
        """Register and send heartbeats, until cancelled.

        Args:
            task_digest: of this actor's training prompts; the coordinator refuses any but its own.
            grading: digests of the code that scores completions; refused likewise.

        Raises:
            Refused: the coordinator refuses this actor (wrong token, wire version or task).
        """
        backoff = Backoff()
        while True:
            try:
                await self._once(task_digest, grading)
            except UnknownMember as error:
                logger.warning("no longer a member: %s", error)
                self._clear_member()
            except CoordinatorUnreachable as error:
                if backoff.is_reset:
                    logger.warning("coordinator does not answer, retrying: %s", error)
                    self._metrics.coordinator_losses.inc()
                await backoff.wait()
            else:
                backoff.reset()
                await pause(self.interval_seconds, until=self._wake)
                self._wake.clear()

    async def unregister(self, timeout_seconds: float) -> None:
        """Report the member as unhealthy, so that its leases are reassigned; best effort within ``timeout_seconds``."""
        if self.member_id is not None:
            with contextlib.suppress(CoordinatorError, TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._coordinator.heartbeat(self._heartbeat(self.member_id, healthy=False))

    async def _once(self, task_digest: str, grading: Sequence[str]) -> None:
        if self._registered_start != self._state.start_count:
            self._clear_member()
        if self.member_id is None:
            if self._state.up:
                await self._register(task_digest, grading)
            return
        await self._coordinator.heartbeat(self._heartbeat(self.member_id, healthy=self._state.up))

    async def _register(self, task_digest: str, grading: Sequence[str]) -> None:
        start = self._state.start_count
        reply = await self._coordinator.register(
            Register(
                name=self._name,
                control_url=self._control_url,
                task_digest=task_digest,
                grading=list(grading),
                held_leases=sorted(self.held_leases),
            )
        )
        logger.info("registered as %s (%s)", self._name, reply.member_id)
        self._metrics.registrations.inc()
        self._registered_start = start
        self.interval_seconds = reply.heartbeat_seconds
        self._busy_before, self._tokens_before = self._busy.seconds, self.generated_tokens
        self.member_id = reply.member_id
        self._registered.set()
        self._wake.set()  # the first heartbeat reports the weight version at once

    def _heartbeat(self, member_id: str, healthy: bool) -> Heartbeat:
        self._progress = {i: n for i, n in self._progress.items() if i in self.held_leases}
        self.generated_leases &= self.held_leases
        return Heartbeat(
            member_id=member_id,
            weight_version=self._state.version if healthy else NO_WEIGHTS,
            healthy=healthy,
            busy_seconds=self._busy.seconds - self._busy_before,
            generated_tokens=self.generated_tokens - self._tokens_before,
            held_leases=sorted(self.held_leases),
            generated_leases=sorted(self.generated_leases),
            progress=self._progress,
            **self._problems(),
        )

    def _clear_member(self) -> None:
        self.member_id = None
        self._registered.clear()
