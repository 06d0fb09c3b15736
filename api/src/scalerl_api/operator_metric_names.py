"""Names of the operator's Prometheus metrics, for the process that has them and the dashboards and alerts that ask.

Counters carry ``_total`` as Prometheus shows them. All labels are named beside each.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "scalerl_operator_"

RECONCILE_SECONDS: Final = f"{PREFIX}reconcile_seconds"
"""Histogram: one reconcile of one run, by ``result``: ok, error, cancelled (by a shutdown or a lost lead)."""
QUEUE_DEPTH: Final = f"{PREFIX}queue_depth"
"""Gauge: runs that are due and wait for a worker."""
QUEUE_IN_WORK: Final = f"{PREFIX}queue_in_work"
"""Gauge: runs that are being reconciled."""
QUEUE_FAILING: Final = f"{PREFIX}queue_failing"
"""Gauge: runs whose last reconcile ended with an error."""
API_REQUESTS: Final = f"{PREFIX}api_requests_total"
"""Counter: calls to the API server by ``verb``, ``kind`` and ``code`` (0: no answer)."""
API_SECONDS: Final = f"{PREFIX}api_request_seconds"
"""Histogram: from a call to its answer, by ``verb``."""
WRITES: Final = f"{PREFIX}writes_total"
"""Counter: writes that the API server took, by ``kind``; an idle operator makes none but those of its Lease."""
LEADER: Final = f"{PREFIX}leader"
"""Gauge: 1 while this replica may write."""
RUNS: Final = f"{PREFIX}runs"
"""Gauge: runs by ``phase``, as this replica last reconciled them; a standby has none."""
RUN_PROBLEM: Final = f"{PREFIX}run_problem"
"""Gauge: 1 for each ``condition`` of a run (``namespace``, ``run``) that is not as it should be, with its ``reason``.
``run`` is the label ``scalerl.dev/run`` of its pods, so that it joins with what those measure."""
TRAINER_RESTARTS: Final = f"{PREFIX}run_trainer_restarts_total"
"""Counter: attempts of the trainer that ended before the run (``namespace``, ``run``) did."""
DECISIONS: Final = f"{PREFIX}decisions_total"
"""Counter: decisions of the autoscaler by ``state``."""
WATCH_EVENTS: Final = f"{PREFIX}watch_events_total"
"""Counter: what the watches brought, by ``kind``."""
CACHED_OBJECTS: Final = f"{PREFIX}cached_objects"
"""Gauge: objects of runs kept in memory, by ``kind``."""
CACHE_REPAIRS: Final = f"{PREFIX}cache_repairs_total"
"""Counter: objects of which a watch had brought nothing, or no end, found by comparing with a list."""
LOOP_LAG_SECONDS: Final = f"{PREFIX}loop_lag_seconds"
"""Histogram: how late the event loop came back to a task that slept; what blocks it shows here."""
