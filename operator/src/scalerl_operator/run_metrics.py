"""Metrics of each run on a cluster, in Prometheus' text format; those of the operator's process: :mod:`.process_metrics`.

A run's lines are formatted when it is reconciled, and joined at a scrape: a registry that formats some twenty series of a thousand
runs at each scrape would block the event loop for a fifth of a second. All series of a run are dropped with it. Their number
is bounded: label values are of fixed sets, besides namespace and run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from prometheus_client.utils import floatToGoString

from scalerl_api import operator_metric_names as names
from scalerl_api.conditions import Phase
from scalerl_api.status import OutlookStatus, RunStatus
from scalerl_autoscaling.models import State
from scalerl_operator.controller.conditions import is_problem
from scalerl_operator.controller.report import RunFigures
from scalerl_operator.kube.types import Key
from scalerl_operator.names import label_value

Values = Iterable[tuple[Mapping[str, str], float | str | None]]
"""Labels of a series, besides namespace and run, and its value; None or text that is no number: no series."""


class Family(NamedTuple):
    """A metric with the labels ``namespace`` and ``run``, and perhaps more."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str


FAMILIES: Final = (
    Family(names.RUN_PHASE, "gauge", "1 for the phase of a run, with the reason of it."),
    Family(names.RUN_PROBLEM, "gauge", "1 for each unhealthy condition of a run."),
    Family(names.TRAINER_RESTARTS, "counter", "Trainer attempts that ended before the run."),
    Family(names.RUN_STEP, "gauge", "Steps trained."),
    Family(names.RUN_MAX_STEPS, "gauge", "Limit of steps of the budget."),
    Family(names.RUN_BUDGET_USED, "gauge", "Used fraction of each limit of the budget."),
    Family(names.RUN_ESTIMATED_END, "gauge", "Unix time at which the first limit of the budget is reached."),
    Family(names.RUN_DEADLINE, "gauge", "Unix time of the deadline."),
    Family(names.RUN_DECISION, "gauge", "1 for the state of the latest decision."),
    Family(names.RUN_STOP_VOTES, "gauge", "Consecutive evaluations that voted for a stop, or had the alarm."),
    Family(names.RUN_STOP_VOTES_NEEDED, "gauge", "Votes that a stop needs."),
    Family(names.RUN_FORECAST_REWARD, "gauge", "Reward predicted at the horizon, with its 90 % interval."),
    Family(names.RUN_FORECAST_ASYMPTOTE, "gauge", "Asymptote of the curve, with its 90 % interval."),
    Family(names.RUN_FORECAST_GAIN, "gauge", "Gain of reward up to the horizon, with its 90 % interval."),
    Family(names.RUN_FORECAST_GAIN_PROBABILITY, "gauge", "Probability of a gain above minGain."),
    Family(names.RUN_FORECAST_TOKENS, "gauge", "Completion tokens of trained steps at the horizon."),
)
_HEADERS: Final = tuple(f"# HELP {f.name} {f.text}\n# TYPE {f.name} {f.kind}\n" for f in FAMILIES)
_STATES: Final[frozenset[str]] = frozenset(State)


class _Run(NamedTuple):
    """phase: of the run. lines: its text in each of :data:`FAMILIES`."""

    phase: Phase
    lines: tuple[str, ...]


class RunMetrics:
    """The metrics of all runs that this replica reconciles."""

    def __init__(self) -> None:
        self._runs: dict[Key, _Run] = {}

    def set(self, key: Key, status: RunStatus, figures: RunFigures) -> None:
        """Records a run."""
        namespace, name = key
        start = f'{{namespace="{namespace}",run="{label_value(name)}"'
        values = _values(status, figures)
        lines = tuple(_lines(f"{family.name}{start}", values.get(family.name, ())) for family in FAMILIES)
        self._runs[key] = _Run(status.phase, lines)

    def remove(self, key: Key) -> None:
        """Drops a deleted run."""
        self._runs.pop(key, None)

    def clear(self) -> None:
        """Drops all runs: this replica no longer leads, and the next leader reports them."""
        self._runs.clear()

    def phases(self) -> Counter[Phase]:
        """Number of runs by phase."""
        return Counter(run.phase for run in self._runs.values())

    def text(self) -> str:
        """All series."""
        every = [run.lines for run in self._runs.values()]
        parts = []
        for index, header in enumerate(_HEADERS):
            parts.append(header)
            parts.extend(lines[index] for lines in every)
        return "".join(parts)


def problems(status: RunStatus) -> tuple[tuple[str, str], ...]:
    """Conditions of a run that indicate a problem, with their reasons."""
    return tuple((c.type, c.reason) for c in status.conditions if is_problem(c))


def _values(status: RunStatus, figures: RunFigures) -> dict[str, Values]:
    decision, outlook = status.decision, status.outlook
    found: dict[str, Values] = {
        names.RUN_PHASE: [({"phase": status.phase, "reason": status.reason}, 1.0)],
        names.RUN_PROBLEM: [
            ({"condition": condition, "reason": reason}, 1.0) for condition, reason in problems(status)
        ],
        names.TRAINER_RESTARTS: [({}, status.trainer.restarts)],
        names.RUN_STEP: [({}, status.step or 0)],
        names.RUN_MAX_STEPS: [({}, figures.max_steps)],
        names.RUN_BUDGET_USED: [({"limit": limit}, used) for limit, used in figures.budget_used.items()],
        names.RUN_ESTIMATED_END: [({}, figures.estimated_end)],
        names.RUN_DEADLINE: [({}, figures.deadline)],
    }
    if figures.stop_after is None:
        return found
    found[names.RUN_DECISION] = [({"state": decision}, 1.0)] if decision in _STATES else []
    found[names.RUN_STOP_VOTES] = [({}, status.stop_votes)]
    found[names.RUN_STOP_VOTES_NEEDED] = [({}, figures.stop_after)]
    if outlook is not None:
        found |= _forecast(outlook)
    return found


def _forecast(outlook: OutlookStatus) -> dict[str, Values]:
    return {
        names.RUN_FORECAST_REWARD: _interval(outlook.median, outlook.low, outlook.high),
        names.RUN_FORECAST_ASYMPTOTE: _interval(
            outlook.asymptote, outlook.asymptote_low, outlook.asymptote_high
        ),
        names.RUN_FORECAST_GAIN: _interval(outlook.gain, outlook.gain_low, outlook.gain_high),
        names.RUN_FORECAST_GAIN_PROBABILITY: [({}, outlook.gain_probability)],
        names.RUN_FORECAST_TOKENS: [({}, outlook.tokens)],
    }


def _interval(median: str, low: str, high: str) -> Values:
    return [({"bound": "median"}, median), ({"bound": "low"}, low), ({"bound": "high"}, high)]


def _lines(start: str, values: Values) -> str:
    return "".join(_line(start, labels, value) for labels, value in values if value is not None)


def _line(start: str, labels: Mapping[str, str], value: float | str) -> str:
    try:
        number = float(value)
    except ValueError:
        return ""  # of another writer of the status
    more = "".join(f',{name}="{_escaped(text)}"' for name, text in labels.items())
    return f"{start}{more}}} {floatToGoString(number)}\n"  # type: ignore[no-untyped-call]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
