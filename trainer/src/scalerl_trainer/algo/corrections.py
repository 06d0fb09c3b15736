"""Corrections for the mismatch between the generator's policy and the trainer's, for any loss.

The policy that sampled a token (π_gen) and the trained policy (π) differ for two reasons: the weights have changed since,
and generator and trainer compute differently. The importance ratio of a loss includes both. A correction separates them by a
third policy, π_prox: the trainer's own policy before the first of the updates that share the sampled weights. This is
decoupled PPO (arXiv 2110.00641 [P]; verl's rollout correction in decoupled mode [S])::

    loss       its ratio, and so its clip, is that of π to π_prox
    weight w   of each token's term, without gradient, of ρ = π_prox/π_gen:
               truncated (TIS)   min(ρ, C)
               masked (MIS)      ρ where c ≤ ρ ≤ C, else 0;  IcePop has c = .5 and C = 5 [S]

C is about 2 [S]. With one update for each set of sampled weights π_prox is π itself, so the ratio of the loss is 1 and its clip
is never active: ``scalerl_api.spec_warnings`` warns of the fields without effect.

``level`` is what ρ is of: a ``Token``; a ``Sequence``, the product over the completion, unbiased for it and of high variance;
``Geometric``, the |y|-th root of that product, whose spread does not grow with the length. verl has weights of the first two, and only
masks by the third, with weights of their own [S]. Forced tokens have no ratio.

:class:`OffPolicyMasked` is independent of the other two: it masks whole completions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch, is_token_local, sequence_sums
from scalerl_trainer.algo.mismatch import LOG_RATIO_LIMIT

Level = Literal["Token", "Sequence", "Geometric"]


@dataclass(frozen=True, slots=True)
class Corrected:
    """``loss`` with importance weights."""

    loss: Loss
    cap: float = 2.0
    """C, the largest importance weight."""
    above: Literal["truncate", "mask"] = "truncate"
    """Treatment of a token with a ratio above the cap: its weight is truncated to the cap, or 0."""
    level: Level = "Token"
    """What the ratio is of."""
    floor: float = 0.0
    """c: a token with a smaller ratio has weight 0, if those above the cap have; else there is no lower bound."""

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"the cap of importance weights must be positive, not {self.cap}")
        if not 0 <= self.floor < self.cap:
            raise ValueError(f"the floor of importance weights must be in [0, {self.cap}), not {self.floor}")
        if self.floor and self.above == "truncate":
            raise ValueError("a floor masks importance weights: it needs above='mask'")

    @property
    def token_local(self) -> bool:
        return self.level == "Token" and is_token_local(self.loss)

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, its sums, and the number of tokens with a ratio above the cap or below the floor (``corrected``).

        >>> import torch
        >>> from scalerl_trainer.algo.losses import Reinforce
        >>> one = torch.ones(1)
        >>> batch = TokenBatch(-one, -3 * one, one, one, torch.zeros(1, dtype=torch.long))
        >>> Corrected(Reinforce())(batch).loss.item(), Corrected(Reinforce(), above="mask")(batch).loss.item()
        (2.0, -0.0)
        """
        proximal_n = tokens.proximal_logprobs_n
        if proximal_n is None:
            proximal_n = tokens.logprobs_n.detach()
        difference_n = proximal_n - tokens.generator_logprobs_n
        if self.level != "Token":
            total_n, length_n = sequence_sums(difference_n, tokens.sequence_n)
            difference_n = (total_n if self.level == "Sequence" else total_n / length_n).to(proximal_n.dtype)
        ratio_n = difference_n.clamp(max=LOG_RATIO_LIMIT).exp()
        beyond_n = (ratio_n > self.cap) | (ratio_n < self.floor)
        weight_n = (
            ratio_n.clamp(max=self.cap) if self.above == "truncate" else ratio_n.masked_fill(beyond_n, 0.0)
        )
        output = self.loss(
            replace(tokens, generator_logprobs_n=proximal_n, weights_n=tokens.weights_n * weight_n)
        )
        return LossOutput(output.loss, {**output.sums, "corrected": beyond_n.sum()})


@dataclass(frozen=True, slots=True)
class OffPolicyMasked:
    """``loss`` without the tokens that an older policy sampled and that it would make less likely still.

    DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556 [P])::

        M_it = 0 where Â_it < 0 and 1/|y_i| Σ_t log π_gen(y_it) - log π(y_it) > δ;  else 1

    The mask is a factor of the advantage, so a KL penalty still counts, as in the paper.
    """

    loss: Loss
    max_kl: float
    """δ, nats per token. The paper has no value; TRL's documentation begins with .5 [S]."""

    def __post_init__(self) -> None:
        if not (self.max_kl > 0 and math.isfinite(self.max_kl)):
            raise ValueError(
                f"the limit of the off-policy mask must be positive and finite, not {self.max_kl}"
            )

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, its sums, and the number of masked tokens (``off_policy_masked``).

        >>> import torch
        >>> from scalerl_trainer.algo.losses import Reinforce
        >>> one = torch.ones(1)
        >>> batch = TokenBatch(-2 * one, -one, -one, one, torch.zeros(1, dtype=torch.long))
        >>> [abs(OffPolicyMasked(Reinforce(), limit)(batch).loss.item()) for limit in (0.5, 1.5)]
        [0.0, 2.0]
        """
        total_n, length_n = sequence_sums(
            tokens.generator_logprobs_n - tokens.logprobs_n.detach(), tokens.sequence_n
        )
        masked_n = (tokens.advantages_n < 0) & (total_n / length_n > self.max_kl)
        output = self.loss(replace(tokens, advantages_n=tokens.advantages_n.masked_fill(masked_n, 0.0)))
        return LossOutput(output.loss, {**output.sums, "off_policy_masked": masked_n.sum()})
