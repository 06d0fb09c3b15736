"""Estimates of the memory of a run's roles in bytes, from the spec and the model's size.

The estimates serve to reject runs that cannot fit, not to use the last byte. Parameters, gradients, optimizer state and
DeepSpeed's buffers are those that ``benchmarks/memory.py`` measures, activations a rough bound. On accelerators an allowance
for the libraries and for fragmentation is added; on CPUs the libraries' own memory is not included. Warnings and errors use the
same figures; the callers determine the available memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Self

from scalerl_api.fields import quantity_bytes
from scalerl_api.lora import LORA_RANKS
from scalerl_api.spec import RunSpec, ScratchModel
from scalerl_api.speculation import MEMORY_BYTES_PER_TOKEN

Dtype = Literal["bfloat16", "float32"]
Offload = Literal["None", "Optimizer", "OptimizerAndParameters"]
BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}
"""Bytes of one value."""
_MOMENTS_BYTES = 8
"""Bytes per parameter of AdamW's two float32 moments."""
_CHECKPOINT_BYTES_A_WEIGHT: Final = 12
"""Bytes of a checkpoint per weight: a float32 copy of the weight and both moments of AdamW."""
BUCKET_ELEMENTS = 50_000_000
"""Maximum size of DeepSpeed's communication buckets, in elements."""
ALLREDUCE_ELEMENTS = 500_000_000
"""Elements of gradients that DeepSpeed copies into one buffer to reduce them without ZeRO."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""Elements that ZeRO-3 updates at a time."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered because a later module needs them again (``stage3_max_live_parameters``)."""
CHUNK_BYTES = 64 * 2**20
"""Logits that the output head computes at a time on a CPU."""
ACCELERATOR_CHUNK_BYTES = 2**30
"""The same on an accelerator."""
_BUCKET_BYTES: Final[Mapping[int, int]] = {0: 0, 1: 0, 2: 7, 3: 11}
"""Bytes per element of a bucket by ZeRO stage, for bfloat16: the buffer, its float32 copy, and what is being reduced."""
CONTEXT_BYTES = 5 * 2**28
"""Memory of an accelerator for CUDA's context, NCCL's channels and cuBLAS's workspaces: 1.25 GiB [by reading]."""
FRAGMENTATION = 0.05
"""Share of the tensors' memory that torch's allocator cannot use [by reading]."""
_GIB = 2.0**30
_NORMS: Final[Mapping[str, tuple[bool, int, int]]] = {
    "qwen3": (True, 0, 3),
    "qwen3_moe": (True, 0, 3),
    "olmoe": (True, 0, 3),
    "olmo2": (True, 0, 4),
    "olmo3": (True, 0, 4),
    "gemma2": (False, 2, 4),
    "gemma3_text": (True, 2, 4),
}
"""By family: whether queries and keys are normalised, norms of the hidden size beyond two a layer, and what one keeps in bfloat16, in values
of its input: this and its result in float32, as a Llama's, or both factors of the result in float32. In float32 each keeps two."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model, named as in ``config.json``."""

    parameters: int
    """Number of parameters; tied ones count once."""
    hidden_size: int
    layers: int
    intermediate_size: int
    vocabulary_size: int
    largest_tensor: int = 0
    """Elements of the largest tensor; 0 where it is not known."""
    query_size: int = 0
    """Outputs of the queries' layer, heads by the size of a head; 0 where it is not known."""
    key_size: int = 0
    """The same of the keys, and of the values."""
    mlp_values: int = 0
    """Values a token that a layer's experts keep for the backward pass; 0 without experts."""
    norm_values: tuple[int, int] = (0, 0)
    """The same of its norms beyond those of a Llama, in bfloat16 and in float32."""

    @classmethod
    def of_scratch(cls, model: ScratchModel) -> Self:
        """Size of a Llama without grouped-query attention, or of a Mixtral, whose tokenizer reaches the maximum vocabulary.

        >>> ModelSize.of_scratch(ScratchModel(layers=4, hidden_size=128, vocabulary_size=128)).parameters
        869504
        """
        h = model.hidden_size
        experts = 1 if model.experts is None else model.experts.count
        router = 0 if model.experts is None else experts * h
        layer = 4 * h * h + experts * 3 * h * model.intermediate_size + router + 2 * h
        embeddings = model.vocabulary_size * h * (1 if model.tied_embeddings else 2)
        return cls(
            parameters=model.layers * layer + embeddings + h,
            hidden_size=h,
            layers=model.layers,
            intermediate_size=model.intermediate_size,
            vocabulary_size=model.vocabulary_size,
            largest_tensor=max(model.vocabulary_size, model.intermediate_size, h) * h,
            mlp_values=model.experts.per_token * (4 * model.intermediate_size + 2 * h)
            if model.experts
            else 0,
        )

    @classmethod
    def of_config(cls, config: Mapping[str, Any], parameters: int, largest_tensor: int = 0) -> Self | None:
        """Size from a ``config.json`` and the weights files; None if the config lacks sizes."""
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            return None
        hidden, layers, vocabulary = (
            text.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        if not (isinstance(hidden, int) and isinstance(layers, int) and isinstance(vocabulary, int)):
            return None
        wide = text.get("intermediate_size")
        wide = wide if isinstance(wide, int) else 4 * hidden
        mlp = _expert_values(text, hidden, wide)
        heads, groups, each = (
            text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if not isinstance(heads, int) or heads < 1:
            return cls(parameters, hidden, layers, wide, vocabulary, largest_tensor, mlp_values=mlp)
        each = each if isinstance(each, int) else hidden // heads
        keys = each * (groups if isinstance(groups, int) else heads)
        norms = _norm_values(text, hidden, each * heads + keys)
        return cls(
            parameters, hidden, layers, wide, vocabulary, largest_tensor, each * heads, keys, mlp, norms
        )

    def activation_values(self, dtype: Dtype) -> int:
        """Values that a layer of a Llama keeps for the backward pass of a token, counted in transformers' layers.

        Eight of the hidden size (in bfloat16 ten, since norms compute in float32) less the two of the queries, those of the queries
        and keys before and after attention, and four of the MLP's width. Of each expert that a token has, also its input and output.
        """
        hidden, queries = self.hidden_size, self.query_size or self.hidden_size
        norms = (8 if dtype == "bfloat16" else 6) * hidden
        mlp = self.mlp_values or 4 * self.intermediate_size
        return (
            norms + self.norm_values[dtype == "float32"] + 2 * queries + 2 * (self.key_size or hidden) + mlp
        )

    @property
    def _dense_layer(self) -> int:
        """Parameters of a layer of a Llama, without the norms."""
        attention = max(4 * self.hidden_size, 2 * (self.query_size + self.key_size))
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def layer(self) -> int:
        """Parameters of a layer. With experts the mean, since the other sizes are of one of them, or of another layer.

        Layers a quarter larger than a dense one have experts: norms and biases take less, a second expert more.
        """
        outside = 2 * self.vocabulary_size * self.hidden_size
        mean = (self.parameters - outside) // max(1, self.layers)
        return mean if 4 * mean > 5 * self._dense_layer else self._dense_layer

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter: of experts, all of a layer in one, whose first two matrices are two thirds of them.

        >>> mixtral = ModelSize(46_702_792_704, 4096, 32, 14336, 32000, largest_tensor=4096 * 32000, query_size=4096, key_size=1024)
        >>> experts = 8 * 2 * 14336 * 4096
        >>> experts <= mixtral.largest_parameter < 1.04 * experts
        True
        >>> ModelSize(13_015_864_320, 5120, 40, 13824, 32000, largest_tensor=5120 * 32000, query_size=5120, key_size=5120).largest_parameter
        163840000
        """
        experts = 2 * self.layer // 3 if self.layer > self._dense_layer else 0
        return max(self.largest_tensor, experts)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters of all linear layers of a Llama; an estimate for other architectures, and where sizes of heads are
        not known, which may be larger than the hidden size."""
        queries, keys = self.query_size or self.hidden_size, self.key_size or self.hidden_size
        attention = 2 * (self.hidden_size + queries) + 2 * (self.hidden_size + keys)
        return self.layers * rank * (attention + 3 * (self.hidden_size + self.intermediate_size))


def _expert_values(config: Mapping[str, Any], hidden: int, wide: int) -> int:
    """:attr:`ModelSize.mlp_values` by a ``config.json``."""
    each, chosen, shared = (
        config.get(name)
        for name in ("moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size")
    )
    if not isinstance(chosen, int):
        return 0
    own = each if isinstance(each, int) else wide
    return chosen * (4 * own + 2 * hidden) + (4 * shared if isinstance(shared, int) else 0)


def _norm_values(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """:attr:`ModelSize.norm_values` by a ``config.json``, with ``heads`` outputs of queries and keys."""
    normed, more, kept = _NORMS.get(str(config.get("model_type")), (False, 0, 3))
    values = heads * normed + more * hidden
    return kept * values + (kept - 3) * 2 * hidden, 2 * values


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one trainer rank in bytes: of its accelerator, or without one of the host."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, and recomputed ones of a layer."""
    gathered: int = 0
    """Partitioned parameters that are whole while they are used."""
    head: int = 0
    """The output head: on a CPU its weight in float32; the weight's gradient in float32 and in the model's dtype, chunks of logits."""
    buckets: int = 0
    """Buffers of a publish, communication buckets, and what an update (under FSDP2 the reduction of a layer) needs beyond head,
    activations and gathered parameters, which are free by then."""
    reference: int = 0
    """Frozen models: the reference of ``recipe.kl``, and the proximal policy of ``recipe.correction``."""
    allowance: int = 0
    """For the accelerator's libraries and fragmentation."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        optional = ("gathered", "reference", "allowance")
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        parts = ", ".join(f"{n} {v / _GIB:.1f}" for n, v in named.items() if v or n not in optional)
        return f"{self.total / _GIB:.1f} GiB ({parts})"


def trainer_rank_memory(size: ModelSize, spec: RunSpec) -> RankMemory:
    """Memory of one rank for training a model of this size with ``spec``."""
    return rank_memory(
        size,
        dtype=spec.model.dtype,
        zero_stage=spec.trainer.zero_stage,
        engine=spec.trainer.engine,
        offload=spec.trainer.offload,
        world=spec.trainer.ranks,
        micro_batch_tokens=spec.micro_batch_tokens,
        activation_checkpointing=spec.trainer.activation_checkpointing,
        frozen=_frozen_models(spec),
        trained=None if spec.trainer.lora is None else trained_parameters(size, spec),
        fp32_head=spec.recipe.fp32_logits in ("Both", "Trainer"),
        publish_bytes=quantity_bytes(spec.weight_sync.bucket),
        accelerator=spec.trainer.devices > 0,
    )


def trained_parameters(size: ModelSize, spec: RunSpec) -> int:
    """Number of trained parameters; with ``trainer.lora`` those of :meth:`ModelSize.adapter_parameters`.

    >>> small = ModelSize(parameters=10**6, hidden_size=64, layers=2, intermediate_size=128, vocabulary_size=1000)
    >>> small.adapter_parameters(8)
    17408
    """
    lora = spec.trainer.lora
    return size.parameters if lora is None else size.adapter_parameters(lora.rank)


def _frozen_models(spec: RunSpec) -> int:
    """Models beside the policy. The reference of adapters is the policy without them, except after a warm start."""
    second = spec.trainer.lora is None or spec.warm_start is not None
    return (spec.recipe.kl.penalty is not None and second) + (spec.recipe.proximal_updates > 0)


def rank_memory(
    size: ModelSize,
    *,
    dtype: Dtype,
    zero_stage: int,
    world: int,
    micro_batch_tokens: int,
    engine: Literal["DeepSpeed", "FSDP2"] = "DeepSpeed",
    offload: Offload = "None",
    activation_checkpointing: bool = False,
    frozen: int = 0,
    trained: int | None = None,
    fp32_head: bool = True,
    publish_bytes: int = 0,
    accelerator: bool = False,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> RankMemory:
    """Peak memory per rank of a step with AdamW.

    The optimizer of a bfloat16 model keeps float32 master weights besides the two moments (12 bytes per parameter). So does
    that of a float32 model under ZeRO; without ZeRO it keeps only the moments (8 bytes). Gradients are accumulated in float32.
    Stage 1 divides the optimizer state by ``world``, stage 2 also the gradients, stage 3 also the parameters. FSDP2's master weights
    are its partition of the trained parameters. What ``offload`` moves to the host is not counted (:func:`offloaded_bytes`). The
    ``frozen`` models have only parameters; their activations are freed before those of the policy are allocated. ``publish_bytes``: a
    bucket of a publish, of which two are in use. ``trained``: parameters that have gradients, if adapters alone are trained.

    >>> tiny = ModelSize(parameters=1000, hidden_size=8, layers=2, intermediate_size=16, vocabulary_size=64)
    >>> memory = rank_memory(tiny, dtype="bfloat16", zero_stage=1, world=2, micro_batch_tokens=64)
    >>> memory.parameters, memory.gradients, memory.optimizer
    (2000, 4000, 6000)

    Raises:
        ValueError: ``zero_stage`` does not exist, or ``world`` is less than 1.
    """
    if zero_stage not in (0, 1, 2, 3) or world < 1:
        raise ValueError(f"zero_stage {zero_stage} must be 0…3 and world {world} at least 1")
    count, hidden, each = size.parameters, size.hidden_size, BYTES[dtype]
    own = count if trained is None else trained
    kept = own if trained is None else count + own
    if engine == "FSDP2":
        kept -= own

    def share(from_stage: int, whole: int = own) -> int:
        return math.ceil(whole / world) if zero_stage >= from_stage else whole

    gradients = share(2) * 4
    if dtype == "float32" and zero_stage == 1:
        gradients += share(1) * 4  # the reduced partition, beside the whole gradients
    optimizer = share(1) * (_MOMENTS_BYTES + (0 if dtype == "float32" and zero_stage == 0 else 4))
    layers = (size.layers * hidden + size.activation_values(dtype)) if activation_checkpointing else 0
    values = layers or size.layers * size.activation_values(dtype)
    gathered = _gathered(size, engine, offload, zero_stage, world, count + (trained or 0))
    parts = RankMemory(
        parameters=share(3, kept) * each * (offload != "OptimizerAndParameters"),
        gradients=gradients * (offload == "None"),
        optimizer=optimizer * (offload == "None"),
        activations=micro_batch_tokens * values * each,
        gathered=gathered * each,
        head=_head(
            size, micro_batch_tokens, each, trains=trained is None, fp32=fp32_head, accelerator=accelerator
        ),
        reference=share(3, count) * each * frozen * (offload != "OptimizerAndParameters"),
    )
    bucket = 0 if engine == "FSDP2" else _BUCKET_BYTES[zero_stage] * min(bucket_elements, own)
    # After the backward pass, when activations, gathered parameters and the head's copies are free again: the buffer in which
    # gradients are reduced without ZeRO, and ZeRO-3's copy of the gradients that it updates at a time.
    update, free = 0, parts.activations + parts.gathered + parts.head
    if engine == "FSDP2":
        # In the backward pass, after that of the head: gradients of a layer, in float32 to be sent and as received.
        update, free = (each + 8) * min(size.layer, own // size.layers), parts.head
    elif zero_stage == 0:
        update = 4 * min(ALLREDUCE_ELEMENTS, own)
    elif zero_stage == 3 and offload == "None":
        update = 4 * min(SUB_GROUP_ELEMENTS, share(1))
    # Kept between publishes, which are beside forward and backward passes. A bucket has at least the largest tensor.
    largest = max(size.vocabulary_size * hidden, size.largest_parameter)
    publish = 2 * max(min(publish_bytes, count * each), largest * each) if publish_bytes else 0
    parts = replace(parts, buckets=bucket + max(0, update - free) + publish)
    if not accelerator:
        return parts
    return replace(parts, allowance=CONTEXT_BYTES + math.ceil(FRAGMENTATION * parts.total))


def _gathered(size: ModelSize, engine: str, offload: Offload, zero_stage: int, world: int, count: int) -> int:
    """Elements of partitioned parameters that are whole at a time, never more than ``count``.

    Two layers, of which one is fetched ahead, and embeddings and head. DeepSpeed keeps what is needed again, which is all of a small
    model; on one rank it uses the partition itself, unless that is on the host.
    """
    if zero_stage < 3 or (engine == "DeepSpeed" and world == 1 and offload != "OptimizerAndParameters"):
        return 0
    used = 2 * size.layer + 2 * size.vocabulary_size * size.hidden_size
    return min(count, used if engine == "FSDP2" else max(used, LIVE_ELEMENTS))


def _head(size: ModelSize, tokens: int, each: int, *, trains: bool, fp32: bool, accelerator: bool) -> int:
    """Bytes of the weight's float32 gradient and that in the model's dtype, and of chunks of logits: three in float32, or on an
    accelerator two and one in the model's dtype. On a CPU also the weight's float32 copy: there products of bfloat16 are not
    accumulated in float32.
    """
    output = size.vocabulary_size * size.hidden_size
    gradient = (4 * output + (each * output if each != 4 else 0)) if trains else 0
    copies = gradient + (4 * output if fp32 and each != 4 and not accelerator else 0)
    chunk = min(ACCELERATOR_CHUNK_BYTES if accelerator else CHUNK_BYTES, 4 * tokens * size.vocabulary_size)
    return copies + (5 * chunk // 2 if accelerator else 3 * chunk)


def offloaded_bytes(size: ModelSize, spec: RunSpec) -> int:
    """Host memory of one rank for what ``trainer.offload`` moves there, bytes.

    DeepSpeed has gradients twice, as accumulated and as the optimizer takes them. Gradients and parameters are page-locked, which torch
    rounds up to a power of two [by reading]: exactly counted for DeepSpeed's flat buffers, at most twice for single tensors. DeepSpeed
    moves trained parameters from single tensors to flat buffers, and torch keeps the memory of the former.
    """
    trainer, each = spec.trainer, BYTES[spec.model.dtype]
    if trainer.offload == "None":
        return 0
    own = math.ceil(trained_parameters(size, spec) / trainer.ranks)
    models = _frozen_models(spec) + (trainer.lora is not None)
    frozen = 2 * each * models * math.ceil(size.parameters / trainer.ranks)
    if trainer.engine == "FSDP2":
        return own * (_MOMENTS_BYTES + 2 * (4 + 4)) + frozen
    groups, rest = divmod(own, SUB_GROUP_ELEMENTS)
    gradients = _page_locked(4 * own) + groups * _page_locked(4 * SUB_GROUP_ELEMENTS) + _page_locked(4 * rest)
    state = own * (_MOMENTS_BYTES + 4) + gradients
    return (
        state
        if trainer.offload == "Optimizer"
        else state + _page_locked(each * own) + 2 * each * own + frozen
    )


def _page_locked(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def stage_plan(size: ModelSize, spec: RunSpec) -> dict[int, RankMemory]:
    """The memory of one rank by the ZeRO stages that can train ``spec``, which differs in nothing else."""
    whole = spec.trainer.engine == "DeepSpeed" and spec.trainer.offload == "None"
    lowest = int(spec.model.dtype == "bfloat16") if whole else 3
    stages = range(lowest, 4)  # without ZeRO there are no float32 master weights
    return {stage: trainer_rank_memory(size, _with_trainer(spec, zero_stage=stage)) for stage in stages}


def _with_trainer(spec: RunSpec, **changes: object) -> RunSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})


def state_bytes(size: ModelSize, spec: RunSpec) -> int:
    """Bytes of a checkpoint, at most: between two updates that share sampled weights it has the proximal policy's weights too."""
    proximal = BYTES[spec.model.dtype] if spec.recipe.proximal_updates > 0 else 0
    return (_CHECKPOINT_BYTES_A_WEIGHT + proximal) * trained_parameters(size, spec)


def checkpoint_copy(size: ModelSize, spec: RunSpec) -> int:
    """Host memory of one rank for the copy of its state that a checkpoint is written from, bytes."""
    return math.ceil(state_bytes(size, spec) / spec.trainer.ranks)


def published_copy(size: ModelSize, spec: RunSpec) -> int:
    """Host memory for the last published version with ``weightSync.backend: Files``, in rank 0 and in each generator, bytes."""
    if spec.weight_backend != "files":
        return 0
    lora = spec.trainer.lora
    count = size.parameters
    if lora is not None and lora.publish == "Adapter":
        count = size.adapter_parameters(lora.rank)
    return count * BYTES[spec.model.dtype]


def trainer_rank_bytes(size: ModelSize, spec: RunSpec) -> int:
    """Memory of one rank where its tensors are, bytes: with :func:`checkpoint_copy` on a CPU."""
    copy = 0 if spec.trainer.devices else checkpoint_copy(size, spec)
    return trainer_rank_memory(size, spec).total + copy


def server_memory(size: ModelSize, spec: RunSpec) -> int:
    """Minimum memory of one generator replica, in bytes per device: its shard of the weights and of vLLM's versions of adapters; on a
    CPU also the KV cache and past responses.

    On an accelerator the KV cache takes the memory that these leave, so they are the minimum.
    """
    generator = spec.generator
    weights = (size.parameters + _own_adapters(size, spec)) * BYTES[spec.model.dtype]
    if generator.devices:
        return math.ceil(weights / generator.devices)
    cache = quantity_bytes(generator.kv_cache) if generator.kv_cache else 0
    return weights + cache + MEMORY_BYTES_PER_TOKEN * spec.draft_memory_tokens


def _own_adapters(size: ModelSize, spec: RunSpec) -> int:
    """Parameters of the adapters that vLLM reserves memory for."""
    lora = spec.trainer.lora
    if lora is None or not spec.lora_versions:
        return 0
    rank = next(rank for rank in LORA_RANKS if rank >= lora.rank)
    return spec.lora_versions * size.adapter_parameters(rank)


def host_memory(size: ModelSize, spec: RunSpec) -> dict[str, int]:
    """Host memory by role, in bytes over all its replicas. Of roles that run on accelerators, the trainer's copies of its state
    and what it offloads."""
    needs = {}
    if spec.generator.devices == 0:
        needs["generator"] = spec.generator.replicas * server_memory(size, spec)
    rank = trainer_rank_bytes(size, spec)
    if spec.trainer.devices:
        rank = checkpoint_copy(size, spec) + offloaded_bytes(size, spec)
    return needs | {"trainer": spec.trainer.ranks * rank}


@dataclass(frozen=True, slots=True)
class TooLittle:
    """A role needs more memory of an accelerator than it has."""

    field: str
    """Of the spec, below ``spec``: the role."""
    problem: str
    """The figures."""
    advice: str
    """What to change."""


def device_memory_problem(
    size: ModelSize, spec: RunSpec, trainer: int | None, generator: int | None
) -> TooLittle | None:
    """A role whose need exceeds its accelerators' memory, in bytes; None if both fit or the memory is unknown."""
    if spec.trainer.devices and trainer is not None:
        rank = trainer_rank_memory(size, spec)
        if rank.total > trainer:
            return TooLittle(
                "trainer",
                f"one trainer rank needs about {rank}, there are {trainer / _GIB:.1f} on its GPU",
                trainer_advice(size, spec, trainer),
            )
    if spec.generator.devices and generator is not None:
        fraction, server = float(spec.generator.memory_fraction), server_memory(size, spec)
        if server > fraction * generator:
            return TooLittle(
                "generator",
                f"a generator's share of the weights is {server / _GIB:.1f} GiB a GPU, generator.memoryFraction "
                f"({spec.generator.memory_fraction}) of {generator / _GIB:.1f} GiB is less",
                "choose a smaller model or more generator.devices",
            )
    return None


def trainer_advice(size: ModelSize, spec: RunSpec, there: int) -> str:
    """The first of a few changes with which a rank would fit, or what to choose otherwise."""

    def fits(**changes: object) -> bool:
        return trainer_rank_bytes(size, _with_trainer(spec, **changes)) <= there

    engine = spec.trainer.engine
    least: dict[str, object] = {"zero_stage": 3, "activation_checkpointing": True}
    ways: list[dict[str, object]] = [{"activation_checkpointing": True}]
    ways += [{"zero_stage": stage} for stage in range(spec.trainer.zero_stage + 1, 4)]
    ways += [least]
    if spec.trainer.devices:
        kinds = ("Optimizer", "OptimizerAndParameters")[engine == "FSDP2" :]
        ways += [least | {"offload": kind} for kind in kinds]
    ways += [least | {"replicas": n * spec.trainer.replicas} for n in (2, 4, 8)]
    names = {
        "zero_stage": "zeroStage",
        "activation_checkpointing": "activationCheckpointing",
        "offload": "offload",
        "replicas": "replicas",
    }
    for way in ways:
        if fits(**way):
            set_to = ", ".join(
                f"trainer.{names[k]}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in way.items()
            )
            moved = offloaded_bytes(size, _with_trainer(spec, **way)) - offloaded_bytes(size, spec)
            host = f" with {moved / _GIB:,.0f} GiB more of host memory a rank" if moved > 0 else ""
            return f"{set_to} would fit{host}; or choose a smaller model, more ranks or a smaller trainer.microBatchTokens"
    return "choose a smaller model, more ranks, a smaller trainer.microBatchTokens or larger accelerators"
