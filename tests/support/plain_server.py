"""A standard vLLM server without this project's plug-in, in its own process group, with an API key.

Run as a program it is vLLM's own, but that the engine is forked, as on GPUs: on CPUs it would import vLLM again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from free_port import free_port

START_SECONDS = 360.0


@contextmanager
def plain_server(model: Path, *, context_tokens: int, key: str, log: Path) -> Iterator[str]:
    """Serve ``model`` as ``teacher`` in float32; yields the URL once the server is healthy."""
    port = free_port()
    argv = [sys.executable, __file__, "--model", str(model)]
    argv += ["--served-model-name", "teacher", "--host", "127.0.0.1", "--port", str(port), "--api-key", key]
    argv += ["--dtype", "float32", "--max-model-len", str(context_tokens), "--enforce-eager"]
    argv += ["--kv-cache-memory-bytes", str(64 << 20), "--distributed-executor-backend", "uni"]
    variables = {
        "VLLM_PLUGINS": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as sink:
        server = subprocess.Popen(
            argv, env=os.environ | variables, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, (
                f"no answer in {START_SECONDS:.0f} s: {log.read_text()[-4000:]}"
            )
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(120)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    import gc
    import multiprocessing

    gc.disable()  # imports make a million objects that stay; neither process visits them afterwards
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.freeze()
    gc.enable()
    entry.main()
