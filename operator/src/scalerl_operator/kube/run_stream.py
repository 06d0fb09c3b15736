"""The stream of runs, by kopf, into the cache; objects of runs come by :mod:`scalerl_operator.kube.informer`.

Only kopf's streams are used (lists, watches, reconnects): it writes no annotations, finalizers or events, and elects no leader.
Its handler only updates the cache. A standby watches too, so that its cache is complete when it leads.

kopf does not report the end of its first list, nor runs that were deleted while its stream was interrupted for long. So runs
are listed before each start of it (:func:`~scalerl_operator.kube.informer.listed`), and :class:`Resync` compares periodically.
"""

from __future__ import annotations

import asyncio
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
from scalerl_operator.kube.errors import ApiError, Forbidden, NotFound
from scalerl_operator.kube.informer import MAX_PAUSE_SECONDS, listed
from scalerl_operator.kube.kinds import KINDS, RUN
from scalerl_operator.kube.types import Key
from scalerl_operator.names import FIELD_OWNER
from scalerl_processes.waiting import pause

PAGE: Final = 50
"""Runs per page of kopf's list, each of which blocks the event loop while it is parsed."""
START_SECONDS: Final = 20.0
"""From a start of kopf to the comparison that finds runs deleted between the operator's list and kopf's."""
STEADY_SECONDS: Final = 30.0
"""After so long without an end of kopf, its stream is up."""
EVENT_SECONDS: Final = 5.0
"""Longest delay of an event whose object a list already shows; after it, the event is missed."""
STOP_SECONDS: Final = 10.0
"""For kopf's tasks to end."""

log = logging.getLogger(__name__)


@dataclass
class Resync:
    """Compares the cached runs with a list (names and versions only), and corrects the cache: kopf can miss a deletion, and its
    stream can stop without an error.

    Attributes:
        every: seconds.
        on_repair: called with the number of corrected runs.
    """

    api: KubeApi
    cache: Cache
    namespaces: Sequence[str | None]
    every: float
    on_repair: Callable[[int], None] = lambda number: None
    kopf_started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a start of kopf: the next comparison follows after :data:`START_SECONDS`."""

    async def run(self) -> None:
        """Compares periodically until cancelled."""
        while True:
            await pause(self.every, until=self.kopf_started)
            if self.kopf_started.is_set():
                self.kopf_started.clear()
                await asyncio.sleep(START_SECONDS)
            for namespace in self.namespaces:
                try:
                    await self.compare(namespace)
                except ApiError as error:
                    log.warning("runs were not compared with a list: %s", error)

    async def compare(self, namespace: str | None) -> int:
        """Compares one namespace; None: all. Returns the number of corrected runs."""
        listed_runs, list_version = await self.api.list_at(RUN, namespace, metadata_only=True)
        versions = {
            (m["namespace"], m["name"]): int(m["resourceVersion"])
            for m in (run["metadata"] for run in listed_runs)
        }
        corrected = self.cache.forget_missing(RUN, versions, list_version, namespace=namespace)
        if self._outdated(versions):
            await asyncio.sleep(EVENT_SECONDS)
            for key in self._outdated(versions):
                run = await self.api.get(RUN, *key)
                if run is not None:
                    self.cache.observe("MODIFIED", run)
                    corrected += 1
        if corrected:
            log.warning("%d cached runs were out of date and are corrected", corrected)
            self.on_repair(corrected)
        return corrected

    def _outdated(self, versions: Mapping[Key, int]) -> list[Key]:
        return [key for key, version in versions.items() if self.cache.version(RUN, *key) < version]


class Watches:
    """The stream of runs. :meth:`run` lists all runs, then runs kopf, and starts over when kopf ends.

    kopf ends when runs are no longer served (their CRD was deleted), and by its own errors. on_event: called with the kind of
    each event. on_start: called after each start of kopf, which replaces the process's signal handlers.
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
        """Set once all runs are in the cache, but those of :attr:`refused`."""
        self.refused: frozenset[str | None] = frozenset()
        """Namespaces whose runs could not be listed, but those of others. kopf lists them as soon as it may."""
        self.started = asyncio.Event()
        """Set once kopf was started."""

    def down_seconds(self) -> float:
        """Seconds since kopf's stream went down; 0 while it is up, and while the API server does not serve runs."""
        now = asyncio.get_running_loop().time()
        if self._broken_since is None or now - self._up_since > STEADY_SECONDS:
            return 0.0
        return now - self._broken_since

    async def run(self) -> None:
        """Keeps the stream up until cancelled."""
        pause, loop = 1.0, asyncio.get_running_loop()
        while True:
            await self._list()
            began = loop.time()
            try:
                await self._streams()
                reason: object = "it ended without an error"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            now = loop.time()
            steady = now - began > STEADY_SECONDS
            self._up_since = math.inf
            self._broken_since = now if steady or self._broken_since is None else self._broken_since
            pause = 1.0 if steady else min(30.0, pause * 2)
            log.error("kopf stopped (%s); restarted in %.0f s", reason, pause)
            await asyncio.sleep(pause)

    async def _list(self) -> None:
        """Lists all runs into the cache; retries until the API server serves them, as the CRD may be installed later. With a namespace
        its Role is deleted: its runs are left out, unless no others are left."""
        pause = 1.0
        while True:
            refused: dict[str | None, Forbidden] = {}
            try:
                for namespace in self._namespaces or (None,):
                    try:
                        await listed(self._api, self._cache, KINDS[RUN], namespace)
                    except Forbidden as error:
                        refused[namespace] = error
                if len(refused) == max(1, len(self._namespaces)):
                    raise next(iter(refused.values()))
            except ApiError as error:
                hint = " (are the CRDs installed?)" if isinstance(error, NotFound) else ""
                log.warning("%s%s; retried in %.0f s", error, hint, pause)
                self._broken_since = None
                await asyncio.sleep(pause)
                pause = min(MAX_PAUSE_SECONDS, pause * 2)
            else:
                for namespace, refusal in refused.items():
                    log.warning("%s was deleted, or lacks the chart's Role: %s", namespace, refusal)
                self.refused = frozenset(refused)
                self.listed.set()
                return

    async def _streams(self) -> None:
        """Runs kopf until it ends. Not by ``kopf.operator``, which cancels every task of the loop at its end."""
        tasks = await kopf.spawn_tasks(
            registry=self._registry,
            settings=_settings(),
            # kopf's default is the host's name by DNS, a lookup that blocks the event loop.
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
    # Scanning needs permission to read CRDs and namespaces.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.watching.chunk_size = PAGE
    settings.watching.connect_timeout = 10.0
    settings.networking.connect_timeout = 10.0
    settings.networking.request_timeout = 30.0
    # The stream ends after 84 minutes without an API server; Watches starts it again.
    settings.networking.error_backoffs = (1.0, 1.0, 2.0, 3.0, *[5.0] * 1000)
    # kopf keeps a task per object until it is idle for so long.
    settings.queueing.idle_timeout = 0.2
    return settings


class _NoDiffBase(kopf.AnnotationsDiffBaseStorage):
    """No handler uses the difference between events, for which kopf would copy every object."""

    def build(self, **_: Any) -> Any:
        return {}


async def _stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels kopf's root tasks, as kopf does at its end, and waits for them."""
    for task in tasks:
        task.cancel()
    _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in late:
        log.warning("kopf's task %r did not end within %.0f s", task.get_name(), STOP_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.warning("kopf's task %r: %s: %s", task.get_name(), type(error).__name__, error)
