"""Prometheus metrics of the operator's process; their names are those of :mod:`scalerl_api.operator_metric_names`. Those of each run:
:mod:`scalerl_operator.run_metrics`."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from functools import partial
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scalerl_api import operator_metric_names as names
from scalerl_api.conditions import Phase
from scalerl_api.status import RunStatus
from scalerl_operator.controller.report import RunFigures
from scalerl_operator.kube.cache import Cache
from scalerl_operator.kube.kinds import KINDS
from scalerl_operator.kube.leader_election import Leader
from scalerl_operator.kube.transport import READS
from scalerl_operator.kube.types import Key
from scalerl_operator.kube.work_queue import WorkQueue
from scalerl_operator.run_metrics import RunMetrics

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAGS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """The process's registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.runs = RunMetrics()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        self._reconciles = histogram(names.RECONCILE_SECONDS, "Seconds to reconcile a run.", ["result"])
        text = "Seconds from a request to the API server to its response."
        self._request_seconds = histogram(names.API_SECONDS, text, ["verb"])
        text = "Delay with which the event loop resumed a sleeping task."
        self.loop_lag = histogram(names.LOOP_LAG_SECONDS, text, buckets=_LAGS)
        text = "Calls to the API server."
        self._requests = counter(names.API_REQUESTS, text, ["verb", "kind", "code"])
        self._writes = counter(names.WRITES, "Writes that the API server accepted.", ["kind"])
        self._decisions = counter(names.DECISIONS, "Decisions of the autoscaler.", ["state"])
        self._events = counter(names.WATCH_EVENTS, "Events received from watches.", ["kind"])
        self.repairs = counter(names.CACHE_REPAIRS, "Objects that the watches missed and a list found.")
        text = "Namespaces whose runs another release reconciles."
        self.foreign_namespaces = Gauge(names.FOREIGN_NAMESPACES, text, registry=self.registry)
        for result in ("ok", "error", "cancelled"):
            # Without it, a series without samples looks like a failed scrape.
            self._reconciles.labels(result)

    def watch(self, queue: WorkQueue, cache: Cache, leader: Leader) -> None:
        """Registers the metrics that are read from these at each scrape."""
        for name, text, value in (
            (names.QUEUE_DEPTH, "Runs that are due.", queue.depth),
            (names.QUEUE_IN_WORK, "Runs being reconciled.", queue.in_work),
            (names.QUEUE_FAILING, "Runs whose last reconcile ended with an error.", queue.failing),
            (names.LEADER, "1 while this replica may write.", leader.is_leader),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)
        self.registry.register(_RunCollector(cache, self.runs))

    def called(self, verb: str, kind: str, code: int, seconds: float) -> None:
        """A call to the API server ended."""
        self._requests.labels(verb, kind, str(code)).inc()
        self._request_seconds.labels(verb).observe(seconds)
        if verb not in READS and 200 <= code < 300:
            self._writes.labels(kind).inc()

    def finished(self, key: Key, result: str, seconds: float) -> None:
        """A reconcile of a run ended."""
        self._reconciles.labels(result).observe(seconds)

    def event(self, kind: str) -> None:
        """A watch received an event."""
        self._events.labels(kind).inc()

    def run(self, key: Key, status: RunStatus | None, figures: RunFigures) -> None:
        """Records the status and the figures of a run; None: the run is deleted."""
        if status is None:
            self.runs.remove(key)
        else:
            self.runs.set(key, status, figures)

    def decision(self, state: str) -> None:
        """The autoscaler decided."""
        self._decisions.labels(state).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry) + self.runs.text().encode()


class _RunCollector(Collector):
    """Counts runs and cached objects at each scrape."""

    def __init__(self, cache: Cache, runs: RunMetrics) -> None:
        self._cache = cache
        self._runs = runs

    def collect(self) -> Iterable[Metric]:
        runs = GaugeMetricFamily(names.RUNS, "Runs, as this replica last reconciled them.", labels=["phase"])
        by_phase = self._runs.phases()
        for phase in Phase:
            runs.add_metric([phase.value], by_phase[phase])
        yield runs
        kept = GaugeMetricFamily(names.CACHED_OBJECTS, "Objects of runs kept in memory.", labels=["kind"])
        by_kind = Tally(kind for kind, _, _ in self._cache)
        for kind in KINDS.values():
            if kind.watched:
                kept.add_metric([kind.name], by_kind[kind.name])
        yield kept
