"""Starts a separate vLLM server for a benchmark."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from scalerl_generator.server.server_options import PLUGIN
from scalerl_generator.server.start_environment import package_dir
from scalerl_generator.vllm_client import VllmClient

START_SECONDS: Final = 300.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def use_source_tree(folder: Path) -> None:
    """Have the processes that this one starts find the generator as this one does, installed or not, and vLLM its plug-in."""
    entry = folder / "scalerl_source-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: scalerl-source\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = scalerl_generator.vllm_worker:register\n"
    )
    sources = [
        package_dir(f"scalerl_{member}").parent
        for member in ("api", "processes", "tasks", "trainer", "generator")
    ]
    given = os.environ.get("PYTHONPATH")
    path = [folder, *sources, *([given] if given else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, path))


class VllmProcess:
    """A generator's server process, with ``arguments`` of :mod:`scalerl_generator.vllm_server`."""

    def __init__(self, model: Path, *arguments: str, python_path: Path | None = None) -> None:
        # SIGTERM becomes SystemExit, so that a benchmark's `finally` ends the server.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        port, self.token = free_port(), secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(suffix=".vllm.log")  # noqa: SIM115  # closed with the server
        environ = os.environ | {"SCALERL_VLLM_TOKEN": self.token}
        if python_path is not None:
            environ["PYTHONPATH"] = str(python_path)
        command = [
            sys.executable,
            "-m",
            "scalerl_generator.vllm_server",
            "--model",
            str(model),
            "--port",
            str(port),
        ]
        self._process = subprocess.Popen(
            [*command, *arguments], env=environ, stdout=self._log, stderr=self._log
        )

    def client(self) -> VllmClient:
        return VllmClient(self.url, self.token)

    def log(self) -> str:
        text = Path(self._log.name).read_text(errors="replace")
        return "".join(line for line in text.splitlines(keepends=True) if "] Route: /" not in line)

    async def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server is healthy. Raises RuntimeError with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        async with self.client() as client:
            while not await client.health():
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(self.log()[-1900:])
                await asyncio.sleep(0.2)

    def cpu_seconds(self) -> float:
        """CPU seconds of all the server's processes."""
        server = psutil.Process(self._process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True)))

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the engine dies with it
            self._process.wait(10)
        self._log.close()
