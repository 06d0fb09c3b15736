"""Prometheus metrics of an actor's process; no other module registers any. Those of a run are the coordinator's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from scalerl_generator.server_state import BusyClock, ServerState

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800)
_UPDATE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class ActorMetrics:
    """Metrics of one actor, in a registry of its own, so that tests can create several in a process."""

    def __init__(self, state: ServerState, busy: BusyClock) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        r = self.registry
        self.rollouts = Counter(
            "scalerl_actor_rollouts", "Completions sampled and graded", ["split"], registry=r
        )
        self.tokens = Counter("scalerl_actor_tokens", "Completion tokens sampled", ["split"], registry=r)
        self.truncated = Counter(
            "scalerl_actor_truncated_rollouts", "Completions truncated at max_tokens", registry=r
        )
        self.interrupted = Counter(
            "scalerl_actor_interrupted_rollouts",
            "Completions whose reasoning was ended by recipe.length.interruption",
            registry=r,
        )
        self.grading_errors = Counter(
            "scalerl_actor_grading_errors",
            "Completions whose verifier failed; excluded from training",
            registry=r,
        )
        self.episode_turns = Counter(
            "scalerl_actor_episode_turns", "Replies in episodes with an environment", registry=r
        )
        self.episode_tokens = Counter(
            "scalerl_actor_episode_tokens",
            "Tokens of episodes, by side: of the model's replies, or of the environment's messages",
            ["side"],
            registry=r,
        )
        self.episode_seconds = Counter(
            "scalerl_actor_episode_seconds",
            "Time of episodes, summed over them, by side: in requests to the model's server, or in steps of the environment",
            ["side"],
            registry=r,
        )
        self.tool_calls = Counter(
            "scalerl_actor_tool_calls",
            "Calls of tools in episodes, by result: made, or malformed",
            ["result"],
            registry=r,
        )
        self.environment_seconds = Histogram(
            "scalerl_actor_environment_seconds",
            "Time of a step of the environment, with the wait for its process",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=r,
        )
        self.groups = Counter(
            "scalerl_actor_groups",
            "Groups pushed, by the response of the coordinator, or `expired`",
            ["result"],
            registry=r,
        )
        self.leases = Counter("scalerl_actor_leases", "Leases received", ["split"], registry=r)
        self.released = Counter("scalerl_actor_released_leases", "Leases released unserved", registry=r)
        self.failed = Counter(
            "scalerl_actor_failed_groups",
            "Groups released because they could not be generated or graded",
            registry=r,
        )
        self.skipped = Counter(
            "scalerl_actor_skipped_prompts", "Leases of prompts too long for the context", registry=r
        )
        self.masked_tokens = Counter(
            "scalerl_actor_masked_tokens",
            "Sampled tokens without a finite log-probability; excluded from training",
            registry=r,
        )
        self.resubmitted = Counter(
            "scalerl_actor_resubmitted_requests", "Failed requests resubmitted to the same server", registry=r
        )
        self.resumed_tokens = Counter(
            "scalerl_actor_resumed_tokens",
            "Tokens of unfinished completions resumed on a restarted server",
            registry=r,
        )
        self.handed_over_tokens = Counter(
            "scalerl_actor_handed_over_tokens",
            "Tokens of unfinished completions taken over from another actor, or from before a restart",
            registry=r,
        )
        self.dropped_partials = Counter(
            "scalerl_actor_dropped_partials",
            "Leases whose partial completions were discarded and resampled, by reason",
            ["reason"],
            registry=r,
        )
        self.teacher_tokens = Counter(
            "scalerl_actor_teacher_tokens",
            "Completion tokens that the teacher of recipe.distillation gave a log-probability of",
            registry=r,
        )
        self.teacher_failures = Counter(
            "scalerl_actor_teacher_failures",
            "Requests that the teacher of recipe.distillation did not answer; each is sent again, and its group waits",
            registry=r,
        )
        self.refused_partials = Counter(
            "scalerl_actor_refused_partials",
            "Reports of a lease's unfinished completions that the coordinator had no room for",
            registry=r,
        )
        self.past_responses = Counter(
            "scalerl_actor_past_responses",
            "Past responses from the coordinator that the server was given to draft from",
            registry=r,
        )
        self.past_responses_failed = Counter(
            "scalerl_actor_past_responses_failures",
            "Groups that were generated without the past responses to their prompt, because they did not arrive in time",
            registry=r,
        )
        self.drafted_tokens = Counter(
            "scalerl_actor_drafted_tokens", "Drafted tokens that the server verified", registry=r
        )
        self.accepted_tokens = Counter(
            "scalerl_actor_accepted_draft_tokens", "Drafted tokens that were accepted", registry=r
        )
        self.draft_seconds = Counter(
            "scalerl_actor_draft_seconds", "Seconds that the server spent on drafting", registry=r
        )
        self.draft_gain = Gauge(
            "scalerl_actor_draft_gain",
            "Tokens per second of steps with drafts, in multiples of steps without; 1 while unknown",
            registry=r,
        )
        self.draft_paused_steps = Counter(
            "scalerl_actor_draft_paused_steps",
            "Steps of the server without drafts, because steps with drafts were slower",
            registry=r,
        )
        self.draft_evicted_tokens = Counter(
            "scalerl_actor_draft_evicted_tokens",
            "Tokens that the server's memory for drafts has overwritten, of prompts that run or that do not",
            ["running"],
            registry=r,
        )
        self.draft_threshold = Gauge(
            "scalerl_actor_draft_threshold",
            "Least probability of acceptance at which the server drafts a token; 1: none pays",
            registry=r,
        )
        self.concurrency = Gauge(
            "scalerl_actor_concurrency_limit",
            "Sequences that the actor keeps at the server at once, with generator.adaptiveConcurrency",
            registry=r,
        )
        self.server_losses = Counter(
            "scalerl_actor_server_losses", "Times the server stopped responding", registry=r
        )
        self.coordinator_losses = Counter(
            "scalerl_actor_coordinator_losses", "Times the coordinator stopped responding", registry=r
        )
        self.registrations = Counter(
            "scalerl_actor_registrations", "Registrations with the coordinator", registry=r
        )
        self.staleness = Histogram(
            "scalerl_actor_lease_staleness_versions",
            "Weight versions between a group's oldest token and the weights held when the group was complete",
            buckets=_VERSIONS,
            registry=r,
        )
        self.generation_seconds = Histogram(
            "scalerl_actor_generation_seconds",
            "Seconds from the request to the last token of a group",
            buckets=_SECONDS,
            registry=r,
        )
        self.grading_seconds = Histogram(
            "scalerl_actor_grading_seconds", "Seconds spent grading a group", buckets=_SECONDS, registry=r
        )
        self.update_seconds = Histogram(
            "scalerl_actor_update_seconds",
            "Seconds of weight updates, by phase",
            ["phase"],
            buckets=_UPDATE_SECONDS,
            registry=r,
        )
        self.update_failures = Counter(
            "scalerl_actor_update_failures", "Weight updates that failed", registry=r
        )
        self.occupancy = Gauge(
            "scalerl_actor_group_occupancy",
            "Mean fraction of a group's sequences that is still generating",
            registry=r,
        )
        self._gauge("in_flight_groups", "Requests in flight at the server", lambda: busy.in_flight)
        self._gauge(
            "weight_version", "Weight version the server holds; -1 before the first", lambda: state.version
        )
        self._gauge("server_up", "1 while the vLLM server answers", lambda: float(state.up))
        r.register(_BusySeconds(busy))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format, for ``/metrics``."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, documentation: str, value: object) -> None:
        Gauge(f"scalerl_actor_{name}", documentation, registry=self.registry).set_function(value)  # type: ignore[arg-type]


class _BusySeconds(Collector):
    def __init__(self, busy: BusyClock) -> None:
        self._busy = busy

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "scalerl_actor_busy_seconds",
            "Seconds with a request in flight, excluding updates",
            value=self._busy.seconds,
        )
