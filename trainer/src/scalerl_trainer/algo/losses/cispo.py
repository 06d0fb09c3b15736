"""CISPO: REINFORCE weighted by a truncated importance ratio without gradient; no token is clipped.

ScaleRL (arXiv 2510.13786 [P])::

    J = E over prompts of (1/Σ_g|y_g|) Σ_i Σ_t sg(min(ρ_it, ε)) · Â_i · log π_train(y_it)
    ρ_it = π_train(y_it) / π_gen(y_it)

CISPO was introduced by MiniMax-M1 (arXiv 2506.13585 [P]) with clip(r, ·, 1 + ε_h). There is no lower clip here.
ε ∈ {4, 5, 8} made no difference in ScaleRL [P].

Unlike in a clipped surrogate, a truncated token keeps a gradient, with a bounded weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalerl_trainer.algo.losses.base import LossOutput, TokenBatch, weighted


@dataclass(frozen=True, slots=True)
class Cispo:
    """``ratio_cap``: ε, the largest importance ratio of a token."""

    token_local = True

    ratio_cap: float = 5.0

    def __post_init__(self) -> None:
        if not self.ratio_cap > 0:
            raise ValueError(f"CISPO's truncation must be positive, not {self.ratio_cap}")

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, and the number of tokens with a truncated ratio (``truncated``).

        >>> import torch
        >>> logprobs_n = torch.tensor([-1.0], requires_grad=True)
        >>> one = torch.ones(1)
        >>> batch = TokenBatch(logprobs_n, torch.tensor([-4.0]), 2 * one, one, torch.zeros(1, dtype=torch.long))
        >>> Cispo(5.0)(batch).loss.item()  # exp(3) is cut to 5; -(5 · 2 · -1)
        10.0
        """
        ratio_n = (tokens.logprobs_n.detach() - tokens.generator_logprobs_n).exp()
        loss = weighted(ratio_n.clamp(max=self.ratio_cap) * tokens.advantages_n * tokens.logprobs_n, tokens)
        return LossOutput(loss, {"truncated": (ratio_n > self.ratio_cap).sum()})
