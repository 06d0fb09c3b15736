"""Test processes, forked from one server that has done the slow imports; all are ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

TOKEN = "secret"

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patched:
        # Python 3.11 gives the server no sys.path.
        patched.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return context


def until(true: Callable[[], bool], seconds: float = 120.0, what: str = "condition") -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds:g} s"
        time.sleep(0.01)


class Processes:
    """Starts test files as processes; ends them all."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._started: list[Any] = []

    def run(self, file: str, **given: Any) -> Any:
        path = Path(__file__).parent / file
        process = self._context.Process(
            target=runpy.run_path, args=(str(path), given), kwargs={"run_name": "__main__"}, daemon=True
        )
        process.start()
        self._started.append(process)
        return process

    def run_ranks(self, file: str, world: int, **given: Any) -> None:
        """Run a file as each rank of one group, with ``WORKER``, to its end."""
        common = given | {"world": world, "port": free_port()}
        started = [self.run(file, WORKER=common | {"rank": rank}) for rank in range(world)]
        for process in started:
            process.join(400)
            assert process.exitcode == 0

    def end(self) -> None:
        for process in self._started:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self._started:
            process.join(timeout=120)
            process.close()


@pytest.fixture
def processes(forkserver: Any) -> Iterator[Processes]:
    running = Processes(forkserver)
    yield running
    running.end()


@pytest.fixture
def new_run(processes: Processes, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a :class:`trainer_run.Run`; prints its logs at the end, which pytest shows of a failed test."""
    from trainer_run import Run

    made: list[Run] = []

    def new(root: Path | None = None, **changes: Any) -> Run:
        made.append(Run(processes, root or tmp_path / f"run{len(made)}", **changes))
        return made[-1]

    yield new
    for run in made:
        for log in sorted(run.paths.logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-5000:]}")


@pytest.fixture(scope="module")
def module_processes(forkserver: Any) -> Iterator[Processes]:
    running = Processes(forkserver)
    yield running
    running.end()


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders with a float32 model of two layers; ``sizes`` are those of a ``ScratchModel``."""
    from scalerl_api.spec import ScratchModel
    from scalerl_trainer.models import write_scratch

    def make(**sizes: int) -> Path:
        folder = tmp_path_factory.mktemp("model")
        scratch = ScratchModel.model_validate({"layers": 2, "vocabulary_size": 64} | sizes)
        texts = [f"{i} + {i} = {2 * i}" for i in range(50)]
        write_scratch(folder, scratch, texts, seed=3, dtype="float32", context_tokens=64)
        return folder

    return make


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from s3_server import S3Server

    server = S3Server(tmp_path_factory.mktemp("s3") / "server.log")
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module's :class:`s3_server.S3Server`, which the environment names."""
    for variable in [v for v in os.environ if v.startswith("AWS_") or v.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    for variable, value in s3_server.environ.items():
        monkeypatch.setenv(variable, value)
    s3_server.refuse(float("inf"))
    return s3_server


@pytest.fixture
def to(s3: Any, request: pytest.FixtureRequest) -> str:
    """A test's own prefix in the bucket."""
    from s3_server import BUCKET

    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def slow(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A slow connection to the server."""
    from checkpoint_copies import Relay

    relay = Relay(int(s3.url.rpartition(":")[2]), 2e6)
    monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
    yield relay
    relay.close()


@pytest.fixture
def uploads_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of tests that copy checkpoints, at the usual priority: a loaded machine would hardly get to the copies, nor to any later request to
    a store, whose threads are those of the first one."""
    from checkpoint_copies import end_uploads

    for module in ("load", "upload", "write"):
        monkeypatch.setattr(f"scalerl_trainer.checkpoints.{module}.lower_priority", lambda: None)
    yield
    end_uploads()
