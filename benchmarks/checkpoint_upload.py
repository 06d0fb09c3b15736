"""How much the upload of a checkpoint to an object store slows training down.

One rank's uploader sends a checkpoint of ``--gigabytes`` from a volume to a real S3 server on loopback, over a connection of its
full speed and over a slow one, while the main thread does steps like those of a trainer on a GPU: it launches many short
operations, on one core, and waits in between. Steps with and without an upload alternate in one run. The server and the
slow connection run at the lowest priority, because in practice they are elsewhere.

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


def uploaded_steps(trainer: Trainer, seconds: list[float], limit: int) -> tuple[float, bool]:
    """Steps during one upload, at most ``limit``; returns the seconds of the upload so far, and whether it ended."""
    begun = time.perf_counter()
    trainer.uploader.offer(1, -1)
    for _ in range(limit):
        trainer.sync()
        if not trainer.uploader.busy:
            break
        seconds.append(step())
    return time.perf_counter() - begun, not trainer.uploader.busy


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
    urls: Any = multiprocessing.get_context("spawn").Queue()
    relay = multiprocessing.get_context("spawn").Process(
        target=slow_connection,
        args=(int(server.url.rpartition(":")[2]), arguments.slow_mb * 1e6, urls),
        daemon=True,
    )
    relay.start()
    try:
        for name, url in (("full speed", server.url), (f"{arguments.slow_mb:g} MB/s", urls.get(timeout=120))):
            os.environ["AWS_ENDPOINT_URL"] = url
            trainer = Trainer(directory / name.replace("/", " "), f"s3://{BUCKET}/{name[:2].strip()}")
            trainer.save(1, int(arguments.gigabytes * 1e9))
            uploaded_steps(trainer, [], 1000)
            without: list[float] = []
            during: list[float] = []
            took = []
            for _ in range(arguments.rounds):
                before = len(during)
                seconds, ended = uploaded_steps(trainer, during, 200)
                assert ended, trainer.uploader.problem
                took.append(seconds)
                without += [step() for _ in range(len(during) - before)]
            slower = statistics.mean(during) / statistics.mean(without) - 1
            median = statistics.median(during) / statistics.median(without) - 1
            print(
                f"{name}: steps {statistics.mean(without):.3f} s, during an upload {slower:+.1%} (median {median:+.1%}, "
                f"{len(during)} steps each); {arguments.gigabytes:g} GB in {statistics.median(took):.1f} s",
                flush=True,
            )
    finally:
        server.close()
        relay.kill()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
