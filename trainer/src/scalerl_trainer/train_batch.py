"""A rank's shard of a batch: what the engine trains on, packed and checked without the other ranks.

A bad shard is kept with its error, which all ranks raise together (:func:`~.engine.distributed.exchange_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace

import torch

from scalerl_trainer.algo.mismatch import check_generator_logprobs
from scalerl_trainer.errors import BadBatchError
from scalerl_trainer.models.router_replay import RouterReplay
from scalerl_trainer.packing import MicroBatch, PackedBatch, Sequence, pack


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One rank's shard of a batch. ``n`` runs over its trainable tokens in flat order, ``s`` over its sequences."""

    sequences: Items[Sequence]
    weights_s: torch.Tensor
    """Weights of ``algo.aggregation.sequence_weights`` over the whole batch."""
    advantages_s: torch.Tensor
    """Advantages of ``algo.advantages.advantages`` over the whole batch; the mean over a sequence's tokens if they differ."""
    generator_logprobs_n: torch.Tensor | None = None
    """The generator's log-probabilities; None if the current weights sampled all tokens, so that ratios are 1."""
    fresh_n: torch.Tensor | None = None
    """Bool: whether the current weights sampled the token and all earlier ones of its completion; None if unknown."""
    teacher_logprobs_n: torch.Tensor | None = None
    """The teacher's log-probabilities; None without a teacher."""
    advantages_n: torch.Tensor | None = None
    """Advantage of each token; None if those of a sequence are equal."""


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A rank's shard in micro-batches."""

    packed: PackedBatch
    """Empty after an error."""
    sequences: int
    fresh_known: bool
    """Whether the batch has :attr:`.TrainBatch.fresh_n`."""
    error: BadBatchError | None
    """Why it cannot be trained on."""


def pack_shard(
    sequences: Items[Sequence],
    batch: TrainBatch | None,
    *,
    micro_batch_tokens: int,
    shared_rows: bool,
    shared_prompts: bool,
    vocabulary: int,
    pinned: bool,
    replay: RouterReplay | None = None,
) -> PackedShard:
    """Pack this rank's shard.

    Args:
        batch: the batch of the sequences; None if they are only scored.
        pinned: put the micro-batches in pinned memory, from which they are copied to the device while it computes.
        replay: checks recorded experts.
    """
    error: BadBatchError | None = None
    packed = PackedBatch((), torch.zeros(0, dtype=torch.long), 0, 0)
    try:
        packed = pack(sequences, micro_batch_tokens, shared_rows=shared_rows, shared_prompts=shared_prompts)
        _check_tokens(packed, vocabulary)
        if replay is not None:
            for micro in packed.micro_batches:
                replay.check(micro)
        if batch is not None:
            _check_batch(batch, packed)
        if pinned:
            packed = replace(packed, micro_batches=tuple(map(_pinned, packed.micro_batches)))
    except BadBatchError as caught:
        error = caught
    return PackedShard(packed, len(sequences), batch is not None and batch.fresh_n is not None, error)


def _pinned(micro: MicroBatch) -> MicroBatch:
    tensors = {field.name: getattr(micro, field.name) for field in fields(micro)}
    return replace(
        micro, **{name: tensor.pin_memory() for name, tensor in tensors.items() if tensor is not None}
    )


def _check_tokens(packed: PackedBatch, vocabulary: int) -> None:
    """Check that all token ids are in the vocabulary: otherwise this rank would fail while the others are in a collective."""
    for micro in packed.micro_batches:
        for ids in (
            micro.input_ids_bt,
            micro.target_m,
            *(() if micro.prompts_gp is None else (micro.prompts_gp,)),
        ):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocabulary:
                raise BadBatchError(
                    f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens: "
                    "generator and trainer must use the same tokenizer"
                )


def _check_batch(batch: TrainBatch, packed: PackedBatch) -> None:
    sequences, trainable = len(batch.sequences), packed.trainable
    for name, tensor, expected in (
        ("weights_s", batch.weights_s, sequences),
        ("advantages_s", batch.advantages_s, sequences),
        ("generator_logprobs_n", batch.generator_logprobs_n, trainable),
        ("teacher_logprobs_n", batch.teacher_logprobs_n, trainable),
        ("fresh_n", batch.fresh_n, trainable),
        ("advantages_n", batch.advantages_n, trainable),
    ):
        if tensor is not None and tuple(tensor.shape) != (expected,):
            raise BadBatchError(f"{name} has shape {tuple(tensor.shape)}, expected ({expected},)")
    if not bool(torch.isfinite(batch.weights_s).all() & torch.isfinite(batch.advantages_s).all()):
        raise BadBatchError("weights or advantages are not finite")
    if batch.generator_logprobs_n is not None:
        check_generator_logprobs(batch.generator_logprobs_n)
