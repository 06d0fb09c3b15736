"""``python -m scalerl_generator.actor``: the process that drives one generator.

The actor waits for its vLLM server, registers with the coordinator, receives weights from the trainer
(:mod:`.actor_api`), and then repeats, until it is stopped::

    lease ──▶ generate ──▶ grade ──▶ push
    leasing   rollouts     rollouts  delivery

Failures, and how the actor handles them:

=====================  ====================================================================================
the vLLM server        the actor releases its leases and reports itself unhealthy. Once the server answers
                       again, it registers again and gets new weights and leases (:mod:`.registration`).
                       Slots that are leased to it again continue from the tokens they had
                       (:mod:`.partial_reports`)
a connection to it     interrupted completions are requested again, from the tokens they have
                       (:mod:`.completion_streams`)
the coordinator        every call is retried with back-off; finished groups are kept. If the coordinator
                       does not know the member, the actor registers again, and its leases continue
the teacher            groups wait for it and keep their leases (:mod:`.teacher`); if its tokenizer differs
                       from the student's, the actor exits
the trainer            an update in progress ends at its timeout. If the old weights are complete, they
                       stay in use; if versions are mixed, generation stays paused, at version -1, until
                       the next update
one group              its lease is released with the reason, the others continue; after 16 failed slots
                       without a success between them, the server is the cause and the actor exits
this process           its leases expire after missed heartbeats; the server stays up and receives new
                       weights. The next leases of the slots continue long completions
                       (:mod:`.partial_reports`)
=====================  ====================================================================================

Exit codes: 0 after SIGTERM or at the run's end, 2 for wrong input that a restart does not fix, 1 for anything else.
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
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from scalerl_api.load import SpecError
from scalerl_api.process import EnvironmentProblem, ProcessEnvironment
from scalerl_api.spec import RunSpec
from scalerl_generator.actor_api import actor_app, actor_runner
from scalerl_generator.actor_parts import Connections, Pipeline, connect, make_pipeline
from scalerl_generator.coordinator_client import Refused
from scalerl_generator.registration import ServerStartTimeout
from scalerl_generator.rollouts.generation import PromptMismatch
from scalerl_generator.rollouts.leasing import Leasing
from scalerl_generator.rollouts.prompt_codec import PromptCodec
from scalerl_generator.rollouts.task_runtimes import open_graders, open_inputs, task_runtimes
from scalerl_generator.rollouts.teacher import Teacher, UnfitTeacher
from scalerl_generator.vllm_replies import VllmError
from scalerl_generator.weights.weight_control import WeightControl
from scalerl_tasks.errors import GradingError, TaskError
from scalerl_tasks.sources import RunTasks

logger = logging.getLogger("scalerl.actor")

Result = TypeVar("Result")

_OPEN_FILES = 65535
"""Limit of open files, as vLLM's server sets it: each completion has a connection, and many systems default to 1024."""
_OVER_GRACE_SECONDS = 5.0
"""Once the run has finished, groups that are still sampled get this long to end."""
_FLUSH_SECONDS = 5.0
"""Time to push finished groups before the actor exits."""
_UNREGISTER_SECONDS = 3.0


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    server: str
    """URL of the vLLM server."""
    listen_host: str
    listen_port: int
    advertise: str
    """URL at which the trainer reaches the actor."""


def parse(argv: Sequence[str]) -> Arguments:
    """Parse the command line. Exits with code 2 and a message if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m scalerl_generator.actor", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--server", required=True, metavar="URL", help="the vLLM server, such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="where to serve weight control and metrics"
    )
    parser.add_argument(
        "--advertise", required=True, metavar="URL", help="where the trainer reaches --listen"
    )
    parsed = parser.parse_args(argv)
    for option in ("server", "advertise"):
        url = urlsplit(getattr(parsed, option))
        if url.scheme != "http" or not url.hostname:
            parser.error(f"--{option} {getattr(parsed, option)!r}: expected a URL like http://127.0.0.1:8000")
    host, _, port = parsed.listen.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        parser.error(f"--listen {parsed.listen!r}: expected HOST:PORT, such as 127.0.0.1:9000")
    return Arguments(parsed.server.rstrip("/"), host.strip("[]"), int(port), parsed.advertise.rstrip("/"))


@dataclass(frozen=True)
class _Loops:
    """The tasks that run until the actor stops; each ends only by a failure, ``leases`` also at the run's end."""

    heartbeats: asyncio.Task[None]
    pushing: asyncio.Task[None]
    leases: asyncio.Task[None]
    others: list[asyncio.Task[None]]

    def all(self) -> list[asyncio.Task[None]]:
        return [self.heartbeats, self.pushing, self.leases, *self.others]


async def run_actor(
    arguments: Arguments, environment: ProcessEnvironment, spec: RunSpec, stop: asyncio.Event
) -> None:
    """Run one actor; returns when ``stop`` is set or the run has finished.

    Raises:
        TaskError, PromptMismatch, UnfitTeacher: the run's input is wrong.
        Refused, ServerStartTimeout, GradingError, VllmError: the actor cannot continue.
    """
    async with contextlib.AsyncExitStack() as stack:
        connections = await connect(
            stack, environment, spec, server_url=arguments.server, control_url=arguments.advertise
        )
        await _serve(stack, _app(connections, environment.token), arguments)
        watching = _owned(stack, connections.monitor.run())
        opening = _owned(stack, open_inputs(spec, environment.paths))
        await _until(stop, watching, opening)
        if not opening.done():
            _raise_failure(watching)
            return
        tasks, codecs = opening.result()
        graders = await open_graders(stack, spec, tasks)
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="text"))
        connections.runtimes.update(
            task_runtimes(spec, tasks, codecs, graders, thread, connections.metrics, connections.busy)
        )
        pipeline = make_pipeline(connections, spec, codecs[0], thread)
        gc.collect()
        gc.freeze()  # exempt the imported objects, which stay, from later collections
        loops = _start(stack, connections, pipeline, tasks, codecs[0], spec)
        await _until(stop, watching, *loops.all())
        await _stop(connections, pipeline, loops, stop)
        _raise_failure(watching, *loops.all())


def _start(
    stack: contextlib.AsyncExitStack,
    connections: Connections,
    pipeline: Pipeline,
    tasks: RunTasks,
    codec: PromptCodec,
    spec: RunSpec,
) -> _Loops:
    """Start the loops, which the stack ends."""
    heartbeats = _owned(stack, connections.registration.run(tasks.digest, tasks.grading))
    pushing = _owned(stack, pipeline.delivery.run())
    leases = _owned(stack, _run_leasing(pipeline.leasing, connections.teacher, codec, spec))
    others = [_owned(stack, pipeline.partials.run())]
    if spec.generator.adaptive_concurrency:
        adapting = pipeline.concurrency.run(connections.server, connections.state, connections.metrics)
        others.append(_owned(stack, adapting))
    if pipeline.past_responses is not None:
        others.append(_owned(stack, pipeline.past_responses.report()))
    return _Loops(heartbeats, pushing, leases, others)


async def _stop(connections: Connections, pipeline: Pipeline, loops: _Loops, stop: asyncio.Event) -> None:
    """Return the leases, push the finished groups and unregister. The loops end with their stack."""
    run_finished = loops.leases.done() and loops.leases.exception() is None
    reason = (
        "the run has finished"
        if run_finished
        else "received a signal"
        if stop.is_set()
        else "cannot continue"
    )
    logger.info("stopping: %s", reason)
    await pipeline.leasing.close(_OVER_GRACE_SECONDS if run_finished else 0.0, reason)
    delivery = pipeline.delivery
    if not await delivery.flush(0.0 if loops.pushing.done() else _FLUSH_SECONDS):
        logger.warning("%d finished groups could not be pushed before the actor stopped", len(delivery))
    loops.heartbeats.cancel()
    await connections.registration.unregister(_UNREGISTER_SECONDS)


async def _run_leasing(leasing: Leasing, teacher: Teacher | None, codec: PromptCodec, spec: RunSpec) -> None:
    if teacher is not None:
        await teacher.check(codec.tokenizer, spec.model.context_tokens)
    await leasing.run()


def _app(connections: Connections, token: str) -> web.Application:
    state, metrics = connections.state, connections.metrics
    control = WeightControl(connections.server, state, connections.busy, metrics)
    return actor_app(control, metrics, token, connections.registration.not_ready)


async def _serve(stack: contextlib.AsyncExitStack, app: web.Application, arguments: Arguments) -> None:
    runner = actor_runner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, arguments.listen_host, arguments.listen_port).start()


def _owned(stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task that the stack cancels and awaits at its end."""
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
    """Raise the soft limit of open files to :data:`_OPEN_FILES`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # The actor tokenizes one prompt or group at a time: the tokenizer's thread pool would cost more than it gains.
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
            logger.exception("unexpected exception")
        return exit_code(error)
    return 0


_BAD_INPUT = (EnvironmentProblem, SpecError, TaskError, PromptMismatch, UnfitTeacher)
_EXPECTED = (*_BAD_INPUT, Refused, VllmError, ServerStartTimeout, OSError)


def exit_code(error: Exception) -> int:
    """2 for an error that a restart with the same input would repeat, else 1."""
    if isinstance(error, Refused):
        return 2 if error.permanent else 1
    return 2 if isinstance(error, _BAD_INPUT) and not isinstance(error, GradingError) else 1


if __name__ == "__main__":
    sys.exit(main())
