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

from scalerl_generator.vllm_client import VllmClient

START_SECONDS: Final = 300.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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
            [*command, *arguments], env=environ, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def client(self) -> VllmClient:
        return VllmClient(self.url, self.token)

    async def ready(self) -> None:
        """Wait until the server is healthy. Raises RuntimeError with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        async with self.client() as client:
            while not await client.health():
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self._log.seek(0)
                    raise RuntimeError(self._log.read().decode(errors="replace")[-3000:])
                await asyncio.sleep(0.2)

    def cpu_seconds(self) -> float:
        """CPU seconds of all the server's processes."""
        server = psutil.Process(self._process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True)))

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        except ProcessLookupError:
            pass
        self._log.close()
