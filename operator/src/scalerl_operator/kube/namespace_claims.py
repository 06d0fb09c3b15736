"""Which release of the operator reconciles the runs of a namespace, where two of them watch it.

The leader of a release claims each namespace in which it reconciles a run, by the ConfigMap :data:`NAME` in it, and renews the claim
once a minute while the namespace has runs, also those that are not reconciled for hours. A release that finds another's claim leaves the runs of that namespace alone, says so, and
takes the claim when it has not been renewed for :data:`DURATION_SECONDS` by its own monotonic clock. All replicas of a release claim
under one name, so a change of the leader does not change the claim. A ConfigMap, because the operator's role has those in the
namespaces of runs, and Leases in its own only.

Two releases may reconcile at once for a minute at most, and only if somebody deletes the claim; for longer, only where no claim can
be written (``immutable``, an admission rule): then a release goes on, as a run without an operator is worse.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Set
from datetime import UTC, datetime
from typing import Final

from scalerl_operator.kube import errors
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.leader_election import steady_clock
from scalerl_operator.kube.types import Object

NAME: Final = "scalerl-operator"
RENEW_SECONDS: Final = 60.0
"""Between two renewals."""
OF_OTHERS_SECONDS: Final = 10.0
"""Between two reads of another's claim: each event of a run's objects asks for it."""
DURATION_SECONDS: Final = 300.0
"""Of a claim without a renewal."""
_HOLDER, _RENEWED = "operator", "renewed"
_IS_HOLDER: Final = re.compile(r"[a-z0-9-]{1,63}/[a-z0-9.-]{1,253}")
_TRIES: Final = 3
"""Of a claim that others write at the same time."""

log = logging.getLogger(__name__)


class NamespaceClaims:
    """The claims of one release, ``holder``: the namespace and the Lease that its leader has."""

    def __init__(self, api: KubeApi, holder: str, clock: Callable[[], float] = steady_clock) -> None:
        self._api = api
        self._holder = holder
        self._clock = clock
        self._checked: dict[str, tuple[float, bool]] = {}
        """When a namespace's claim was last read, and whether it was this release's."""
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

    async def keep(self, with_runs: Callable[[], Set[str]], lost: Callable[[str], None]) -> None:
        """Renews the claims of namespaces with runs until cancelled; calls ``lost`` for one that another has taken. Claims of
        namespaces without runs expire."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            current = with_runs()
            for namespace in self._checked.keys() | self._seen.keys():
                if namespace not in current:
                    self._checked.pop(namespace, None)
                    self._seen.pop(namespace, None)
                    self._locks.pop(namespace, None)
                    continue
                try:
                    if self._checked.get(namespace, (0.0, False))[1] and not await self.mine(namespace):
                        lost(namespace)
                except Exception as error:  # the next renewal tries again
                    log.warning("%s: the claim is not renewed: %r", namespace, error)

    async def mine(self, namespace: str) -> bool:
        """Whether this release reconciles the runs of ``namespace`` now; claims or renews it if it is due.

        Raises:
            ApiError: also for a full quota of ConfigMaps: two releases without a claim would both reconcile.
        """
        async with self._locks[namespace]:
            began = self._clock()
            if (known := self._checked.get(namespace)) is not None:
                at, mine = known
                if began < at + (RENEW_SECONDS if mine else OF_OTHERS_SECONDS):
                    return mine
            try:
                mine = await self._claim(namespace)
            except errors.QuotaExceeded:
                raise
            except (errors.NotFound, errors.Forbidden, errors.Invalid) as error:
                # A namespace that goes has runs to end, and no release can claim it any more. A claim that cannot be changed must
                # not keep runs without an operator.
                level = logging.WARNING if isinstance(error, errors.Invalid) else logging.DEBUG
                log.log(level, "%s: the claim is not written: %s", namespace, error)
                mine = True
            self._checked[namespace] = (began, mine)
            if mine and self._seen.pop(namespace, None) is not None:
                log.warning(
                    "%s: %s reconciles the runs of this namespace from now on", namespace, self._holder
                )
            return mine

    async def _claim(self, namespace: str) -> bool:
        """Reads the claim, and writes it unless it is another's.

        Raises:
            Conflict: somebody else writes it all the time.
        """
        tries = 0
        while True:
            tries += 1
            found = await self._api.get("ConfigMap", namespace, NAME)
            data = {_HOLDER: self._holder, _RENEWED: datetime.now(UTC).isoformat(timespec="seconds")}
            try:
                if found is None:
                    metadata = {"name": NAME, "namespace": namespace}
                    await self._api.create(
                        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
                    )
                    return True
                claim: Object = found.get("data") or {}
                version = found["metadata"]["resourceVersion"]
                holder = str(claim.get(_HOLDER, ""))
                if (
                    _IS_HOLDER.fullmatch(holder)  # otherwise no release has written it
                    and holder != self._holder
                    and not self._expired(namespace, holder, version)
                ):
                    return False
                await self._api.patch("ConfigMap", namespace, NAME, {"data": data}, resource_version=version)
                return True
            except (errors.AlreadyExists, errors.Conflict):
                if tries == _TRIES:
                    raise

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
