"""``algo.kl``: the estimators' values and gradients against sums over a whole vocabulary, and the wrapper."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api.recipe import KlEstimator
from scalerl_trainer.algo.aggregation import Aggregation, per_token, sequence_weights
from scalerl_trainer.algo.corrections import Corrected
from scalerl_trainer.algo.kl import WithKl, kl_terms
from scalerl_trainer.algo.losses import PpoClip, Reinforce, TokenBatch
from scalerl_trainer.errors import BadBatchError

ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]

# 2 prompts × 2 completions of 2, 1, 1 and 2 tokens; d = log π - log π_ref of each token.
LENGTHS, GROUPS = [2, 1, 1, 2], [0, 0, 1, 1]
TRAINER = [-1.0, -2.0, -0.5, -1.0, -3.0, -1.0]
D = [0.5, 0.0, -1.0, 2.0, -0.5, 1.0]


def token_batch(aggregation: Aggregation = "PromptAverage") -> TokenBatch:
    lengths_s, group_s = torch.tensor(LENGTHS), torch.tensor(GROUPS)
    trainer_n = torch.tensor(TRAINER, dtype=torch.float64)
    return TokenBatch(
        trainer_n.clone().requires_grad_(),
        trainer_n.clone(),
        torch.zeros(6, dtype=torch.float64),
        per_token(sequence_weights(lengths_s, group_s, aggregation, 10), lengths_s),
        per_token(torch.arange(4), lengths_s),
        trainer_n - torch.tensor(D, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("PromptAverage", [1 / 6] * 6),  # 1 / (2 prompts · 3 tokens)
        ("SampleAverage", [1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 8, 1 / 8]),
        ("TokenAverage", [1 / 6] * 6),
        ("Constant", [1 / 40] * 6),  # 4 completions · 10
    ],
)
@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", D, D),
        ("k2", [0.125, 0.0, 0.5, 2.0, 0.125, 0.5], D),
        ("k3", [math.exp(-d) - 1 + d for d in D], [1 - math.exp(-d) for d in D]),
    ],
)
def test_penalty_by_hand(
    aggregation: Aggregation,
    weights: list[float],
    estimator: KlEstimator,
    values: list[float],
    slopes: list[float],
) -> None:
    """The advantages are 0, so that the penalty is all there is: .1 Σ w k, and its gradient .1 w dk."""
    tokens = token_batch(aggregation)
    output = WithKl(Reinforce(), estimator, 0.1)(tokens)
    assert output.loss.item() == pytest.approx(0.1 * sum(w * k for w, k in zip(weights, values, strict=True)))
    assert output.sums["reference_kl"].item() == pytest.approx(sum(values))
    (gradient_n,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
    assert gradient_n.tolist() == pytest.approx(
        [0.1 * w * slope for w, slope in zip(weights, slopes, strict=True)]
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_means_over_the_vocabulary(estimator: KlEstimator, seed: int) -> None:
    """E_{y~π} of value and gradient, summed over all 7 tokens, against the exact KL and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    logits_v = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    reference_v = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    own_v = logits_v.log_softmax(0)
    sampled_v = own_v.detach().exp()
    forward = (own_v.exp() * (own_v - reference_v)).sum()
    other_way = (reference_v.exp() * (reference_v - own_v)).sum()

    mean = (sampled_v * kl_terms(own_v, reference_v, estimator)).sum()
    if estimator != "k2":
        assert mean.item() == pytest.approx(forward.item(), rel=1e-9, abs=1e-12)
    target = other_way if estimator == "k3" else forward
    (got,) = torch.autograd.grad(mean, logits_v, retain_graph=True)
    (expected,) = torch.autograd.grad(target, logits_v)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@given(
    d=st.lists(st.floats(-20.0, 20.0), min_size=1, max_size=8),
    logprob=st.floats(-20.0, 0.0),
)
@settings(max_examples=100, deadline=None)
def test_only_k1_is_negative_below_the_reference(d: list[float], logprob: float) -> None:
    """For every d, also those far from 0; k2 and k3 are 0 at the reference itself and grow away from it."""
    logprobs_n = torch.full((len(d),), logprob, dtype=torch.float64)
    d_n = torch.tensor(d, dtype=torch.float64)
    values = {estimator: kl_terms(logprobs_n, logprobs_n - d_n, estimator) for estimator in ESTIMATORS}
    torch.testing.assert_close(values["k1"], d_n, rtol=1e-9, atol=1e-12)
    for estimator in ("k2", "k3"):
        assert bool((values[estimator] >= -1e-12).all())
        further = kl_terms(logprobs_n, logprobs_n - 1.5 * d_n, estimator)
        assert bool((further >= values[estimator] - 1e-12).all())
        assert bool((values[estimator] > 0)[d_n.abs() > 1e-3].all())


@pytest.mark.parametrize(("estimator", "differentiated"), [("k1", "k2"), ("k2", "k2"), ("k3", "k3")])
@given(d=st.floats(-8.0, 8.0), logprob=st.floats(-8.0, 0.0))
@settings(max_examples=60, deadline=None)
def test_slope_of_every_token_is_that_of_finite_differences(
    estimator: KlEstimator, differentiated: KlEstimator, d: float, logprob: float
) -> None:
    """k1's gradient is the derivative of k2, not of its own value, whose gradient would be no penalty."""
    own = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    reference = own.detach() - d
    (slope,) = torch.autograd.grad(kl_terms(own, reference, estimator).sum(), own)
    above, below = (kl_terms(own.detach() + step, reference, differentiated).item() for step in (1e-5, -1e-5))
    assert slope.item() == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradient_is_that_of_finite_differences(estimator: KlEstimator) -> None:
    tokens = token_batch()
    loss = WithKl(PpoClip(), estimator, 0.3)
    (gradient_n,) = torch.autograd.grad(loss(tokens).loss, tokens.logprobs_n)
    for place in range(len(TRAINER)):
        step_n = torch.zeros(len(TRAINER), dtype=torch.float64)
        step_n[place] = 1e-6
        above, below = (
            loss(replace(tokens, logprobs_n=tokens.logprobs_n.detach() + sign * step_n)).loss.item()
            for sign in (1, -1)
        )
        assert (above - below) / 2e-6 == pytest.approx(gradient_n[place].item(), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_penalty_of_the_reference_itself_changes_nothing(estimator: KlEstimator) -> None:
    tokens = replace(token_batch(), advantages_n=torch.ones(6, dtype=torch.float64))
    tokens = replace(tokens, reference_logprobs_n=tokens.generator_logprobs_n)
    plain, penalised = (loss(tokens).loss for loss in (PpoClip(), WithKl(PpoClip(), estimator, 5.0)))
    assert penalised.item() == plain.item()
    gradients = [torch.autograd.grad(loss, tokens.logprobs_n)[0] for loss in (plain, penalised)]
    assert torch.equal(*gradients)


def test_k3_far_below_the_reference_is_finite_and_never_pushes_away() -> None:
    logprobs_n = torch.tensor([-200.0, -5.0], requires_grad=True)
    kl_n = kl_terms(logprobs_n, torch.tensor([-0.1, -0.1]), "k3")
    (gradient_n,) = torch.autograd.grad(kl_n.sum(), logprobs_n)
    assert bool(kl_n.isfinite().all())
    assert gradient_n[0] == 0
    assert gradient_n[1] < 0


def test_correction_weights_the_penalty() -> None:
    """π/π_gen is e of the first token and 1 of the others; above C = 2 it is masked, so its penalty is too."""
    tokens = token_batch()
    moved_n = tokens.generator_logprobs_n.clone()
    moved_n[0] -= 1
    tokens = replace(tokens, generator_logprobs_n=moved_n)
    output = Corrected(WithKl(Reinforce(), "k2", 1.0), cap=2.0, above="mask")(tokens)
    assert output.loss.item() == pytest.approx((0.0 + 0.5 + 2.0 + 0.125 + 0.5) / 6)


def test_penalty_without_reference_raises() -> None:
    with pytest.raises(BadBatchError, match="give reference_logprobs_n, or train without the penalty"):
        WithKl(Reinforce(), "k3", 0.1)(replace(token_batch(), reference_logprobs_n=None))


@pytest.mark.parametrize("coefficient", [0.0, -1.0, math.nan, math.inf])
def test_coefficient_not_positive_raises(coefficient: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        WithKl(Reinforce(), "k3", coefficient)


def test_unknown_estimator_raises() -> None:
    with pytest.raises(ValueError, match="choose k1, k2 or k3"):
        WithKl(Reinforce(), "k4", 0.1)  # type: ignore[arg-type]
