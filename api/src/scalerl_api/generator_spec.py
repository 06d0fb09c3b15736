"""``spec.generator``: vLLM servers and their actors."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from scalerl_api.fields import MemoryQuantity, Model, PositiveUnitDecimal, Rule
from scalerl_api.pods import ObjectName, PodResources, PodTemplate
from scalerl_api.speculation import SPECULATION_OPTIONS, SpeculationSpec, is_speculation_option
from scalerl_api.vllm_options import free_option


class CompileCacheSpec(Model):
    """Where compiled code is kept. It is executed by the servers that read it, so runs share it only if they name one claim."""

    claim_name: ObjectName | None = None
    """An existing claim in the run's namespace, for all runs that name it; default: the run's volume, for this run."""


MAX_LEASED: Final = 5
"""Times ``maxConcurrentSequences``, so many sequences does a generator lease at most: those that have ended, and episodes whose
environment makes a step, hold no place in the server's batch."""


class GeneratorSpec(Model):
    """vLLM servers and their actors. Elastic: generators may join, leave or fail at any time."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of generators. Written by ``kubectl scale``, and by the autoscaler if it is enabled."""
    devices: Annotated[int, Field(ge=0, le=64)] = 0
    """Accelerators per replica (tensor parallelism); 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads on CPU, of each worker; default: chosen by vLLM."""
    cpu_workers: Annotated[int, Field(ge=1, le=8)] | None = None
    """CPU only: processes of a server (tensor parallelism); default: 1."""
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=65536)] = 256
    """Maximum number of completions that one server samples concurrently."""
    adaptive_concurrency: bool = False
    """Limits concurrent completions to the number that fits the server's KV cache at their present lengths, up to
    maxConcurrentSequences."""
    kv_cache: MemoryQuantity | None = None
    """CPU only: memory of the KV cache (on a GPU, memoryFraction determines it)."""
    memory_fraction: PositiveUnitDecimal = "0.9"
    """GPU only: fraction of the device memory that vLLM uses."""
    device_memory: MemoryQuantity | None = None
    """Memory of one accelerator, such as 80Gi. A run whose weights need more is refused before it starts. Default: what
    nvidia-smi reports where the run is prepared; on a cluster that is a pod without a GPU, so it is not checked."""
    extra_args: Annotated[
        list[Annotated[str, Field(max_length=1024), AfterValidator(free_option)]], Field(max_length=64)
    ] = []
    """Appended to the vLLM command line, each option written in full. Options set by other fields, like ``--model``, are
    rejected, and those with which weights cannot be updated: other parallelism than ``devices``, quantization, LoRA,
    offloading. ``--hf-overrides`` is merged with the project's own. All: docs/reference/vllm-options.md."""
    compile_cache: CompileCacheSpec | None = None
    """Keeps the code that vLLM compiles at its start on a volume that only the server's container can write. Later pods then start
    without compiling. Default: in the pod, for restarts of the container. On CPUs only drafters are compiled. Ignored by the
    local runtime, where vLLM's own cache is kept."""
    speculation: SpeculationSpec | None = None
    """Speculative decoding; default: none."""
    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for generators; ignored by the local runtime."""
    actor_resources: PodResources = PodResources()
    """Resources of the actor, the container beside the server. It has the processes that grade completions. Ignored by the local
    runtime."""

    @property
    def workers(self) -> int:
        """Tensor-parallel workers of a server."""
        return self.devices or self.cpu_workers or 1

    rules = (
        Rule(
            "!has(self.cpuWorkers) || !has(self.devices) || self.devices == 0",
            "cpuWorkers is of generators on CPUs: with devices, leave it out",
            "cpuWorkers",
            lambda generator: generator.cpu_workers is None or generator.devices == 0,
        ),
        Rule(
            "!has(self.speculation) || !has(self.extraArgs) || self.extraArgs.all(a, "
            f"!(a.split('=')[0].split('.')[0].replace('_', '-') in {list(SPECULATION_OPTIONS)}))",
            "generator.extraArgs and generator.speculation both configure speculative decoding: leave one of them out",
            "extraArgs",
            lambda generator: (
                generator.speculation is None or not any(map(is_speculation_option, generator.extra_args))
            ),
        ),
    )
