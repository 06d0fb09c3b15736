"""Invariants of every batch: order, sharding and scale do not matter, forced tokens do not count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_trainer.algo.advantages import Normalization, advantages
from scalerl_trainer.algo.aggregation import Aggregation, per_token, sequence_weights
from scalerl_trainer.algo.losses import Cispo, Grpo, Loss, TokenBatch

AGGREGATIONS: list[Aggregation] = ["PromptAverage", "SampleAverage", "TokenAverage"]
NORMALIZATIONS: list[Normalization] = ["Batch", "Group", "None"]
LOSSES: list[Loss] = [Cispo(), Grpo()]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    count = draw(st.integers(1, 10))
    whole = st.integers(0, 6)
    lengths = draw(st.lists(whole, min_size=count, max_size=count))
    groups = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    rewards = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), min_size=count, max_size=count))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    trainer_n = -3 * torch.rand(tokens, generator=generator, dtype=torch.float64)
    return {
        "lengths": torch.tensor(lengths),
        "groups": torch.tensor(groups),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "trainer": trainer_n,
        "generator": trainer_n + torch.randn(tokens, generator=generator, dtype=torch.float64),
    }


def run(
    batch: dict[str, torch.Tensor],
    loss: Loss,
    normalization: Normalization,
    aggregation: Aggregation,
    parts: list[list[int]] | None = None,
    order: list[int] | None = None,
) -> tuple[float, list[torch.Tensor]]:
    """Total loss and each sequence's gradient, computed in ``parts`` of sequences after reordering by ``order``."""
    count = len(batch["lengths"])
    order = order if order is not None else list(range(count))
    pieces = {name: list(batch[name].split(batch["lengths"].tolist())) for name in ("trainer", "generator")}
    lengths_s, group_s, rewards_s = (batch[name][order] for name in ("lengths", "groups", "rewards"))
    advantages_s = advantages(rewards_s, group_s, normalization).double()
    weights_s = sequence_weights(lengths_s, group_s, aggregation)
    total, gradients = 0.0, [torch.zeros(0)] * count
    for part in parts if parts is not None else [list(range(count))]:
        leaves = [pieces["trainer"][order[i]].clone().requires_grad_() for i in part]
        empty = torch.zeros(0, dtype=torch.float64)
        own = lengths_s[part]
        output = loss(
            TokenBatch(
                torch.cat([*leaves, empty]),
                torch.cat([*(pieces["generator"][order[i]] for i in part), empty]),
                per_token(advantages_s[part], own),
                per_token(weights_s[part], own),
                per_token(torch.arange(len(part)), own),
            )
        )
        if part:
            for i, gradient in zip(part, torch.autograd.grad(output.loss, leaves), strict=True):
                gradients[order[i]] = gradient
        total += output.loss.item()
    return total, gradients


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(batch=batches(), data=st.data(), aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=25, deadline=None)
def test_loss_is_invariant_to_sequence_order(
    loss: Loss,
    normalization: Normalization,
    batch: dict[str, torch.Tensor],
    data: st.DataObject,
    aggregation: Aggregation,
) -> None:
    order = data.draw(st.permutations(range(len(batch["lengths"]))))
    value, gradients = run(batch, loss, normalization, aggregation)
    other, moved = run(batch, loss, normalization, aggregation, order=list(order))
    assert other == pytest.approx(value, rel=1e-6, abs=1e-9)
    for a, b in zip(gradients, moved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@given(
    batch=batches(),
    data=st.data(),
    aggregation=st.sampled_from(AGGREGATIONS),
    normalization=st.sampled_from(NORMALIZATIONS),
)
@settings(max_examples=60, deadline=None)
def test_loss_is_invariant_to_split(
    loss: Loss,
    batch: dict[str, torch.Tensor],
    data: st.DataObject,
    aggregation: Aggregation,
    normalization: Normalization,
) -> None:
    count = len(batch["lengths"])
    places = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    parts = [[i for i in range(count) if places[i] == part] for part in range(4)]
    value, gradients = run(batch, loss, normalization, aggregation)
    other, moved = run(batch, loss, normalization, aggregation, parts=parts)
    assert other == pytest.approx(value, rel=1e-9, abs=1e-12)
    for a, b in zip(gradients, moved, strict=True):
        assert torch.equal(a, b)


@given(batch=batches(), scale=st.floats(0.1, 100.0), shift=st.floats(-5.0, 5.0), loss=st.sampled_from(LOSSES))
@settings(max_examples=40, deadline=None)
def test_advantages_are_invariant_to_affine_rewards(
    batch: dict[str, torch.Tensor], scale: float, shift: float, loss: Loss
) -> None:
    changed = {**batch, "rewards": batch["rewards"] * scale + shift}
    for normalization in ("Batch", "Group"):
        _, gradients = run(batch, loss, normalization, "PromptAverage")
        _, others = run(changed, loss, normalization, "PromptAverage")
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@given(batch=batches(), aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=60, deadline=None)
def test_weights_sum_to_one(batch: dict[str, torch.Tensor], aggregation: Aggregation) -> None:
    weights_s = sequence_weights(batch["lengths"], batch["groups"], aggregation)
    expected = 1.0 if int(batch["lengths"].sum()) else 0.0
    assert float((weights_s * batch["lengths"]).sum()) == pytest.approx(expected)
    assert bool((weights_s >= 0).all())


@given(batch=batches(), normalization=st.sampled_from(NORMALIZATIONS))
@settings(max_examples=60, deadline=None)
def test_advantages_of_group_sum_to_zero(
    batch: dict[str, torch.Tensor], normalization: Normalization
) -> None:
    advantages_s = advantages(batch["rewards"], batch["groups"], normalization)
    for group in batch["groups"].unique():
        own = batch["groups"] == group
        assert float(advantages_s[own].sum()) == pytest.approx(0.0, abs=1e-4)
        if len(batch["rewards"][own].unique()) == 1:
            assert advantages_s[own].abs().max().item() < 1e-4
