"""What the vLLM server is right now, as its actor knows it: up or down, which weights, paused or serving.

Written by the server watch and by weight control, read by everything else. One asyncio loop, no locks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

NO_WEIGHTS = -1
"""The version before the first weights, after a restart, and after an update that failed half-way."""


class ServerState:
    """The state of one server; whoever subscribes is woken at every change.

    The server *serves* while it is up, holds published weights and no update is going on. Only then
    are new requests sent, each with :attr:`cache_salt`.
    """

    def __init__(self) -> None:
        self.up = False
        self.version = NO_WEIGHTS
        self.updating = False
        self.lives = 0
        """How often the server came up; a new life needs a new registration and new weights."""
        self.update_failed = False
        """The last update did not succeed, so the coordinator may have written this member off."""
        self.cache_salt = ""
        """Names one installation of weights, and no other one ever; vLLM shares cached KV among equal salts only.

        A version number would not do: a trainer that goes back to a checkpoint publishes its versions again,
        with other weights, to the same server; and an actor that was restarted finds its old server.

        What holds: KV that weights computed before a request was sent is reused for it only if they are the
        weights the server held then. A salt is first used after its weights are in place, so nothing under
        it was computed by earlier ones; and once later ones are in place, no new request uses it. A request
        that waits through an update, within vLLM or on its way there, is one in flight: it keeps its salt,
        so of its prompt it may find KV of the weights before the update, computes the rest with those after
        it, and leaves that under the old salt, where only its like can meet it.
        """
        self._installed: set[int] = set()
        self._serving = asyncio.Event()
        self._subscribers: list[asyncio.Event] = []

    def subscribe(self) -> asyncio.Event:
        """An event that every change sets; its holder clears it."""
        event = asyncio.Event()
        self._subscribers.append(event)
        return event

    async def serving(self) -> int:
        """Wait until the server serves; the weight version it serves with. The caller bounds the wait."""
        while not self.is_serving:
            await self._serving.wait()
        return self.version

    @property
    def is_serving(self) -> bool:
        return self._serving.is_set()

    def came_up(self) -> None:
        """The server answers; a server that was away holds no published weights."""
        self.up, self.version, self.updating = True, NO_WEIGHTS, False
        self.lives += 1
        self.update_failed = False
        self._installed.clear()
        self._changed()

    def went_down(self) -> None:
        self.up, self.version, self.updating = False, NO_WEIGHTS, False
        self._changed()

    def update_began(self) -> None:
        self.updating = True
        self._changed()

    def updated(self, version: int) -> None:
        """An update succeeded: the server holds ``version`` and goes on."""
        if self.up:
            self.version, self.updating, self.update_failed = version, False, False
            self.cache_salt = f"{version}.{secrets.token_hex(8)}"
            self._installed.add(version)
            self._changed()

    def update_broke(self, weights_whole: bool) -> None:
        """An update failed. Old weights that are still whole go on being used; others never are."""
        self.updating, self.update_failed = False, True
        if not weights_whole:
            self.version = NO_WEIGHTS
        self._changed()

    def has_held(self, version: int) -> bool:
        """Whether these weights were installed in the server's present life.

        Tokens of any other version come from a server that was restarted unseen.
        """
        return version in self._installed

    def _changed(self) -> None:
        if self.up and self.version != NO_WEIGHTS and not self.updating:
            self._serving.set()
        else:
            self._serving.clear()
        for event in self._subscribers:
            event.set()


class BusyClock:
    """Seconds with at least one request in flight at a server that was not paused for an update.

    >>> now = 0.0
    >>> clock = BusyClock(lambda: now)
    >>> clock.enter(); now = 2.0; clock.pause(); now = 5.0; clock.unpause(); now = 6.0; clock.leave(); now = 9.0
    >>> clock.seconds
    3.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight = 0
        self._paused = False
        self._since: float | None = None
        self._total = 0.0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def seconds(self) -> float:
        running = 0.0 if self._since is None else self._clock() - self._since
        return self._total + running

    def enter(self) -> None:
        self._in_flight += 1
        self._settle()

    def leave(self) -> None:
        self._in_flight -= 1
        self._settle()

    def pause(self) -> None:
        self._paused = True
        self._settle()

    def unpause(self) -> None:
        self._paused = False
        self._settle()

    def _settle(self) -> None:
        busy = self._in_flight > 0 and not self._paused
        if busy and self._since is None:
            self._since = self._clock()
        elif not busy and self._since is not None:
            self._total += self._clock() - self._since
            self._since = None
