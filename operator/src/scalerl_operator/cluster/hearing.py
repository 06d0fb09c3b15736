"""Hearing: the coordinators of all runs, asked and told by the operator."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from scalerl_api.wire import Status
from scalerl_operator.cluster.names import PORTS
from scalerl_operator.cluster.observed import PodView
from scalerl_operator.observe.errors import CoordinatorRefused, CoordinatorUnreachable

if TYPE_CHECKING:
    from scalerl_operator.observe.client import CoordinatorClient

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 3.0


class Coordinators:
    """One client a run, kept between looks. ``fence(what)`` is asked before a coordinator is told anything, and raises
    where this process may not act."""

    def __init__(self, fence: Callable[[str], None]) -> None:
        self._fence = fence
        self._clients: dict[str, tuple[str, CoordinatorClient]] = {}
        self._refusals: dict[str, str] = {}

    async def forget(self, uid: str) -> None:
        """Close the connection to a run's coordinator."""
        self._refusals.pop(uid, None)
        held = self._clients.pop(uid, None)
        if held is not None:
            await held[1].__aexit__(None, None, None)

    async def close(self) -> None:
        for uid in list(self._clients):
            await self.forget(uid)

    def refusal(self, uid: str) -> str:
        """What a coordinator said that did not listen when it was last asked or told something; empty where it did, or where
        there was no answer."""
        return self._refusals.get(uid, "")

    async def hear(
        self, uid: str, pods: Sequence[PodView], token: Callable[[], Awaitable[str]]
    ) -> Status | None:
        """The coordinator's word; None while there is none that could give it."""
        client = await self._client(uid, pods, token)
        if client is None:
            return None
        try:
            status = await client.status()
        except (CoordinatorUnreachable, CoordinatorRefused) as problem:
            self._note(uid, "no word from the coordinator", problem)
            return None
        self._refusals.pop(uid, None)
        return status

    async def tell(
        self, uid: str, pods: Sequence[PodView], token: Callable[[], Awaitable[str]], reason: str
    ) -> bool:
        """Ask it to stop for ``reason`` (empty: to go on); whether it heard. Who is not heard asks again.

        Raises:
            Fenced: another may lead by now, and would be contradicted.
        """
        client = await self._client(uid, pods, token)
        if client is None:
            return False
        self._fence(f"tell the coordinator of run {uid}")
        try:
            await client.stop(reason)
        except (CoordinatorUnreachable, CoordinatorRefused) as problem:
            self._note(uid, "the coordinator was not told", problem)
            return False
        return True

    def _note(self, uid: str, what: str, problem: CoordinatorUnreachable | CoordinatorRefused) -> None:
        """A refusal is news once; that nobody answers passes."""
        if not isinstance(problem, CoordinatorRefused):
            self._refusals.pop(uid, None)
            log.info("run %s: %s: %s", uid, what, problem)
        elif self._refusals.get(uid) != str(problem):
            self._refusals[uid] = str(problem)
            log.warning("run %s: %s: %s", uid, what, problem)

    async def _client(
        self, uid: str, pods: Sequence[PodView], token: Callable[[], Awaitable[str]]
    ) -> CoordinatorClient | None:
        # Imported only now, with aiohttp's client: the API server's schema needs neither.
        from scalerl_operator.observe.client import CoordinatorClient

        # One that cannot write its journal is not ready, and says why when asked.
        pod = next((p for p in pods if (p.ready or p.started) and p.ip), None)
        if pod is None:
            self._refusals.pop(uid, None)
            return None
        # By address, not by name: a name that was looked up too early stays unknown for half a minute.
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{PORTS['http']}"
        held = self._clients.get(uid)
        if held is None or held[0] != url:
            await self.forget(uid)
            client = CoordinatorClient(url, await token(), timeout_seconds=ANSWER_SECONDS)
            held = self._clients[uid] = (url, await client.__aenter__())
        return held[1]
