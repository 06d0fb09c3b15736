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
        number("Leaders", "One, always.", total(names.LEADER)),
        number("Replicas", "That Prometheus reaches.", total("up")),
        number("Runs", "That the leader knows.", total(names.RUNS)),
        number("Due", "Runs that wait to be looked at.", total(names.QUEUE_DEPTH)),
        number("In work", "Runs that are being reconciled.", total(names.QUEUE_IN_WORK)),
        number("Failing", "Runs whose last reconcile ended with an error.", total(names.QUEUE_FAILING)),
        Panel(
            "Runs that are not as they should be",
            "Conditions, with their reasons; docs/operations.md says what to do about each.",
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
            "As the leader last reconciled them.",
            (f"max by (phase) ({names.RUNS}{{{OPERATOR}}})", "{{phase}}"),
            height=9,
        ),
    ),
)

WORK = Section(
    "Looks at runs",
    (
        lines(
            "Looks",
            "By result.",
            (rate(f"{names.RECONCILE_SECONDS}_count", "result"), "{{result}}"),
            unit="ops",
        ),
        quantiles("A look", "Seconds, by result.", names.RECONCILE_SECONDS, OPERATOR, "result"),
        lines(
            "Queue",
            "Runs that wait, are in work, failed last time.",
            (total(names.QUEUE_DEPTH), "due"),
            (total(names.QUEUE_IN_WORK), "in work"),
            (total(names.QUEUE_FAILING), "failing"),
        ),
        lines(
            "Leader",
            "1 for the replica that writes.",
            (f"max by (pod) ({names.LEADER}{{{OPERATOR}}})", "{{pod}}"),
            maximum=1.0,
        ),
        lines(
            "Decisions",
            "Of the autoscaler, by state.",
            (rate(names.DECISIONS, "state"), "{{state}}"),
            unit="cps",
        ),
        lines(
            "Trainer restarts",
            "Attempts that ended before the run did, in an hour, by run.",
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
            "By verb and code; 0 is no answer.",
            (rate(names.API_REQUESTS, "verb, code"), "{{verb}} {{code}}"),
            unit="reqps",
        ),
        quantiles("Answers", "Seconds, by verb.", names.API_SECONDS, OPERATOR, "verb"),
        lines(
            "Writes",
            "That were taken, by kind; none while nothing changes.",
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
            "Mended",
            "Objects that no watch event had reported; more than one now and then is worth a look.",
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
            "By what was asked and how it was answered; only the leader asks, once an evaluation.",
            (
                f"sum by (path, status) (rate({curvefit.REQUESTS_METRIC}_total{{{CURVEFIT}}}[$__rate_interval]))",
                "{{path}} {{status}}",
            ),
            unit="reqps",
        ),
        quantiles("An answer", "Seconds, with the wait for it.", curvefit.SECONDS_METRIC, CURVEFIT, "path"),
        quantiles("Points", "Of a request's curve.", curvefit.POINTS_METRIC, CURVEFIT, unit="short"),
        lines(
            "In work",
            "Requests that are computed or wait for it, by replica; at 64 others are refused.",
            (f"max by (pod) ({curvefit.PENDING_METRIC}{{{CURVEFIT}}})", "{{pod}}"),
        ),
        lines(
            "Refused",
            "By code; a curve that cannot be fitted is no fault of the service.",
            (
                f"sum by (code) (rate({curvefit.REFUSED_METRIC}_total{{{CURVEFIT}}}[$__rate_interval]))",
                "{{code}}",
            ),
            unit="reqps",
        ),
        lines(
            "Reached",
            "Replicas whose curve fits Prometheus reaches.",
            (f"sum(up{{{CURVEFIT}}})", "replicas"),
        ),
    ),
)

PROCESS = Section(
    "Process",
    (
        quantiles(
            "Event loop lag",
            "How late a task comes back; what blocks the loop shows here.",
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
    description="The operator itself, and what is wrong with its runs.",
    sections=(NOW, WORK, API, FORECASTS, PROCESS),
    variables=(Variable("namespace", names.LEADER),),
    links=(("Fleet", "scalerl-fleet"), ("Run", "scalerl-run")),
)
