"""``spec.generator``, ``spec.trainer``, ``spec.coordinator`` and ``spec.environment``, and the weight transfer between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from scalerl_api.cluster import Image
from scalerl_api.fields import (
    Matches,
    MemoryQuantity,
    Model,
    PositiveDecimal,
    PositiveQuantity,
    PositiveUnitDecimal,
    Rule,
    StorePrefix,
)
from scalerl_api.pods import ObjectName, PodTemplate
from scalerl_api.speculation import (
    SPECULATION_OPTIONS,
    SpeculationSpec,
    is_speculation_option,
)
from scalerl_api.vllm_options import free_option


class CoordinatorSpec(Model):
    """The process that assigns work and keeps the history of the run. Ignored by the local runtime."""

    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for the coordinator."""


class CompileCacheSpec(Model):
    """Where compiled code is kept. It is executed by the servers that read it, so runs share it only if they name one claim."""

    claim_name: ObjectName | None = None
    """An existing claim in the run's namespace, for all runs that name it; default: the run's volume, for this run."""


MOST_LEASED: Final = 5
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
    """Memory of one accelerator, such as 80Gi: a run whose weights need more is refused before it starts. Default: what
    nvidia-smi reports where the run is prepared; on a cluster that is a pod without a GPU, so it is not checked."""
    extra_args: Annotated[
        list[Annotated[str, Field(max_length=1024), AfterValidator(free_option)]], Field(max_length=64)
    ] = []
    """Appended to the vLLM command line, each option written in full. Options set by other fields, like ``--model``, are
    rejected, and those with which weights cannot be updated: other parallelism than ``devices``, quantization, LoRA,
    offloading. ``--hf-overrides`` is merged with the project's own. All: docs/reference/vllm-options.md."""
    compile_cache: CompileCacheSpec | None = None
    """Keeps the code that vLLM compiles at its start on a volume that only the server's container can write, so that later pods
    start without compiling; default: in the pod, for restarts of the container. On CPUs only drafters are compiled. Ignored by the
    local runtime, where vLLM's own cache is kept."""
    speculation: SpeculationSpec | None = None
    """Speculative decoding; default: none."""
    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for generators; ignored by the local runtime."""

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


class EnvironmentServerSpec(Model):
    """Servers for ``task.environment`` with the name ``server``, which start and end with the run."""

    image: Image | None = None
    """Image of the server. Default: the generator's, for a ``command`` whose files podTemplate mounts. Ignored by the local runtime."""
    command: Annotated[list[Annotated[str, Field(max_length=16_384)]], Field(max_length=64)] = []
    """Command in place of the image's; on one machine, that of the process. ``$(HOST)`` and ``$(PORT)`` are where it has to listen;
    they are variables too."""
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of pods; one process on one machine."""
    sessions_per_replica: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Sessions that a server can have. There are as many replicas as the sessions of all generators need, and at least ``replicas``;
    OpenEnv's ``max_concurrent_envs`` is such a number."""
    port: Annotated[int, Field(ge=1024, le=65_535)] = 8000
    """Port of the server; on one machine, a free one."""
    pod_template: PodTemplate | None = None
    """Additions to the servers' pods. The run's podTemplate is not added: it may have credentials, and nodes with accelerators. Ignored
    by the local runtime."""

    rules = (
        Rule(
            "has(self.image) || (has(self.command) && size(self.command) > 0)",
            "give image, command or both",
            holds=lambda server: server.image is not None or bool(server.command),
        ),
    )


DEFAULT_MICRO_BATCH_TOKENS = 4096


class ExportSpec(Model):
    """Models of evaluations in Hugging Face format: safetensors, config, tokenizer, chat template."""

    enabled: bool = True
    """Keeps the models of the best and of the last evaluation under ``checkpoints/hf`` on the run's volume; each
    contains the weights once, in ``model.dtype``."""
    to: (
        Annotated[
            str,
            Field(max_length=1024),
            AfterValidator(
                Matches(
                    r"^(/.+|hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+|s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/.*)?)$",
                    "must be an absolute path, hf://owner/name or s3://bucket/prefix",
                )
            ),
        ]
        | None
    ) = None
    """Target of additional copies: an absolute path on a mounted volume, ``hf://owner/name`` or
    ``s3://bucket/prefix``. Provide credentials as variables in ``trainer.podTemplate.env``, from a Secret."""


ModuleName = Annotated[
    str,
    Field(max_length=256),
    AfterValidator(
        Matches(
            r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$",
            "must be a layer's name like q_proj, or the end of one like mlp.up_proj",
        )
    ),
]


LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those of vLLM's ``--max-lora-rank``: its memory for adapters is of the next one."""


class LoraSpec(Model):
    """Low-rank adapters (LoRA): the trainer updates them alone, and generators sample with weights that have them merged."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rank of the change of a layer's weight."""
    alpha: Annotated[int, Field(ge=1, le=65536)] = 32
    """The change is scaled by ``alpha / rank``."""
    target_modules: Annotated[list[ModuleName], Field(max_length=64)] = []
    """Names of the linear layers that get adapters, like ``q_proj``; default: all but the output embedding."""
    publish: Literal["Merged", "Adapter"] = "Merged"
    """What is sent to generators: the weights with merged adapters, or the adapters alone, which each generator merges with the
    weights in its model's files. That is 1 to 2 % of the bytes, and a read of the model for each version."""
    in_flight: Literal["Continue", "FinishOnOwn"] = "Continue"
    """Completions in flight at an update continue with the new version, or finish on their own, for which vLLM keeps several."""
    export: Literal["Merged", "Adapter"] = "Merged"
    """What exports contain: the model with merged adapters, or the adapters in the format of peft."""

    rules = (
        Rule(
            "!has(self.inFlight) || self.inFlight != 'FinishOnOwn' || has(self.publish) && self.publish == 'Adapter' "
            "&& (!has(self.rank) || self.rank <= 512)",
            "FinishOnOwn needs publish: Adapter, of which vLLM can hold several versions, and a rank of at most 512",
            "inFlight",
            lambda lora: (
                lora.in_flight != "FinishOnOwn" or (lora.publish == "Adapter" and lora.rank <= LORA_RANKS[-1])
            ),
        ),
    )


class TrainerSpec(Model):
    """The training ranks. If one fails, all restart from the last checkpoint."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of training nodes; on a cluster, one pod each. The local runtime runs all ranks on one machine."""
    devices: Annotated[int, Field(ge=0, le=8)] = 0
    """Accelerators per node, with one rank (process) each; the ranks of a node share NVLink and ``/dev/shm``. 0
    runs one rank per node on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads per rank on CPU; default: chosen by the runtime."""
    engine: Literal["DeepSpeed", "FSDP2"] = "DeepSpeed"
    """Library that partitions the model over the ranks. ``FSDP2`` is part of torch and needs zeroStage 3."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """State sharded over the ranks: 1 optimizer state, 2 also gradients, 3 also weights; 0 none."""
    offload: Literal["None", "Optimizer", "OptimizerAndParameters"] = "None"
    """State that is kept in the host's memory and updated there, at zeroStage 3. Parameters are copied to the device a layer at a time."""
    micro_batch_tokens: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Maximum number of tokens in one forward and backward pass of a rank; default: 4096, or the model's
    contextTokens if larger."""
    activation_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""
    router_replay: bool = False
    """Mixtures of experts: trains each token on the experts that its generator chose for it. Needs generators on GPUs."""
    lora: LoraSpec | None = None
    """Trains low-rank adapters instead of the weights; default: the weights."""
    device_memory: MemoryQuantity | None = None
    """Memory of one accelerator, such as 80Gi: a run that needs more is refused before it starts, with the estimate.
    Default: what nvidia-smi reports where the run is prepared; on a cluster that is a pod without a GPU, so it is not checked."""
    export: ExportSpec = ExportSpec()
    """Export of models in Hugging Face format."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 20
    """On a cluster: consecutive restarts of all ranks, without ten minutes of stable operation in between, after
    which the run fails. A trainer that was never ready fails after five. Disruptions by nodes (drains,
    preemption, lost devices) do not count."""
    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for the trainer and the preparation; ignored by the local runtime."""

    @property
    def ranks(self) -> int:
        """Processes that train together: one per accelerator, one per node on CPU."""
        return self.replicas * max(1, self.devices)


DEFAULT_PROBE_LIMITS: Final[Mapping[str, float]] = {"bfloat16": 0.01, "float32": 1e-6}
"""Default of ``weightSync.probeLimit``. With equal weights, tiny random models gave 3e-13 in float32 and 1e-4 (dense) to 1e-2
(mixtures of experts) in bfloat16; with unpacked experts, OLMoE gave 0.017 and Qwen3-MoE 0.15."""


PROBE_SEQUENCES: Final = 8
"""Sequences that both sides score after a publish to measure the trainer–generator mismatch: the one with the longest completion whole,
of the others beginnings with 8,192 tokens in total, or more if 64 completion tokens need it. Sequences with fewer are not probed: the
ones before are again."""
LEASE_SECONDS: Final = 1800
"""A group without progress for this long is reassigned to another generator; at least three times the longest timeoutSeconds of a
verifier or environment, so that one completion that hangs it does not cost its group the lease."""


class WeightSyncSpec(Model):
    """Transfer of new weights to the generators: one broadcast per bucket over a separate process group, or files."""

    backend: Literal["Auto", "Gloo", "NCCL", "Files"] = "Auto"
    """``Auto``: NCCL if both sides have accelerators, otherwise gloo. ``Files``: through the run's volume, mostly as differences from
    the version before; without connections between trainer and generators for it, with a copy of the weights in the memory of each."""
    to: StorePrefix | None = None
    """Prefix of an S3 bucket, of this run alone, in the volume's place with ``backend: Files``. Provide credentials as variables in
    ``trainer.podTemplate.env`` and ``generator.podTemplate.env``, from a Secret."""
    bucket: PositiveQuantity = "16Mi"
    """Bytes per broadcast, or of a part of a file; larger buckets cause page faults on fresh memory in the receiver (measured on CPU)."""
    timeout_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """Timeout of a publish, which is then repeated without the lost generators."""
    probe_limit: PositiveDecimal | None = None
    """Largest mismatch after a publish (k3 estimate of the KL divergence, nats per token; one token counts at most 20 times the
    limit), measured on 8 sequences that both sides score. A generator above it gets no work, and if no generator is below it, the run ends. Default: 0.01 for model.dtype bfloat16, 1e-6 for float32. Raise it only for a
    known inexactness of the generators, such as a quantized KV cache."""

    rules = (
        Rule(
            "!has(self.to) || self.backend == 'Files'",
            "to has no effect without backend: Files",
            "to",
            lambda weights: weights.to is None or weights.backend == "Files",
        ),
    )
