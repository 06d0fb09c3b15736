"""The sidecar's metrics, registered once, with names from the API."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from scalerl_api import forecast as wire


class Metrics:
    """Metrics of one application, with their own registry, so that tests can run several applications in one process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            wire.REQUESTS_METRIC, "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.refused = Counter(wire.REFUSED_METRIC, "Requests refused.", ["code"], registry=self.registry)
        self.pending = Gauge(
            wire.PENDING_METRIC, "Requests being computed or queued.", registry=self.registry
        )
        self.seconds = Histogram(
            wire.SECONDS_METRIC,
            "Seconds from the first byte received to the response.",
            ["path"],
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
            registry=self.registry,
        )
        self.points = Histogram(
            wire.POINTS_METRIC,
            "Points per request.",
            buckets=(10, 30, 100, 300, 1_000, 10_000, 100_000),
            registry=self.registry,
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
