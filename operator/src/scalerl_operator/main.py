"""The operator's process: ``python -m scalerl_operator.main``.

What runs in its one event loop, and who owns it::

    Operator ─┬─ watches   kopf's streams → cache → wake        always, also as a standby
              ├─ resync    cache against lists → wake           always
              ├─ leader    the Lease                            always
              ├─ queue     wake → reconcile(key)                only while leading
              ├─ pulse     how late the event loop is           always
              └─ server    /healthz /readyz /metrics            always

SIGTERM: no reconcile is begun any more, those under way may end, the Lease is given up, and the exit code is 0.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from scalerl_api.spec import ScaleRLRun
from scalerl_operator.autoscaling.autoscaler import Autoscaler
from scalerl_operator.autoscaling.decision_log import DecisionRecord
from scalerl_operator.autoscaling.forecast_client import Sidecar
from scalerl_operator.controller.cluster_autoscaler import FinishedRuns
from scalerl_operator.controller.reconcile import Reconciler
from scalerl_operator.kube import connection
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.client import KubeApi
from scalerl_operator.kube.informer import Informer
from scalerl_operator.kube.kinds import KINDS, RUN
from scalerl_operator.kube.leader_election import Leader
from scalerl_operator.kube.run_stream import Resync, Watches
from scalerl_operator.kube.types import Key
from scalerl_operator.kube.work_queue import WorkQueue
from scalerl_operator.metrics import Metrics
from scalerl_operator.settings import Settings, SettingsError

PULSE_SECONDS: Final = 0.5
LONGEST_WITHOUT_WATCHES_SECONDS: Final = 120.0
"""After so long without kopf's streams (not: without the API server) another process may do better."""
SAY_SECONDS: Final = 10.0
"""Between two log lines of a replica that is not ready, saying what it waits for."""

Reconcile = Callable[[Key], Awaitable[float | None]]
MakeReconcile = Callable[["Parts"], contextlib.AbstractAsyncContextManager[Reconcile]]

log = logging.getLogger("scalerl_operator")


@dataclass
class Parts:
    """What a reconciler is made of: given to :data:`MakeReconcile` once they are all there."""

    settings: Settings
    api: KubeApi
    cache: Cache
    metrics: Metrics
    wake: Callable[[Key], None]
    """Wakes a run when its coordinator or its autoscaler has something new. Not to retry a failed reconcile."""
    on_lost: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called when this replica no longer leads and nothing is in work."""


class Operator:
    """One replica. :meth:`run` until :meth:`stop`, or until something that must not end has ended."""

    def __init__(
        self, settings: Settings, configuration: Configuration, make_reconcile: MakeReconcile
    ) -> None:
        self._settings = settings
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
        self.metrics.watch(self.queue, self.cache, self.leader)
        self._stopping = asyncio.Event()
        self._filled = False
        self._reconcile: Reconcile
        self.address: tuple[str, int] | None = None
        """Where health and metrics are served, once they are."""

    def stop(self) -> None:
        """End in good order."""
        self._stopping.set()

    async def run(self) -> None:
        """Serves until :meth:`stop`. Raises what a part raised that must not end."""
        self._take_signals()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.api)
            await stack.enter_async_context(self._server())
            wake = functools.partial(self.queue.wake, patient=True)
            self._parts = Parts(self._settings, self.api, self.cache, self.metrics, wake)
            self._reconcile = await stack.enter_async_context(self._make_reconcile(self._parts))
            listeners = asyncio.create_task(self._inform(), name="listeners")
            try:
                if not await self._until_stop(self._warm(), listeners):
                    await self._serve(listeners)
            finally:
                await _cancelled(listeners)

    async def _serve(self, listeners: asyncio.Task[None]) -> None:
        """The cache is filled: leads, or stands by, until :meth:`stop`."""
        tasks = {
            name: asyncio.create_task(part, name=name)
            for name, part in (
                ("resync", self._resync.run()),
                ("leader", self.leader.run()),
                ("queue", self._lead()),
                ("pulse", self._pulse()),
            )
        }
        stop = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            done, _ = await asyncio.wait(
                [stop, listeners, *tasks.values()], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await self._end(tasks, stop)
        for task in done - {stop}:
            task.result()
            raise RuntimeError(f"{task.get_name()} ended by itself")

    def _after_kopf(self) -> None:
        self._take_signals()
        self._resync.soon()

    def _take_signals(self) -> None:
        """SIGTERM and SIGINT are ours. Again after each start of kopf, which takes them for itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    async def _end(self, tasks: Mapping[str, asyncio.Task[None]], stop: asyncio.Task[bool]) -> None:
        """First the work, while the Lease is still held; then the Lease; then what only listens."""
        self._stopping.set()
        await _cancelled(stop, tasks["queue"])
        if late := await self.queue.drain(self._settings.drain_seconds):
            log.warning("%d reconciles did not end in time and were stopped: %s", len(late), late)
        await _cancelled(tasks["leader"])
        await self.leader.release()
        await _cancelled(*tasks.values())
        log.info("stopped")

    async def _until_stop(self, part: Awaitable[None], other: asyncio.Task[None]) -> bool:
        """Wait for ``part`` while ``other`` continues, or for the order to stop; True if that came first."""
        task, stop = asyncio.ensure_future(part), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, other, stop], return_when=asyncio.FIRST_COMPLETED)
            for one in (task, other):
                if one.done():
                    one.result()
            return self._stopping.is_set()
        finally:
            await _cancelled(task, stop)

    async def _inform(self) -> None:
        """All that listens; each part waits out what the API server says, so one that ends is a mistake of ours."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watches.run())
            for informer in self._informers:
                group.create_task(informer.run())

    async def _warm(self) -> None:
        """Until the first lists are complete; what is not there yet is said from time to time."""
        for first in (self.watches.listed, *(informer.synced for informer in self._informers)):
            while not first.is_set():
                try:
                    async with asyncio.timeout(SAY_SECONDS):
                        await first.wait()
                except TimeoutError:
                    log.warning("waits for %s", self._awaited())
        # All modules are there, and stay: a full collection need not visit them again, 40 ms each time.
        gc.collect()
        gc.freeze()
        self._filled = True
        log.info("%d runs and what belongs to them: %d objects", len(self.cache.runs()), len(self.cache))

    def _awaited(self) -> str:
        """What has to be there before this replica could lead, and is not yet."""
        lists = [] if self.watches.listed.is_set() else [RUN]
        lists += [informer.what for informer in self._informers if not informer.synced.is_set()]
        if lists:
            return f"the first list of {', '.join(lists)}"
        return "kopf to start" if not self.watches.started.is_set() else "the cache to settle"

    async def _lead(self) -> None:
        """Work while this replica leads, from the first moment to the last."""
        while True:
            await self.leader.wait_until_leader()
            for key in self.cache.runs():
                self.queue.wake(key)
            self.queue.release()
            await self.leader.lost.wait()
            await self.queue.halt()
            self.metrics.forget_runs()
            for forget in self._parts.on_lost:
                await forget()

    async def _pulse(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PULSE_SECONDS
            await asyncio.sleep(PULSE_SECONDS)
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
        """Alive: the event loop answers (this does), and the streams are up or being started."""
        down = self.watches.down_seconds()
        if down > LONGEST_WITHOUT_WATCHES_SECONDS:
            return web.Response(status=503, text=f"no watches since {down:.0f} s\n")
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        """Ready to lead: the cache is warm. A standby is ready too."""
        if self._stopping.is_set():
            return web.Response(status=503, text="stopping\n")
        if not self._filled or not self.watches.started.is_set():
            return web.Response(status=503, text=f"waits for {self._awaited()}\n")
        if self.leader.is_leader():
            return web.Response(text="leads\n")
        holder = self.leader.holder
        if holder in ("", self._settings.identity):  # not read yet, given up, or ours and expired
            return web.Response(text="does not lead, and who does is not known\n")
        return web.Response(text=f"{holder} leads\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _cancelled(*tasks: asyncio.Task[object] | asyncio.Future[object]) -> None:
    """Cancel, and wait until they are over; what they raise at their end is logged."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("at the end: %s: %s", type(outcome).__name__, outcome)


@contextlib.asynccontextmanager
async def reconciler(parts: Parts) -> AsyncIterator[Reconcile]:
    """The operator's own reconcile, made of ``parts``."""
    url = parts.settings.sidecar_url
    sidecar = None if url is None else Sidecar(lambda: url)

    def autoscaler(run: ScaleRLRun, uid: str) -> Autoscaler:
        key = (run.metadata.namespace or "", run.metadata.name)
        assert sidecar is not None
        read, write = made.coordinators.decisions, made.coordinators.record_decision
        return Autoscaler(
            "/".join(key),
            run.spec,
            DecisionRecord(functools.partial(read, key), functools.partial(write, key)),
            sidecar,
            wake=lambda: parts.wake(key),
            on_decision=parts.metrics.decision,
            earlier=FinishedRuns(parts.cache, key[0], uid),
        )

    made = Reconciler(
        parts.api,
        parts.cache,
        images=parts.settings.images,
        operator_namespace=parts.settings.operator_namespace,
        namespaced=bool(parts.settings.namespaces),
        autoscaler=None if sidecar is None else autoscaler,
        on_status=parts.metrics.run,
        wake=parts.wake,
    )
    parts.on_lost.append(made.forget_all)
    try:
        yield made.reconcile
    finally:
        await made.forget_all()


async def serve(settings: Settings, make_reconcile: MakeReconcile = reconciler) -> None:
    """One replica until SIGTERM or SIGINT."""
    await Operator(settings, await connection.load(settings.kubeconfig), make_reconcile).run()


def main() -> int:
    """Exit code 0 after SIGTERM, 2 for settings that cannot be, 1 when a part ended that must not."""
    try:
        settings = Settings.read(os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # kopf logs every event of every object; what matters of it is logged here.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(settings))
    except connection.NoCluster as error:
        log.error("%s", error)
        return 2
    except Exception:
        log.exception("the operator ends: a part that must not end did")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
