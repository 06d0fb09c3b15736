"""The run's tasks as an actor needs them: prompts, prompt formats, verifiers and environments, opened at its start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass

from scalerl_api.paths import RunPaths
from scalerl_api.spec import ProblemSpec, PromptSpec, RunSpec
from scalerl_api.wire import Split
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.rollouts.episodes import EpisodeSampler, episode_sampler
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.server_state import BusyClock
from scalerl_tasks.environments.tool_calls import tools_of
from scalerl_tasks.errors import GradingError
from scalerl_tasks.grading.combined import GroupGrader
from scalerl_tasks.open_graders import grading_digest, open_grading_pool, verifier_config
from scalerl_tasks.prompts import PromptSource
from scalerl_tasks.sources import RunTasks, open_tasks

logger = logging.getLogger("scalerl.actor")


@dataclass(frozen=True)
class TaskRuntime:
    """The prompts of one split of a task or evaluation set, with their prompt format and verifier."""

    source: PromptSource
    codec: PromptCodec
    grader: GroupGrader
    episodes: EpisodeSampler | None = None
    """Samples the completions, in place of the strategy, and grades them, if the task has an environment."""


async def open_inputs(spec: RunSpec, paths: RunPaths) -> tuple[RunTasks, list[PromptCodec]]:
    """Open the prompts and the tokenizer, in threads: that takes seconds, in which the server starts.

    Returns:
        The tasks, and the codec of each task and of each evaluation set with a task. Equal prompt formats share a codec.
    """
    started = time.monotonic()
    tasks = await asyncio.to_thread(open_tasks, spec, paths.root)
    formats = [
        (task.section.prompt, tools_of(task.section.environment), task.field) for task in spec.task.tasks
    ]
    formats += [(one.prompt, tools_of(one.spec.environment), f"{one.field}.task") for one in tasks.sets]
    distinct = [(prompt_format, tools) for prompt_format, tools, _ in formats]
    model, context_tokens = paths.base_model, spec.model.context_tokens
    codecs: list[PromptCodec] = []
    for i, (prompt_format, tools, field) in enumerate(formats):
        first = distinct.index(distinct[i])
        codecs.append(
            codecs[first]
            if first < i
            else await asyncio.to_thread(
                PromptCodec, model, prompt_format, context_tokens, f"{field}.prompt", tools
            )
        )
    logger.info(
        "%d training and %d held-out prompts%s, end tokens %s; opened in %.1f s",
        sum(len(task.train) for task in tasks.tasks),
        sum(len(task.held_out) for task in tasks.tasks),
        "".join(f", {len(one.prompts)} of {one.name}" for one in tasks.sets),
        codecs[0].tokenizer.stop_token_ids,
        time.monotonic() - started,
    )
    return tasks, codecs


async def open_graders(stack: contextlib.AsyncExitStack, spec: RunSpec, tasks: RunTasks) -> list[GroupGrader]:
    """The grading pool of each task and of each evaluation set with a task. Equal verifiers share a pool.

    Raises:
        TaskError: a verifier cannot be opened; GradingError: its code was edited since ``tasks`` were opened.
    """
    problems: list[tuple[ProblemSpec, PromptSpec]] = [
        *((task.section, task.section.prompt) for task in spec.task.tasks),
        *((one.spec, one.prompt) for one in tasks.sets),
    ]
    keys = [
        (
            problem.scoring,
            problem.combine,
            [verifier_config(problem, one, prompt) for one in problem.scoring],
            problem.stepping_environment,
        )
        for problem, prompt in problems
    ]
    pools: list[GroupGrader] = []
    for i, (problem, prompt) in enumerate(problems):
        first = keys.index(keys[i])
        pools.append(
            pools[first]
            if first < i
            else await stack.enter_async_context(open_grading_pool(problem, prompt=prompt))
        )
    if tasks.grading != tuple(grading_digest(problem) for problem, _ in problems):
        raise GradingError("the code of a reward was edited while the actor started; start it again")
    return pools


def task_runtimes(
    spec: RunSpec,
    tasks: RunTasks,
    codecs: list[PromptCodec],
    graders: list[GroupGrader],
    thread: Executor,
    metrics: ActorMetrics,
    busy: BusyClock,
) -> dict[tuple[int, Split], TaskRuntime]:
    """What the prompts of a lease need, by their task and split.

    Args:
        codecs, graders: of each task, then of each evaluation set with a task.
        thread: for episodes.

    Raises:
        VerifierError, TokenizerError: as :func:`.episode_sampler`.
    """
    problems = [*(one.section for one in spec.task.tasks), *(one.spec for one in tasks.sets)]
    episodes = [
        episode_sampler(problem, codecs[i], graders[i], thread, metrics, busy)
        for i, problem in enumerate(problems)
    ]
    runtimes = {
        (i, Split.TRAIN): TaskRuntime(task.train, codecs[i], graders[i], episodes[i])
        for i, task in enumerate(tasks.tasks)
    }
    held_out = [*(task.held_out for task in tasks.tasks), *(one.prompts for one in tasks.sets)]
    for i, prompts in enumerate(held_out):
        runtimes[i, Split.HELD_OUT] = TaskRuntime(prompts, codecs[i], graders[i], episodes[i])
    return runtimes
