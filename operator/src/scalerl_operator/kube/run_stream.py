"""kopf's part: the stream of runs, fed into the cache. Handlers carry no logic: they wake a run.

kopf is used for its streams alone (lists, watches, reconnects): it puts no annotation and no finalizer on anything,
writes no events, and knows no peers; who leads is our Lease's business. A standby watches too, so that its cache is
warm when it leads. What belongs to runs comes by :mod:`scalerl_operator.kube.informer`.

kopf does not say when its first list is complete, nor which runs were deleted while its stream was cut off for long. So runs
are listed before each start of it (:func:`~scalerl_operator.kube.informer.listed`), and :class:`Resync` compares from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import kopf
from kubernetes.aio.client.configuration import Configuration

from scalerl_api.spec import GROUP
from scalerl_operator.kube import connection
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.errors import ApiError, NotFound
from scalerl_operator.kube.informer import LONGEST_PAUSE_SECONDS, listed
from scalerl_operator.kube.kinds import KINDS, RUN
from scalerl_operator.names import FIELD_OWNER

PAGE: Final = 50
"""Runs a page of kopf's list: what it parses at once must not keep the event loop for long."""
SOON_SECONDS: Final = 20.0
"""After a start of kopf its stream is up; what went between our list and its own is found by comparing."""
STEADY_SECONDS: Final = 30.0
"""What has been up for so long is up."""
SETTLED_SECONDS: Final = 5.0
"""After so long a watch has brought what a list already showed, or it will not bring it."""
STOP_SECONDS: Final = 10.0

log = logging.getLogger(__name__)


@dataclass
class Resync:
    """Compares the runs of the cache with what the API server lists (names and versions only), and corrects the cache.

    A deletion that kopf missed, or a stream that has stopped without an error, must not leave a run out of date for ever.
    every: seconds. ``on_repair(number)`` is called with the number of objects corrected.
    """

    api: KubeApi
    cache: Cache
    namespaces: Sequence[str | None]
    every: float
    on_repair: Callable[[int], None] = lambda number: None
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    def soon(self) -> None:
        """Compare in a short while: kopf has been started."""
        self._asked.set()

    async def run(self) -> None:
        """Compare every so often, and soon after :meth:`soon`, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.every):
                    await self._asked.wait()
                self._asked.clear()
                await asyncio.sleep(SOON_SECONDS)
            for namespace in self.namespaces:
                try:
                    await self.compare(namespace)
                except ApiError as error:
                    log.warning("comparing runs with a list: %s", error)

    async def compare(self, namespace: str | None) -> int:
        """One namespace, or all; returns how many runs had to be corrected."""
        found, version = await self.api.list_at(RUN, namespace, metadata_only=True)
        versions = {
            (m["namespace"], m["name"]): int(m["resourceVersion"]) for m in (o["metadata"] for o in found)
        }
        corrected = self.cache.forget_missing(RUN, versions, version, namespace=namespace)
        if self._behind(versions):
            await asyncio.sleep(SETTLED_SECONDS)
            for at in self._behind(versions):
                fresh = await self.api.get(RUN, *at)
                if fresh is not None:
                    self.cache.observe("MODIFIED", fresh)
                    corrected += 1
        if corrected:
            log.warning("%d runs were not as the API server has them, and are corrected", corrected)
            self.on_repair(corrected)
        return corrected

    def _behind(self, versions: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
        return [at for at, version in versions.items() if self.cache.version(RUN, *at) < version]


class Watches:
    """The stream of runs as one task, :meth:`run`: a list of all, then kopf; when kopf ends by itself, again.

    kopf ends when runs are no longer served (their CRD was deleted), and by its own mistakes. ``on_event(kind)`` is called
    for every event, ``on_start()`` of each start of kopf (which takes the process's signals for itself).
    """

    def __init__(
        self,
        api: KubeApi,
        configuration: Configuration,
        cache: Cache,
        namespaces: Sequence[str] = (),
        *,
        on_event: Callable[[str], None] = lambda kind: None,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespaces = namespaces
        self._on_start = on_start
        self._registry = _registry(configuration, cache, on_event)
        self._broken_since: float | None = None
        self._up_since = math.inf
        self.listed = asyncio.Event()
        """Set once all runs are in the cache."""
        self.started = asyncio.Event()
        """Set once kopf was started."""

    def down_seconds(self) -> float:
        """For how long kopf could not be kept up; 0 while it is, and while the API server has no runs to give."""
        now = asyncio.get_running_loop().time()
        if self._broken_since is None or now - self._up_since > STEADY_SECONDS:
            return 0.0
        return now - self._broken_since

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        pause = 1.0
        while True:
            await self._list()
            began = asyncio.get_running_loop().time()
            try:
                await self._streams()
                reason: object = "it ended by itself"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            now = asyncio.get_running_loop().time()
            steady = now - began > STEADY_SECONDS
            self._up_since = math.inf
            self._broken_since = now if steady or self._broken_since is None else self._broken_since
            pause = 1.0 if steady else min(30.0, pause * 2)
            log.error("kopf stopped (%s); started again in %.0f s", reason, pause)
            await asyncio.sleep(pause)

    async def _list(self) -> None:
        """All runs into the cache. Until the API server gives them (their CRD may come after us), try again."""
        pause = 1.0
        while True:
            try:
                for namespace in self._namespaces or (None,):
                    await listed(self._api, self._cache, KINDS[RUN], namespace)
            except ApiError as error:
                hint = " (are the CRDs installed?)" if isinstance(error, NotFound) else ""
                log.warning("%s%s; tried again in %.0f s", error, hint, pause)
                self._broken_since = None
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_SECONDS, pause * 2)
            else:
                self.listed.set()
                return

    async def _streams(self) -> None:
        """kopf, until it ends or fails. Not by ``kopf.operator``: that cancels every task of the loop at its end."""
        tasks = await kopf.spawn_tasks(
            registry=self._registry,
            settings=_settings(),
            # Its own would be the host's name as the DNS has it: a lookup that keeps the event loop until it answers.
            identity=cast(Any, FIELD_OWNER),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=tuple(self._namespaces),
        )
        self._on_start()
        self._up_since = asyncio.get_running_loop().time()
        self.started.set()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _stop(tasks)


def _registry(
    configuration: Configuration, cache: Cache, on_event: Callable[[str], None]
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection.for_kopf(configuration)

    kopf.on.login(registry=registry)(login)

    async def feed(event: Any, **_: Any) -> None:
        on_event(RUN)
        cache.observe(event["type"], event["object"])

    run = KINDS[RUN]
    kopf.on.event(run.group, run.version, run.plural, id="feed", registry=registry)(feed)
    return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = None
    # No permission to read CRDs and namespaces is needed: what is served is known.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.watching.chunk_size = PAGE
    settings.watching.connect_timeout = 10.0
    settings.networking.connect_timeout = 10.0
    settings.networking.request_timeout = 30.0
    # 84 minutes without an API server end the stream, and Watches starts it again.
    settings.networking.error_backoffs = (1.0, 1.0, 2.0, 3.0, *[5.0] * 1000)
    # A task for an object lives as long as its events come; thousands of idle ones waste memory.
    settings.queueing.idle_timeout = 0.2
    return settings


class _NoDiffBase(kopf.AnnotationsDiffBaseStorage):
    """No handler uses the difference; kopf would copy every object of every event to compute it."""

    def build(self, **_: Any) -> Any:
        return {}


async def _stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel kopf's root tasks, as kopf does at its end, and wait for them; a bounded time."""
    for task in tasks:
        task.cancel()
    _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in late:
        log.warning("kopf's task %r did not end within %.0f s", task.get_name(), STOP_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.warning("kopf's task %r: %s: %s", task.get_name(), type(error).__name__, error)
