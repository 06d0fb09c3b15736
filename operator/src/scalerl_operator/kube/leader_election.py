"""Leadership: of all replicas of the operator exactly one writes, the one that holds a Lease.

As in client-go, clocks of different replicas are not compared. A replica that does not lead watches the Lease's
``renewTime`` change and counts, on its own monotonic clock, how long it has not; after the Lease's duration without a
change the holder is taken for dead. The holder counts from the moment it *sent* its last successful renewal, and
stops a margin before the others could begin: so two never lead at once, however their wall clocks differ and however
late an answer comes.

Where there is no Lease, one may have been deleted whose holder still leads. So a replica that does not lead creates one
without a holder, with the usual duration: only the leader takes it at once, all others when it has expired. That
makes the very first start of an operator in a cluster take that long; the Lease stays when the operator goes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.types import Object

LEASE_NAME: Final = "scalerl-operator"

log = logging.getLogger(__name__)

_GIVEN_UP_SECONDS: Final = 1
"""The duration that a Lease says which its holder has given up: it may be taken at once."""


def steady_clock() -> float:
    """Seconds that continue while the machine sleeps, unlike ``time.monotonic`` on Linux: a lease runs out then too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leader:
    """Holds the Lease ``name`` in ``namespace`` as ``identity``, or waits for it.

    ``duration``: whole seconds after which a holder that has not renewed is taken for dead. ``renew``: between two
    renewals. ``retry``: between two reads by a replica that waits. A holder whose last renewal is older than four fifths of
    ``duration`` no longer leads.

    ``run()`` is the one task of it; :meth:`is_leader` is true or false at any moment, also when that task was kept
    from running (it is what fences writes).
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        identity: str,
        name: str = LEASE_NAME,
        duration: int = 10,
        renew: float = 3.0,
        retry: float = 2.0,
        clock: Callable[[], float] = steady_clock,
        rng: random.Random | None = None,
    ) -> None:
        if not 0 < renew < duration * 0.8:
            raise ValueError(f"renew ({renew} s) must be shorter than four fifths of duration ({duration} s)")
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._name = name
        self._duration = duration
        self._renew = renew
        self._retry = retry
        self._clock = clock
        self._rng = rng or random.Random()
        self._leads_until = -math.inf
        self._holder = ""
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self.began = asyncio.Event()
        """Set while this process leads, as far as :meth:`run` knows."""
        self.lost = asyncio.Event()
        """Set while it does not, once it did."""

    def is_leader(self) -> bool:
        """Whether this process may write now."""
        return self._clock() < self._leads_until

    @property
    def holder(self) -> str:
        """The holder of the Lease when it was last read; empty without one."""
        return self._holder

    async def wait_until_leader(self) -> None:
        """Return once this process leads. Wants :meth:`run` to be running; how long it takes is up to the others."""
        await self.began.wait()

    async def run(self) -> None:
        """Wait for the Lease, hold it, and when it is lost wait for it again. Cancel it to stop."""
        while True:
            if not await self._attempt(self._retry * 2):
                await asyncio.sleep(self._retry * self._rng.uniform(0.8, 1.2))
                continue
            log.info("%s leads", self._identity)
            self.lost.clear()
            self.began.set()
            try:
                await self._hold()
            finally:
                self._step_down()

    async def release(self) -> None:
        """Give the Lease up so that the next can lead at once. Stop :meth:`run` first. Takes a few seconds at most, and
        raises nothing for what the API server says."""
        self._step_down()
        try:
            async with asyncio.timeout(self._retry * 2):
                lease = await self._api.get("Lease", self._namespace, self._name)
                if lease is None or lease["spec"].get("holderIdentity") != self._identity:
                    return
                lease["spec"] |= {
                    "holderIdentity": "",
                    "leaseDurationSeconds": _GIVEN_UP_SECONDS,
                    "renewTime": _now(),
                }
                await self._api.replace(lease)
            log.info("%s gave up the lead", self._identity)
        except (errors.ApiError, TimeoutError) as error:
            said = str(error) or "no answer"
            log.warning("the lease could not be given up and runs out by itself: %s", said)

    def _step_down(self) -> None:
        self._leads_until = -math.inf
        self.began.clear()
        self.lost.set()

    async def _hold(self) -> None:
        """Renew until the last renewal is too old, or another holds the Lease."""
        pause = self._renew
        while (left := self._leads_until - self._clock()) > 0:
            await asyncio.sleep(min(pause, left))
            # An attempt that hangs must leave time for another before the lease is out.
            renewed = await self._attempt(min(self._renew, max(0.0, self._leads_until - self._clock())))
            if not renewed and self.holder not in ("", self._identity):
                log.error("%s holds the lease: %s leads no more", self.holder, self._identity)
                return
            pause = self._renew if renewed else self._retry / 4
        log.error("no renewal in time: %s leads no more", self._identity)

    async def _attempt(self, limit: float) -> bool:
        """Take or renew the Lease within ``limit`` seconds; True when it is ours, from the moment of asking."""
        asked = self._clock()
        try:
            async with asyncio.timeout(limit):
                if not await self._take():
                    return False
        except (errors.ApiError, TimeoutError) as error:
            said = str(error) or f"no answer within {limit:.1f} s"
            log.warning("lease %s/%s: %s", self._namespace, self._name, said)
            return False
        self._leads_until = asked + 0.8 * self._duration
        return True

    async def _take(self) -> bool:
        lease = await self._api.get("Lease", self._namespace, self._name)
        if lease is None:
            self._holder = ""
            leads = self.is_leader()
            await self._api.create(self._record(None, self._identity if leads else ""))
            if not leads:
                return False
        else:
            spec = lease.get("spec") or {}
            self._holder, lasts = spec.get("holderIdentity") or "", spec.get("leaseDurationSeconds")
            self._note((self._holder, spec.get("renewTime") or ""))
            given_up = not self._holder and (lasts or 0) <= _GIVEN_UP_SECONDS
            ours = self._holder == self._identity or (not self._holder and self.is_leader())
            if not (ours or given_up) and self._clock() < self._seen_at + (lasts or self._duration):
                return False
            await self._api.replace(self._record(lease))
        self._holder = self._identity
        return True

    def _note(self, seen: tuple[str, str]) -> None:
        """What the Lease says now, and if it is new, since when: from the answer on, not from the question."""
        if self._seen != seen:
            self._seen, self._seen_at = seen, self._clock()

    def _record(self, lease: Object | None, holder: str | None = None) -> Object:
        """The Lease as ours, or another ``holder``'s; of an existing one all but its spec is kept."""
        before = (lease or {}).get("spec") or {}
        mine = before.get("holderIdentity") == self._identity
        now = _now()
        spec = {
            **before,
            "holderIdentity": self._identity if holder is None else holder,
            "leaseDurationSeconds": self._duration,
            "renewTime": now,
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (not mine and lease is not None),
        }
        if lease is not None:
            return {**lease, "spec": spec}
        metadata = {"name": self._name, "namespace": self._namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _now() -> str:
    """Wall time, for people; decisions depend only on whether it changed."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
