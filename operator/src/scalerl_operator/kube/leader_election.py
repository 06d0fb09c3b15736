"""Leader election: only the replica that holds the Lease writes.

As in client-go, clocks of different replicas are not compared. A standby takes the Lease when its ``renewTime`` has not changed
for the Lease's duration, by the standby's own monotonic clock. The holder stops leading at four fifths of the duration after it
*sent* its last successful renewal. So two replicas never lead at once, whatever their wall clocks and however late a response.

A missing Lease may have been deleted while its holder leads. So a standby creates it without a holder and with the usual
duration: the leader takes it at once, a standby when it has expired. The first start of an operator in a cluster waits that long;
the Lease stays when the operator is removed.
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

DURATION_SECONDS: Final = 10
"""Of the Lease without a renewal."""
RENEW_SECONDS: Final = 3.0
"""Between two renewals by the leader."""
RETRY_SECONDS: Final = 2.0
"""Between two reads by a standby."""
_RELEASED_SECONDS: Final = 1
"""Duration of a Lease without a holder that may be taken at once."""


def steady_clock() -> float:
    """Seconds that continue while the machine is suspended, unlike ``time.monotonic`` on Linux: the Lease expires then too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leader:
    """Holds the Lease ``name`` in ``namespace`` as ``identity``, or waits for it.

    :meth:`run` is its task. :meth:`is_leader`, the fence of writes, is right at any time, also if that task was delayed.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        identity: str,
        name: str = LEASE_NAME,
        clock: Callable[[], float] = steady_clock,
        rng: random.Random | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._name = name
        self.duration_seconds = DURATION_SECONDS
        """Of the Lease without a renewal."""
        self._clock = clock
        self._rng = rng or random.Random()
        self._leads_until = -math.inf
        self._renewal: tuple[str, str] | None = None
        """Holder and ``renewTime`` of the Lease."""
        self._renewal_seen = 0.0
        """When they were first read."""
        self.holder = ""
        """The holder of the Lease when it was last read; empty without one."""
        self.began = asyncio.Event()
        """Set while this process leads, as far as :meth:`run` knows."""
        self.lost = asyncio.Event()
        """Set while this process does not lead any more."""

    def is_leader(self) -> bool:
        """Whether this process may write now."""
        return self._clock() < self._leads_until

    async def run(self) -> None:
        """Waits for the Lease and holds it, again and again, until cancelled."""
        while True:
            if not await self._attempt(2 * RETRY_SECONDS):
                await asyncio.sleep(RETRY_SECONDS * self._rng.uniform(0.8, 1.2))
                continue
            log.info("%s leads", self._identity)
            self.lost.clear()
            self.began.set()
            try:
                await self._hold()
            finally:
                self._stop_leading()

    async def release(self) -> None:
        """Releases the Lease, so that another replica can lead at once; cancel :meth:`run` first. Takes a few seconds at most;
        a failure is only logged."""
        self._stop_leading()
        try:
            async with asyncio.timeout(2 * RETRY_SECONDS):
                lease = await self._api.get("Lease", self._namespace, self._name)
                if lease is None or lease["spec"].get("holderIdentity") != self._identity:
                    return
                lease["spec"] |= {
                    "holderIdentity": "",
                    "leaseDurationSeconds": _RELEASED_SECONDS,
                    "renewTime": _now(),
                }
                await self._api.replace(lease)
            log.info("%s released the Lease", self._identity)
        except (errors.ApiError, TimeoutError) as error:
            log.warning("the Lease was not released and has to expire: %s", str(error) or "no response")

    def _stop_leading(self) -> None:
        self._leads_until = -math.inf
        self.began.clear()
        self.lost.set()

    async def _hold(self) -> None:
        """Renews the Lease until the last renewal is too old, or another replica holds it."""
        pause = RENEW_SECONDS
        while (left := self._leads_until - self._clock()) > 0:
            await asyncio.sleep(min(pause, left))
            # An attempt that hangs must leave time for another before the Lease expires.
            renewed = await self._attempt(min(RENEW_SECONDS, max(0.0, self._leads_until - self._clock())))
            if not renewed and self.holder not in ("", self._identity):
                log.error("%s holds the Lease: %s no longer leads", self.holder, self._identity)
                return
            pause = RENEW_SECONDS if renewed else RETRY_SECONDS / 4
        log.error("the Lease was not renewed in time: %s no longer leads", self._identity)

    async def _attempt(self, limit: float) -> bool:
        """Takes or renews the Lease within ``limit`` seconds; False if that failed."""
        began = self._clock()
        try:
            async with asyncio.timeout(limit):
                if not await self._take():
                    return False
        except (errors.ApiError, TimeoutError) as error:
            text = str(error) or f"no response within {limit:.1f} s"
            log.warning("Lease %s/%s: %s", self._namespace, self._name, text)
            return False
        self.holder = self._identity
        self._leads_until = began + 0.8 * self.duration_seconds
        return True

    async def _take(self) -> bool:
        lease = await self._api.get("Lease", self._namespace, self._name)
        leads = self.is_leader()
        if lease is None:
            self.holder = ""
            metadata = {"name": self._name, "namespace": self._namespace}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            await self._api.create(lease | {"spec": self._spec({}, self._identity if leads else "")})
            return leads
        spec = lease.get("spec") or {}
        self.holder, duration = spec.get("holderIdentity") or "", spec.get("leaseDurationSeconds") or 0
        if self._renewal != (renewal := (self.holder, spec.get("renewTime") or "")):
            self._renewal, self._renewal_seen = renewal, self._clock()
        free = self.holder == self._identity or (not self.holder and (leads or duration <= _RELEASED_SECONDS))
        if not free and self._clock() < self._renewal_seen + (duration or self.duration_seconds):
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (self.holder != self._identity)
        await self._api.replace(lease | {"spec": self._spec(spec, self._identity, transitions)})
        return True

    def _spec(self, before: Object, holder: str, transitions: int = 0) -> Object:
        now = _now()
        unchanged = before.get("holderIdentity") == self._identity
        return {
            **before,
            "holderIdentity": holder,
            "leaseDurationSeconds": self.duration_seconds,
            "renewTime": now,
            "acquireTime": before.get("acquireTime", now) if unchanged else now,
            "leaseTransitions": transitions,
        }


def _now() -> str:
    """Wall time for readers of the Lease; decisions only depend on whether it changes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
