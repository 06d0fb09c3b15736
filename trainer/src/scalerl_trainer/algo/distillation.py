"""On-policy distillation: the student samples, and a teacher's log-probability of each of its tokens makes an advantage.

Per trainable token, with Â_i of the rewards, or 0 where those are ignored::

    A_it = Â_i - β (log π_gen(y_it) - log π_teacher(y_it))

The difference is an unbiased estimate of the reverse KL, KL(π_gen ‖ π_teacher), of the token after its prefix. On-policy,
with E[∇log π(y)] = 0::

    E[A ∇log π(y)] = -β ∇KL(π ‖ π_teacher)

so every policy-gradient loss that is given A lowers the KL token by token; what a token does to the KL of later ones is
left out (discount 0). Thinking Machines' "On-Policy Distillation" and its published code have the same sum, with β = 1 and
an importance ratio [S]. GKD (arXiv 2306.13649 [P]) also trains on the student's own samples, and has the divergence over the
whole vocabulary where this has one sample of it. Where policy and teacher agree, A is Â.

π_gen is the policy that sampled, so the teacher's part needs no second forward pass, and a loss's ratio and
``recipe.correction`` treat A as any advantage. ``recipe.distillation`` selects it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scalerl_trainer.algo.losses.base import Loss, LossOutput, TokenBatch
from scalerl_trainer.errors import BadBatchError

TEACHER_KL = "teacher_kl"
"""Name of the sum of the estimates."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """``loss`` with the teacher's part in each token's advantage. ``coefficient``: β; 0 is the loss itself."""

    loss: Loss
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not (self.coefficient >= 0 and math.isfinite(self.coefficient)):
            raise ValueError(
                f"the coefficient of the distillation must be at least 0 and finite, not {self.coefficient}"
            )

    def __call__(self, tokens: TokenBatch) -> LossOutput:
        """The loss, its sums, and the sum of the estimates of KL(π_gen ‖ π_teacher) (``teacher_kl``).

        Raises ``BadBatchError`` when the tokens have no log-probabilities of the teacher.

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
