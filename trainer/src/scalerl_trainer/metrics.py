"""Metrics of a trainer's process, and the HTTP server for probes and scrapes.

Statistics of a step are fields of its report (:mod:`.step_stats`); metrics of a run: ``scalerl_coordinator.metrics``, and on a
cluster ``scalerl_operator.run_metrics``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from scalerl_api import endpoints

log = logging.getLogger(__name__)

_STEP_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
_PUBLISH_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Metrics of one rank, all named ``scalerl_trainer_*``."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace="scalerl_trainer", registry=self.registry)
        gauge = partial(Gauge, namespace="scalerl_trainer", registry=self.registry)
        histogram = partial(Histogram, namespace="scalerl_trainer", registry=self.registry)
        self.version = gauge("version", "Optimizer updates applied.")
        self.published_version = gauge("published_version", "Last published version.")
        self.step_stat = gauge("step_stat", "Scalars of the last step, by name (rank 0).", ["name"])
        self.seconds = counter("seconds", "Wall-clock seconds by phase.", ["phase"])
        self.step_seconds = histogram(
            "step_seconds",
            "Seconds to fetch, compute and apply a step, without waiting; mean over ranks (rank 0).",
            buckets=_STEP_SECONDS,
        )
        self.publish_seconds = histogram(
            "publish_seconds",
            "Seconds to publish a version to all generators (rank 0).",
            buckets=_PUBLISH_SECONDS,
        )
        self.tokens = counter("tokens", "Completion tokens trained (rank 0).")
        self.publishes = counter("publishes", "Publishes by outcome.", ["outcome"])
        self.publish_members_failed = counter(
            "publish_members_failed", "Generators that failed to receive a version."
        )
        self.checkpoints = counter("checkpoints", "Checkpoints by outcome.", ["outcome"])
        self.checkpoint_step = gauge("checkpoint_step", "Step of the newest checkpoint.")
        self.uploads = counter(
            "checkpoint_uploads",
            "Checkpoints copied to checkpoint.to, and failed attempts (of each rank), by outcome.",
            ["outcome"],
        )
        self.uploaded_bytes = counter(
            "checkpoint_uploaded_bytes", "Bytes copied to checkpoint.to by this rank."
        )
        self.uploaded_step = gauge(
            "checkpoint_uploaded_step",
            "Step of the newest checkpoint that is complete in checkpoint.to; -1 without one.",
        )
        self.exports = counter(
            "exports",
            "Models written to the volume (write) and copied to trainer.export.to (copy), by outcome.",
            ["operation", "outcome"],
        )
        self.export_version = gauge("export_version", "Version of the newest exported model.")

    def show(self, stats: Mapping[str, float]) -> None:
        """Set the gauges to a step's scalars, by name."""
        for name, value in stats.items():
            self.step_stat.labels(name).set(value)


class StatusServer:
    """Serves ``/healthz``, ``/readyz`` and ``/metrics`` on a daemon thread.

    ``ready`` is set when the training loop begins. ``/healthz`` responds with 200 while the process lives; a rank that hangs
    in a collective ends by the collective's timeout.
    """

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        self.ready = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                if self.path == endpoints.METRICS:
                    self._answer(200, generate_latest(metrics.registry), CONTENT_TYPE_LATEST)
                elif self.path == endpoints.HEALTH:
                    self._answer(200, b"ok\n")
                elif self.path == endpoints.READY:
                    ready = server.ready.is_set()
                    self._answer(200 if ready else 503, b"ready\n" if ready else b"starting\n")
                else:
                    self._answer(404, b"not found\n")

            def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
