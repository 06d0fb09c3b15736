"""Invariants of every batch: order, sharding and scale do not matter, forced tokens do not count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scalerl_trainer.algo.advantages import Normalization, advantages
from scalerl_trainer.algo.aggregation import Aggregation, per_token, sequence_weights
from scalerl_trainer.algo.corrections import Corrected, OffPolicyMasked
from scalerl_trainer.algo.distillation import Distilled
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import (
    Cispo,
    Dppo,
    Gspo,
    Loss,
    LossOutput,
    PpoClip,
    Reinforce,
    Supervised,
    TokenBatch,
    is_token_local,
)
from scalerl_trainer.algo.losses.base import check_token_local
from scalerl_trainer.errors import EngineError

AGGREGATIONS: list[Aggregation] = ["PromptAverage", "SampleAverage", "TokenAverage", "Constant"]
NORMALIZATIONS: list[Normalization] = ["Batch", "Group", "None"]
LOSSES: list[Loss] = [
    Cispo(),
    PpoClip(),
    Gspo(0.2, 0.2),
    Reinforce(),
    Dppo(),
    Corrected(PpoClip()),
    Corrected(Reinforce(), above="mask"),
]


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
        "generator": (trainer_n + torch.randn(tokens, generator=generator, dtype=torch.float64)).clamp(max=0),
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
                # A sequence without tokens has no index, as in the engine.
                torch.unique(per_token(torch.arange(len(part)), own), return_inverse=True)[1],
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
    if aggregation == "Constant":
        completions = int((batch["lengths"] > 0).sum())
        assert weights_s.tolist() == [(n > 0) / max(1, completions) for n in batch["lengths"]]
        return
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


# --- gradients and equalities ----------------------------------------------------------------------


def smooth(batch: dict[str, torch.Tensor], loss: Loss) -> bool:
    """Whether no ratio is so close to a limit of ``loss`` that a finite difference would step over it."""
    ratio_n = (batch["trainer"] - batch["generator"]).exp()
    moved_n = (batch["trainer"].exp() - batch["generator"].exp()).abs()
    near = [(ratio_n - limit).abs().lt(1e-3).any() for limit in (0.8, 1.0, 1.2, 2.0, 5.0)]
    near.append((moved_n - 0.2).abs().lt(1e-3).any())
    means = [
        part.mean().exp() for part in (batch["trainer"] - batch["generator"]).split(batch["lengths"].tolist())
    ]
    near += [torch.tensor(bool(min(abs(m - 0.8), abs(m - 1.2)) < 1e-3)) for m in means if m.isfinite()]
    return not any(bool(one) for one in near)


@pytest.mark.parametrize("loss", [PpoClip(), Gspo(0.2, 0.2), Reinforce(), Dppo()])
@given(batch=batches(), aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=30, deadline=None)
def test_gradient_is_that_of_finite_differences(
    loss: Loss, batch: dict[str, torch.Tensor], aggregation: Aggregation
) -> None:
    """Of the losses whose value their gradient is the derivative of: CISPO and corrections stop part of it."""
    assume(smooth(batch, loss))
    _, gradients = run(batch, loss, "Batch", aggregation)
    gradient_n = torch.cat([*gradients, torch.zeros(0)])
    for place in range(min(4, len(batch["trainer"]))):
        step = torch.zeros_like(batch["trainer"])
        step[place] = 1e-6
        above, _ = run({**batch, "trainer": batch["trainer"] + step}, loss, "Batch", aggregation)
        below, _ = run({**batch, "trainer": batch["trainer"] - step}, loss, "Batch", aggregation)
        assert (above - below) / 2e-6 == pytest.approx(float(gradient_n[place]), rel=1e-4, abs=1e-6)


def gradients_of(
    batch: dict[str, torch.Tensor], loss: Loss, aggregation: Aggregation = "PromptAverage"
) -> torch.Tensor:
    return torch.cat([*run(batch, loss, "Batch", aggregation)[1], torch.zeros(0)])


@given(batch=batches(), aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=40, deadline=None)
def test_on_policy_all_losses_are_the_plain_policy_gradient(
    batch: dict[str, torch.Tensor], aggregation: Aggregation
) -> None:
    """Also PPO's at one step. GSPO spreads a completion's gradient evenly, as all tokens of one have the same advantage."""
    batch = {**batch, "generator": batch["trainer"]}
    plain = gradients_of(batch, Reinforce(), aggregation)
    for loss in LOSSES:
        torch.testing.assert_close(gradients_of(batch, loss, aggregation), plain, rtol=1e-9, atol=1e-12)


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_without_limits_losses_are_the_importance_weighted_gradient(batch: dict[str, torch.Tensor]) -> None:
    weighted = gradients_of(batch, Corrected(Reinforce(), cap=1e12))
    for loss in (Cispo(1e12), PpoClip(1.0, 1e12), Dppo(1.0, 1e12), Corrected(PpoClip(), cap=1e12)):
        torch.testing.assert_close(gradients_of(batch, loss), weighted, rtol=1e-6, atol=1e-12)


@given(batch=batches(), loss=st.sampled_from(LOSSES))
@settings(max_examples=40, deadline=None)
def test_averages_agree_on_completions_of_one_token_and_groups_of_one_size(
    batch: dict[str, torch.Tensor], loss: Loss
) -> None:
    count = len(batch["lengths"]) // 2 * 2
    assume(count and len(batch["trainer"]) >= count)
    one = {
        "lengths": torch.ones(count, dtype=torch.long),
        "groups": torch.arange(count) // 2,
        "rewards": batch["rewards"][:count],
        "trainer": batch["trainer"][:count],
        "generator": batch["generator"][:count],
    }
    first, *others = [gradients_of(one, loss, aggregation) for aggregation in AGGREGATIONS]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-12)


@given(data=st.data(), tokens=st.integers(1, 5), constant=st.integers(5, 50))
@settings(max_examples=40, deadline=None)
def test_dr_grpo_is_grpo_without_its_deviation_and_its_lengths(
    data: st.DataObject, tokens: int, constant: int
) -> None:
    """Up to the constant: of completions of one length, GRPO's gradient with ``normalization: None`` is that of Dr. GRPO;
    with its deviation, or of completions of two lengths, it is not."""
    seed = data.draw(st.integers(0, 2**16))
    random = torch.Generator().manual_seed(seed)
    rewards, group_s = torch.tensor([1.0, -1.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([0, 0, 1, 1])

    def gradient(normalization: Normalization, aggregation: Aggregation, lengths: list[int]) -> torch.Tensor:
        lengths_s = torch.tensor(lengths)
        trained_n = -3 * torch.rand(sum(lengths), generator=random.manual_seed(seed), dtype=torch.float64)
        sampled_n = trained_n + 0.1 * torch.randn(sum(lengths), generator=random, dtype=torch.float64)
        trained_n.requires_grad_()
        loss = PpoClip()(
            TokenBatch(
                trained_n,
                sampled_n,
                per_token(advantages(rewards, group_s, normalization).double(), lengths_s),
                per_token(sequence_weights(lengths_s, group_s, aggregation, constant), lengths_s),
                per_token(torch.arange(4), lengths_s),
            )
        ).loss
        return torch.autograd.grad(loss, trained_n)[0]

    equal, unequal = [tokens] * 4, [tokens, tokens + 1, tokens, tokens]
    dr_grpo = gradient("None", "Constant", equal) * constant
    torch.testing.assert_close(
        gradient("None", "SampleAverage", equal) * tokens, dr_grpo, rtol=1e-9, atol=1e-12
    )
    assert not torch.allclose(gradient("Group", "SampleAverage", equal) * tokens, dr_grpo)
    assert not torch.allclose(
        gradient("None", "SampleAverage", unequal) * tokens, gradient("None", "Constant", unequal) * constant
    )


@given(st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_each_token_is_compared_with_the_weights_that_sampled_it(seed: int) -> None:
    """Three publishes inside one completion: the policy's log-probabilities move by a known amount at each."""
    generator = torch.Generator().manual_seed(seed)
    sampled_n = -1 - torch.rand(8, generator=generator, dtype=torch.float64)
    moves = [0.3, 0.2, 0.1]  # of the updates 1, 2 and 3; tokens 0-1 were sampled before all, 6-7 after all
    behind_n = torch.tensor(
        [sum(moves[version:]) for version in (0, 0, 1, 1, 2, 2, 3, 3)], dtype=torch.float64
    )
    one_n = torch.ones(8, dtype=torch.float64)
    trained_n = (sampled_n + behind_n).requires_grad_()
    tokens = TokenBatch(trained_n, sampled_n, one_n, one_n / 8, torch.zeros(8, dtype=torch.long))
    Cispo(1e6)(tokens).loss.backward()
    assert trained_n.grad is not None
    torch.testing.assert_close(-8 * trained_n.grad, behind_n.exp())


@dataclass(frozen=True)
class Focal:
    """A loss of a package whose derivative is a number for probabilities alone."""

    token_local = True

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        logprobs_n = tokens.logprobs_n
        return LossOutput(-(tokens.weights_n * (1 - logprobs_n.exp()).sqrt()).sum())


@pytest.mark.parametrize(
    ("loss", "local"),
    [
        (Focal(), True),
        *((loss, not isinstance(loss, Gspo)) for loss in LOSSES),
        (Supervised(), True),
        (PpoClip(dual_clip=3.0), True),
        *((WithKl(Cispo(), estimator, 0.1), True) for estimator in ("k1", "k2", "k3")),
        (Distilled(WithKl(Cispo(), "k3", 0.1)), True),
        (WithKl(Gspo(0.2, 0.2), "k3", 0.1), False),
        (Distilled(Gspo(0.2, 0.2)), False),
        (Corrected(Gspo(0.2, 0.2)), False),
        (Corrected(Cispo(), level="Sequence"), False),
        (Corrected(Cispo(), level="Geometric"), False),
        (OffPolicyMasked(Cispo(), 0.5), False),
    ],
    ids=str,
)
def test_losses_say_whether_other_tokens_change_derivatives(loss: Loss, local: bool) -> None:
    """The gradients of the others would be wrong if the forward pass computed them."""
    assert is_token_local(loss) == local
    if local:
        check_token_local(loss)
    else:
        with pytest.raises(EngineError, match="leave token_local out"):
            check_token_local(loss)
