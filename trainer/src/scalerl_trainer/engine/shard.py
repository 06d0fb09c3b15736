"""Packs and checks a rank's shard of a batch, without the other ranks; all ranks exchange sizes and errors before anything is
computed.

If only one rank raised for a bad shard, the others would wait in their collectives until the timeout. Therefore all ranks
raise together.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from scalerl_trainer.algo.mismatch import check_generator_logprobs
from scalerl_trainer.engine.distributed import gather_vectors
from scalerl_trainer.engine.stats import TrainBatch
from scalerl_trainer.errors import BadBatchError
from scalerl_trainer.packing import MicroBatch, PackedBatch, Sequence, pack


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
) -> PackedShard:
    """Pack this rank's shard.

    Args:
        batch: the batch of the sequences; None if they are only scored.
        pinned: put the micro-batches in pinned memory, from which they are copied to the device while it computes.
    """
    error: BadBatchError | None = None
    packed = PackedBatch((), torch.zeros(0, dtype=torch.long), 0, 0)
    try:
        packed = pack(sequences, micro_batch_tokens, shared_rows=shared_rows, shared_prompts=shared_prompts)
        _check_tokens(packed, vocabulary)
        if batch is not None:
            _check_batch(batch, packed)
        if pinned:
            packed = replace(packed, micro_batches=tuple(map(_pinned, packed.micro_batches)))
    except BadBatchError as caught:
        error = caught
    return PackedShard(packed, len(sequences), batch is not None and batch.fresh_n is not None, error)


def _pinned(micro: MicroBatch) -> MicroBatch:
    tensors = (getattr(micro, field.name) for field in fields(micro))
    pinned: list[Any] = [None if tensor is None else tensor.pin_memory() for tensor in tensors]
    return MicroBatch(*pinned)


def exchange_sizes(shard: PackedShard, device: torch.device) -> torch.Tensor:
    """Gather the sizes and errors of all ranks. A collective.

    Returns:
        ``counts`` of shape ``[world, 7]``. Its columns are the numbers of micro-batches, trainable tokens, tokens, padding and
        sequences, whether the shard is bad, and whether its fresh tokens are known.

    Raises, on every rank: ``BadBatchError`` (and ``NonFiniteLogprobError``, ``SequenceTooLongError``).
    """
    packed = shard.packed
    counts = gather_vectors(
        torch.tensor(
            [
                len(packed.micro_batches),
                packed.trainable,
                packed.tokens,
                packed.padding,
                shard.sequences,
                shard.error is not None,
                shard.fresh_known,
            ],
            dtype=torch.long,
            device=device,
        )
    )
    if shard.error is not None:
        raise shard.error
    if bool(counts[:, 5].any()):
        ranks = counts[:, 5].nonzero().flatten().tolist()
        raise BadBatchError(f"the shard of rank {ranks[0]} cannot be trained on; see its log")
    return counts


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
