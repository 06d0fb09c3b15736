"""On-policy distillation: advantages from a teacher's log-probabilities of the tokens that the student sampled.

The advantage of a trainable token, where Â_i is that of the rewards, or 0 if the recipe ignores them::

    A_it = Â_i - β (log π_gen(y_it) - log π_teacher(y_it))

The difference is an unbiased one-sample estimate of the reverse KL, KL(π_gen ‖ π_teacher), of the token given its prefix.
On-policy, with E[∇log π(y)] = 0::

    E[A ∇log π(y)] = -β ∇KL(π ‖ π_teacher)

so every policy-gradient loss with advantages A lowers the KL token by token; the effect of a token on the KL of later
tokens is ignored (discount 0). Thinking Machines' "On-Policy Distillation" and its published code have the same sum, with
β = 1 and an importance ratio [S]. GKD (arXiv 2306.13649 [P]) also trains on the student's own samples, but computes the
divergence over the whole vocabulary instead of from one sample. Where policy and teacher agree, A is Â.

Off-policy, with the loss's unclipped ratio π/π_gen or a correction's as the weight::

    E_{y~π_gen}[π/π_gen A ∇log π(y)] = -β (∇KL(π ‖ π_teacher) - ∇KL(π ‖ π_gen))

The second term is 0 at π = π_gen, and leads further away from an older policy; the published code has it too [S].

π_gen is the policy that sampled, so the teacher's term needs no second forward pass, and the loss's ratio and
``recipe.correction`` apply to A as to any advantage. ``recipe.distillation`` turns it on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch, is_token_local
from scalerl_trainer.errors import BadBatchError

TEACHER_KL = "teacher_kl"
"""Key of the sum of the KL estimates in ``LossOutput.sums``."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """``loss`` with the teacher's term added to each token's advantage."""

    loss: Loss
    coefficient: float = 1.0
    """β; 0 leaves the loss unchanged."""

    def __post_init__(self) -> None:
        if not (self.coefficient >= 0 and math.isfinite(self.coefficient)):
            raise ValueError(
                f"the coefficient of the distillation must be at least 0 and finite, not {self.coefficient}"
            )

    @property
    def token_local(self) -> bool:
        return is_token_local(self.loss)

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, its sums, and the sum of the estimates of KL(π_gen ‖ π_teacher), nats (``teacher_kl``).

        Raises ``BadBatchError`` if the tokens have no teacher log-probabilities.

        >>> import torch
        >>> from scalerl_trainer.algo.losses import Reinforce
        >>> one, index_n = torch.ones(1), torch.zeros(1, dtype=torch.long)
        >>> batch = TokenBatch(-one, -one, 2 * one, one, index_n, teacher_logprobs_n=-3 * one)
        >>> Distilled(Reinforce(), 0.5)(batch).loss.item()  # A = 2 - .5 · (-1 + 3) = 1; -(1 · -1)
        1.0
        """
        if tokens.teacher_logprobs_n is None:
            raise BadBatchError(
                "distillation needs the teacher's log-probability of each token, and this batch has none: give "
                "teacher_logprobs_n, or train without it"
            )
        kl_n = tokens.generator_logprobs_n - tokens.teacher_logprobs_n
        output = self.loss(replace(tokens, advantages_n=tokens.advantages_n - self.coefficient * kl_n))
        return LossOutput(output.loss, {**output.sums, TEACHER_KL: kl_n.sum()})
