"""Every metric that the processes of the system register, with its labels, taken from the processes' own registries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from scalerl_api import wire
from scalerl_api.metrics_fields import STEP_FIGURES, TASK_FIGURES, task_key
from scalerl_api.status import Condition, OutlookStatus, RunStatus
from scalerl_coordinator.journal import JournalCounters
from scalerl_coordinator.metrics import Metrics as CoordinatorMetrics
from scalerl_coordinator.response_log import HistoryCounters
from scalerl_curvefit.sidecar.metrics import Metrics as SidecarMetrics
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_operator.controller.report import RunFigures
from scalerl_operator.kube.cache import Cache
from scalerl_operator.process_metrics import Metrics as OperatorMetrics
from scalerl_trainer.metrics import Metrics as TrainerMetrics

SAMPLES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


@dataclass(frozen=True)
class Registered:
    """One metric family; ``labels`` without ``le``."""

    name: str
    kind: str
    help: str
    labels: frozenset[str]
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in SAMPLES[self.kind])


def registered() -> list[Registered]:
    """All of them."""
    found = [metric for registry in _registries() for metric in _of(registry)]
    return found + [_family(family) for family in text_string_to_metric_families(_operator().runs.text())]


def expositions() -> list[str]:
    """What Prometheus reads from each process, once everything without labels has been counted."""
    *others, _ = _registries()
    return [*(generate_latest(registry).decode() for registry in others), _operator().text().decode()]


def _registries() -> Iterator[CollectorRegistry]:
    status = wire.Status(
        phase=wire.Phase.RUNNING,
        waiting_for="",
        step=1,
        published_version=1,
        stop_reason="",
        counts=wire.Counts(
            acknowledged=0, trained=0, filtered=0, queued=0, leased=0, late=0, stale=0, invalid=0, duplicate=0,
            expired_leases=0,
        ),
        members=[],
        points=[
            wire.EvaluationPoint(
                version=0, work_tokens=0, reward=0.5, standard_error=0.1, samples=1, prompts=1, set_digest="",
                mixed_versions=False, truncated_fraction=0.0, mean_tokens=1.0, wall_seconds=0.0, device_seconds=0.0,
                pass_at=[wire.PassAt(2, 0.5, 0.4, 0.6)],
            )
        ],
        last_step_stats=dict.fromkeys(
            [*STEP_FIGURES, *(task_key(figure, "sums") for figure in TASK_FIGURES)], 0.0
        ),
        wall_seconds=0.0,
        device_seconds=0.0,
        tokens_generated=0,
        tokens_trained=0,
        generator_busy_fraction=0.0,
        trainer_busy_fraction=0.0,
        max_staleness_steps=0,
        mean_staleness_steps=0.0,
        mismatch=[wire.Mismatch(source="sampled", positions="all", kl=0.0, recent_kl=0.0, tokens=1)],
        trackers=[wire.Tracker(name="tensorBoard")],
    )  # fmt: skip
    coordinator = CoordinatorMetrics(
        lambda: status,
        JournalCounters(),
        refusing=lambda: False,
        staleness_bound=1,
        closed_slots={},
        partial_bytes=lambda: 0,
        history=HistoryCounters(),
    )
    yield coordinator._registry
    yield TrainerMetrics().registry
    yield ActorMetrics(ServerState(), BusyClock()).registry
    yield SidecarMetrics().registry
    yield _operator().registry


def _operator() -> OperatorMetrics:
    """With a run that has all series."""
    operator = OperatorMetrics()
    operator.watch(_Idle(), Cache(lambda key: None), _Idle())
    problem = Condition(
        type="Failed", status="True", reason="Diverged", last_transition_time="2026-01-01T00:00:00Z"
    )
    numbers = {name: 0 if name == "tokens" else "0.5" for name in OutlookStatus.model_fields}
    status = RunStatus(conditions=[problem], decision="STOP", outlook=OutlookStatus.model_validate(numbers))
    figures = RunFigures(
        max_steps=1, budget_used={"maxSteps": 0.5}, estimated_end=1.0, deadline=1.0, stop_after=1
    )
    operator.run(("namespace", "run"), status, figures)
    return operator


class _Idle:
    """A queue and a leader with nothing to do."""

    depth = in_work = failing = staticmethod(lambda: 0)
    is_leader = staticmethod(lambda: True)


def _of(registry: CollectorRegistry) -> Iterator[Registered]:
    # What a counter with labels counts is not in the exposition before its first value, so that the collectors are asked.
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            buckets = tuple(getattr(collector, "_upper_bounds", None) or collector._kwargs.get("buckets", ()))
            yield Registered(
                collector._name,
                collector._type,
                collector._documentation,
                frozenset(collector._labelnames),
                tuple(float(b) for b in buckets if float(b) != float("inf")),
            )
        else:
            for family in collector.collect():
                yield _family(family)


def _family(family: Metric) -> Registered:
    labels = frozenset(name for sample in family.samples for name in sample.labels) - {"le"}
    return Registered(family.name, family.type, family.documentation, labels)
