"""State of the vLLM server: up or down, its weight version, paused or serving.

:class:`~.registration.ServerMonitor` and :mod:`.weight_control` write it; all others only read it. It belongs to one asyncio
loop and has no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator

NO_WEIGHTS = -1
"""Version before the first update, after a restart, and after an update that left a mixture of versions."""


class ServerState:
    """The state of one server; every change wakes the subscribers.

    The server *serves* while it is up, has published weights, and no update is in progress. New requests are sent only then,
    with :attr:`cache_salt`.
    """

    def __init__(self) -> None:
        self.up = False
        self.version = NO_WEIGHTS
        self.updating = False
        self.start_count = 0
        """Number of starts of the server. After each, the actor needs a new registration and new weights."""
        self.unpublished_start = 0
        """The ``start_count`` of the last server that was found with weights not published to it. Tokens in flight at that
        time may be from such weights."""
        self.update_failed = False
        """The last update failed, so the coordinator may have removed this member."""
        self.cache_salt = ""
        """Unique to one installation of weights. vLLM shares cached KV only among equal salts.

        The version number would not do: a trainer that returned to a checkpoint publishes the same versions again with other
        weights, and a restarted actor continues with its old server.

        Guarantee: a request reuses KV that was computed before it was sent only if the weights that the server had then
        computed it. A salt is first used after its weights are installed, so no earlier weights computed KV under it, and after
        the next update no new request uses it. A request that waits during an update, in vLLM or on the way there, keeps its
        salt: it may reuse KV of the earlier weights for its prompt, computes the rest with the later weights, and caches that
        under the old salt, where only requests in the same situation find it.
        """
        self._installed: set[int] = set()
        self._serving = asyncio.Event()
        self._subscribers: list[asyncio.Event] = []

    def subscribe(self) -> asyncio.Event:
        """An event that every change sets and the subscriber clears."""
        event = asyncio.Event()
        self._subscribers.append(event)
        return event

    async def serving(self) -> int:
        """Wait until the server serves; returns its weight version. The caller bounds the wait."""
        while not self.is_serving:
            await self._serving.wait()
        return self.version

    @property
    def is_serving(self) -> bool:
        return self._serving.is_set()

    def is_up_since(self, start: int) -> bool:
        """Whether the server is up, and has not been lost since its ``start_count`` was ``start``."""
        return self.up and self.start_count == start

    def mark_up(self) -> None:
        """Record that the server answers. After a start it has no published weights."""
        self.up, self.version, self.updating = True, NO_WEIGHTS, False
        self.start_count += 1
        self.update_failed = False
        self._installed.clear()
        self._changed()

    def mark_down(self, unpublished: bool = False) -> None:
        """Record that the server is lost; ``unpublished``: because it has weights that were not published to it."""
        if unpublished:
            self.unpublished_start = self.start_count
        self.up, self.version, self.updating = False, NO_WEIGHTS, False
        self._changed()

    def begin_update(self) -> None:
        self.updating = True
        self._changed()

    def complete_update(self, version: int) -> None:
        """Record that an update succeeded: the server has ``version`` and resumes."""
        if self.up:
            self.version, self.updating, self.update_failed = version, False, False
            self.cache_salt = f"{version}.{secrets.token_hex(8)}"
            self._installed.add(version)
            self._changed()

    def fail_update(self, weights_whole: bool) -> None:
        """Record that an update failed. Complete old weights stay in use; a mixture of versions does not serve."""
        self.updating, self.update_failed = False, True
        if not weights_whole:
            self.version = NO_WEIGHTS
        self._changed()

    def has_held(self, version: int) -> bool:
        """Whether this version was installed since the server's last detected start.

        Tokens of any other version come from a server whose restart was not detected.
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
    """Measures the seconds with at least one request in flight, without those in which the server was paused for an update.

    >>> now = 0.0
    >>> clock = BusyClock(lambda: now)
    >>> with clock.request():
    ...     now = 2.0; clock.pause(); now = 5.0; clock.unpause(); now = 6.0
    >>> now = 9.0
    >>> clock.seconds
    3.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.in_flight = 0
        """Number of requests in flight."""
        self._paused = False
        self._since: float | None = None
        self._total = 0.0

    @property
    def seconds(self) -> float:
        running = 0.0 if self._since is None else self._clock() - self._since
        return self._total + running

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """While a request is in flight."""
        self.in_flight += 1
        self._settle()
        try:
            yield
        finally:
            self.in_flight -= 1
            self._settle()

    def pause(self) -> None:
        self._paused = True
        self._settle()

    def unpause(self) -> None:
        self._paused = False
        self._settle()

    def _settle(self) -> None:
        busy = self.in_flight > 0 and not self._paused
        if busy and self._since is None:
            self._since = self._clock()
        elif not busy and self._since is not None:
            self._total += self._clock() - self._since
            self._since = None
