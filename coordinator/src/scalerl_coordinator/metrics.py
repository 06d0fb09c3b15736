"""Prometheus metrics of a run and of the coordinator's process, computed from the state at each scrape; no other module registers any.

Figures of the run are fields of :class:`~scalerl_api.wire.Status`, which :func:`.run_status.build_status` fills from the state
(:mod:`.accounting`, :mod:`.evaluation`); those of the process are counted by the server, the journal and the response store. What the operator exports of a run, also of one
without a coordinator, is in ``scalerl_operator.run_metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

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

from scalerl_api.curve import MAX_LABEL_VALUES
from scalerl_api.metrics_fields import STEP_FIGURES, TASK_FIGURES, by_task
from scalerl_api.wire import MAIN_TASK, Phase, Status
from scalerl_coordinator.journal import JournalCounters
from scalerl_coordinator.journal_records import GiveUpReason
from scalerl_coordinator.partials import MAX_BYTES
from scalerl_coordinator.response_log import DROP_REASONS, LOOKUP_RESULTS, HistoryCounters

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

_NAMESPACE = "scalerl_coordinator"
_PREFIX = f"{_NAMESPACE}_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """The process's registry, and the counters that the server increments.

    Args:
        refusing: returns whether the journal refuses records at present.
        staleness_bound: maximum staleness of a trained token, in steps.
        closed_slots: number of slots closed by this process, by cause of giving up; ``""`` counts the served slots.
        partial_bytes: returns the bytes of unfinished completions that are kept.
        history: counters of the store of past responses; None without a store.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        journal: JournalCounters,
        *,
        refusing: Callable[[], bool],
        staleness_bound: int,
        closed_slots: Mapping[str, int],
        partial_bytes: Callable[[], int],
        history: HistoryCounters | None = None,
    ) -> None:
        self._status, self._journal, self._refusing = status, journal, refusing
        self._staleness_bound, self._closed_slots = staleness_bound, closed_slots
        self._partial_bytes, self._history = partial_bytes, history
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        counter = partial(Counter, namespace=_NAMESPACE, registry=self._registry)
        self.requests = counter("requests", "Requests by endpoint and status code.", ("path", "code"))
        self.request_seconds = Histogram(
            "request_seconds",
            "Request duration in seconds, by endpoint; long polls wait for work.",
            ("path",),
            namespace=_NAMESPACE,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.received_bytes = counter("received_bytes", "Bytes of request bodies received.")
        self.lost_trace_lines = counter("lost_trace_lines", "Lines of trace.jsonl that could not be written.")
        self.lost_rollouts = counter(
            "lost_rollouts",
            "Rollouts that the record of rollouts lacks, because they could not be written in time or at all.",
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        status, journal = self._status(), self._journal
        counts = status.counts
        outcomes = ("trained", "filtered", "given_up", "skipped", "queued", "leased")
        of_outcome = {outcome: getattr(counts, outcome) for outcome in outcomes}
        yield _by(GaugeMetricFamily, "rollouts", "Training rollouts by outcome.", "outcome", of_outcome)
        reasons = ("late", "stale", "invalid", "duplicate", "held_out_invalid")
        of_reason = {reason: getattr(counts, reason) for reason in reasons}
        yield _by(
            CounterMetricFamily, "dropped_rollouts", "Rollouts dropped, by reason.", "reason", of_reason
        )
        phases = {phase.value: float(status.phase is phase) for phase in Phase}
        yield _by(GaugeMetricFamily, "phase", "1 for the phase the run is in.", "phase", phases)
        for name, value, text in (
            (
                "checkpoint_failing",
                float(bool(status.checkpoint_problem)),
                "1 while the trainer's last attempt to write a checkpoint failed.",
            ),
            (
                "weights_unsaved",
                float(status.unsaved_version >= 0),
                "1 while training has ended and the trainer keeps its last weights in memory because they cannot be saved.",
            ),
            (
                "upload_failing",
                None if status.uploads is None else float(bool(status.uploads.problem)),
                "1 while the trainer's last attempt to copy a checkpoint to checkpoint.to failed.",
            ),
            (
                "uploaded_version",
                None if status.uploads is None else status.uploads.version,
                "Newest checkpoint that is complete in checkpoint.to; -1 without one.",
            ),
            ("members", len(status.members), "Registered generators."),
            ("step", status.step, "Steps trained."),
            ("supervised_steps", status.supervised_steps, "Steps of mid-training applied to the weights."),
            ("published_version", status.published_version, "Latest published version."),
            ("staleness_steps_max", status.max_staleness_steps, "Maximum staleness of a trained token."),
            ("staleness_steps_mean", status.mean_staleness_steps, "Mean staleness of trained tokens."),
            ("staleness_bound_steps", self._staleness_bound, "Maximum staleness that the recipe allows."),
            # These two decrease when the run returns to a checkpoint, so they cannot be counters.
            ("acknowledged_rollouts", counts.acknowledged, "Accepted rollouts in the current state."),
            ("trained_tokens", status.tokens_trained, "Trained tokens in the current lineage."),
            (
                "journal_refusing",
                self._refusing(),
                "1 while the journal cannot be written and refuses all requests.",
            ),
            (
                "partial_bytes",
                self._partial_bytes(),
                f"Bytes of unfinished completions kept for the next leases of their slots, at most {MAX_BYTES >> 20} MiB.",
            ),
            (
                "generator_busy_fraction",
                status.generator_busy_fraction,
                "Busy fraction of the generators over the run.",
            ),
            (
                "trainer_busy_fraction",
                status.trainer_busy_fraction,
                "Busy fraction of the trainer over the run.",
            ),
            (
                "evaluation_reward",
                status.points[-1].reward if status.points else None,
                "Reward of the latest point of the curve.",
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))
        yield _by(
            GaugeMetricFamily,
            "evaluation_pass_at",
            "Estimated chance that at least one of k completions passes, of the newest point of the curve.",
            "k",
            {str(at.k): at.mean for point in status.points[-1:] for at in point.pass_at},
        )
        tasks = by_task(status.last_step_stats) or {MAIN_TASK: status.last_step_stats}
        for figure, text in TASK_FIGURES.items():
            yield _by(
                GaugeMetricFamily,
                f"task_{figure}",
                f"{text} in the newest step, by task (`{MAIN_TASK}` without a mix).",
                "task",
                {task: found[figure] for task, found in tasks.items() if figure in found},
            )
        for figure, text in STEP_FIGURES.items():
            if figure in status.last_step_stats:
                yield GaugeMetricFamily(
                    _PREFIX + figure,
                    f"Of the newest step: {text[0].lower()}{text[1:]}.",
                    value=status.last_step_stats[figure],
                )
        newest = [points[-1] for points in (status.points, *status.set_points.values()) if points]
        yield _by(
            GaugeMetricFamily,
            "evaluation_set_reward",
            "Reward of the newest point of each evaluation set.",
            "set",
            {point.set_name: point.reward for point in newest},
        )
        yield _family(
            GaugeMetricFamily,
            "evaluation_label_reward",
            f"Reward of the newest point of each evaluation set by label of the prompts; of a label, {MAX_LABEL_VALUES} values "
            "and the rest as one.",
            ("set", "label", "value"),
            [((p.set_name, m.label, m.value), m.reward) for p in newest for m in p.by_label],
        )
        yield _by(
            CounterMetricFamily,
            "given_up_slots",
            "Training slots given up since this process began, by cause.",
            "why",
            {why.value: self._closed_slots.get(why.value, 0) for why in GiveUpReason},
        )
        yield CounterMetricFamily(
            _PREFIX + "closed_slots",
            "Training slots served or given up since this process began.",
            value=float(sum(self._closed_slots.values())),
        )
        yield _family(
            GaugeMetricFamily,
            "mismatch_kl",
            "Recent KL estimate (k3) of trainer against generators, by measurement and token position.",
            ("source", "positions"),
            [((m.source, m.positions), m.recent_kl) for m in status.mismatch],
        )
        yield _by(
            GaugeMetricFamily,
            "tracker_step",
            "Latest step delivered to an experiment tracker.",
            "tracker",
            {tracker.name: tracker.step for tracker in status.trackers},
        )
        yield _by(
            CounterMetricFamily,
            "tracker_failures",
            "Failed attempts of an experiment tracker since this process began; each is retried.",
            "tracker",
            {tracker.name: tracker.failures for tracker in status.trackers},
        )
        for name, total, text in (
            (
                "expired_leases",
                counts.expired_leases,
                "Training leases that expired; their slots are reissued.",
            ),
            (
                "timed_out_leases",
                counts.timed_out_leases,
                "Training leases without progress for the time of a lease.",
            ),
            (
                "refilled_rollouts",
                counts.refilled,
                "Filtered rollouts whose slots were reissued with another prompt.",
            ),
            ("grading_errors", status.grading_errors, "Accepted rollouts whose verifier failed."),
            ("checkpoint_failures", status.checkpoint_failures, "Checkpoints that could not be written."),
            (
                "skipped_steps",
                status.skipped_steps,
                "Steps whose update was not applied: non-finite values or exploding ratios.",
            ),
            ("generated_tokens", status.tokens_generated, "Tokens generated by all generators."),
            ("wall_seconds", status.own_seconds, "Seconds of mid-training and since the first lease."),
            (
                "device_seconds",
                status.own_device_seconds,
                "Device-seconds of mid-training and since the first lease.",
            ),
            ("journal_syncs", journal.syncs, "Group commits of the journal."),
            ("journal_sync_seconds", journal.sync_seconds, "Seconds spent writing and syncing the journal."),
            ("journal_bytes", journal.bytes_written, "Bytes written to journal segments."),
            ("journal_refusals", journal.refusals, "Failed writes of the journal."),
            ("journal_rotations", journal.rotations, "Completed journal segments."),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=float(total))
        if self._history is not None:
            yield from _of_history(self._history)


def _of_history(counters: HistoryCounters) -> Iterable[Metric]:
    yield _by(
        CounterMetricFamily,
        "history_dropped_responses",
        "Responses that were not stored, or evicted from the store, by reason.",
        "reason",
        {reason: counters.dropped[reason] for reason in DROP_REASONS},
    )
    yield _by(
        CounterMetricFamily,
        "history_lookups",
        "Prompts whose past responses were requested, by result; mismatch: the prompt's tokens were others.",
        "result",
        {result: counters.lookups[result] for result in LOOKUP_RESULTS},
    )
    for name, total, text in (
        ("history_responses", counters.stored, "Responses stored since this process began."),
        ("history_damaged_frames", counters.damaged, "Damaged frames and segments of the store, skipped."),
    ):
        yield CounterMetricFamily(_PREFIX + name, text, value=float(total))
    for name, value, text in (
        ("history_bytes", counters.nbytes, "Bytes of past responses on disk, at most storeSize."),
        ("history_prompts", counters.prompts, "Prompts with past responses."),
    ):
        yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))


def _by(kind: type[Family], name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    """A family with one label."""
    return _family(kind, name, text, (label,), [((of,), value) for of, value in values.items()])


def _family(
    kind: type[Family],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Family:
    family = kind(_PREFIX + name, text, labels=labels)
    for of, value in samples:
        family.add_metric(of, value)
    return family
