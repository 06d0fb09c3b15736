"""The messages of an environment in an episode: the loss depends on them through the context alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl_api import wire
from scalerl_api.recipe import RecipeSpec
from scalerl_trainer.packing import pack
from scalerl_trainer.shard_conversion import rank_batch

VOCABULARY, STEP = 32, 3
Turns = list[tuple[int, int]]
turns = st.lists(st.tuples(st.integers(1, 6), st.integers(2, 6)), min_size=1, max_size=5)
"""Tokens of each reply and of the message after it; the episode ends with a reply of three tokens."""


def shard(of_turns: Turns, seed: int, message_seed: int, by_turn: bool = False) -> wire.Shard:
    """Two episodes with the same replies for a ``seed``, and other messages, but their last tokens, for a ``message_seed``."""
    draw, of_messages = np.random.default_rng(seed), np.random.default_rng(message_seed)
    sequences = []
    for sample in range(2):
        ids, logprobs, spans = list[int](), list[float](), list[wire.VersionSpan]()
        messages = list[wire.MessageSpan]()
        for reply, message in [*of_turns, (3, 0)]:
            spans.append(wire.VersionSpan(STEP, len(ids)))
            ids += draw.integers(0, VOCABULARY, reply).tolist()
            logprobs += (-draw.random(reply)).tolist()
            if message:
                spans.append(wire.VersionSpan(wire.MASKED, len(ids)))
                messages.append(wire.MessageSpan(len(ids), len(ids) + message))
                ids += [
                    *of_messages.integers(0, VOCABULARY, message - 1).tolist(),
                    int(draw.integers(VOCABULARY)),
                ]
                logprobs += [0.0] * message
        sequences.append(
            wire.Sequence(
                group=0,
                sample=sample,
                prompt_token_ids=np.array([1, 2], "<i4").tobytes(),
                token_ids=np.array(ids, "<i4").tobytes(),
                logprobs=np.array(logprobs, "<f4").tobytes(),
                versions=spans,
                turns=messages,
            )
        )
    length, masked = len(ids), sum(message for _, message in of_turns)
    group = wire.GroupMeta(
        slot=0,
        scores=[1.0, 0.0],
        rewards=[1.0, 0.0],
        completion_tokens=[length] * 2,
        filtered=False,
        masked_tokens=[masked] * 2,
        returns=draw.normal(size=(2, len(of_turns) + 1)).tolist() if by_turn else [],
    )
    return wire.Shard(step=STEP, groups=[group], sequences=sequences)


def gradients(of: wire.Shard, *, contextual: bool, credit: str = "Episode") -> list[torch.Tensor]:
    """Of a policy gradient, by the parameters of a model that sees one token, or the mean of all before it."""
    recipe = RecipeSpec.model_validate({"advantage": {"credit": credit}})
    batch = rank_batch(of, recipe).batch
    packed = pack(batch.sequences, 1 << 12, shared_rows=False)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(8, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for micro in packed.micro_batches:
        hidden = embedding[micro.input_ids_bt]
        if contextual:
            hidden = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[None, :, None]
        logits = hidden.flatten(0, 1)[micro.predict_at_m] @ head
        logprobs = logits.log_softmax(-1).gather(1, micro.target_m[:, None])[:, 0]
        assert batch.generator_logprobs_n is not None
        ratio = (logprobs - batch.generator_logprobs_n[micro.flat_m]).exp()
        advantages = batch.advantages_s[micro.sequence_m]
        if batch.advantages_n is not None:
            advantages = batch.advantages_n[micro.flat_m]
        total = total - (ratio * batch.weights_s[micro.sequence_m] * advantages).sum()
    return list(torch.autograd.grad(total, [embedding, head]))


@given(turns, st.integers(0, 10**6), st.sampled_from(["Episode", "Return", "Turn"]))
def test_messages_change_no_gradient_but_through_context(of_turns: Turns, seed: int, credit: str) -> None:
    found = [
        gradients(shard(of_turns, seed, messages, credit != "Episode"), contextual=False, credit=credit)
        for messages in (1, 2)
    ]
    for mine, others in zip(*found, strict=True):
        assert torch.equal(mine, others)


def test_messages_change_gradient_through_context() -> None:
    """The other way round: the property above is not that messages are left out."""
    one, other = shard([(3, 6)], 0, 1), shard([(3, 6)], 0, 2)
    assert not torch.equal(gradients(one, contextual=True)[0], gradients(other, contextual=True)[0])


@given(turns, st.integers(0, 10**6))
def test_only_replies_are_trained(of_turns: Turns, seed: int) -> None:
    of = shard(of_turns, seed, 1)
    packed = pack(rank_batch(of, RecipeSpec()).batch.sequences, 1 << 12, shared_rows=False)
    assert packed.trainable == 2 * (3 + sum(reply for reply, _ in of_turns))
