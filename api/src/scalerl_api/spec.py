"""The ``ScaleRLRun`` resource, group ``scalerl.dev``, version ``v1alpha1``.

A run says what to train, on what, by which recipe, with how many devices, and how much it may
use. Defaults follow ScaleRL (arXiv 2510.13786 [P]) where the paper gives a value; each such
field says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field
from pydantic.alias_generators import to_snake

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.cluster import ImagesSpec, StorageSpec
from scalerl_api.fields import (
    LearningRateDecimal,
    Matches,
    MemoryQuantity,
    Model,
    NonNegativeDecimal,
    OpenUnitDecimal,
    PositiveDecimal,
    PositiveQuantity,
    PositiveUnitDecimal,
    Rule,
    UnitDecimal,
    at_most_one,
)
from scalerl_api.mix import MixedTaskSpec, PlainName, RunTaskSpec, TrainingTask
from scalerl_api.pods import ObjectName, PodTemplate, Unique
from scalerl_api.recipe import MAX_BATCH_COMPLETIONS, RecipeSpec
from scalerl_api.recipe.presets import cel
from scalerl_api.source import (
    EvaluationTaskSpec,
    HeldOutSpec,
    HubModel,
    JsonlSource,
    ModelSpec,
    ProblemSpec,
    PromptSpec,
    ReasoningGymSource,
    ScratchModel,
    TaskSpec,
    VerifierSpec,
)
from scalerl_api.speculation import SPECULATION_OPTIONS, SpeculationSpec, is_speculation_option
from scalerl_api.trackers import TrackersSpec
from scalerl_api.wire.prompts import HELD_OUT_SET, MEAN_SET

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
    "BudgetSplit",
    "CheckpointSpec",
    "CoordinatorSpec",
    "EvaluationSetSpec",
    "EvaluationSpec",
    "EvaluationTaskSpec",
    "ExportSpec",
    "GeneratorSpec",
    "HeldOutSpec",
    "HubModel",
    "JsonlSource",
    "MixedTaskSpec",
    "ModelSpec",
    "ObjectMeta",
    "ProblemSpec",
    "PromptSpec",
    "ReasoningGymSource",
    "RecipeSpec",
    "RunSpec",
    "RunTaskSpec",
    "ScaleRLRun",
    "ScratchModel",
    "SpeculationSpec",
    "TaskSpec",
    "TrainerSpec",
    "TrainingTask",
    "VerifierSpec",
    "WarmStartSpec",
    "WeightSyncSpec",
]


class WarmStartSpec(Model):
    """The stage before RL, mid-training: supervised steps on worked solutions."""

    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Maximum number of supervised steps; may be omitted with ``budget.split``, which limits their tokens."""
    jsonl: JsonlSource | None = None
    """Problems of its own, each with a ``solution``; default: the training prompts of the task."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Examples per step, over all ranks; at least one per rank."""
    learning_rate: LearningRateDecimal = "3e-5"
    """Peak of the warm start's own schedule."""
    stop_at_pass_rate: UnitDecimal | None = None
    """Stop early once sampling would solve this fraction of the latest examples, each measured before it was
    trained on."""


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
    """The process that assigns work and keeps the history of the run. Ignored by the local runtime."""

    max_restarts: MaxRestarts = 20
    """Consecutive restarts, without ten minutes of stable operation in between, after which the run fails."""
    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for the coordinator."""


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
    """vLLM servers and their actors. Elastic: generators may join, leave or fail at any time."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of generators. Written by ``kubectl scale``, and by the autoscaler if it is enabled."""
    devices: Annotated[int, Field(ge=0, le=64)] = 0
    """Accelerators per replica (tensor parallelism); 0 runs on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads on CPU; default: chosen by vLLM."""
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=65536)] = 256
    """Completions that one server samples concurrently."""
    kv_cache: MemoryQuantity | None = None
    """CPU only: memory of the KV cache (on a GPU, memoryFraction determines it)."""
    memory_fraction: PositiveUnitDecimal = "0.9"
    """GPU only: fraction of the device memory that vLLM uses."""
    lease_seconds: Annotated[int, Field(ge=5, le=86400)] = 1800
    """A group without progress for this long is reassigned to another generator. Progress of its completions
    restarts the timer, so the value may be less than the duration of a generation, but must exceed that of a
    weight update."""
    extra_args: Annotated[
        list[Annotated[str, Field(max_length=1024), AfterValidator(free_option)]], Field(max_length=64)
    ] = []
    """Appended unchanged to the vLLM command line; options set by other fields, like ``--model``, are rejected."""
    speculation: SpeculationSpec | None = None
    """Speculative decoding; default: none."""
    max_restarts: MaxRestarts = 20
    """On a cluster: consecutive restarts of one pod after which the run is degraded; the others continue."""
    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for generators; ignored by the local runtime."""

    rules = (
        Rule(
            "!has(self.speculation) || !has(self.extraArgs) || self.extraArgs.all(a, "
            f"!(a.split('=')[0].replace('_', '-') in {list(SPECULATION_OPTIONS)}))",
            "generator.extraArgs and generator.speculation both configure speculative decoding: leave one of them out",
            "extraArgs",
            lambda generator: (
                generator.speculation is None or not any(map(is_speculation_option, generator.extra_args))
            ),
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


class TrainerSpec(Model):
    """The DeepSpeed ranks. If one fails, all restart from the last checkpoint."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of training nodes; on a cluster, one pod each. The local runtime runs all ranks on one machine."""
    devices: Annotated[int, Field(ge=0, le=8)] = 0
    """Accelerators per node, with one rank (process) each; the ranks of a node share NVLink and ``/dev/shm``. 0
    runs one rank per node on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads per rank on CPU; default: chosen by the runtime."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What is sharded over the ranks: 1 optimizer state, 2 also gradients, 3 also weights."""
    micro_batch_tokens: Annotated[int, Field(ge=64, le=1_048_576)] | None = None
    """Maximum number of tokens in one forward and backward pass of a rank; default: 4096, or the model's
    contextTokens if larger."""
    activation_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""
    export: ExportSpec = ExportSpec()
    """Export of models in Hugging Face format."""
    max_restarts: MaxRestarts = 20
    """On a cluster: consecutive restarts of all ranks, without ten minutes of stable operation in between, after
    which the run fails. A trainer that was never ready fails after five. Disruptions by nodes (drains,
    preemption, lost devices) do not count."""
    pod_template: PodTemplate | None = None
    """Overrides the run's podTemplate for the trainer and the preparation; ignored by the local runtime."""

    @property
    def ranks(self) -> int:
        """Processes that train together: one per accelerator, one per node on CPU."""
        return self.replicas * max(1, self.devices)


class WeightSyncSpec(Model):
    """Transfer of new weights to the generators: one broadcast per bucket over a separate process group."""

    backend: Literal["Auto", "Gloo", "NCCL"] = "Auto"
    """``Auto``: NCCL if both sides have accelerators, otherwise gloo."""
    bucket: PositiveQuantity = "16Mi"
    """Bytes per broadcast; larger buckets cause page faults on fresh memory in the receiver (measured on CPU)."""
    timeout_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """Time-out of a publish, which is then repeated without the lost generators."""
    probe_sequences: Annotated[int, Field(ge=0, le=256)] = 8
    """Sequences that both sides score after a publish to measure the trainer–generator mismatch."""


_EVALUATION_STEPS = Annotated[int, Field(ge=1, le=100_000_000)]
_EVALUATION_SAMPLES = Annotated[int, Field(ge=1, le=1024)]
MAX_EVALUATION_SETS: Final = 16


class EvaluationSetSpec(Model):
    """Problems that versions are evaluated on, with a curve of their own."""

    name: PlainName
    """Name of the set: in ``curve-NAME.csv`` and in the label ``set`` of metrics."""
    task: EvaluationTaskSpec | None = None
    """The problems; default: the held-out prompts of the run's task."""
    held_out_of: Annotated[str, Field(max_length=63)] | None = None
    """Of a run with ``task.mix``, in place of task: the name of the task whose held-out prompts the set has."""
    every_steps: _EVALUATION_STEPS | None = None
    """Steps between evaluations; default: ``evaluation.everySteps``."""
    samples_per_prompt: _EVALUATION_SAMPLES | None = None
    """Completions per prompt; default: ``evaluation.samplesPerPrompt``."""
    k: _EVALUATION_SAMPLES | None = None
    """Largest k of pass@k; default: the completions per prompt."""

    rules = (at_most_one("task", "heldOutOf"),)


class EvaluationSpec(Model):
    """Evaluations of single weight versions on prompts that are not trained on: the points of the curve."""

    every_steps: _EVALUATION_STEPS = 100
    """Steps between evaluations."""
    samples_per_prompt: _EVALUATION_SAMPLES = 16
    """Completions per prompt; more samples reduce the standard error."""
    temperature: NonNegativeDecimal = "1"
    """Sampling temperature of evaluations; 0 is greedy."""
    hold_seconds: Annotated[int, Field(ge=1, le=86400)] = 900
    """Maximum time that a publish waits for an evaluation of the previous version; afterwards the point is marked
    as mixed."""
    sets: (
        Annotated[
            list[EvaluationSetSpec],
            Field(min_length=1, max_length=MAX_EVALUATION_SETS),
            AfterValidator(Unique("name")),
        ]
        | None
    ) = None
    """All evaluation sets; default: one, ``held-out``, of the held-out prompts of the task; of a mix, one for each task, with
    its name. A publish waits for ``forecastSet`` only; generators evaluate the others beside training."""
    forecast_set: Annotated[str, Field(max_length=63)] | None = None
    """Name of the set that forecast, autoscaler, status and ``curve.csv`` follow, or ``weighted-mean`` of the tasks of a mix;
    default: the first of sets, and of a mix without sets the weighted mean."""

    rules = (
        Rule(
            "!has(self.sets) || self.sets.filter(s, !has(s.task) && !has(s.heldOutOf)).size() <= 1",
            "no more than one of sets may leave task out: they would evaluate the same prompts. Give the others a task",
            "sets",
            lambda evaluation: (
                sum(s.task is None and s.held_out_of is None for s in evaluation.sets or ()) <= 1
            ),
        ),
        Rule(
            "!has(self.sets) || self.sets.all(s, !has(s.heldOutOf) || "
            "self.sets.filter(o, has(o.heldOutOf) && o.heldOutOf == s.heldOutOf).size() == 1)",
            "no two of sets may have the same heldOutOf: they would evaluate the same prompts. Leave one of them out",
            "sets",
            lambda evaluation: (
                len(given := [s.held_out_of for s in evaluation.sets or () if s.held_out_of is not None])
                == len(set(given))
            ),
        ),
        Rule(
            # A list with keys is equal to one in another order.
            "!has(self.sets) || !has(oldSelf.sets) || self.sets.map(s, s.name) == oldSelf.sets.map(s, s.name)",
            "the order of the evaluation sets cannot change: the training prompts and the default of forecastSet depend on it",
            "sets",
            changes=True,
        ),
        Rule(
            "!has(self.sets) || self.sets.all(s, !has(s.k) || s.k <= (has(s.samplesPerPrompt) ? s.samplesPerPrompt : "
            "self.samplesPerPrompt))",
            "k of each of sets must be at most its samplesPerPrompt, or evaluation.samplesPerPrompt without it: pass@k needs "
            "k completions. Raise the samples, or lower k",
            "sets",
            lambda evaluation: all(
                s.k is None or s.k <= (s.samples_per_prompt or evaluation.samples_per_prompt)
                for s in evaluation.sets or ()
            ),
        ),
    )


class CheckpointSpec(Model):
    """Atomic checkpoints of model, optimizer and coordinator state."""

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] = 50
    """Steps between checkpoints: the maximum loss in a failure."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of newest checkpoints to keep."""


class BudgetSplit(Model):
    """Divides ``maxComputeTokens`` between mid-training and RL (arXiv 2512.07783 [P])."""

    beta: OpenUnitDecimal
    """RL's share: mid-training ends with the step that reaches (1 − beta) of ``maxComputeTokens``; RL has the rest. The
    paper finds 0.2 best close to the trained distribution, 0.5 to 0.8 for harder problems."""


class BudgetSpec(Model):
    """Limits of the run; the first one reached ends it."""

    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Maximum number of optimizer updates."""
    max_device_hours: PositiveDecimal | None = None
    """Maximum devices × hours; a CPU process counts as one device."""
    max_seconds: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Maximum time of mid-training and since the first lease, without suspensions."""
    max_compute_tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Maximum compute, in tokens of supervised training: a solution token of mid-training counts 1, a completion token of RL
    4/3, or 5/3 with ``recipe.kl.penalty`` (arXiv 2512.07783 [P]); prompts count in neither."""
    split: BudgetSplit | None = None
    """Divides ``maxComputeTokens`` between mid-training (``warmStart``) and RL."""

    rules = (
        Rule(
            "has(self.maxSteps) || has(self.maxDeviceHours) || has(self.maxSeconds) || has(self.maxComputeTokens)",
            "give at least one of maxSteps, maxDeviceHours, maxSeconds, maxComputeTokens",
            holds=lambda budget: any(
                (budget.max_steps, budget.max_device_hours, budget.max_seconds, budget.max_compute_tokens)
            ),
        ),
        Rule(
            "!has(self.split) || has(self.maxComputeTokens)",
            "split needs maxComputeTokens, the compute that it divides",
            "split",
            lambda budget: budget.split is None or budget.max_compute_tokens is not None,
        ),
    )


# --- the resource ------------------------------------------------------------------------------


_RANKS: Final = "self.trainer.replicas * (self.trainer.devices > 1 ? self.trainer.devices : 1)"
"""CEL of ``TrainerSpec.ranks``."""
_PROMPTS: Final = cel("promptsPerStep", RecipeSpec().prompts_per_step)
_FILTER: Final = cel("zeroVarianceFilter", RecipeSpec().zero_variance_filter)


def _within_completions(path: str) -> Rule:
    """A field of ``recipe.length`` that is less than maxCompletionTokens where it is given."""
    rule, field = path.split(".")
    length = f"self.recipe.length.{rule}"

    def holds(spec: RunSpec) -> bool:
        chosen = getattr(spec.recipe.length, to_snake(rule))
        given = None if chosen is None else getattr(chosen, to_snake(field))
        limits = [t.max_completion_tokens for t in spec.task.mix or () if t.max_completion_tokens is not None]
        return given is None or given < min([spec.recipe.max_completion_tokens, *limits])

    return Rule(
        f"!has(self.recipe.length) || !has({length}) || !has({length}.{field}) || "
        f"({length}.{field} < self.recipe.maxCompletionTokens && (!has(self.task.mix) || "
        f"self.task.mix.all(t, !has(t.maxCompletionTokens) || {length}.{field} < t.maxCompletionTokens)))",
        f"%(recipe.length.{path})s must be less than %(recipe.maxCompletionTokens)s, and than that of each of task.mix",
        f"recipe.length.{path}",
        holds,
    )


def _reads_rewards(field: str, why: str, given: str, chosen: Callable[[RecipeSpec], object]) -> Rule:
    """A field of the recipe that contradicts a distillation which ignores the rewards. given: its CEL, as far as it is in the
    manifest. chosen: true where it is in effect."""
    return Rule(
        f"!has(self.recipe.distillation) || self.recipe.distillation.rewards != 'Ignored' || !({given})",
        f"recipe.{field} cannot go with recipe.distillation, whose rewards are Ignored: {why}. Leave it out, or set "
        "recipe.distillation.rewards: Added",
        f"recipe.{field}",
        lambda spec: (
            spec.recipe.distillation is None
            or spec.recipe.distillation.rewards != "Ignored"
            or not chosen(spec.recipe)
        ),
    )


class RunSpec(Model):
    """Specification of a run."""

    model: ModelSpec
    """Source of the initial weights and the tokenizer. Immutable on a cluster."""
    task: RunTaskSpec
    """The training task, or a mix of several. Immutable on a cluster."""
    recipe: RecipeSpec = RecipeSpec()
    """How rollouts become a gradient."""
    warm_start: WarmStartSpec | None = None
    """Mid-training, supervised steps before RL; default: none. Immutable on a cluster."""
    generator: GeneratorSpec = GeneratorSpec()
    """vLLM servers and their actors."""
    trainer: TrainerSpec = TrainerSpec()
    """The DeepSpeed ranks."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The process that assigns work."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """Transfer of new weights to the generators."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Evaluations: the points of the curve."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoint interval and retention."""
    budget: BudgetSpec
    """Limits of the run; the first one reached ends it."""
    autoscaling: AutoscalingSpec = AutoscalingSpec()
    """Decisions based on the forecast of the curve."""
    trackers: TrackersSpec = TrackersSpec()
    """Experiment trackers that receive the content of ``metrics.jsonl`` and ``curve.csv``: TensorBoard, Weights &
    Biases, MLflow."""
    suspend: bool = False
    """True writes a checkpoint and releases all devices; false continues from it."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of all random choices except the data of the task. Immutable on a cluster."""
    storage: StorageSpec = StorageSpec()
    """The volume shared by all pods of the run."""
    images: ImagesSpec = ImagesSpec()
    """Container images that differ from the defaults of the operator."""
    pod_template: PodTemplate | None = None
    """Additions to the pods of all roles; a role's own podTemplate takes precedence. Ignored by the local runtime."""
    device_resource: DeviceResource = "nvidia.com/gpu"
    """Name of the extended resource that ``devices`` counts on a cluster. Ignored by the local runtime."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Time after which the object of a finished run is deleted on a cluster; default: never."""

    rules = (
        Rule(
            "self.recipe.maxCompletionTokens < self.model.contextTokens",
            "%(recipe.maxCompletionTokens)s must be less than %(model.contextTokens)s: the prompt needs room too",
            "recipe.maxCompletionTokens",
            lambda spec: spec.recipe.max_completion_tokens < spec.model.context_tokens,
        ),
        _reads_rewards(
            "zeroVarianceFilter",
            "the teacher's log-probabilities differ where rewards are equal",
            "has(self.recipe.zeroVarianceFilter) && self.recipe.zeroVarianceFilter",
            lambda recipe: recipe.zero_variance_filter,
        ),
        _reads_rewards(
            "refill",
            "no group is dropped for equal rewards, so no place becomes free",
            "has(self.recipe.refill)",
            lambda recipe: recipe.refill,
        ),
        _reads_rewards(
            "length.penalty",
            "it changes rewards alone",
            "has(self.recipe.length) && has(self.recipe.length.penalty)",
            lambda recipe: recipe.length.penalty,
        ),
        _reads_rewards(
            "length.overlong",
            "it changes rewards alone",
            "has(self.recipe.length) && has(self.recipe.length.overlong)",
            lambda recipe: recipe.length.overlong,
        ),
        Rule(
            f"!has(self.recipe.refill) || {_FILTER}",
            "recipe.refill needs recipe.zeroVarianceFilter: true, which the preset may not have: without the filter no place "
            "becomes free",
            "recipe.refill",
            lambda spec: spec.recipe.refill is None or spec.recipe.zero_variance_filter,
        ),
        *(
            _within_completions(path)
            for path in ("interruption.minTokens", "interruption.maxTokens", "overlong.bufferTokens")
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
            "!has(self.warmStart) || has(self.warmStart.steps) || has(self.budget.split)",
            "warmStart.steps is needed without budget.split: set one of them",
            "warmStart.steps",
            lambda spec: (
                spec.warm_start is None or spec.warm_start.steps is not None or spec.budget.split is not None
            ),
        ),
        Rule(
            "!has(self.warmStart) || !has(self.warmStart.jsonl) || !has(self.task.mix) || "
            "self.task.mix.all(t, t.prompt == self.task.mix[0].prompt)",
            "warmStart.jsonl has prompts of one format, and the tasks of task.mix have different prompt sections: leave jsonl "
            "out, to train on the prompts of the mix, or give all tasks the same prompt",
            "warmStart.jsonl",
            lambda spec: (
                spec.warm_start is None
                or spec.warm_start.jsonl is None
                or all(t.prompt == spec.task.mix[0].prompt for t in spec.task.mix or ())
            ),
        ),
        Rule(
            "!has(self.budget.split) || has(self.warmStart)",
            "budget.split divides the compute between warmStart and RL, and there is no warmStart: add it, or leave split "
            "out",
            "budget.split",
            lambda spec: spec.budget.split is None or spec.warm_start is not None,
        ),
        Rule(
            "!has(self.task.verifier) || self.generator.leaseSeconds > self.task.verifier.timeoutSeconds",
            "%(generator.leaseSeconds)s must be more than %(task.verifier.timeoutSeconds)s: one completion that hangs "
            "the verifier would cost its whole group the lease",
            "generator.leaseSeconds",
            lambda spec: (
                spec.task.verifier is None
                or spec.generator.lease_seconds > spec.task.verifier.timeout_seconds
            ),
        ),
        Rule(
            "!has(self.task.mix) || self.task.mix.all(t, "
            "self.generator.leaseSeconds > t.verifier.timeoutSeconds)",
            "%(generator.leaseSeconds)s must be more than verifier.timeoutSeconds of each of task.mix: one completion that "
            "hangs the verifier would cost its whole group the lease",
            "generator.leaseSeconds",
            lambda spec: all(
                spec.generator.lease_seconds > t.verifier.timeout_seconds for t in spec.task.mix or ()
            ),
        ),
        Rule(
            "!has(self.task.mix) || self.task.mix.all(t, !has(t.maxCompletionTokens) || "
            "t.maxCompletionTokens <= self.recipe.maxCompletionTokens)",
            "maxCompletionTokens of each of task.mix must be at most %(recipe.maxCompletionTokens)s, which memory is planned "
            "for: raise that, or lower the task's",
            "task.mix",
            lambda spec: all(
                (t.max_completion_tokens or 0) <= spec.recipe.max_completion_tokens
                for t in spec.task.mix or ()
            ),
        ),
        Rule(
            "!has(self.evaluation.sets) || self.evaluation.sets.all(s, !has(s.heldOutOf) || "
            "(has(self.task.mix) && self.task.mix.exists(t, t.name == s.heldOutOf)))",
            "heldOutOf of each of evaluation.sets must be the name of a task of task.mix",
            "evaluation.sets",
            lambda spec: (
                {s.held_out_of for s in spec.evaluation.sets or ()}
                <= {None, *(t.name for t in spec.task.mix or ())}
            ),
        ),
        Rule(
            "!has(self.task.mix) || !has(self.evaluation.sets) || self.evaluation.sets.all(s, "
            f"(has(s.task) || has(s.heldOutOf)) && s.name != '{MEAN_SET}')",
            f"with task.mix, each of evaluation.sets needs task or heldOutOf, and another name than {MEAN_SET}",
            "evaluation.sets",
            lambda spec: (
                spec.task.mix is None
                or all(
                    (s.task is not None or s.held_out_of is not None) and s.name != MEAN_SET
                    for s in spec.evaluation.sets or ()
                )
            ),
        ),
        Rule(
            "!has(self.evaluation.forecastSet) || "
            f"(has(self.task.mix) && self.evaluation.forecastSet == '{MEAN_SET}') || (has(self.evaluation.sets) ? "
            "self.evaluation.sets.exists(s, s.name == self.evaluation.forecastSet) : has(self.task.mix) ? "
            "self.task.mix.exists(t, t.name == self.evaluation.forecastSet) : "
            f"self.evaluation.forecastSet == '{HELD_OUT_SET}')",
            "%(evaluation.forecastSet)s must be the name of one of sets; without them, of a task of task.mix, or "
            f"{HELD_OUT_SET} of a run with one task. With task.mix, also {MEAN_SET}",
            "evaluation.forecastSet",
            lambda spec: (
                spec.evaluation.forecast_set is None
                or spec.evaluation.forecast_set in [s.name for s in spec.evaluation_sets]
                or (spec.task.mix is not None and spec.evaluation.forecast_set == MEAN_SET)
            ),
        ),
        Rule(
            f"!has(self.evaluation.forecastSet) || self.evaluation.forecastSet != '{MEAN_SET}' || "
            "!has(self.task.mix) || !has(self.evaluation.sets) || self.task.mix.all(t, "
            "self.evaluation.sets.exists(s, has(s.heldOutOf) && s.heldOutOf == t.name))",
            f"evaluation.forecastSet {MEAN_SET} needs a set with heldOutOf for each task of task.mix: add those, or choose a set",
            "evaluation.forecastSet",
            lambda spec: (
                spec.task.mix is None
                or spec.evaluation.forecast_set != MEAN_SET
                or {t.name for t in spec.task.mix} <= {s.held_out_of for s in spec.evaluation_sets}
            ),
        ),
        Rule(
            "!has(self.evaluation.sets) || self.evaluation.sets.all(s, !has(s.task) || "
            "self.generator.leaseSeconds > s.task.verifier.timeoutSeconds)",
            "%(generator.leaseSeconds)s must be more than task.verifier.timeoutSeconds of each of evaluation.sets: one "
            "completion that hangs the verifier would cost its whole group the lease",
            "generator.leaseSeconds",
            lambda spec: all(
                spec.generator.lease_seconds > s.task.verifier.timeout_seconds
                for s in spec.evaluation.sets or ()
                if s.task is not None
            ),
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
    def tasks(self) -> list[ProblemSpec]:
        """The training tasks, and those of the evaluation sets that have one."""
        return [
            *(one.section for one in self.task.tasks),
            *(one.task for one in self.evaluation.sets or () if one.task is not None),
        ]

    @property
    def completion_limits(self) -> list[int]:
        """The maximum lengths of completions that leases have: the recipe's, and those of tasks of a mix. Ascending."""
        own = {t.max_completion_tokens for t in self.task.mix or () if t.max_completion_tokens is not None}
        return sorted(own | {self.recipe.max_completion_tokens})

    @property
    def evaluation_sets(self) -> list[EvaluationSetSpec]:
        """``evaluation.sets``, or those that there are without them."""
        of_tasks = [EvaluationSetSpec(name=t.name, held_out_of=t.name) for t in self.task.mix or ()]
        return self.evaluation.sets or of_tasks or [EvaluationSetSpec(name=HELD_OUT_SET)]

    @property
    def forecast_set(self) -> str:
        """``evaluation.forecastSet``, or the one without it."""
        without_sets = MEAN_SET if self.task.mix is not None else HELD_OUT_SET
        default = self.evaluation.sets[0].name if self.evaluation.sets else without_sets
        return self.evaluation.forecast_set or default

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
