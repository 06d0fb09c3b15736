"""Packs sequences into rows and rows into micro-batches, and maps tokens to a flat order.

A row can have several sequences. Positions restart at 0 with each, from which transformers infers their boundaries without
an attention mask (``sdpa``: block-diagonal masks, for any number of rows; ``flash_attention_2``: variable-length kernels, for
one row at a time). The packed log-probabilities therefore equal those of each sequence alone.

The layout depends on the kernel. Variable-length kernels skip pairs of different sequences, so sequences share rows. With
``sdpa`` a shared row of T tokens costs T² and a mask, so each sequence gets a separate row, and rows of similar length form a
micro-batch, with little padding and without a mask.

Shapes: ``b`` row of a micro-batch, ``t`` position in the row, ``n`` trainable token in flat order (sequence after
sequence, left to right), ``s`` sequence, ``m`` trainable token of one micro-batch, ``r`` sequence of a micro-batch in the order
of its rows. There is no Python loop over tokens.

:func:`pack_shard` packs and checks a rank's :class:`TrainBatch`, without the other ranks
(:func:`~.engine.distributed.exchange_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from scalerl_trainer.algo.mismatch import check_generator_logprobs
from scalerl_trainer.errors import BadBatchError, SequenceTooLongError

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
"""Of any width."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A prompt and one completion, as token ids."""

    prompt: Items[int] | Ints
    completion: Items[int] | Ints
    trainable: Items[bool] | Ints | None = None
    """For each completion token, whether the policy sampled it; None if it sampled all."""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise BadBatchError(
                "a sequence needs at least one prompt token: the first completion token is predicted from it"
            )
        if self.trainable is not None and len(self.trainable) != len(self.completion):
            raise BadBatchError(
                f"a completion of {len(self.completion)} tokens has a mask of {len(self.trainable)}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)

    def trainable_places(self) -> list[int]:
        """Indices of the trainable tokens in the completion."""
        if self.trainable is None:
            return list(range(len(self.completion)))
        return [place for place, keep in enumerate(self.trainable) if keep]


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
class MicroBatch:
    """The inputs of one forward pass, all int64."""

    input_ids_bt: torch.Tensor
    position_ids_bt: torch.Tensor
    predict_at_m: torch.Tensor
    """Index, in the flattened ``[B * T]`` hidden states, of the one that predicts each trainable token."""
    target_m: torch.Tensor
    """Id of each trainable token."""
    flat_m: torch.Tensor
    """Its index in the batch's flat order."""
    sequence_m: torch.Tensor
    """Index of its sequence in the batch."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The micro-batches of a shard."""

    micro_batches: tuple[MicroBatch, ...]
    trainable_s: torch.Tensor
    """Number of trainable tokens of each sequence, int64."""
    tokens: int
    """Computed tokens of prompts and completions."""
    padding: int
    """Computed positions without a token."""

    @property
    def trainable(self) -> int:
        """Number of trainable tokens of the batch, N."""
        return int(self.trainable_s.sum())


def pack(sequences: Items[Sequence], micro_batch_tokens: int, *, shared_rows: bool) -> PackedBatch:
    """Pack sequences into micro-batches of at most ``micro_batch_tokens`` positions. Deterministic; sequences are not split.

    With ``shared_rows``, a micro-batch is one row, packed by first-fit-decreasing, fullest first. Without, a row has one
    sequence, and a micro-batch has as many rows as fit when padded to its longest, longest first. Positions after the last
    prediction are left out: the last token of a sequence, and whole sequences without trainable tokens.

    Raises ``SequenceTooLongError``, and ``ValueError`` if the limit is not positive.

    >>> batch = pack([Sequence([1, 2], [3, 4]), Sequence([5], [6])], 8, shared_rows=True)
    >>> batch.micro_batches[0].input_ids_bt.tolist(), batch.micro_batches[0].position_ids_bt.tolist()
    ([[1, 2, 3, 5]], [[0, 1, 2, 0]])
    >>> batch.micro_batches[0].predict_at_m.tolist(), batch.micro_batches[0].target_m.tolist()
    ([1, 2, 3], [3, 4, 6])
    """
    if micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens {micro_batch_tokens} must be positive")
    for index, sequence in enumerate(sequences):
        if sequence.tokens > micro_batch_tokens:
            raise SequenceTooLongError(index, sequence.tokens, micro_batch_tokens)
    tokens = _Tokens.of(sequences)
    # Tokens from the last trainable one on predict no trainable token.
    some_s = tokens.trainable_s > 0
    length_s = np.zeros_like(tokens.prompt_s)
    length_s[some_s] = tokens.prompt_s[some_s] + tokens.place_n[tokens.offset_s[1:][some_s] - 1]
    lengths = length_s.tolist()
    if shared_rows:
        groups = [[row] for row in _first_fit_decreasing(lengths, micro_batch_tokens)]
    else:
        groups = _by_length(lengths, micro_batch_tokens)
    micro_batches = tuple(_micro_batch(group, tokens, length_s) for group in groups)
    computed = sum(micro.input_ids_bt.numel() for micro in micro_batches)
    return PackedBatch(
        micro_batches, torch.from_numpy(tokens.trainable_s), sum(lengths), computed - sum(lengths)
    )


def one_row(sequences: Items[Sequence]) -> MicroBatch:
    """A micro-batch of one row with these sequences in their order."""
    length_s = np.array([sequence.tokens - 1 for sequence in sequences])
    return _micro_batch([list(range(len(sequences)))], _Tokens.of(sequences), length_s)


def _first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows of sequence indices, fullest rows first. Length 0 is left out."""
    rows: list[list[int]] = []
    room: list[int] = []
    shortest = min((length for length in lengths if length), default=0)
    first_open = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        while first_open < len(rows) and room[first_open] < shortest:
            first_open += 1
        for row in range(first_open, len(rows)):
            if room[row] >= length:
                rows[row].append(index)
                room[row] -= length
                break
        else:
            rows.append([index])
            room.append(capacity - length)
    return [rows[row] for row in sorted(range(len(rows)), key=lambda r: (room[r], r))]


def _by_length(lengths: list[int], budget: int) -> list[list[list[int]]]:
    """Groups of one-sequence rows, longest first. Length 0 is left out."""
    groups: list[list[list[int]]] = []
    longest = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * longest <= budget:
            groups[-1].append([index])
        else:
            groups.append([[index]])
            longest = lengths[index]
    return groups


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of all sequences, one sequence after the other, all int64."""

    ids: Ints
    start_s: Ints
    """Index of each sequence's first token in ``ids``."""
    prompt_s: Ints
    """Number of prompt tokens."""
    trainable_s: Ints
    """Number of trainable tokens."""
    offset_s: Ints
    """Index of each sequence's first trainable token in the flat order, and their number, ``[S + 1]``."""
    place_n: Ints
    """Index of each trainable token in its completion."""

    @classmethod
    def of(cls, sequences: Items[Sequence]) -> _Tokens:
        parts = [np.asarray(part, np.int64) for s in sequences for part in (s.prompt, s.completion)]
        prompt_s, completion_s = (
            np.array([len(part) for part in parts[side::2]], np.int64) for side in (0, 1)
        )
        masks = [
            np.ones(len(s.completion), np.bool_) if s.trainable is None else np.asarray(s.trainable, np.bool_)
            for s in sequences
        ]
        keep = np.concatenate([np.empty(0, np.bool_), *masks])
        owner_n = np.repeat(np.arange(len(sequences)), completion_s)[keep]
        trainable_s = np.bincount(owner_n, minlength=len(sequences))
        return cls(
            np.concatenate([np.empty(0, np.int64), *parts]),
            _starts(prompt_s + completion_s)[:-1],
            prompt_s,
            trainable_s,
            _starts(trainable_s),
            _ranges(np.zeros_like(completion_s), completion_s)[keep],
        )


def _starts(counts: Ints) -> Ints:
    """Sums of the counts before each one, and of all."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _ranges(firsts: Ints, counts: Ints) -> Ints:
    """``[first, first + count)`` of each, one after the other.

    >>> _ranges(np.array([5, 0, 8]), np.array([2, 0, 3])).tolist()
    [5, 6, 8, 9, 10]
    """
    starts = _starts(counts)
    found: Ints = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
    return found


def _micro_batch(rows: list[list[int]], tokens: _Tokens, length_s: Ints) -> MicroBatch:
    sequence_r = np.array([index for row in rows for index in row], dtype=np.int64)
    size_b = np.array([len(row) for row in rows])
    length_r, trainable_r = length_s[sequence_r], tokens.trainable_s[sequence_r]
    end_r = _starts(length_r)
    before_b = end_r[_starts(size_b)]  # positions of the rows before each
    width = int(np.diff(before_b).max())
    # Of each sequence's first token, in the flattened rows.
    start_r = end_r[:-1] + np.repeat(np.arange(len(rows)) * width - before_b[:-1], size_b)
    at = _ranges(start_r, length_r)
    ids = np.zeros(len(rows) * width, np.int64)
    ids[at] = tokens.ids[_ranges(tokens.start_s[sequence_r], length_r)]
    # Only rows with one sequence are padded. Attention is causal, so no token attends to the padding. The positions of
    # the padding continue the sequence, so that transformers does not detect packing and the kernel needs no mask.
    positions = np.tile(np.arange(width), len(rows))
    positions[at] = _ranges(np.zeros_like(length_r), length_r)
    flat_m = _ranges(tokens.offset_s[sequence_r], trainable_r)
    sequence_m = np.repeat(sequence_r, trainable_r)
    completion_m = tokens.start_s[sequence_m] + tokens.prompt_s[sequence_m]
    place_m = tokens.place_n[flat_m]
    predict_at_m = np.repeat(start_r + tokens.prompt_s[sequence_r] - 1, trainable_r) + place_m
    return MicroBatch(
        torch.from_numpy(ids.reshape(len(rows), width)),
        torch.from_numpy(positions.reshape(len(rows), width)),
        torch.from_numpy(predict_at_m),
        torch.from_numpy(tokens.ids[completion_m + place_m]),
        torch.from_numpy(flat_m),
        torch.from_numpy(sequence_m),
    )


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
        packed = pack(sequences, micro_batch_tokens, shared_rows=shared_rows)
        _check_tokens(packed, vocabulary)
        if batch is not None:
            _check_batch(batch, packed)
        if pinned:
            packed = replace(packed, micro_batches=tuple(map(_pinned, packed.micro_batches)))
    except BadBatchError as caught:
        error = caught
    return PackedShard(packed, len(sequences), batch is not None and batch.fresh_n is not None, error)


def _pinned(micro: MicroBatch) -> MicroBatch:
    return MicroBatch(*(getattr(micro, field.name).pin_memory() for field in fields(micro)))


def _check_tokens(packed: PackedBatch, vocabulary: int) -> None:
    """Check that all token ids are in the vocabulary: otherwise this rank would fail while the others are in a collective."""
    for micro in packed.micro_batches:
        for ids in (micro.input_ids_bt, micro.target_m):
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
