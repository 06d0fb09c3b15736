"""The operator's Prometheus metrics, registered here and nowhere else; their names are the API's."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from scalerl_api import metric_names as names
from scalerl_api.conditions import Phase
from scalerl_operator.cluster.cache import Cache
from scalerl_operator.cluster.kinds import KINDS
from scalerl_operator.cluster.leader import Leader
from scalerl_operator.cluster.queue import WorkQueue
from scalerl_operator.cluster.types import Key

READS: Final = frozenset({"get", "list"})
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The process's registry; an observer of the API client and of the queue."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._phases: dict[Key, Phase] = {}
        self._reconciles = Histogram(
            names.RECONCILE_SECONDS,
            "One look at one run.",
            ["result"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._requests = Counter(
            names.API_REQUESTS, "Calls to the API server.", ["verb", "kind", "code"], registry=self.registry
        )
        self._request_seconds = Histogram(
            names.API_SECONDS,
            "From a call to its answer.",
            ["verb"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._writes = Counter(
            names.WRITES, "Writes that the API server took.", ["kind"], registry=self.registry
        )
        self._decisions = Counter(
            names.DECISIONS, "Decisions of the autoscaler.", ["state"], registry=self.registry
        )
        self._events = Counter(
            names.WATCH_EVENTS, "What the watches brought.", ["kind"], registry=self.registry
        )
        self.repairs = Counter(
            names.CACHE_REPAIRS, "Objects the watches had missed, found by listing.", registry=self.registry
        )
        self.loop_lag = Histogram(
            names.LOOP_LAG_SECONDS,
            "How late the event loop came back to a task that slept.",
            registry=self.registry,
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5),
        )
        for result in ("ok", "error", "cancelled"):
            self._reconciles.labels(
                result
            )  # a series that is not there cannot be told from a scrape that failed

    def watch(self, queue: WorkQueue, cache: Cache, leader: Leader) -> None:
        """Read these at each scrape."""
        for name, text, value in (
            (names.QUEUE_DEPTH, "Runs that are due.", queue.depth),
            (names.QUEUE_IN_WORK, "Runs being looked at.", queue.in_work),
            (names.QUEUE_FAILING, "Runs whose last look ended with an error.", queue.failing),
            (names.LEADER, "1 while this replica may write.", leader.is_leader),
        ):
            Gauge(name, text, registry=self.registry).set_function(_number(value))
        self.registry.register(_Kept(cache, self._phases))

    def called(self, verb: str, kind: str, code: int, seconds: float) -> None:
        """A call to the API server ended."""
        self._requests.labels(verb, kind, str(code)).inc()
        self._request_seconds.labels(verb).observe(seconds)
        if verb not in READS and 200 <= code < 300:
            self._writes.labels(kind).inc()

    def finished(self, key: Key, result: str, seconds: float) -> None:
        """A look at a run ended."""
        self._reconciles.labels(result).observe(seconds)

    def event(self, kind: str) -> None:
        """A watch brought something."""
        self._events.labels(kind).inc()

    def phase(self, key: Key, phase: Phase | None) -> None:
        """Where a run stands now; None: it is gone."""
        if phase is None:
            self._phases.pop(key, None)
        else:
            self._phases[key] = phase

    def decision(self, state: str) -> None:
        """The autoscaler decided."""
        self._decisions.labels(state).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Kept(Collector):
    """What is kept, counted at a scrape rather than at every change."""

    def __init__(self, cache: Cache, phases: dict[Key, Phase]) -> None:
        self._cache = cache
        self._phases = phases

    def collect(self) -> Iterable[Metric]:
        runs = GaugeMetricFamily(names.RUNS, "Runs, as this replica last looked at them.", labels=["phase"])
        by_phase = Tally(self._phases.values())
        for phase in Phase:
            runs.add_metric([phase.value], by_phase[phase])
        yield runs
        kept = GaugeMetricFamily(names.CACHED_OBJECTS, "Objects of runs kept in memory.", labels=["kind"])
        by_kind = Tally(kind for kind, _, _ in self._cache)
        for kind in KINDS.values():
            if kind.watched:
                kept.add_metric([kind.name], by_kind[kind.name])
        yield kept


def _number(value: Callable[[], float]) -> Callable[[], float]:
    return lambda: float(value())
