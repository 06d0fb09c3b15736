"""The ``ScaleRLRun`` resource, group ``scalerl.dev``, version ``v1alpha1``.

A run specifies the model, the task, the recipe, the devices and the budget. Defaults follow ScaleRL (arXiv 2510.13786 [P])
where the paper gives a value; the description of each such field cites it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from scalerl_api.autoscaling import AutoscalingSpec
from scalerl_api.built_in import SERVER
from scalerl_api.cluster import ImagesSpec, StorageSpec
from scalerl_api.coordinator_spec import LEASE_SECONDS, CoordinatorSpec
from scalerl_api.dataset_source import DatasetSource
from scalerl_api.environment import EnvironmentSpec
from scalerl_api.environment_server import EnvironmentServerSpec
from scalerl_api.evaluation import EvaluationSetSpec, EvaluationSpec
from scalerl_api.fields import (
    LearningRateDecimal,
    Matches,
    Model,
    OpenUnitDecimal,
    PositiveDecimal,
    Rule,
    StorePrefix,
    UnitDecimal,
    at_most_one,
    quantity_bytes,
)
from scalerl_api.generator_spec import GeneratorSpec
from scalerl_api.mix import RunTaskSpec, TrainingTask
from scalerl_api.model_source import HubModel, ModelSpec, ScratchModel
from scalerl_api.pods import ObjectName, PodTemplate
from scalerl_api.recipe import RecipeSpec
from scalerl_api.rollouts import RolloutsSpec
from scalerl_api.run_rules import RUN_RULES
from scalerl_api.schedule import ScheduleSpec
from scalerl_api.source import (
    JsonlSource,
    ProblemSpec,
    PromptSpec,
    ReasoningGymSource,
    TaskSpec,
)
from scalerl_api.source_kind import SourceKind
from scalerl_api.trackers import TrackersSpec
from scalerl_api.trainer_spec import DEFAULT_MICRO_BATCH_TOKENS, TrainerSpec
from scalerl_api.verifier import VerifierSpec
from scalerl_api.weight_backends import WeightBackend, weight_backend
from scalerl_api.weight_sync import DEFAULT_PROBE_LIMITS, WeightSyncSpec
from scalerl_api.wire.prompts import HELD_OUT_SET, MEAN_SET

GROUP: Final = "scalerl.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "scalerl.dev/v1alpha1"
KIND: Final = "ScaleRLRun"
PLURAL = "scalerlruns"

__all__ = [  # of other modules
    "EvaluationSetSpec",
    "EvaluationSpec",
    "HubModel",
    "ModelSpec",
    "ProblemSpec",
    "PromptSpec",
    "ReasoningGymSource",
    "RunTaskSpec",
    "ScratchModel",
    "TaskSpec",
    "TrainingTask",
    "VerifierSpec",
]


class WarmStartSpec(Model):
    """The stage before RL, mid-training: supervised steps on worked solutions."""

    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Maximum number of supervised steps; may be omitted with ``budget.split``, which limits their tokens."""
    jsonl: JsonlSource | None = None
    """Separate problems, each with a ``solution``; default: the training prompts of the task."""
    dataset: DatasetSource | None = None
    """Separate problems in files of any layout, or of a hub, each with a solution; give this or jsonl. ``columns.answer`` is by default
    ``columns.solution``."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Examples per step, over all ranks; at least one per rank."""
    learning_rate: LearningRateDecimal = "3e-5"
    """Peak learning rate of the schedule of the warm start."""
    stop_at_pass_rate: UnitDecimal | None = None
    """Stop early once sampling would solve this fraction of the latest examples, each measured before it was
    trained on."""

    rules = (at_most_one("jsonl", "dataset"),)

    @property
    def source(self) -> SourceKind | None:
        """The separate problems, if there are some."""
        return self.jsonl or self.dataset

    @property
    def own(self) -> str:
        """Field of the separate problems; empty if there are none."""
        if self.source is None:
            return ""
        return f"warmStart.{'jsonl' if self.dataset is None else 'dataset'}"


class ForkSpec(Model):
    """The checkpoint of another run, from which the run continues."""

    run: ObjectName
    """A run of the same namespace, also one that was deleted and whose claim is kept. On one machine, ``scalerl fork`` sets it."""
    step: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Step of a kept checkpoint; default: the newest when the run is prepared."""


class CheckpointSpec(Model):
    """Atomic checkpoints of model, optimizer and coordinator state."""

    every_steps: Annotated[int, Field(ge=1, le=100_000_000)] = 50
    """Steps between checkpoints: the maximum loss in a failure."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of newest checkpoints to keep, on the volume and in ``to``."""
    to: StorePrefix | None = None
    """Prefix of an S3 bucket, of this run alone, to which each checkpoint is copied while training goes on, and from which a run
    with an empty volume continues. Provide credentials as variables in ``trainer.podTemplate.env``, from a Secret."""


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
    """Maximum time since the coordinator started, without suspensions. The time until the first weights reach a generator
    counts, so that a run which cannot start ends."""
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


class RunSpec(Model):
    """Specification of a run."""

    model: ModelSpec
    """Source of the initial weights and the tokenizer. Immutable on a cluster."""
    task: RunTaskSpec
    """The training task, or a mix of several. Immutable on a cluster, except for limits of verifiers and completions."""
    recipe: RecipeSpec = RecipeSpec()
    """How rollouts become a gradient."""
    fork: Annotated[ForkSpec | None, Field(alias="from")] = None
    """Forks another run: this run continues from its checkpoint, with its curve so far. Immutable, and not read once the run has
    a checkpoint of its own."""
    warm_start: WarmStartSpec | None = None
    """Mid-training, supervised steps before RL; default: none. Immutable on a cluster."""
    generator: GeneratorSpec = GeneratorSpec()
    """vLLM servers and their actors."""
    trainer: TrainerSpec = TrainerSpec()
    """The training ranks."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The process that assigns work."""
    environment: EnvironmentServerSpec | None = None
    """Servers of an environment, for tasks with ``environment.name: server``."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Order in which open slots are leased to generators."""
    trace: bool = False
    """Writes ``trace.jsonl`` to the run's volume, with the times, generator and lengths of each group, for
    ``scalerl simulate``."""
    rollouts: RolloutsSpec = RolloutsSpec()
    """The rollouts kept to read."""
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
    """The volume of the run."""
    images: ImagesSpec = ImagesSpec()
    """Container images that differ from the defaults of the operator."""
    pod_template: PodTemplate | None = None
    """Additions to the pods of all roles but environment servers; a role's own podTemplate takes precedence. Ignored by the local runtime."""
    device_resource: DeviceResource = "nvidia.com/gpu"
    """Name of the extended resource that ``devices`` counts on a cluster. Ignored by the local runtime."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Time after which the object of a finished run is deleted on a cluster; default: never."""

    rules = RUN_RULES

    @property
    def tasks_by_field(self) -> dict[str, ProblemSpec]:
        """The training tasks, and the tasks of evaluation sets with their own, by path of the field."""
        found: dict[str, ProblemSpec] = {f"spec.{one.field}": one.section for one in self.task.tasks}
        sets = enumerate(self.evaluation.sets or ())
        return found | {f"spec.evaluation.sets.{at}.task": s.task for at, s in sets if s.task is not None}

    @property
    def tasks(self) -> list[ProblemSpec]:
        """Those of :attr:`tasks_by_field`."""
        return list(self.tasks_by_field.values())

    @property
    def prompt_sources(self) -> list[SourceKind]:
        """Of all tasks, and of the separate problems of ``warmStart``."""
        own = None if self.warm_start is None else self.warm_start.source
        return [task.source for task in self.tasks] + ([] if own is None else [own])

    @property
    def server_environments(self) -> dict[str, EnvironmentSpec]:
        """Different environments whose steps a server makes, by path of the field of the first task with each. A generator opens sessions
        for each of them."""
        found: dict[str, EnvironmentSpec] = {}
        for field, task in self.tasks_by_field.items():
            one = task.environment
            if one is not None and one.is_server and one not in found.values():
                found[f"{field}.environment"] = one
        return found

    @property
    def uses_environment_servers(self) -> bool:
        """Whether a task's environment is that of ``environment``."""
        return any(task.environment is not None and task.environment.name == SERVER for task in self.tasks)

    @property
    def has_dataset(self) -> bool:
        """Whether the preparation makes tables of ``task.dataset``, which the other processes read."""
        return any(source.is_table for source in self.prompt_sources)

    @property
    def completion_limits(self) -> list[int]:
        """Maximum completion lengths that leases can have, in tokens, ascending: the recipe's, and those of tasks of a mix."""
        own = {t.max_completion_tokens for t in self.task.mix or () if t.max_completion_tokens is not None}
        return sorted(own | {self.recipe.max_completion_tokens})

    @property
    def evaluation_sets(self) -> list[EvaluationSetSpec]:
        """``evaluation.sets``, or the default sets."""
        of_tasks = [EvaluationSetSpec(name=t.name, held_out_of=t.name) for t in self.task.mix or ()]
        return self.evaluation.sets or of_tasks or [EvaluationSetSpec(name=HELD_OUT_SET)]

    @property
    def forecast_set(self) -> str:
        """``evaluation.forecastSet``, or its default."""
        without_sets = MEAN_SET if self.task.mix is not None else HELD_OUT_SET
        default = self.evaluation.sets[0].name if self.evaluation.sets else without_sets
        return self.evaluation.forecast_set or default

    @property
    def micro_batch_tokens(self) -> int:
        """``trainer.microBatchTokens``, or its default."""
        return self.trainer.micro_batch_tokens or max(DEFAULT_MICRO_BATCH_TOKENS, self.model.context_tokens)

    @property
    def lease_seconds(self) -> int:
        """A group without progress for this long is reassigned: :data:`LEASE_SECONDS`, or longer than all attempts of a publish, which
        pauses completions."""
        return max(LEASE_SECONDS, 4 * self.weight_sync.timeout_seconds)

    @property
    def draft_memory_tokens(self) -> int:
        """Tokens of past and running responses that each generator keeps for drafts."""
        generator = self.generator
        if generator.speculation is None:
            return 0
        running = generator.max_concurrent_sequences * self.recipe.max_completion_tokens
        return generator.speculation.memory_tokens(running)

    @property
    def lora_versions(self) -> int:
        """Versions of adapters that a generator samples with at the same time; 0: it has whole weights."""
        if self.trainer.lora is None or not self.trainer.lora.finishes_on_own:
            return 0
        # A completion ends before its version is more than k steps old; one version is being installed.
        return self.recipe.max_staleness_steps + 2

    @property
    def weight_backend(self) -> WeightBackend:
        """That of ``weightSync.backend`` and the run's devices."""
        on_devices = self.generator.devices > 0 and self.trainer.devices > 0
        return weight_backend(self.weight_sync.backend, on_devices=on_devices)

    @property
    def publish_bucket_bytes(self) -> int:
        """Bytes of a bucket of a publish: ``weightSync.bucket``, or by the backend where that is left out."""
        given = self.generator.device_memory
        memory = quantity_bytes(given) if given else None
        share = float(self.generator.memory_fraction)
        return self.weight_backend.bucket_bytes(self.weight_sync.bucket, memory, share)

    @property
    def probe_limit(self) -> float:
        """``weightSync.probeLimit``, or its default for the model's dtype, in nats per token."""
        given = self.weight_sync.probe_limit
        return DEFAULT_PROBE_LIMITS[self.model.dtype] if given is None else float(given)


class ObjectMeta(Model):
    """The fields of Kubernetes' object metadata that a run file can set."""

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
