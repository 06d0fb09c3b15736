"""The run's own object: all that the operator writes of it. Status, finalizer, ``spec.suspend``, and its end.

Each write is against the version that was looked at: what another has written since is to be looked at first.
"""

from __future__ import annotations

import logging
from typing import Final

from scalerl_api.spec import KIND, ScaleRLRun
from scalerl_api.status import RunStatus
from scalerl_operator.controller.events import announce
from scalerl_operator.controller.observe import seconds
from scalerl_operator.controller.owned import leaving
from scalerl_operator.controller.run_context import Seen
from scalerl_operator.controller.status import merge_patch, waits_for_progress_only
from scalerl_operator.kube import errors
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.names import FINALIZER

log = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 15.0
"""Between two writes of a status in which only what moves all the time is new."""


class RunObject:
    """Writes the objects of all runs. Remembers when each status was written last."""

    def __init__(self, api: KubeApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._written: dict[str, float] = {}
        self._dropped: set[str] = set()
        """Fields of a status that the installed CRD, which is older than this process, does not keep."""

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._written.pop(uid, None)

    async def write(self, seen: Seen, status: RunStatus, *, at_once: bool = False) -> float | None:
        """The status, if it says anything new, and the events of what it says. Returns when a write that was put off is
        due. ``at_once``: none is put off."""
        new, old = status.to_object(), seen.run.get("status") or {}
        new = {name: value for name, value in new.items() if name not in self._dropped}
        if new == old:
            return None
        if not at_once and seen.before.conditions and waits_for_progress_only(seen.before, status):
            due = self._written.get(seen.uid, 0.0) + PROGRESS_SECONDS - seen.unix_seconds
            if 0 < due <= PROGRESS_SECONDS:
                return due
        self._written[seen.uid] = seen.unix_seconds
        made = await self._api.patch(
            KIND,
            seen.namespace,
            seen.name,
            {"status": merge_patch(old, new)},
            subresource="status",
            resource_version=seen.run["metadata"]["resourceVersion"],
        )
        self._cache.remember(made)
        seen.run.update(metadata=made["metadata"], status=made["status"])
        if dropped := new.keys() - made["status"].keys():
            self._dropped |= dropped
            log.warning(
                "the CRD %s is of an older release and does not keep status.%s: update the CRDs, then restart the operator",
                KIND,
                ", status.".join(sorted(dropped)),
            )
        await announce(self._api, seen.run, seen.before, status)
        return None

    async def hold(self, seen: Seen) -> None:
        """It is not to go before it is drained."""
        await self._set_finalizers(seen, [*seen.finalizers, FINALIZER])

    async def release(self, seen: Seen) -> None:
        """The drain is over: the finalizer goes, and with the run all that it owns."""
        await self._set_finalizers(seen, [f for f in seen.finalizers if f != FINALIZER])

    async def suspend(self, seen: Seen) -> None:
        """As Kueue does: what holds a run back is to be seen in its spec, where a person takes it back."""
        made = await self._api.patch(
            KIND,
            seen.namespace,
            seen.name,
            {"spec": {"suspend": True}, "metadata": {"uid": seen.uid}},
            resource_version=seen.run["metadata"]["resourceVersion"],
        )
        self._cache.remember(made)

    async def expire(self, run: ScaleRLRun, seen: Seen) -> float | None:
        """A run that has ended is deleted once its time to be looked at is over. Returns in how long that is."""
        ttl = run.spec.ttl_seconds_after_finished
        if ttl is None or leaving(seen.run):
            return None
        if seen.before.completion_time is None:
            return 0.0  # written just now: our own writes wake nobody
        left = seconds(seen.before.completion_time) + ttl - seen.unix_seconds
        if left > 0:
            return left
        await self._api.delete(KIND, seen.namespace, seen.name, uid=seen.uid)
        return None

    async def _set_finalizers(self, seen: Seen, finalizers: list[str]) -> None:
        try:
            made = await self._api.patch(
                KIND,
                seen.namespace,
                seen.name,
                {"metadata": {"finalizers": finalizers, "uid": seen.uid}},
                resource_version=seen.run["metadata"]["resourceVersion"],
            )
        except errors.NotFound:
            return
        if finalizers:
            seen.run["metadata"] = made["metadata"]
            self._cache.remember(made)
