"""The ``ScaleRLRun`` resource, group ``scalerl.dev``, version ``v1alpha1``.

A run says what to train, on what, by which recipe, with how many devices, and how much it may
use. Defaults follow ScaleRL (arXiv 2510.13786 [P]) where the paper gives a value; each such
field says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.cluster import ImagesSpec, StorageSpec
from scalerl_api.fields import (
    DecayDecimal,
    GraderQuantity,
    Model,
    NonNegativeDecimal,
    PositiveDecimal,
    PositiveQuantity,
    PositiveUnitDecimal,
    UnitDecimal,
)
from scalerl_api.pods import PodTemplate

GROUP: Final = "scalerl.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "scalerl.dev/v1alpha1"
KIND: Final = "ScaleRLRun"
PLURAL = "scalerlruns"


def _exactly_one(model: Model, *names: str) -> None:
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) != 1:
        options = ", ".join(type(model).model_fields[name].alias or name for name in names)
        found = ", ".join(type(model).model_fields[name].alias or name for name in given) or "none"
        raise ValueError(f"give exactly one of {options} (found {found})")


# --- model -------------------------------------------------------------------------------------


class HubModel(Model):
    """A model on a hub, by name and revision; an offline cache is honoured (``HF_HUB_OFFLINE=1``)."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[\w.-]+(/[\w.-]+)?$")]
    revision: str = "main"


class ScratchModel(Model):
    """A randomly initialised Llama with a tokenizer trained on the task's own text: for tests and teaching."""

    layers: Annotated[int, Field(ge=1, le=64)] = 4
    hidden_size: Annotated[int, Field(ge=16, le=8192)] = 128
    attention_heads: Annotated[int, Field(ge=1, le=128)] = 4
    intermediate_size: Annotated[int, Field(ge=16, le=65536)] = 384
    vocabulary_size: Annotated[int, Field(ge=64, le=65536)] = 512
    """Upper bound; the tokenizer may stop earlier when the text gives no more merges."""
    tied_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.attention_heads or (self.hidden_size // self.attention_heads) % 2:
            raise ValueError("hiddenSize must be an even multiple of attentionHeads")
        return self


class ModelSpec(Model):
    """Where the initial weights and the tokenizer come from, and how they are held."""

    hub: HubModel | None = None
    path: str | None = None
    """A directory with ``config.json``, weights and tokenizer: local, or on a mounted volume."""
    scratch: ScratchModel | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 16384
    """Longest prompt + completion, in tokens."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """The trainer's attention kernel; the generator uses vLLM's own."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _exactly_one(self, "hub", "path", "scratch")
        return self


# --- task --------------------------------------------------------------------------------------


def _parameter(value: Any) -> Any:
    """One line for what a union of types would say in five."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, float) for item in items):
        raise ValueError('floats are not allowed in a spec; write them as strings, like "0.5"')
    if not all(isinstance(item, int | str) for item in items):
        raise ValueError("must be an integer, a boolean, a string, or a list of these")
    return value


class ReasoningGymSource(Model):
    """A procedurally generated reasoning-gym data set."""

    name: Annotated[str, Field(min_length=1)]
    parameters: dict[
        str, Annotated[int | bool | str | list[int] | list[str], BeforeValidator(_parameter)]
    ] = {}
    """As the task names them; a fraction is a string (``"0.5"``) and becomes a number where one is wanted."""
    seed: int = 0
    size: Annotated[int, Field(ge=2, le=100_000_000)] = 50_000


class JsonlSource(Model):
    """A file of one JSON object a line: ``prompt``, ``answer``, optional ``id``, ``difficulty``, ``solution``."""

    path: Annotated[str, Field(min_length=1)]


class VerifierSpec(Model):
    """How a completion is scored, and what one scoring may use. Model output is hostile input."""

    name: Literal["reasoning-gym", "exact", "number", "math-verify"]
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    memory: GraderQuantity = "1Gi"
    workers: Annotated[int, Field(ge=1, le=256)] = 1


class PromptSpec(Model):
    """How a task's text becomes the tokens the model reads."""

    format: Literal["Raw", "Chat"] = "Raw"
    """``Chat`` applies the tokenizer's chat template."""
    template: str = "{prompt}"
    system: str | None = None

    @model_validator(mode="after")
    def _template_has_prompt(self) -> Self:
        if "{prompt}" not in self.template:
            raise ValueError("template must contain {prompt}")
        if self.system is not None and self.format == "Raw":
            raise ValueError("system needs format: Chat")
        return self


class HeldOutSpec(Model):
    """Prompts that are never trained on; their mean score is the curve. Fixed for the whole run."""

    size: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """ScaleRL: 1,000 prompts [P]."""
    seed: int = 0


class TaskSpec(Model):
    """What is trained on."""

    reasoning_gym: ReasoningGymSource | None = None
    jsonl: JsonlSource | None = None
    verifier: VerifierSpec
    prompt: PromptSpec = PromptSpec()
    held_out: HeldOutSpec = HeldOutSpec()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _exactly_one(self, "reasoning_gym", "jsonl")
        if self.verifier.name == "reasoning-gym" and self.reasoning_gym is None:
            raise ValueError(
                "verifier reasoning-gym scores reasoningGym data only; use exact, number or math-verify"
            )
        return self


# --- recipe ------------------------------------------------------------------------------------


class LossSpec(Model):
    """The policy-gradient objective."""

    name: Literal["CISPO", "GRPO"] = "CISPO"
    ratio_cap: PositiveDecimal = "5"
    """CISPO: the importance ratio is truncated here, no lower clip (4, 5 and 8 made no difference [P])."""
    clip_low: UnitDecimal = "0.2"
    """GRPO: lower clip, ratio ≥ 1 − clipLow."""
    clip_high: NonNegativeDecimal = "0.2"
    """GRPO: upper clip, ratio ≤ 1 + clipHigh."""


class OptimizerSpec(Model):
    """AdamW with a linear warm-up, then constant (ScaleRL's values [P])."""

    learning_rate: PositiveDecimal = "5e-7"
    weight_decay: NonNegativeDecimal = "0.01"
    beta1: DecayDecimal = "0.9"
    beta2: DecayDecimal = "0.999"
    epsilon: PositiveDecimal = "1e-15"
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    max_gradient_norm: PositiveDecimal = "1"


class RecipeSpec(Model):
    """How rollouts become a gradient."""

    loss: LossSpec = LossSpec()
    aggregation: Literal["PromptAverage", "SampleAverage", "TokenAverage"] = "PromptAverage"
    advantage_normalization: Literal["Batch", "Group", "None"] = "Batch"
    zero_variance_filter: bool = True
    prompts_per_step: Annotated[int, Field(ge=1, le=65536)] = 48
    completions_per_prompt: Annotated[int, Field(ge=2, le=1024)] = 16
    """At least 2: a completion is worth what it has over the mean of its prompt's, and one alone has nothing."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 14336
    temperature: PositiveDecimal = "1"
    max_staleness_steps: Annotated[int, Field(ge=0, le=64)] = 8
    """k of PipelineRL-k: no token is trained on more than k updates after it was sampled [P]; 0 is synchronous."""
    fp32_head: bool = True
    """Logits in float32 on both sides; in the paper it moves the asymptote from .52 to .61 [P]."""
    optimizer: OptimizerSpec = OptimizerSpec()


class WarmStartSpec(Model):
    """Supervised steps on the task's own worked solutions before RL begins."""

    steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)] = 64
    learning_rate: PositiveDecimal = "3e-5"
    stop_at_pass_rate: UnitDecimal | None = None
    """End early once this share of the last examples, each taken before it was trained on, would be solved by sampling."""


# --- roles -------------------------------------------------------------------------------------

MaxRestarts = Annotated[int, Field(ge=0, le=1000)]
DeviceResource = Annotated[
    str,
    Field(
        max_length=317, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
    ),
]


class CoordinatorSpec(Model):
    """The one process that hands out work and keeps the run's history. Ignored by the local runtime."""

    max_restarts: MaxRestarts = 20
    """Restarts in a row, without ten minutes of quiet between them, after which the run fails."""
    pod_template: PodTemplate | None = None
    """Over the run's own podTemplate, for the coordinator alone."""


class GeneratorSpec(Model):
    """vLLM servers and the actors that feed them. Elastic: any of them may come, go or die."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    devices: Annotated[int, Field(ge=0, le=64)] = 0
    """Accelerators a replica (tensor parallel); 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads on CPU; none leaves the choice to vLLM."""
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=65536)] = 256
    kv_cache: PositiveQuantity | None = None
    """CPU only: memory for the KV cache (on a GPU, vLLM takes what memoryFraction leaves)."""
    memory_fraction: PositiveUnitDecimal = "0.9"
    lease_seconds: Annotated[int, Field(ge=5, le=86400)] = 1800
    """A group not delivered by then is given to another generator."""
    extra_args: list[str] = []
    """Appended to the vLLM command line as they are."""
    max_restarts: MaxRestarts = 20
    """On a cluster: restarts in a row of one pod after which the run counts as degraded; the others go on."""
    pod_template: PodTemplate | None = None
    """Over the run's own podTemplate, for generators alone; ignored by the local runtime."""


DEFAULT_MICRO_BATCH_TOKENS = 4096


class TrainerSpec(Model):
    """The DeepSpeed ranks. One fails, all restart from the last checkpoint."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks (one process each)."""
    devices: Annotated[int, Field(ge=0, le=1)] = 0
    """Accelerators a rank; 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    micro_batch_tokens: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Most tokens of one forward and backward pass of a rank; none: 4096, or the model's contextTokens if more."""
    activation_checkpointing: bool = False
    max_restarts: MaxRestarts = 20
    """On a cluster: restarts of all ranks in a row, without ten minutes of quiet, after which the run fails."""
    pod_template: PodTemplate | None = None
    """Over the run's own podTemplate, for the trainer and the preparation alone; ignored by the local runtime."""


class WeightSyncSpec(Model):
    """How new weights reach the generators: one broadcast per bucket over a process group of their own."""

    backend: Literal["Auto", "Gloo", "NCCL"] = "Auto"
    """``Auto``: NCCL where both sides have accelerators, else gloo."""
    bucket: PositiveQuantity = "16Mi"
    """Bytes of one broadcast; larger ones cost the receiver page faults on fresh memory (measured on CPU)."""
    timeout_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    probe_sequences: Annotated[int, Field(ge=0, le=256)] = 8
    """Sequences both sides score after a publish: the measured trainer–generator mismatch."""


class EvaluationSpec(Model):
    """Points of the curve: mean score on the held-out prompts at one weight version."""

    every_steps: Annotated[int, Field(ge=1)] = 100
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 16
    temperature: NonNegativeDecimal = "1"
    hold_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """A publish waits so long for an evaluation of the version before it; after that the point is marked mixed."""


class CheckpointSpec(Model):
    """Model, optimizer and coordinator state of one step, written whole or not at all."""

    every_steps: Annotated[int, Field(ge=1)] = 50
    keep: Annotated[int, Field(ge=1, le=1000)] = 2


class BudgetSpec(Model):
    """What the run may use; the first limit reached ends it."""

    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    max_device_hours: PositiveDecimal | None = None
    """Devices × hours; a CPU process counts as one device."""
    max_seconds: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.max_steps is None and self.max_device_hours is None and self.max_seconds is None:
            raise ValueError("give at least one of maxSteps, maxDeviceHours, maxSeconds")
        return self


# --- the resource ------------------------------------------------------------------------------


class RunSpec(Model):
    """All a run needs."""

    model: ModelSpec
    task: TaskSpec
    recipe: RecipeSpec = RecipeSpec()
    warm_start: WarmStartSpec | None = None
    generator: GeneratorSpec = GeneratorSpec()
    trainer: TrainerSpec = TrainerSpec()
    coordinator: CoordinatorSpec = CoordinatorSpec()
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    budget: BudgetSpec
    autoscaling: AutoscalingSpec = AutoscalingSpec()
    suspend: bool = False
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    storage: StorageSpec = StorageSpec()
    images: ImagesSpec = ImagesSpec()
    pod_template: PodTemplate | None = None
    """For the pods of all roles; a role's own podTemplate wins. Ignored by the local runtime."""
    device_resource: DeviceResource = "nvidia.com/gpu"
    """Name of the extended resource that ``devices`` counts on a cluster. Ignored by the local runtime."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """How long a finished run's object is kept on a cluster; none: until someone deletes it."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.recipe.max_completion_tokens >= self.model.context_tokens:
            raise ValueError(
                f"recipe.maxCompletionTokens ({self.recipe.max_completion_tokens}) must be less than "
                f"model.contextTokens ({self.model.context_tokens}): the prompt needs room too"
            )
        if self.micro_batch_tokens < self.model.context_tokens:
            raise ValueError(
                f"trainer.microBatchTokens ({self.micro_batch_tokens}) must be at least model.contextTokens "
                f"({self.model.context_tokens}): the longest sequence has to fit in one pass"
            )
        if self.weight_sync.backend == "NCCL" and not (self.generator.devices and self.trainer.devices):
            raise ValueError("weightSync.backend NCCL needs generator.devices and trainer.devices above 0")
        if self.trainer.zero_stage == 0 and self.model.dtype == "bfloat16":
            raise ValueError(
                "trainer.zeroStage 0 keeps no float32 copy of bfloat16 weights, and small updates would be lost: "
                "choose stage 1 or more, or model.dtype: float32"
            )
        if self.warm_start is not None and self.warm_start.batch_size < self.trainer.replicas:
            raise ValueError(
                f"warmStart.batchSize ({self.warm_start.batch_size}) must be at least trainer.replicas "
                f"({self.trainer.replicas}): each rank takes an example or more"
            )
        allowed = self.autoscaling.generators
        if allowed is not None and not allowed.min <= self.generator.replicas <= allowed.max:
            raise ValueError(
                f"generator.replicas ({self.generator.replicas}) must lie within autoscaling.generators "
                f"({allowed.min} to {allowed.max})"
            )
        return self

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

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
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
