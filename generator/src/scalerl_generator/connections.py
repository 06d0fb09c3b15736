"""An actor's connections: to its vLLM server, to the coordinator and to the teacher."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from scalerl_api.http_client import open_session
from scalerl_api.process import ProcessEnvironment
from scalerl_api.spec import RunSpec
from scalerl_api.wire import Split
from scalerl_generator.coordinator_client import CoordinatorClient
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.registration import Registration, ServerMonitor
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
