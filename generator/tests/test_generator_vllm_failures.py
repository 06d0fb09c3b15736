"""A vLLM server that cannot load its model says why, and a cause that repeats is wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_with_updates import TOKEN, build_model

from scalerl_api.process import BAD_INPUT_EXIT_CODE
from scalerl_generator.server.require_token import TOKEN_VARIABLE
from scalerl_generator.server.vllm_failures import Cause, LastFailure


def test_cause_is_one_line_without_the_configuration() -> None:
    assert Cause.of(KeyError("layers.0\nx")) == Cause("KeyError: 'layers.0\\nx'", transient=False)
    assert len(Cause.of(ValueError("x" * 10_000)).text) == 600


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        ValueError("Free memory on device cuda:0 (10 GiB) on startup is less than desired"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(28, "No space left on device"),
        TimeoutError(),
        ConnectionRefusedError(111, "refused"),
    ],
)
def test_failure_of_the_machine_is_no_wrong_input(error: Exception, tmp_path: Path) -> None:
    last = LastFailure.of_server(tmp_path, "run")
    assert [last.repeats(Cause.of(error)) for _ in range(3)] == [False] * 3


def test_second_start_with_the_same_cause_repeats(tmp_path: Path) -> None:
    first, other = Cause.of(ValueError("head 3 at 0x7f01 is bad")), Cause.of(KeyError("y"))
    last = LastFailure.of_server(tmp_path, "run", "generator-0")
    assert not last.repeats(first)
    assert not LastFailure.of_server(tmp_path, "run", "generator-1").repeats(first)
    assert last.repeats(Cause.of(ValueError("head 4 at 0xffff is bad")))
    assert not last.repeats(other)
    last.forget()
    assert not last.repeats(other)
    os.utime(last.path, (0, 0))
    assert not last.repeats(other), "a failure of another day"
    unwritable = LastFailure.of_server(Path("/proc/none"), "run")
    assert not unwritable.repeats(first)


def unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))


def misshapen_tensor(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("damage", "options", "words"),
    [
        (misshapen_tensor, (), "7"),
        pytest.param(unknown_architecture, (), "NoSuchForCausalLM", marks=pytest.mark.full),
        # On CPUs, which the spec refuses.
        pytest.param(
            lambda _: None, ("--routed-experts",), "requires Model Runner V2", marks=pytest.mark.full
        ),
    ],
)
def test_server_that_cannot_load_its_model_says_why(
    damage: Callable[[Path], None], options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    build_model(model, tied=True, dtype=torch.float32)
    damage(model)
    codes = []
    for start in range(2):
        argv = [sys.executable, "-m", "scalerl_generator.vllm_server", "--model", str(model), "--port", "0"]
        ended = subprocess.run(
            [*argv, "--dtype", "float32", "--kv-cache-bytes", "33554432", *options],
            env={**os.environ, TOKEN_VARIABLE: TOKEN, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=400,
        )
        codes.append(ended.returncode)
        last = ended.stderr.rstrip().splitlines()[-1]
        assert last.startswith("vllm_server: vLLM does not start: "), ended.stderr[-3000:]
        assert words in last, last
        assert "root cause" not in last
        assert ("second start" in last) == (start == 1)
    assert codes == [1, BAD_INPUT_EXIT_CODE]


def test_cause_of_an_engine_process_that_configures_its_logging_again() -> None:
    """As vLLM's does; the server's own exception only refers to it. In a process of its own, since it changes all logging."""
    code = """
        import logging, logging.config, os
        from scalerl_generator.server import vllm_failures
        vllm_failures.watch()
        vllm_failures.watch()
        if os.fork() == 0:
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"level": "ERROR"}}})
            try:
                assert 3 == 4, "a tensor has 3 rows"
            except AssertionError:
                logging.getLogger("other").exception("not vLLM's")
                logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
            os._exit(1)
        os.wait()
        print(vllm_failures.cause_of(RuntimeError("Engine core initialization failed. See root cause above. {}")).text)
        vllm_failures.forget_reports()
        print(vllm_failures.cause_of(RuntimeError("Engine core initialization failed. See root cause above. {}")).transient)
        logging.getLogger("vllm").error("of a request", exc_info=ValueError())
        print(os.path.exists(os.environ[vllm_failures.CAUSES_FILE]))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines() == ["AssertionError: a tensor has 3 rows", "True", "False"], ended.stderr
