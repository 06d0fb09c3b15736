"""``python -m scalerl_coordinator.main --listen HOST:PORT``: the coordinator's process.

Exit codes: 0 after SIGTERM or SIGINT; 2 when starting again would not help (environment, run file, task, a journal that
is damaged, of another run, or in use); 4 where the run's steps are gone from its volume; anything else is a crash and may
be restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from aiohttp import web

from scalerl_api.load import SpecError
from scalerl_api.paths import RunPaths
from scalerl_api.process import STEPS_LOST_EXIT_CODE, EnvironmentProblem, ProcessEnvironment
from scalerl_api.trackers import TrackersSpec
from scalerl_coordinator.core import Core, Refusal
from scalerl_coordinator.curriculum import SeededEpochs
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.http import runner
from scalerl_coordinator.journal import Journal, JournalLocked
from scalerl_coordinator.server import Server
from scalerl_coordinator.settings import Settings
from scalerl_coordinator.state import State
from scalerl_coordinator.store import load_state, new_nonce
from scalerl_coordinator.tracking.supervisor import Trackers, missing_package
from scalerl_tasks import TaskError, open_task

log = logging.getLogger("scalerl_coordinator")


class TrackerMissing(Exception):
    """The run has not begun, and a tracker's package is not installed."""


_BAD_INPUT = (
    TrackerMissing,
    EnvironmentProblem,
    SpecError,
    TaskError,
    CorruptJournal,
    JournalLocked,
    Refusal,
)
_GOODBYE_SECONDS = 5.0


class StepsLost(Exception):
    """The run has trained steps, and its directory holds none of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """The process; see the module for what it returns."""
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
    except _BAD_INPUT as problem:
        log.error("%s", problem)
        return 2
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


async def serve(environment: ProcessEnvironment, host: str, port: int) -> None:
    """Recover, serve until a signal, leave in order. Raises what is bad input, and whatever crashed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    run = environment.load_run()
    task = await asyncio.to_thread(open_task, run.spec.task, environment.paths.root)
    settings = Settings.of_run(
        run,
        train_digest=task.train.digest,
        held_out_digest=task.held_out.digest,
        held_out_prompts=len(task.held_out),
    )
    journal = Journal(environment.paths.journal)
    state = await asyncio.to_thread(load_state, journal)
    _check_volume(environment.paths, state)
    if state == State():
        _check_trackers(run.spec.trackers)
    curriculum = SeededEpochs(len(task.train), run.spec.seed)
    core = Core.begin(settings, curriculum, state, new_nonce(), 0.0)
    await journal.start()
    trackers = Trackers(run.spec.trackers)
    files = RunFiles(environment.paths)
    server = Server(core, journal, files, environment.token, task.train, task.held_out, trackers.status)
    await server.start()
    trackers.start()
    try:
        await _listen(server, host, port, stop)
    finally:
        await server.close()
        await trackers.close()


def _check_volume(paths: RunPaths, state: State) -> None:
    """A volume that is empty must not pass for a run's beginning. Raises :class:`StepsLost`."""
    if paths.has_steps and state == State() and not any(paths.checkpoints.glob("*")):
        raise StepsLost(
            f"{paths.root}: the run has trained steps, and neither journal nor checkpoint is here; suspend the run, "
            "restore its volume, and resume it"
        )


def _check_trackers(spec: TrackersSpec) -> None:
    """Later a missing package only shows in the status: it must not end a run. Raises :class:`TrackerMissing`."""
    for name in spec.asked_for:
        if (problem := missing_package(name)) is not None:
            raise TrackerMissing(f"spec.trackers.{name}: {problem}")


async def _listen(server: Server, host: str, port: int, stop: asyncio.Event) -> None:
    served = runner(server.app, _GOODBYE_SECONDS)
    await served.setup()
    signalled = asyncio.ensure_future(stop.wait())
    try:
        await web.TCPSite(served, host, port, backlog=1024).start()
        log.info("listening on %s:%d", host, port)
        await asyncio.wait((signalled, server.failure), return_when=asyncio.FIRST_COMPLETED)
        if server.failure.done():
            server.failure.result()
        log.info("leaving: told to stop")
    finally:
        signalled.cancel()
        server.stop_polls()
        await served.cleanup()


if __name__ == "__main__":
    sys.exit(main())
