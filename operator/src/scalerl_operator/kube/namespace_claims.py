"""Which release of the operator reconciles the runs of a namespace, where two of them watch it.

The leader of a release claims each namespace in which it reconciles a run, by the ConfigMap :data:`NAME` in it, and renews the claim
with a reconcile at most once a minute. A release that finds another's claim leaves the runs of that namespace alone, says so, and
takes the claim when nobody has renewed it for :data:`DURATION_SECONDS` by its own monotonic clock. All replicas of a release claim
under one name, so a change of the leader does not change the claim. A ConfigMap, because the operator's role has those in the
namespaces of runs, and Leases in its own only.

Two releases may reconcile at once for a minute at most, and only if somebody deletes the claim.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.leader_election import steady_clock
from scalerl_operator.kube.types import Object

NAME: Final = "scalerl-operator"
RENEW_SECONDS: Final = 60.0
"""Between two renewals; each run is reconciled more often than a claim expires."""
DURATION_SECONDS: Final = 300.0
"""Of a claim without a renewal."""
_HOLDER, _RENEWED = "operator", "renewed"

log = logging.getLogger(__name__)


class NamespaceClaims:
    """The claims of one release, ``holder``: the namespace and the Lease that its leader has."""

    def __init__(self, api: KubeApi, holder: str, clock: Callable[[], float] = steady_clock) -> None:
        self._api = api
        self._holder = holder
        self._clock = clock
        self._checked: dict[str, float] = {}
        """When a namespace's claim was last this release's."""
        self._seen: dict[str, tuple[str, float]] = {}
        """Version of another's claim, and when it was first read."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def of_others(self) -> int:
        """Namespaces that another release has claimed."""
        return len(self._seen)

    def forget(self) -> None:
        """This replica no longer leads: the next leader reports the namespaces, and claims are read again."""
        self._checked.clear()
        self._seen.clear()

    async def mine(self, namespace: str) -> bool:
        """Whether this release reconciles the runs of ``namespace`` now; claims or renews it if it is due."""
        async with self._locks[namespace]:
            if self._clock() < self._checked.get(namespace, -RENEW_SECONDS) + RENEW_SECONDS:
                return True
            began = self._clock()
            try:
                mine = await self._claim(namespace)
            except (errors.NotFound, errors.Forbidden) as error:
                # A namespace that goes has runs to end; nobody can claim it any more.
                log.debug("%s: the claim is not written: %s", namespace, error)
                mine = True
            if mine:
                self._checked[namespace] = began
                if self._seen.pop(namespace, None) is not None:
                    log.warning(
                        "%s: %s reconciles the runs of this namespace from now on", namespace, self._holder
                    )
            else:
                self._checked.pop(namespace, None)
            return mine

    async def _claim(self, namespace: str) -> bool:
        found = await self._api.get("ConfigMap", namespace, NAME)
        data = {_HOLDER: self._holder, _RENEWED: datetime.now(UTC).isoformat(timespec="seconds")}
        if found is None:
            metadata = {"name": NAME, "namespace": namespace}
            try:
                await self._api.create(
                    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
                )
            except errors.AlreadyExists:
                return await self._claim(namespace)
            return True
        claim: Object = found.get("data") or {}
        version = found["metadata"]["resourceVersion"]
        holder = claim.get(_HOLDER, self._holder)
        if holder != self._holder and not self._expired(namespace, holder, version):
            return False
        try:
            await self._api.patch("ConfigMap", namespace, NAME, {"data": data}, resource_version=version)
        except errors.Conflict:
            return False  # another has taken or renewed it; read again with the next reconcile
        return True

    def _expired(self, namespace: str, holder: str, version: str) -> bool:
        known = self._seen.get(namespace)
        if known is None:
            log.error(
                "%s: the operator %s reconciles the runs of this namespace; %s leaves them alone. Two releases must not watch the "
                "same namespace: uninstall one, or set watchNamespaces apart",
                namespace,
                holder,
                self._holder,
            )
        if known is None or known[0] != version:
            self._seen[namespace] = (version, self._clock())
            return False
        return self._clock() >= known[1] + DURATION_SECONDS
