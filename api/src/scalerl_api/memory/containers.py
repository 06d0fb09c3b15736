"""Host memory of the containers of a run on a cluster, in bytes, from the spec and the model's size: the default requests.

Estimates are upper bounds: a pod that is scheduled for less than it uses is evicted or killed when its node runs out.
``benchmarks/pod_memory.py`` measures them on CPUs. Downloads, checkpoints and exports are on the run's volume, so only pods that do
not mount it need ephemeral storage (:func:`directory_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, TypeGuard

from scalerl_api.memory.model_size import BYTES, ModelSize
from scalerl_api.memory.roles import (
    checkpoint_copy,
    offloaded_bytes,
    published_copy,
    server_memory,
    state_bytes,
    trainer_rank_bytes,
)
from scalerl_api.spec import RunSpec

_MIB: Final = 2**20
LIBRARY_BYTES: Final[Mapping[str, int]] = {
    "prepare": 1024 * _MIB,
    "server": 1280 * _MIB,
    "trainer": 1024 * _MIB,
}
"""Python, torch and the libraries of one process on CPUs; of the server all its processes."""
ACCELERATOR_LIBRARY_BYTES: Final[Mapping[str, int]] = {"server": 4096 * _MIB, "trainer": 3072 * _MIB}
"""The same of one process with an accelerator: also CUDA's libraries, and memory that NCCL pins [by reading]."""
MARGIN: Final = 0.1
"""Added to the part that depends on the model."""


def has_estimate(container: str) -> TypeGuard[Literal["prepare", "server", "trainer"]]:
    """Whether a container's memory depends on the model."""
    return container in LIBRARY_BYTES


def container_bytes(
    container: Literal["prepare", "server", "trainer"], size: ModelSize, spec: RunSpec
) -> int:
    """Memory of a container; of a trainer's that of one rank, of which a pod may have several, without :func:`pod_bytes`."""
    of_model = {"prepare": _prepare, "server": _server, "trainer": _trainer}[container]
    devices = {"prepare": 0, "server": spec.generator.devices, "trainer": spec.trainer.devices}[container]
    libraries = LIBRARY_BYTES[container]
    if devices:
        # vLLM has a process for HTTP, and one for each device.
        libraries += ACCELERATOR_LIBRARY_BYTES[container] * (devices if container == "server" else 1)
    elif container == "server" and spec.generator.workers > 1:
        libraries *= 1 + spec.generator.workers
    return libraries + math.ceil((1 + MARGIN) * of_model(size, spec))


def pod_bytes(container: str, size: ModelSize, spec: RunSpec) -> int:
    """Memory of a container that does not grow with its ranks: the last published version, which rank 0 keeps."""
    return math.ceil((1 + MARGIN) * published_copy(size, spec)) if container == "trainer" else 0


def directory_bytes(container: str, size: ModelSize, spec: RunSpec) -> int:
    """Ephemeral storage of a container whose pod has the run's directory on its node: the model, and of the trainer the kept
    checkpoints, the best, one that is being written and one that is being copied, the weights after a warm start, and the exported models (best, last, a new one)."""
    model = size.parameters * BYTES[spec.model.dtype]
    if container != "trainer":
        return math.ceil((1 + MARGIN) * model)
    checkpoints = (spec.checkpoint.keep + 3) * state_bytes(size, spec)
    warm_started = model if spec.warm_start is not None else 0
    exports = 3 * model if spec.trainer.export.enabled else 0
    return math.ceil((1 + MARGIN) * (model + warm_started + checkpoints + exports))


def _prepare(size: ModelSize, spec: RunSpec) -> int:
    """Of a given model only headers are read. A scratch model's tensors are drawn one after another: random numbers, scaled
    ones, and their conversion."""
    return 0 if spec.model.scratch is None else 16 * size.largest_tensor


def _server(size: ModelSize, spec: RunSpec) -> int:
    """With accelerators one tensor at a time; on CPUs also what :func:`.roles.server_memory` counts, a second copy of the weights,
    in vLLM's own layout, and the float32 weights of the head."""
    tensor, bucket = (
        4 * size.largest_tensor,
        _host_buckets(spec) + published_copy(size, spec),
    )
    if spec.generator.devices:
        return tensor + bucket
    copy = size.parameters * BYTES[spec.model.dtype]
    head = 4 * size.vocabulary_size * size.hidden_size
    cache = 0 if spec.generator.kv_cache else spec.generator.workers * DEFAULT_CPU_CACHE_BYTES
    return server_memory(size, spec) + cache + copy + head + tensor + bucket


DEFAULT_CPU_CACHE_BYTES: Final = 256 * _MIB
"""KV cache of vLLM on CPUs without ``generator.kvCache``, as :mod:`scalerl_generator.vllm_server` sets it for each worker."""


def _host_buckets(spec: RunSpec) -> int:
    """Two buckets of a publish, unless they are on the devices."""
    return 0 if spec.weight_backend.device_buckets else 2 * spec.publish_bucket_bytes


def _trainer(size: ModelSize, spec: RunSpec) -> int:
    """With accelerators a few tensors at a time while it loads, the copy of its state for a checkpoint, what it offloads, and buffers
    of a publish over gloo. On CPUs :func:`.roles.trainer_rank_bytes`."""
    if not spec.trainer.devices:
        return trainer_rank_bytes(size, spec)
    return (
        checkpoint_copy(size, spec)
        + offloaded_bytes(size, spec)
        + 12 * size.largest_parameter
        + _host_buckets(spec)
    )
