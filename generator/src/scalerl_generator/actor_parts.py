"""The parts of an actor, constructed from the spec: its connections to its vLLM server, to the coordinator and to the teacher, and the
pipeline that makes a pushed group of a lease."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from scalerl_api.http_client import open_session
from scalerl_api.process import ProcessEnvironment
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Split
from scalerl_generator.coordinator_client import CoordinatorClient
from scalerl_generator.drafts.past_responses import PastResponseFeed
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration, ServerMonitor
from scalerl_generator.rollouts.concurrency import Concurrency
from scalerl_generator.rollouts.delivery import Delivery
from scalerl_generator.rollouts.generation import RolloutGenerator
from scalerl_generator.rollouts.interruption import choose_strategy
from scalerl_generator.rollouts.leasing import Leasing
from scalerl_generator.rollouts.occupancy import MIN_OCCUPANCY
from scalerl_generator.rollouts.partial_reports import KeptCompletions, PartialReports
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.rollouts.task_runtimes import TaskRuntime
from scalerl_generator.rollouts.teacher import API_KEY, Teacher
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.vllm_client import VllmClient


@dataclass(frozen=True)
class Connections:
    """The actor's connections to the other processes, and the state of its server."""

    state: ServerState
    busy: BusyClock
    metrics: ActorMetrics
    server: VllmClient
    monitor: ServerMonitor
    coordinator: CoordinatorClient
    registration: Registration
    teacher: Teacher | None
    runtimes: dict[tuple[int, Split], TaskRuntime]
    """By the task and split of a lease's prompt; empty until the inputs are open. Heartbeats report problems of their verifiers."""


async def connect(
    stack: contextlib.AsyncExitStack,
    environment: ProcessEnvironment,
    spec: RunSpec,
    *,
    server_url: str,
    control_url: str,
) -> Connections:
    """Open the connections, which the stack closes.

    Args:
        control_url: where the trainer reaches the actor.
    """
    state, busy = ServerState(), BusyClock()
    metrics = ActorMetrics(state, busy)
    server = await stack.enter_async_context(
        VllmClient(
            server_url,
            environment.token,
            own_adapters=spec.lora_versions > 0,
            routed_experts=spec.trainer.router_replay,
        )
    )
    session = await stack.enter_async_context(open_session())
    coordinator = CoordinatorClient(session, environment.coordinator_url, environment.token)
    distillation = spec.recipe.distillation
    teacher = None
    if distillation is not None:
        teacher = Teacher(session, distillation.teacher, os.environ.get(API_KEY, ""), metrics)
    runtimes: dict[tuple[int, Split], TaskRuntime] = {}
    registration = Registration(
        coordinator,
        state,
        busy,
        metrics,
        name=environment.name,
        control_url=control_url,
        problems=partial(_problems, teacher, runtimes),
    )
    return Connections(
        state,
        busy,
        metrics,
        server,
        ServerMonitor(server, state, metrics),
        coordinator,
        registration,
        teacher,
        runtimes,
    )


def _problems(teacher: Teacher | None, runtimes: Mapping[tuple[int, Split], TaskRuntime]) -> dict[str, str]:
    """The fields of a heartbeat that say why groups wait."""
    return {
        "teacher_problem": "" if teacher is None else teacher.problem,
        "reward_problem": _first(one.grader.problem for one in runtimes.values()),
        "environment_problem": _first(
            one.episodes.grader.problem for one in runtimes.values() if one.episodes
        ),
    }


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")


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
