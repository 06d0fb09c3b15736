"""``algo.distillation``: hand-worked advantages, gradients against sums over a whole vocabulary, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_trainer.algo.aggregation import per_token, sequence_weights
from scalerl_trainer.algo.corrections import Corrected
from scalerl_trainer.algo.distillation import Distilled
from scalerl_trainer.algo.kl import WithKl
from scalerl_trainer.algo.losses import Cispo, Dppo, Gspo, Loss, PpoClip, Reinforce, TokenBatch
from scalerl_trainer.errors import BadBatchError

# 2 prompts × 2 completions of 2, 1, 1 and 2 tokens, so a prompt average weights each by 1 / (2 · 3).
LENGTHS, GROUPS = [2, 1, 1, 2], [0, 0, 1, 1]
OF_REWARDS = [1.0, -1.0, 0.5, -0.5]
TRAINER = [-1.0, -2.0, -0.5, -1.0, -3.0, -1.0]
GENERATOR = [-1.0, -1.5, -0.5, -3.0, -3.0, -2.0]
TEACHER = [-2.0, -1.5, -0.25, -1.0, -6.0, -1.0]
# log π_gen - log π_teacher:
KL = [1.0, 0.0, -0.25, -2.0, 3.0, -1.0]
LOSSES: list[Loss] = [Cispo(), PpoClip(), Gspo(), Reinforce(), Dppo(), Corrected(PpoClip())]


def token_batch(of_rewards: list[float] = OF_REWARDS, teacher: list[float] = TEACHER) -> TokenBatch:
    lengths_s = torch.tensor(LENGTHS)
    numbers = (
        torch.tensor(values, dtype=torch.float64) for values in (TRAINER, GENERATOR, of_rewards, teacher)
    )
    trainer_n, generator_n, advantages_s, teacher_n = numbers
    return TokenBatch(
        trainer_n.requires_grad_(),
        generator_n,
        per_token(advantages_s, lengths_s),
        per_token(sequence_weights(lengths_s, torch.tensor(GROUPS)), lengths_s),
        per_token(torch.arange(4), lengths_s),
        teacher_logprobs_n=teacher_n,
    )


@pytest.mark.parametrize(
    ("of_rewards", "advantages"),
    [
        # -.5 · KL: the teacher alone
        ([0.0] * 4, [-0.5, 0.0, 0.125, 1.0, -1.5, 0.5]),
        # 1 - .5, 1 - 0; -1 + .125; .5 + 1; -.5 - 1.5, -.5 + .5
        (OF_REWARDS, [0.5, 1.0, -0.875, 1.5, -2.0, 0.0]),
    ],
)
def test_distillation_by_hand(of_rewards: list[float], advantages: list[float]) -> None:
    tokens = token_batch(of_rewards)
    output = Distilled(Reinforce(), 0.5)(tokens)
    # REINFORCE: -1/6 Σ A log π, whose slope in log π is -A / 6.
    assert output.loss.item() == pytest.approx(
        -sum(a * logprob for a, logprob in zip(advantages, TRAINER, strict=True)) / 6
    )
    (gradient_n,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
    assert gradient_n.tolist() == pytest.approx([-a / 6 for a in advantages])
    assert output.sums["teacher_kl"].item() == pytest.approx(sum(KL))

    # CISPO: the ratios are 1, e^-.5, 1, e^2 (cut to 5), 1 and e.
    output = Distilled(Cispo(5.0), 0.5)(tokens)
    (gradient_n,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
    ratios = [1.0, math.exp(-0.5), 1.0, 5.0, 1.0, math.e]
    assert gradient_n.tolist() == pytest.approx([-a * r / 6 for a, r in zip(advantages, ratios, strict=True)])
    assert output.sums["truncated"] == 1


def test_gradient_is_that_of_finite_differences() -> None:
    """The ratio is differentiated; the teacher's part, of what was sampled, is a constant."""
    tokens, distilled = token_batch(), Distilled(PpoClip(), 0.7)
    (gradient_n,) = torch.autograd.grad(distilled(tokens).loss, tokens.logprobs_n)
    assert gradient_n.abs().sum() > 0
    for place in range(len(TRAINER)):
        step_n = torch.zeros(len(TRAINER), dtype=torch.float64)
        step_n[place] = 1e-6
        above, below = (
            distilled(replace(tokens, logprobs_n=tokens.logprobs_n.detach() + sign * step_n)).loss.item()
            for sign in (1, -1)
        )
        assert (above - below) / 2e-6 == pytest.approx(gradient_n[place].item(), rel=1e-4, abs=1e-8)


def test_opposite_preferences_of_a_teacher_do_not_cancel_under_gspo() -> None:
    new_n = torch.tensor([-3.0, -3.0], requires_grad=True)
    zeros, index_n = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    tokens = TokenBatch(
        new_n, new_n.detach(), zeros, zeros + 0.5, index_n, teacher_logprobs_n=torch.tensor([-1.0, -5.0])
    )
    (gradient_n,) = torch.autograd.grad(Distilled(Gspo())(tokens).loss, new_n)
    assert gradient_n.tolist() == [-1.0, 1.0]


@given(seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_mean_gradient_off_policy_is_of_the_teacher_less_that_of_the_sampling_policy(seed: int) -> None:
    """E_{y~π_gen} of the loss's gradient is ∇KL(π ‖ π_teacher) - ∇KL(π ‖ π_gen), with the whole ratio as a weight."""
    generator = torch.Generator().manual_seed(seed)
    logits_v = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher_v, sampled_v = (
        torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    own_v = logits_v.log_softmax(0)
    tokens = TokenBatch(
        own_v, sampled_v, torch.zeros(7), sampled_v.exp(), torch.arange(7), teacher_logprobs_n=teacher_v
    )
    expected = (own_v.exp() * ((own_v - teacher_v) - (own_v - sampled_v))).sum()
    (wanted,) = torch.autograd.grad(expected, logits_v, retain_graph=True)
    for loss in (Cispo(1e9), PpoClip(1.0, 1e9), Dppo(1.0, 1e9), Corrected(Reinforce(), cap=1e9)):
        (got,) = torch.autograd.grad(Distilled(loss)(tokens).loss, logits_v, retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_mean_gradient_is_that_of_the_reverse_kl(seed: int) -> None:
    """On-policy, E_{y~π} over all 7 tokens of the loss's gradient is ∇KL(π ‖ π_teacher), not ∇KL(π_teacher ‖ π)."""
    generator = torch.Generator().manual_seed(seed)
    logits_v = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher_v = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    own_v = logits_v.log_softmax(0)
    sampled_v = own_v.detach().exp()
    tokens = TokenBatch(
        own_v, own_v.detach(), torch.zeros(7), sampled_v, torch.arange(7), teacher_logprobs_n=teacher_v
    )
    output = Distilled(Cispo(), 1.0)(tokens)
    reverse = (own_v.exp() * (own_v - teacher_v)).sum()
    (got,) = torch.autograd.grad(output.loss, logits_v, retain_graph=True)
    (expected,) = torch.autograd.grad(reverse, logits_v)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_updates_on_the_students_own_samples_lower_its_kl_to_the_teacher() -> None:
    """A policy of one logit for each pair of tokens, sampled two updates before it is trained on."""
    generator = torch.Generator().manual_seed(0)
    teacher_vv = (2 * torch.randn(8, 8, generator=generator)).log_softmax(1)
    logits_vv = torch.zeros(8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([logits_vv], lr=0.1)
    weights_n, sequence_n = torch.full((64 * 6,), 1 / (64 * 6)), torch.arange(64).repeat_interleave(6)
    generators, kl = [logits_vv.detach().log_softmax(1)] * 2, []
    for _ in range(60):
        sampling_vv = generators.pop(0)
        tokens_st = torch.zeros(64, 7, dtype=torch.long)
        for t in range(6):
            chances = sampling_vv[tokens_st[:, t]].exp()
            tokens_st[:, t + 1] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        at = tokens_st[:, :-1].flatten(), tokens_st[:, 1:].flatten()
        own_vv = logits_vv.log_softmax(1)
        batch = TokenBatch(
            own_vv[at],
            sampling_vv[at],
            torch.zeros(384),
            weights_n,
            sequence_n,
            teacher_logprobs_n=teacher_vv[at],
        )
        optimizer.zero_grad()
        Distilled(Cispo())(batch).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        generators.append(logits_vv.detach().log_softmax(1))
        kl.append((own_vv.exp() * (own_vv - teacher_vv)).sum(1).mean().item())
    assert kl[0] > 1.0
    assert kl[-1] < 0.2 * kl[0]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_teacher_that_agrees_gives_no_gradient(loss: Loss) -> None:
    tokens = token_batch([0.0] * 4, GENERATOR)
    output = Distilled(loss)(tokens)
    (gradient_n,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
    assert not gradient_n.any()
    assert output.sums["teacher_kl"] == 0


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_coefficient_of_0_is_the_plain_loss(loss: Loss) -> None:
    tokens = token_batch()
    plain, distilled = loss(tokens), Distilled(loss, 0.0)(tokens)
    assert distilled.loss.item() == plain.loss.item()
    gradients = [torch.autograd.grad(output.loss, tokens.logprobs_n)[0] for output in (plain, distilled)]
    assert torch.equal(*gradients)
    assert plain.sums.items() <= distilled.sums.items()


def test_on_policy_the_teacher_is_a_k1_reference() -> None:
    """With REINFORCE and ratios of 1, distillation has the gradient of the KL penalty of estimator k1 towards the teacher."""
    tokens = replace(
        token_batch(),
        generator_logprobs_n=torch.tensor(TRAINER, dtype=torch.float64),
        reference_logprobs_n=torch.tensor(TEACHER, dtype=torch.float64),
    )
    losses = (Distilled(Reinforce(), 0.3), WithKl(Reinforce(), "k1", 0.3))
    gradients = [torch.autograd.grad(loss(tokens).loss, tokens.logprobs_n)[0] for loss in losses]
    torch.testing.assert_close(*gradients)


def test_importance_correction_compares_teacher_and_sampled_token() -> None:
    """The correction gives the loss the trainer's own log-probabilities; A is of the generator's all the same."""
    tokens = token_batch([0.0] * 4)
    output = Distilled(Corrected(Reinforce(), cap=100.0), 1.0)(tokens)
    (gradient_n,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
    ratios = [math.exp(t - g) for t, g in zip(TRAINER, GENERATOR, strict=True)]
    assert gradient_n.tolist() == pytest.approx([kl * r / 6 for kl, r in zip(KL, ratios, strict=True)])


def test_distillation_without_teacher_raises() -> None:
    with pytest.raises(BadBatchError, match="give teacher_logprobs_n, or train without it"):
        Distilled(Reinforce())(replace(token_batch(), teacher_logprobs_n=None))


@pytest.mark.parametrize("coefficient", [-1.0, math.nan, math.inf])
def test_coefficient_below_0_raises(coefficient: float) -> None:
    with pytest.raises(ValueError, match="at least 0 and finite"):
        Distilled(Reinforce(), coefficient)
