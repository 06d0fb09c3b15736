"""A real vLLM server that compiles, and the next pod, which has its archive.

CPU builds run eagerly; here the compilation is switched on again. There, vLLM 0.32 cannot load its own file of a compiled model
(``'function' object has no attribute 'finalize_loading'``) and traces again; the C++ that inductor compiled, most of the time,
is loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import tiny_models
from free_port import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1500)]

START_SECONDS = 600.0
SERVER = """
import sys
import scalerl_generator.vllm_server as server
prepared = server.prepared_environment
server.prepared_environment = lambda *a, **k: prepared(*a, **k) | {"TORCHDYNAMO_DISABLE": "0"}
server.main(sys.argv[1:])
"""


def start(tmp: Path, name: str) -> tuple[str, float, set[str]]:
    """Run a server in an empty home until it is healthy; its log, the seconds of the engine's start, and compiled libraries."""
    home, log, port = tmp / "home", tmp / f"{name}.log", free_port()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "SCALERL_COMPILE_CACHE": str(tmp / "volume"),
        "SCALERL_VLLM_TOKEN": "t",
        "SCALERL_DIR": str(tmp),
    }
    environment.pop("XDG_CACHE_HOME", None)
    options = [
        "--model",
        str(tmp / "model"),
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
    ]
    options += [
        "--kv-cache-bytes",
        str(64 << 20),
        "--log-level",
        "info",
        "--no-fp32-head",
        "--max-num-seqs",
        "8",
    ]
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, *options, "--", "--no-enforce-eager"],
            env=environment, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not healthy(port):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)
    text = log.read_text()
    seconds = re.search(r"init engine .* took ([\d.]+) s", text)
    assert seconds is not None, text[-4000:]
    return text, float(seconds[1]), {file.name for file in (home / ".cache/scalerl/compiled").rglob("*.so")}


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_second_pod_does_not_compile_again(tmp_path: Path) -> None:
    tiny_models.write("llama", tmp_path / "model")
    (tmp_path / "volume").mkdir()
    text, first, libraries = start(tmp_path, "first")
    assert "vLLM compiles" in text
    assert libraries, "nothing was compiled"
    stored = list((tmp_path / "volume").iterdir())
    assert [file.suffix for file in stored] == [".tar"]
    text, second, again = start(tmp_path, "second")
    assert f"files of {stored[0].name} in" in text
    assert again == libraries
    print(f"start of the engine: {first:.1f} s, with the archive {second:.1f} s")
    assert "vLLM compiles" not in text
