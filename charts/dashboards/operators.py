"""The operator itself: who leads, what it does, what it asks of the API server, and what is wrong with its runs."""

from __future__ import annotations

from panels import Board, Panel, Query, Section, Variable, lines, number, quantiles

from scalerl_api import forecast as curvefit
from scalerl_api import operator_metric_names as names

# Where a metric says nothing of a namespace, it is the one that the operator runs in.
OPERATOR = 'job="scalerl-operator", namespace="$namespace"'
ANY_RUN = 'job="scalerl-operator"'
CURVEFIT = 'job="scalerl-curvefit", namespace="$namespace"'


def rate(counter: str, by: str) -> str:
    """Increase a second, apart by ``by``."""
    return f"sum by ({by}) (rate({counter}{{{OPERATOR}}}[$__rate_interval]))"


def total(gauge: str) -> str:
    return f"sum({gauge}{{{OPERATOR}}})"


NOW = Section(
    "Now",
    (
        number("Leaders", "Should be 1.", total(names.LEADER)),
        number("Replicas", "Scraped by Prometheus.", total("up")),
        number("Runs", "Known to the leader.", total(names.RUNS)),
        number("Due", "Runs waiting for a reconcile.", total(names.QUEUE_DEPTH)),
        number("In progress", "Runs that are being reconciled.", total(names.QUEUE_IN_WORK)),
        number("Failing", "Runs whose last reconcile ended with an error.", total(names.QUEUE_FAILING)),
        Panel(
            "Runs with problems",
            "Conditions with their reasons; docs/operations.md explains each.",
            (
                Query(
                    f"max by (namespace, run, condition, reason) ({names.RUN_PROBLEM}{{{ANY_RUN}}})",
                    "problem",
                ),
            ),
            kind="rows",
            width=16,
            height=9,
        ),
        lines(
            "Runs by phase",
            "As last reconciled by the leader.",
            (f"max by (phase) ({names.RUNS}{{{OPERATOR}}})", "{{phase}}"),
            height=9,
        ),
    ),
)

WORK = Section(
    "Reconciles",
    (
        lines(
            "Reconciles",
            "By result.",
            (rate(f"{names.RECONCILE_SECONDS}_count", "result"), "{{result}}"),
            unit="ops",
        ),
        quantiles("Reconcile duration", "Seconds, by result.", names.RECONCILE_SECONDS, OPERATOR, "result"),
        lines(
            "Queue",
            "Runs that are due, in progress, or failed last time.",
            (total(names.QUEUE_DEPTH), "due"),
            (total(names.QUEUE_IN_WORK), "in progress"),
            (total(names.QUEUE_FAILING), "failing"),
        ),
        lines(
            "Leader",
            "1 for the leader.",
            (f"max by (pod) ({names.LEADER}{{{OPERATOR}}})", "{{pod}}"),
            maximum=1.0,
        ),
        lines(
            "Decisions",
            "Decisions of the autoscaler, by state.",
            (rate(names.DECISIONS, "state"), "{{state}}"),
            unit="cps",
        ),
        lines(
            "Trainer restarts",
            "Attempts that ended before the run, per hour and run.",
            (
                f"max by (namespace, run) (increase({names.TRAINER_RESTARTS}{{{ANY_RUN}}}[1h]))",
                "{{namespace}}/{{run}}",
            ),
        ),
    ),
)

API = Section(
    "API server",
    (
        lines(
            "Calls",
            "By verb and code; 0 means no response.",
            (rate(names.API_REQUESTS, "verb, code"), "{{verb}} {{code}}"),
            unit="reqps",
        ),
        quantiles("API latency", "Seconds, by verb.", names.API_SECONDS, OPERATOR, "verb"),
        lines(
            "Writes",
            "Successful writes, by kind; none while nothing changes.",
            (rate(names.WRITES, "kind"), "{{kind}}"),
            unit="wps",
        ),
        lines("Watch events", "By kind.", (rate(names.WATCH_EVENTS, "kind"), "{{kind}}"), unit="cps"),
        lines(
            "Objects in memory",
            "By kind.",
            (f"max by (kind) ({names.CACHED_OBJECTS}{{{OPERATOR}}})", "{{kind}}"),
        ),
        lines(
            "Repaired",
            "Objects in the cache that the watches had missed; should be rare.",
            (f"sum(rate({names.CACHE_REPAIRS}{{{OPERATOR}}}[$__rate_interval]))", "objects"),
            unit="cps",
        ),
    ),
)

FORECASTS = Section(
    "Curve fits",
    (
        lines(
            "Requests",
            "By path and status; only the leader sends requests, one per evaluation.",
            (
                f"sum by (path, status) (rate({curvefit.REQUESTS_METRIC}_total{{{CURVEFIT}}}[$__rate_interval]))",
                "{{path}} {{status}}",
            ),
            unit="reqps",
        ),
        quantiles("Latency", "Seconds, including queueing.", curvefit.SECONDS_METRIC, CURVEFIT, "path"),
        quantiles("Points", "Number of points in a request.", curvefit.POINTS_METRIC, CURVEFIT, unit="short"),
        lines(
            "In progress",
            "Requests being computed or queued, by replica; rejected beyond 64.",
            (f"max by (pod) ({curvefit.PENDING_METRIC}{{{CURVEFIT}}})", "{{pod}}"),
        ),
        lines(
            "Refused",
            "By code; includes curves that cannot be fitted.",
            (
                f"sum by (code) (rate({curvefit.REFUSED_METRIC}_total{{{CURVEFIT}}}[$__rate_interval]))",
                "{{code}}",
            ),
            unit="reqps",
        ),
        lines(
            "Replicas scraped",
            "Curve-fit sidecars scraped by Prometheus.",
            (f"sum(up{{{CURVEFIT}}})", "replicas"),
        ),
    ),
)

PROCESS = Section(
    "Process",
    (
        quantiles(
            "Event loop lag",
            "Delay with which a sleeping task resumes; high if something blocks the loop.",
            names.LOOP_LAG_SECONDS,
            OPERATOR,
        ),
        lines(
            "Memory",
            "Resident, by replica.",
            (f"max by (pod) (process_resident_memory_bytes{{{OPERATOR}}})", "{{pod}}"),
            unit="bytes",
        ),
        lines(
            "CPU",
            "Cores, by replica.",
            (f"sum by (pod) (rate(process_cpu_seconds_total{{{OPERATOR}}}[$__rate_interval]))", "{{pod}}"),
        ),
    ),
)

BOARD = Board(
    uid="scalerl-operator",
    title="ScaleRL / operator",
    description="The operator, and problems of its runs.",
    sections=(NOW, WORK, API, FORECASTS, PROCESS),
    variables=(Variable("namespace", names.LEADER),),
    links=(("Fleet", "scalerl-fleet"), ("Run", "scalerl-run")),
)
