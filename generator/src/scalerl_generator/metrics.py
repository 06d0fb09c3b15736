"""Prometheus metrics of an actor's process; no other module registers any. Those of a run are the coordinator's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
        self._counter = partial(Counter, namespace="scalerl_actor", registry=self.registry)
        self._gauge = gauge = partial(Gauge, namespace="scalerl_actor", registry=self.registry)
        self._histogram = partial(Histogram, namespace="scalerl_actor", registry=self.registry)
        self._measure_completions()
        self._measure_episodes()
        self._measure_groups()
        self._measure_drafts()
        self._measure_connections()
        self._measure_generation_and_updates()
        in_flight = gauge("in_flight_groups", "Requests in flight at the server")
        in_flight.set_function(lambda: busy.in_flight)
        version = gauge("weight_version", "Weight version the server holds; -1 before the first")
        version.set_function(lambda: state.version)
        gauge("server_up", "1 while the vLLM server answers").set_function(lambda: float(state.up))
        self.registry.register(_BusySeconds(busy))

    def _measure_completions(self) -> None:
        counter = self._counter
        self.rollouts = counter("rollouts", "Completions sampled and graded", ["split"])
        self.tokens = counter("tokens", "Completion tokens sampled", ["split"])
        self.truncated = counter("truncated_rollouts", "Completions truncated at max_tokens")
        self.interrupted = counter(
            "interrupted_rollouts", "Completions whose reasoning was ended by recipe.length.interruption"
        )
        self.grading_errors = counter(
            "grading_errors", "Completions whose verifier failed; excluded from training"
        )

    def _measure_episodes(self) -> None:
        counter = self._counter
        self.episode_turns = counter("episode_turns", "Replies in episodes with an environment")
        self.episode_tokens = counter(
            "episode_tokens",
            "Tokens of episodes, by side: of the model's replies, or of the environment's messages",
            ["side"],
        )
        self.episode_seconds = counter(
            "episode_seconds",
            "Time of episodes, summed over them, by side: in requests to the model's server, or in steps of the environment",
            ["side"],
        )
        self.tool_calls = counter(
            "tool_calls", "Calls of tools in episodes, by result: made, or malformed", ["result"]
        )
        self.environment_seconds = self._histogram(
            "environment_seconds",
            "Time of a step of the environment, with the wait for its process",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )

    def _measure_groups(self) -> None:
        counter = self._counter
        self.groups = counter(
            "groups", "Groups pushed, by the response of the coordinator, or `expired`", ["result"]
        )
        self.leases = counter("leases", "Leases received", ["split"])
        self.released = counter("released_leases", "Leases released unserved")
        self.failed = counter(
            "failed_groups", "Groups released because they could not be generated or graded"
        )
        self.skipped = counter("skipped_prompts", "Leases of prompts too long for the context")
        self.masked_tokens = counter(
            "masked_tokens", "Sampled tokens without a finite log-probability; excluded from training"
        )
        self.resubmitted = counter("resubmitted_requests", "Failed requests resubmitted to the same server")
        self.resumed_tokens = counter(
            "resumed_tokens", "Tokens of unfinished completions resumed on a restarted server"
        )
        self.handed_over_tokens = counter(
            "handed_over_tokens",
            "Tokens of unfinished completions taken over from another actor, or from before a restart",
        )
        self.dropped_partials = counter(
            "dropped_partials",
            "Leases whose partial completions were discarded and resampled, by reason",
            ["reason"],
        )
        self.teacher_tokens = counter(
            "teacher_tokens",
            "Completion tokens that the teacher of recipe.distillation gave a log-probability of",
        )
        self.teacher_failures = counter(
            "teacher_failures",
            "Requests that the teacher of recipe.distillation did not answer; each is sent again, and its group waits",
        )
        self.refused_partials = counter(
            "refused_partials",
            "Reports of a lease's unfinished completions that the coordinator had no room for",
        )

    def _measure_drafts(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.past_responses = counter(
            "past_responses", "Past responses from the coordinator that the server was given to draft from"
        )
        self.past_responses_failed = counter(
            "past_responses_failures",
            "Groups that were generated without the past responses to their prompt, because they did not arrive in time",
        )
        self.drafted_tokens = counter("drafted_tokens", "Drafted tokens that the server verified")
        self.accepted_tokens = counter("accepted_draft_tokens", "Drafted tokens that were accepted")
        self.draft_seconds = counter("draft_seconds", "Seconds that the server spent on drafting")
        self.draft_gain = gauge(
            "draft_gain",
            "Tokens per second of steps with drafts, in multiples of steps without; 1 while unknown",
        )
        self.draft_paused_steps = counter(
            "draft_paused_steps", "Steps of the server without drafts, because steps with drafts were slower"
        )
        self.draft_evicted_tokens = counter(
            "draft_evicted_tokens",
            "Tokens that the server's memory for drafts has overwritten, of prompts that run or that do not",
            ["running"],
        )
        self.draft_threshold = gauge(
            "draft_threshold",
            "Least probability of acceptance at which the server drafts a token; 1: none pays",
        )

    def _measure_connections(self) -> None:
        counter = self._counter
        self.concurrency = self._gauge(
            "concurrency_limit",
            "Sequences that the actor keeps at the server at once, with generator.adaptiveConcurrency",
        )
        self.server_losses = counter("server_losses", "Times the server stopped responding")
        self.coordinator_losses = counter("coordinator_losses", "Times the coordinator stopped responding")
        self.registrations = counter("registrations", "Registrations with the coordinator")

    def _measure_generation_and_updates(self) -> None:
        histogram = self._histogram
        self.staleness = histogram(
            "lease_staleness_versions",
            "Weight versions between a group's oldest token and the weights held when the group was complete",
            buckets=_VERSIONS,
        )
        self.generation_seconds = histogram(
            "generation_seconds", "Seconds from the request to the last token of a group", buckets=_SECONDS
        )
        self.grading_seconds = histogram("grading_seconds", "Seconds spent grading a group", buckets=_SECONDS)
        self.update_seconds = histogram(
            "update_seconds", "Seconds of weight updates, by phase", ["phase"], buckets=_UPDATE_SECONDS
        )
        self.update_failures = self._counter("update_failures", "Weight updates that failed")
        self.occupancy = self._gauge(
            "group_occupancy", "Mean fraction of a group's sequences that is still generating"
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' text format, for ``/metrics``."""
        return generate_latest(self.registry)


class _BusySeconds(Collector):
    def __init__(self, busy: BusyClock) -> None:
        self._busy = busy

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "scalerl_actor_busy_seconds",
            "Seconds with a request in flight, excluding updates",
            value=self._busy.seconds,
        )
