"""What makes a pushed group of a lease, constructed from the spec."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from scalerl_api.spec import RunSpec
from scalerl_generator.connections import Connections
from scalerl_generator.drafts.past_responses import PastResponseFeed
from scalerl_generator.rollouts.concurrency import Concurrency
from scalerl_generator.rollouts.delivery import Delivery
from scalerl_generator.rollouts.generation import RolloutGenerator
from scalerl_generator.rollouts.interruption import choose_strategy
from scalerl_generator.rollouts.leasing import Leasing
from scalerl_generator.rollouts.occupancy import MIN_OCCUPANCY
from scalerl_generator.rollouts.partial_completion import KeptCompletions
from scalerl_generator.rollouts.partial_reports import PartialReports
from scalerl_generator.rollouts.prompt_codec import PromptCodec


@dataclass(frozen=True)
class Pipeline:
    leasing: Leasing
    delivery: Delivery
    concurrency: Concurrency
    partials: PartialReports
    past_responses: PastResponseFeed | None


def make_pipeline(connections: Connections, spec: RunSpec, codec: PromptCodec, thread: Executor) -> Pipeline:
    """The run's pipeline; none of its loops runs yet.

    Args:
        codec: of the first task.
        thread: encodes prompts and decodes completions.
    """
    state, metrics, server = connections.state, connections.metrics, connections.server
    coordinator, registration = connections.coordinator, connections.registration
    capacity, per_group = spec.generator.max_concurrent_sequences, spec.recipe.completions_per_prompt
    partials = PartialReports(
        coordinator,
        registration,
        connections.monitor,
        state,
        metrics,
        vocabulary_size=codec.tokenizer.vocabulary_size,
        max_staleness_steps=spec.recipe.max_staleness_steps,
    )
    speculation = spec.generator.speculation
    past_responses = None
    if speculation is not None and speculation.history is not None:
        past_responses = PastResponseFeed(coordinator, server, state, metrics, spec.draft_memory_tokens)
    rollouts = RolloutGenerator(
        server,
        connections.monitor,
        state,
        connections.busy,
        metrics,
        connections.runtimes,
        thread,
        max_sequences=capacity,
        kept=KeptCompletions(
            max_sequences=2 * int(capacity / MIN_OCCUPANCY),  # all that can be leased at once
            max_staleness_steps=spec.recipe.max_staleness_steps,
        ),
        partials=partials,
        strategy=choose_strategy(spec, codec, thread, metrics),
        teacher=connections.teacher,
        past_responses=past_responses,
    )
    concurrency = Concurrency(capacity, per_group, adaptive=spec.generator.adaptive_concurrency)
    delivery = Delivery(coordinator, registration, metrics)
    leasing = Leasing(
        *(coordinator, registration, state, rollouts, delivery, metrics, partials),
        concurrency=concurrency,
        per_group=per_group,
    )
    return Pipeline(leasing, delivery, concurrency, partials, past_responses)
