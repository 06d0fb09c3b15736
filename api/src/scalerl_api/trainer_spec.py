"""``spec.trainer``: the training ranks, and what they export."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from scalerl_api.engines import EngineName, Offload
from scalerl_api.fields import Matches, MemoryQuantity, Model
from scalerl_api.lora import LoraSpec
from scalerl_api.pods import PodTemplate

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
    """The training ranks. If one fails, all restart from the last checkpoint."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of training nodes; on a cluster, one pod each. The local runtime runs all ranks on one machine."""
    devices: Annotated[int, Field(ge=0, le=8)] = 0
    """Accelerators per node, with one rank (process) each; the ranks of a node share NVLink and ``/dev/shm``. 0
    runs one rank per node on CPU."""
    cpu_threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """Compute threads per rank on CPU; default: chosen by the runtime."""
    engine: EngineName = "DeepSpeed"
    """Library that partitions the model over the ranks. ``FSDP2`` is part of torch and needs zeroStage 3."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """State sharded over the ranks: 1 optimizer state, 2 also gradients, 3 also weights; 0 none."""
    offload: Offload = "None"
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
    """Memory of one accelerator, such as 80Gi. A run that needs more is refused before it starts, with the estimate.
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
    def publishes_adapters(self) -> bool:
        """Whether generators get adapters, and not weights."""
        return self.lora is not None and self.lora.publishes_adapters

    @property
    def ranks(self) -> int:
        """Processes that train together: one per accelerator, one per node on CPU."""
        return self.replicas * max(1, self.devices)
