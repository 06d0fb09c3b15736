"""Names of the operator's Prometheus metrics, for the operator and for the dashboards and alerts that query them.

Counters have the suffix ``_total``, as in Prometheus. The description of each metric names all of its labels.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "scalerl_operator_"

RECONCILE_SECONDS: Final = f"{PREFIX}reconcile_seconds"
"""Histogram: duration of a reconcile of one run, by ``result``: ok, error, cancelled (by a shutdown or a lost lease)."""
QUEUE_DEPTH: Final = f"{PREFIX}queue_depth"
"""Gauge: runs that are queued for a worker."""
QUEUE_IN_WORK: Final = f"{PREFIX}queue_in_work"
"""Gauge: runs that are being reconciled."""
QUEUE_FAILING: Final = f"{PREFIX}queue_failing"
"""Gauge: runs whose last reconcile ended with an error."""
API_REQUESTS: Final = f"{PREFIX}api_requests_total"
"""Counter: requests to the API server by ``verb``, ``kind`` and ``code`` (0: no response)."""
API_SECONDS: Final = f"{PREFIX}api_request_seconds"
"""Histogram: duration of requests to the API server, by ``verb``."""
WRITES: Final = f"{PREFIX}writes_total"
"""Counter: writes accepted by the API server, by ``kind``; an idle operator writes only its Lease and, once a minute,
its claim of each namespace that has runs."""
FOREIGN_NAMESPACES: Final = f"{PREFIX}foreign_namespaces"
"""Gauge: watched namespaces whose runs another release of the operator reconciles; this one leaves them alone."""
LEADER: Final = f"{PREFIX}leader"
"""Gauge: 1 while this replica may write."""
RUNS: Final = f"{PREFIX}runs"
"""Gauge: runs by ``phase``, as this replica last reconciled them; a standby reports none."""
RUN_PROBLEM: Final = f"{PREFIX}run_problem"
"""Gauge: 1 for each ``condition`` of a run (``namespace``, ``run``) that indicates a problem, with its ``reason``. ``run`` has
the value of the label ``scalerl.dev/run`` of the run's pods, so that it joins with their metrics."""
TRAINER_RESTARTS: Final = f"{PREFIX}run_trainer_restarts_total"
"""Counter: attempts of the trainer that ended before the run (``namespace``, ``run``)."""
DECISIONS: Final = f"{PREFIX}decisions_total"
"""Counter: decisions of the autoscaler by ``state``."""
WATCH_EVENTS: Final = f"{PREFIX}watch_events_total"
"""Counter: events received from watches, by ``kind``."""
CACHED_OBJECTS: Final = f"{PREFIX}cached_objects"
"""Gauge: objects of runs kept in memory, by ``kind``."""
CACHE_REPAIRS: Final = f"{PREFIX}cache_repairs_total"
"""Counter: objects whose creation, change or deletion a watch had missed, detected by a comparison with a list."""
LOOP_LAG_SECONDS: Final = f"{PREFIX}loop_lag_seconds"
"""Histogram: delay with which the event loop resumes a sleeping task; blocking code increases it."""
