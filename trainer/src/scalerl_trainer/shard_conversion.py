"""Converts a rank's shard of a step from the wire to a :class:`TrainBatch`.

Advantages and weights depend on the whole step. Every rank computes them from the same
:class:`~scalerl_api.wire.GroupMeta`, bit-identically and without communication, and takes the entries of its own
sequences. There is no Python loop over tokens.

The coordinator computes the rewards, from score and length (``scalerl_coordinator.rewards``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from scalerl_api import wire
from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.algo.advantages import advantages, turn_advantages
from scalerl_trainer.algo.aggregation import sequence_weights
from scalerl_trainer.errors import BadBatchError, DivergedError
from scalerl_trainer.packing import RoutedExperts, Sequence
from scalerl_trainer.train_batch import TrainBatch

UNUSABLE_FRACTION = 0.5
"""Part of a step's tokens without a finite log-probability above which the run ends. Fewer are left out of the step."""

_LARGEST = float(np.finfo(np.float16).max)

Int32 = np.dtype("<i4")
Float32 = np.dtype("<f4")


@dataclass(frozen=True)
class Staleness:
    """Staleness of a rank's tokens, in steps: training step minus the weight version that sampled the token."""

    tokens: int = 0
    """Number of tokens."""
    total: int = 0
    """Sum over the tokens."""
    largest: int = 0
    """Maximum over the tokens."""

    def __add__(self, other: Staleness) -> Staleness:
        return Staleness(
            self.tokens + other.tokens, self.total + other.total, max(self.largest, other.largest)
        )


@dataclass(frozen=True)
class RankBatch:
    """A rank's batch, with statistics."""

    batch: TrainBatch
    """This rank's shard."""
    staleness: Staleness
    """Staleness of this rank's tokens."""
    stats: dict[str, float]
    """Statistics of the whole step, equal on all ranks."""


@dataclass(frozen=True)
class _Converted:
    """A sequence from the wire, and values of its trained tokens."""

    sequence: Sequence
    trained: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether each token of the completion is trained on."""
    staleness: Staleness
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]
    """Of the generator, of the trained tokens."""
    teacher: np.ndarray[tuple[int], np.dtype[np.float32]]
    """Log-probabilities of the teacher, of the trained tokens; empty without a distillation."""
    fresh: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """As :attr:`TrainBatch.fresh_n`."""


def rank_batch(shard: wire.Shard, recipe: RecipeSpec, *, router_replay: bool = False) -> RankBatch:
    """Convert this rank's shard to a batch.

    Args:
        router_replay: take the recorded experts along; shards may have some of before the field was unset.

    Raises:
        BadBatchError: a sequence is inconsistent with its group, or its lengths are inconsistent.
    """
    advantage_s, weight_s, first = _whole_step(shard.groups, recipe)
    by_turn = _by_turn(shard.groups, recipe)
    has_teacher = recipe.distillation is not None
    converted: list[_Converted] = []
    by_token: list[torch.Tensor] = []
    places: list[int] = []
    for sequence in shard.sequences:
        where = f"step {shard.step}, group {sequence.group}, sample {sequence.sample}"
        meta = shard.groups[sequence.group]
        one = _converted(shard, sequence, where, has_teacher=has_teacher, router_replay=router_replay)
        converted.append(one)
        place = first[sequence.group] + sequence.sample
        places.append(place)
        if by_turn is not None:
            own = by_turn[place]
            if len(own) <= len(sequence.turns) and meta.returns:
                raise BadBatchError(f"{where}: {len(own)} returns for {len(sequence.turns) + 1} turns")
            by_token.append(own[_turns(sequence, one.trained).clamp(max=len(own) - 1)])
            advantage_s[place] = by_token[-1].mean() if len(by_token[-1]) else 0.0
    sequences = [one.sequence for one in converted]
    if len({one.routed.experts.shape[1:] for one in sequences if one.routed is not None}) > 1:
        raise BadBatchError(
            f"step {shard.step}: the generators recorded experts of several models: they must have the same one"
        )
    index_s = torch.tensor(places, dtype=torch.long)
    batch = TrainBatch(
        sequences=sequences,
        weights_s=weight_s[index_s].float(),
        advantages_s=advantage_s[index_s],
        generator_logprobs_n=_joined([one.logprobs for one in converted], Float32),
        fresh_n=_joined([one.fresh for one in converted], np.dtype(np.bool_)),
        teacher_logprobs_n=_joined([one.teacher for one in converted], Float32) if has_teacher else None,
        advantages_n=None if by_turn is None else torch.cat([*by_token, torch.empty(0)]),
    )
    staleness = sum((one.staleness for one in converted), Staleness())
    return RankBatch(batch, staleness, _step_stats(shard.groups))


def _converted(
    shard: wire.Shard, sequence: wire.Sequence, where: str, *, has_teacher: bool, router_replay: bool
) -> _Converted:
    """Check a sequence against its group, and convert it."""
    meta = shard.groups[sequence.group]
    if meta.filtered:
        raise BadBatchError(f"{where}: belongs to a filtered group")
    if sequence.sample in meta.ungraded:
        raise BadBatchError(f"{where}: has no verdict")
    tokens = np.frombuffer(sequence.token_ids, dtype=Int32)
    logprobs = np.frombuffer(sequence.logprobs, dtype=Float32)
    announced = meta.completion_tokens[sequence.sample]
    if not len(tokens) == len(logprobs) == announced:
        raise BadBatchError(
            f"{where}: {len(tokens)} tokens, {len(logprobs)} log-probabilities, {announced} announced"
        )
    version = _versions(sequence, len(tokens), where)
    trained = version != wire.MASKED
    count, announced = int(trained.sum()), meta.trained_tokens[sequence.sample]
    if count != announced:
        raise BadBatchError(f"{where}: {count} tokens are not masked, {announced} announced")
    age = shard.step - version[trained]
    stale = np.maximum(age, 0)  # tokens of a lost lineage may be newer than their step
    prompt = np.frombuffer(sequence.prompt_token_ids, dtype=Int32)
    record = sequence.routed if router_replay else None
    routed = _routed(record, len(prompt) + len(tokens), where)
    return _Converted(
        Sequence(prompt, tokens, None if trained.all() else trained, routed),
        trained,
        Staleness(len(age), int(stale.sum()), int(stale.max(initial=0))),
        logprobs[trained],
        _teacher_logprobs(sequence, len(tokens), where)[trained] if has_teacher else np.empty(0, Float32),
        # A token is fresh only if the current weights sampled all tokens before it too: the KV cache has the states of the
        # weights that sampled those.
        np.logical_and.accumulate((age == 0) & (not shard.ambiguous)),
    )


def _teacher_logprobs(
    sequence: wire.Sequence, tokens: int, where: str
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    logprobs = np.frombuffer(sequence.teacher_logprobs, dtype=Float32)
    if len(logprobs) != tokens:
        raise BadBatchError(f"{where}: {tokens} tokens, but {len(logprobs)} log-probabilities of the teacher")
    return logprobs


def _turns(sequence: wire.Sequence, trained: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> torch.Tensor:
    """The turn of each trained token, from 0."""
    ends = [message.end for message in sequence.turns]
    return torch.from_numpy(np.searchsorted(ends, np.arange(len(trained)), "right")[trained])


def _joined(parts: list[np.ndarray[tuple[int], np.dtype[Any]]], kind: np.dtype[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, kind)]))


def recorded(
    shard: wire.Shard, batch: TrainBatch, differences_n: torch.Tensor | None
) -> list[wire.TrainedSequence]:
    """What this rank computed of the sequences that the record of rollouts has.

    Args:
        differences_n: see :attr:`StepStats.differences_n <.engine.stats.StepStats>`; None if nothing was computed.
    """
    if differences_n is None:
        return []
    differences = differences_n.cpu().numpy()
    found: list[wire.TrainedSequence] = []
    end = 0
    for one, advantage in zip(shard.sequences, batch.advantages_s.tolist(), strict=True):
        meta = shard.groups[one.group]
        begin, end = end, end + meta.trained_tokens[one.sample]
        if meta.recorded:
            own = differences[begin:end]
            size = np.abs(own)
            mean, largest = (float(size.mean(dtype=float)), float(size.max())) if len(own) else (0.0, 0.0)
            by_token = np.clip(own, -_LARGEST, _LARGEST).astype("<f2").tobytes()
            found.append(wire.TrainedSequence(meta.slot, one.sample, advantage, mean, largest, by_token))
    return found


def check_logprobs(shard: wire.Shard) -> None:
    """Check that the generators gave finite log-probabilities for most tokens of the step.

    Raises:
        DivergedError: on all ranks, since it depends on the whole step.
    """
    tokens = sum(sum(group.completion_tokens) for group in shard.groups)
    unusable = sum(group.unusable_tokens for group in shard.groups)
    if unusable > tokens * UNUSABLE_FRACTION:
        raise DivergedError(
            f"the generators' log-probabilities of {unusable} of the {tokens} tokens of step {shard.step} are not finite numbers, "
            "so there is nothing to train on: the weights have values that are not numbers, or logits beyond the range of "
            "model.dtype. Check the model (model.path, model.hub) and its dtype; the last checkpoint is good if one was written"
        )


def _whole_step(
    groups: list[wire.GroupMeta], recipe: RecipeSpec
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Advantage and weight of every completion of the unfiltered groups, and the offset of each group in both.

    A completion without a verdict has advantage 0 and is excluded from means and standard deviations. With a distillation
    that ignores the rewards, all advantages are 0, and the loss adds the teacher's part.
    """
    kept = [(i, group) for i, group in enumerate(groups) if not group.filtered]
    rewards = [reward for _, group in kept for reward in group.rewards]
    lengths = [tokens for _, group in kept for tokens in group.trained_tokens]
    if len(rewards) != len(lengths):
        raise BadBatchError(f"a step with {len(rewards)} rewards and {len(lengths)} lengths")
    group_s = torch.tensor([i for i, group in kept for _ in group.rewards], dtype=torch.long)
    reward_s = torch.tensor(rewards, dtype=torch.float64)
    graded_s = torch.tensor([i not in g.ungraded for _, g in kept for i in range(len(g.rewards))]).bool()
    advantage_s = torch.zeros(len(rewards))
    settings = recipe.advantage
    if recipe.distillation is None or recipe.distillation.rewards == "Added":
        advantage_s[graded_s] = advantages(
            reward_s[graded_s], group_s[graded_s], settings.normalization, settings.baseline
        )
    weight_s = sequence_weights(
        torch.tensor(lengths, dtype=torch.long), group_s, recipe.aggregation, recipe.max_completion_tokens
    )
    sizes = (0 if group.filtered else len(group.scores) for group in groups)
    return advantage_s, weight_s, [0, *accumulate(sizes)]


def _by_turn(groups: list[wire.GroupMeta], recipe: RecipeSpec) -> list[torch.Tensor] | None:
    """Advantages of the turns of every completion of the unfiltered groups; None if a completion has one advantage.

    A group without returns, from before an edit of the recipe, has one for each completion, of its reward.
    """
    settings, distillation = recipe.advantage, recipe.distillation
    ignored = distillation is not None and distillation.rewards == "Ignored"
    if settings.credit == "Episode" or ignored or not any(group.returns for group in groups):
        return None
    kept = [(at, group) for at, group in enumerate(groups) if not group.filtered]
    returns = [
        one for _, group in kept for one in (group.returns or [[reward + 1] for reward in group.rewards])
    ]
    graded = [sample not in group.ungraded for _, group in kept for sample in range(len(group.rewards))]
    counts = [len(one) if is_graded else 0 for one, is_graded in zip(returns, graded, strict=True)]
    advantage_t = turn_advantages(
        torch.tensor(
            [r for one, n in zip(returns, counts, strict=True) for r in one[:n]], dtype=torch.float64
        ),
        torch.repeat_interleave(torch.tensor(counts)),
        torch.tensor([turn for n in counts for turn in range(n)], dtype=torch.long),
        torch.tensor([at for at, group in kept for _ in group.rewards], dtype=torch.long),
        settings.credit,
        settings.normalization,
        settings.baseline,
    )
    return list(torch.split(advantage_t, counts))


def _versions(sequence: wire.Sequence, tokens: int, where: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The weight version that sampled each token, or :data:`wire.MASKED`; int64 ``[tokens]``."""
    starts = [span.start for span in sequence.versions]
    ends = [*starts[1:], tokens]
    if tokens and (not starts or starts[0] != 0 or any(a > b for a, b in zip(starts, ends, strict=True))):
        raise BadBatchError(f"{where}: version spans start at {starts} in {tokens} tokens")
    lengths = [end - start for start, end in zip(starts, ends, strict=False)]
    versions = np.array([span.version for span in sequence.versions], dtype=np.int64)
    return np.repeat(versions, lengths)


def _routed(routed: wire.RoutedExperts | None, tokens: int, where: str) -> RoutedExperts | None:
    """The experts that the generator recorded, from the wire."""
    if routed is None or not routed.positions:
        return None
    positions = np.concatenate([np.arange(start, end) for start, end in routed.spans])
    shape = len(positions), routed.layers, routed.chosen
    size = math.prod(shape)
    ordered = bool((np.diff(positions) > 0).all()) and positions[0] >= 0 and positions[-1] < tokens
    if not ordered or size == 0 or len(routed.experts) not in (size, 2 * size):
        raise BadBatchError(
            f"{where}: {len(routed.experts)} bytes of experts for the positions {routed.spans} of {tokens}"
        )
    # torch has few operations for uint16, and a number beyond int16 is no expert of any model.
    kind = np.dtype("u1") if len(routed.experts) == size else np.dtype("<i2")
    return RoutedExperts(positions, np.frombuffer(routed.experts, kind).reshape(shape))


def _step_stats(groups: list[wire.GroupMeta]) -> dict[str, float]:
    """Statistics of a step; means are left out if every slot was given up.

    ``reward_*`` are statistics of the scores, in [0, 1]; ``shaped_reward_mean`` is that of the rewards, which depend on the
    length as well.
    """
    rewards = [r for g in groups for i, r in enumerate(g.rewards) if i not in g.ungraded]
    graded = [[s for i, s in enumerate(g.scores) if i not in g.ungraded] for g in groups]
    scores = np.array([score for group in graded for score in group], dtype=np.float64)
    lengths = np.array([n for group in groups for n in group.completion_tokens], dtype=np.int64)
    stats = {
        "filtered_fraction": sum(group.filtered for group in groups) / len(groups),
        "ungraded_completions": float(sum(len(group.ungraded) for group in groups)),
    }
    if len(scores):
        stats |= {"reward_mean": float(scores.mean()), "reward_std": float(scores.std())}
        stats["shaped_reward_mean"] = float(np.mean(rewards))
    if len(lengths):
        stats["completion_tokens_mean"] = float(lengths.mean())
    return stats
