"""Prometheus metrics, read from the state at each scrape; registered here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scalerl_api.wire import Phase, Status
from scalerl_coordinator.journal import JournalFigures
from scalerl_coordinator.records import GivenUpFor

_PREFIX = "scalerl_coordinator_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The process's registry, and the counters that the server moves itself.

    refusing: whether the journal takes nothing now. staleness_bound: steps that a trained token may be old.
    closed_slots: of this process, by why they were given up, ``""`` for those that were served.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        journal: JournalFigures,
        *,
        refusing: Callable[[], bool],
        staleness_bound: int,
        closed_slots: Mapping[str, int],
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_RunCollector(status, journal, refusing, staleness_bound, closed_slots))
        self.requests = Counter(
            _PREFIX + "requests",
            "Answered requests by endpoint and status code.",
            ("path", "code"),
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            _PREFIX + "request_seconds",
            "From a request to its answer, by endpoint; long polls wait for work.",
            ("path",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.received_bytes = Counter(
            _PREFIX + "received_bytes", "Request bodies taken in.", registry=self._registry
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _RunCollector(Collector):
    def __init__(
        self,
        status: Callable[[], Status],
        journal: JournalFigures,
        refusing: Callable[[], bool],
        staleness_bound: int,
        closed_slots: Mapping[str, int],
    ) -> None:
        self._status = status
        self._journal = journal
        self._refusing = refusing
        self._staleness_bound = staleness_bound
        self._closed_slots = closed_slots

    def collect(self) -> Iterable[Metric]:
        status, journal = self._status(), self._journal
        counts = status.counts
        rollouts = GaugeMetricFamily(_PREFIX + "rollouts", "Training rollouts by fate.", labels=("fate",))
        for fate in ("trained", "filtered", "given_up", "skipped", "queued", "leased"):
            rollouts.add_metric((fate,), getattr(counts, fate))
        yield rollouts
        dropped = CounterMetricFamily(
            _PREFIX + "dropped_rollouts", "Rollouts dropped, by reason.", labels=("reason",)
        )
        for reason in ("late", "stale", "invalid", "duplicate", "held_out_invalid"):
            dropped.add_metric((reason,), getattr(counts, reason))
        yield dropped
        phases = GaugeMetricFamily(_PREFIX + "phase", "1 for the phase the run is in.", labels=("phase",))
        for phase in Phase:
            phases.add_metric((phase.value,), float(status.phase is phase))
        yield phases
        for name, value, text in (
            ("members", len(status.members), "Registered generators."),
            ("step", status.step, "Steps trained."),
            ("published_version", status.published_version, "Newest published weights."),
            ("staleness_steps_max", status.max_staleness_steps, "Of any trained token."),
            ("staleness_steps_mean", status.mean_staleness_steps, "Over trained tokens."),
            ("staleness_bound_steps", self._staleness_bound, "Older tokens are not trained on."),
            # These two go back with the run to a checkpoint, which no counter may.
            ("acknowledged_rollouts", counts.acknowledged, "Accepted, less what a fresh start gave up."),
            ("trained_tokens", status.tokens_trained, "On the present line of versions."),
            (
                "journal_refusing",
                self._refusing(),
                "1 while the disk takes no more, and nothing is accepted.",
            ),
            ("generator_busy_fraction", status.generator_busy_fraction, "Over the run."),
            ("trainer_busy_fraction", status.trainer_busy_fraction, "Over the run."),
            (
                "evaluation_reward",
                status.points[-1].reward if status.points else None,
                "Newest point of the curve.",
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))
        given_up = CounterMetricFamily(
            _PREFIX + "given_up_slots",
            "Training slots given up since this process began, by why.",
            labels=("why",),
        )
        for why in GivenUpFor:
            given_up.add_metric((why.value,), self._closed_slots.get(why.value, 0))
        yield given_up
        yield CounterMetricFamily(
            _PREFIX + "closed_slots",
            "Training slots served or given up since this process began.",
            value=float(sum(self._closed_slots.values())),
        )
        mismatch = GaugeMetricFamily(
            _PREFIX + "mismatch_kl",
            "KL estimate (k3) of trainer against generators, of late, by what was measured and token position.",
            labels=("source", "positions"),
        )
        for measured in status.mismatch:
            mismatch.add_metric((measured.source, measured.positions), measured.recent_kl)
        yield mismatch
        step = GaugeMetricFamily(
            _PREFIX + "tracker_step", "Newest step that an experiment tracker was given.", labels=("tracker",)
        )
        failures = CounterMetricFamily(
            _PREFIX + "tracker_failures",
            "Attempts of an experiment tracker that failed since this process began; each is tried again.",
            labels=("tracker",),
        )
        for tracker in status.trackers:
            step.add_metric((tracker.name,), tracker.step)
            failures.add_metric((tracker.name,), tracker.failures)
        yield from (step, failures)
        for name, total, text in (
            ("expired_leases", counts.expired_leases, "Training leases given away."),
            (
                "timed_out_leases",
                counts.timed_out_leases,
                "Of those: nothing was generated for leaseSeconds.",
            ),
            ("grading_errors", status.grading_errors, "Accepted rollouts whose verifier failed."),
            ("checkpoint_failures", status.checkpoint_failures, "Checkpoints that could not be written."),
            ("skipped_steps", status.skipped_steps, "Steps that were not applied: not finite, or exploding."),
            ("generated_tokens", status.tokens_generated, "By all generators."),
            ("wall_seconds", status.wall_seconds, "Since the first lease."),
            ("device_seconds", status.device_seconds, "Devices times seconds."),
            ("journal_syncs", journal.syncs, "Group commits."),
            ("journal_sync_seconds", journal.sync_seconds, "Spent writing and syncing."),
            ("journal_bytes", journal.bytes_written, "Written to segments."),
            ("journal_refusals", journal.refusals, "Times the disk took no more."),
            ("journal_rotations", journal.rotations, "Segments finished."),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=float(total))
