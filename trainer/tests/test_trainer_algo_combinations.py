"""Every loss with every feature that changes a token's advantage, weight or ratio, against one loop over tokens.

The reference has the derivative of the loss by each log-probability, written down from the formulas in docs/recipe.md with
Python floats. It shares no code with ``algo``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_api.recipe import ONE_OF, RecipeSpec
from scalerl_trainer.algo.advantages import advantages
from scalerl_trainer.algo.aggregation import per_token, sequence_weights
from scalerl_trainer.algo.corrections import Corrected, OffPolicyMasked
from scalerl_trainer.algo.losses import Dppo, Gspo, Loss, PpoClip, Reinforce, TokenBatch
from scalerl_trainer.algo.losses.make_loss import make_loss

LOSSES: dict[str, list[dict[str, str]]] = {
    "cispo": [{"ratioCap": "1.5"}],
    "ppoClip": [{}, {"clipHigh": "0.28", "dualClip": "1.5"}],
    "gspo": [{"clipLow": "0.1", "clipHigh": "0.1"}],
    "reinforce": [{}],
    "dppo": [{"threshold": "0.05", "ratioCap": "1.5"}],
}
CORRECTIONS: list[dict[str, Any]] = [
    {"none": {}},
    *({"truncated": {"cap": "1.2", "level": level}} for level in ("Token", "Sequence", "Geometric")),
    *({"masked": {"cap": "1.3", "level": level}} for level in ("Token", "Sequence", "Geometric")),
    {"masked": {"cap": "2", "floor": "0.5"}},
    {"masked": {"cap": "1.4", "floor": "0.8", "level": "Geometric"}},
]
TEACHER = {"url": "http://teacher"}


@st.composite
def recipes(draw: st.DrawFn, loss: str) -> RecipeSpec:
    chosen: dict[str, Any] = {
        "loss": {loss: draw(st.sampled_from(LOSSES[loss]))},
        "correction": draw(st.sampled_from(CORRECTIONS)),
        "aggregation": draw(st.sampled_from(["PromptAverage", "SampleAverage", "TokenAverage", "Constant"])),
        "advantage": {"normalization": draw(st.sampled_from(["Batch", "Group", "None"]))},
        "offPolicy": draw(st.sampled_from([{"ppo": {"stepsPerBatch": 4}}, {"pipeline": {}}])),
        "maxCompletionTokens": 12,
    }
    if draw(st.booleans()):
        estimator = draw(st.sampled_from(["k1", "k2", "k3"]))
        chosen["kl"] = {"penalty": {"coefficient": "0.3", "estimator": estimator}}
    if draw(st.booleans()):
        rewards = draw(st.sampled_from(["Ignored", "Added"]))
        chosen["distillation"] = {"teacher": TEACHER, "coefficient": "0.7", "rewards": rewards}
    if draw(st.booleans()):
        chosen["offPolicyMask"] = {"maxKl": draw(st.sampled_from(["0.02", "0.2"]))}
    return RecipeSpec.model_validate(chosen)


@st.composite
def samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Completions with a prompt's number, a reward (some with a length penalty, so partial), and their tokens; a token has
    log-probabilities under every policy, and whether it is forced."""
    seed = draw(st.integers(0, 2**20))
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draw(st.integers(2, 6))):
        tokens = draw(st.integers(0, 7))
        spread = draw(st.sampled_from([0.0, 0.1, 1.0]))
        noise = torch.randn(5, tokens, generator=random, dtype=torch.float64) * spread
        new = -3 * torch.rand(tokens, generator=random, dtype=torch.float64) - 1e-3
        names = ("generator", "proximal", "reference", "teacher")
        found.append(
            {
                "prompt": draw(st.integers(0, 1)),
                "reward": draw(st.sampled_from([1.0, -1.0, 0.5, -2.0])),
                "forced": (torch.rand(tokens, generator=random) < 0.25).tolist(),
                "new": new.tolist(),
                **{name: (new + noise[i]).clamp(max=0).tolist() for i, name in enumerate(names)},
            }
        )
    return found


def batch_of(found: list[dict[str, Any]], recipe: RecipeSpec) -> tuple[TokenBatch, list[float], list[float]]:
    """As the engine gives it to a loss: without forced tokens, flat. Also each completion's advantage and weight."""
    group_s = torch.tensor([one["prompt"] for one in found])
    rewards_s = torch.tensor([one["reward"] for one in found], dtype=torch.float64)
    lengths_s = torch.tensor([one["forced"].count(False) for one in found])
    advantages_s = advantages(rewards_s, group_s, recipe.advantage.normalization).double()
    if recipe.distillation is not None and recipe.distillation.rewards == "Ignored":
        advantages_s = torch.zeros_like(advantages_s)
    weights_s = sequence_weights(lengths_s, group_s, recipe.aggregation, recipe.max_completion_tokens)

    def flat(name: str) -> torch.Tensor:
        values = [
            v for one in found for v, forced in zip(one[name], one["forced"], strict=True) if not forced
        ]
        return torch.tensor(values, dtype=torch.float64)

    tokens = TokenBatch(
        flat("new").requires_grad_(),
        flat("generator"),
        per_token(advantages_s, lengths_s),
        per_token(weights_s, lengths_s),
        torch.unique(per_token(torch.arange(len(found)), lengths_s), return_inverse=True)[1],
        flat("reference"),
        flat("teacher"),
        flat("proximal") if recipe.proximal_updates else None,
    )
    return tokens, advantages_s.tolist(), weights_s.tolist()


def slopes(
    found: list[dict[str, Any]], recipe: RecipeSpec, advantages_s: list[float], weights_s: list[float]
) -> list[float]:
    """d loss / d log π of each trained token."""
    result = []
    for one, advantage, weight in zip(found, advantages_s, weights_s, strict=True):
        own = [i for i, forced in enumerate(one["forced"]) if not forced]
        if not own:
            continue
        new, gen, ref, teacher = (
            [one[name][i] for i in own] for name in ("new", "generator", "reference", "teacher")
        )
        prox = [one["proximal"][i] for i in own] if recipe.proximal_updates else new
        corrected = recipe.correction.truncated or recipe.correction.masked
        old = prox if corrected else gen
        per_token_a = [advantage] * len(own)
        if recipe.distillation is not None:
            per_token_a = [a - 0.7 * (g - t) for a, g, t in zip(per_token_a, gen, teacher, strict=True)]
        if recipe.off_policy_mask is not None:
            kl = sum(g - n for g, n in zip(gen, new, strict=True)) / len(own)
            if kl > float(recipe.off_policy_mask.max_kl):
                per_token_a = [max(a, 0.0) for a in per_token_a]
        for t, a in enumerate(per_token_a):
            slope = policy_slope(recipe, [n - o for n, o in zip(new, old, strict=True)], t, a, new[t], old[t])
            if recipe.kl.penalty is not None:
                d = new[t] - ref[t]
                slope -= 0.3 * (1 - math.exp(-d) if recipe.kl.penalty.estimator == "k3" else d)
            w = 1.0
            if corrected:
                w = importance(recipe, [p - g for p, g in zip(prox, gen, strict=True)], t)
            result.append(-weight * w * slope)
    return result


def importance(recipe: RecipeSpec, differences: list[float], t: int) -> float:
    chosen = recipe.correction.truncated or recipe.correction.masked
    assert chosen is not None
    exponent = {
        "Token": differences[t],
        "Sequence": sum(differences),
        "Geometric": sum(differences) / len(differences),
    }[chosen.level]
    rho = math.exp(min(exponent, 30))
    if recipe.correction.truncated is not None:
        return min(rho, float(chosen.cap))
    assert recipe.correction.masked is not None
    return rho if float(recipe.correction.masked.floor) <= rho <= float(chosen.cap) else 0.0


def policy_slope(
    recipe: RecipeSpec, differences: list[float], t: int, a: float, new: float, old: float
) -> float:
    """Derivative of the policy's term by log π of token t."""
    loss, r = recipe.loss, math.exp(differences[t])
    if loss.reinforce is not None:
        return a
    if loss.cispo is not None:
        return min(r, float(loss.cispo.ratio_cap)) * a
    if loss.dppo is not None:
        moved = math.exp(new) - math.exp(old)
        if abs(moved) > float(loss.dppo.threshold) and moved * a > 0:
            return 0.0
        return min(r, float(loss.dppo.ratio_cap)) * a
    clipped = loss.ppo_clip or loss.gspo
    assert clipped is not None
    if loss.gspo is not None:
        r = math.exp(sum(differences) / len(differences))
    if a >= 0:
        return r * a if r <= 1 + float(clipped.clip_high) else 0.0
    dual = loss.ppo_clip and loss.ppo_clip.dual_clip
    most = math.inf if dual is None else float(dual)
    return r * a if 1 - float(clipped.clip_low) <= r <= most else 0.0


def test_every_loss_and_correction_is_combined() -> None:
    assert set(LOSSES) == set(ONE_OF["loss"]) - {"plugin"}
    assert {name for one in CORRECTIONS for name in one} == set(ONE_OF["correction"])


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_gradient_of_each_token_is_that_of_the_formulas(loss: str, data: st.DataObject) -> None:
    recipe, found = data.draw(recipes(loss)), data.draw(samples())
    tokens, advantages_s, weights_s = batch_of(found, recipe)
    output = make_loss(recipe)(tokens)
    (gradient_n,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
    assert gradient_n.tolist() == pytest.approx(
        slopes(found, recipe, advantages_s, weights_s), rel=1e-9, abs=1e-12
    )


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_gspo_of_one_advantage_is_the_sequence_form(data: st.DataObject) -> None:
    """Value and gradient, by autograd, of the mean over completions of min(s A, clip(s) A)."""
    found = data.draw(samples())
    recipe = RecipeSpec.model_validate({"preset": "gspo", "loss": {"gspo": LOSSES["gspo"][0]}})
    tokens, advantages_s, weights_s = batch_of(found, recipe)
    new_n = tokens.logprobs_n.detach().requires_grad_()
    lengths = [one["forced"].count(False) for one in found]
    objective = torch.zeros((), dtype=torch.float64)
    pieces = zip(torch.split(new_n, lengths), torch.split(tokens.generator_logprobs_n, lengths), strict=True)
    for (own, sampled), length, a, w in zip(pieces, lengths, advantages_s, weights_s, strict=True):
        if length:
            s = (own - sampled).mean().exp()
            objective = objective + length * w * torch.minimum(s * a, s.clamp(0.9, 1.1) * a)
    output = make_loss(recipe)(tokens)
    assert output.loss.item() == pytest.approx(-objective.item(), rel=1e-12, abs=1e-14)
    if tokens.logprobs_n.numel():
        (got,) = torch.autograd.grad(output.loss, tokens.logprobs_n)
        (wanted,) = torch.autograd.grad(-objective, new_n)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)


# --- values by hand -----------------------------------------------------------------------------------


def batch(
    new: list[float], gen: list[float], a: float | list[float], prox: list[float] | None = None
) -> TokenBatch:
    """One completion, each token of weight 1 / |y|."""
    count = len(new)
    return TokenBatch(
        torch.tensor(new, requires_grad=True),
        torch.tensor(gen),
        torch.zeros(count) + torch.tensor(a),
        torch.full((count,), 1 / count),
        torch.zeros(count, dtype=torch.long),
        proximal_logprobs_n=None if prox is None else torch.tensor(prox),
    )


def gradient(loss: Loss, tokens: TokenBatch) -> list[float]:
    return torch.autograd.grad(loss(tokens).loss, tokens.logprobs_n)[0].tolist()


def test_masked_token_is_not_trained_under_gspo() -> None:
    tokens = batch([-1.0, -1.0], [-4.0, -1.0], 1.0)
    assert gradient(Corrected(Gspo(), 2.0, "mask"), tokens) == [0.0, -0.5]


def test_gspo_clips_all_tokens_of_a_completion_alike() -> None:
    """At the upper clip, in float32, with log-probabilities down to -25: a ratio with a rounding of its own would be on the other
    side of the clip than its neighbours'."""
    random = torch.Generator().manual_seed(0)
    for excess in (-2e-7, 2e-7):
        new_n = -25 * torch.rand(64, generator=random)
        tokens = batch(new_n.tolist(), (new_n - math.log1p(4e-4 + excess)).tolist(), 1.0)
        assert len(set(gradient(Gspo(), tokens))) == 1


E = math.e


@pytest.mark.parametrize(
    ("loss", "a", "expected"),
    [
        (PpoClip(), -1.0, E**10),
        (PpoClip(dual_clip=3.0), -1.0, 0.0),
        (PpoClip(dual_clip=3.0), 1.0, 0.0),  # above the upper clip
        (Dppo(threshold=1.0), 1.0, -20.0),
        (Dppo(threshold=1.0), -1.0, 20.0),
        (Dppo(threshold=1.0, ratio_cap=50.0), -1.0, 50.0),
    ],
)
def test_bounds_of_a_ratio_of_e_to_the_10(loss: Loss, a: float, expected: float) -> None:
    assert gradient(loss, batch([-0.5], [-10.5], a)) == pytest.approx([expected], rel=1e-5)


def test_dual_clip_leaves_smaller_ratios() -> None:
    tokens = batch([-1.0, -1.0], [-2.0, -2.2], -1.0)  # ratios e and e^1.2 = 3.32
    assert gradient(PpoClip(dual_clip=3.0), tokens) == pytest.approx([E / 2, 0.0])
    assert PpoClip(dual_clip=3.0)(tokens).loss.item() == pytest.approx((E + 3.0) / 2)
    assert PpoClip(dual_clip=3.0)(tokens).sums["clipped"] == 1


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # π/π_prox = e^.1, e^.5; π_prox/π_gen = e^.5, e^-1. Weights 1/2; A = 1.
        (Corrected(PpoClip()), [-(E**0.6) / 2, 0.0]),  # e^.5 is above 1.2
        (Corrected(PpoClip(0.2, 1.0)), [-(E**0.6) / 2, -(E**-0.5) / 2]),
        (Corrected(PpoClip(0.2, 1.0), 1.5), [-1.5 * E**0.1 / 2, -(E**-0.5) / 2]),
        (Corrected(PpoClip(0.2, 1.0), 1.5, "mask"), [0.0, -(E**-0.5) / 2]),
        # IcePop: e^-1 = .37 is below .5
        (Corrected(PpoClip(0.2, 1.0), 5.0, "mask", floor=0.5), [-(E**0.6) / 2, 0.0]),
        # of the completion: e^-.5 = .61, and its root e^-.25 = .78
        (Corrected(PpoClip(0.2, 1.0), level="Sequence"), [-(E**-0.4) / 2, -1 / 2]),
        (Corrected(PpoClip(0.2, 1.0), level="Geometric"), [-(E**-0.15) / 2, -(E**0.25) / 2]),
        (Corrected(PpoClip(0.2, 1.0), 0.6, "truncate", "Sequence"), [-0.6 * E**0.1 / 2, -0.6 * E**0.5 / 2]),
        (Corrected(PpoClip(0.2, 1.0), 0.6, "mask", "Sequence"), [0.0, 0.0]),
        (Corrected(PpoClip(0.2, 1.0), 2.0, "mask", "Geometric", 0.8), [0.0, 0.0]),
        (Corrected(PpoClip(0.2, 1.0), 2.0, "mask", "Geometric", 0.7), [-(E**-0.15) / 2, -(E**0.25) / 2]),
    ],
)
def test_decoupled_form_by_hand(loss: Loss, expected: list[float]) -> None:
    tokens = batch([-1.0, -1.0], [-1.6, -0.5], 1.0, prox=[-1.1, -1.5])
    assert gradient(loss, tokens) == pytest.approx(expected, rel=1e-6)


def test_off_policy_mask_by_hand() -> None:
    """log π_gen - log π is .2 and .6, a mean of .4. Only negative advantages are masked, and not the KL penalty."""
    loss = OffPolicyMasked(Reinforce(), 0.39)
    assert gradient(loss, batch([-1.0, -1.0], [-0.8, -0.4], -1.0)) == [0.0, 0.0]
    assert gradient(loss, batch([-1.0, -1.0], [-0.8, -0.4], 1.0)) == [-0.5, -0.5]
    assert gradient(loss, batch([-1.0, -1.0], [-0.8, -0.4], [1.0, -1.0])) == [-0.5, 0.0]
    assert gradient(OffPolicyMasked(Reinforce(), 0.41), batch([-1.0, -1.0], [-0.8, -0.4], -1.0)) == [0.5, 0.5]
    assert loss(batch([-1.0, -1.0], [-0.8, -0.4], -1.0)).sums["off_policy_masked"] == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: PpoClip(dual_clip=1.1),
        lambda: Dppo(ratio_cap=0.5),
        lambda: Corrected(Reinforce(), floor=0.5),
        lambda: Corrected(Reinforce(), 2.0, "mask", floor=2.0),
        lambda: OffPolicyMasked(Reinforce(), 0.0),
    ],
)
def test_bounds_out_of_range_raise(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        make()
