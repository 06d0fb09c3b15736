"""One rank's checkpoints with copies in a bucket, and a slow connection to it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3_server import BUCKET, S3Server
from test_trainer_checkpointer import OnlyRank, Weights

from scalerl_api.object_store import ObjectStore
from scalerl_api.paths import RunPaths
from scalerl_trainer.checkpoints.load import CheckpointLoader
from scalerl_trainer.checkpoints.manifest import MANIFEST
from scalerl_trainer.checkpoints.object_store import CheckpointCopies
from scalerl_trainer.checkpoints.upload import Uploader
from scalerl_trainer.checkpoints.volume import CheckpointStore
from scalerl_trainer.checkpoints.write import Checkpointer, Timings
from scalerl_trainer.metrics import Metrics

QUICK = Timings(exchange=0.02)
RUN = {"namespace": "", "name": "run", "seed": 0, "model": {}}


class Relay:
    """A slow connection to the server: ``bytes_per_second`` upwards in all."""

    def __init__(self, port: int, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server was killed
                client.close()
                continue
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                if slow:
                    with self._lock:
                        time.sleep(len(data) / self.bytes_per_second)
                target.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            target.close()

    def close(self) -> None:
        self._listener.close()


UPLOADERS: list[Uploader] = []


def end_uploads() -> None:
    """Otherwise their attempts continue, and other tests find the log lines."""
    for uploader in UPLOADERS:
        uploader._ended = True
        if uploader._current is not None:
            uploader._current.cancel()
    UPLOADERS.clear()
    for thread in threading.enumerate():
        if thread.name == "upload":
            thread.join(120)
            assert not thread.is_alive()


class Trainer:
    """One rank's checkpoints on a volume, with copies."""

    def __init__(
        self, root: Path, to: str, *, keep: int = 2, run: dict[str, Any] = RUN, writer: str = "a"
    ) -> None:
        self.volume = volume = CheckpointStore(RunPaths(root), keep)
        copies = CheckpointCopies(ObjectStore(to), run, writer)
        self.metrics = Metrics()
        self.uploader = Uploader(
            copies, volume, rank=0, world=1, keep=keep, metrics=self.metrics, pauses=(0.05,)
        )
        UPLOADERS.append(self.uploader)
        self.engine = Weights()
        ranks: Any = OnlyRank(60.0)
        engine: Any = self.engine
        self.checkpointer = Checkpointer(volume, ranks, engine, uploader=self.uploader, timings=QUICK)
        self.version = CheckpointLoader(
            volume, ranks, engine, uploader=self.uploader, exchange_seconds=QUICK.exchange
        ).load()
        self.checkpointer.continue_from(self.version)

    def save(self, step: int, size: int = 0, best: int = -1) -> None:
        self.engine.save = lambda directory: (directory / "weights").write_bytes(
            f"weights {step}".encode().ljust(size, b".")
        )
        assert self.checkpointer.start(step, f"snapshot {step}".encode(), best) is None
        assert self.checkpointer.finish().error is None

    def sync(self) -> None:
        self.uploader.advance([self.uploader.state])

    def until(self, true: Callable[[], Any], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, self.uploader.problem
            self.sync()
            time.sleep(0.01)

    def upload(self) -> None:
        self.until(lambda: not self.uploader.busy)


def complete(s3: S3Server, to: str) -> list[int]:
    prefix = to.removeprefix(f"s3://{BUCKET}/") + "/step-"
    names = [p.removeprefix(prefix) for p in s3.paths() if p.startswith(prefix)]
    return sorted(int(n.split("/")[0]) for n in names if n.endswith(f"/{MANIFEST}"))


def empty(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()
