"""``python -m scalerl_coordinator.main --listen HOST:PORT``: the coordinator's process.

Exit codes: 0 after SIGTERM or SIGINT; 2 for errors that a restart does not fix (environment, run file, task; a journal that
is damaged, belongs to another run, or is in use); 4 if the run's steps are missing from its volume; 6 if another coordinator has
replaced this one; any other code is a crash, after which the process may be restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from aiohttp import web

from scalerl_api.attempts import AttemptSuperseded
from scalerl_api.curve import fold_labels
from scalerl_api.fields import quantity_bytes
from scalerl_api.fork import Fork
from scalerl_api.load import SpecError
from scalerl_api.paths import RunPaths
from scalerl_api.process import (
    STEPS_LOST_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    EnvironmentProblem,
    ProcessEnvironment,
)
from scalerl_api.registry import PluginError
from scalerl_api.trackers import TrackersSpec
from scalerl_api.wire import PromptRef, Split
from scalerl_coordinator.core import Core, Refusal
from scalerl_coordinator.fence import Fence, current_folder
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.http import runner
from scalerl_coordinator.journal import Journal, JournalLocked
from scalerl_coordinator.journaled_core import load_state
from scalerl_coordinator.response_store import ResponseStore, history_identity
from scalerl_coordinator.rollout_record import RolloutRecord
from scalerl_coordinator.samplers import make_samplers
from scalerl_coordinator.server import Server
from scalerl_coordinator.settings import Settings
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.trace import Trace
from scalerl_coordinator.tracking.supervisor import Trackers, missing_package
from scalerl_tasks import PromptSource, TaskError, open_tasks

log = logging.getLogger("scalerl_coordinator")


class TrackerMissing(Exception):
    """A tracker's package is not installed, and the run is new."""


_INPUT_ERRORS = (
    PluginError,
    TrackerMissing,
    EnvironmentProblem,
    SpecError,
    TaskError,
    CorruptJournal,
    JournalLocked,
    Refusal,
)
_SHUTDOWN_SECONDS = 5.0


class StepsLost(Exception):
    """The run has trained steps, but its directory has neither journal nor checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code that the module documents."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    parser = argparse.ArgumentParser(prog="scalerl_coordinator.main", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", type=_address)
    host, port = parser.parse_args(argv).listen
    try:
        asyncio.run(serve(ProcessEnvironment.read(), host, port))
    except StepsLost as problem:
        log.error("%s", problem)
        return STEPS_LOST_EXIT_CODE
    except AttemptSuperseded as problem:
        log.error("%s", problem)
        return SUPERSEDED_EXIT_CODE
    except _INPUT_ERRORS as problem:
        log.error("%s", problem)
        return 2
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


async def serve(environment: ProcessEnvironment, host: str, port: int) -> None:
    """Recover the state, serve until a signal, shut down. Raises the errors of the input, and the exception of a crash."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    run = environment.load_run()
    opened = await asyncio.to_thread(open_tasks, run.spec, environment.paths.root)
    tasks = opened.tasks
    settings = Settings.of_run(
        run,
        train_digest=opened.digest,
        held_out=[(task.held_out.digest, len(task.held_out)) for task in tasks],
        sets=[(one.digest, len(one.prompts)) for one in opened.sets],
        grading=opened.grading,
        forked_step=_forked_step(environment.paths),
    )
    if settings.rollouts is not None and find_spec("pyarrow") is None:
        log.warning("rollouts are not recorded: this image has no pyarrow")
        settings = replace(settings, rollouts=None)
    journal, state = await asyncio.to_thread(_open_journal, environment)
    steps_lost = _steps_lost(environment.paths, state)
    if steps_lost and run.spec.checkpoint.to is None:
        raise StepsLost(
            f"{environment.paths.root}: the run has trained steps, but its volume has neither journal nor checkpoint; suspend "
            "the run, restore its volume, and resume it"
        )
    if state == CoordinatorState():
        _check_trackers(run.spec.trackers)
    train = [task.train for task in tasks]
    samplers = make_samplers(
        settings.curriculum, train, settings.identity.tasks, settings.weights, run.spec.seed
    )
    held_out = [*(task.held_out for task in tasks), *(one.prompts for one in opened.sets)]
    labels = {at: fold_labels(prompts.labels) for at, prompts in enumerate(held_out)}
    core = Core.begin(settings, samplers, state, secrets.token_hex(4), 0.0, labels)
    core.steps_lost = steps_lost
    await journal.start()
    trackers = Trackers(run.spec.trackers)
    files = RunFiles(environment.paths, journal.directory)
    make_trace = partial(Trace, environment.paths.trace, core, run.spec.generator) if settings.trace else None
    history = await asyncio.to_thread(_open_history, settings, environment.paths, train)
    server = Server(
        *(core, journal, files, environment.token, train, held_out, trackers.status, history, make_trace),
        _make_record(settings, environment.paths),
    )
    await server.start()
    trackers.start()
    try:
        await _listen(server, host, port, stop)
    finally:
        await server.close()
        await trackers.close()


def _open_journal(environment: ProcessEnvironment) -> tuple[Journal, CoordinatorState]:
    """The run's journal, and the state in it. On a cluster, this takes it over from all other coordinators."""
    root, attempt = environment.paths.journal, environment.attempt
    if attempt is None:
        journal = Journal(current_folder(root))
        return journal, load_state(journal)
    fence = Fence.begin(root, attempt, environment.pod)
    journal = Journal(fence.folder, fence=fence)
    try:
        return journal, load_state(journal)
    except (CorruptJournal, OSError):
        fence.check()  # another that takes the journal over meanwhile removes its files
        raise


def _forked_step(paths: RunPaths) -> int:
    """Step of the checkpoint with which a fork starts; -1 for another run. Raises :class:`EnvironmentProblem`."""
    try:
        origin = Fork.read(paths.fork)
    except ValueError as error:
        raise EnvironmentProblem(str(error)) from error
    return -1 if origin is None else origin.step


def _open_history(settings: Settings, paths: RunPaths, train: Sequence[PromptSource]) -> ResponseStore | None:
    """The store of past responses, if the spec asks for it. Raises OSError where the prepared model cannot be read."""
    if settings.history is None:
        return None
    identity = history_identity(settings.identity.train_digest, paths.base_model)
    size = quantity_bytes(settings.history.store_size)

    def difficulty(prompt: PromptRef) -> float | None:
        try:
            return train[prompt.task].difficulty(prompt.index)
        except TaskError:
            return None

    return ResponseStore(paths.history, identity, size, lines=paths.history_lines, difficulty=difficulty)


def _make_record(
    settings: Settings, paths: RunPaths
) -> Callable[[Callable[[int], None]], RolloutRecord] | None:
    """Makes the record of rollouts, if the spec asks for it."""
    if settings.rollouts is None:
        return None
    identity, size = settings.identity, quantity_bytes(settings.rollouts.max_size)

    def name(prompt: PromptRef) -> str:
        train = prompt.split is Split.TRAIN
        return identity.tasks[prompt.task] if train else identity.evaluation_set(prompt.task).name

    return lambda on_lost: RolloutRecord(paths.rollouts, size, name, on_lost)


def _steps_lost(paths: RunPaths, state: CoordinatorState) -> bool:
    """Whether the run has trained steps, and its volume is empty."""
    checkpoints = (path for path in paths.checkpoints.glob("[!.]*") if path != paths.exports)
    return paths.has_steps and state == CoordinatorState() and not any(checkpoints)


def _check_trackers(spec: TrackersSpec) -> None:
    """Check that the packages of a new run's trackers are installed. Raises :class:`TrackerMissing`.

    In a run that has started, a missing package only shows in the status.
    """
    for name in spec.asked_for:
        if (problem := missing_package(name)) is not None:
            raise TrackerMissing(f"spec.trackers.{name}: {problem}")


async def _listen(server: Server, host: str, port: int, stop: asyncio.Event) -> None:
    served = runner(server.app, _SHUTDOWN_SECONDS)
    await served.setup()
    signalled = asyncio.ensure_future(stop.wait())
    try:
        await web.TCPSite(served, host, port, backlog=1024).start()
        log.info("listening on %s:%d", host, port)
        await asyncio.wait((signalled, server.failure), return_when=asyncio.FIRST_COMPLETED)
        if server.failure.done():
            server.failure.result()
        log.info("stopping: received a signal")
    finally:
        signalled.cancel()
        server.stop_polls()
        await served.cleanup()


if __name__ == "__main__":
    sys.exit(main())
