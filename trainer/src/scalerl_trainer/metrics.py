"""Metrics of a trainer's process, and the HTTP server for probes and scrapes.

Statistics of a step are fields of its report (:mod:`.step_stats`); metrics of a run: ``scalerl_coordinator.metrics``, and on a
cluster ``scalerl_operator.run_metrics``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
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
        self.version = Gauge("scalerl_trainer_version", "Optimizer updates applied.", registry=self.registry)
        self.published_version = Gauge(
            "scalerl_trainer_published_version", "Last published version.", registry=self.registry
        )
        self.step_stat = Gauge(
            "scalerl_trainer_step_stat",
            "Scalars of the last step, by name (rank 0).",
            ["name"],
            registry=self.registry,
        )
        self.seconds = Counter(
            "scalerl_trainer_seconds", "Wall-clock seconds by phase.", ["phase"], registry=self.registry
        )
        self.step_seconds = Histogram(
            "scalerl_trainer_step_seconds",
            "Seconds to fetch, compute and apply a step, without waiting; mean over ranks (rank 0).",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self.publish_seconds = Histogram(
            "scalerl_trainer_publish_seconds",
            "Seconds to publish a version to all generators (rank 0).",
            buckets=_PUBLISH_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "scalerl_trainer_tokens", "Completion tokens trained (rank 0).", registry=self.registry
        )
        self.publishes = Counter(
            "scalerl_trainer_publishes", "Publishes by outcome.", ["outcome"], registry=self.registry
        )
        self.publish_members_failed = Counter(
            "scalerl_trainer_publish_members_failed",
            "Generators that failed to receive a version.",
            registry=self.registry,
        )
        self.checkpoints = Counter(
            "scalerl_trainer_checkpoints", "Checkpoints by outcome.", ["outcome"], registry=self.registry
        )
        self.checkpoint_step = Gauge(
            "scalerl_trainer_checkpoint_step", "Step of the newest checkpoint.", registry=self.registry
        )
        self.uploads = Counter(
            "scalerl_trainer_checkpoint_uploads",
            "Checkpoints copied to checkpoint.to, and failed attempts (of each rank), by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.uploaded_bytes = Counter(
            "scalerl_trainer_checkpoint_uploaded_bytes",
            "Bytes copied to checkpoint.to by this rank.",
            registry=self.registry,
        )
        self.uploaded_step = Gauge(
            "scalerl_trainer_checkpoint_uploaded_step",
            "Step of the newest checkpoint that is complete in checkpoint.to; -1 without one.",
            registry=self.registry,
        )
        self.exports = Counter(
            "scalerl_trainer_exports",
            "Models written to the volume (write) and copied to trainer.export.to (copy), by outcome.",
            ["operation", "outcome"],
            registry=self.registry,
        )
        self.export_version = Gauge(
            "scalerl_trainer_export_version", "Version of the newest exported model.", registry=self.registry
        )

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
