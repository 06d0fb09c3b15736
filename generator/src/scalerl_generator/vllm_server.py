"""``python -m scalerl_generator.vllm_server``: vLLM's HTTP server with a run's settings and a fast start.

At its start the process executes itself once more with the environment that torch reads when it is loaded (OpenMP
threads, preloaded libraries, the bytecode cache). Then it does what vLLM's own launcher does, with these differences,
which matter on one or two cores:

- a single worker runs in the engine process (CPU builds start a worker process by default, only for thread binding);
- the engine process is forked after vLLM is imported, as on GPUs, so it does not import vLLM again;
- the model class is looked up in this process, not in a subprocess that imports vLLM;
- if the installation has no compiled bytecode, the process keeps a bytecode cache.

The engine process dies with this one, however this one ends (:mod:`.vllm_lifetime`). If vLLM does not start, the last line
on stderr has the cause, and a cause that repeats ends the process with the exit code of wrong input (:mod:`.vllm_failures`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from scalerl_api.process import BAD_INPUT_EXIT_CODE, COMPILE_CACHE, DIR, NAME
from scalerl_generator.server import compile_cache, vllm_failures
from scalerl_generator.server.require_token import TOKEN_VARIABLE, token_from_file
from scalerl_generator.server.sampling_seed import start_seed, vllm_seed
from scalerl_generator.server.server_options import (
    ServerOptions,
    ServerProblem,
    overrides,
    parse,
    vllm_arguments,
)
from scalerl_generator.server.start_environment import (
    PREPARED,
    is_cpu_build,
    package_dir,
    prepared_environment,
    require_a_gpu,
    uncompiled_package,
)
from scalerl_generator.server.vllm_lifetime import kill_forks_with_parent


class StartFailure(Exception):
    """vLLM did not start. ``cause`` has the exception, also if it happened in another process."""

    def __init__(self, cause: vllm_failures.Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


def vllm_namespace(options: ServerOptions, on_cpu: bool, seed: int = 0) -> argparse.Namespace:
    """The settings of :func:`vllm_arguments` as vLLM's own parser reads them, which here takes no abbreviations."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    arguments: argparse.Namespace = parser.parse_args(vllm_arguments(options, on_cpu, seed))
    arguments.hf_overrides = overrides(options, arguments.hf_overrides)
    return arguments


def _register_model_class(model: str) -> None:
    """Register the model's class, so that vLLM starts no subprocess to inspect it."""
    from vllm import ModelRegistry

    for architecture in json.loads((Path(model) / "config.json").read_text()).get("architectures", ()):
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


async def _serve(
    arguments: argparse.Namespace,
    seed: bytes,
    fork_engine: bool,
    drafts: bool,
    last_failure: vllm_failures.LastFailure,
    archive: Path | None,
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("terminated while starting")

    signal.signal(signal.SIGTERM, interrupt)  # until the server installs its own handler
    listen_address, sock = setup_server(arguments, reuse_port=False)
    kill_forks_with_parent(sock)
    try:
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        if fork_engine:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the CPU platform has just set "spawn"
        engine = AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            disable_log_stats=arguments.disable_log_stats,
        )
        await engine.collective_rpc("scalerl_seed", args=(seed.hex(),))
        if drafts:
            await engine.collective_rpc("scalerl_attach_proposer")
    except Exception as error:
        raise StartFailure(vllm_failures.cause_of(error)) from error
    last_failure.forget()
    vllm_failures.forget_reports()
    gc.collect()
    gc.freeze()  # imported objects are permanent, so collections skip them
    storing = None if archive is None else compile_cache.begin_store(archive, _compiled())
    try:
        stopped: asyncio.Task[None] = await build_and_serve(engine, listen_address, sock, arguments)
    finally:
        engine.shutdown(timeout=0)
    try:
        await stopped
        if storing is not None:
            await asyncio.to_thread(storing.join, compile_cache.STORE_SECONDS)
    finally:
        sock.close()


def serve(options: ServerOptions, on_cpu: bool) -> None:
    """Run the server until SIGTERM, in the environment of :func:`prepared_environment`."""
    gc.disable()  # imports create millions of permanent objects
    import uvloop
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    member, start = os.environ.get(NAME, ""), secrets.token_hex(16)
    seed = start_seed(options.seed, member, start)
    # For accounts of a run: the seed follows from these three.
    print(f"sampling seed: run {options.seed}, member {member!r}, start {start}", file=sys.stderr, flush=True)
    arguments = vllm_namespace(options, on_cpu, vllm_seed(seed))
    vllm_failures.watch()
    one_cpu_worker = on_cpu and options.tensor_parallel == 1
    try:
        validate_parsed_serve_args(arguments)
        if one_cpu_worker:
            _register_model_class(options.model)
    except Exception as error:
        raise StartFailure(vllm_failures.Cause.of(error)) from error
    gc.freeze()  # nor would the engine's collections copy their pages, which it shares with this process
    gc.enable()
    uvloop.run(
        _serve(
            arguments,
            seed,
            fork_engine=one_cpu_worker,
            drafts=options.max_draft_tokens > 0,
            last_failure=last_failure(options),
            archive=_archive(options),
        )
    )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalerl"


def _compiled() -> Path:
    return _cache() / "compiled"


def _archive(options: ServerOptions) -> Path | None:
    """The archive of compiled code for a server with these options; None without ``generator.compileCache``."""
    folder = os.environ.get(COMPILE_CACHE)
    if not folder:
        return None
    try:
        config = (Path(options.model) / "config.json").read_bytes()
    except OSError:
        return None  # vLLM says so
    # Neither the run, the port nor the token is compiled into the code.
    same = repr(replace(options, model="", port=0, host="", seed=0, log_level="", stats=False))
    return Path(folder) / f"{compile_cache.key([same], config)}.tar"


def last_failure(options: ServerOptions) -> vllm_failures.LastFailure:
    """The last failed start of this run's replica with these options."""
    run, name = os.environ.get(DIR, ""), os.environ.get(NAME, "")
    return vllm_failures.LastFailure.of_server(_cache(), run, name, repr(replace(options, port=0)))


def end_failed_start(failure: StartFailure, options: ServerOptions) -> NoReturn:
    """Print the cause as the last line, which the operator and the console quote, and exit.

    The exit code is that of wrong input if the same cause, independent of the machine, also ended the start before.
    """
    traceback.print_exception(failure.__cause__)
    if os.environ.get(COMPILE_CACHE):
        compile_cache.discard(_compiled())  # it may be the cause
    repeated = last_failure(options).repeats(failure.cause)
    vllm_failures.forget_reports()
    again = " (the second start in a row that fails so)" if repeated else ""
    print(f"vllm_server: vLLM does not start: {failure}{again}", file=sys.stderr, flush=True)
    # An ordinary exit would wait for vLLM's threads, and append their messages.
    os._exit(BAD_INPUT_EXIT_CODE if repeated else 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: prepare the environment, replace the process, serve."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not os.environ.get(TOKEN_VARIABLE):
        os.environ[TOKEN_VARIABLE] = token_from_file(os.environ)
    on_cpu = is_cpu_build()
    if not os.environ.get(PREPARED):
        if not on_cpu:
            require_a_gpu()
        vllm_dir = package_dir("vllm")
        environ = dict(os.environ)
        if (archive := _archive(options)) is not None:
            compile_cache.restore(archive, _compiled())
            environ |= compile_cache.environment(_compiled(), environ)
        env = prepared_environment(
            options,
            environ,
            on_cpu,
            package_dir("torch"),
            _cache(),
            cache_bytecode=uncompiled_package(vllm_dir) and "PYTHONPYCACHEPREFIX" not in os.environ,
        )
        os.execve(sys.executable, [sys.executable, "-P", "-m", "scalerl_generator.vllm_server", *argv], env)  # noqa: S606
    try:
        serve(options, on_cpu)
    except StartFailure as failure:
        end_failed_start(failure, options)


if __name__ == "__main__":
    try:
        main()
    except ServerProblem as problem:
        print(f"vllm_server: {problem}", file=sys.stderr)
        sys.exit(BAD_INPUT_EXIT_CODE)
