"""``python -m scalerl_generator.actor``: the process that drives one generator.

It waits for its vLLM server, registers with the coordinator, receives weights from the trainer
(:mod:`.actor_api`), and then, until it is stopped::

    lease ──▶ generate ──▶ grade ──▶ push
    leasing   rollouts     rollouts  delivery

Failures, and how the actor handles them:

=====================  ====================================================================================
the vLLM server        leases are released, the member is unhealthy; once the server answers again: a new
                       registration, new weights, new leases (:mod:`.registration`). Slots that come back
                       continue from the tokens they had (:mod:`.kept_completions`)
a connection to it     the completions it broke off are requested again, from the tokens they have
                       (:mod:`.completion_streams`)
the coordinator        every call is retried with back-off; finished groups are kept; if the coordinator
                       does not know the member, it registers again, and its leases continue
the teacher            groups wait for it with their leases alive (:mod:`.teacher`); another tokenizer
                       than the student's ends the actor
the trainer            during an update: the update's timeout ends it. Complete old weights stay in use;
                       a mixture of versions stays paused, at version -1, until the next update
one group              its lease is released with the reason, the others continue; after 16 failures in a
                       row without a success the server is the cause, and the actor exits
this process           its leases end by missed heartbeats; the server stays up and receives new weights.
                       Whoever gets the slots continues long completions (:mod:`.partial_reports`)
=====================  ====================================================================================

Exit codes: 0 stopped (SIGTERM, or the run is over), 2 bad input that a restart does not fix, 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from scalerl_api.load import SpecError
from scalerl_api.process import EnvironmentProblem, ProcessEnvironment
from scalerl_api.spec import ProblemSpec, RunSpec
from scalerl_api.wire import Split
from scalerl_generator.actor_api import actor_app, actor_runner
from scalerl_generator.completion_streams import CompletionStreams
from scalerl_generator.concurrency import Concurrency
from scalerl_generator.coordinator_client import CoordinatorClient, Refused
from scalerl_generator.delivery import Delivery
from scalerl_generator.interruption import (
    Interruption,
    ThoughtInterrupter,
)
from scalerl_generator.kept_completions import KeptCompletions
from scalerl_generator.leasing import Leasing
from scalerl_generator.metrics import ActorMetrics
from scalerl_generator.partial_reports import PartialReports
from scalerl_generator.past_responses import PastResponseFeed
from scalerl_generator.prompt_codec import PromptCodec
from scalerl_generator.registration import Registration, ServerMonitor, ServerStartTimeout
from scalerl_generator.rollouts import PromptMismatch, RolloutGenerator, Section, Strategy, sample_plain
from scalerl_generator.server_state import BusyClock, ServerState
from scalerl_generator.teacher import API_KEY, Teacher, UnfitTeacher
from scalerl_generator.vllm_client import VllmClient
from scalerl_generator.vllm_replies import VllmError
from scalerl_generator.weight_control import WeightControl
from scalerl_tasks.errors import GradingError, TaskError
from scalerl_tasks.grading.grading_pool import GradingPool
from scalerl_tasks.sources import RunTasks, open_grading_pool, open_tasks, verifier_config
from scalerl_tasks.text import check_interruption

logger = logging.getLogger("scalerl.actor")

Result = TypeVar("Result")

_OPEN_FILES = 65535
_OVER_GRACE_SECONDS = 5.0
_FLUSH_SECONDS = 5.0
_UNREGISTER_SECONDS = 3.0


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    server: str
    listen_host: str
    listen_port: int
    advertise: str


def parse(argv: Sequence[str]) -> Arguments:
    """Exits with 2 and a message on a bad command line."""
    p = argparse.ArgumentParser(prog="python -m scalerl_generator.actor", description=__doc__.split("\n")[0])
    p.add_argument(
        "--server", required=True, metavar="URL", help="the vLLM server, such as http://127.0.0.1:8000"
    )
    p.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="where to serve weight control and metrics"
    )
    p.add_argument("--advertise", required=True, metavar="URL", help="where the trainer reaches --listen")
    given = p.parse_args(argv)
    for option in ("server", "advertise"):
        url = urlsplit(getattr(given, option))
        if url.scheme != "http" or not url.hostname:
            p.error(f"--{option} {getattr(given, option)!r}: expected a URL like http://127.0.0.1:8000")
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        p.error(f"--listen {given.listen!r}: expected HOST:PORT, such as 127.0.0.1:9000")
    return Arguments(given.server.rstrip("/"), host.strip("[]"), int(port), given.advertise.rstrip("/"))


async def run_actor(
    arguments: Arguments, environment: ProcessEnvironment, spec: RunSpec, stop: asyncio.Event
) -> None:
    """Run one actor; returns when ``stop`` is set or the run is over.

    Raises:
        TaskError, PromptMismatch, UnfitTeacher: bad input.
        Refused, ServerStartTimeout, GradingError, VllmError: it cannot continue.
    """
    state, busy = ServerState(), BusyClock()
    metrics = ActorMetrics(state, busy)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(VllmClient(arguments.server, environment.token))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        coordinator = CoordinatorClient(session, environment.coordinator_url, environment.token)
        distillation = spec.recipe.distillation
        teacher = None
        if distillation is not None:
            teacher = Teacher(session, distillation.teacher, os.environ.get(API_KEY, ""), metrics)
        registration = Registration(
            coordinator,
            state,
            busy,
            metrics,
            name=environment.name,
            control_url=arguments.advertise,
            teacher_problem=lambda: "" if teacher is None else teacher.problem,
        )
        control = WeightControl(server, state, busy, metrics)
        await _serve(stack, actor_app(control, metrics, environment.token, registration.not_ready), arguments)
        monitor = ServerMonitor(server, state, metrics)
        watching = _owned(stack, monitor.run())

        opening = _owned(stack, _open(environment, spec))
        await _until(stop, watching, opening)
        if not opening.done():
            _raise_failure(watching)
            return
        tasks, codecs = opening.result()
        codec = codecs[0]
        graders = await _graders(stack, spec, tasks)
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="text"))

        capacity, per_group = spec.generator.max_concurrent_sequences, spec.recipe.completions_per_prompt
        sections = {
            (at, Split.TRAIN): Section(task.train, codecs[at], graders[at])
            for at, task in enumerate(tasks.tasks)
        }
        evaluated = [*(task.held_out for task in tasks.tasks), *(one.prompts for one in tasks.sets)]
        for at, prompts in enumerate(evaluated):
            sections[at, Split.HELD_OUT] = Section(prompts, codecs[at], graders[at])
        partials = PartialReports(
            coordinator,
            registration,
            monitor,
            state,
            metrics,
            vocabulary_size=codec.tokenizer.vocabulary_size,
            max_staleness_steps=spec.recipe.max_staleness_steps,
        )
        speculation = spec.generator.speculation
        past_responses = None
        if speculation is not None and speculation.history is not None:
            past_responses = PastResponseFeed(
                coordinator, server, state, metrics, speculation.history.memory_tokens
            )
        rollouts = RolloutGenerator(
            server,
            monitor,
            state,
            busy,
            metrics,
            sections,
            thread,
            max_sequences=capacity,
            kept=KeptCompletions(
                max_sequences=2 * capacity, max_staleness_steps=spec.recipe.max_staleness_steps
            ),
            partials=partials,
            strategy=_strategy(spec, codec, thread, metrics),
            teacher=teacher,
            past_responses=past_responses,
        )
        concurrency = Concurrency(capacity, per_group, adaptive=spec.generator.adaptive_concurrency)
        delivery = Delivery(coordinator, registration, metrics)
        leasing = Leasing(
            coordinator,
            registration,
            state,
            rollouts,
            delivery,
            metrics,
            partials,
            concurrency=concurrency,
            per_group=per_group,
        )
        gc.collect()
        gc.freeze()  # imported objects stay; collections skip them
        heartbeats = _owned(stack, registration.run(tasks.digest))
        pushing = _owned(stack, delivery.run())
        leases = _owned(stack, _lease(leasing, teacher, codec, spec))
        reporting = _owned(stack, partials.run())
        optional = []
        if spec.generator.adaptive_concurrency:
            optional.append(_owned(stack, concurrency.run(server, state, metrics)))
        if past_responses is not None:
            optional.append(_owned(stack, past_responses.report()))
        await _until(stop, watching, heartbeats, pushing, leases, reporting, *optional)

        run_finished = leases.done() and leases.exception() is None
        reason = (
            "the run is over" if run_finished else "received a signal" if stop.is_set() else "cannot continue"
        )
        logger.info("stopping: %s", reason)
        await leasing.close(_OVER_GRACE_SECONDS if run_finished else 0.0, reason)
        if not await delivery.flush(0.0 if pushing.done() else _FLUSH_SECONDS):
            logger.warning("%d finished groups could not be pushed before the actor stopped", len(delivery))
        heartbeats.cancel()
        await registration.unregister(_UNREGISTER_SECONDS)
        _raise_failure(watching, heartbeats, pushing, leases, reporting, *optional)


async def _lease(leasing: Leasing, teacher: Teacher | None, codec: PromptCodec, spec: RunSpec) -> None:
    if teacher is not None:
        await teacher.check(codec.tokenizer, spec.model.context_tokens)
    await leasing.run()


def _strategy(spec: RunSpec, codec: PromptCodec, thread: Executor, metrics: ActorMetrics) -> Strategy:
    given = spec.recipe.length.interruption
    if given is None:
        return sample_plain
    interruptions: dict[int, Interruption] = {}
    for most in spec.completion_limits:
        if (phrase := check_interruption(given, codec.tokenizer, most)) is not None:
            interruptions[most] = Interruption(*given.range(most), phrase)
    if not interruptions:
        logger.info(
            "no thought is interrupted: the tokenizer cannot write the end of one, or recipe.maxCompletionTokens is too short"
        )
        return sample_plain

    async def texts(completions: list[NDArray[np.int32]]) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(thread, codec.texts, completions)

    by_limit = {
        most: ThoughtInterrupter(one, spec.seed, texts, metrics) for most, one in interruptions.items()
    }

    async def interrupt(streams: CompletionStreams) -> None:
        await by_limit.get(streams.lease.max_tokens, sample_plain)(streams)

    return interrupt


async def _open(environment: ProcessEnvironment, spec: RunSpec) -> tuple[RunTasks, list[PromptCodec]]:
    """Open prompts and tokenizer, in threads: reading them takes seconds, and the server starts meanwhile. Returns the codecs
    of each task and of each evaluation set with a task; equal formats share one."""
    started = time.monotonic()
    tasks = await asyncio.to_thread(open_tasks, spec, environment.paths.root)
    given = [(one.section.prompt, one.field) for one in spec.task.tasks]
    given += [(one.prompt, f"{one.field}.task") for one in tasks.sets]
    prompts = [prompt for prompt, _ in given]
    model, context_tokens = environment.paths.base_model, spec.model.context_tokens
    codecs: list[PromptCodec] = []
    for at, (one, field) in enumerate(given):
        first = prompts.index(one)
        codecs.append(
            codecs[first]
            if first < at
            else await asyncio.to_thread(PromptCodec, model, one, context_tokens, f"{field}.prompt")
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


async def _graders(stack: contextlib.AsyncExitStack, spec: RunSpec, tasks: RunTasks) -> list[GradingPool]:
    """The grading pools of each task and of each evaluation set with a task, equal ones once."""
    sections: list[ProblemSpec] = [
        *(one.section for one in spec.task.tasks),
        *(one.spec for one in tasks.sets),
    ]
    keys = [(one.verifier, verifier_config(one)) for one in sections]
    pools: list[GradingPool] = []
    for at, one in enumerate(sections):
        first = keys.index(keys[at])
        pools.append(pools[first] if first < at else await stack.enter_async_context(open_grading_pool(one)))
    return pools


async def _serve(stack: contextlib.AsyncExitStack, app: web.Application, arguments: Arguments) -> None:
    runner = actor_runner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, arguments.listen_host, arguments.listen_port).start()


def _owned(stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that ends with the stack."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    stack.push_async_callback(end)
    return task


async def _until(stop: asyncio.Event, *tasks: asyncio.Task[Any]) -> None:
    """Return when ``stop`` is set or one of the tasks is done."""
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _raise_failure(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _until_signal(arguments: Arguments, environment: ProcessEnvironment, spec: RunSpec) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_actor(arguments, environment, spec, stop)


def raise_open_files_limit() -> None:
    """Allow as many open files as vLLM's server does: each completion has a connection, and many systems allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # One prompt or one group at a time: a pool of threads would cost more than it gains.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise_open_files_limit()
    try:
        environment = ProcessEnvironment.read()
        run = environment.load_run()
        asyncio.run(_until_signal(arguments, environment, run.spec))
    except Exception as error:
        if isinstance(error, _EXPECTED):
            logger.error("%s: %s", type(error).__name__, error)
        else:
            logger.exception("a bug of the actor")
        return exit_code(error)
    return 0


_BAD_INPUT = (EnvironmentProblem, SpecError, TaskError, PromptMismatch, UnfitTeacher)
_EXPECTED = (*_BAD_INPUT, Refused, VllmError, ServerStartTimeout, OSError)


def exit_code(error: Exception) -> int:
    """2 for an error that a restart with the same input repeats, else 1."""
    if isinstance(error, Refused):
        return 2 if error.permanent else 1
    return 2 if isinstance(error, _BAD_INPUT) and not isinstance(error, GradingError) else 1


if __name__ == "__main__":
    sys.exit(main())
