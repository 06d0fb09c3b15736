"""How much the upload of a checkpoint to an object store slows training down.

One rank's uploader sends a checkpoint of ``--gigabytes`` from a volume to a real S3 server on loopback, over a connection of its
full speed and over a slow one, while the main thread does steps like those of a trainer on a GPU: it launches many short
operations, on one core, and waits in between. The server and the slow connection run at the lowest priority, because in practice
they are elsewhere.

Three kinds of steps alternate in one run: without an upload, during an upload, and during the same upload by another process of
the lowest priority. The server takes several times the processor time of the upload, and shares cores, caches and memory bandwidth
with the steps; the other process has the same server, so what it costs is the machine's, and only the difference is the trainer's.

    python benchmarks/checkpoint_upload.py [--gigabytes 1] [--rounds 5] [--slow-mb 40]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / p) for p in ("trainer/tests", "tests/support")]

import torch
from s3_server import BUCKET, S3Server
from test_trainer_checkpoint_copies import Relay, Trainer

OPERATIONS, SIZE, WAIT_SECONDS = 100, 256, 0.005


def step() -> float:
    """A step of about a second; returns its seconds."""
    begun, a = time.perf_counter(), torch.randn(SIZE, SIZE)
    for _ in range(OPERATIONS):
        for _ in range(4):
            a = torch.tanh(a @ a.T)
        time.sleep(WAIT_SECONDS)
    return time.perf_counter() - begun


def steps_during(busy: Callable[[], bool], limit: int = 200) -> list[float]:
    """Seconds of the steps until ``busy`` is false; fails after ``limit`` steps."""
    seconds: list[float] = []
    while busy():
        assert len(seconds) < limit, "the upload does not end"
        seconds.append(step())
    return seconds


def is_busy(trainer: Trainer) -> bool:
    trainer.sync()
    assert not trainer.uploader.problem, trainer.uploader.problem
    return trainer.uploader.busy


def with_checkpoint(directory: Path, to: str, gigabytes: float) -> Trainer:
    """A trainer that has uploaded its checkpoint once."""
    trainer = Trainer(directory, to)
    trainer.save(1, int(gigabytes * 1e9))
    while is_busy(trainer):
        time.sleep(0.05)
    return trainer


def other_process(
    directory: Path, environ: dict[str, str], to: str, gigabytes: float, pipe: Connection
) -> None:
    """Uploads once for each message, and answers with the seconds."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    os.environ.update(environ)
    trainer = with_checkpoint(directory, to, gigabytes)
    pipe.send(0.0)
    while pipe.recv():
        begun = time.perf_counter()
        trainer.uploader.offer(1, -1)
        while is_busy(trainer):
            time.sleep(0.05)
        pipe.send(time.perf_counter() - begun)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def uploads_cpu_seconds() -> float:
    """Of this process without its main thread."""
    return time.process_time() - time.thread_time()


@dataclass
class Measured:
    """Seconds of the steps of each kind, and of the uploads."""

    without: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    uploads: list[float] = field(default_factory=list)
    cpu: float = 0.0
    """Processor seconds of the trainer's uploads."""
    server_cpu: float = 0.0

    def of(self, seconds: list[float]) -> str:
        mean = statistics.mean(seconds) / statistics.mean(self.without) - 1
        median = statistics.median(seconds) / statistics.median(self.without) - 1
        return f"{mean:+.1%} (median {median:+.1%}, {len(seconds)} steps)"

    def report(self, name: str, gigabytes: float) -> None:
        sent = gigabytes * len(self.uploads)
        own = (statistics.mean(self.during) - statistics.mean(self.beside)) / statistics.mean(self.without)
        print(
            f"{name}: steps {statistics.mean(self.without):.3f} s; during an upload {self.of(self.during)}, by another process "
            f"{self.of(self.beside)}: the trainer's share {own:+.1%}. {gigabytes:g} GB in {statistics.median(self.uploads):.1f} s; "
            f"processor seconds a GB: upload {self.cpu / sent:.1f}, server {self.server_cpu / sent:.1f}",
            flush=True,
        )


def measure(trainer: Trainer, other: Connection, server_pid: int, rounds: int) -> Measured:
    measured = Measured()
    for _ in range(rounds):
        begun, cpu, server = time.perf_counter(), uploads_cpu_seconds(), cpu_seconds(server_pid)
        trainer.uploader.offer(1, -1)
        during = steps_during(lambda: is_busy(trainer))
        measured.uploads.append(time.perf_counter() - begun)
        measured.cpu += uploads_cpu_seconds() - cpu
        measured.server_cpu += cpu_seconds(server_pid) - server
        other.send(True)
        measured.beside += steps_during(lambda: not other.poll())
        other.recv()
        measured.during += during
        measured.without += [step() for _ in during]
    return measured


def slow_connection(port: int, bytes_per_second: float, urls: Any) -> None:
    """A process of its own, since its threads would hold the interpreter of the steps."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    urls.put(Relay(port, bytes_per_second).url)
    time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--slow-mb", type=float, default=40.0, help="megabytes per second of the slow connection"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-upload-"))
    server = S3Server(directory / "server.log")
    process: Any = server._process
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    os.environ.update(server.environ)
    spawn = multiprocessing.get_context("spawn")
    urls: Any = spawn.Queue()
    relay = spawn.Process(
        target=slow_connection,
        args=(int(server.url.rpartition(":")[2]), arguments.slow_mb * 1e6, urls),
        daemon=True,
    )
    relay.start()
    try:
        for name, url in (("full speed", server.url), (f"{arguments.slow_mb:g} MB/s", urls.get(timeout=120))):
            os.environ["AWS_ENDPOINT_URL"] = url
            folder = name.replace("/", " ")
            to = f"s3://{BUCKET}/{name[:2].strip()}"
            pipe, its_pipe = spawn.Pipe()
            environ = server.environ | {"AWS_ENDPOINT_URL": url}
            given = (directory / f"{folder} beside", environ, f"{to}-beside", arguments.gigabytes, its_pipe)
            other = spawn.Process(target=other_process, args=given, daemon=True)
            other.start()
            trainer = with_checkpoint(directory / folder, to, arguments.gigabytes)
            pipe.recv()
            measure(trainer, pipe, process.pid, arguments.rounds).report(name, arguments.gigabytes)
            pipe.send(False)
            other.join()
    finally:
        server.close()
        relay.kill()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
