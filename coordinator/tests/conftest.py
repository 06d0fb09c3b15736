"""Real coordinators on loopback for the tests; makes the helper modules beside it importable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from free_port import free_port

sys.path.insert(0, str(Path(__file__).parent))

from coordinator_client import Client, run_text
from coordinator_world import World, make_settings, ready

from scalerl_api.load import parse_run
from scalerl_api.paths import RunPaths
from scalerl_coordinator.core import Core
from scalerl_coordinator.files import RunFiles
from scalerl_coordinator.http import runner
from scalerl_coordinator.journal import Journal
from scalerl_coordinator.journaled_core import load_state
from scalerl_coordinator.response_store import ResponseStore
from scalerl_coordinator.samplers import TaskSamplers, make_sampler
from scalerl_coordinator.server import Server
from scalerl_coordinator.settings import Settings
from scalerl_tasks import Prompt, SourceError, open_task

TOKEN = "secret"


class Process:
    """The coordinator as the runtime starts it: its own process on a directory."""

    def __init__(self, root: Path, **overrides: object) -> None:
        self.paths = RunPaths(root)
        text = run_text(**overrides)
        self.paths.run_file.write_text(text)
        self.paths.token.write_text(TOKEN + "\n")
        self.task = open_task(parse_run(text, "test").spec.task)
        self.digest = self.task.train.digest
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *, ready: bool = True) -> None:
        environ = {
            **os.environ,
            "SCALERL_DIR": str(self.paths.root),
            "SCALERL_NAME": "coordinator-0",
            "SCALERL_COORDINATOR_URL": self.url,
            "SCALERL_TOKEN_FILE": str(self.paths.token),
        }
        command = [sys.executable, "-m", "scalerl_coordinator.main", "--listen", f"127.0.0.1:{self.port}"]
        with (self.paths.root / "coordinator.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stderr=log)
        deadline = time.monotonic() + 120
        while ready:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"did not start: {self.log()}") from None
                time.sleep(0.02)

    def log(self) -> str:
        return (self.paths.root / "coordinator.log").read_text()

    def kill(self) -> None:
        """As a power switch would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(120)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


class Prompts:
    """A prompt source without a task; its prompts may be bad, or take their time."""

    def __init__(self, name: str, size: int) -> None:
        self.digest = name
        self.bad: set[int] = set()
        self.error: type[SourceError] = SourceError
        self.seconds = 0.0
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        time.sleep(self.seconds)
        if index in self.bad:
            raise self.error(f"prompt {index} of {self.digest} cannot be made")
        return Prompt(id=f"{self.digest}/{index}", text="", answer="")


@dataclass
class Local:
    """A coordinator in the test's own process, on a real socket and a real directory."""

    port: int
    server: Server
    journal: Journal
    paths: RunPaths
    train: Prompts
    digest: str = "train"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serve(
    root: Path,
    nonce: str = "local",
    history: ResponseStore | None = None,
    exports_seconds: float = 5.0,
    **options: object,
) -> AsyncIterator[Local]:
    """A coordinator on ``root`` while the context lasts; then an orderly stop. ``options`` are the journal's."""
    settings = Settings.of_run(
        parse_run(run_text(), "test"), train_digest="train", held_out=[("held-out", 3)]
    )
    paths = RunPaths(root)
    journal = Journal(paths.journal, **options)
    samplers = TaskSamplers([make_sampler(settings.curriculum, 397, 0, float)])
    core = Core.begin(settings, samplers, load_state(journal), nonce, 0.0)
    await journal.start()
    train = Prompts("train", 397)
    server = Server(
        *(core, journal, RunFiles(paths), TOKEN, [train], [Prompts("held-out", 3)]),
        history=history,
        exports_seconds=exports_seconds,
    )
    await server.start()
    served = runner(server.app, shutdown_seconds=1.0)
    await served.setup()
    await web.TCPSite(served, "127.0.0.1", 0).start()
    try:
        yield Local(served.addresses[0][1], server, journal, paths, train)
    finally:
        server.stop_polls()
        await served.cleanup()
        await server.close()
        if server.failure.done():
            server.failure.exception()  # retrieved: the test has looked at it, or another problem matters more


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """The directory of a run that has only a token."""
    found = RunPaths(tmp_path)
    found.token.write_text(TOKEN)
    return found


@pytest.fixture
def world() -> World:
    """Decisions alone: a trainer and a generator at version 0, whose point is made."""
    return ready(World(make_settings()))


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Local]:
    """Faster than a process, for what does not need one."""
    async with serve(tmp_path) as coordinator:
        yield coordinator


@pytest.fixture
def serving_on() -> Callable[..., AbstractAsyncContextManager[Local]]:
    """For tests that stop and start it, or choose its disk."""
    return serve


@pytest.fixture
def make_process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Makes a coordinator process, not yet started, with sections of the spec; killed at the end whatever happens."""
    made: list[Process] = []

    def make(**overrides: object) -> Process:
        made.append(Process(tmp_path, **overrides))
        return made[-1]

    yield make
    for process in made:
        if process.process is not None and process.process.poll() is None:
            process.kill()


@pytest.fixture
def coordinator(make_process: Callable[..., Process]) -> Process:
    """A coordinator process, not yet started; killed at the end whatever happens."""
    return make_process()


@pytest.fixture
async def client(coordinator: Process) -> AsyncIterator[Client]:
    """A client of the process."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Client(session, coordinator.url, TOKEN)


@pytest.fixture
async def visitor(local: Local) -> AsyncIterator[Client]:
    """A client of the coordinator in this process."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Client(session, local.url, TOKEN)
