"""Converts a rank's shard of a step from the wire to a :class:`TrainBatch`.

Advantages and weights depend on the whole step. Every rank computes them from the same
:class:`~scalerl_api.wire.GroupMeta`, bit-identically and without communication, and takes the entries of its own
sequences. There is no Python loop over tokens.

The coordinator computes the rewards, from score and length (``scalerl_coordinator.rewards``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from scalerl_api import wire
from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.algo.advantages import advantages, turn_advantages
from scalerl_trainer.algo.aggregation import sequence_weights
from scalerl_trainer.errors import BadBatchError, DivergedError
from scalerl_trainer.packing import RoutedExperts, Sequence
from scalerl_trainer.publish.probe import MIN_COMPARED_TOKENS, ProbeSequence
from scalerl_trainer.train_batch import TrainBatch

UNUSABLE_FRACTION = 0.5
"""Part of a step's tokens without a finite log-probability above which the run ends. Fewer are left out of the step."""

PROBE_TOKENS = 8192
"""Tokens of a probe besides the sequence with its longest completion, prompts included. A token counts at most ``OUTLIER_LIMITS`` = 20 times the limit, so a mean of k3
at the limit has a standard deviation of at most √(19 / n) of it: 5 % at this n. More only cost time."""
START_SEQUENCES = 32
"""Completions that the weights are compared on with those of the start."""
MIN_PROBED_TOKENS = 64
"""Of a completion, so that most of what is computed is also compared."""

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


def rank_batch(shard: wire.Shard, recipe: RecipeSpec, *, router_replay: bool = False) -> RankBatch:
    """Convert this rank's shard to a batch.

    Args:
        router_replay: take the recorded experts along; shards may have some of before the field was unset.

    Raises:
        BadBatchError: a sequence is inconsistent with its group, or its lengths are inconsistent.
    """
    advantage_s, weight_s, first = _whole_step(shard.groups, recipe)
    by_turn = _by_turn(shard.groups, recipe)
    sequences: list[Sequence] = []
    logprobs: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    teacher: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    fresh: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    by_token: list[torch.Tensor] = []
    places: list[int] = []
    staleness = Staleness()
    for sequence in shard.sequences:
        where = f"step {shard.step}, group {sequence.group}, sample {sequence.sample}"
        meta = shard.groups[sequence.group]
        if meta.filtered:
            raise BadBatchError(f"{where}: belongs to a filtered group")
        if sequence.sample in meta.ungraded:
            raise BadBatchError(f"{where}: has no verdict")
        tokens = np.frombuffer(sequence.token_ids, dtype=Int32)
        scores = np.frombuffer(sequence.logprobs, dtype=Float32)
        if not len(tokens) == len(scores) == meta.completion_tokens[sequence.sample]:
            raise BadBatchError(
                f"{where}: {len(tokens)} tokens, {len(scores)} log-probabilities, "
                f"{meta.completion_tokens[sequence.sample]} announced"
            )
        version = _versions(sequence, len(tokens), where)
        trained = version != wire.MASKED
        if int(trained.sum()) != meta.trained_tokens[sequence.sample]:
            raise BadBatchError(
                f"{where}: {int(trained.sum())} tokens are not masked, "
                f"{meta.trained_tokens[sequence.sample]} announced"
            )
        age = shard.step - version[trained]
        stale = np.maximum(age, 0)  # tokens of a lost lineage may be newer than their step
        staleness += Staleness(len(age), int(stale.sum()), int(stale.max(initial=0)))
        prompt = np.frombuffer(sequence.prompt_token_ids, dtype=Int32)
        record = sequence.routed if router_replay else None
        routed = _routed(record, len(prompt) + len(tokens), where)
        sequences.append(Sequence(prompt, tokens, None if trained.all() else trained, routed))
        logprobs.append(scores[trained])
        if recipe.distillation is not None:
            teacher_logprobs = np.frombuffer(sequence.teacher_logprobs, dtype=Float32)
            if len(teacher_logprobs) != len(tokens):
                raise BadBatchError(
                    f"{where}: {len(tokens)} tokens, but {len(teacher_logprobs)} log-probabilities of the teacher"
                )
            teacher.append(teacher_logprobs[trained])
        # A token is fresh only if the current weights sampled all tokens before it too: the KV cache has the states of the
        # weights that sampled those.
        fresh.append(np.logical_and.accumulate((age == 0) & (not shard.ambiguous)))
        place = first[sequence.group] + sequence.sample
        places.append(place)
        if by_turn is not None:
            turn = np.searchsorted(
                [message.end for message in sequence.turns], np.arange(len(tokens)), "right"
            )
            own = by_turn[place]
            if len(own) <= len(sequence.turns) and meta.returns:
                raise BadBatchError(f"{where}: {len(own)} returns for {len(sequence.turns) + 1} turns")
            by_token.append(own[torch.from_numpy(turn[trained]).clamp(max=len(own) - 1)])
            advantage_s[place] = by_token[-1].mean() if len(by_token[-1]) else 0.0
    if len({one.routed.experts.shape[1:] for one in sequences if one.routed is not None}) > 1:
        raise BadBatchError(
            f"step {shard.step}: the generators recorded experts of several models: they must have the same one"
        )
    index_s = torch.tensor(places, dtype=torch.long)
    batch = TrainBatch(
        sequences=sequences,
        weights_s=weight_s[index_s].float(),
        advantages_s=advantage_s[index_s],
        generator_logprobs_n=torch.from_numpy(np.concatenate([*logprobs, np.empty(0, Float32)])),
        fresh_n=torch.from_numpy(np.concatenate([*fresh, np.empty(0, np.bool_)])),
        teacher_logprobs_n=None
        if recipe.distillation is None
        else torch.from_numpy(np.concatenate([*teacher, np.empty(0, Float32)])),
        advantages_n=None if by_turn is None else torch.cat([*by_token, torch.empty(0)]),
    )
    return RankBatch(batch, staleness, _step_stats(shard.groups))


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


def probe_sequences(
    shard: wire.Shard, count: int, context_tokens: int, min_tokens: int = MIN_COMPARED_TOKENS
) -> list[ProbeSequence]:
    """Up to ``count`` evenly spaced sequences of the shard, for the probe after the next publish. One with masked tokens, as an episode
    of several turns has, ends after the longest part between them, which alone is compared.

    They are shorter than ``context_tokens``: a server scores a sequence as a prompt, which leaves room for one token.
    Of all but one, beginnings suffice; fewer than ``min_tokens`` tokens to compare are no probe (:func:`_shortened`).
    """
    usable = [
        (s, *of)
        for s in shard.sequences
        if (of := _longest_sampled(s))[0] < of[1]
        if len(s.prompt_token_ids) + of[1] * Int32.itemsize < context_tokens * Int32.itemsize
    ]
    chosen = [usable[i * len(usable) // count] for i in range(count)] if len(usable) > count else usable
    return _shortened(
        [
            ProbeSequence(
                np.concatenate(
                    [
                        np.frombuffer(s.prompt_token_ids, dtype=Int32),
                        np.frombuffer(s.token_ids, dtype=Int32)[:end],
                    ]
                ),
                len(s.prompt_token_ids) // Int32.itemsize + start,
            )
            for s, start, end in chosen
        ],
        min_tokens,
    )


def _longest_sampled(sequence: wire.Sequence) -> tuple[int, int]:
    """Start and end, in tokens of the completion, of its longest part without masked tokens."""
    longest, start, tokens = (0, 0), 0, len(sequence.token_ids) // Int32.itemsize
    ends = [*(span.start for span in sequence.versions[1:]), tokens]
    for span, end in zip(sequence.versions, ends, strict=False):
        start = end if span.version == wire.MASKED else start
        longest = max(longest, (start, end), key=lambda part: part[1] - part[0])
    return longest


def start_sequences(shard: wire.Shard, context_tokens: int) -> list[Sequence]:
    """The completions that later weights are compared on with those of the start, chosen as for a probe."""
    return [one.sequence for one in probe_sequences(shard, START_SEQUENCES, context_tokens, min_tokens=1)]


def _shortened(sequences: list[ProbeSequence], min_tokens: int) -> list[ProbeSequence]:
    """The sequence with the longest completion, whole, and of the others beginnings with :data:`PROBE_TOKENS` tokens in total, in
    their order; none if fewer than ``min_tokens`` tokens would be compared.

    The whole one covers all positions, the others as many contents as possible. Shorter ones leave their part to longer ones; one
    whose prompt leaves no room for :data:`MIN_PROBED_TOKENS` of its completion is left out, unless the minimum needs it.
    """
    totals = [len(s.token_ids) for s in sequences]
    prompts = [s.prompt_tokens for s in sequences]
    if sum(totals) - sum(prompts) < min_tokens:
        return []
    whole = max(range(len(sequences)), key=lambda i: (totals[i] - prompts[i], totals[i]))
    others = sorted((i for i in range(len(sequences)) if i != whole), key=totals.__getitem__)
    left, kept, omitted = PROBE_TOKENS, {whole: totals[whole]}, list[int]()
    for rank, i in enumerate(others):
        length = min(totals[i], max(left // (len(others) - rank), prompts[i] + MIN_PROBED_TOKENS))
        if length > left:
            omitted.append(i)
            continue
        left -= length
        kept[i] = length
    missing = min_tokens - sum(length - prompts[i] for i, length in kept.items())
    for i in omitted:
        if missing <= 0:
            break
        kept[i] = min(totals[i], prompts[i] + missing)
        missing -= kept[i] - prompts[i]
    return [replace(sequences[i], token_ids=sequences[i].token_ids[: kept[i]]) for i in sorted(kept)]


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
