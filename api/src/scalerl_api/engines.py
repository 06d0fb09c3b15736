"""``trainer.engine``: what partitions the model over the trainer's ranks and updates it, and what each engine implies for a run.

Another one is a subclass of :class:`Engine` here with its name in :data:`EngineName` and :data:`ENGINES`, and its backend in
``scalerl_trainer.engine.backend``. The rules of the spec, the estimate of memory and the trainer's settings read them from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from scalerl_api.fields import Rule
from scalerl_api.memory.model_size import Dtype, ModelSize

EngineName = Literal["DeepSpeed", "FSDP2"]
Offload = Literal["None", "Optimizer", "OptimizerAndParameters"]

MOMENTS_BYTES: Final = 8
"""Bytes per parameter of AdamW's two float32 moments."""
BUCKET_ELEMENTS: Final = 50_000_000
"""Maximum size of DeepSpeed's communication buckets, in elements."""
ALLREDUCE_ELEMENTS: Final = 500_000_000
"""Elements of gradients that DeepSpeed copies into one buffer to reduce them without ZeRO."""
SUB_GROUP_ELEMENTS: Final = 1_000_000_000
"""Elements that ZeRO-3 updates at a time."""
LIVE_ELEMENTS: Final = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered because a later module needs them again (``stage3_max_live_parameters``)."""
_BUCKET_BYTES: Final[Mapping[int, tuple[int, int]]] = {0: (0, 0), 1: (0, 0), 2: (4, 7), 3: (4, 11)}
"""Bytes per element of a bucket by ZeRO stage, for bfloat16: the buffer; and with what is being reduced of it."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A model on the ranks of a trainer."""

    size: ModelSize
    trained: int
    """Parameters that have gradients."""
    parameters: int
    """All parameters, those of adapters too."""
    value_bytes: int
    """Bytes of a value in the model's dtype."""
    zero_stage: int
    world: int
    offload: Offload = "None"
    bucket_elements: int = BUCKET_ELEMENTS

    def share(self, from_stage: int, whole: int) -> int:
        """What a rank has of ``whole``, which is divided from this ZeRO stage."""
        return math.ceil(whole / self.world) if self.zero_stage >= from_stage else whole


class Engine:
    """What an engine implies. Sizes are of one rank."""

    partitions_all: bool
    """Partitions all state: ``zeroStage`` 3 alone."""
    offloads: tuple[Offload, ...]
    """What it can keep in the host's memory."""
    keeps_trained_weights: bool
    """Has trained parameters in the model's dtype beside the float32 master weights."""

    def zero_stages(self, offload: Offload, dtype: Dtype) -> range:
        """Stages that can train a model. Without ZeRO there are no float32 master weights of bfloat16."""
        return range(3 if self.partitions_all or offload != "None" else int(dtype == "bfloat16"), 4)

    def gathered_elements(self, part: Partition) -> int:
        """Elements of partitioned parameters that are whole while a layer computes."""
        raise NotImplementedError

    def gathered_at_head(self, part: Partition) -> int:
        """The same while the head computes."""
        return self.gathered_elements(part)

    def bucket_bytes(self, part: Partition, *, reducing: bool) -> int:
        """Communication buckets, between reductions and during them."""
        return 0

    def overlap_bytes(self, part: Partition) -> int:
        """Gradients on an accelerator that wait for a reduction beside the backward pass."""
        return 0

    def layer_bytes(self, part: Partition) -> int:
        """Gradients of a layer in its backward pass, and what their reduction needs; of a model that is trained whole."""
        raise NotImplementedError

    def embedding_bytes(self, part: Partition) -> int:
        """The same of the embeddings, which are the last ones of a backward pass, and what is gathered then."""
        raise NotImplementedError

    def update_bytes(self, part: Partition) -> int:
        """Buffers after the backward pass."""
        return 0

    def offloaded_bytes(self, trained: int, value_bytes: int, offload: Offload, frozen: int) -> int:
        """Host memory of what is offloaded.

        Args:
            trained: trained parameters of this rank.
            frozen: bytes of the parameters that are not trained, for an offload of parameters.
        """
        raise NotImplementedError


class DeepSpeed(Engine):
    """ZeRO by ``zeroStage``, with float32 master weights beside the model's."""

    partitions_all = False
    offloads = ("Optimizer", "OptimizerAndParameters")
    keeps_trained_weights = True

    def gathered_elements(self, part: Partition) -> int:
        """It keeps what is needed again, which is all of a small model; on one rank it uses the partition itself, unless that is on the
        host."""
        if part.zero_stage < 3 or (part.world == 1 and part.offload != "OptimizerAndParameters"):
            return 0
        return min(part.parameters, max(part.size.used_at_once, LIVE_ELEMENTS))

    def bucket_bytes(self, part: Partition, *, reducing: bool) -> int:
        return _BUCKET_BYTES[part.zero_stage][reducing] * min(part.bucket_elements, part.trained)

    def overlap_bytes(self, part: Partition) -> int:
        """Of three buckets: ZeRO-3 has at most two in progress before it waits [by reading]."""
        return (part.zero_stage == 3) * 3 * part.value_bytes * min(part.bucket_elements, part.trained)

    def layer_bytes(self, part: Partition) -> int:
        return self._reduced(part) * part.size.largest_in_layer

    def embedding_bytes(self, part: Partition) -> int:
        """A tied weight has two gradients, which autograd adds, before it is reduced."""
        gathered = part.value_bytes * self.gathered_elements(part)
        at_once = max(2 * part.value_bytes, self._reduced(part))
        return gathered + at_once * part.size.vocabulary_size * part.size.hidden_size

    def _reduced(self, part: Partition) -> int:
        """Bytes a weight of a parameter's gradient until it is in the accumulated ones: at stage 1 in bfloat16 also in float32, one
        parameter at a time; from stage 2 on, of one that is larger than a bucket, also in float32 to be sent and as received."""
        cast = 4 if part.zero_stage == 1 and part.value_bytes != 4 else 0
        return part.value_bytes + (8 if part.zero_stage > 1 else cast)

    def update_bytes(self, part: Partition) -> int:
        """The buffer in which gradients are reduced without ZeRO, the reduced partition of a float32 model's beside the whole ones, and
        ZeRO-3's copy of the gradients that it updates at a time."""
        if part.zero_stage == 0:
            return 4 * min(ALLREDUCE_ELEMENTS, part.trained)
        if part.zero_stage == 1 and part.value_bytes == 4:
            return 4 * part.share(1, part.trained)
        if part.zero_stage == 3 and part.offload == "None":
            return 4 * min(SUB_GROUP_ELEMENTS, part.share(1, part.trained))
        return 0

    def offloaded_bytes(self, trained: int, value_bytes: int, offload: Offload, frozen: int) -> int:
        """It has gradients twice, as accumulated and as the optimizer takes them. Gradients and parameters are page-locked, which torch
        rounds up to a power of two [by reading]. Trained parameters are moved from single tensors to flat buffers, and torch keeps the
        memory of the former."""
        groups, rest = divmod(trained, SUB_GROUP_ELEMENTS)
        gradients = _page_locked(4 * trained) + groups * _page_locked(4 * SUB_GROUP_ELEMENTS)
        state = trained * (MOMENTS_BYTES + 4) + gradients + _page_locked(4 * rest)
        if offload == "Optimizer":
            return state
        return state + _page_locked(value_bytes * trained) + 2 * value_bytes * trained + frozen


class Fsdp2(Engine):
    """Its master weights are its partition of the trained parameters."""

    partitions_all = True
    offloads = ("OptimizerAndParameters",)
    keeps_trained_weights = False

    def gathered_elements(self, part: Partition) -> int:
        return min(part.parameters, part.size.used_at_once)

    def gathered_at_head(self, part: Partition) -> int:
        """Of the layers only the last, which more than one rank gathers before the head's backward pass."""
        return min(part.parameters, part.size.embeddings + (part.world > 1) * part.size.layer)

    def layer_bytes(self, part: Partition) -> int:
        """In float32 to be sent beside those of the layer before, and as received."""
        return (4 + self._reduced(part)) * self._layer(part)

    def embedding_bytes(self, part: Partition) -> int:
        """They are partitioned again before their gradients are reduced, beside those of the first layer."""
        return self._reduced(part) * part.size.embeddings + 4 * self._layer(part)

    def _reduced(self, part: Partition) -> int:
        """Bytes a weight: the gradient in float32, and that of the model's dtype before it or the received part after it."""
        return 4 + max(part.value_bytes, math.ceil(4 / part.world))

    def _layer(self, part: Partition) -> int:
        return min(part.size.layer, part.trained // part.size.layers)

    def offloaded_bytes(self, trained: int, value_bytes: int, offload: Offload, frozen: int) -> int:
        return trained * (MOMENTS_BYTES + 2 * (4 + 4)) + frozen


def _page_locked(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


ENGINES: Final[Mapping[EngineName, Engine]] = {"DeepSpeed": DeepSpeed(), "FSDP2": Fsdp2()}


def _stage_rule(name: EngineName) -> Rule:
    return Rule(
        f"self.trainer.engine != '{name}' || self.trainer.zeroStage == 3",
        f"trainer.engine {name} partitions all state: set trainer.zeroStage: 3",
        "trainer.engine",
        lambda spec: spec.trainer.engine != name or spec.trainer.zero_stage == 3,
    )


_NOT_OFFLOADED: Final = [
    (name, offload)
    for name, engine in ENGINES.items()
    for offload in get_args(Offload)
    if offload not in ("None", *engine.offloads)
]
_TAKES_OFFLOAD: Final = " && ".join(
    f"(self.trainer.engine != '{name}' || self.trainer.offload != '{offload}')"
    for name, offload in _NOT_OFFLOADED
)
_OFFLOAD_ONLY: Final = "; ".join(
    f"{name} offloads only {' or '.join(ENGINES[name].offloads)}"
    for name in dict.fromkeys(name for name, _ in _NOT_OFFLOADED)
)
ENGINE_RULES: Final = (
    *(_stage_rule(name) for name, engine in ENGINES.items() if engine.partitions_all),
    Rule(
        f"self.trainer.offload == 'None' || (self.trainer.zeroStage == 3 && self.trainer.devices > 0 && {_TAKES_OFFLOAD})",
        f"trainer.offload needs trainer.zeroStage: 3 and trainer.devices above 0; {_OFFLOAD_ONLY}",
        "trainer.offload",
        lambda spec: (
            spec.trainer.offload == "None"
            or (
                spec.trainer.zero_stage == 3
                and spec.trainer.devices > 0
                and spec.trainer.offload in ENGINES[spec.trainer.engine].offloads
            )
        ),
    ),
)
"""Rules of a run's spec."""
