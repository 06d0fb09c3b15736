"""How much the upload of a checkpoint to an object store slows training down.

One rank's uploader sends a checkpoint of ``--gigabytes`` from a volume to a real S3 server on loopback, at ``--mb`` megabytes per second,
while the main thread does steps like those of a trainer on a GPU: it launches many short operations, on one core, and waits in
between. All else (the uploader's threads, server, connections) has the other cores, at the lowest priority.

The connection stops and flows by the step. Three kinds of steps alternate, in an order drawn for each three: no bytes flow; those of the
trainer's own uploader; those of another process that does the same upload. Server, hashes, memory bandwidth and caches cost both kinds the
same, so the difference of the last two is what the upload costs the process that trains: the interpreter's lock, and its allocator. It is
paired within each three, so slow drifts of the machine cancel; the interval is of a bootstrap over them.

    python benchmarks/checkpoint_upload.py [--gigabytes 1] [--mb 100] [--threes 220]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / p) for p in ("trainer/tests", "tests/support")]

import numpy as np
import torch
from checkpoint_copies import Relay, Trainer
from s3_server import BUCKET, S3Server

OPERATIONS, SIZE, WAIT_SECONDS = 30, 256, 0.005
SETTLE_SECONDS = 0.06
"""After the connection has stopped or begun to flow: what is in its buffers."""
CHUNK = 1 << 17
KINDS = ("none", "own", "other")


def step() -> tuple[float, float]:
    """A step of about a fifth of a second; returns its seconds, and those of processor time."""
    begun, cpu, a = time.perf_counter(), time.thread_time(), torch.randn(SIZE, SIZE)
    for _ in range(OPERATIONS):
        for _ in range(4):
            a = torch.tanh(a @ a.T)
        time.sleep(WAIT_SECONDS)
    return time.perf_counter() - begun, time.thread_time() - cpu


class Connecting(Relay):
    """A connection that passes bytes on while ``flows`` is set, and counts them."""

    def __init__(self, port: int, bytes_per_second: float, flows: Any, passed: Any) -> None:
        self._flows, self._passed = flows, passed
        self._free_at = 0.0
        super().__init__(port, bytes_per_second)

    def _copy(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                if slow:
                    self._flows.wait()
                    with self._lock:
                        self._free_at = (
                            max(self._free_at, time.monotonic()) + len(data) / self.bytes_per_second
                        )
                        self._passed.value += len(data)
                        wait = self._free_at - time.monotonic()
                    time.sleep(max(0.0, wait))
                target.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            target.close()


def connection(port: int, bytes_per_second: float, flows: Any, passed: Any, urls: Any) -> None:
    """A process of its own, since its threads would hold the interpreter of the steps."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    urls.put(Connecting(port, bytes_per_second, flows, passed).url)
    time.sleep(3600)


class Upload:
    """Uploads of one checkpoint, one after the other."""

    def __init__(self, directory: Path, to: str, gigabytes: float) -> None:
        self._trainer = Trainer(directory, to)
        self._trainer.save(1, int(gigabytes * 1e9))

    def go_on(self) -> None:
        """Begin the next one if the last has ended."""
        self._trainer.sync()
        assert not self._trainer.uploader.problem, self._trainer.uploader.problem
        if not self._trainer.uploader.busy:
            self._trainer.uploader.offer(1, -1)

    def end(self) -> None:
        self._trainer.until(lambda: not self._trainer.uploader.busy, seconds=120)


def other_process(directory: Path, environ: dict[str, str], gigabytes: float, pipe: Connection) -> None:
    """Uploads until a message comes."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    os.environ.update(environ)
    upload = Upload(directory, f"s3://{BUCKET}/other", gigabytes)
    while not pipe.poll(0.05):
        upload.go_on()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    upload: Upload, flows: dict[str, Any], threes: int, own: set[int], others: set[int]
) -> np.ndarray:
    """Seconds, and seconds of processor time, of the steps: (threes, kinds, 2)."""
    order = random.Random(0)
    found = np.zeros((threes, len(KINDS), 2))
    for three in range(threes):
        for kind in order.sample(range(len(KINDS)), len(KINDS)):
            os.sched_setaffinity(0, others)  # a thread has the affinity of the one that starts it
            upload.go_on()
            os.sched_setaffinity(0, own)
            if flow := flows.get(KINDS[kind]):
                flow.set()
            time.sleep(SETTLE_SECONDS)
            found[three, kind] = step()
            if flow:
                flow.clear()
    return found


def interval(differences: np.ndarray, draws: int = 4000) -> tuple[float, float, float]:
    """Median, and the bounds of its 95 % interval."""
    drawn = np.random.default_rng(0).choice(differences, (draws, len(differences)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(differences)), float(low), float(high)


def report(found: np.ndarray) -> dict[str, Any]:
    none, own, other = (found[:, kind, 0] for kind in range(3))
    unit = float(np.median(none))
    rows = {
        "own - other: the trainer's share": (own - other) / unit,
        "own - none: with server and machine": (own - none) / unit,
        "other - none: server and machine": (other - none) / unit,
        "own - other, processor time of the main thread": (found[:, 1, 1] - found[:, 2, 1]) / unit,
    }
    print(f"{len(found)} threes of steps of {unit:.3f} s")
    figures: dict[str, Any] = {"step_seconds": unit}
    for name, differences in rows.items():
        median, low, high = interval(differences)
        print(f"{name:48} median {median:+.2%} ({low:+.2%} to {high:+.2%}), mean {differences.mean():+.2%}")
        figures[name.partition(":")[0]] = [median, low, high, float(differences.mean())]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--mb", type=float, default=100.0, help="megabytes per second of each connection")
    parser.add_argument("--threes", type=int, default=220)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    own = {min(cores)}
    others = cores - own or cores
    os.sched_setaffinity(0, others)  # all that is started from here on
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-upload-"))
    server = S3Server(directory / "server.log")
    process: Any = server._process
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    spawn = multiprocessing.get_context("spawn")
    port, urls = int(server.url.rpartition(":")[2]), spawn.Queue()
    flows, passed = (
        {kind: make() for kind in KINDS[1:]} for make in (spawn.Event, lambda: spawn.Value(ctypes.c_uint64))
    )
    children = []
    for kind in KINDS[1:]:
        flows[kind].set()
        given = (port, arguments.mb * 1e6, flows[kind], passed[kind], urls)
        children.append(spawn.Process(target=connection, args=given, daemon=True))
        children[-1].start()
        os.environ.update(server.environ | {"AWS_ENDPOINT_URL": urls.get(timeout=120)})
        if kind == "other":
            pipe, its_pipe = spawn.Pipe()
            what = (directory / kind, dict(os.environ), arguments.gigabytes, its_pipe)
            children.append(spawn.Process(target=other_process, args=what, daemon=True))
            children[-1].start()
        else:
            upload = Upload(directory / kind, f"s3://{BUCKET}/own", arguments.gigabytes)
            upload.go_on()
    try:
        while min(count.value for count in passed.values()) < 20e6:
            upload.go_on()
            time.sleep(0.05)
        for flow in flows.values():
            flow.clear()
        before = {kind: passed[kind].value for kind in KINDS[1:]}
        server_cpu = cpu_seconds(process.pid)
        found = measure(upload, flows, arguments.threes, own, others)
        sent = {kind: passed[kind].value - before[kind] for kind in KINDS[1:]}
        spent = {
            kind: found[:, at, 0].sum() + SETTLE_SECONDS * arguments.threes for at, kind in enumerate(KINDS)
        }
        figures = report(found)
        rates = {kind: sent[kind] / 1e6 / spent[kind] for kind in sent}
        used = (cpu_seconds(process.pid) - server_cpu) / (sum(sent.values()) / 1e9)
        print(
            ", ".join(f"{kind} {rate:.0f} MB/s" for kind, rate in rates.items())
            + f"; server {used:.1f} s of processor time a GB"
        )
        print(json.dumps(figures | {"mb_per_second": rates}))
        pipe.send(False)
        flows["own"].set()
        upload.end()
    finally:
        server.close()
        for child in children:
            child.kill()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
