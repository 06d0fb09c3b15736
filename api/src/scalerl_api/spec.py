"""The ``ScaleRLRun`` resource, group ``scalerl.dev``, version ``v1alpha1``.

A run says what to train, on what, by which recipe, with how many devices, and how much it may
use. Defaults follow ScaleRL (arXiv 2510.13786 [P]) where the paper gives a value; each such
field says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.cluster import ImagesSpec, StorageSpec
from scalerl_api.fields import (
    LearningRateDecimal,
    Matches,
    MemoryQuantity,
    Model,
    NonNegativeDecimal,
    PositiveDecimal,
    PositiveQuantity,
    PositiveUnitDecimal,
    Rule,
    UnitDecimal,
)
from scalerl_api.pods import ObjectName, PodTemplate
from scalerl_api.recipe import MAX_BATCH_COMPLETIONS, RecipeSpec
from scalerl_api.recipe.presets import cel
from scalerl_api.source import (
    HeldOutSpec,
    HubModel,
    JsonlSource,
    ModelSpec,
    PromptSpec,
    ReasoningGymSource,
    ScratchModel,
    TaskSpec,
    VerifierSpec,
)
from scalerl_api.trackers import TrackersSpec

GROUP: Final = "scalerl.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "scalerl.dev/v1alpha1"
KIND: Final = "ScaleRLRun"
PLURAL = "scalerlruns"

__all__ = [
    "API_VERSION",
    "DEFAULT_MICRO_BATCH_TOKENS",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "BudgetSpec",
    "CheckpointSpec",
    "CoordinatorSpec",
    "EvaluationSpec",
    "ExportSpec",
    "GeneratorSpec",
    "HeldOutSpec",
    "HubModel",
    "JsonlSource",
    "ModelSpec",
    "ObjectMeta",
    "PromptSpec",
    "ReasoningGymSource",
    "RecipeSpec",
    "RunSpec",
    "ScaleRLRun",
    "ScratchModel",
    "TaskSpec",
    "TrainerSpec",
    "VerifierSpec",
    "WarmStartSpec",
    "WeightSyncSpec",
]


class WarmStartSpec(Model):
    """Supervised steps on the task's own worked solutions before RL begins."""

    steps: Annotated[int, Field(ge=1, le=100_000_000)]
    """Most supervised steps."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Examples a step, over all ranks; at least one for each."""
    learning_rate: LearningRateDecimal = "3e-5"
    """Highest of the warm start's own schedule."""
    stop_at_pass_rate: UnitDecimal | None = None
    """End early once this share of the last examples, each taken before it was trained on, would be solved by sampling."""


# --- roles -------------------------------------------------------------------------------------

MaxRestarts = Annotated[int, Field(ge=0, le=1000)]
DeviceResource = Annotated[
    str,
    Field(max_length=317),
    AfterValidator(
        Matches(
            r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
            "must be a resource with its domain, like nvidia.com/gpu",
        )
    ),
]


class CoordinatorSpec(Model):
    """The one process that hands out work and keeps the run's history. Ignored by the local runtime."""

    max_restarts: MaxRestarts = 20
    """Restarts in a row, without ten minutes of quiet between them, after which the run fails."""
    pod_template: PodTemplate | None = None
    """Over the run's own podTemplate, for the coordinator alone."""


SERVER_OPTIONS: Final = (
    *("--model", "--host", "--port", "--uds", "--api-key", "--middleware", "--dtype", "--max-model-len"),
    *("--max-num-seqs", "--tensor-parallel-size", "-tp", "--gpu-memory-utilization", "--logprobs-mode"),
    *("--generation-config", "--weight-transfer-config", "--worker-extension-cls", "--config"),
    *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
)
"""vLLM's options that follow from other fields, or by which actor, trainer and server work together. A
beginning of one counts as it: vLLM takes abbreviations."""
SHORTEST_ABBREVIATION: Final = 6
"""Characters; fewer may be the beginning of anything."""


def free_option(argument: str) -> str:
    """An argument of vLLM's command line that the operator does not set itself."""
    name = argument.split("=", 1)[0].replace("_", "-")
    abbreviates = len(name) >= SHORTEST_ABBREVIATION and any(
        option.startswith(name) for option in SERVER_OPTIONS
    )
    if name in SERVER_OPTIONS or abbreviates or name.startswith("--ssl-"):
        raise ValueError(f"{name} is set from other fields, or by the operator itself; leave it out")
    return argument


class GeneratorSpec(Model):
    """vLLM servers and the actors that feed them. Elastic: any of them may come, go or die."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many; ``kubectl scale`` writes here, and the autoscaler leaves a number alone that someone set."""
    devices: Annotated[int, Field(ge=0, le=64)] = 0
    """Accelerators a replica (tensor parallel); 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads on CPU; none leaves the choice to vLLM."""
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=65536)] = 256
    """Completions that one server samples at once."""
    kv_cache: MemoryQuantity | None = None
    """CPU only: memory for the KV cache (on a GPU, vLLM takes what memoryFraction leaves)."""
    memory_fraction: PositiveUnitDecimal = "0.9"
    """GPU only: share of the device's memory that vLLM takes."""
    lease_seconds: Annotated[int, Field(ge=5, le=86400)] = 1800
    """A group that comes no further for so long is given to another generator. Its time begins anew whenever its
    completions grow, so it may be less than a generation takes; it has to be more than a weight update takes."""
    extra_args: Annotated[
        list[Annotated[str, Field(max_length=1024), AfterValidator(free_option)]], Field(max_length=64)
    ] = []
    """Appended to the vLLM command line as they are; options that other fields set, like ``--model``, are refused."""
    max_restarts: MaxRestarts = 20
    """On a cluster: restarts in a row of one pod after which the run counts as degraded; the others go on."""
    pod_template: PodTemplate | None = None
    """Over the run's own podTemplate, for generators alone; ignored by the local runtime."""


DEFAULT_MICRO_BATCH_TOKENS = 4096


class ExportSpec(Model):
    """Models of evaluations as others load them: safetensors, config, tokenizer, chat template."""

    enabled: bool = True
    """Keeps the best evaluation's model and the last one's under ``checkpoints/hf`` on the run's volume; each holds the
    weights once, in ``model.dtype``."""
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
    """Where copies go too: an absolute path on a mounted volume, ``hf://owner/name`` or ``s3://bucket/prefix``. Credentials
    are variables of ``trainer.podTemplate.env``, from a Secret."""


class TrainerSpec(Model):
    """The DeepSpeed ranks. One fails, all restart from the last checkpoint."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Nodes that train: a pod each on a cluster. The local runtime runs all ranks on one machine."""
    devices: Annotated[int, Field(ge=0, le=8)] = 0
    """Accelerators a node, with one rank (process) each; the ranks of a node share NVLink and ``/dev/shm``. 0 runs one
    rank a node on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads of a rank on CPU; none leaves the choice to the runtime."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What the ranks share instead of each holding all: 1 optimizer state, 2 also gradients, 3 also weights."""
    micro_batch_tokens: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Most tokens of one forward and backward pass of a rank; none: 4096, or the model's contextTokens if more."""
    activation_checkpointing: bool = False
    """Computes activations twice instead of keeping them: less memory, about a third more time."""
    export: ExportSpec = ExportSpec()
    """What is kept of the run in a form that others load."""
    max_restarts: MaxRestarts = 20
    """On a cluster: restarts of all ranks in a row, without ten minutes of quiet, after which the run fails. One that never
    worked fails after five; what nodes take away or do not let begin (drains, preemption, lost devices) does not count."""
    pod_template: PodTemplate | None = None
    """Over the run's own podTemplate, for the trainer and the preparation alone; ignored by the local runtime."""

    @property
    def ranks(self) -> int:
        """Processes that train together: one per accelerator, one per node on CPU."""
        return self.replicas * max(1, self.devices)


class WeightSyncSpec(Model):
    """How new weights reach the generators: one broadcast per bucket over a process group of their own."""

    backend: Literal["Auto", "Gloo", "NCCL"] = "Auto"
    """``Auto``: NCCL where both sides have accelerators, else gloo."""
    bucket: PositiveQuantity = "16Mi"
    """Bytes of one broadcast; larger ones cost the receiver page faults on fresh memory (measured on CPU)."""
    timeout_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """After so long a publish is given up, and repeated without the generators that were lost."""
    probe_sequences: Annotated[int, Field(ge=0, le=256)] = 8
    """Sequences both sides score after a publish: the measured trainer–generator mismatch."""


class EvaluationSpec(Model):
    """Points of the curve: mean score on the held-out prompts at one weight version."""

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] = 100
    """Steps from one point to the next."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 16
    """Completions of each held-out prompt; more make the error bars smaller."""
    temperature: NonNegativeDecimal = "1"
    """Of sampling, in evaluations; 0 is greedy."""
    hold_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """A publish waits so long for an evaluation of the version before it; after that the point is marked mixed."""


class CheckpointSpec(Model):
    """Model, optimizer and coordinator state of one step, written whole or not at all."""

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] = 50
    """Steps from one checkpoint to the next: what a failure costs at most."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest checkpoints that are kept."""


class BudgetSpec(Model):
    """What the run may use; the first limit reached ends it."""

    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Updates."""
    max_device_hours: PositiveDecimal | None = None
    """Devices × hours; a CPU process counts as one device."""
    max_seconds: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Time since the first lease, suspensions not counted."""

    rules = (
        Rule(
            "has(self.maxSteps) || has(self.maxDeviceHours) || has(self.maxSeconds)",
            "give at least one of maxSteps, maxDeviceHours, maxSeconds",
            holds=lambda budget: (
                (budget.max_steps, budget.max_device_hours, budget.max_seconds) != (None,) * 3
            ),
        ),
    )


# --- the resource ------------------------------------------------------------------------------


_RANKS: Final = "self.trainer.replicas * (self.trainer.devices > 1 ? self.trainer.devices : 1)"
"""CEL of ``TrainerSpec.ranks``."""
_PROMPTS: Final = cel("promptsPerStep", RecipeSpec().prompts_per_step)


class RunSpec(Model):
    """All a run needs."""

    model: ModelSpec
    """Where the initial weights and the tokenizer come from. On a cluster it cannot change."""
    task: TaskSpec
    """What is trained on. On a cluster it cannot change."""
    recipe: RecipeSpec = RecipeSpec()
    """How rollouts become a gradient."""
    warm_start: WarmStartSpec | None = None
    """Supervised steps before RL; none: RL from the start. On a cluster it cannot change."""
    generator: GeneratorSpec = GeneratorSpec()
    """vLLM servers and the actors that feed them."""
    trainer: TrainerSpec = TrainerSpec()
    """The DeepSpeed ranks."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The one process that hands out work."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """How new weights reach the generators."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Points of the curve."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When the run's state is written, and how much of it is kept."""
    budget: BudgetSpec
    """What the run may use; the first limit reached ends it."""
    autoscaling: AutoscalingSpec = AutoscalingSpec()
    """Who acts on the forecast of the curve, and by what rules."""
    trackers: TrackersSpec = TrackersSpec()
    """Experiment trackers that get what ``metrics.jsonl`` and ``curve.csv`` hold: TensorBoard, Weights & Biases, MLflow."""
    suspend: bool = False
    """True writes a checkpoint and lets all devices go; false goes on from there."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Of everything drawn by chance but the task's own data. On a cluster it cannot change."""
    storage: StorageSpec = StorageSpec()
    """The volume that all pods of the run share."""
    images: ImagesSpec = ImagesSpec()
    """Container images, where they differ from the operator's settings."""
    pod_template: PodTemplate | None = None
    """For the pods of all roles; a role's own podTemplate wins. Ignored by the local runtime."""
    device_resource: DeviceResource = "nvidia.com/gpu"
    """Name of the extended resource that ``devices`` counts on a cluster. Ignored by the local runtime."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """How long a finished run's object is kept on a cluster; none: until someone deletes it."""

    rules = (
        Rule(
            "self.recipe.maxCompletionTokens < self.model.contextTokens",
            "%(recipe.maxCompletionTokens)s must be less than %(model.contextTokens)s: the prompt needs room too",
            "recipe.maxCompletionTokens",
            lambda spec: spec.recipe.max_completion_tokens < spec.model.context_tokens,
        ),
        Rule(
            "!has(self.trainer.microBatchTokens) || self.trainer.microBatchTokens >= self.model.contextTokens",
            "%(trainer.microBatchTokens)s must be at least %(model.contextTokens)s: the longest sequence has to fit in "
            "one pass",
            "trainer.microBatchTokens",
            lambda spec: spec.micro_batch_tokens >= spec.model.context_tokens,
        ),
        Rule(
            "self.weightSync.backend != 'NCCL' || (self.generator.devices > 0 && self.trainer.devices > 0)",
            "weightSync.backend NCCL needs generator.devices and trainer.devices above 0",
            "weightSync.backend",
            lambda spec: (
                spec.weight_sync.backend != "NCCL" or spec.generator.devices * spec.trainer.devices > 0
            ),
        ),
        Rule(
            "self.trainer.zeroStage > 0 || self.model.dtype != 'bfloat16'",
            "trainer.zeroStage 0 keeps no float32 copy of bfloat16 weights, and small updates would be lost: choose "
            "stage 1 or more, or model.dtype: float32",
            "trainer.zeroStage",
            lambda spec: spec.trainer.zero_stage > 0 or spec.model.dtype != "bfloat16",
        ),
        Rule(
            f"!has(self.warmStart) || self.warmStart.batchSize >= {_RANKS}",
            "%(warmStart.batchSize)s must be at least the ranks of %(trainer.replicas)s and %(trainer.devices)s: each "
            "rank takes an example or more",
            "warmStart.batchSize",
            lambda spec: spec.warm_start is None or spec.warm_start.batch_size >= spec.trainer.ranks,
        ),
        Rule(
            "self.generator.leaseSeconds > self.task.verifier.timeoutSeconds",
            "%(generator.leaseSeconds)s must be more than %(task.verifier.timeoutSeconds)s: one completion that hangs "
            "the verifier would cost its whole group the lease",
            "generator.leaseSeconds",
            lambda spec: spec.generator.lease_seconds > spec.task.verifier.timeout_seconds,
        ),
        Rule(
            f"{_RANKS} <= {_PROMPTS}",
            "the ranks of %(trainer.replicas)s and %(trainer.devices)s must be at most %(recipe.promptsPerStep)s: each "
            "rank takes a prompt or more",
            "trainer.replicas",
            lambda spec: spec.trainer.ranks <= spec.recipe.prompts_per_step,
        ),
        Rule(
            f"{_PROMPTS} * self.recipe.completionsPerPrompt <= {MAX_BATCH_COMPLETIONS}",
            "%(recipe.promptsPerStep)s times %(recipe.completionsPerPrompt)s must be at most "
            f"{MAX_BATCH_COMPLETIONS}: the coordinator holds every completion of a step in memory",
            "recipe.promptsPerStep",
            lambda spec: (
                spec.recipe.prompts_per_step * spec.recipe.completions_per_prompt <= MAX_BATCH_COMPLETIONS
            ),
        ),
        Rule(
            "!has(self.autoscaling.generators) || (self.autoscaling.generators.min <= self.generator.replicas && "
            "self.generator.replicas <= self.autoscaling.generators.max)",
            "%(generator.replicas)s must lie within %(autoscaling.generators)s",
            "generator.replicas",
            lambda spec: (
                (allowed := spec.autoscaling.generators) is None
                or allowed.min <= spec.generator.replicas <= allowed.max
            ),
        ),
    )

    @property
    def micro_batch_tokens(self) -> int:
        """``trainer.microBatchTokens``, or what is used without it."""
        return self.trainer.micro_batch_tokens or max(DEFAULT_MICRO_BATCH_TOKENS, self.model.context_tokens)

    @property
    def weight_backend(self) -> Literal["gloo", "nccl"]:
        """The process-group backend that ``weightSync.backend`` comes to on this run's devices."""
        if self.weight_sync.backend == "Auto":
            return "nccl" if self.generator.devices and self.trainer.devices else "gloo"
        return "nccl" if self.weight_sync.backend == "NCCL" else "gloo"


class ObjectMeta(Model):
    """The part of Kubernetes' object metadata that a run file sets."""

    name: ObjectName
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class ScaleRLRun(Model):
    """One RL run."""

    api_version: Literal["scalerl.dev/v1alpha1"] = API_VERSION
    kind: Literal["ScaleRLRun"] = KIND
    metadata: ObjectMeta
    spec: RunSpec

    def to_manifest(self) -> dict[str, Any]:
        """The run as plain data with every default written out."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")
