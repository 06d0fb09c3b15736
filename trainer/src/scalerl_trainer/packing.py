"""Packs sequences into rows and rows into micro-batches, and maps tokens to a flat order.

A row can have several sequences. Positions restart at 0 with each, from which transformers infers their boundaries without
an attention mask (``sdpa``: block-diagonal masks, for any number of rows; ``flash_attention_2``: variable-length kernels, for
one row at a time). The packed log-probabilities therefore equal those of each sequence alone.

The layout depends on the kernel. Variable-length kernels skip pairs of different sequences, so sequences share rows. With
``sdpa`` a shared row of T tokens costs T² and a mask, so each sequence gets a separate row, and rows of similar length form a
micro-batch, with little padding and without a mask.

Shapes: ``b`` row of a micro-batch, ``t`` position in the row, ``n`` trainable token in flat order (sequence after
sequence, left to right), ``s`` sequence, ``m`` trainable token of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import torch

from scalerl_trainer.errors import BadBatchError, SequenceTooLongError


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt and one completion, as token ids."""

    prompt: Items[int]
    completion: Items[int]
    trainable: Items[bool] | None = None
    """For each completion token, whether the policy sampled it; None if it sampled all."""

    def __post_init__(self) -> None:
        if not self.prompt:
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
    places = [sequence.trainable_places() for sequence in sequences]
    for index, sequence in enumerate(sequences):
        if sequence.tokens > micro_batch_tokens:
            raise SequenceTooLongError(index, sequence.tokens, micro_batch_tokens)
    # Tokens from the last trainable one on predict no trainable token.
    lengths = [len(s.prompt) + p[-1] if p else 0 for s, p in zip(sequences, places, strict=True)]
    if shared_rows:
        groups = [[row] for row in _first_fit_decreasing(lengths, micro_batch_tokens)]
    else:
        groups = _by_length(lengths, micro_batch_tokens)
    offsets = [0]
    for place in places:
        offsets.append(offsets[-1] + len(place))
    micro_batches = []
    computed = 0
    for group in groups:
        micro = _micro_batch(group, sequences, places, lengths, offsets)
        computed += micro.input_ids_bt.numel()
        micro_batches.append(micro)
    trainable_s = torch.tensor([end - start for start, end in pairwise(offsets)], dtype=torch.long)
    return PackedBatch(tuple(micro_batches), trainable_s, sum(lengths), computed - sum(lengths))


def one_row(sequences: Items[Sequence]) -> MicroBatch:
    """A micro-batch of one row with these sequences in their order."""
    places = [sequence.trainable_places() for sequence in sequences]
    lengths = [sequence.tokens - 1 for sequence in sequences]
    offsets = [0]
    for place in places:
        offsets.append(offsets[-1] + len(place))
    return _micro_batch([list(range(len(sequences)))], sequences, places, lengths, offsets)


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


def _micro_batch(
    rows: list[list[int]],
    sequences: Items[Sequence],
    places: list[list[int]],
    lengths: list[int],
    offsets: list[int],
) -> MicroBatch:
    width = max(sum(lengths[index] for index in row) for row in rows)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    predict_at: list[int] = []
    target: list[int] = []
    flat: list[int] = []
    owner: list[int] = []
    for number, row in enumerate(rows):
        row_ids: list[int] = []
        row_positions: list[int] = []
        for index in row:
            sequence, length = sequences[index], lengths[index]
            start = number * width + len(row_ids)
            row_ids.extend([*sequence.prompt, *sequence.completion][:length])
            row_positions.extend(range(length))
            first = start + len(sequence.prompt) - 1
            predict_at.extend(first + place for place in places[index])
            target.extend(sequence.completion[place] for place in places[index])
            flat.extend(range(offsets[index], offsets[index + 1]))
            owner.extend([index] * len(places[index]))
        # Only rows with one sequence are padded. Attention is causal, so no token attends to the padding. The positions of
        # the padding continue the sequence, so that transformers does not detect packing and the kernel needs no mask.
        padding = range(len(row_ids), width)
        row_ids.extend([0] * len(padding))
        row_positions.extend(padding)
        ids.append(row_ids)
        positions.append(row_positions)
    return MicroBatch(
        torch.tensor(ids, dtype=torch.long),
        torch.tensor(positions, dtype=torch.long),
        torch.tensor(predict_at, dtype=torch.long),
        torch.tensor(target, dtype=torch.long),
        torch.tensor(flat, dtype=torch.long),
        torch.tensor(owner, dtype=torch.long),
    )
