"""The operator's process: ``python -m scalerl_operator.main``.

Tasks of its event loop; all but the queue also run in a standby::

    Operator ─┬─ watches   kopf's stream, informers → cache → wake
              ├─ resync    comparison of the cache with a list → wake
              ├─ leader    the Lease
              ├─ queue     wake → reconcile(key)
              ├─ lag       delay of the event loop
              └─ server    /healthz /readyz /metrics

After SIGTERM the operator begins no reconcile, lets those in work end, releases the Lease, and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from scalerl_operator.controller.claimed_runs import MakeReconcile, Reconcile, ReconcileContext, reconciler
from scalerl_operator.kube import connection
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.informer import Informer
from scalerl_operator.kube.kinds import KINDS, RUN
from scalerl_operator.kube.leader_election import Leader
from scalerl_operator.kube.run_stream import Resync, Watches
from scalerl_operator.kube.scrape_access import REFUSALS, ScrapeAccess
from scalerl_operator.kube.work_queue import WorkQueue
from scalerl_operator.manifests.gang import WORKLOAD
from scalerl_operator.process_metrics import Metrics
from scalerl_operator.settings import Settings, SettingsError
from scalerl_processes.waiting import pause

LAG_SECONDS: Final = 0.5
"""Between two measurements of the event loop's delay."""
MAX_SECONDS_WITHOUT_WATCHES: Final = 120.0
"""After so long without kopf's stream, while the API server responds, the kubelet restarts the process."""
log = logging.getLogger("scalerl_operator")


class Operator:
    """One replica.

    Args:
        wait_log_seconds: between two log lines while it is not ready yet.
    """

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        make_reconcile: MakeReconcile,
        *,
        wait_log_seconds: float = 10.0,
    ) -> None:
        self._settings, self._wait_log_seconds = settings, wait_log_seconds
        self._make_reconcile = make_reconcile
        self.metrics = Metrics()
        self.api = KubeApi(
            configuration,
            fence=lambda: self.leader.is_leader(),
            on_call=self.metrics.called,
            instance=settings.identity,
        )
        self.leader = Leader(
            self.api, namespace=settings.operator_namespace, identity=settings.identity, name=settings.lease
        )
        self.cache = Cache(lambda key: self.queue.wake(key))
        self.queue = WorkQueue(
            lambda key: self._reconcile(key), workers=settings.workers, on_pass=self.metrics.finished
        )
        self.watches = Watches(
            self.api,
            configuration,
            self.cache,
            settings.namespaces,
            on_event=self.metrics.event,
            on_start=self._after_kopf,
        )
        self._scopes: Sequence[str | None] = settings.namespaces or (None,)
        self._informers = [
            Informer(self.api, self.cache, kind, namespace, on_event=self.metrics.event)
            for kind in KINDS.values()
            if kind.watched and kind.name != RUN
            for namespace in self._scopes
        ]
        self._resync = Resync(
            self.api,
            self.cache,
            self._scopes,
            every=settings.resync_seconds,
            on_repair=self.metrics.repairs.inc,
        )
        self._scrape_access = ScrapeAccess(self.api) if settings.metrics_authentication else None
        self.metrics.watch(self.queue, self.cache, self.leader)
        self._stopping = asyncio.Event()
        self._cache_complete = False
        self._reconcile: Reconcile
        self.address: tuple[str, int] | None = None
        """Of health and metrics, once they are served."""

    def _workloads_served(self) -> bool:
        return all(informer.served for informer in self._informers if informer.kind.name == WORKLOAD)

    def _workloads_known(self) -> bool:
        return all(informer.synced.is_set() for informer in self._informers if informer.kind.name == WORKLOAD)

    def _namespace_known(self, namespace: str) -> bool:
        found = (each for each in self._informers if each.namespace in (None, namespace))
        return all(informer.synced.is_set() or informer.kind.optional for informer in found)

    def stop(self) -> None:
        """Ends :meth:`run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until :meth:`stop`, or raises the error of a task that failed."""
        self._handle_signals()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.api)
            await stack.enter_async_context(self._server())
            wake = functools.partial(self.queue.wake, respect_backoff=True)
            self._context = ReconcileContext(
                *(self._settings, self.api, self.cache, self.metrics, wake),
                *(self._workloads_served, self._workloads_known, self._namespace_known),
            )
            self._reconcile = await stack.enter_async_context(self._make_reconcile(self._context))
            tasks = {"watches": asyncio.create_task(self._watch(), name="watches")}
            try:
                if not await self._completed_before_stop(self._fill_cache(), tasks["watches"]):
                    return
                tasks |= {
                    name: asyncio.create_task(part, name=name)
                    for name, part in (
                        ("resync", self._resync.run()),
                        ("leader", self.leader.run()),
                        ("queue", self._lead()),
                        ("lag", self._measure_lag()),
                    )
                }
                try:
                    await self._completed_before_stop(None, *tasks.values())
                finally:
                    await self._end(tasks["queue"], tasks["leader"])
            finally:
                await _cancelled(*tasks.values())
                log.info("stopped")

    async def _completed_before_stop(
        self, part: Coroutine[Any, Any, None] | None, *tasks: asyncio.Task[None]
    ) -> bool:
        """Waits for ``part`` (None: never completes); False if :meth:`stop` came first. Raises if one of ``tasks``, which must
        not end, has ended."""
        stop = asyncio.create_task(self._stopping.wait())
        awaited: list[asyncio.Task[Any]] = [stop] if part is None else [stop, asyncio.create_task(part)]
        try:
            await asyncio.wait([*awaited, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
                    raise RuntimeError(f"the task {task.get_name()} has ended")
            if awaited[-1].done():
                awaited[-1].result()
            return not self._stopping.is_set()
        finally:
            await _cancelled(*awaited)

    def _after_kopf(self) -> None:
        self._handle_signals()
        self._resync.kopf_started.set()

    def _handle_signals(self) -> None:
        """Stops at SIGTERM and SIGINT. Repeated after each start of kopf, which replaces the handlers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    async def _end(self, queue: asyncio.Task[None], leader: asyncio.Task[None]) -> None:
        """Ends the reconciles while this replica holds the Lease, then releases it."""
        self._stopping.set()
        await _cancelled(queue)
        if late := await self.queue.drain(self._settings.drain_seconds):
            log.warning("%d reconciles did not end in time and were cancelled: %s", len(late), late)
        await _cancelled(leader)
        await self.leader.release()

    async def _watch(self) -> None:
        """Runs all watches. They retry after errors of the API server, so none of them ends."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watches.run())
            for informer in self._informers:
                group.create_task(informer.run())

    async def _fill_cache(self) -> None:
        """Waits for the first lists, but for those of optional kinds and of namespaces that refuse them: a broken extension or a
        deleted namespace must not stop all runs."""
        while waiting := self._unlisted():
            complete = next(iter(waiting.values()))
            await pause(self._wait_log_seconds, until=complete)
            if not complete.is_set():
                log.warning("waiting for %s", self._awaited())
        # All modules are loaded: without them, a full garbage collection takes 40 ms less.
        gc.collect()
        gc.freeze()
        self._cache_complete = True
        log.info("the cache holds %d runs and %d objects", len(self.cache.runs()), len(self.cache))

    def _unlisted(self) -> dict[str, asyncio.Event]:
        """The first lists that are not complete, but for those that are not awaited."""
        needed = [each for each in self._informers if not each.kind.optional]
        # A kind that is refused in every namespace is an error of the installation.
        permitted = {each.kind.name for each in needed if not each.refused}
        lists = {RUN: self.watches.listed} | {
            each.what: each.synced
            for each in needed
            if each.namespace not in self.watches.refused
            and not (each.refused and each.kind.name in permitted)
        }
        return {what: complete for what, complete in lists.items() if not complete.is_set()}

    def _awaited(self) -> str:
        """What this replica waits for before it can lead."""
        if lists := self._unlisted():
            return f"the first list of {', '.join(lists)}"
        return "the cache" if self.watches.started.is_set() else "kopf to start"

    async def _lead(self) -> None:
        """Reconciles runs while this replica leads."""
        while True:
            await self.leader.began.wait()
            for key in self.cache.runs():
                self.queue.wake(key)
            self.queue.release()
            await self.leader.lost.wait()
            await self.queue.halt()
            self.metrics.runs.clear()
            for forget in self._context.on_lost:
                await forget()

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due))

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._settings.host, self._settings.port).start()
            self.address = runner.addresses[0][:2]
            yield
        finally:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        """Alive: the event loop runs this handler, and kopf's stream is up or not down for long."""
        down = self.watches.down_seconds()
        if down > MAX_SECONDS_WITHOUT_WATCHES:
            return web.Response(status=503, text=f"no watches since {down:.0f} s\n")
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        """Ready to lead: the cache is complete. A standby is ready too."""
        if self._stopping.is_set():
            return web.Response(status=503, text="stopping\n")
        if not self._cache_complete or not self.watches.started.is_set():
            return web.Response(status=503, text=f"waiting for {self._awaited()}\n")
        if self.leader.is_leader():
            return web.Response(text="leads\n")
        holder = self.leader.holder
        if holder in ("", self._settings.identity):  # not read yet, released, or this replica's and expired
            return web.Response(text="does not lead; the leader is not known\n")
        return web.Response(text=f"{holder} leads\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        if self._scrape_access is not None:
            status = await self._scrape_access.status(request.headers.get("Authorization", ""))
            if status != 200:
                return web.Response(status=status, text=f"{REFUSALS[status]}\n")
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _cancelled(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    """Cancels tasks and waits for their end; logs their errors."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("a task ended with %s: %s", type(outcome).__name__, outcome)


async def serve(settings: Settings) -> None:
    """One replica until SIGTERM or SIGINT."""
    await Operator(settings, await connection.load(settings.kubeconfig), reconciler).run()


def main() -> int:
    """Exit code 0 after SIGTERM, 2 for invalid settings, 1 for any other error."""
    try:
        settings = Settings.read(os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # kopf logs every event of every object.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(settings))
    except connection.NoCluster as error:
        log.error("%s", error)
        return 2
    except Exception:
        log.exception("the operator failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
