"""Packs sequences into rows and rows into micro-batches, and maps tokens to a flat order.

A row can have several sequences. Positions restart at 0 with each, from which transformers infers their boundaries without
an attention mask (``sdpa``: block-diagonal masks, for any number of rows; ``flash_attention_2``: variable-length kernels, for
one row at a time). The packed log-probabilities therefore equal those of each sequence alone.

The layout depends on the kernel. Variable-length kernels skip pairs of different sequences, so sequences share rows. With
``sdpa`` a shared row of T tokens costs T² and a mask, so each sequence gets a separate row, and rows of similar length form a
micro-batch, with little padding and without a mask. There a prompt can also be computed once for all of its completions, whose rows
then begin with its last token. Each of those rows has the prompt's keys and values, and a mask as wide as both, so against the limit of a
micro-batch it counts with its prompt, as a row without this does: the layout saves computation, not memory.

Shapes: ``b`` row of a micro-batch, ``t`` position in the row, ``n`` trainable token in flat order (sequence after
sequence, left to right), ``s`` sequence, ``m`` trainable token of one micro-batch, ``r`` sequence of a micro-batch in the order
of its rows. There is no Python loop over tokens.

:mod:`.train_batch` packs and checks a rank's shard.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch

from scalerl_trainer import row_layout
from scalerl_trainer.errors import BadBatchError, SequenceTooLongError
from scalerl_trainer.row_layout import Ints

_MICRO_BATCH_POSITIONS = 256
"""What a micro-batch costs beyond its positions, in positions."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts that the generator's routers chose for some tokens of a sequence (:mod:`.models.router_replay`)."""

    positions: Ints
    """Of the tokens in prompt and completion, ascending, shape ``[known]``."""
    experts: Ints
    """Shape ``[known, layers, chosen]``, uint8 or int16."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A prompt and one completion, as token ids."""

    prompt: Items[int] | Ints
    completion: Items[int] | Ints
    trainable: Items[bool] | Ints | None = None
    """For each completion token, whether the policy sampled it; None if it sampled all."""
    routed: RoutedExperts | None = None
    """None without a record."""

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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one forward pass, int64 but for the experts."""

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
    experts_xlk: torch.Tensor | None = None
    """Experts that the generator chose at each flattened position, ``[B * T, layers, chosen]``, uint8 or int16; None if it recorded
    none."""
    known_x: torch.Tensor | None = None
    """Bool, whether a flattened position has some."""
    prompts_gp: torch.Tensor | None = None
    """Prompts without their last tokens, each of which precedes the rows of ``prompt_b``; None if rows have their prompts."""
    prompt_b: torch.Tensor | None = None
    """Index of each row's prompt."""

    @property
    def computed(self) -> int:
        """Number of computed positions."""
        return self.input_ids_bt.numel() + (0 if self.prompts_gp is None else self.prompts_gp.numel())


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
    routed: int = 0
    """Computed tokens with recorded experts."""

    @property
    def trainable(self) -> int:
        """Number of trainable tokens of the batch, N."""
        return int(self.trainable_s.sum())


def pack(
    sequences: Items[Sequence], micro_batch_tokens: int, *, shared_rows: bool, shared_prompts: bool = False
) -> PackedBatch:
    """Pack sequences into micro-batches of at most ``micro_batch_tokens`` positions. Deterministic; sequences are not split.

    With ``shared_rows``, a micro-batch is one row, packed by first-fit-decreasing, fullest first. Without, a row has one
    sequence, and a micro-batch has as many rows as fit when padded to its longest, longest first. Positions after the last
    prediction are left out: the last token of a sequence, and whole sequences without trainable tokens. With ``shared_prompts``, which
    is for such rows, equal prompts of a micro-batch are computed once, where that leaves less to compute; not with recorded experts,
    which are by position of whole rows.

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
    spared = 0
    if shared_rows:
        groups = [[row] for row in row_layout.first_fit_decreasing(lengths, micro_batch_tokens)]
        micro_batches = [_micro_batch(group, tokens, length_s) for group in groups]
    else:
        alike_s = np.zeros_like(some_s)
        if shared_prompts and not any(tokens.routed_s):
            alike_s = row_layout.pays(
                tokens.by_prompt(length_s), tokens.prompt_s, length_s, micro_batch_tokens
            )
        micro_batches, spared = _rows(tokens, length_s, alike_s, micro_batch_tokens)
    needed, computed = sum(lengths) - spared, sum(micro.computed for micro in micro_batches)
    routed = sum(int(micro.known_x.sum()) for micro in micro_batches if micro.known_x is not None)
    return PackedBatch(
        tuple(micro_batches), torch.from_numpy(tokens.trainable_s), needed, computed - needed, routed
    )


def _rows(
    tokens: _Tokens, length_s: Ints, alike_s: Ints, micro_batch_tokens: int
) -> tuple[list[MicroBatch], int]:
    """Micro-batches of rows of one sequence each, those of ``alike_s`` after their prompts where that pays; and the number of tokens
    that it spares."""

    def plain(some_s: Ints) -> list[MicroBatch]:
        groups = row_layout.by_length(np.where(some_s, length_s, 0).tolist(), micro_batch_tokens)
        return [_micro_batch(group, tokens, length_s) for group in groups]

    if alike_s.any():
        some_s = np.where(alike_s, length_s, 0)
        groups = row_layout.by_prompt(tokens.by_prompt(some_s), tokens.prompt_s, some_s, micro_batch_tokens)
        found = [_after_prompts(rows, tokens, length_s) for rows in groups]
        if _cost(found) < row_layout.PAYS * _cost(plain(alike_s)):
            spared = sum(
                (len(micro.prompt_b) - len(micro.prompts_gp)) * micro.prompts_gp.shape[1]
                for micro in found
                if micro.prompts_gp is not None and micro.prompt_b is not None
            )
            return found + plain(~alike_s), spared
    return plain(np.ones_like(alike_s)), 0


def _cost(micro_batches: list[MicroBatch]) -> int:
    """Of a forward pass, in positions."""
    return sum(micro.computed + _MICRO_BATCH_POSITIONS for micro in micro_batches)


def one_row(sequences: Items[Sequence]) -> MicroBatch:
    """A micro-batch of one row with these sequences in their order."""
    length_s = np.array([sequence.tokens - 1 for sequence in sequences])
    return _micro_batch([list(range(len(sequences)))], _Tokens.of(sequences), length_s)


def after_prompt(sequences: Items[Sequence]) -> MicroBatch:
    """A micro-batch in which these sequences follow one computation of their prompt, which is that of all."""
    length_s = np.array([sequence.tokens - 1 for sequence in sequences])
    return _after_prompts([list(range(len(sequences)))], _Tokens.of(sequences), length_s)


def _after_prompts(groups: list[list[int]], tokens: _Tokens, length_s: Ints) -> MicroBatch:
    """Rows of what follows prompts of equal length, and these without their last tokens once each; whole rows if each prompt has one."""
    first_g = tokens.start_s[[group[0] for group in groups]]
    before = int(tokens.prompt_s[groups[0][0]]) - 1 if any(len(group) > 1 for group in groups) else 0
    micro = _micro_batch([[index] for group in groups for index in group], tokens, length_s, before)
    if not before:
        return micro
    prompts_gp = torch.from_numpy(tokens.ids[first_g[:, None] + np.arange(before)])
    prompt_b = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return replace(micro, prompts_gp=prompts_gp, prompt_b=torch.from_numpy(prompt_b))


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
    routed_s: Items[RoutedExperts | None]

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
            [s.routed for s in sequences],
        )

    def by_prompt(self, length_s: Ints) -> list[list[int]]:
        """The sequences of each prompt, in order. Length 0 is left out."""
        found: dict[bytes, list[int]] = {}
        for index in np.flatnonzero(length_s).tolist():
            start = self.start_s[index]
            found.setdefault(self.ids[start : start + self.prompt_s[index]].tobytes(), []).append(index)
        return list(found.values())


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


def _micro_batch(rows: list[list[int]], tokens: _Tokens, length_s: Ints, before: int = 0) -> MicroBatch:
    """Rows of sequences, each without its first ``before`` tokens."""
    sequence_r = np.array([index for row in rows for index in row], dtype=np.int64)
    size_b = np.array([len(row) for row in rows])
    length_r, trainable_r = length_s[sequence_r] - before, tokens.trainable_s[sequence_r]
    end_r = _starts(length_r)
    before_b = end_r[_starts(size_b)]  # positions of the rows before each
    width = int(np.diff(before_b).max())
    # Of each sequence's first token, in the flattened rows.
    start_r = end_r[:-1] + np.repeat(np.arange(len(rows)) * width - before_b[:-1], size_b)
    at = _ranges(start_r, length_r)
    ids = np.zeros(len(rows) * width, np.int64)
    ids[at] = tokens.ids[_ranges(tokens.start_s[sequence_r] + before, length_r)]
    # Only rows with one sequence are padded. Attention is causal, so no token attends to the padding. The positions of
    # the padding continue the sequence, so that transformers does not detect packing and the kernel needs no mask.
    positions = np.tile(np.arange(width), len(rows))
    positions[at] = _ranges(np.zeros_like(length_r), length_r)
    flat_m = _ranges(tokens.offset_s[sequence_r], trainable_r)
    sequence_m = np.repeat(sequence_r, trainable_r)
    completion_m = tokens.start_s[sequence_m] + tokens.prompt_s[sequence_m]
    place_m = tokens.place_n[flat_m]
    predict_at_m = np.repeat(start_r + tokens.prompt_s[sequence_r] - 1 - before, trainable_r) + place_m
    routed_r = [tokens.routed_s[sequence] for sequence in sequence_r]
    return MicroBatch(
        torch.from_numpy(ids.reshape(len(rows), width)),
        torch.from_numpy(positions.reshape(len(rows), width) + before),
        torch.from_numpy(predict_at_m),
        torch.from_numpy(tokens.ids[completion_m + place_m]),
        torch.from_numpy(flat_m),
        torch.from_numpy(sequence_m),
        *_experts(routed_r, start_r, length_r, len(ids)),
    )


def _experts(
    routed_r: Items[RoutedExperts | None], start_r: Ints, length_r: Ints, positions: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """``experts_xlk`` and ``known_x`` of a micro-batch."""
    given = [routed for routed in routed_r if routed is not None]
    if not given:
        return None, None
    kind = np.result_type(*(routed.experts.dtype for routed in given))
    experts_xlk = np.zeros((positions, *given[0].experts.shape[1:]), kind)
    known_x = np.zeros(positions, np.bool_)
    for routed, start, length in zip(routed_r, start_r, length_r, strict=True):
        if routed is not None:
            count = np.searchsorted(routed.positions, length)
            at = start + routed.positions[:count]
            experts_xlk[at], known_x[at] = routed.experts[:count], True
    return torch.from_numpy(experts_xlk), torch.from_numpy(known_x)


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on ``device``. The host waits for no copy of its own memory: one from memory that can be paged, or which changes the
    dtype, would wait for all that runs before it."""
    tensor = tensor if dtype is None else tensor.to(dtype)
    if tensor.device.type == "cpu" and device.type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
