"""From wire bytes to tensors: ranks agree on the whole step, and each takes its shard."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.errors import BadBatchError, DivergedError
from scalerl_trainer.publish.probe import (
    MIN_COMPARED_TOKENS,
    MIN_PROBED_TOKENS,
    PROBE_TOKENS,
    START_SEQUENCES,
    probe_sequences,
    start_sequences,
)
from scalerl_trainer.shard_conversion import Staleness, check_logprobs, rank_batch, recorded

STEP = 7


def make_step(seed: int, groups: int, samples: int) -> tuple[list[wire.GroupMeta], list[wire.Sequence]]:
    random = np.random.default_rng(seed)
    metas, sequences = [], []
    for group in range(groups):
        scores = random.integers(0, 2, samples).astype(float).tolist()
        lengths = random.integers(1, 9, samples).tolist()
        filtered = len(set(scores)) == 1
        metas.append(
            wire.GroupMeta(
                slot=group, scores=scores, rewards=scores, completion_tokens=lengths, filtered=filtered
            )
        )
        if not filtered:
            sequences += [sequence(random, group, sample, lengths[sample]) for sample in range(samples)]
    return metas, sequences


def sequence(random: Any, group: int, sample: int, tokens: int) -> wire.Sequence:
    middle = int(random.integers(0, tokens + 1))
    spans = [wire.VersionSpan(STEP - 2, 0), wire.VersionSpan(STEP, middle)]
    return wire.Sequence(
        group=group,
        sample=sample,
        prompt_token_ids=random.integers(0, 99, int(random.integers(1, 5))).astype("<i4").tobytes(),
        token_ids=random.integers(0, 99, tokens).astype("<i4").tobytes(),
        logprobs=(-random.random(tokens)).astype("<f4").tobytes(),
        versions=spans,
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), groups=st.integers(1, 6), samples=st.integers(2, 5), world=st.integers(1, 4))
def test_rank_batches_sum_to_whole_step(seed: int, groups: int, samples: int, world: int) -> None:
    metas, sequences = make_step(seed, groups, samples)
    recipe = RecipeSpec()
    whole = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=sequences), recipe)
    shares = [
        rank_batch(wire.Shard(step=STEP, groups=metas, sequences=sequences[rank::world]), recipe)
        for rank in range(world)
    ]
    for rank, share in enumerate(shares):
        assert share.stats == whole.stats
        torch.testing.assert_close(share.batch.weights_s, whole.batch.weights_s[rank::world], rtol=0, atol=0)
        torch.testing.assert_close(
            share.batch.advantages_s, whole.batch.advantages_s[rank::world], rtol=0, atol=0
        )
    assert sum((s.staleness for s in shares), Staleness()) == whole.staleness
    if sequences:
        lengths = torch.tensor([len(s.token_ids) // 4 for s in sequences])
        assert float((whole.batch.weights_s * lengths).sum()) == pytest.approx(1.0)
        assert float(whole.batch.advantages_s.square().mean()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("unusable", "ends"), [(0, False), (10, False), (11, True), (20, True)])
def test_check_logprobs_ends_training_above_half(unusable: int, ends: bool) -> None:
    """Of the tokens of all groups, filtered ones included: a policy without numbers solves nothing."""
    lengths = {"completion_tokens": [4, 6], "scores": [0.0, 0.0], "rewards": [0.0, 0.0]}
    metas = [
        wire.GroupMeta(slot=0, filtered=True, unusable_tokens=min(unusable, 10), **lengths),
        wire.GroupMeta(slot=1, filtered=False, unusable_tokens=max(0, unusable - 10), **lengths),
    ]
    shard = wire.Shard(step=STEP, groups=metas, sequences=[])
    if ends:
        with pytest.raises(DivergedError, match=rf"{unusable} of the 20 tokens of step 7 are not finite"):
            check_logprobs(shard)
    else:
        check_logprobs(shard)
    check_logprobs(wire.Shard(step=STEP, groups=[], sequences=[]))


def routed_step(*records: wire.RoutedExperts | None) -> wire.Shard:
    """A step of one group of completions of four tokens, with prompts of two."""
    count = len(records)
    scores = [float(i % 2) for i in range(count)]
    lengths = {"completion_tokens": [4] * count, "scores": scores, "rewards": scores}
    sequences = [
        wire.Sequence(
            group=0,
            sample=at,
            prompt_token_ids=np.array([1, 2], "<i4").tobytes(),
            token_ids=np.array([3, 4, 5, 6], "<i4").tobytes(),
            logprobs=np.full(4, -1, "<f4").tobytes(),
            versions=[wire.VersionSpan(STEP, 0)],
            routed=record,
        )
        for at, record in enumerate(records)
    ]
    return wire.Shard(
        step=STEP, groups=[wire.GroupMeta(slot=0, filtered=False, **lengths)], sequences=sequences
    )


@pytest.mark.parametrize("kind", ["u1", "<u2"])
def test_rank_batch_reads_recorded_experts(kind: str) -> None:
    table = np.arange(18, dtype=kind).reshape(3, 2, 3)
    record = wire.RoutedExperts(layers=2, chosen=3, spans=[(0, 1), (3, 5)], experts=table.tobytes())
    first, second = rank_batch(routed_step(record, None), RecipeSpec(), router_replay=True).batch.sequences
    assert second.routed is None
    assert first.routed is not None
    assert first.routed.positions.tolist() == [0, 3, 4]
    assert first.routed.experts.tolist() == table.tolist()
    (unset,) = rank_batch(routed_step(record), RecipeSpec()).batch.sequences
    assert unset.routed is None


@pytest.mark.parametrize(
    ("spans", "size", "layers"),
    [([(0, 7)], 42, 2), ([(-1, 1)], 12, 2), ([(2, 4), (1, 2)], 18, 2), ([(0, 2)], 13, 2), ([(0, 2)], 0, 0)],
)
def test_rank_batch_refuses_experts_of_other_positions(
    spans: list[tuple[int, int]], size: int, layers: int
) -> None:
    record = wire.RoutedExperts(layers=layers, chosen=3, spans=spans, experts=bytes(size))
    with pytest.raises(BadBatchError, match=r"step 7, group 0, sample 1: .* bytes of experts"):
        rank_batch(routed_step(None, record), RecipeSpec(), router_replay=True)


def test_rank_batch_refuses_experts_of_two_models() -> None:
    records = (wire.RoutedExperts(layers=n, chosen=2, spans=[(0, 1)], experts=bytes(2 * n)) for n in (2, 3))
    with pytest.raises(BadBatchError, match="experts of several models"):
        rank_batch(routed_step(*records), RecipeSpec(), router_replay=True)


def test_rank_batch_aligns_tokens_logprobs_and_freshness() -> None:
    metas, sequences = make_step(3, 4, 3)
    batch = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=sequences), RecipeSpec()).batch
    assert [list(s.completion) for s in batch.sequences] == [
        np.frombuffer(s.token_ids, "<i4").tolist() for s in sequences
    ]
    assert [list(s.prompt) for s in batch.sequences] == [
        np.frombuffer(s.prompt_token_ids, "<i4").tolist() for s in sequences
    ]
    flat = np.concatenate([np.frombuffer(s.logprobs, "<f4") for s in sequences])
    assert batch.generator_logprobs_n is not None
    assert batch.generator_logprobs_n.tolist() == flat.tolist()
    # The KV cache of a completion that older weights began contains their states.
    fresh = [s.versions[1].start == 0 for s in sequences for _ in range(len(s.token_ids) // 4)]
    assert batch.fresh_n is not None
    assert batch.fresh_n.tolist() == fresh


def test_rank_batch_freshness_ends_at_first_older_version() -> None:
    metas = [
        wire.GroupMeta(
            slot=0, scores=[0.0, 1.0], rewards=[0.0, 1.0], completion_tokens=[4, 4], filtered=False
        )
    ]
    spans = [[wire.VersionSpan(STEP, 0), wire.VersionSpan(STEP + 1, 3)], [wire.VersionSpan(STEP - 1, 0)]]
    sequences = [
        msgspec.structs.replace(sequence(np.random.default_rng(1), 0, at, 4), versions=spans[at])
        for at in range(2)
    ]
    made = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=sequences), RecipeSpec())
    assert made.staleness == Staleness(
        tokens=8, total=4, largest=1
    )  # a version of a lost lineage is not newer than its step
    batch = made.batch
    assert batch.fresh_n is not None
    assert batch.fresh_n.tolist() == [True, True, True, False, False, False, False, False]
    shard = wire.Shard(step=STEP, groups=metas, sequences=sequences, ambiguous=True)
    lost = rank_batch(shard, RecipeSpec()).batch.fresh_n
    assert lost is not None
    assert not lost.any()


def test_rank_batch_golden_advantages_and_weights() -> None:
    metas = [
        wire.GroupMeta(
            slot=0, scores=[1.0, 0.0], rewards=[1.0, 0.0], completion_tokens=[3, 1], filtered=False
        ),
        wire.GroupMeta(
            slot=1, scores=[1.0, 1.0], rewards=[0.5, 0.5], completion_tokens=[2, 2], filtered=True
        ),
        wire.GroupMeta(
            slot=2, scores=[0.0, 1.0], rewards=[0.0, 1.0], completion_tokens=[2, 2], filtered=False
        ),
    ]
    random = np.random.default_rng(0)
    # This rank has the second of group 0 and the first of group 2.
    sequences = [sequence(random, 0, 1, 1), sequence(random, 2, 0, 2)]
    done = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=sequences), RecipeSpec())
    # Rewards ±1, centred ±1, and their root mean square over the unfiltered groups is 1.
    assert done.batch.advantages_s.tolist() == pytest.approx([-1.0, -1.0], abs=1e-5)
    # Prompt average over two prompts of four tokens each.
    assert done.batch.weights_s.tolist() == [1 / 8, 1 / 8]
    assert done.stats["reward_mean"] == pytest.approx(4 / 6)
    assert done.stats["shaped_reward_mean"] == pytest.approx(3 / 6)
    assert done.stats["filtered_fraction"] == pytest.approx(1 / 3)


def test_rank_batch_staleness_by_token() -> None:
    metas = [
        wire.GroupMeta(
            slot=0, scores=[1.0, 0.0], rewards=[1.0, 0.0], completion_tokens=[5, 1], filtered=False
        )
    ]
    spans = [wire.VersionSpan(4, 0), wire.VersionSpan(6, 2), wire.VersionSpan(7, 4)]
    one = wire.Sequence(
        group=0,
        sample=0,
        prompt_token_ids=b"\1\0\0\0",
        token_ids=bytes(20),
        logprobs=bytes(20),
        versions=spans,
    )
    done = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=[one]), RecipeSpec())
    assert done.staleness == Staleness(tokens=5, total=3 + 3 + 1 + 1 + 0, largest=3)


def test_rank_batch_ignores_ungraded_completions() -> None:
    metas = [
        wire.GroupMeta(
            slot=0,
            scores=[1.0, 0.0, 0.0],
            rewards=[1.0, 0.0, 0.0],
            completion_tokens=[3, 1, 9],
            filtered=False,
            ungraded=[2],
        ),
        wire.GroupMeta(slot=1, scores=[], rewards=[], completion_tokens=[], filtered=True),
        wire.GroupMeta(
            slot=2, scores=[0.0, 1.0], rewards=[0.0, 1.0], completion_tokens=[2, 2], filtered=False
        ),
    ]
    random = np.random.default_rng(0)
    sequences = [sequence(random, 0, 1, 1), sequence(random, 2, 0, 2)]
    done = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=sequences), RecipeSpec())
    # As in the golden test, where the third completion was never there.
    assert done.batch.advantages_s.tolist() == pytest.approx([-1.0, -1.0], abs=1e-5)
    assert done.batch.weights_s.tolist() == [1 / 8, 1 / 8]
    assert done.stats["reward_mean"] == pytest.approx(0.5)
    assert done.stats["ungraded_completions"] == 1
    bad = [sequence(random, 0, 2, 9)]
    with pytest.raises(BadBatchError, match="no verdict"):
        rank_batch(wire.Shard(step=STEP, groups=metas, sequences=bad), RecipeSpec())


def test_rank_batch_ignores_masked_tokens() -> None:
    metas = [
        wire.GroupMeta(
            slot=0,
            scores=[1.0, 0.0],
            rewards=[1.0, 0.0],
            completion_tokens=[5, 2],
            filtered=False,
            masked_tokens=[2, 0],
        )
    ]
    spans = [wire.VersionSpan(4, 0), wire.VersionSpan(wire.MASKED, 1), wire.VersionSpan(7, 3)]
    logprobs = np.array([-1, 0, 0, -4, -5], dtype="<f4")
    one = wire.Sequence(
        group=0,
        sample=0,
        prompt_token_ids=b"\1\0\0\0",
        token_ids=bytes(20),
        logprobs=logprobs.tobytes(),
        versions=spans,
    )
    shard = wire.Shard(step=STEP, groups=metas, sequences=[one])
    done = rank_batch(shard, RecipeSpec())
    trainable = done.batch.sequences[0].trainable
    assert trainable is not None
    assert list(trainable) == [True, False, False, True, True]
    assert done.batch.generator_logprobs_n is not None
    assert done.batch.fresh_n is not None
    assert done.batch.generator_logprobs_n.tolist() == [-1, -4, -5]
    assert done.batch.fresh_n.tolist() == [False, False, False]
    assert done.staleness == Staleness(tokens=3, total=3, largest=3)
    assert done.batch.weights_s.tolist() == pytest.approx([1 / 5])  # of 3 + 2 tokens
    assert probe_sequences(shard, 8, 100) == []
    one = msgspec.structs.replace(one, versions=[wire.VersionSpan(4, 0)])
    with pytest.raises(BadBatchError, match="5 tokens are not masked, 3 announced"):
        rank_batch(wire.Shard(step=STEP, groups=metas, sequences=[one]), RecipeSpec())


def test_rank_batch_of_step_without_groups() -> None:
    metas = [wire.GroupMeta(slot=0, scores=[], rewards=[], completion_tokens=[], filtered=True)]
    done = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=[]), RecipeSpec())
    assert len(done.batch.sequences) == 0
    assert done.stats == {"filtered_fraction": 1.0, "ungraded_completions": 0.0}


def test_rank_batch_of_step_with_filtered_groups_only() -> None:
    metas = [
        wire.GroupMeta(slot=0, scores=[1.0, 1.0], rewards=[1.0, 1.0], completion_tokens=[5, 1], filtered=True)
    ]
    done = rank_batch(wire.Shard(step=STEP, groups=metas, sequences=[]), RecipeSpec())
    assert len(done.batch.sequences) == 0
    assert done.stats["filtered_fraction"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": bytes(4)}, "announced"),
        ({"logprobs": bytes(4)}, "log-probabilities"),
        ({"versions": []}, "spans"),
        ({"versions": [wire.VersionSpan(1, 1)]}, "spans"),
        ({"versions": [wire.VersionSpan(1, 0), wire.VersionSpan(2, 9)]}, "spans"),
    ],
)
def test_rank_batch_inconsistent_shard_raises(change: dict[str, Any], message: str) -> None:
    metas = [
        wire.GroupMeta(
            slot=0, scores=[1.0, 0.0], rewards=[1.0, 0.0], completion_tokens=[2, 1], filtered=False
        )
    ]
    fields: dict[str, Any] = {
        "group": 0,
        "sample": 0,
        "prompt_token_ids": bytes(4),
        "token_ids": bytes(8),
        "logprobs": bytes(8),
        "versions": [wire.VersionSpan(1, 0)],
    }
    shard = wire.Shard(step=STEP, groups=metas, sequences=[wire.Sequence(**(fields | change))])
    with pytest.raises(BadBatchError, match=message):
        rank_batch(shard, RecipeSpec())


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 16_000)), min_size=1, max_size=24, unique=True
    )
)
def test_probe_has_the_longest_sequence_whole_and_beginnings_of_others(
    lengths: list[tuple[int, int]],
) -> None:
    sequences = [
        wire.Sequence(
            group=0,
            sample=i,
            prompt_token_ids=np.full(prompt, i, "<i4").tobytes(),
            token_ids=np.arange(completion, dtype="<i4").tobytes(),
            logprobs=np.zeros(completion, "<f4").tobytes(),
            versions=[wire.VersionSpan(STEP, 0)],
        )
        for i, (prompt, completion) in enumerate(lengths)
    ]
    chosen = probe_sequences(wire.Shard(step=STEP, groups=[], sequences=sequences), 24, 20_000)
    if sum(completion for _, completion in lengths) < MIN_COMPARED_TOKENS:
        assert chosen == []
        return
    _, whole = max((completion, prompt + completion) for prompt, completion in lengths)
    assert whole in [len(s.token_ids) for s in chosen]
    compared = [len(s.token_ids) - s.prompt_tokens for s in chosen]
    assert sum(compared) >= MIN_COMPARED_TOKENS
    assert (
        sum(len(s.token_ids) for s in chosen) - whole <= PROBE_TOKENS or sum(compared) == MIN_COMPARED_TOKENS
    )
    indices = [int(s.token_ids[0]) for s in chosen]
    assert indices == sorted(set(indices))
    for index, one in zip(indices, chosen, strict=True):
        prompt, completion = lengths[index]
        scored = len(one.token_ids) - one.prompt_tokens
        assert one.prompt_tokens == prompt
        assert scored >= min(completion, MIN_PROBED_TOKENS) or sum(compared) == MIN_COMPARED_TOKENS
        assert one.token_ids[prompt:].tolist() == list(range(scored))
    if sum(sum(length) for length in lengths) - whole <= PROBE_TOKENS:
        assert [len(s.token_ids) for s in chosen] == [sum(length) for length in lengths], "nothing to save"


def test_probe_of_long_sequences_uses_its_tokens() -> None:
    """Eight of 16k: 24k tokens are scored instead of 131k."""
    ids = np.zeros(16_000, "<i4").tobytes()
    one = wire.Sequence(
        group=0,
        sample=0,
        prompt_token_ids=ids[:800],
        token_ids=ids,
        logprobs=ids,
        versions=[wire.VersionSpan(STEP, 0)],
    )
    chosen = probe_sequences(wire.Shard(step=STEP, groups=[], sequences=[one] * 8), 8, 20_000)
    assert sorted(len(s.token_ids) for s in chosen) == [1170, 1170, 1170, 1170, 1170, 1171, 1171, 16_200]


@pytest.mark.parametrize(
    ("completions", "compared"),
    [
        ([1, 5, 2, 3, 5, 4, 1, 2], []),  # 23 tokens are no evidence
        ([9, 20, 11, 12, 10, 15, 13, 14], [9, 20, 11, 12, 10, 2]),
        ([70, 2, 3], [70]),
    ],
)
def test_probe_of_long_prompts_compares_enough_tokens(completions: list[int], compared: list[int]) -> None:
    """Prompts of 9,000 tokens leave no room for another; one sequence alone may compare a single token."""
    prompt = np.zeros(9_000, "<i4").tobytes()
    sequences = [
        wire.Sequence(
            group=0,
            sample=0,
            prompt_token_ids=prompt,
            token_ids=bytes(4 * n),
            logprobs=bytes(4 * n),
            versions=[wire.VersionSpan(STEP, 0)],
        )
        for n in completions
    ]
    chosen = probe_sequences(wire.Shard(step=STEP, groups=[], sequences=sequences), 8, 20_000)
    assert [len(s.token_ids) - s.prompt_tokens for s in chosen] == compared


def test_probe_sequences_are_evenly_spaced() -> None:
    metas, sequences = make_step(1, 6, 4)
    shard = wire.Shard(step=STEP, groups=metas, sequences=sequences)
    chosen = probe_sequences(shard, 3, 100, 1)
    assert len(chosen) == 3
    assert chosen[0].token_ids.tobytes() == sequences[0].prompt_token_ids + sequences[0].token_ids
    assert chosen[0].prompt_tokens == len(sequences[0].prompt_token_ids) // 4
    assert len(probe_sequences(shard, 1000, 100, 1)) == len(sequences)
    assert probe_sequences(shard, 0, 100, 1) == []
    lengths = sorted(len(s.prompt_token_ids + s.token_ids) // 4 for s in sequences)
    # A server refuses a prompt that fills its context, and one such sequence would fail the whole probe.
    assert max(len(s.token_ids) for s in probe_sequences(shard, 1000, lengths[-1], 1)) < lengths[-1]


def test_sequences_of_the_start_are_bounded_and_may_be_few() -> None:
    metas, sequences = make_step(1, 6, 4)
    few = wire.Shard(step=0, groups=metas, sequences=sequences[:1])
    (one,) = start_sequences(few, 100)
    assert [one.prompt, one.completion] == [
        np.frombuffer(ids, "<i4").tolist() for ids in (sequences[0].prompt_token_ids, sequences[0].token_ids)
    ]
    ids = np.zeros(4_000, "<i4").tobytes()
    long = msgspec.structs.replace(sequences[0], prompt_token_ids=ids[:400], token_ids=ids, logprobs=ids)
    chosen = start_sequences(wire.Shard(step=0, groups=metas, sequences=[long] * 200), 20_000)
    assert len(chosen) == START_SEQUENCES
    assert sum(one.tokens for one in chosen) <= PROBE_TOKENS + 4_100


# --- distillation -----------------------------------------------------------------------------


def distilled(rewards: str = "Ignored") -> RecipeSpec:
    given = {"teacher": {"url": "http://teacher:8000"}, "rewards": rewards}
    return RecipeSpec.model_validate({"distillation": given})


def taught_shard(tokens: int = 4) -> wire.Shard:
    """Two completions of 4 tokens, of which the second has two masked ones in its middle. The teacher scored ``tokens``."""
    meta = wire.GroupMeta(
        slot=0,
        scores=[0.0, 1.0],
        rewards=[-1.0, 1.0],
        completion_tokens=[4, 4],
        filtered=False,
        masked_tokens=[0, 2],
    )
    spans = [
        [wire.VersionSpan(STEP, 0)],
        [wire.VersionSpan(STEP, 0), wire.VersionSpan(wire.MASKED, 1), wire.VersionSpan(STEP, 3)],
    ]
    theirs = [[-1.0, -2.0, -3.0, -4.0], [-5.0, 0.0, 0.0, -6.0]]
    sequences = [
        msgspec.structs.replace(
            sequence(np.random.default_rng(1), 0, at, 4),
            versions=spans[at],
            teacher_logprobs=np.array(theirs[at][:tokens], "<f4").tobytes(),
        )
        for at in range(2)
    ]
    return wire.Shard(step=STEP, groups=[meta], sequences=sequences)


def test_teacher_logprobs_are_of_the_trained_tokens() -> None:
    batch = rank_batch(taught_shard(), distilled()).batch
    assert batch.teacher_logprobs_n is not None
    assert batch.teacher_logprobs_n.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert rank_batch(taught_shard(), RecipeSpec()).batch.teacher_logprobs_n is None


def test_rewards_are_ignored_or_added() -> None:
    assert rank_batch(taught_shard(), distilled()).batch.advantages_s.tolist() == [0.0, 0.0]
    added = rank_batch(taught_shard(), distilled("Added")).batch
    plain = rank_batch(taught_shard(), RecipeSpec()).batch
    assert added.advantages_s.tolist() == plain.advantages_s.tolist() == pytest.approx([-1.0, 1.0], rel=1e-4)


def test_rank_batch_refuses_sequences_without_the_teacher() -> None:
    with pytest.raises(BadBatchError, match="4 tokens, but 0 log-probabilities of the teacher"):
        rank_batch(taught_shard(0), distilled())


def test_recorded_has_the_figures_of_the_recorded_groups() -> None:
    metas, sequences = make_step(3, 4, 3)
    metas = [msgspec.structs.replace(meta, recorded=meta.slot % 2 == 0) for meta in metas]
    shard = wire.Shard(step=STEP, groups=metas, sequences=sequences)
    batch = rank_batch(shard, RecipeSpec()).batch
    lengths = [metas[one.group].trained_tokens[one.sample] for one in sequences]
    differences_n = torch.linspace(-2.0, 1.0, sum(lengths))
    expected = []
    for own, length, one, advantage in zip(
        differences_n.split(lengths), lengths, sequences, batch.advantages_s.tolist(), strict=True
    ):
        if metas[one.group].recorded:
            size = own.abs()
            figures = (float(size.double().mean()), float(size.max())) if length else (0.0, 0.0)
            values = own.to(torch.float16).numpy().tobytes()
            expected.append((metas[one.group].slot, one.sample, advantage, *figures, values))
    assert 0 < len(expected) < len(sequences)
    found = [msgspec.structs.astuple(one) for one in recorded(shard, batch, differences_n)]
    assert [one[:3] + one[5:] for one in found] == [one[:3] + one[5:] for one in expected]
    assert np.allclose([one[3:5] for one in found], [one[3:5] for one in expected])
    assert recorded(shard, batch, None) == []


def test_recorded_differences_fit_float16() -> None:
    metas, sequences = make_step(1, 1, 3)
    shard = wire.Shard(
        step=STEP, groups=[msgspec.structs.replace(metas[0], recorded=True)], sequences=sequences
    )
    batch = rank_batch(shard, RecipeSpec()).batch
    for one in recorded(shard, batch, torch.full((sum(metas[0].trained_tokens),), -1e6)):
        assert set(np.frombuffer(one.differences, "<f2").tolist()) == {-65504.0}
