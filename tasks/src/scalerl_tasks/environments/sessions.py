"""The sessions of an environment server, at each of its replicas.

The name of a headless Service has an address for each replica, and each has sessions of its own. A new session is opened at the address
with the fewest of those with room.

================================  ============================================================
an address                        effect
================================  ============================================================
refuses a session                 has one less for a while, so that another generator, which
                                  has none there, gets one
does not answer                   is avoided, with back-off; the other addresses keep theirs.
                                  Then one session is tried there
is no longer the name's           gets no further sessions
================================  ============================================================

Where all addresses refuse or fail, and none has a session, the generator waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import random
import socket
import time

from scalerl_processes.waiting import cancel
from scalerl_tasks.environments.openenv import Session
from scalerl_tasks.environments.server_settings import Address, Down, EnvironmentServer
from scalerl_tasks.environments.timings import Timings


class Replica:
    """One address of a server."""

    def __init__(self, address: Address, most: int, timings: Timings) -> None:
        self.address = address
        self._most, self._timings = most, timings
        self.limit, self.later, self.limited = most, most, 0.0
        """Maximum sessions until the time ``limited``, and from then on."""
        self.held = 0
        """Sessions that are open or being opened."""
        self.opened: set[Session] = set()
        """Those that the server has answered, until they are closed."""
        self.avoided = self.delay = 0.0
        """It is avoided until the time ``avoided``; ``delay`` is 0 if its last step was answered."""

    def has_room(self, now: float) -> bool:
        if now > self.limited:
            self.limit, self.later = self.later, self._most
            self.limited = now + self._timings.full
        return self.held < self.limit

    def restrict(self, taken: int) -> None:
        """After it has refused a session, because so many are taken."""
        now, self.limit, self.later = time.monotonic(), max(self.held - 1, 1), self._most
        self.limited = now + self._timings.full
        if not self.held:
            self.limit = 0
        elif 0 < taken <= len(self.opened):  # all are its own
            self.limit, self.later = max(taken - 1, 1), taken
            self.limited = now + self._timings.spare
        elif 0 < taken <= self.held:  # whether the server counts those that are being opened is not known
            self.limit, self.limited = self.held, now + self._timings.opening

    def avoid(self) -> None:
        """After it has failed; failures while it is avoided do not extend the delay."""
        if (now := time.monotonic()) >= self.avoided:
            self.delay = min(max(2 * self.delay, self._timings.first_avoided), self._timings.max_avoided)
            self.avoided = now + self.delay


class Sessions:
    """The sessions of a grader: at most :attr:`~.server_settings.EnvironmentServer.sessions`, and at each address no more than it has."""

    def __init__(self, server: EnvironmentServer, timings: Timings) -> None:
        self._most, self._timings = server.sessions, timings
        self._names = _Addresses(server, timings.resolved)
        self._replicas: dict[Address, Replica] = {}
        self._held = 0
        self._idle: dict[Session, asyncio.TimerHandle] = {}
        """Oldest first, with the timer that closes each."""
        self._changed = asyncio.Condition()
        self._closing: set[asyncio.Task[None]] = set()

    async def take(self, key: bytes) -> Session | Replica:
        """The session of an episode; otherwise one that is not needed, or where another one may be opened.

        Raises:
            Down: the server's name has no address.
        """
        if not any(one.key == key for one in self._idle):
            await self._names.refresh()
        async with self._changed:
            while True:
                for closed in [one for one in self._idle if one.is_closed]:
                    self._end(closed)
                found = next((one for one in self._idle if one.key == key), None)
                found = found or next((one for one in self._idle if not one.key), None)
                if found is None and (replica := self._place()) is not None:
                    self._held += 1
                    replica.held += 1
                    return replica
                if found := found or next(iter(self._idle), None):
                    self._idle.pop(found).cancel()
                    return found
                await self._changed.wait()

    def _place(self) -> Replica | None:
        """Where to open another session; None: there are sessions to wait for."""
        if self._held >= self._most:
            return None
        now = time.monotonic()
        here = self._here(now)
        usable = [one for one in here if now >= one.avoided] or here
        free = [one for one in usable if one.has_room(now)]
        if not free and self._held:
            return None
        found = min(free or here, key=lambda one: (one.held, random.random()))
        if found.delay:  # one session is tried, and others follow when it is answered
            found.avoid()
        return found

    def _here(self, now: float) -> list[Replica]:
        """The replicas at the current addresses, of one family: addresses of two may be those of one server."""
        known = [
            [self._replicas.setdefault(one, Replica(one, self._most, self._timings)) for one in family]
            for family in self._names.families
        ]
        usable = (family for family in known if any(now >= one.avoided for one in family))
        return next(usable, None) or [one for family in known for one in family]

    def answered(self, session: Session) -> None:
        """A session that the server has begun an episode in."""
        self._replica(session).opened.add(session)

    async def release(self, session: Session) -> None:
        """Keep a session, whose step was answered, for the next one."""
        replica = self._replica(session)
        replica.avoided = replica.delay = 0.0
        async with self._changed:
            if replica.held <= replica.limit:
                seconds = self._timings.idle if session.key else self._timings.ended
                self._idle[session] = asyncio.get_running_loop().call_later(seconds, self._end, session)
            else:
                self._close(session)
            self._changed.notify()

    async def drop(self, taken: Session | Replica) -> None:
        """Give up what was taken."""
        if isinstance(taken, Session):
            self._close(taken)
        else:
            self._forget(taken)
        async with self._changed:
            self._changed.notify()

    async def failed(self, taken: Session | Replica) -> bool:
        """Give up what was taken at an address that failed, and avoid it; whether there is another one."""
        await self.drop(taken)
        self._replica(taken).avoid()
        return self._is_another()

    async def full(self, session: Session, taken: int) -> bool:
        """Give up one that an address refused, of whose sessions so many are taken; whether there are others to wait for, or another
        address."""
        await self.drop(session)
        replica = self._replica(session)
        replica.avoided = replica.delay = 0.0
        replica.restrict(taken)
        idle = [one for one in self._idle if one.address == replica.address]
        idle.sort(key=lambda one: bool(one.key))
        for one in idle[: max(0, replica.held - replica.limit)]:
            self._end(one)
        return self._is_another()

    def _is_another(self) -> bool:
        """Whether there are sessions to wait for, or an address to try. Otherwise, all are tried the next time."""
        now = time.monotonic()
        here = self._here(now)
        if any(now >= one.avoided and (one.held or one.has_room(now)) for one in here):
            return True
        for one in here:
            one.limit = one.limit or self._most
        return False

    async def aclose(self) -> None:
        await self._names.aclose()
        for session in list(self._idle):
            self._end(session)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _replica(self, taken: Session | Replica) -> Replica:
        return self._replicas[taken.address]

    def _forget(self, replica: Replica) -> None:
        self._held -= 1
        replica.held -= 1

    def _end(self, session: Session) -> None:
        self._idle.pop(session).cancel()
        self._close(session)

    def _close(self, session: Session) -> None:
        self._forget(self._replica(session))
        task = asyncio.create_task(self._closed(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, session: Session) -> None:
        await session.close()
        self._replica(session).opened.discard(session)


class _Addresses:
    """The addresses of a server's name. With https the name is used as it is, since certificates are for names; several replicas then
    need a load balancer."""

    def __init__(self, server: EnvironmentServer, seconds: float) -> None:
        from yarl import URL

        self._server, self._url = server, URL(server.url.rstrip("/"))
        self._seconds = seconds
        self.families: list[list[Address]] = []
        """Addresses of IPv4, and of IPv6, in the order of the name's."""
        self._problem, self._later = "", 0.0
        self._lookup: asyncio.Task[None] | None = None
        if self._url.scheme == "https" or not self._url.host or _is_number(self._url.host):
            self.families, self._later = [[Address(f"{self._url}")]], math.inf

    async def refresh(self) -> None:
        """Look the name up, and wait for it the first time.

        Raises:
            Down: it has no address.
        """
        if self._lookup is None and (not self.families or time.monotonic() >= self._later):
            self._lookup = asyncio.create_task(self._look_up(), name="environment-addresses")
        if self._lookup is not None and not self.families:
            await asyncio.wait([self._lookup], timeout=self._server.timeout_seconds)
        if not self.families:
            raise Down(
                f"{self._server.where} does not answer: {self._problem or 'its name is being looked up'}"
            )

    async def _look_up(self) -> None:
        host, port = f"{self._url.raw_host}", self._url.port
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._problem = f"the name {host} has no address: {error}"
        else:
            families: dict[int, list[Address]] = {}
            for family, *_, where in dict.fromkeys(found):
                one = Address(f"{self._url.with_host(f'{where[0]}')}", self._url.authority)
                families.setdefault(family, []).append(one)
            self.families = list(families.values())
        self._later, self._lookup = time.monotonic() + self._seconds, None

    async def aclose(self) -> None:
        if self._lookup is not None:
            await cancel(self._lookup)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
